"""Networks of integers only: trained by torch, exported exactly, inference in NumPy."""

from .batchnorm import IntegerNorm as IntegerNorm
from .batchnorm import fold as fold
from .batchnorm import integer_norm as integer_norm
from .integers import IntegerNetwork as IntegerNetwork
from .integers import load as load
