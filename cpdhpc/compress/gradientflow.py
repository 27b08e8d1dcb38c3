"""GradientFlow's coarse-grained sparse communication: the chunks that matter to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.sparse import sum as sum_of_ranks
from ..ops import backend_of, placed
from ..options import Allowed
from .base import (
    Array,
    Column,
    Context,
    DenseMessages,
    Mean,
    checked_mean,
    keep_residuals,
    with_residuals,
    zeros,
)
from .bucket import Bucket
from .sparse import Epochs


@dataclass(frozen=True)
class GradientFlow(DenseMessages):
    """The mean of the chunks of a bucket whose 1-norms, summed over the ranks, are the largest.

    A bucket's layers are one row of values, which is cut into chunks as equal as can be, wherever
    layers begin and end: a shorter chunk would have a smaller norm, and wait for ever.
    density: share of a bucket's chunks that are sent, one at least; the others wait and add up
    chunk_values: of a chunk at most; there are as few chunks as that allows
    dense_epochs: until then everything is sent
    wire, algorithm, scaling: of the all-reduce of what is sent; it has no indices, as all ranks
        choose alike
    Source: Sun et al.: Optimizing network performance for distributed DNN training on GPU
    clusters, arXiv 1902.06855, section 3.3; without its momentum correction.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "sent_share": Column("share of a layer's values that are sent")
    }

    aggregator: Literal["gradientflow"] = "gradientflow"
    density: Annotated[float, Allowed(gt=0, le=1)] = 0.1
    chunk_values: Annotated[int, Allowed(ge=1)] = 1024
    dense_epochs: Epochs = 0.0
    scaling: Literal["none", "tile", "block32", "block16"] | None = None

    @property
    def holds_back(self) -> bool:
        """See Aggregator.holds_back."""
        return self.density < 1

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, flat = context.world, zeros(bucket.size, gradients[0])
        waiting = with_residuals(self, gradients, bucket, context)
        where = self._chosen(waiting, context)
        method, is_sent = self._allreduce(context.seed), placed(where, flat)
        parts = [x[is_sent] for x in waiting]
        flat[is_sent] = method.run(world, parts, iteration=context.iteration).arrays[0]
        checked_mean(world, flat, waiting, bucket)
        kernels = backend_of(flat)
        for x, part in zip(waiting, parts, strict=True):
            x[is_sent] = kernels.multiply(part, np.float32(0))  # with the signs that they had
        keep_residuals(waiting, bucket, context)
        shares = [
            where[start:stop].mean() if start < stop else 0.0 for _, start, stop in bucket.segments
        ]
        return Mean.finite(flat, {"sent_share": np.array(shares)})

    def _chosen(self, waiting: list[Array], context: Context) -> Array:
        """Return which values are sent, bool[n], the same on all ranks. Collective."""
        n = waiting[0].size
        if not n or context.epoch < self.dense_epochs:
            return np.ones(n, bool)
        chunks = -(-n // self.chunk_values)
        borders = np.arange(chunks + 1) * n // chunks
        norms = [backend_of(x).run_sums(x, borders[:-1], "magnitude") for x in waiting]
        total = sum_of_ranks(context.world, norms)
        chosen = np.zeros(chunks, bool)
        chosen[np.argsort(-total, kind="stable")[: max(1, round(self.density * chunks))]] = True
        return np.repeat(chosen, np.diff(borders))
