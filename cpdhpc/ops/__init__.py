"""Array operations: one set of functions, three implementations (reference, cpu, gpu)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from .common import kernel_threads as kernel_threads
from .common import omp_num_threads as omp_num_threads
from .common import set_kernel_threads as set_kernel_threads


def type_name(x: Any) -> str:
    """Return the name of x's type, with that of its library: numpy.ndarray is not cupy.ndarray."""
    name, library = type(x).__name__, type(x).__module__.partition(".")[0]
    return f"{library}.{name}" if library in ("numpy", "cupy", "torch") else name


def on_gpu(x: Any) -> bool:
    """Whether x, an array that backend_of knows, lies in GPU memory."""
    return not isinstance(x, np.ndarray)


def to_host(x: Any) -> Any:
    """Return x as a NumPy array: x itself, or a copy of what the current stream makes of it.

    Raises TimeoutError if the GPU does not finish it in time, as gpu_runtime.wait.
    """
    if not on_gpu(x):
        return x
    from . import gpu_runtime

    return gpu_runtime.to_host(x)


def is_of_gpu(error: Exception) -> bool:
    """Whether an error is CUDA's, or of a wait for it: an earlier call may have caused it."""
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, TimeoutError) or module in ("cupy", "cupy_backends")


def placed(x: Any, like: Any) -> Any:
    """Return array x on the device of like: x itself, or a copy to or from the GPU."""
    if on_gpu(x) == on_gpu(like):
        return x
    return backend_of(like).asarray(x) if on_gpu(like) else to_host(x)


MISREAD: dict[type[Any], str] = {  # arrays that mean more than their memory -> advice
    np.ma.MaskedArray: "its mask would be ignored: give x.filled(0), or x.data",
    np.matrix: "it stays of two dimensions: give np.asarray(x)",
}


def misread(x: Any) -> str:
    """Return advice about an array that means more than its memory, "" for others.

    Other subclasses of numpy.ndarray, as memmap and recarray, are used as plain arrays.
    """
    if type(x) is np.ndarray:
        return ""
    return next((advice for known, advice in MISREAD.items() if isinstance(x, known)), "")


def backend_of(x: Any) -> ModuleType:
    """Return the module whose operations work on x: cpu for NumPy arrays, gpu for CuPy arrays.

    Raises TypeError for anything else.
    """
    if isinstance(x, np.ndarray):
        from . import cpu

        return cpu
    if type(x).__module__.partition(".")[0] == "cupy":
        from . import gpu

        return gpu
    raise TypeError(f"ops: {type_name(x)}: known are numpy.ndarray and cupy.ndarray")
