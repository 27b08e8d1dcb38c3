"""Layer-parallel training: a network cut into stages that train at the same time.

Source: Sun et al.: Penalty and augmented Lagrangian methods for layer-parallel training of
residual networks, arXiv 2009.01462.
"""
