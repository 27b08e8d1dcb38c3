"""Base of sparse methods: coded layers, their residuals, and sums of the values that ranks send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from ..collectives.allreduce import Allreduce
from ..collectives.method import configured
from ..collectives.sparse import allgather
from ..methods import USUAL
from ..ops import backend_of, placed, to_host
from ..ops.common import NONFINITE_BITS
from ..ops.payloads import packed_wire
from ..options import Allowed
from .base import (
    RESIDUAL,
    Aggregator,
    Array,
    Column,
    Context,
    Layers,
    Mean,
    amax,
    as_float,
    check_known,
    check_place,
    mean_in_float32,
    nonfinite,
    shared_largest,
)
from .bucket import Bucket
from .memory import clear_mean, keep, take_spare
from .momentum import MOMENTUM
from .payload import decode_sparse, encode_sparse

Density = Annotated[float, Allowed(gt=0, le=1)]  # an option: share of values
Warmup = Annotated[tuple[Density, ...], Allowed(is_array=True)]  # an option: densities of epochs
Epochs = Annotated[float, Allowed(ge=0)]  # an option: first epochs in which everything is sent
Within = Literal["layer", "bucket"]


@dataclass(frozen=True)
class SparseMessages(Aggregator):
    """A method whose ranks send some values of layers, with their indices, to all others.

    exclude: layers that travel whole in float32, as do all layers of one dimension
    dense_epochs: until then all layers travel whole
    algorithm: of the all-reduce of layers that travel whole
    Raises ValueError for an unknown one.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "sent_share": Column("share of a layer's values that a rank sends, mean over ranks")
    }

    exclude: Layers = ()
    dense_epochs: Epochs = 0.0
    algorithm: str = USUAL

    @property
    def holds_back(self) -> bool:
        return True

    def _layers(self, gradients: Sequence[Array], bucket: Bucket, context: Context) -> SparseLayers:
        """Return the layers that are coded in a call of aggregate."""
        is_dense = context.epoch < self.dense_epochs
        return coded_layers(self, gradients, bucket, context, is_dense)

    def __post_init__(self) -> None:
        configured(Allreduce, wire="raw", algorithm=self.algorithm, op="mean")

    def check_layers(self, names: Collection[str]) -> None:
        check_known(f"{type(self).__name__}.exclude", self.exclude, names)


@dataclass(frozen=True)
class LargestValues(SparseMessages):
    """A method whose ranks send the values of the largest magnitudes.

    density: share of values that a rank sends, one of a layer at least
    warmup: densities of the first epochs, one for each
    within: "layer": the largest values of each layer; "bucket": those of all layers of a bucket
    wire: of the values that are sent: "raw" or a format; its rounding errors join the residual
    Raises ValueError for an unknown wire.
    """

    density: Density = 0.01
    warmup: Warmup = ()
    within: Within = "layer"
    wire: str = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        packed_wire(self.wire, "allreduce")

    def _density(self, context: Context) -> float:
        """Return the share of values that a rank sends."""
        is_dense = context.epoch < self.dense_epochs  # of a method that codes layers nevertheless
        return 1.0 if is_dense else density_at(context.epoch, self.warmup, self.density)

    def _send(
        self, waiting: Sequence[Array], chosen: Sequence[Pairs], layers: SparseLayers
    ) -> Sent:
        """Send the largest values, and subtract them from waiting. Collective. See exchange.

        waiting: float32[coded.size] of each hosted rank, not checked yet
        chosen: the largest values of each, which are sent; NaN and infinity are among them
        """
        layers.check(waiting, amax([values for _, values in chosen]))
        n, wire = layers.coded.size, self.wire
        payloads = [encode_sparse(*each, n, wire) for each in chosen]
        decode = partial(decode_sparse, size=n, wire=wire, like=waiting[0])
        return layers.exchange(payloads, decode, waiting, chosen if wire == "raw" else ())


def density_at(epoch: float, warmup: Sequence[float], density: float) -> float:
    """Return the density of an epoch: that of warmup while it lasts, one for each epoch."""
    return warmup[int(epoch)] if epoch < len(warmup) else density


def count_of(density: float, n: int) -> int:
    """Return how many of n values are sent: one at least, unless n is 0."""
    return min(n, max(1, round(density * n)))


Pairs = tuple[Array, Array]  # indices, uint32[m], ascending, and their values, float32[m]


def largest(x: Array, coded: Bucket, density: float, within: Within) -> Array:
    """Return the ascending indices of the largest values of each layer, or of all, uint32[m].

    x: float32[coded.size], finite; of values of equal magnitude the first ones are taken
    """
    select = backend_of(x).select_magnitude
    spans = [(0, x.size)] if within == "bucket" else [(a, b) for _, a, b in coded.segments]
    found = [select(x[a:b], count_of(density, b - a)) + np.uint32(a) for a, b in spans if a < b]
    return np.concatenate(found) if found else np.empty_like(x, shape=(0,), dtype=np.uint32)


class Coding(Protocol):
    """The options of a method that codes some layers and all-reduces the others."""

    @property
    def exclude(self) -> Collection[str]:
        """Layers that travel whole."""

    @property
    def algorithm(self) -> str:
        """The all-reduce of layers that travel whole."""


def coded_layers(
    method: Coding, gradients: Sequence[Array], bucket: Bucket, context: Context, is_dense: bool
) -> SparseLayers:
    """Return the layers that a method codes, none if is_dense. See base.check_place.

    The caller must go on to a method that checks the values.
    """
    exclude = bucket.names if is_dense else method.exclude
    layers = SparseLayers(bucket, gradients, context, exclude, method.algorithm)
    if layers.coded.size:  # else mean_in_float32 checks the gradients
        check_place(method, context.world, gradients)
    return layers


@dataclass(frozen=True)
class SparseLayers:
    """The layers of a bucket that a sparse method codes in a call; the others travel in float32.

    bucket: all layers; gradients: float32[bucket.size] of each hosted rank
    exclude: those that travel whole, as do layers of one dimension; algorithm: of their all-reduce
    """

    bucket: Bucket
    gradients: Sequence[Array]
    context: Context
    exclude: Collection[str]
    algorithm: str

    @cached_property
    def coded(self) -> Bucket:
        """The coded layers, none of them empty, one after the other without gaps."""
        layers = [
            (name, shape)
            for name, shape in zip(self.bucket.names, self.bucket.shapes, strict=True)
            if len(shape) > 1 and 0 not in shape and name not in self.exclude
        ]
        return Bucket(tuple(name for name, _ in layers), tuple(shape for _, shape in layers))

    @cached_property
    def _places(self) -> list[tuple[slice, slice]]:
        """The slice of each coded layer in the bucket, and that in coded."""
        lies = {name: slice(start, stop) for name, start, stop in self.bucket.segments}
        return [(lies[name], slice(start, stop)) for name, start, stop in self.coded.segments]

    def joined(self) -> list[Array]:
        """Return the coded layers of each hosted rank's gradient, new float32[coded.size]."""
        return [np.concatenate([x[:0], *self.parts(x)]) for x in self.gradients]

    def parts(self, gradient: Array) -> list[Array]:
        """Return the coded layers of a gradient, float32[bucket.size], as views."""
        return [gradient[source] for source, _ in self._places]

    def each(self, xs: Sequence[Array], name: str = RESIDUAL) -> Iterator[OfLayer]:
        """Yield each coded layer of each hosted rank, layer after layer.

        xs: float32[coded.size] of each hosted rank; name: of the state, which is on their device
        """
        for layer, (source, place) in enumerate(self._places):
            shape, like = (place.stop - place.start,), xs[0]
            memory = self.context.state.own(self.coded.names[layer], name, shape, like=like)
            for row, (gradient, kept, x) in enumerate(zip(self.gradients, memory, xs, strict=True)):
                yield OfLayer(layer, row, place.start, gradient[source], kept, x[place])

    def accumulated(self, accumulate: Callable[[OfLayer], int]) -> list[Array]:
        """Return gradients plus residuals, float32[coded.size] of each hosted rank. Collective.

        accumulate: writes the sum of gradient and kept into x, perhaps without some values, and
            returns the bits of the largest magnitude of all sums
        Raises NonFiniteGradient on all ranks if a sum is not finite.
        """
        found, most = take_spare(self.context, RESIDUAL, self.coded.size, self.gradients), 0
        for each in self.each(found):
            most = max(most, accumulate(each))
        self.check(found, as_float(most))
        return found

    def with_residuals(self) -> list[Array]:
        """Return gradients plus residuals. Collective. See accumulated."""
        return self.accumulated(lambda of: backend_of(of.x).accumulate(of.gradient, of.kept, of.x))

    def largest_waiting(
        self, density: float, within: Within, momentum: float | None = None
    ) -> Waiting:
        """Return gradients plus residuals, not checked yet, and their largest values.

        momentum: if given, the momenta in the state, times it, plus gradients are added to the
            residuals instead of the gradients
        """
        sums = take_spare(self.context, RESIDUAL, self.coded.size, self.gradients)
        pushes, chosen = list[Array](), [list[Pairs]() for _ in sums]
        name, outs, more = RESIDUAL, sums, dict[str, Any]()
        if momentum is not None:
            pushes = take_spare(self.context, MOMENTUM, self.coded.size, sums)
            name, outs = MOMENTUM, pushes
        for of, total in zip(self.each(outs, name), self.each(sums), strict=True):
            if momentum is not None:
                more = {"factor": momentum, "more": total.kept, "total": total.x}
            k = count_of(density, of.x.size) if within == "layer" else 0
            select = backend_of(of.x).accumulate_largest
            found, values = select(of.gradient, of.kept, of.x, k, **more)
            chosen[of.row].append((found + np.uint32(of.start), values))
        if within == "bucket":
            return Waiting(sums, pushes, [self.largest(x, density, within) for x in sums])
        return Waiting(sums, pushes, [self._joined(each, sums[0]) for each in chosen])

    def waiting_above(
        self, thresholds: Sequence[Sequence[float] | Array], takes: bool = False
    ) -> tuple[list[Array], list[Pairs]]:
        """Return gradients plus residuals, and their values above a threshold. Collective.

        thresholds: of each hosted rank those of the coded layers. Raises as accumulated.
        takes: subtract the threshold from the magnitudes of these values
        """
        above = [list[Pairs]() for _ in self.gradients]

        def accumulate(of: OfLayer) -> int:
            select, limit = backend_of(of.x).accumulate_above, float(thresholds[of.row][of.layer])
            less = limit if takes else 0.0
            bits, indices, values = select(of.gradient, of.kept, of.x, limit, less)
            above[of.row].append((indices + np.uint32(of.start), values))
            return int(bits)

        found = self.accumulated(accumulate)
        return found, [self._joined(each, found[0]) for each in above]

    def _joined(self, parts: Sequence[Pairs], like: Array) -> Pairs:
        """Return the indices and values of all coded layers."""
        none = np.empty_like(like, shape=(0,), dtype=np.uint32), like[:0]
        indices, values = map(np.concatenate, zip(none, *parts, strict=True))
        return indices, values

    def largest(self, x: Array, density: float, within: Within) -> Pairs:
        """Return the largest values of float32[coded.size]; see sparse.largest."""
        indices = largest(x, self.coded, density, within)
        return indices, backend_of(x).gather(x, indices)

    def keep(self, xs: Sequence[Array], name: str = RESIDUAL) -> None:
        """Keep float32[coded.size] of each hosted rank in the state. See memory.keep."""
        keep(self.context, self.coded, name, xs)

    def check(self, xs: Sequence[Array], most: Array) -> None:
        """Raise NonFiniteGradient on all ranks if one has NaN or infinity. Collective.

        xs: float32[coded.size] of each hosted rank; most: float32[1], their largest magnitude
        """
        if self.coded.size:
            shared_largest(self.context.world, xs, self.coded, most)

    def mean_of(
        self, indices: Sequence[Array], values: Sequence[Array], divisor: float
    ) -> tuple[Array, int]:
        """Return the sum of sparse arrays over divisor, float32[bucket.size], and its largest bits.

        indices: of each array in the bucket, uint32[m], ascending; there is at least one array
        """
        flat = self.context.out
        if flat is None:
            flat = np.empty_like(values[0], shape=(self.bucket.size,))
        return flat, backend_of(flat).mean_places(indices, values, divisor, flat)

    def mean_of_layers(
        self, places: Mapping[str, Array], means: Mapping[str, Array]
    ) -> tuple[Array, int]:
        """Return float32[bucket.size] with the means of some values, and its largest bits.

        places: by layer their indices in coded, uint32[m], ascending; means: float32[m]
        """
        names, like = self.coded.names, self.gradients[0]
        none = np.empty_like(like, shape=(0,), dtype=np.uint32)
        at = np.concatenate([none, *(places[name] for name in names)])
        counts = np.array([places[name].size for name in names], np.int64)
        values = np.concatenate([like[:0], *(means[name].reshape(-1) for name in names)])
        return self.mean_of([self.in_bucket(at, counts)], [values], 1.0)

    def in_bucket(self, indices: Array, counts: Array) -> Array:
        """Return the indices in the bucket, uint32[m], of indices in coded.

        counts: number of indices of each coded layer, int64[layers]
        """
        if self.coded.segments == self.bucket.segments:
            return indices
        moved = [source.start - place.start for source, place in self._places]
        steps = np.repeat(np.array(moved, np.uint32), counts)
        return indices + placed(steps, indices)

    def mean(self, flat: Array, most: int, xs: Sequence[Array]) -> Array:
        """Write the mean of the layers that travel whole into flat; return flat. Collective.

        flat: float32[bucket.size], the mean of the coded layers, identical on all ranks, and zeros
        most: the bits of its largest magnitude; xs: the coded layers of each hosted rank
        Raises NonFiniteGradient on all ranks, also if finite values have no finite sum.
        """
        if most >= NONFINITE_BITS:
            found = [bool(np.isfinite(flat[source]).all()) for source, _ in self._places]
            bad = [i for i, is_good in enumerate(found) if not is_good]
            raise nonfinite(self.context.world, xs, self.coded, bad)
        if self.coded.segments != self.bucket.segments:
            whole = set(self.bucket.names) - set(self.coded.names)
            gradients, algorithm = self.gradients, self.algorithm
            mean_in_float32(gradients, self.bucket, whole, self.context, flat, algorithm)
        return flat

    def shares(self, coded: Sequence[float] | Array) -> dict[str, Array]:
        """Return "sent_share", float64[layers]: 1 for layers that travel whole.

        coded: shares of the coded layers
        """
        known = dict(zip(self.coded.names, coded, strict=True))
        return {"sent_share": np.array([known.get(name, 1.0) for name in self.bucket.names])}

    def finished(
        self,
        mean: Array,
        most: int,
        waiting: Sequence[Array],
        shares: Sequence[float] | Array,
        keeps: bool = True,
    ) -> Mean:
        """Return the mean of all layers, after waiting is kept as residuals. Collective.

        mean, most, waiting: as for mean; shares: as for shares; keeps: False without residuals
        """
        flat = self.mean(mean, most, waiting)
        if keeps:
            self.keep(waiting)
        return Mean.finite(flat, self.shares(shares))

    def exchange(
        self,
        payloads: Sequence[Array],
        decode: Callable[[Array], Pairs],
        waiting: Sequence[Array],
        known: Sequence[Pairs] = (),
        is_taken: bool = False,
    ) -> Sent:
        """Send payloads to all ranks, and subtract the values that were sent. Collective.

        payloads: uint8[bytes] of each hosted rank; decode: returns their indices in the coded
            layers, uint32[m], ascending, and values, float32[m]
        waiting: float32[coded.size] of each hosted rank, from which its own values are subtracted
        known: what decode would return for each hosted rank, if that is known
        is_taken: whether its own values are subtracted already
        The values of all ranks are added in the order of ranks.
        """
        world, coded, kernels = self.context.world, self.coded, backend_of(waiting[0])
        borders = np.array([*(start for _, start, _ in coded.segments), coded.size], np.int64)
        counts, places, terms = np.zeros(len(coded.names), np.int64), list[Array](), list[Array]()
        for rank, payload in enumerate(allgather(world, payloads) if coded.size else ()):
            row = rank - world.hosted.start
            indices, values = known[row] if known and world.hosts(rank) else decode(payload)
            ends = np.searchsorted(indices, placed(borders.astype(np.uint32), indices))
            own_counts = np.diff(to_host(ends))
            counts += own_counts
            terms.append(placed(values, waiting[0]))
            places.append(placed(self.in_bucket(indices, own_counts), waiting[0]))
            if world.hosts(rank) and not is_taken:
                own = waiting[row]
                negative = kernels.multiply(terms[-1], np.float32(-1))
                kernels.scatter_add(own, placed(indices, own), negative)
        if not terms:  # no layer is coded
            mean = clear_mean(self.context, self.bucket, waiting[0])
            return Sent(mean, 0, counts.astype(np.float64))
        total, most = self.mean_of(places, terms, float(world.ranks))
        return Sent(total, most, counts / (np.diff(borders) * world.ranks))


class OfLayer(NamedTuple):
    """A coded layer of a hosted rank.

    layer: its number; row: the rank's place in lists of hosted ranks; start: its first in coded
    gradient, kept, x: float32[n]: its gradient, its state and its part of an array of coded layers
    """

    layer: int
    row: int
    start: int
    gradient: Array
    kept: Array
    x: Array


class Waiting(NamedTuple):
    """Gradients plus residuals of each hosted rank.

    sums: float32[coded.size]; pushes: the same of the momenta, if there are any
    chosen: the largest values of sums
    """

    sums: list[Array]
    pushes: list[Array]
    chosen: list[Pairs]


class Sent(NamedTuple):
    """The result of an exchange of payloads, identical on all ranks.

    mean: float32[bucket.size], 0 for layers that are not coded
    most: the bits of its largest magnitude
    shares: of each layer that a rank sends, mean over ranks, float64[layers]
    """

    mean: Array
    most: int
    shares: Array
