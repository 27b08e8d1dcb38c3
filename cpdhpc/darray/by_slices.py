"""Pieces of windows packed and unpacked by slices of NumPy and torch arrays, of any dtype.

This is what an exchange and its transpose mean; compiled.py does the same in compiled loops, and
device_moves.py on GPUs. Arrays are sliced, assigned and added alike, by operators; what differs
between kinds, those of GPUs too, is said first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import misread, to_host, type_name
from .layout import Box
from .windows import Piece, RankPieces

Array = Any  # of any backend
Bytes = npt.NDArray[np.uint8]


Addresses = npt.NDArray[np.generic]  # says where an array lies in a GPU's memory; may not be read


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
        return _addresses(x, x.data.ptr, x.strides, x.dtype.itemsize)

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
        return like.new_empty(tuple(shape))

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
    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        """Its elements follow one another as like's do, so that both are read along."""
        order = sorted(range(like.ndim), key=lambda axis: -like.stride(axis))
        made = like.new_empty([shape[axis] for axis in order])
        return made.permute([order.index(axis) for axis in range(like.ndim)])

    def plain(self, x: Array) -> None:
        return None

    def addresses(self, x: Array) -> Addresses:
        size_bytes = self.itemsize(x)
        return _addresses(x, x.data_ptr(), [n * size_bytes for n in x.stride()], size_bytes)

    def device(self, x: Array) -> int:
        return int(x.device.index)

    def in_stream(self, x: Array) -> AbstractContextManager[None]:
        from ..ops.tensors import in_stream

        return in_stream(x.device)


def _addresses(x: Array, address: int, strides: Sequence[int], itemsize: int) -> Addresses:
    interface = {
        "shape": tuple(x.shape), "typestr": f"|V{itemsize}", "data": (address, False),
        "strides": tuple(strides), "version": 3,
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


class Cut(NamedTuple):
    """What pieces are cut from: the boxes of a rank's two arrays, and their backend."""

    owned: Box
    window: Box
    backend: ArrayBackend

    def shown(self, x: Array, piece: Piece) -> Array:
        """Return the cells of a piece in the array on the owned box."""
        return x[piece.source.slices(self.owned.start)]

    def target(self, piece: Piece) -> tuple[slice, ...]:
        """Return where a piece lies in the array on the window."""
        return piece.target.slices(self.window.start)

    def turned(self, values: Array, piece: Piece) -> Array:
        """Return values backwards along the axes that a piece shows so."""
        return self.backend.flip(values, [i for i, step in enumerate(piece.steps) if step < 0])

    def gathered(self, y: Array, piece: Piece) -> Array:
        """Return a piece of a window in the shape of its source.

        Where one cell shows many times these are added one after another, the last axis fastest.
        """
        values = self.turned(y[self.target(piece)], piece)
        places = list(piece.repeats())
        if len(places) == 1:
            return values
        total = values[places[0]]
        for place in places[1:]:
            total = total + values[place]
        return total


def parts(
    cut: Cut, pieces: Sequence[Piece], array: Array, values: Array
) -> Iterator[tuple[Piece, Array]]:
    """Yield pieces and the part of a message that each takes, in the shape of its source.

    array: from which or to which the cells go, with the further axes
    """
    trail, start = tuple(array.shape[cut.owned.ndim :]), 0
    for piece in pieces:
        shape = piece.source.shape + trail
        stop = start + prod(shape)
        yield piece, values[start:stop].reshape(shape)
        start = stop


def pack_cells(cut: Cut, pieces: Sequence[Piece], x: Array, values: Array) -> None:
    """Write the cells of an owned box that pieces show into a message."""
    for piece, part in parts(cut, pieces, x, values):
        part[...] = cut.shown(x, piece)


def unpack_cells(cut: Cut, pieces: Sequence[Piece], values: Array, out: Array) -> None:
    """Write a message where its pieces show in a window."""
    for piece, part in parts(cut, pieces, out, values):
        out[cut.target(piece)] = cut.turned(part, piece)


def pack_sums(cut: Cut, pieces: Sequence[Piece], y: Array, values: Array) -> None:
    """Write the cells of a window into a message, in the shapes of their sources."""
    for piece, part in parts(cut, pieces, y, values):
        part[...] = cut.gathered(y, piece)


def add_sums(cut: Cut, pieces: Sequence[Piece], values: Array, out: Array) -> None:
    """Add a message to the owned cells that its pieces show."""
    for piece, part in parts(cut, pieces, out, values):
        _add(cut, piece, part, out)


def _add(cut: Cut, piece: Piece, values: Array, out: Array) -> None:
    """Add values to the owned cells that a piece shows."""
    place = piece.source.slices(cut.owned.start)
    out[place] = out[place] + values


def show_own(cut: Cut, pieces: RankPieces, x: Array, out: Array) -> None:
    """Fill what no one owns in a window, and what shows this rank's own cells."""
    for fill in pieces.fills:
        out[fill.target.slices(cut.window.start)] = fill.value
    for piece in pieces.local:
        out[cut.target(piece)] = cut.turned(cut.shown(x, piece), piece)


def sum_own(cut: Cut, pieces: RankPieces, y: Array, out: Array) -> None:
    """Begin the sums: the cell of the window itself where there is one, else zero; then mirrors."""
    for box in pieces.uncovered:
        out[box.slices(cut.owned.start)] = 0
    for piece in pieces.local:
        if piece.is_itself:
            out[piece.source.slices(cut.owned.start)] = y[cut.target(piece)]
    for piece in pieces.local:
        if not piece.is_itself:
            _add(cut, piece, cut.gathered(y, piece), out)
