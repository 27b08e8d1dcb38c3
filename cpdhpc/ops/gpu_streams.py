"""What messages need of a GPU: events, and copies to and from pinned memory; nothing waits."""

from __future__ import annotations

from typing import Any

import cupy
import cupyx
import numpy as np

from .gpu_launch import current_device

__all__ = ["Event", "Streams", "current_device", "device_name", "to_device"]

Array = Any  # cupy.ndarray
Host = np.ndarray[Any, np.dtype[Any]]

DONE, NOT_READY = 0, 600  # what cudaEventQuery returns; anything else is an error


class Event:
    """The work that a stream has been given until now."""

    def __init__(self, stream: Any) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    def Test(self) -> bool:
        """Whether the work is done; raises CUDARuntimeError where it has failed.

        The name is that of MPI's requests, which are waited for in the same way. CuPy's own
        Event.done takes an error for work that goes on.
        """
        status = cupy.cuda.runtime.eventQuery(self._event.ptr)
        if status not in (DONE, NOT_READY):
            raise cupy.cuda.runtime.CUDARuntimeError(status)
        return bool(status == DONE)

    def before(self, stream: Any) -> None:
        """Let all that a stream is given from now on wait, on the GPU, for the work."""
        stream.wait_event(self._event)


class Streams:
    """The caller's stream and two for copies, down to the host and up again, of one GPU.

    Copies are ordered by events alone: these streams wait for no other, nor for the null stream.
    """

    def __init__(self) -> None:
        self._caller: Any = None
        self._down = cupy.cuda.Stream(non_blocking=True)
        self._up = cupy.cuda.Stream(non_blocking=True)

    def begin(self) -> bool:
        """Take CuPy's current stream as the caller's; return whether it was another before."""
        stream = cupy.cuda.get_current_stream()
        if self._caller is not None and self._caller.ptr == stream.ptr:
            return False
        self._caller = stream  # kept, so that no later stream can have the same address
        return True

    def mark(self) -> Event:
        """Return the event that all work given to the caller's stream so far is done."""
        return Event(self._caller)

    @staticmethod
    def pinned(size_bytes: int) -> Host:
        """Return page-locked memory, uint8[size_bytes]; CuPy keeps it when it is let go."""
        host: Host = cupyx.empty_pinned(size_bytes, np.uint8)
        return host

    def to_host(self, array: Array, after: Event) -> tuple[Host, Event]:
        """Start to copy array, uint8[n], after an event; return pinned uint8[n], and when."""
        host = self.pinned(array.size)
        after.before(self._down)
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        _copy(host.ctypes.data, array.data.ptr, array.size, kind, self._down)
        return host, Event(self._down)

    def to_device(self, host: Host, array: Array, after: Event) -> Event:
        """Start to copy pinned host, uint8[n], into array after an event; return when."""
        after.before(self._up)
        kind = cupy.cuda.runtime.memcpyHostToDevice
        _copy(array.data.ptr, host.ctypes.data, array.size, kind, self._up)
        return Event(self._up)


def _copy(to: int, source: int, size_bytes: int, kind: int, stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(to, source, size_bytes, kind, stream.ptr)


def device_name() -> str:
    """Return the name of CuPy's current GPU, "" where it finds none."""
    try:
        return cupy.cuda.runtime.getDeviceProperties(current_device())["name"].decode()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ""


def to_device(x: Any) -> Array:
    """Return a NumPy array's copy on the GPU, ready for any stream."""
    copy = cupy.asarray(x)
    cupy.cuda.get_current_stream().synchronize()
    return copy
