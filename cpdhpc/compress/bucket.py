"""Layout of named arrays in a flat buffer, and the state of a method between iterations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..collectives.method import Segment
from ..ops import backend_of, placed
from ..partition import split

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Bucket:
    """The layout of named arrays in a flat float32 buffer, zeros between them.

    names, shapes: of the arrays, in order; align: each starts on a multiple of it: 1 for wire
    "raw", 1024 (a tile) for packed wires
    Raises ValueError if names and shapes differ in number, a name comes twice or align < 1.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    align: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        if len(self.names) != len(self.shapes):
            raise ValueError(f"Bucket: {len(self.names)} names for {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"Bucket: names {self.names}: each must come once")
        if self.align < 1:
            raise ValueError(f"Bucket: align={self.align}: must be 1 or more")

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The place of each array in the buffer."""
        found, end = [], 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            start = -(-end // self.align) * self.align
            end = start + math.prod(shape)
            found.append(Segment(name, start, end))
        return tuple(found)

    def clear_gaps(self, flat: Array) -> None:
        """Write zeros between the arrays of a buffer."""
        end = 0
        for _, start, stop in self.segments:
            if end < start:
                flat[end:start] = 0
            end = stop

    @property
    def size(self) -> int:
        """Number of values in the buffer; it ends with the last array."""
        return self.segments[-1].stop if self.segments else 0

    def flatten(self, arrays: Sequence[Array], out: Array | None = None) -> Array:
        """Copy the arrays into out, float32[size], or a new buffer; return it.

        Raises ValueError if the shapes are not those of the bucket, or out has another size.
        """
        shapes = tuple(tuple(array.shape) for array in arrays)
        if shapes != self.shapes:
            raise ValueError(f"Bucket.flatten: arrays have shapes {shapes}: must be {self.shapes}")
        if out is None:
            like = arrays[0] if arrays else np.empty(0, np.float32)
            out = np.empty_like(like, shape=(self.size,), dtype=np.float32)
        self._check("flatten: out", out)
        end = 0
        for array, (_, start, stop) in zip(arrays, self.segments, strict=True):
            out[end:start] = 0
            out[start:stop] = array.reshape(-1)
            end = stop
        return out

    def views(self, flat: Array) -> list[Array]:
        """Return the arrays of a buffer, float32[size], as views.

        Raises ValueError if the buffer has another size or dtype, or is not contiguous.
        """
        self._check("views: flat", flat)
        return [
            flat[segment.start : segment.stop].reshape(shape)
            for segment, shape in zip(self.segments, self.shapes, strict=True)
        ]

    def _check(self, what: str, flat: Array) -> None:
        if flat.shape != (self.size,) or flat.dtype != np.float32 or not flat.flags.c_contiguous:
            raise ValueError(
                f"Bucket.{what} has shape {flat.shape}, dtype {flat.dtype}: must be contiguous "
                f"float32[{self.size}]"
            )


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model that are reduced together: a bucket of a larger one.

    layers: their indices in the model's bucket; bucket: their own layout
    start, stop: buffer[start:stop] of the model's buffer has that layout
    """

    layers: range
    bucket: Bucket
    start: int
    stop: int


BYTES = 4  # of a float32
MIB = 1 << 20


def split_bucket(whole: Bucket, bucket_mib: float) -> list[Part]:
    """Return parts of at most bucket_mib MiB of values, or one larger layer, the last layers first.

    Parts are filled from the last layer on, which backward finishes first; within a part layers
    keep the model's order, so that a single part has the layout of the model.
    Raises ValueError unless bucket_mib is above zero.
    """
    if isinstance(bucket_mib, bool) or not isinstance(bucket_mib, int | float | np.number):
        raise TypeError(f"GradientReducer: bucket_mib={bucket_mib!r}: must be a number")
    if not bucket_mib > 0:
        raise ValueError(f"GradientReducer: bucket_mib={bucket_mib}: should be above 0")
    parts, stop, size_bytes = [], len(whole.names), 0
    for layer in reversed(range(len(whole.names))):
        layer_bytes = math.prod(whole.shapes[layer]) * BYTES
        if layer + 1 < stop and size_bytes + layer_bytes > bucket_mib * MIB:
            parts.append(_part(whole, range(layer + 1, stop)))
            stop, size_bytes = layer + 1, 0
        size_bytes += layer_bytes
    return [*parts, _part(whole, range(stop))]


def _part(whole: Bucket, layers: range) -> Part:
    span = slice(layers.start, layers.stop)
    bucket = Bucket(whole.names[span], whole.shapes[span], whole.align)
    segments = whole.segments[span]
    return Part(layers, bucket, segments[0].start, segments[-1].stop)


Key = tuple[str, str]  # layer, name
Redistribution = Literal["sum", "copy", "drop"]
NEVER = -1.0  # in a state: no call yet
ON_CPU = np.empty(0)  # an array in the CPU's memory, for arguments like


@dataclass
class Entry:
    """An array that a method keeps.

    array: [hosted ranks, *shape] of an own entry; of a shared one as it was made
    redistribution: how an own entry is restored on another number of ranks; None: it is shared
    whole: the array that memory.keep has cut this one from, which has no other use; or None
    """

    array: Array
    redistribution: Redistribution | None
    whole: Array | None = None


class State:
    """Arrays by layer and name, of each hosted rank or shared by all ranks; changed in place.

    hosted: the ranks of this process; ranks: number of all ranks
    Layers are names of parameters, "" is the whole model. Methods ask for their arrays in each
    iteration, as a checkpoint may have replaced them.
    """

    def __init__(self, hosted: range, ranks: int) -> None:
        self.hosted, self.ranks = hosted, ranks
        self._entries: dict[Key, Entry] = {}
        # Scratch arrays by name and number of values, see memory.take_spare; not in checkpoints
        self.spares: dict[tuple[str, int], list[Array]] = {}

    def own(
        self,
        layer: str,
        name: str,
        shape: Sequence[int],
        redistribution: Redistribution = "sum",
        dtype: npt.DTypeLike = np.float32,
        like: Array = ON_CPU,
    ) -> list[Array]:
        """Return dtype[shape] of each hosted rank, zeros at first.

        like: an array of NumPy or CuPy; the result is moved to its device
        redistribution: of a checkpoint of another number of ranks: "sum" keeps the sum over ranks,
            as residuals need, and gives each rank that of a part of the values; "copy" gives rank
            r the array of rank r modulo the former number; "drop" begins with zeros
        Raises ValueError if the entry has another shape, dtype or redistribution, or the name
        a "/".
        """
        if redistribution not in get_args(Redistribution):
            known = ", ".join(get_args(Redistribution))
            raise ValueError(f"State.own: redistribution={redistribution!r}: known are {known}")
        wanted = (len(self.hosted), *shape), np.dtype(dtype), redistribution
        entry = self._entry(layer, name, lambda: Entry(np.zeros(*wanted[:2]), redistribution), like)
        found = entry.array.shape, entry.array.dtype, entry.redistribution
        if found != wanted:
            raise ValueError(
                f"State.own: {name!r} of layer {layer!r} has shape, dtype and "
                f"redistribution {found}: asked for {wanted}"
            )
        return list(entry.array)

    def give(
        self, layer: str, name: str, rows: Sequence[Array], whole: Array | None = None
    ) -> Array | None:
        """Replace the arrays of an entry of own by rows of its dtype and shape; return its whole.

        rows: of each hosted rank, which the caller no longer uses; a single one is not copied
        whole: the array that it is a part of, see Entry
        """
        entry = self._entries[layer, name]
        former = entry.whole
        entry.array = rows[0][None] if len(rows) == 1 else np.stack(rows)
        entry.whole = whole
        return former

    def has_part(self, whole: Array) -> bool:
        """Whether the array of an entry is a part of whole."""
        return any(entry.whole is whole for entry in self._entries.values())

    def shared(
        self, layer: str, name: str, make: Callable[[], Array], like: Array = ON_CPU
    ) -> Array:
        """Return an array of one dimension at least that is identical on all ranks.

        make: returns the first one, identical on all ranks; like: as for own
        Raises ValueError if own has an entry of this name, or the name has a "/".
        """
        entry = self._entry(layer, name, lambda: Entry(np.atleast_1d(make()), None), like)
        if entry.redistribution is not None:
            raise ValueError(f"State.shared: {name!r} of layer {layer!r}: each rank has its own")
        return entry.array

    def _entry(self, layer: str, name: str, make: Callable[[], Entry], like: Array) -> Entry:
        if "/" in name:
            raise ValueError(f"State: name={name!r}: must have no '/'")
        if (layer, name) not in self._entries:
            self._entries[layer, name] = make()
        entry = self._entries[layer, name]
        entry.array = placed(entry.array, like)
        return entry

    def __iter__(self) -> Iterator[tuple[Key, Entry]]:
        """Yield all entries, in the same order on all processes."""
        return iter(sorted(self._entries.items()))

    def copy(self) -> State:
        """Return another state with copies of all arrays."""
        other = State(self.hosted, self.ranks)
        for key, entry in self:
            other.put(key, Entry(entry.array.copy(), entry.redistribution))
        return other

    def scale(self, factor: float) -> None:
        """Multiply the entries with redistribution "sum", as the unit of gradients has changed."""
        for _, entry in self:
            if entry.redistribution == "sum":
                number = entry.array.dtype.type(factor)
                backend_of(entry.array).multiply(entry.array, number, entry.array)

    def put(self, key: Key, entry: Entry) -> None:
        """Set an entry, as a checkpoint does."""
        self._entries[key] = entry


def redistributed(rows: Array, redistribution: Redistribution, hosted: range, ranks: int) -> Array:
    """Return the rows of an own entry for the hosted ranks of a run on another number of ranks.

    rows: [former ranks, *shape]; returns [hosted ranks, *shape] of the same dtype
    A sum is formed in float64, or int64, and rounded once.
    """
    former = len(rows)
    if former == ranks:
        return rows[hosted.start : hosted.stop].copy()
    if redistribution == "copy":
        return rows[[rank % former for rank in hosted]]
    given = np.zeros((len(hosted), *rows.shape[1:]), rows.dtype)
    if redistribution == "sum":
        wide = np.float64 if rows.dtype.kind == "f" else np.int64
        total = rows.reshape(former, -1).sum(axis=0, dtype=wide).astype(rows.dtype)
        for row, rank in zip(given.reshape(len(hosted), -1), hosted, strict=True):
            part = slice(*split(total.size, ranks, rank))
            row[part] = total[part]
    return given
