"""Random-k: some values, the same random ones on all ranks, which an all-reduce adds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..ops import backend_of, cpu, placed
from ..ops.common import NONFINITE_BITS
from ..randomness import Key
from .base import Array, Column, Context, DenseMessages, Layers, Mean, amax, check_known
from .bucket import Bucket
from .sparse import (
    Density,
    Epochs,
    OfLayer,
    SparseMessages,
    Warmup,
    coded_layers,
    count_of,
    density_at,
)


@dataclass(frozen=True)
class RandomK(DenseMessages):
    """The mean of random values of each layer, the same ones on all ranks, sent without indices.

    density: share of a layer's values that are sent, one at least
    warmup: densities of the first epochs, one for each
    dense_epochs: until then all layers travel whole
    error_feedback: values that are not sent are added to a rank's next gradient; without it those
        that are sent are multiplied by n / k, so that the mean has no bias
    exclude: layers that travel whole in float32, as do all layers of one dimension
    wire, algorithm, scaling: of the all-reduce of the values that are sent
    Source: Stich, Cordonnier, Jaggi: Sparsified SGD with memory, NeurIPS 2018 (rand-k).
    """

    columns: ClassVar[Mapping[str, Column]] = SparseMessages.columns

    aggregator: Literal["randomk"] = "randomk"
    density: Density = 0.1
    warmup: Warmup = ()
    dense_epochs: Epochs = 0.0
    error_feedback: bool = True
    exclude: Layers = ()

    @property
    def holds_back(self) -> bool:
        return self.error_feedback and self.density < 1

    @property
    def most_momentum(self) -> float:
        """See Aggregator.most_momentum: residuals are no smaller than the values that are sent."""
        return 0.0

    def check_layers(self, names: Collection[str]) -> None:
        check_known("RandomK.exclude", self.exclude, names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        is_dense = context.epoch < self.dense_epochs
        layers = coded_layers(self, gradients, bucket, context, is_dense)
        density, kernels = (
            density_at(context.epoch, self.warmup, self.density),
            backend_of(gradients[0]),
        )
        sizes = {name: stop - start for name, start, stop in layers.coded.segments}
        drawn = {
            name: placed(drawn_distinct(context.key(name), count_of(density, n), n), gradients[0])
            for name, n in sizes.items()
        }
        parts: dict[str, list[Array]] = {name: [] for name in sizes}

        def accumulate(of: OfLayer) -> int:
            name = layers.coded.names[of.layer]
            bits, values = kernels.accumulate_taking(of.gradient, of.kept, of.x, drawn[name])
            if bits >= NONFINITE_BITS:  # the error names the layers by the values in x
                kernels.put(of.x, drawn[name], values)
            parts[name].append(values)
            return int(bits)

        if self.error_feedback:
            waiting = layers.accumulated(accumulate)
        else:
            waiting = layers.joined()
            layers.check(waiting, amax(waiting))
            for name, start, stop in layers.coded.segments:
                parts[name] = [kernels.gather(x[start:stop], drawn[name]) for x in waiting]
        means = self._mean(parts, context)
        if not self.error_feedback:
            with np.errstate(over="ignore"):  # layers.mean checks it
                for name, n in sizes.items():
                    factor = np.float32(n / drawn[name].size)
                    means[name] = kernels.multiply(means[name], factor)
        places = {name: drawn[name] + np.uint32(start) for name, start, _ in layers.coded.segments}
        mean, most = layers.mean_of_layers(places, means)
        shares = [drawn[name].size / n for name, n in sizes.items()]
        return layers.finished(mean, most, waiting, shares, self.error_feedback)


def drawn_distinct(key: Key, k: int, n: int) -> Array:
    """Return k random numbers of 0..n - 1, ascending, uint32[k]; all choices are equally likely.

    Numbers are drawn until enough are distinct: those that are taken, or those that are left out.
    """
    stream = np.random.Philox(np.random.SeedSequence(key))
    taken, few = np.zeros(-(-n // 32), np.uint32), min(k, n - k)
    missing = few
    while missing:
        missing -= cpu.mark_drawn(stream.random_raw(missing), n, taken)
    if few < k:
        taken = ~taken
        if n % 32:
            taken[-1] &= np.uint32((1 << n % 32) - 1)
    return cpu.unpack_bitmap(taken)
