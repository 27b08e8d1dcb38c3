"""What exchange and accumulate copy and add, and what they need of each kind of array.

EXCHANGE and ACCUMULATE, at the end, are the only description. It is a list of boxes that are
written, each with the arrays whose sum it becomes. do works through the list by slices; rows_of in
compiled.py and tables in device.py translate it. These give it ghosts, arrays of which only the
place and the strides are looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add, attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import misread, to_host, type_name
from .layout import Box
from .windows import Message, Piece, RankPieces

Array = Any  # of any backend
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.generic]  # says where an array lies; may not be read


class ArrayBackend:
    """What is needed of arrays besides operators: as NumPy has it; others say what differs.

    like: an array of the backend, dtype and device wanted
    """

    def dtype(self, x: Array) -> str:
        """Return the name of the dtype, as float32: the same for all backends."""
        return str(x.dtype.name)

    def itemsize(self, x: Array) -> int:
        """Return the bytes of an element."""
        return int(x.dtype.itemsize)

    def check(self, what: str, x: Array) -> None:
        """Raise TypeError where an array of the backend cannot be exchanged."""
        if x.dtype.hasobject:
            raise TypeError(f"{what} is of {x.dtype}: objects have no bytes that could travel")
        if not x.dtype.isnative:
            raise TypeError(f"{what} is of {x.dtype}: must have this machine's order of bytes")

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        """Return a new array."""
        return np.empty(shape, like.dtype)

    def plain(self, x: Array) -> npt.NDArray[Any] | None:
        """Return the same memory as a NumPy array, maybe of integers; None if it is on a GPU."""
        if x.dtype.kind in "biufc":
            return np.asarray(x)
        return np.asarray(x).view(f"V{x.dtype.itemsize}")

    def addresses(self, x: Array) -> Addresses:
        """Return where the elements lie in a GPU's memory."""
        raise AssertionError("arrays of the host lie in no GPU's memory")

    def device(self, x: Array) -> int:
        """Return the number of the GPU where they are."""
        raise AssertionError("arrays of the host have no GPU")

    def in_stream(self, x: Array) -> AbstractContextManager[None]:
        """Let CuPy work on x's GPU, in the current stream of x's library."""
        return nullcontext()

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return the values as a NumPy array. Raises TypeError where NumPy has no such dtype."""
        return np.asarray(x)

    def element(self, like: Array, value: complex) -> Bytes:
        """Return the bytes of a value as an element. Raises where the dtype does not take it."""
        one = np.empty(1, like.dtype)
        one[...] = value
        return one.view(np.uint8)

    def flip(self, x: Array, axes: Sequence[int]) -> Array:
        """Return x backwards along some axes."""
        return x[tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim))]

    def stage(self, like: Array, memory: Bytes) -> Array:
        """Return memory as a flat array of elements."""
        return memory.view(like.dtype)


class _Cupy(ArrayBackend):
    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        return np.empty_like(like, shape=tuple(shape))

    def plain(self, x: Array) -> None:
        return None

    def addresses(self, x: Array) -> Addresses:
        return addressed(x.data.ptr, x.shape, x.dtype.itemsize, x.strides)

    def device(self, x: Array) -> int:
        return int(x.device.id)

    def check(self, what: str, x: Array) -> None:
        from ..ops import gpu_runtime

        gpu_runtime.check_device(what, x)

    def host(self, x: Array) -> npt.NDArray[Any]:
        return np.asarray(to_host(x))


class _Torch(ArrayBackend):
    def dtype(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    def itemsize(self, x: Array) -> int:
        return int(x.element_size())

    def check(self, what: str, x: Array) -> None:
        torch = sys.modules["torch"]
        if x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{what} requires a gradient, which would be lost: use cpdhpc.torch.autograd"
            )
        if x.layout != torch.strided or x.is_conj() or x.is_neg():
            raise TypeError(
                f"{what} is {x.layout}, or a view that only conjugates or negates: must be strided "
                "and resolved"
            )

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        """Its elements follow one another as like's do, so that both are read along."""
        if len(shape) != like.ndim:
            return like.new_empty(tuple(shape))
        order = sorted(range(like.ndim), key=lambda axis: -like.stride(axis))
        made = like.new_empty([shape[axis] for axis in order])
        return made.permute([order.index(axis) for axis in range(like.ndim)])

    def plain(self, x: Array) -> npt.NDArray[Any] | None:
        torch = sys.modules["torch"]
        same = x.detach()
        return np.asarray((same.view(torch.int16) if x.dtype == torch.bfloat16 else same).numpy())

    def host(self, x: Array) -> npt.NDArray[Any]:
        from ..ops.tensors import values_of

        return values_of(x)

    def element(self, like: Array, value: complex) -> Bytes:
        torch = sys.modules["torch"]
        if like.dtype != torch.bfloat16:
            return super().element(np.empty(0, self.dtype(like)), value)
        return np.asarray(torch.full((1,), value, dtype=like.dtype).view(torch.uint8).numpy())

    def flip(self, x: Array, axes: Sequence[int]) -> Array:
        return x.flip(tuple(axes)) if axes else x

    def stage(self, like: Array, memory: Bytes) -> Array:
        return sys.modules["torch"].from_numpy(memory).view(like.dtype)


class _TorchGpu(_Torch):
    def plain(self, x: Array) -> None:
        return None

    def addresses(self, x: Array) -> Addresses:
        size_bytes = self.itemsize(x)
        strides = [n * size_bytes for n in x.stride()]
        return addressed(x.data_ptr(), x.shape, size_bytes, strides)

    def device(self, x: Array) -> int:
        return int(x.device.index)

    def in_stream(self, x: Array) -> AbstractContextManager[None]:
        from ..ops.tensors import in_stream

        return in_stream(x.device)


def addressed(
    address: int, shape: Sequence[int], itemsize: int, strides: Sequence[int] | None = None
) -> Addresses:
    """Return an array that lies at an address of any memory. strides: None for C's order."""
    interface = {
        "shape": tuple(shape), "typestr": f"|V{itemsize}", "data": (address, False),
        "strides": None if strides is None else tuple(strides), "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


NUMPY, CUPY, TORCH, TORCH_GPU = ArrayBackend(), _Cupy(), _Torch(), _TorchGpu()


def array_backend(what: str, x: Array) -> ArrayBackend:
    """Return the backend of an array. Raises TypeError, naming what, for anything else."""
    if isinstance(x, np.ndarray):
        if advice := misread(x):
            raise TypeError(f"{what} is {type_name(x)}: {advice}")
        return NUMPY
    module = type(x).__module__.partition(".")[0]
    if module == "cupy" and hasattr(x, "dtype"):
        return CUPY
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return TORCH if x.device.type == "cpu" else TORCH_GPU
    raise TypeError(
        f"{what} is {type_name(x)}: known are arrays of NumPy and CuPy and torch tensors"
    )


class Copy(NamedTuple):
    """A box that is written: it becomes the sum of the terms, or if it adds, is raised by that.

    box: of the cells that the rank owns or of its window; in a message: of the owner's cells
    terms: arrays of the target's shape, or of 1 along axes on which all cells get the same
    """

    box: Box
    target: Array
    terms: Sequence[Array]
    adds: bool = False


class Frame(NamedTuple):
    """A rank's pieces and its two arrays, on the owned box and on the window.

    elements: arrays of one element: what each fill writes, or zero, with which sums begin
    """

    pieces: RankPieces
    backend: ArrayBackend
    owned: Array
    window: Array
    elements: Sequence[Array]

    def of_owned(self, box: Box) -> Array:
        """Return a box of the array on the owned box."""
        return self.owned[box.slices(self.pieces.owned.start)]

    def of_window(self, box: Box) -> Array:
        """Return a box of the array on the window."""
        if not self.pieces.halo_only:
            return self.window[box.slices(self.pieces.window.start)]
        start, trail = 0, tuple(self.window.shape[1:])
        for part in self.pieces.parts:
            if part.contains(box):
                values = self.window[start : start + part.size].reshape(part.shape + trail)
                return values[box.slices(part.start)]
            start += part.size
        raise AssertionError("boxes are of parts")

    def turned(self, values: Array, piece: Piece) -> Array:
        """Return values backwards along the axes that a piece shows so."""
        return self.backend.flip(values, [i for i, step in enumerate(piece.steps) if step < 0])

    def gathered(self, piece: Piece) -> list[Array]:
        """Return the parts of the window that each show all of a piece's source, in order."""
        values = self.turned(self.of_window(piece.target), piece)
        return [values[place] for place in piece.repeats()]


def parts(frame: Frame, message: Message, values: Array) -> Iterator[tuple[Piece, Array]]:
    """Yield pieces and the part of a message that each takes, in the shape of its source."""
    trail, start = tuple(frame.owned.shape[frame.pieces.owned.ndim :]), 0
    for piece in message.pieces:
        shape = piece.source.shape + trail
        stop = start + prod(shape)
        yield piece, values[start:stop].reshape(shape)
        start = stop


def pack_cells(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield the owned cells that another rank's window shows, into a message."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.source, part, [frame.of_owned(piece.source)])


def unpack_cells(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield a message's cells, to where they show in the window."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.target, frame.of_window(piece.target), [frame.turned(part, piece)])


def show_own(frame: Frame) -> Iterator[Copy]:
    """Yield what fills the window's cells that no one owns, and what shows the rank's own."""
    for fill, element in zip(frame.pieces.fills, frame.elements, strict=True):
        yield Copy(fill.target, frame.of_window(fill.target), [element])
    for piece in frame.pieces.local:
        shown = frame.turned(frame.of_owned(piece.source), piece)
        yield Copy(piece.target, frame.of_window(piece.target), [shown])


def pack_sums(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield the sums of the window's cells that show another rank's, into a message."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.source, part, frame.gathered(piece))


def add_sums(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield what adds a message to the owned cells."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.source, frame.of_owned(piece.source), [part], adds=True)


def sum_own(frame: Frame) -> Iterator[Copy]:
    """Yield what begins sums: the window's own cell where it shows, else zero; then mirrors."""
    (zero,) = frame.elements
    for box in frame.pieces.uncovered:
        yield Copy(box, frame.of_owned(box), [zero])
    for piece in sorted(frame.pieces.local, key=lambda piece: not piece.is_itself):
        own, shown = frame.of_owned(piece.source), frame.gathered(piece)
        yield Copy(piece.source, own, shown, adds=not piece.is_itself)


def do(copies: Iterable[Copy]) -> None:
    """Write the boxes by slices."""
    for _, target, terms, adds in copies:
        total = reduce(add, terms)
        target[...] = target + total if adds else total


@dataclass(frozen=True)
class Operation:
    """An exchange or its transpose.

    sent, received: the messages of a rank; pack, unpack: what is written for one of each
    own: what is written before, without messages
    is_copy: whether cells travel and arrive as they are, from the owned box to the window
    """

    name: str
    sent: Callable[[RankPieces], Sequence[Message]]
    received: Callable[[RankPieces], Sequence[Message]]
    pack: Callable[[Frame, Message, Array], Iterable[Copy]]
    unpack: Callable[[Frame, Message, Array], Iterable[Copy]]
    own: Callable[[Frame], Iterable[Copy]]
    is_copy: bool

    def frame(
        self,
        pieces: RankPieces,
        backend: ArrayBackend,
        x: Array,
        out: Array,
        elements: Sequence[Array],
    ) -> Frame:
        """Return the frame of what is given and what is written."""
        owned, window = (x, out) if self.is_copy else (out, x)
        return Frame(pieces, backend, owned, window, elements)


EXCHANGE = Operation(
    "exchange", attrgetter("sends"), attrgetter("recvs"), pack_cells, unpack_cells, show_own, True
)
ACCUMULATE = Operation(
    "accumulate", attrgetter("recvs"), attrgetter("sends"), pack_sums, add_sums, sum_own, False
)
