"""Ok-Topk: a sparse all-reduce whose messages do not grow with the number of ranks.

Each rank owns a region of the values. Ranks send the largest of their values (gradient plus
residual) to the owners, which add them; the largest sums are then gathered on all ranks. Both
thresholds and the regions are used for several iterations:

    local      |value| > local threshold                to estimate it: the k largest
    regions    edges at equal shares of the local ones, mean over ranks
    sums       of a region, in the order of ranks
    global     |sum| > global threshold                 to estimate it: the k largest
    all-gather of the global ones

A threshold that selects less than half of k values, or more than twice k, is estimated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.checks import is_finite
from ..collectives.sparse import allgather, neighbours
from ..collectives.sparse import sum as sum_of_ranks
from ..ops import backend_of, cpu, placed, to_host
from ..ops.common import NONFINITE_BITS
from ..ops.payloads import packed_wire
from ..options import Allowed
from ..partition import split
from ..world.ranks import Ranks
from .base import Array, Column, Context, Mean
from .bucket import Bucket, Entry
from .memory import clear_mean
from .payload import decode_sparse, encode_sparse
from .sparse import Density, Pairs, SparseLayers, SparseMessages, Warmup, count_of, density_at

UNEVEN = 4  # times the mean: if a rank has more of the largest sums, they are redistributed first
Period = Annotated[int, Allowed(ge=1)]  # an option: iterations


@dataclass(frozen=True)
class OkTopk(SparseMessages):
    """The mean of the values that are among the largest of a rank and of the sum over all ranks.

    density: share of a bucket's values that all ranks get, one at least; it counts the values of
        all ranks together, topk's those of each rank
    warmup: density of the first epochs, one for each
    estimate_every: iterations after which both thresholds are estimated again; a network may not
        recover from its first steps with more than about 8
    rebalance_every: iterations after which the ranks' regions are computed again
    wire: of the values that are sent: "raw" or a format
    Values that are not among the largest sums are added to a rank's next gradient, as is the
    rounding error of the wire. A rank sends about 2 (ranks - 1) / ranks times k values with their
    indices, and at most twice as many before thresholds are estimated again.
    Source: Li, Hoefler: Near-optimal sparse allreduce for distributed deep learning, PPoPP 2022.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "sent_share": Column("share of a layer's values that all ranks get")
    }

    aggregator: Literal["oktopk"] = "oktopk"
    density: Density = 0.02
    warmup: Warmup = ()
    estimate_every: Period = 8
    rebalance_every: Period = 64
    wire: str = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        packed_wire(self.wire, "allreduce")

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        layers = self._layers(gradients, bucket, context)
        coded, size = layers.coded, layers.coded.size
        if not size:
            mean = clear_mean(context, bucket, gradients[0])
            return layers.finished(mean, 0, gradients, [], keeps=False)
        k = count_of(density_at(context.epoch, self.warmup, self.density), size)
        waiting, chosen = self._chosen(layers, k, context)
        indices, sums = self._summed(waiting, chosen, k, coded.names[0], context)
        borders = [*(start for _, start, _ in coded.segments), size]
        counts = np.diff(_cuts(indices, borders))
        at = placed(layers.in_bucket(indices, counts), waiting[0])
        ranks, values = float(context.world.ranks), placed(sums, waiting[0])
        mean, most = layers.mean_of([at], [values], ranks)
        return layers.finished(mean, most, waiting, counts / np.diff(borders))

    @np.errstate(over="ignore", invalid="ignore")  # layers.mean checks the sums
    def _summed(
        self, waiting: list[Array], chosen: list[Pairs], k: int, layer: str, context: Context
    ) -> Pairs:
        """Return about the k largest sums over ranks, and subtract them from waiting. Collective.

        chosen: of each hosted rank; layer: the one under which the state has thresholds and regions
        Returns indices, uint32[m], ascending, and sums, float32[m], the same on all ranks.
        """
        world, n = context.world, waiting[0].size
        edges = self._edges([indices for indices, _ in chosen], n, layer, context)
        sent, regions = self._reduced(chosen, edges, context)
        indices, sums = self._gathered(regions, edges, k, layer, context)
        if not is_finite(sums):  # layers.mean raises
            return indices, sums
        borders, marks = _cuts(indices, edges), cpu.pack_bitmap(indices, n)
        for rank, x, own, region in zip(world.hosted, waiting, sent, regions, strict=True):
            at, values = cpu.pairs_at(marks, *own)
            _add(x, at, -values)
            if self.wire != "raw":  # else sums are not rounded
                part = slice(borders[rank], borders[rank + 1])
                at, before = cpu.pairs_at(marks, *region)
                _add(x, at, before - sums[part])
        return indices, sums

    def _chosen(
        self, layers: SparseLayers, k: int, context: Context
    ) -> tuple[list[Array], list[Pairs]]:
        """Return gradients plus residuals, and about their k largest values. Collective.

        Both are of each hosted rank; the largest values are NumPy's, without zeros.
        """
        names = layers.coded.names
        thresholds = context.state.own(names[0], "threshold", (1,), "copy")
        scale = np.float32(context.loss_scale)
        is_due, found = context.iteration % self.estimate_every == 0, []
        limits = [np.inf if is_due else float(each[0] * scale) for each in thresholds]
        waiting, above = layers.waiting_above([[limit] * len(names) for limit in limits])
        for x, pairs, threshold in zip(waiting, above, thresholds, strict=True):
            if not _is_about(pairs[0].size, k):
                kernels = backend_of(x)
                if pairs[0].size > k:  # the k largest are among them
                    largest = _taken(pairs, kernels.select_magnitude(pairs[1], k))
                else:
                    found_in_all = kernels.select_magnitude(x, k)
                    largest = found_in_all, kernels.gather(x, found_in_all)
                indices, values = map(to_host, largest)
                smallest = np.abs(values).min()
                threshold[0] = _below(smallest) / scale
                some = slice(None) if smallest else values != 0
                pairs = indices[some], values[some]
            found.append((to_host(pairs[0]), to_host(pairs[1])))
        return waiting, found

    def _edges(self, chosen: list[Array], n: int, layer: str, context: Context) -> Array:
        """Return the edges of the ranks' regions of n values, int64[ranks + 1]. Collective.

        chosen: indices that hosted ranks send, of which each region should get the same share
        """
        ranks, key = context.world.ranks, (layer, "edges")
        edges = context.state.shared(*key, lambda: np.zeros(ranks + 1, np.int64))
        is_due = context.iteration % self.rebalance_every == 0
        if is_due or edges.size != ranks + 1 or edges[-1] != n:  # from another run
            cuts = np.arange(ranks + 1)
            own = [
                np.append(i, n)[cuts * i.size // ranks] if i.size else cuts * n // ranks
                for i in chosen
            ]
            edges = sum_of_ranks(context.world, [each.astype(np.int64) for each in own]) // ranks
            edges[0] = 0
            context.state.put(key, Entry(edges, None))
        return edges

    def _reduced(
        self, chosen: list[Pairs], edges: Array, context: Context
    ) -> tuple[list[Pairs], list[Pairs]]:
        """Send the chosen values to the owners of their regions, which add them. Collective.

        Returns, of each hosted rank, its values as the wire rounds them, and the sums of its region
        that are not 0.
        """
        world, sizes, sends, sent = context.world, np.diff(edges).tolist(), [], []
        for rank, (indices, chosen_values) in zip(world.hosted, chosen, strict=True):
            values = chosen_values.copy()
            borders, payloads = _cuts(indices, edges).tolist(), {}
            for owner, part in enumerate(map(slice, borders, borders[1:])):
                if owner != rank and part.start < part.stop:
                    at = indices[part] - np.uint32(edges[owner])
                    payload = encode_sparse(at, values[part], sizes[owner], self.wire)
                    if self.wire != "raw":
                        values[part] = decode_sparse(payload, sizes[owner], self.wire)[1]
                    payloads[owner] = payload
            sends.append(payloads)
            sent.append((indices, values))
        regions = []
        for rank, (indices, values), came in zip(
            world.hosted, sent, neighbours(world, sends), strict=True
        ):
            size, first = sizes[rank], np.uint32(edges[rank])
            part = slice(*_cuts(indices, edges[rank : rank + 2]))
            terms = {r: decode_sparse(payload, size, self.wire) for r, payload in came.items()}
            terms[rank] = indices[part] - first, values[part]
            parts = [terms[source] for source in sorted(terms)]
            places, sums = cpu.merge_places([i for i, _ in parts], [x for _, x in parts], size)
            regions.append((places + first, sums))
        return sent, regions

    def _gathered(
        self, regions: list[Pairs], edges: Array, k: int, layer: str, context: Context
    ) -> Pairs:
        """Return about the k largest sums with their indices, on all ranks. Collective."""
        world, n = context.world, int(edges[-1])
        threshold = context.state.shared(layer, "sum_threshold", lambda: np.zeros(1, np.float32))
        scale = np.float32(context.loss_scale)
        is_due = context.iteration % self.estimate_every == 0
        if not is_due:
            chosen = [_above(sums, threshold[0] * scale) for _, sums in regions]
            counts = _of_all(world, [each.size for each in chosen])
            is_due = not _is_about(sum(counts), k)
        if is_due:
            least = _least([sums for _, sums in regions], k, world)
            chosen = [_above(sums, least) for _, sums in regions]
            counts = _of_all(world, [each.size for each in chosen])
        found = [_taken(each, i) for i, each in zip(chosen, regions, strict=True)]
        if max(counts) > UNEVEN * -(-sum(counts) // world.ranks):
            found = _dealt_out(found, counts, n, world)
        payloads = [encode_sparse(*each, n, self.wire) for each in found]
        own = zip(world.hosted, found, strict=True) if self.wire == "raw" else ()
        known = dict(own)  # what decode_sparse would return
        indices, sums = _joined(
            known.get(rank) or decode_sparse(each, n, self.wire)
            for rank, each in enumerate(allgather(world, payloads))
        )
        if is_due:
            largest = cpu.select_magnitude(sums, min(k, sums.size))
            indices, sums = _taken((indices, sums), largest)
            smallest = np.fmin.reduce(np.abs(sums), initial=np.inf)  # sums that overflow are NaN
            threshold[0] = _below(smallest) / scale
        return indices, sums


def _is_about(count: int, k: int) -> bool:
    """Whether a threshold that selects count values can be kept."""
    return k <= 2 * count <= 4 * k


def _above(x: Array, threshold: np.float32) -> Array:
    return cpu.select_above(x, float(threshold))


def _cuts(indices: Array, edges: Sequence[int] | Array) -> Array:
    """Return the numbers of indices, uint32[m], ascending, below some edges, int64[edges].

    Edges of another dtype would let NumPy convert all indices.
    """
    return np.searchsorted(indices, np.asarray(edges, np.uint32))


def _taken(pairs: Pairs, at: Array) -> Pairs:
    """Return the pairs with the numbers at, uint32[m], ascending."""
    (indices, values), gather = pairs, backend_of(pairs[1]).gather
    return gather(indices.view(np.float32), at).view(np.uint32), gather(values, at)


def _add(x: Array, indices: Array, values: Array) -> None:
    """Add values to x[indices], in which both are NumPy's and x may be CuPy's."""
    backend_of(x).scatter_add(x, placed(indices, x), placed(values, x))


def _below(magnitude: np.float32) -> np.float32:
    """Return the largest threshold below a magnitude; 0 for 0."""
    return np.nextafter(magnitude, np.float32(0))


def _of_all(world: Ranks, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of all ranks, one each. Collective."""
    return [int(each[0]) for each in allgather(world, [np.array([i]) for i in numbers])]


def _least(regions: Sequence[Array], k: int, world: Ranks) -> np.float32:
    """Return a threshold that the k largest sums exceed, and at most k others. Collective.

    Each rank takes its share of k, by the number of its sums; the smallest of these on any rank is
    no larger than the k largest. This is repeated with the sums above it. Equal sums may be more.
    """
    least = np.float32(0)
    while True:
        sizes = [_above(region, least).size for region in regions]
        total = sum(_of_all(world, sizes))
        if total <= 2 * k:
            return least
        found = [
            cpu.kth_magnitude(region, -(-k * size // total))
            if size
            else NONFINITE_BITS  # a rank without sums
            for region, size in zip(regions, sizes, strict=True)
        ]
        before, least = (
            least,
            _below(np.uint32(min(NONFINITE_BITS, *_of_all(world, found))).view(np.float32)),
        )
        if least <= before:
            return before


def _dealt_out(found: Sequence[Pairs], counts: Sequence[int], n: int, world: Ranks) -> list[Pairs]:
    """Return the indices and sums of all ranks, evenly distributed, in order. Collective.

    found: of each hosted rank; counts: number on each rank
    """
    total, begins = sum(counts), np.cumsum([0, *counts])
    cuts = np.array([*(split(total, world.ranks, rank)[0] for rank in range(world.ranks)), total])
    sends = []
    for rank, (indices, sums) in zip(world.hosted, found, strict=True):
        borders = np.clip(cuts - begins[rank], 0, counts[rank]).tolist()
        sends.append(
            {
                to: encode_sparse(indices[part], sums[part], n)
                for to, part in enumerate(map(slice, borders, borders[1:]))
                if to == rank or part.start < part.stop
            }
        )
    own = [each.pop(rank) for rank, each in zip(world.hosted, sends, strict=True)]
    dealt = []
    for rank, mine, came in zip(world.hosted, own, neighbours(world, sends), strict=True):
        parts = [decode_sparse(each, n) for _, each in sorted({**came, rank: mine}.items())]
        dealt.append(_joined(parts))
    return dealt


def _joined(parts: Iterable[Pairs]) -> Pairs:
    """Return the indices and values of all parts."""
    parts = list(parts)
    return np.concatenate([i for i, _ in parts]), np.concatenate([x for _, x in parts])
