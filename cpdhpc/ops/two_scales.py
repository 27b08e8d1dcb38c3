"""NVFP4: blocks of 16 elements e2m1 with a scale e4m3 each, and a float32 for all of them.

The specification, in NumPy; the kernels of kernels/cuda_two_scales.h have its bits. Each operation
on a value is one of float32, rounded once to nearest. encode, decode: those of ops.reference, or of
ops.cpu with the same bits.

With amax the largest finite magnitude of all and b that of a block:

    spread = min(448 * 6 / amax, the largest float32); 1 if amax is 0
    scale  = 1 / spread                              the float32 of all
    s      = e4m3fn(min(b / 6 * spread, 448))        the block's
    code   = e2m1fn(x * min(1 / (s * scale), the largest float32)), which saturates
    number = e2m1 * (s * scale)

If s is rounded down, the largest of a block is more than 6 once scaled, at most 6.375 if s is a
normal e4m3, and becomes 6. A block whose s is 0 becomes 0.
Source: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149, appendix B, whose
s_enc is spread, s_dec scale and s_dec,b,e4m3 s, rounded to nearest even. The limits, and an amax of
0, are as in Transformer Engine (common/cast/nvfp4/core_nvfp4.cuh, custom_recipes/
quantization_ref_nvfp4.py). Its newer versions multiply b by spread * (1 / 6): s is then a neighbour
if float32 rounds across a tie, in 2 of 10,000 blocks of normal bfloat16 values. Neither source
defines the result for NaN and infinity: here a block with one has the scale NaN and elements 0.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..formats import NVFP4_BLOCK, Cast, FloatFormat, nvfp4_blocks
from ..randomness import Key
from .common import NONFINITE_BITS

Array = np.ndarray[Any, np.dtype[Any]]

SCALE = Cast(FloatFormat(4, 3, "nan"), overflow="saturate")
ELEMENT = FloatFormat(2, 1, "none")
MOST = np.float32(np.finfo(np.float32).max)
LARGEST, LARGEST_SCALE = np.float32(6), np.float32(448)


def spread_of(amax: np.float32) -> np.float32:
    """Return the factor that scales the largest magnitude of all to NVFP4's largest, 2,688."""
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.minimum(LARGEST * LARGEST_SCALE / amax, MOST)


def encode(
    ops: ModuleType,
    x: Array,
    cast: Cast,
    words: Array,
    scales: Array,
    scale: Array,
    key: Key = (0, 0),
    offset: int = 0,
) -> None:
    """Write x, float32[n], as scales and elements, two in a byte, the first in its lower half.

    cast: of the elements, to e2m1fn; element i draws the random bits of offset + i
    words: uint8[8 b], scales: uint8[b], codes of e4m3fn, b blocks; scale: float32[1]; all written.
        The last block is filled up with zeros
    """
    blocks = np.zeros((nvfp4_blocks(x.size), NVFP4_BLOCK), np.float32)
    blocks.reshape(-1)[: x.size] = x
    bits = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(1, initial=0)
    is_marked = bits >= NONFINITE_BITS
    largest = np.where(is_marked, 0, bits).astype(np.uint32).view(np.float32)
    spread = spread_of(largest.max(initial=0))
    scale[0] = np.float32(1) / spread
    with np.errstate(over="ignore", divide="ignore"):
        codes = ops.encode(np.minimum(largest / LARGEST * spread, LARGEST_SCALE), SCALE)
        factors = np.minimum(1 / (ops.decode(codes, SCALE.fmt) * scale[0]), MOST)
        blocks[is_marked] = 0
        scaled = (blocks * factors[:, None]).reshape(-1)
    scales[:] = np.where(is_marked, SCALE.fmt.nan_code, codes)
    elements = ops.encode(scaled, cast, 0, key, offset)
    words[:] = elements[::2] | elements[1::2] << np.uint32(4)


def decode(
    ops: ModuleType,
    words: Array,
    scales: Array,
    scale: Array,
    out: Array,
    more: Array | None = None,
) -> int:
    """Write the numbers, plus more if given, into out, float32[n]; return how many are not finite.

    words, scales, scale: as of encode
    """
    both = np.stack([words & np.uint8(15), words >> np.uint8(4)], axis=-1)
    elements = ops.decode(both.reshape(-1).astype(np.uint32), ELEMENT)
    with np.errstate(over="ignore", invalid="ignore"):
        factors = ops.decode(scales.astype(np.uint32), SCALE.fmt) * scale[0]
        numbers = (elements.reshape(-1, NVFP4_BLOCK) * factors[:, None]).reshape(-1)[: out.size]
        np.copyto(out, numbers) if more is None else np.add(more, numbers, out=out)
    return int(out.size - np.isfinite(out).sum())
