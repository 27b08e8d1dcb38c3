"""Strom's threshold: the sign of each value that has grown large enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..ops import backend_of, to_host
from .base import Array, Context, Mean
from .bucket import Bucket
from .payload import decode_sparse, encode_sparse
from .sparse import SparseLayers, SparseMessages, exchange

SIGN = "ternary"  # the wire of -1 and 1


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
        n, waiting = layers.coded.size, layers.waiting(gradients, context)
        payloads = [_encoded(x, float(tau)) for x in waiting]

        def decode(payload: Array) -> tuple[Array, Array]:
            indices, signs = decode_sparse(payload, n, SIGN)
            return indices, signs * tau

        sent = exchange(context.world, payloads, decode, waiting, layers.coded)
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm)
        layers.keep(waiting, context)
        return Mean(flat, {"sent_share": layers.shares(sent.shares)})


def _encoded(x: Array, tau: float) -> Array:
    """Return which values are beyond tau, and their signs, as a payload."""
    kernels = backend_of(x)
    indices = kernels.select_above(x, tau)
    signs = np.copysign(np.float32(1), to_host(kernels.gather(x, indices)))
    return encode_sparse(to_host(indices), signs, x.size, SIGN)
