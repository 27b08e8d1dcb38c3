"""Networks of integers only: trained by torch, exported exactly, inference in NumPy."""

from .integers import IntegerNetwork as IntegerNetwork
from .integers import IntegerNorm as IntegerNorm
from .integers import fold as fold
from .integers import integer_norm as integer_norm
from .integers import load as load

__all__ = ["IntegerNetwork", "IntegerNorm", "fold", "integer_norm", "load"]
