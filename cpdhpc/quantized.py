"""The former name of cpdhpc.torch.quantized, for one version."""

from .lazy import formerly

__getattr__, __dir__ = formerly(__name__, "cpdhpc.torch.quantized")
