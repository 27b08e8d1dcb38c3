"""Strom's threshold: the sign of each value that has grown large enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..ops import backend_of
from .base import Array, Context, Mean
from .bucket import Bucket
from .payload import decode_sparse, encode_sparse
from .sparse import SparseLayers, SparseMessages, exchange

SIGN = "ternary"  # the wire of -1 and 1
ONE = np.float32(1)


@dataclass(frozen=True)
class Strom(SparseMessages):
    """The mean of tau or -tau, where what a rank's gradients add up to is beyond it; else of 0.

    tau: the threshold; what is beyond it stays, and may be sent next time
    Source: Strom: Scalable distributed DNN training using commodity GPU cloud computing,
    Interspeech 2015.
    """

    aggregator: Literal["strom"] = "strom"
    tau: Annotated[float, Field(gt=1e-38, le=1e30, allow_inf_nan=False)] = 0.01

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers, tau = SparseLayers(bucket, self.exclude), np.float32(self.tau * context.loss_scale)
        layers.check_place(self, gradients, context)
        n, waiting = layers.coded.size, layers.waiting(gradients, context, check=False)
        chosen = [_beyond(x, float(tau)) for x in waiting]
        layers.check_largest(waiting, [values for _, values in chosen], context)
        payloads = [encode_sparse(i, np.copysign(ONE, x), n, SIGN) for i, x in chosen]

        def decode(payload: Array) -> tuple[Array, Array]:
            indices, signs = decode_sparse(payload, n, SIGN, waiting[0])
            return indices, backend_of(signs).multiply(signs, tau)

        sent = exchange(context.world, payloads, decode, waiting, layers.coded)
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm, sent.values)
        layers.keep(waiting, context)
        return Mean.finite(flat, {"sent_share": layers.shares(sent.shares)})


def _beyond(x: Array, tau: float) -> tuple[Array, Array]:
    """Return which values are beyond tau, uint32[m], and the values."""
    indices = backend_of(x).select_above(x, tau)
    return indices, backend_of(x).gather(x, indices)
