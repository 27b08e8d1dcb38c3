"""GradientFlow's coarse-grained sparse communication: the chunks that matter to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ..collectives.sparse import sum as sum_of_ranks
from ..ops import backend_of, placed
from .base import (
    Array,
    Column,
    Context,
    DenseMessages,
    Mean,
    check_place,
    checked_mean,
    raise_unless_finite,
    zeros,
)
from .bucket import Bucket


@dataclass(frozen=True)
class GradientFlow(DenseMessages):
    """The mean of the chunks of a bucket whose 1-norms, summed over the ranks, are the largest.

    A bucket's layers are one row of values, which is cut into chunks wherever layers begin and end.
    The last chunk may be shorter: its norm counts as that of a whole chunk of values as large.
    density: share of a bucket's chunks that are sent, one at least; the others wait and add up
    chunk_values: of a chunk
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
    density: Annotated[float, Field(gt=0, le=1)] = 0.1
    chunk_values: Annotated[int, Field(ge=1)] = 1024
    dense_epochs: Annotated[float, Field(ge=0)] = 0.0
    scaling: Literal["none", "tile", "block32", "block16"] | None = None

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, flat = context.world, zeros(bucket.size, gradients[0])
        check_place(self, world, gradients)
        waiting = self._with_memory(gradients, bucket, context)
        raise_unless_finite(world, waiting, bucket)
        where = self._chosen(waiting, context)
        method, is_sent = self._allreduce(context.seed), placed(where, flat)
        parts = [x[is_sent] for x in waiting]
        flat[is_sent] = method.run(world, parts, iteration=context.iteration).arrays[0]
        checked_mean(world, flat, waiting, bucket)
        kernels = backend_of(flat)
        for x, part in zip(waiting, parts, strict=True):
            x[is_sent] = kernels.multiply(part, np.float32(0))  # with the signs that they had
        for name, start, stop in bucket.segments:
            context.state.give(name, "residual", [x[start:stop] for x in waiting])
        shares = [
            where[start:stop].mean() if start < stop else 0.0 for _, start, stop in bucket.segments
        ]
        return Mean(flat, {"sent_share": np.array(shares)})

    def _with_memory(self, gradients: list[Array], bucket: Bucket, context: Context) -> list[Array]:
        """Return the gradients of the hosted ranks with what waits."""
        found, add = [gradient.copy() for gradient in gradients], backend_of(gradients[0]).add
        for name, start, stop in bucket.segments:
            memory = context.state.own(name, "residual", (stop - start,), like=found[0])
            with np.errstate(over="ignore", invalid="ignore"):  # aggregate sees it
                for x, kept in zip(found, memory, strict=True):
                    add(x[start:stop], kept, x[start:stop])
        return found

    def _chosen(self, waiting: list[Array], context: Context) -> Array:
        """Return which values are sent, bool[n], alike on all ranks. Collective."""
        n, values = waiting[0].size, self.chunk_values
        if not n or context.epoch < self.dense_epochs:
            return np.ones(n, bool)
        starts = np.arange(0, n, values)
        norms = [backend_of(x).run_sums(x, starts, "magnitude") for x in waiting]
        total = sum_of_ranks(context.world, norms)
        total[-1] *= values / (n - starts[-1])  # else a short chunk would wait for ever
        count = max(1, round(self.density * starts.size))
        chosen = np.zeros(starts.size, bool)
        chosen[np.argsort(-total, kind="stable")[:count]] = True
        return np.repeat(chosen, values)[:n]
