"""pytest -p unpooled_cupy: each array of CuPy has memory of its own, so memcheck sees its ends."""

import cupy

cupy.cuda.set_allocator(None)  # CuPy's pool cuts arrays out of large pieces
cupy.cuda.set_pinned_memory_allocator(None)
