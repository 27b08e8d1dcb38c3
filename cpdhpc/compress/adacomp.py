"""AdaComp: the values near the largest of each bin of a layer, as signs of one scale.

A value that is sent is a code of 8 bits if bins have less than 64 values, else of 16:

    bits   15      14      13 ... 0            7       6       5 ... 0
        +------+-------+------------+       +------+-------+-----------+
        | last | minus |   index    |       | last | minus |   index   |
        +------+-------+------------+       +------+-------+-----------+

index: of the value in its bin; last: the next code belongs to the next bin. The largest index,
which no bin has, skips empty bins: one, plus the number in the upper two bits. Bins after the last
code are empty too.

    payload: of each layer its scale, float32, and the number of its codes, uint32 | all codes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np

from ..ops import backend_of, cpu
from ..options import Allowed
from .base import RESIDUAL, Array, Context, Mean, as_float, shared_largest
from .bucket import Bucket
from .memory import take_spare
from .sparse import SparseLayers, SparseMessages, exchange

HEAD = np.dtype([("scale", np.float32), ("codes", np.uint32)])  # of a layer


class Leaders(NamedTuple):
    """The values of a layer that are sent, NumPy's: scale, ascending indices and values."""

    scale: np.float32
    indices: Array
    values: Array


@dataclass(frozen=True)
class AdaComp(SparseMessages):
    """The mean of those values of each rank that are near the largest of their bin of a layer.

    conv_bin_values: of a bin of weights of three dimensions or more; bin_values: of other weights
    scale: a value is sent if its residual plus scale times the gradient is no less than the
        largest sum of residual and gradient in its bin
    The values become signs of one scale a layer, the mean of its bins' largest. The rest is added
    to a rank's next gradient. Every rank gets the values of all, added in the order of ranks.
    Source: Chen et al.: AdaComp: adaptive residual gradient compression for data-parallel
    distributed training, AAAI 2018, arXiv 1712.02679; a code marks the last value of a bin, instead
    of the paper's second bit for signs.
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
        payloads = [self._encoded(own, coded) for own in leaders]
        sent = exchange(context, payloads, lambda each: self._decoded(each, coded), waiting, layers)
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm, sent.most)
        layers.keep(waiting, context)
        return Mean.finite(flat, {"sent_share": layers.shares(sent.shares)})

    def _bins(self, coded: Bucket) -> Iterator[tuple[int, slice]]:
        """Yield the number of values of a bin of each layer, and the layer's slice."""
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
        """Write residuals plus gradients; return the leaders of each hosted rank. Collective.

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
                highest, indices, values = about(
                    gradient, kept, x[place], float(np.float32(self.scale - 1)), bin_values
                )
                most.append(highest.view(np.uint32).max())
                with np.errstate(over="ignore", invalid="ignore"):  # shared_largest checks it
                    scale = np.float32(highest.mean(dtype=np.float64))
                found[row].append(Leaders(scale, indices, values))
        if layers.coded.size:
            shared_largest(context.world, waiting, layers.coded, as_float(max(most)))
        return found

    def _encoded(self, leaders: Sequence[Leaders], coded: Bucket) -> Array:
        """Return a rank's payload, uint8[bytes]."""
        head, codes = np.zeros(len(coded.names), HEAD), []
        for i, (bin_values, _) in enumerate(self._bins(coded)):
            scale, indices, values = leaders[i]
            codes.append(cpu.pack_bins(bin_values, indices, values))
            head["scale"][i] = scale
            head["codes"][i] = codes[-1].size // _code_bytes(bin_values)
        return np.concatenate([each.view(np.uint8) for each in (head, *codes)])

    def _decoded(self, payload: Array, coded: Bucket) -> tuple[Array, Array]:
        """Return the indices in coded, uint32[k], and the values, float32[k], of a payload."""
        end, found = len(coded.names) * HEAD.itemsize, []
        for (bin_values, part), (scale, count) in zip(
            self._bins(coded), payload[:end].view(HEAD), strict=True
        ):
            begin, end = end, end + int(count) * _code_bytes(bin_values)
            codes = payload[begin:end]
            found.append(cpu.unpack_bins(bin_values, codes, float(scale), part.start))
        indices, values = map(np.concatenate, zip(*found, strict=True))
        return indices, values


def _code_bytes(bin_values: int) -> int:
    return 1 if bin_values < 1 << 6 else 2
