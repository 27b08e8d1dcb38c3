"""Strom's threshold compression: the signs of accumulated values beyond a threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ..collectives.sparse import sum as sum_of_ranks
from ..ops import backend_of, placed, to_host
from ..ops.common import NONFINITE_BITS
from ..options import Allowed
from .base import Array, Context, Mean, as_float, shared_largest
from .bucket import Bucket
from .payload import decode_sparse, encode_sparse
from .sparse import Pairs, SparseLayers, SparseMessages

SIGN = "ternary"  # the wire of -1 and 1
ONE = np.float32(1)
MEMORY = 0.99  # decay of the squares: about 100 steps
LEAST, GREATEST = 1e-38, 1e30  # thresholds that float32 has
Tau = Annotated[float, Allowed(gt=LEAST, le=GREATEST)]


@dataclass(frozen=True)
class Strom(SparseMessages):
    """The mean of tau or -tau for accumulated values beyond the threshold tau, else of 0.

    tau: the threshold of all layers, as in the paper; the remainder of a value stays in the
        residual. Default: each layer has its own, times_rms times its running root mean square
    times_rms: of the gradients of all ranks, whose squares decay by 0.99 in each step
    Source: Strom: Scalable distributed DNN training using commodity GPU cloud computing,
    Interspeech 2015; thresholds by layer are ours.
    """

    aggregator: Literal["strom"] = "strom"
    tau: Tau | None = None
    times_rms: Annotated[float, Allowed(gt=0, le=1e6)] = 4.0

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        layers = self._layers(gradients, bucket, context)
        coded = layers.coded
        squares = self._squares(layers, gradients, context) if self.tau is None else {}
        taus = self._taus(coded, squares, context)
        waiting, chosen = layers.waiting_above([taus] * len(gradients), takes=True)
        own = [(indices, np.copysign(ONE, x)) for indices, x in chosen]
        payloads = [encode_sparse(*each, coded.size, SIGN) for each in own]
        ends = np.array([stop for _, _, stop in coded.segments], np.uint32)

        def scaled(indices: Array, signs: Array) -> Pairs:
            borders = to_host(np.searchsorted(indices, placed(ends, indices))).astype(np.int64)
            backend_of(signs).multiply_runs(signs, taus, borders, signs)
            return indices, signs

        def decode(payload: Array) -> Pairs:
            return scaled(*decode_sparse(payload, coded.size, SIGN, waiting[0]))

        known = [scaled(*each) for each in own] if coded.size else []
        sent = layers.exchange(payloads, decode, waiting, known, is_taken=True)
        mean = layers.finished(sent.mean, sent.most, waiting, sent.shares)
        for name, square in squares.items():
            _kept(name, context)[:] = square
        return mean

    def _squares(
        self, layers: SparseLayers, gradients: Sequence[Array], context: Context
    ) -> dict[str, Array]:
        """Return each coded layer's running sum and weight of mean squares, float64[2]. Collective.

        The squares are of gradients divided by the loss scale, which may change.
        Raises NonFiniteGradient on all ranks if a gradient is not finite.
        """
        names = layers.coded.names
        if not names:
            return {}
        own = [
            np.array([backend_of(part).square_sum(part) / part.size for part in layers.parts(x)])
            for x in gradients
        ]
        is_good = all(np.isfinite(each).all() for each in own)  # of finite values: below 2**256
        shared_largest(
            context.world, gradients, layers.bucket, as_float(0 if is_good else NONFINITE_BITS)
        )
        means = sum_of_ranks(context.world, own) / context.world.ranks / context.loss_scale**2
        return {
            name: MEMORY * _kept(name, context) + (mean, 1.0)
            for name, mean in zip(names, means, strict=True)
        }

    def _taus(self, coded: Bucket, squares: Mapping[str, Array], context: Context) -> Array:
        """Return the threshold of each coded layer, float32[layers], the same on all ranks."""
        if self.tau is not None:
            taus = np.full(len(coded.names), self.tau)
        else:
            sums = np.array([squares[name] for name in coded.names]).reshape(-1, 2)
            taus = np.clip(self.times_rms * np.sqrt(sums[:, 0] / sums[:, 1]), LEAST, GREATEST)
        return (taus * context.loss_scale).astype(np.float32)


def _kept(layer: str, context: Context) -> Array:
    """Return a layer's running sum of mean squares and of their weights, float64[2]."""
    return context.state.shared(layer, "square", lambda: np.zeros(2))
