"""AdaComp: of each bin of a layer the values that are about its largest, as signs of one scale.

A value that is sent is a code of 8 bits where bins have less than 64 values, else of 16:

    bits   15      14      13 ... 0            7       6       5 ... 0
        +------+-------+------------+       +------+-------+-----------+
        | last | minus |   index    |       | last | minus |   index   |
        +------+-------+------------+       +------+-------+-----------+

index: of the value in its bin; last: the next code is of the next bin. The largest index, which no
bin has, passes over empty bins: one, and as many more as the upper two bits say. Bins behind the
last code are empty too.

    payload: of each layer its scale, float32, and the number of its codes, uint32 | all codes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from ..ops import backend_of, placed, to_host
from ..options import Allowed
from .base import RESIDUAL, Array, Context, Mean, as_float, shared_largest
from .bucket import Bucket
from .memory import take_spare
from .sparse import SparseLayers, SparseMessages, exchange

HEAD = np.dtype([("scale", np.float32), ("codes", np.uint32)])  # of a layer
SKIPPED = 4  # empty bins that a code passes over, at most


class Leaders(NamedTuple):
    """What is sent of a layer: its scale, and the ascending indices, NumPy's uint32[m]."""

    scale: np.float32
    indices: Array


@dataclass(frozen=True)
class AdaComp(SparseMessages):
    """The mean of those values of each rank that are about the largest of their bin of a layer.

    conv_bin_values: of a bin of weights of three dimensions or more; bin_values: of other weights
    scale: a value is sent where what waits, with the gradient counted so many times, is no less
        than the largest of its bin with the gradient counted once
    The values become signs of one scale a layer, the mean of its bins' largest. What that leaves is
    added to a rank's next gradient. Every rank gets the values of all, added in the order of ranks.
    Source: Chen et al.: AdaComp: adaptive residual gradient compression for data-parallel
    distributed training, AAAI 2018, arXiv 1712.02679; with a mark for the last value of a bin where
    the paper has a second bit for signs.
    """

    aggregator: Literal["adacomp"] = "adacomp"
    conv_bin_values: Annotated[int, Allowed(ge=1, lt=1 << 14)] = 50
    bin_values: Annotated[int, Allowed(ge=1, lt=1 << 14)] = 500
    scale: Annotated[float, Allowed(ge=1, le=1000)] = 2.0

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers = self._layers(bucket, context)
        layers.check_place(self, gradients, context)
        coded = layers.coded
        waiting = take_spare(context, RESIDUAL, coded.size, gradients)
        leaders = self._leaders(waiting, gradients, layers, context)
        payloads = [self._encoded(x, own, coded) for x, own in zip(waiting, leaders, strict=True)]
        sent = exchange(context, payloads, lambda each: self._decoded(each, coded), waiting, layers)
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm, sent.values)
        layers.keep(waiting, context)
        return Mean.finite(flat, {"sent_share": layers.shares(sent.shares)})

    def _bins(self, coded: Bucket) -> Iterator[tuple[int, slice]]:
        """Yield how many values a bin of each layer has, and where the layer lies."""
        for shape, (_, start, stop) in zip(coded.shapes, coded.segments, strict=True):
            bin_values = self.conv_bin_values if len(shape) > 2 else self.bin_values
            yield bin_values, slice(start, stop)

    def _leaders(
        self,
        waiting: Sequence[Array],
        gradients: Sequence[Array],
        layers: SparseLayers,
        context: Context,
    ) -> list[list[Leaders]]:
        """Write what waits; return, of each hosted rank, what is about the largest. Collective.

        waiting: float32[layers.coded.size] of each hosted rank, written
        """
        found: list[list[Leaders]] = [[] for _ in waiting]
        parts = zip(*map(layers.parts, gradients), strict=True)
        most: list[int] = []
        for own, (name, start, stop), (bin_values, place) in zip(
            parts, layers.coded.segments, self._bins(layers.coded), strict=True
        ):
            memory = context.state.own(name, RESIDUAL, (stop - start,), like=waiting[0])
            for row, (x, kept, gradient) in enumerate(zip(waiting, memory, own, strict=True)):
                about = backend_of(x).accumulate_leaders
                highest, indices = about(
                    gradient, kept, x[place], float(np.float32(self.scale - 1)), bin_values
                )
                most.append(highest.view(np.uint32).max())
                with np.errstate(over="ignore", invalid="ignore"):  # looked at next
                    scale = np.float32(highest.mean(dtype=np.float64))
                found[row].append(Leaders(scale, indices))
        if layers.coded.size:
            shared_largest(context.world, waiting, layers.coded, as_float(max(most)))
        return found

    def _encoded(self, x: Array, leaders: Sequence[Leaders], coded: Bucket) -> Array:
        """Return a rank's payload, uint8[bytes].

        x: float32[coded.size], what waits, the gradients included; leaders: of each layer
        """
        head, codes = np.zeros(len(coded.names), HEAD), []
        for i, (bin_values, part) in enumerate(self._bins(coded)):
            scale, indices = leaders[i]
            chosen = to_host(backend_of(x).gather(x[part], placed(indices, x)))
            codes.append(_codes(indices.astype(np.int64), chosen < 0, bin_values))
            head["scale"][i], head["codes"][i] = scale, codes[-1].size
        return np.concatenate([each.view(np.uint8) for each in (head, *codes)])

    def _decoded(self, payload: Array, coded: Bucket) -> tuple[Array, Array]:
        """Return the indices in coded, uint32[k], and the values, float32[k], of a payload."""
        end, found = len(coded.names) * HEAD.itemsize, []
        for (bin_values, part), (scale, count) in zip(
            self._bins(coded), payload[:end].view(HEAD), strict=True
        ):
            kind, _ = _coding(bin_values)
            begin, end = end, end + int(count) * kind.itemsize
            indices, is_minus = _places(payload[begin:end].view(kind), bin_values)
            signs = np.array([scale, -scale])
            found.append((indices + part.start, signs[is_minus.view(np.uint8)]))
        indices, values = map(np.concatenate, zip(*found, strict=True))
        return indices.astype(np.uint32), values


def _coding(bin_values: int) -> tuple[np.dtype[Any], int]:
    """Return the dtype of codes and how many bits of them are the index."""
    kind = np.dtype(np.uint8 if bin_values < 1 << 6 else np.uint16)
    return kind, 8 * kind.itemsize - 2


def _codes(indices: Array, is_minus: Array, bin_values: int) -> Array:
    """Return the codes of a layer, uint8[codes] or uint16[codes]."""
    kind, index_bits = _coding(bin_values)
    bins = indices // bin_values
    codes = (indices - bins * bin_values).astype(kind)
    codes |= is_minus.astype(kind) << index_bits
    bins_on = np.diff(bins)
    codes[:-1] |= (bins_on != 0).astype(kind) << index_bits + 1
    codes[-1:] |= 1 << index_bits + 1
    behind = np.flatnonzero(bins_on > 1) + 1  # values with empty bins before theirs
    empty = bins_on[behind - 1] - 1
    if bins.size and bins[0]:
        behind, empty = np.append(0, behind), np.append(bins[0], empty)
    passing = np.repeat(behind, -(-empty // SKIPPED))
    if not passing.size:
        return codes
    codes = np.insert(codes, passing, (1 << index_bits + 2) - 1)
    last = behind + np.cumsum(-(-empty // SKIPPED)) - 1  # of those before a value
    codes[last] = (1 << index_bits) - 1 | (empty - 1) % SKIPPED << index_bits
    return codes


def _places(codes: Array, bin_values: int) -> tuple[Array, Array]:
    """Return the indices in the layer and whether values are below 0, of codes."""
    _, index_bits = _coding(bin_values)
    index, upper = codes & (1 << index_bits) - 1, codes >> index_bits
    passing = np.flatnonzero(index == (1 << index_bits) - 1)
    bins_on = upper >> 1
    bins_on[passing] = upper[passing] + 1
    indices = np.cumsum(bins_on, dtype=np.int64)
    indices -= bins_on
    indices *= bin_values
    indices += index
    is_minus = (upper & 1).astype(bool)
    if passing.size:
        return np.delete(indices, passing), np.delete(is_minus, passing)
    return indices, is_minus
