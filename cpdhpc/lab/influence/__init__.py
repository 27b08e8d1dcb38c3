"""Which training samples lowered or raised a loss: TracIn, from the weights that a run kept.

Source: Pruthi et al., Estimating training data influence by tracing gradient descent, NeurIPS 2020,
arXiv 2002.08484.
"""
