"""The source of the CUDA kernels as one string, for CuPy and for tests without a GPU."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..formats import Cast
from ..shipped import folder
from .cpu import CAST_NUMBERS, cast_numbers

# -fmad=false: a fused multiply-add would round differently from the CPU.
OPTIONS = ("-std=c++17", "-fmad=false", "-default-device")

KERNELS = (
    "encode",
    "decode",
    "pack",
    "unpack",
    "amax_tiles",
    "encode_tiles",
    "decode_tiles",
    "decode_add_tiles",
    "decode_add_encode_tiles",
    "add_integers_tiles",
    "add_encode_integers_tiles",
    "decode_integers_tiles",
    "pack_trits",
    "unpack_trits",
    "mark_above",
    "count_bits",
    "unpack_bitmap",
    "pack_bitmap",
    "pack_stream",
    "unpack_stream",
    "count_digits",
    "gather",
    "scatter_add",
    "clear",
    "matmul",
)

# Operations of NumPy. CuPy's flush subnormal numbers, or add in another order.
ARITHMETIC = (
    "add_floats",
    "subtract_floats",
    "multiply_floats",
    "divide_floats",
    "leaf_sums",
    "tree_sums",
    "join_sums",
    "multiply_runs",
    "divide_runs",
    "row_products",
    "column_products",
    "outer",
    "accumulate",
    "cut_runs",
    "run_maxima",
    "chunk_leaders",
    "bin_leaders",
    "pack_signs",
    "add_signs",
    "subtract_signs",
    "move_boxes",
    "amax_two_scales",
    "encode_two_scales",
    "decode_two_scales",
)


class Fixed(NamedTuple):
    """The constants that kernels of the codec are compiled for."""

    cast: Cast
    blocks: int  # of a lane's column; 0: a tile has one shift
    fit: bool | None = None  # whether shifts are chosen; None for the kernels that decode only
    counted: bool = False


def codec_source(fixed: Fixed) -> str:
    """Return the kernels of the codec for one cast: to encode if fit is given, else to decode."""
    *numbers, table = cast_numbers(fixed.cast)[:CAST_NUMBERS]
    constants = {
        "CAST": ", ".join(map(str, numbers)),
        "TABLE": int(table != 0),
        "BLOCKS": fixed.blocks,
    }
    if fixed.fit is not None:
        constants |= {"FIT": int(fixed.fit), "COUNTED": int(fixed.counted)}
    lines = [f"#define CPD_FIXED_{name} {value}" for name, value in constants.items()]
    unused = "#pragma nv_diag_suppress 177"  # functions that other kernels call
    return "\n".join((*lines, unused, cuda_source("cuda_codec.h")))


def cuda_source(root: str = "cuda_loops.cu") -> str:
    """Return a file of kernels/ with our own headers in place of their #include lines.

    CuPy's cache of compiled kernels compares only the source, not headers that it includes. #line
    keeps file names and line numbers of the compiler's messages right.
    """
    kernels = folder("kernels")
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = [f'#line 1 "kernels/{name}"']
        for number, line in enumerate((kernels / name).read_text().splitlines(), 1):
            include = re.match(r'#include "(.+)"', line)
            if include:
                lines += [expand(include[1]), f'#line {number + 1} "kernels/{name}"']
            else:
                lines.append(line)
        return "\n".join(lines)

    return expand(root) + "\n"
