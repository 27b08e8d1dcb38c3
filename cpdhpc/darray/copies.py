"""The copies and sums of exchange and accumulate, and the operations they need of each array type.

EXCHANGE and ACCUMULATE, at the end, are the only description: a list of boxes to be written, each
with the arrays whose sum it becomes. do executes the list by slices; rows_of in compiled.py and
tables in device.py translate it. They run it on ghosts: stand-in arrays of which only place and
strides are used.
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

from ..errors import ArgumentError, ArgumentTypeError
from ..ops import misread, to_host, type_name
from .layout import Box
from .windows import Message, Piece, RankPieces

Array = Any  # of any backend
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.generic]  # shows where an array lies; must not be read


class ArrayBackend:
    """Operations on arrays besides operators, here NumPy's; subclasses override what differs.

    like: an array of the wanted backend, dtype and device
    """

    def dtype(self, x: Array) -> str:
        """Return the name of the dtype ("float32"): the same for all backends."""
        return str(x.dtype.name)

    def itemsize(self, x: Array) -> int:
        """Return the bytes of an element."""
        return int(x.dtype.itemsize)

    def check(self, what: str, x: Array) -> None:
        """Raise TypeError if an array of this backend cannot be exchanged."""
        if x.dtype.hasobject:
            raise wrong_dtype(what, x.dtype, "objects have no bytes that can be sent")
        if not x.dtype.isnative:
            raise wrong_dtype(what, x.dtype, "must have this machine's byte order")

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        """Return a new array."""
        return np.empty(shape, like.dtype)

    def plain(self, x: Array) -> npt.NDArray[Any] | None:
        """Return the same memory as a NumPy array, maybe of integers; None if on a GPU."""
        if x.dtype.kind in "biufc":
            return np.asarray(x)
        return np.asarray(x).view(f"V{x.dtype.itemsize}")

    def addresses(self, x: Array) -> Addresses:
        """Return the place of the elements in GPU memory, as an array that must not be read."""
        raise AssertionError("host arrays have no GPU address")

    def device(self, x: Array) -> int:
        """Return the number of the GPU that holds x."""
        raise AssertionError("host arrays have no GPU")

    def in_stream(self, x: Array) -> AbstractContextManager[None]:
        """Make CuPy work on x's GPU, in the current stream of x's library."""
        return nullcontext()

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return the values as a NumPy array. Raises TypeError if NumPy has no such dtype."""
        return np.asarray(x)

    def element(self, like: Array, value: complex) -> Bytes:
        """Return the bytes of one element of this value. Raises if the dtype cannot hold it."""
        one = np.empty(1, like.dtype)
        one[...] = value
        return one.view(np.uint8)

    def flip(self, x: Array, axes: Sequence[int]) -> Array:
        """Return x reversed along some axes."""
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
            allowed, state = (
                "use cpdhpc.torch.autograd",
                " requires a gradient, which would be lost",
            )
            raise ArgumentTypeError.of(what, True, allowed, state)
        if x.layout != torch.strided or x.is_conj() or x.is_neg():
            state = f" is {x.layout}, or a view that only conjugates or negates"
            allowed = "must be strided and resolved"
            raise ArgumentTypeError.of(what, str(x.layout), allowed, state)

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        """The memory order follows like's, so that both are read along contiguous elements."""
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
    """Return an array at an address in any memory, on host or GPU. strides: None for C order."""
    interface = {
        "shape": tuple(shape), "typestr": f"|V{itemsize}", "data": (address, False),
        "strides": None if strides is None else tuple(strides), "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


NUMPY, CUPY, TORCH, TORCH_GPU = ArrayBackend(), _Cupy(), _Torch(), _TorchGpu()


def array_backend(what: str, x: Array) -> ArrayBackend:
    """Return the backend of an array. Raises TypeError for other types.

    what: the function and its argument, for example "exchange: x"
    """
    if isinstance(x, np.ndarray):
        if advice := misread(x):
            raise ArgumentTypeError.of(what, type_name(x), advice, f" is {type_name(x)}")
        return NUMPY
    module = type(x).__module__.partition(".")[0]
    if module == "cupy" and hasattr(x, "dtype"):
        return CUPY
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return TORCH if x.device.type == "cpu" else TORCH_GPU
    allowed = "known are arrays of NumPy and CuPy and torch tensors"
    raise ArgumentTypeError.of(what, type_name(x), allowed, f" is {type_name(x)}")


def wrong_dtype(what: str, dtype: object, allowed: str) -> ArgumentTypeError:
    """Return the error of an array's dtype. what: see array_backend."""
    return ArgumentTypeError.of(what, str(dtype), allowed, f" is of {dtype}")


def wrong_shape(what: str, x: Array, allowed: str) -> ArgumentError:
    """Return the error of an array's shape. what: see array_backend."""
    return ArgumentError.of(what, tuple(x.shape), allowed, f" has shape {tuple(x.shape)}")


class Copy(NamedTuple):
    """A box that is written: set to the sum of the terms, or if it adds, increased by that sum.

    box: of the rank's owned cells or of its window; in a message: of the owner's cells
    terms: arrays of the target's shape, or of extent 1 along axes on which all cells are equal
    """

    box: Box
    target: Array
    terms: Sequence[Array]
    adds: bool = False


class Frame(NamedTuple):
    """A rank's pieces and its two arrays, one on the owned box and one on the window.

    elements: arrays of one element: the value of each fill, or the zero that sums begin with
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
        """Return values reversed along the axes that a piece shows reversed."""
        return self.backend.flip(values, [i for i, step in enumerate(piece.steps) if step < 0])

    def gathered(self, piece: Piece) -> list[Array]:
        """Return the parts of the window that each show a piece's whole source, in order."""
        values = self.turned(self.of_window(piece.target), piece)
        return [values[place] for place in piece.repeats()]


def parts(frame: Frame, message: Message, values: Array) -> Iterator[tuple[Piece, Array]]:
    """Yield pieces, each with its part of a message, in the shape of its source."""
    trail, start = tuple(frame.owned.shape[frame.pieces.owned.ndim :]), 0
    for piece in message.pieces:
        shape = piece.source.shape + trail
        stop = start + prod(shape)
        yield piece, values[start:stop].reshape(shape)
        start = stop


def pack_cells(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield copies of the owned cells that another rank's window shows, into a message."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.source, part, [frame.of_owned(piece.source)])


def unpack_cells(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield copies of a message's cells to their places in the window."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.target, frame.of_window(piece.target), [frame.turned(part, piece)])


def show_own(frame: Frame) -> Iterator[Copy]:
    """Yield copies of fill values and of the rank's own cells into the window."""
    for fill, element in zip(frame.pieces.fills, frame.elements, strict=True):
        yield Copy(fill.target, frame.of_window(fill.target), [element])
    for piece in frame.pieces.local:
        values = frame.turned(frame.of_owned(piece.source), piece)
        yield Copy(piece.target, frame.of_window(piece.target), [values])


def pack_sums(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield sums of the window's cells that show another rank's cells, into a message."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.source, part, frame.gathered(piece))


def add_sums(frame: Frame, message: Message, values: Array) -> Iterator[Copy]:
    """Yield the additions of a message to the owned cells."""
    for piece, part in parts(frame, message, values):
        yield Copy(piece.source, frame.of_owned(piece.source), [part], adds=True)


def sum_own(frame: Frame) -> Iterator[Copy]:
    """Yield the start of each sum: the window's own cell if it shows, else zero; then mirrors."""
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
class Transfer:
    """An exchange or its transpose.

    sent, received: the messages of a rank; pack, unpack: the copies for one message of each
    own: the copies that need no message, done first
    is_copy: whether cells travel and arrive unchanged, from the owned box to the window
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
        """Return the frame of an input and an output array."""
        owned, window = (x, out) if self.is_copy else (out, x)
        return Frame(pieces, backend, owned, window, elements)


EXCHANGE = Transfer(
    "exchange", attrgetter("sends"), attrgetter("recvs"), pack_cells, unpack_cells, show_own, True
)
ACCUMULATE = Transfer(
    "accumulate", attrgetter("recvs"), attrgetter("sends"), pack_sums, add_sums, sum_own, False
)
