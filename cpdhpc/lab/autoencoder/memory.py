"""Memory of the large arrays of a layer."""

from __future__ import annotations

import ctypes
import mmap

import torch

LARGE = 2**21  # bytes of a large page of x86-64


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, not yet written, for whose memory Linux is asked to use large pages.

    A pass over filters then needs fewer translations of addresses. Without effect on a GPU, on
    other systems, and if the kernel has no large pages left.
    """
    if tensor.is_cpu and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - start
        if length >= LARGE:
            place = ctypes.c_void_p(start), ctypes.c_size_t(length)
            ctypes.CDLL(None).madvise(*place, mmap.MADV_HUGEPAGE)
    return tensor
