"""Distributed deep learning over MPI with gradients of few bits."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {  # public name -> the module that has it, imported when first asked for
    "Cast": "cpdhpc.formats",
    "FloatFormat": "cpdhpc.formats",
    "NonFiniteGradient": "cpdhpc.comm",
    "World": "cpdhpc.comm",
    "allreduce": "cpdhpc.comm",
    "decode": "cpdhpc.arrays",
    "encode": "cpdhpc.arrays",
    "pack": "cpdhpc.arrays",
    "parse_format": "cpdhpc.formats",
    "quantize": "cpdhpc.arrays",
    "simulate": "cpdhpc.comm",
    "unpack": "cpdhpc.arrays",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
