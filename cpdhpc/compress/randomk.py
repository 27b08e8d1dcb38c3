"""Random-k: some values, the same random ones on all ranks, which an all-reduce adds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..ops import backend_of, cpu, placed
from ..ops.common import NONFINITE_BITS
from ..randomness import Key
from .base import (
    Array,
    Column,
    Context,
    DenseMessages,
    Layers,
    Mean,
    amax,
    bits_of_largest,
    check_known,
)
from .bucket import Bucket
from .memory import empty_mean
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
        counts = {name: count_of(density, n) for name, n in sizes.items()}
        marks = {
            name: placed(marks_of(context.key(name), counts[name], n), gradients[0])
            for name, n in sizes.items()
        }
        parts: dict[str, list[Array]] = {name: [] for name in sizes}

        def accumulate(of: OfLayer) -> int:
            name = layers.coded.names[of.layer]
            bits, values = kernels.accumulate_taking(of.gradient, of.kept, of.x, marks[name])
            if bits >= NONFINITE_BITS:  # the error names the layers by the values in x
                kernels.put(of.x, kernels.unpack_bitmap(marks[name]), values)
            parts[name].append(values)
            return int(bits)

        if self.error_feedback:
            waiting = layers.accumulated(accumulate)
        else:
            waiting = layers.joined()
            layers.check(waiting, amax(waiting))
            for name, start, stop in layers.coded.segments:
                places = kernels.unpack_bitmap(marks[name])
                parts[name] = [kernels.gather(x[start:stop], places) for x in waiting]
        means = self._mean(parts, context)
        if not self.error_feedback:
            with np.errstate(over="ignore"):  # layers.mean checks it
                for name, n in sizes.items():
                    factor = np.float32(n / counts[name])
                    means[name] = kernels.multiply(means[name], factor)
        mean = empty_mean(context, bucket, gradients[0])
        for name, start, stop in bucket.segments:
            if name in means:
                kernels.put_marked(mean[start:stop], marks[name], means[name])
        most = bits_of_largest([np.zeros(1, np.float32), *means.values()])
        shares = [counts[name] / n for name, n in sizes.items()]
        return layers.finished(mean, most, waiting, shares, self.error_feedback)


def marks_of(key: Key, k: int, n: int) -> Array:
    """Return a bit for each of n places, k of which are set, as ops.pack_bitmap has them.

    All choices are equally likely. Those that are set are drawn, or those that are not.
    """
    stream = np.random.SeedSequence(key).generate_state(2, np.uint64)
    marks = cpu.mark_drawn(stream, min(k, n - k), n)
    if n - k < k:
        marks = ~marks
        if n % 32:
            marks[-1] &= np.uint32((1 << n % 32) - 1)
    return marks
