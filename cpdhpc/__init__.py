"""Distributed deep learning over MPI with gradients of few bits.

Ranks:
    World       all processes of mpirun; Loopback is one process with any number of ranks
    use_gpu     take the GPU of this process; RankFailure is raised if another rank is lost

All-reduces of float32 arrays, in any format, with the same bits on all ranks:
    allreduce   the sum or mean of all ranks' arrays; Allreduce keeps its choices for many calls
    simulate    the result of allreduce for many ranks, in one process without MPI
    empty_shared    an array in shared memory of the node, which all-reduces need not copy
    Collective  one of the following with its choices kept for many calls; run and prepare
    reduce_scatter, all_gather, all_to_all, broadcast, reduce, gather, scatter
                the other collectives, with the same wires; for any dtype if nothing is rounded
    NonFiniteGradient   raised on all ranks if a gradient holds NaN or infinity

Number formats, on CPU and GPU:
    quantize    round float32 to a format, kept as float32
    encode, decode      values as codes of a format, and back
    pack, unpack        codes as bits without gaps, and back
    pack_blocks, unpack_blocks   mxfp8, nvfp4 and so on: elements and scales, as in other libraries
    parse_format        a FloatFormat or TableFormat from its name; Cast is a rounding to it
    kernel_threads, set_kernel_threads      the number of threads that process large arrays

Modules, loaded on first use:
    cpdhpc.compress     compressors of gradients: LowBit, PowerSgd, TopK, ...
    cpdhpc.darray       distributed arrays, their windows with halos, and the exchange of these
    cpdhpc.formats      the formats themselves
    cpdhpc.torch        GradientReducer, ddp_hook, optimisers, split images, rounded layers

python -m cpdhpc --help shows the commands, python -m cpdhpc examples DIR writes all pages.
"""

from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import compress as compress
    from . import darray as darray
    from . import formats as formats
    from . import torch as torch
    from .arrays import decode as decode
    from .arrays import encode as encode
    from .arrays import pack as pack
    from .arrays import pack_blocks as pack_blocks
    from .arrays import quantize as quantize
    from .arrays import unpack as unpack
    from .arrays import unpack_blocks as unpack_blocks
    from .collectives.allreduce import Allreduce as Allreduce
    from .collectives.allreduce import allreduce as allreduce
    from .collectives.allreduce import simulate as simulate
    from .collectives.checks import NonFiniteGradient as NonFiniteGradient
    from .collectives.collective import Collective as Collective
    from .collectives.packed import all_gather as all_gather
    from .collectives.packed import all_to_all as all_to_all
    from .collectives.packed import broadcast as broadcast
    from .collectives.packed import gather as gather
    from .collectives.packed import reduce as reduce
    from .collectives.packed import reduce_scatter as reduce_scatter
    from .collectives.packed import scatter as scatter
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
else:
    from .lazy import lazily as _lazily

    __getattr__, __dir__ = _lazily(
        __name__,
        {
            "Allreduce": "collectives.allreduce",
            "Cast": "formats",
            "Collective": "collectives.collective",
            "FloatFormat": "formats",
            "Loopback": "world.ranks",
            "NonFiniteGradient": "collectives.checks",
            "RankFailure": "world.ranks",
            "World": "world.mpi",
            "allreduce": "collectives.allreduce",
            **dict.fromkeys(
                (
                    "all_gather",
                    "all_to_all",
                    "broadcast",
                    "gather",
                    "reduce",
                    "reduce_scatter",
                    "scatter",
                ),
                "collectives.packed",
            ),
            "compress": "",
            "darray": "",
            "decode": "arrays",
            "empty_shared": "collectives.recorded",
            "encode": "arrays",
            "formats": "",
            "kernel_threads": "ops",
            "pack": "arrays",
            "pack_blocks": "arrays",
            "parse_format": "formats",
            "quantize": "arrays",
            "set_kernel_threads": "ops",
            "simulate": "collectives.allreduce",
            "torch": "",
            **dict.fromkeys(
                ("precision", "quantized", "split_images", "train"), ""
            ),  # former names
            "unpack": "arrays",
            "unpack_blocks": "arrays",
            "use_gpu": "world.gpu_messages",
        },
    )

__all__ = [
    "Allreduce",
    "Cast",
    "Collective",
    "FloatFormat",
    "Loopback",
    "NonFiniteGradient",
    "RankFailure",
    "World",
    "all_gather",
    "all_to_all",
    "allreduce",
    "broadcast",
    "compress",
    "darray",
    "decode",
    "empty_shared",
    "encode",
    "formats",
    "gather",
    "kernel_threads",
    "pack",
    "pack_blocks",
    "parse_format",
    "quantize",
    "reduce",
    "reduce_scatter",
    "scatter",
    "set_kernel_threads",
    "simulate",
    "torch",
    "unpack",
    "unpack_blocks",
    "use_gpu",
]
