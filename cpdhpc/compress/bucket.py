"""Many arrays in one flat buffer, each starting on a border, and its division into parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..collectives.method import Segment

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Bucket:
    """The layout of named arrays in a flat float32 buffer, zeros between them.

    names, shapes: of the arrays, in order; align: each starts on a multiple of it: 1 for wire
    "raw", 1024 (a tile) for packed wires
    Raises ValueError where names and shapes differ in number, a name comes twice or align < 1.
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
        """Where each array lies in the buffer."""
        found, end = [], 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            start = -(-end // self.align) * self.align
            end = start + math.prod(shape)
            found.append(Segment(name, start, end))
        return tuple(found)

    @property
    def size(self) -> int:
        """Number of values in the buffer; it ends with the last array."""
        return self.segments[-1].stop if self.segments else 0

    def flatten(self, arrays: Sequence[Array], out: Array | None = None) -> Array:
        """Copy the arrays into out, float32[size], or a new buffer; return it.

        Raises ValueError for another number of arrays, other shapes, or an out of another size.
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

        Raises ValueError for a buffer of another size, dtype or that is not contiguous.
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

    layers: their indices in the model's bucket; start, stop: where they lie in its buffer
    bucket: their own layout, that of buffer[start:stop]
    """

    layers: range
    bucket: Bucket
    start: int
    stop: int


BYTES = 4  # of a float32
MIB = 1 << 20


def split_bucket(whole: Bucket, bucket_mib: float) -> list[Part]:
    """Return parts of at most bucket_mib MiB of values, or one larger layer, the last ones first.

    Layers go into parts in reverse, about the order in which backward finishes them; within a part
    they keep the model's order, so that one part is laid out as the model itself.
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
