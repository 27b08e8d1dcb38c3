"""Top-k: each rank sends its largest values, and keeps the others as residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Array, Context, Mean
from .bucket import Bucket
from .sparse import LargestValues


@dataclass(frozen=True)
class TopK(LargestValues):
    """The mean of the largest values of each rank's gradient plus residual.

    error_feedback: values that are not sent are added to a rank's next gradient
    Source: Aji, Heafield: Sparse communication for distributed gradient descent, EMNLP 2017;
    Stich, Cordonnier, Jaggi: Sparsified SGD with memory, NeurIPS 2018.
    """

    aggregator: Literal["topk"] = "topk"
    error_feedback: bool = True

    @property
    def holds_back(self) -> bool:
        return self.error_feedback and self.density < 1

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        layers, density = self._layers(gradients, bucket, context), self._density(context)
        if self.error_feedback:
            waiting, _, chosen = layers.largest_waiting(density, self.within)
        else:
            waiting = layers.joined()
            chosen = [layers.largest(x, density, self.within) for x in waiting]
        sent = self._send(waiting, chosen, layers)
        return layers.finished(sent.mean, sent.most, waiting, sent.shares, self.error_feedback)
