"""Call lists: kernels and messages written down once, run again without the interpreter.

kernels/cpu_call_list_calls.h and cpu_board_calls.h say what each of the compiled functions does. A
run that waits goes on by resume_list, and a board by meet_again: as MPI's requests are tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import _cpu
from .._cpu import (
    absent_from,
    add_start,
    add_test,
    add_word,
    begin_segment,
    end_list,
    make_board,
    make_list,
    meet,
    meet_again,
    resume_list,
    round_trip,
    run_agreed,
    run_list,
    waits_of,
)
from . import cpu
from .payloads import Array

__all__ = [
    "ABSENT",
    "FEW_LOOKS",
    "LOOKS",
    "OVERLAPS",
    "STRANGE",
    "UNLIKE",
    "WAITING",
    "Kernels",
    "absent_from",
    "add_start",
    "add_test",
    "add_word",
    "begin_segment",
    "end_list",
    "give_handle",
    "handle_of",
    "make_board",
    "make_list",
    "meet",
    "meet_again",
    "resume_list",
    "round_trip",
    "run_agreed",
    "run_list",
    "waits_of",
]

WAITING, OVERLAPS, UNLIKE, ABSENT, STRANGE = -1, -2, -3, -4, -5  # as cpu_call_list_calls.h
LOOKS, FEW_LOOKS = 20_000, 100  # in vain, before the world waits; and each time that it looks


_library: list[ctypes.CDLL] = []  # of MPI, once compiled code calls it


def handle_of(mpi: Any, request: Any) -> int:
    """Return the address of the handle of a request, for add_start and add_test.

    mpi: the module mpi4py.MPI; the library is the one that it has loaded
    """
    if not _library:
        _library.append(ctypes.CDLL(mpi.__file__))
        calls = _library[0].MPI_Start, _library[0].MPI_Test
        _cpu.use_library(*(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls))
    return int(mpi._addressof(request))


def give_handle(mpi: Any, request: Any, other: Any) -> None:
    """Let a request that is freed be the other one, whose object is not to be used any more."""
    ctypes.memmove(mpi._addressof(request), mpi._addressof(other), mpi._sizeof(other))


class Kernels:
    """Stands for the kernels of a wire, and has what is asked of them written down.

    calls: of make_list, with a segment; out: its result, where what is not finite counts
    streams: whether copies to out go past the caches, so that its lines are not read
    """

    def __init__(self, calls: Any, out: Array, streams: bool) -> None:
        self._list, self._out, self._streams = calls, out, streams

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self._write, getattr(cpu, name))

    def add(self, a: Array, b: Array, out: Array) -> int:
        """Add float32 values."""
        return self._write(_cpu.add, 1, a, b, out)

    def subtract(self, a: Array, b: Array, out: Array) -> int:
        """Write a - b, as a + b / -1, which has the same bits; out is not a."""
        self.divide(b, -1.0, out)
        return self.add(a, out, out)

    def copy(self, out: Array, x: Array) -> int:
        """Copy values or bytes."""
        if self._streams and np.may_share_memory(out, self._out):
            return self.copy_past_caches(out, x)
        return self._write(_cpu.copy, 1, x, out)

    def copy_past_caches(self, out: Array, x: Array) -> int:
        """Copy values or bytes to memory, for whoever has no cache in common with this core."""
        return self._write(_cpu.copy_past_caches, 1, x, out)

    def divide(self, x: Array, divisor: float, out: Array) -> int:
        """Divide float32 values."""
        return self._write(_cpu.divide, 1, x, divisor, out)

    def _write(self, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> int:
        """Write down a call, unless it is about nothing; return 0, as nothing is found yet."""
        if all(each.size for each in arguments if isinstance(each, np.ndarray)):
            out = options.get("out")
            _cpu.record(self._list, out is not None and np.may_share_memory(out, self._out))
            try:
                kernel(*arguments, **options)
            finally:
                _cpu.record(None, False)
        return 0
