"""Base of sparse methods: coded layers, their residuals, and sums of the values that ranks send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar, Literal, NamedTuple

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
    amax,
    as_float,
    bits_of_largest,
    blocks,
    check_known,
    check_place,
    mean_in_float32,
    nonfinite,
    raise_unless_finite,
    shared_largest,
)
from .bucket import Bucket
from .memory import add_kept, clear_mean, keep, take_spare
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
        """See Aggregator.holds_back."""
        return True

    def _layers(self, bucket: Bucket, context: Context) -> SparseLayers:
        """Return which layers are coded in an epoch."""
        return SparseLayers(bucket, whole_now(bucket, context, self.dense_epochs, self.exclude))

    def __post_init__(self) -> None:
        configured(Allreduce, wire="raw", algorithm=self.algorithm, op="mean")

    def check_layers(self, names: Collection[str]) -> None:
        """See Aggregator.check_layers."""
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
        self,
        waiting: Sequence[Array],
        chosen: Sequence[Pairs],
        layers: SparseLayers,
        context: Context,
    ) -> Sent:
        """Send the largest values, and subtract them from waiting. Collective. See exchange.

        waiting: float32[coded.size] of each hosted rank, not checked yet
        chosen: the largest values of each, which are sent
        """
        layers.check_largest(waiting, [values for _, values in chosen], context)
        n, wire = layers.coded.size, self.wire
        payloads = [encode_sparse(*each, n, wire) for each in chosen]
        decode = partial(decode_sparse, size=n, wire=wire, like=waiting[0])
        return exchange(context, payloads, decode, waiting, layers)


def whole_now(
    bucket: Bucket, context: Context, dense_epochs: float, exclude: Collection[str]
) -> Collection[str]:
    """Return the layers that travel whole: all of them until dense_epochs, then exclude."""
    return bucket.names if context.epoch < dense_epochs else exclude


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


@dataclass(frozen=True)
class SparseLayers:
    """The layers of a bucket that a sparse method codes; the others travel whole in float32.

    bucket: all layers; exclude: those that travel whole, as do layers of one dimension
    """

    bucket: Bucket
    exclude: Collection[str] = ()

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

    def check_place(self, method: Aggregator, gradients: Sequence[Array], context: Context) -> None:
        """See base.check_place. The caller must go on to a method that checks the values."""
        if self.coded.size:  # else mean_in_float32 checks the gradients
            check_place(method, context.world, gradients)

    def joined(self, gradients: Sequence[Array]) -> list[Array]:
        """Return the coded layers of each hosted rank's gradient, new float32[coded.size]."""
        return [np.concatenate([x[:0], *self.parts(x)]) for x in gradients]

    def parts(self, gradient: Array) -> list[Array]:
        """Return the coded layers of a gradient, float32[bucket.size], as views."""
        return [gradient[source] for source, _ in self._places]

    def waiting(
        self,
        gradients: Sequence[Array],
        context: Context,
        feedback: bool = True,
        check: bool = True,
    ) -> list[Array]:
        """Return joined(gradients) with the memory "residual" added to it. Collective.

        feedback: False for methods, or options, without a memory
        check: raise NonFiniteGradient as check; False where check_largest follows
        """
        if not feedback:
            own = self.joined(gradients)
            if check:
                self.check(own, context)
            return own
        found = take_spare(context, RESIDUAL, self.coded.size, gradients)
        lie = [(n, *places) for n, places in zip(self.coded.names, self._places, strict=True)]
        most = add_kept(context, RESIDUAL, gradients, lie, found)
        if check and self.coded.size:
            shared_largest(context.world, found, self.coded, as_float(most))
        return found

    def largest_waiting(
        self,
        gradients: Sequence[Array],
        context: Context,
        density: float,
        within: Within,
        momentum: float | None = None,
    ) -> Waiting:
        """Return what waits, and its largest values, which check_largest is to look at.

        momentum: then what waits has grown by the memory "momentum", times this, with gradients
        """
        name = RESIDUAL if momentum is None else MOMENTUM
        sums = take_spare(context, RESIDUAL, self.coded.size, gradients)
        pushes = [] if momentum is None else take_spare(context, MOMENTUM, self.coded.size, sums)
        chosen = [list[Pairs]() for _ in gradients]
        for (source, _), (place, memory), (_, residuals) in zip(
            self._places,
            self._memories(sums, context, name),
            self._memories(sums, context, RESIDUAL),
            strict=True,
        ):
            size = place.stop - place.start
            k = count_of(density, size) if within == "layer" else 0
            for row, (x, kept) in enumerate(zip(gradients, memory, strict=True)):
                out, more = sums[row][place], {}
                if momentum is not None:
                    more = {"factor": momentum, "more": residuals[row], "total": out}
                    out = pushes[row][place]
                select = backend_of(out).accumulate_largest
                found, values = select(x[source], kept, out, k, **more)
                chosen[row].append((found + np.uint32(place.start), values))
        if within == "bucket":
            return Waiting(sums, pushes, [self.largest(x, density, within) for x in sums])
        return Waiting(sums, pushes, [self._joined(each, sums[0]) for each in chosen])

    def waiting_above(
        self,
        gradients: Sequence[Array],
        context: Context,
        thresholds: Sequence[Sequence[float] | Array],
    ) -> tuple[list[Array], list[Pairs]]:
        """Return what waits, and its values above a threshold, of each hosted rank. Collective.

        thresholds: of each hosted rank those of the coded layers
        Raises as waiting.
        """
        found, most = take_spare(context, RESIDUAL, self.coded.size, gradients), 0
        above, memories = [list[Pairs]() for _ in found], self._memories(found, context, RESIDUAL)
        for layer, ((source, _), (place, memory)) in enumerate(
            zip(self._places, memories, strict=True)
        ):
            for row, (x, kept) in enumerate(zip(gradients, memory, strict=True)):
                limit, out = float(thresholds[row][layer]), found[row][place]
                select = backend_of(out).accumulate_above
                bits, indices, values = select(x[source], kept, out, limit)
                above[row].append((indices + np.uint32(place.start), values))
                most = max(most, bits)
        if self.coded.size:
            shared_largest(context.world, found, self.coded, as_float(most))
        return found, [self._joined(each, found[0]) for each in above]

    def waiting_taking(
        self, gradients: Sequence[Array], context: Context, drawn: Sequence[Array]
    ) -> tuple[list[Array], list[list[Array]]]:
        """Return what waits but for some values, and these, of each hosted rank. Collective.

        drawn: their ascending places in each coded layer, uint32[m]; the values come by layer
        Raises as waiting.
        """
        found, most = take_spare(context, RESIDUAL, self.coded.size, gradients), 0
        taken, memories = [list[Array]() for _ in found], self._memories(found, context, RESIDUAL)
        for at, (source, _), (place, memory) in zip(drawn, self._places, memories, strict=True):
            for row, (x, kept) in enumerate(zip(gradients, memory, strict=True)):
                out = found[row][place]
                bits, values = backend_of(out).accumulate_taking(x[source], kept, out, at)
                if bits >= NONFINITE_BITS:  # so that the error finds the layer
                    backend_of(out).put(out, at, values)
                taken[row].append(values)
                most = max(most, bits)
        if self.coded.size:
            shared_largest(context.world, found, self.coded, as_float(most))
        return found, taken

    def _joined(self, parts: Sequence[Pairs], like: Array) -> Pairs:
        """Return the indices and values of all coded layers."""
        none = np.empty_like(like, shape=(0,), dtype=np.uint32), like[:0]
        indices, values = map(np.concatenate, zip(none, *parts, strict=True))
        return indices, values

    def largest(self, x: Array, density: float, within: Within) -> Pairs:
        """Return the largest values of float32[coded.size]; see sparse.largest."""
        indices = largest(x, self.coded, density, within)
        return indices, backend_of(x).gather(x, indices)

    def add(
        self, xs: Sequence[Array], context: Context, name: str, factor: float, own: float
    ) -> None:
        """Write own * x + factor * state into each hosted rank's x, float32[coded.size]."""
        for place, memory in self._memories(xs, context, name):
            for x, kept in zip((x[place] for x in xs), memory, strict=True):
                for part in blocks(kept):
                    backend_of(x).multiply(x[part], np.float32(own), x[part])
                    backend_of(x).accumulate(x[part], kept[part], x[part], factor=factor)

    def keep(self, xs: Sequence[Array], context: Context, name: str = RESIDUAL) -> None:
        """Keep float32[coded.size] of each hosted rank in the state. See memory.keep."""
        keep(context, self.coded, name, xs)

    def _memories(
        self, xs: Sequence[Array], context: Context, name: str
    ) -> Iterator[tuple[slice, list[Array]]]:
        """Yield the slice of each coded layer in coded, and its state of each hosted rank.

        xs: arrays on the device of the state
        """
        for layer, start, stop in self.coded.segments:
            memory = context.state.own(layer, name, (stop - start,), like=xs[0])
            yield slice(start, stop), memory

    def check(self, xs: Sequence[Array], context: Context) -> None:
        """Raise NonFiniteGradient on all ranks if one has NaN or infinity. Collective.

        xs: float32[coded.size] of each hosted rank
        """
        if self.coded.size:
            raise_unless_finite(context.world, xs, self.coded)

    def check_largest(
        self, xs: Sequence[Array], largest: Sequence[Array], context: Context
    ) -> None:
        """Raise as check, for x whose largest values are known: NaN and infinity are among them."""
        if self.coded.size:
            shared_largest(context.world, xs, self.coded, amax(largest))

    def mean_of(
        self, indices: Sequence[Array], values: Sequence[Array], divisor: float, context: Context
    ) -> tuple[Array, int]:
        """Return the sum of sparse arrays over divisor, float32[bucket.size], and its largest bits.

        indices: of each array in the bucket, uint32[m], ascending; there is at least one array
        """
        flat = context.out
        if flat is None:
            flat = np.empty_like(values[0], shape=(self.bucket.size,))
        return flat, backend_of(flat).mean_places(indices, values, divisor, flat)

    def mean_of_layers(
        self,
        places: Mapping[str, Array],
        means: Mapping[str, Array],
        context: Context,
        like: Array,
    ) -> tuple[Array, int]:
        """Return float32[bucket.size] with the means of some values, and its largest bits.

        places: by layer their indices in coded, uint32[m], ascending; means: float32[m]
        like: an array on the device of the mean
        """
        names = self.coded.names
        none = np.empty_like(like, shape=(0,), dtype=np.uint32)
        at = np.concatenate([none, *(places[name] for name in names)])
        counts = np.array([places[name].size for name in names], np.int64)
        values = np.concatenate([like[:0], *(means[name].reshape(-1) for name in names)])
        return self.mean_of([self.in_bucket(at, counts)], [values], 1.0, context)

    def in_bucket(self, indices: Array, counts: Array) -> Array:
        """Return the indices in the bucket, uint32[m], of indices in coded.

        counts: number of indices of each coded layer, int64[layers]
        """
        if self.coded.segments == self.bucket.segments:
            return indices
        moved = [source.start - place.start for source, place in self._places]
        steps = np.repeat(np.array(moved, np.uint32), counts)
        return indices + placed(steps, indices)

    def mean(
        self,
        flat: Array,
        xs: Sequence[Array],
        gradients: Sequence[Array],
        context: Context,
        algorithm: str,
        most: int | None = None,
    ) -> Array:
        """Write the mean of the layers that travel whole into flat; return flat. Collective.

        flat: float32[bucket.size], the mean of the coded layers, identical on all ranks, and zeros
        xs: the coded layers of each hosted rank; most: the bits of flat's largest magnitude
        gradients, algorithm: of the layers that travel whole
        Raises NonFiniteGradient on all ranks, also if finite values have no finite sum.
        """
        if most is None:
            most = bits_of_largest([flat])
        if most >= NONFINITE_BITS:
            found = [bool(np.isfinite(flat[source]).all()) for source, _ in self._places]
            bad = [i for i, is_good in enumerate(found) if not is_good]
            raise nonfinite(context.world, xs, self.coded, bad)
        if self.coded.segments != self.bucket.segments:
            whole = set(self.bucket.names) - set(self.coded.names)
            mean_in_float32(gradients, self.bucket, whole, context, flat, algorithm)
        return flat

    def shares(self, coded: Sequence[float] | Array) -> Array:
        """Return the share of each layer that is sent, float64[layers]: 1 if it travels whole.

        coded: shares of the coded layers
        """
        known = dict(zip(self.coded.names, coded, strict=True))
        return np.array([known.get(name, 1.0) for name in self.bucket.names])


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


def exchange(
    context: Context,
    payloads: Sequence[Array],
    decode: Callable[[Array], tuple[Array, Array]],
    waiting: Sequence[Array],
    layers: SparseLayers,
) -> Sent:
    """Send payloads to all ranks, and subtract the values that were sent. Collective.

    payloads: uint8[bytes] of each hosted rank; decode: returns their indices in the coded layers,
        uint32[m], ascending, and values, float32[m]
    waiting: float32[coded.size] of each hosted rank, from which its own values are subtracted
    The values of all ranks are added in the order of ranks.
    """
    world, coded, kernels = context.world, layers.coded, backend_of(waiting[0])
    borders = np.array([*(start for _, start, _ in coded.segments), coded.size], np.int64)
    counts, places, terms = np.zeros(len(coded.names), np.int64), list[Array](), list[Array]()
    for rank, payload in enumerate(allgather(world, payloads) if coded.size else ()):
        indices, values = decode(payload)
        ends = np.searchsorted(indices, placed(borders.astype(np.uint32), indices))
        own_counts = np.diff(to_host(ends))
        counts += own_counts
        terms.append(placed(values, waiting[0]))
        places.append(placed(layers.in_bucket(indices, own_counts), waiting[0]))
        if world.hosts(rank):
            own = waiting[rank - world.hosted.start]
            negative = kernels.multiply(terms[-1], np.float32(-1))
            kernels.scatter_add(own, placed(indices, own), negative)
    if not terms:  # no layer is coded
        return Sent(clear_mean(context, layers.bucket, waiting[0]), 0, counts.astype(np.float64))
    total, most = layers.mean_of(places, terms, float(world.ranks), context)
    return Sent(total, most, counts / (np.diff(borders) * world.ranks))
