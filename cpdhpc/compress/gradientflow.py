"""GradientFlow's coarse-grained sparse communication: the chunks with the largest norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ..collectives.checks import is_finite
from ..collectives.sparse import sum as sum_of_ranks
from ..ops import backend_of, on_gpu, placed
from ..options import Allowed
from .base import RESIDUAL, Array, Column, Context, DenseMessages, Mean, checked_mean
from .bucket import Bucket
from .memory import clear_mean, keep, with_residuals
from .sparse import Epochs


@dataclass(frozen=True)
class GradientFlow(DenseMessages):
    """The mean of the chunks of a bucket whose 1-norms, summed over the ranks, are the largest.

    The values of a bucket are cut into chunks of almost equal size, across the borders of layers: a
    much shorter chunk would have a smaller norm, and would never be sent.
    density: share of a bucket's chunks that are sent, one at least; the others are accumulated
    chunk_values: of a chunk at most; there are as few chunks as that allows
    dense_epochs: until then everything is sent
    wire, algorithm, scaling: of the all-reduce of the chosen chunks; it needs no indices, as all
        ranks choose the same chunks
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
        return self.density < 1

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        world, flat = context.world, clear_mean(context, bucket, gradients[0])
        waiting = with_residuals(self, gradients, bucket, context)
        spans = self._chosen(waiting, context)
        method, is_sent = self._allreduce(context.seed), _taken(spans, flat)
        parts = [np.concatenate([x[:0], *(x[each] for each in is_sent)]) for x in waiting]
        mean, end = method.run(world, parts, iteration=context.iteration).arrays[0], 0
        for each in is_sent:
            begin, end = end, end + flat[each].size
            flat[each] = mean[begin:end]
        if not is_finite(mean):  # on all ranks or on none
            checked_mean(world, flat, waiting, bucket)
        multiply, zero = backend_of(flat).multiply, np.float32(0)
        for x in waiting:
            for each in is_sent:  # zeros keep the signs of the values
                x[each] = multiply(x[each], zero)
        keep(context, bucket, RESIDUAL, waiting)
        shares = [_within(spans, start, stop) for _, start, stop in bucket.segments]
        return Mean.finite(flat, {"sent_share": np.array(shares)})

    def _chosen(self, waiting: list[Array], context: Context) -> Array:
        """Return the begin and end of each span of chosen chunks, int64[spans, 2]. Collective."""
        n = waiting[0].size
        if not n or context.epoch < self.dense_epochs:
            return np.array([[0, n]])
        chunks = -(-n // self.chunk_values)
        borders = np.arange(chunks + 1) * n // chunks
        norms = [backend_of(x).run_sums(x, borders[:-1], "magnitude") for x in waiting]
        total = sum_of_ranks(context.world, norms)
        chosen = np.zeros(chunks, bool)
        chosen[np.argsort(-total, kind="stable")[: max(1, round(self.density * chunks))]] = True
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        return borders[edges].reshape(-1, 2)


def _taken(spans: Array, like: Array) -> list[Any]:
    """Return indices for the values of spans: a slice for each; on a GPU, one mask for all."""
    if not on_gpu(like):
        return [slice(start, stop) for start, stop in spans.tolist()]
    mask = np.zeros(like.size, bool)
    for start, stop in spans.tolist():
        mask[start:stop] = True
    return [placed(mask, like)]


def _within(spans: Array, start: int, stop: int) -> float:
    """Return the share of the values from start to stop that lie in spans."""
    inside = np.minimum(spans[:, 1], stop) - np.maximum(spans[:, 0], start)
    return float(inside.clip(0).sum() / (stop - start)) if start < stop else 0.0
