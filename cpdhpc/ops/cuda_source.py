"""The CUDA kernels as one string, the same for CuPy and for tests without a GPU."""

from __future__ import annotations

import re

from ..shipped import folder

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

# What NumPy has already; CuPy has it too, but flushes subnormal numbers, or adds in another order.
ARITHMETIC = (
    "add_floats",
    "subtract_floats",
    "multiply_floats",
    "divide_floats",
    "leaf_sums",
    "multiply_runs",
    "divide_runs",
    "row_products",
    "column_products",
    "add_outer",
)


def cuda_source() -> str:
    """Return kernels/cuda_loops.cu with our own headers put in place of their #include lines.

    CuPy's cache of compiled kernels looks at the source alone: a header that is changed but
    only included would go unnoticed. #line keeps the compiler's messages right.
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

    return expand("cuda_loops.cu") + "\n"
