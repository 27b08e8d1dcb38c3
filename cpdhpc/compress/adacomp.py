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

from ..collectives.sparse import allgather
from ..ops import backend_of
from ..options import Allowed
from .base import Array, Context, Mean
from .bucket import Bucket
from .memory import empty_mean
from .sparse import OfLayer, SparseLayers, SparseMessages

HEAD = np.dtype([("scale", np.float32), ("codes", np.uint32)])  # of a layer


class Coded(NamedTuple):
    """The values of a layer that are sent, NumPy's: scale, and codes, uint8[bytes]."""

    scale: np.float32
    codes: Array


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
        waiting, own = self._encoded(layers, bins)
        payloads = [_payload(each, bins) for each in own]
        flat = empty_mean(context, bucket, gradients[0])
        came = allgather(context.world, payloads) if bins else []
        most, shares = self._decoded([_read(each, bins) for each in came], layers, waiting, flat)
        return layers.finished(flat, most, waiting, shares)

    def _bins(self, coded: Bucket) -> list[int]:
        """Return the number of values of a bin of each layer."""
        return [
            self.conv_bin_values if len(shape) > 2 else self.bin_values for shape in coded.shapes
        ]

    def _encoded(
        self, layers: SparseLayers, bins: Sequence[int]
    ) -> tuple[list[Array], list[list[Coded]]]:
        """Return gradients plus residuals, and what each hosted rank sends by layer. Collective."""
        found: list[list[Coded]] = [[] for _ in layers.gradients]

        def accumulate(of: OfLayer) -> int:
            highest, codes = backend_of(of.x).encode_bins(
                of.gradient, of.kept, of.x, float(np.float32(self.scale - 1)), bins[of.layer]
            )
            with np.errstate(over="ignore", invalid="ignore"):  # accumulated checks it
                scale = np.float32(highest.mean(dtype=np.float64))
            found[of.row].append(Coded(scale, codes))
            return int(highest.view(np.uint32).max())

        return layers.accumulated(accumulate), found

    def _decoded(
        self,
        came: Sequence[Sequence[Coded]],
        layers: SparseLayers,
        waiting: Sequence[Array],
        flat: Array,
    ) -> tuple[int, list[float]]:
        """Write the mean of what ranks sent into flat, and subtract a rank's own from waiting.

        Returns the bits of the largest magnitude, and the share of each layer that a rank sends.
        """
        world, most, shares = layers.context.world, 0, list[float]()
        for i, (bin_values, out, (_, start, stop)) in enumerate(
            zip(self._bins(layers.coded), layers.parts(flat), layers.coded.segments, strict=True)
        ):
            scales, codes = zip(*(each[i] for each in came), strict=True)
            rests = [x[start:stop] for x in waiting]
            bits, counts = backend_of(out).mean_bins(
                bin_values, codes, scales, out, world.ranks, rests, world.hosted.start
            )
            most = max(most, bits)
            shares.append(counts.sum() / ((stop - start) * world.ranks))
        return most, shares


def _payload(own: Sequence[Coded], bins: Sequence[int]) -> Array:
    """Return a rank's payload, uint8[bytes]."""
    head = np.zeros(len(bins), HEAD)
    for i, (bin_values, (scale, codes)) in enumerate(zip(bins, own, strict=True)):
        head[i] = scale, codes.size // _code_bytes(bin_values)
    return np.concatenate([head.view(np.uint8), *(codes for _, codes in own)])


def _read(payload: Array, bins: Sequence[int]) -> list[Coded]:
    """Return the scale and the codes of each layer of a payload, parts of it."""
    end, found = len(bins) * HEAD.itemsize, list[Coded]()
    for bin_values, (scale, count) in zip(bins, payload[:end].view(HEAD), strict=True):
        begin, end = end, end + int(count) * _code_bytes(bin_values)
        found.append(Coded(scale, payload[begin:end]))
    return found


def _code_bytes(bin_values: int) -> int:
    return 1 if bin_values < 1 << 6 else 2
