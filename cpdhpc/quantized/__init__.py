"""Networks of integers only: batch norms without fractions, inference in NumPy, trained by torch."""

from .batchnorm import IntegerNorm as IntegerNorm
from .batchnorm import fold as fold
from .batchnorm import integer_norm as integer_norm
from .integers import IntegerNetwork as IntegerNetwork
from .integers import load as load
