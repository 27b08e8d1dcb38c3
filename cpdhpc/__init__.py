"""Distributed deep learning over MPI with gradients of few bits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import train as train
    from .arrays import decode as decode
    from .arrays import encode as encode
    from .arrays import pack as pack
    from .arrays import quantize as quantize
    from .arrays import unpack as unpack
    from .comm import NonFiniteGradient as NonFiniteGradient
    from .comm import RankFailure as RankFailure
    from .comm import World as World
    from .comm.call import allreduce as allreduce
    from .comm.simulate import simulate as simulate
    from .formats import Cast as Cast
    from .formats import FloatFormat as FloatFormat
    from .formats import parse_format as parse_format

__version__ = "0.1.0"

_EXPORTS = {  # public name -> the module that has it, imported when first asked for
    "Cast": "cpdhpc.formats",
    "FloatFormat": "cpdhpc.formats",
    "NonFiniteGradient": "cpdhpc.comm",
    "RankFailure": "cpdhpc.comm",
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
    if name == "train":  # cpdhpc.train.GradientReducer without a further import
        return import_module("cpdhpc.train")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
