"""Networks of integers only: trained by torch, exported exactly, inference in NumPy."""

from .integers import IntegerNetwork, IntegerNorm, fold, integer_norm, load
