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
    from .collectives.allreduce import Allreduce as Allreduce
    from .collectives.allreduce import allreduce as allreduce
    from .collectives.allreduce import simulate as simulate
    from .collectives.checks import NonFiniteGradient as NonFiniteGradient
    from .collectives.recorded import empty_shared as empty_shared
    from .formats import Cast as Cast
    from .formats import FloatFormat as FloatFormat
    from .formats import parse_format as parse_format
    from .ops import kernel_threads as kernel_threads
    from .ops import set_kernel_threads as set_kernel_threads
    from .world.gpu_messages import use_gpu as use_gpu
    from .world.mpi import World as World
    from .world.ranks import Loopback as Loopback
    from .world.ranks import RankFailure as RankFailure

__version__ = "0.2.0"

_EXPORTS = {  # public name -> the module that has it, imported when first asked for
    "Allreduce": "cpdhpc.collectives.allreduce",
    "Cast": "cpdhpc.formats",
    "FloatFormat": "cpdhpc.formats",
    "Loopback": "cpdhpc.world.ranks",
    "NonFiniteGradient": "cpdhpc.collectives.checks",
    "RankFailure": "cpdhpc.world.ranks",
    "World": "cpdhpc.world.mpi",
    "allreduce": "cpdhpc.collectives.allreduce",
    "decode": "cpdhpc.arrays",
    "empty_shared": "cpdhpc.collectives.recorded",
    "encode": "cpdhpc.arrays",
    "kernel_threads": "cpdhpc.ops",
    "pack": "cpdhpc.arrays",
    "parse_format": "cpdhpc.formats",
    "quantize": "cpdhpc.arrays",
    "set_kernel_threads": "cpdhpc.ops",
    "simulate": "cpdhpc.collectives.allreduce",
    "unpack": "cpdhpc.arrays",
    "use_gpu": "cpdhpc.world.gpu_messages",
}


def __getattr__(name: str) -> Any:
    if name == "train":  # cpdhpc.train.GradientReducer without a further import
        return import_module("cpdhpc.train")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
