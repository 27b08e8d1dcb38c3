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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np

from ..ops import backend_of, cpu
from ..options import Allowed
from .base import Array, Context, Mean
from .bucket import Bucket
from .sparse import OfLayer, Pairs, SparseLayers, SparseMessages

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
        layers = self._layers(gradients, bucket, context)
        bins = self._bins(layers.coded)
        waiting, leaders = self._leaders(layers, bins)
        payloads = [self._encoded(own, bins) for own in leaders]
        sent = layers.exchange(
            payloads, lambda each: self._decoded(each, bins, layers.coded), waiting
        )
        return layers.finished(sent.mean, sent.most, waiting, sent.shares)

    def _bins(self, coded: Bucket) -> list[int]:
        """Return the number of values of a bin of each layer."""
        return [
            self.conv_bin_values if len(shape) > 2 else self.bin_values for shape in coded.shapes
        ]

    def _leaders(
        self, layers: SparseLayers, bins: Sequence[int]
    ) -> tuple[list[Array], list[list[Leaders]]]:
        """Return gradients plus residuals, and each hosted rank's leaders by layer. Collective."""
        found: list[list[Leaders]] = [[] for _ in layers.gradients]

        def accumulate(of: OfLayer) -> int:
            highest, indices, values = backend_of(of.x).accumulate_leaders(
                of.gradient, of.kept, of.x, float(np.float32(self.scale - 1)), bins[of.layer]
            )
            with np.errstate(over="ignore", invalid="ignore"):  # accumulated checks it
                scale = np.float32(highest.mean(dtype=np.float64))
            found[of.row].append(Leaders(scale, indices, values))
            return int(highest.view(np.uint32).max())

        return layers.accumulated(accumulate), found

    def _encoded(self, leaders: Sequence[Leaders], bins: Sequence[int]) -> Array:
        """Return a rank's payload, uint8[bytes]."""
        head, codes = np.zeros(len(bins), HEAD), []
        for i, (bin_values, (scale, indices, values)) in enumerate(zip(bins, leaders, strict=True)):
            codes.append(cpu.pack_bins(bin_values, indices, values))
            head[i] = scale, codes[-1].size // _code_bytes(bin_values)
        return np.concatenate([each.view(np.uint8) for each in (head, *codes)])

    def _decoded(self, payload: Array, bins: Sequence[int], coded: Bucket) -> Pairs:
        """Return the indices in coded and the values of a payload."""
        end, found = len(bins) * HEAD.itemsize, []
        for bin_values, (scale, count), (_, start, _) in zip(
            bins, payload[:end].view(HEAD), coded.segments, strict=True
        ):
            begin, end = end, end + int(count) * _code_bytes(bin_values)
            found.append(cpu.unpack_bins(bin_values, payload[begin:end], float(scale), start))
        indices, values = map(np.concatenate, zip(*found, strict=True))
        return indices, values


def _code_bytes(bin_values: int) -> int:
    return 1 if bin_values < 1 << 6 else 2
