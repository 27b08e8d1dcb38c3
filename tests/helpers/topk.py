"""A compressor as a newcomer adds one: the largest gradients of each layer, the rest kept.

tests/test_new_compressor.py puts this file into cpdhpc/compress, with a row in COMPRESSORS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from cpdhpc.collectives.sparse import allgather
from cpdhpc.compress.base import Aggregator, Array, Column, Context, Mean, raise_unless_finite
from cpdhpc.compress.bucket import Bucket


@dataclass(frozen=True)
class TopK(Aggregator):
    """The mean of each rank's largest values by layer, with error feedback.

    density: share of a layer's values that a rank sends, one at least
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "residual_norm": Column("norm of what ranks keep", units="1"),
        "sent_share": Column("share of non-zero gradient values that are sent", counted=True),
    }

    aggregator: Literal["mytopk"] = "mytopk"
    density: Annotated[float, Field(gt=0, le=1)] = 0.1

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean of what is sent. See Aggregator.aggregate."""
        raise_unless_finite(context.world, gradients, bucket)
        flat, norms = np.zeros(bucket.size, np.float32), []
        for name, start, stop in bucket.segments:
            memory = context.state.own(name, "residual", (stop - start,))
            sent = [self._sent(g[start:stop], m) for g, m in zip(gradients, memory, strict=True)]
            where = allgather(context.world, [index for index, _ in sent])
            values = allgather(context.world, [value for _, value in sent])
            for index, value in zip(where, values, strict=True):
                flat[start:stop][index] += value
            squares = [np.square(m, dtype=np.float64).sum(keepdims=True) for m in memory]
            norms.append(np.sqrt(np.sum(allgather(context.world, squares))))
        return Mean(flat / np.float32(context.world.ranks), {"residual_norm": np.array(norms)})

    def _sent(self, gradient: Array, memory: Array) -> tuple[Array, Array]:
        """Return indices and values that a rank sends; memory keeps the others."""
        memory += gradient
        count = max(1, round(self.density * memory.size))
        index = np.sort(np.argsort(-np.abs(memory), kind="stable")[:count]).astype(np.int64)
        values = memory[index].copy()
        memory[index] = 0
        return index, values

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Any]:
        """Count what is sent."""
        sizes = [stop - start for _, start, stop in bucket.segments]
        return {"sent_share": np.array([max(1, round(self.density * n)) for n in sizes])}
