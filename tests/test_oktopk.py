"""Ok-Topk: the largest of the sums of the largest, whatever is used again, in about 6 k words."""

from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.compress import Aggregator, Context, OkTopk, State, TopK, oktopk
from cpdhpc.compress.bucket import Bucket, Entry
from cpdhpc.world.ranks import Loopback

Array = Any
BUCKET = Bucket(("w", "none", "bias", "v"), ((40, 30), (0, 3), (7,), (6, 3, 5, 5)))
CODED = np.r_[0:1200, 1207:1657]


def run(
    method: Aggregator, flats: list[Array], state: State, world: Loopback, iteration: int
) -> tuple[Array, Array]:
    """The sum over ranks that the method finds, and what ranks keep; both of coded layers."""
    context = Context(world, state, iteration=iteration)
    flat = method.aggregate(flats, BUCKET, context).flat
    kept = [state.own(name, "residual", (n,)) for name, n in (("w", 1200), ("v", 450))]
    assert np.array_equal(flat[1200:1207], np.mean(flats, axis=0, dtype=np.float32)[1200:1207])
    return flat[CODED] * len(flats), np.concatenate(kept, axis=1)


def integers(ranks: int, rng: np.random.Generator, largest: int = 1 << 12) -> list[Array]:
    """Gradients of which sums of powers of two, and their means, are exact."""
    return [rng.integers(-largest, largest, BUCKET.size).astype(np.float32) for _ in range(ranks)]


def largest(x: Array, k: int) -> Array:
    """Which are the k largest; of equal ones the first."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


@every("ranks", [1, 2, 4, 8])
def test_estimated_anew_it_is_the_largest_sums_of_the_largest_values(ranks: int) -> None:
    method, k = OkTopk(density=0.04, estimate_every=1, rebalance_every=3), 66
    world, rng = Loopback(ranks), np.random.default_rng(ranks)
    state, before = State(world.hosted, ranks), np.zeros((ranks, CODED.size), np.float32)
    for iteration in range(4):
        flats = integers(ranks, rng)
        found, kept = run(method, flats, state, world, iteration)
        waiting = before + np.stack(flats)[:, CODED]
        local = np.zeros_like(waiting)
        for x, part in zip(waiting, local, strict=True):
            part[largest(x, k)] = x[largest(x, k)]
        chosen = largest(local.sum(axis=0), k)
        expected = np.zeros(CODED.size)
        expected[chosen] = local.sum(axis=0)[chosen]
        assert np.array_equal(found, expected)
        waiting[:, chosen] -= local[:, chosen]
        assert np.array_equal(kept, waiting)
        before = kept


@every("ranks", [1, 2, 5])
@every("wire", ["raw", "e4m3"])
def test_nothing_is_lost_however_gradients_change(ranks: int, wire: str) -> None:
    """What is sent and kept is what was given, and about k values are sent, by old thresholds too.

    Gradients grow and shrink, are nothing, a few values or equal; one rank's may be nothing.
    """
    method = OkTopk(density=0.04, estimate_every=4, rebalance_every=3, wire=wire)
    world, rng, k = Loopback(ranks), np.random.default_rng(ranks), 66
    state, before = State(world.hosted, ranks), np.zeros(CODED.size)
    for iteration, bound in enumerate((9, 4000, 4000, 5, 0, 300, 300, 300, 30, 30, 1)):
        flats = integers(ranks, rng, bound + 1) if bound else [np.zeros(BUCKET.size, "f4")] * ranks
        flats[-1] = flats[-1] * (iteration % 2)
        found, kept = run(method, flats, state, world, iteration)
        given = before + np.sum(flats, axis=0)[CODED]
        before = kept.sum(axis=0, dtype=np.float64)
        # With a wire three roundings a rank and one of the sum, of values below 2**16.
        error = np.abs(found + before - given).max()
        assert error == 0 if wire == "raw" else error <= (3 * ranks + 1) * 2.0**-8
        assert np.count_nonzero(found) <= 2 * k


def test_of_nothing_but_subnormal_numbers_the_largest_are_sent() -> None:
    flats = [x * np.float32(1e-45) for x in integers(2, np.random.default_rng(0))]
    world = Loopback(2)
    found, _ = run(OkTopk(density=0.04), flats, State(world.hosted, 2), world, 0)
    assert np.count_nonzero(found) == 66


def test_zeros_are_not_sent() -> None:
    """Three sums take fewer bytes than the 66 indices of all that density allows."""
    flats, world = [np.zeros(BUCKET.size, np.float32) for _ in range(2)], Loopback(2)
    for rank, x in enumerate(flats):
        x[[5 + rank, 1300]] = 1
    found, _ = run(OkTopk(density=0.04), flats, State(world.hosted, 2), world, 0)
    assert np.flatnonzero(found).tolist() == [5, 6, 1293]
    assert (world.bytes_sent < 66 * 4).all()


def bytes_of(method: Aggregator, ranks: int, iterations: int = 3) -> Array:
    """Bytes of each rank and iteration: gradients that ranks have in common, but for noise."""
    bucket, world = Bucket(("x",), ((100, 400),)), Loopback(ranks)
    state, rng, sent = State(world.hosted, ranks), np.random.default_rng(0), []
    common = rng.standard_normal(bucket.size).astype(np.float32) ** 3
    for iteration in range(iterations):
        flats = [common + rng.standard_normal(bucket.size, np.float32) for _ in range(ranks)]
        world.bytes_sent[:] = 0
        method.aggregate(flats, bucket, Context(world, state, iteration=iteration))
        sent.append(world.bytes_sent.copy())
    return np.array(sent)


def test_sends_about_6k_words_whatever_the_number_of_ranks() -> None:
    """But for 8 bytes of a header to each rank; top-k's all-gather sends ranks - 1 payloads."""
    k, means = 400, {}
    for ranks in (2, 8, 20):
        sent = bytes_of(OkTopk(density=0.01), ranks)[1:]
        assert sent.max() <= 6 * k * 4 + 2 * (ranks - 1) * 16
        means[ranks] = sent.mean()
    assert means[20] < 3 * means[2] and means[20] < bytes_of(TopK(), 20, 2)[1:].mean() / 5


def test_sums_that_few_ranks_own_are_dealt_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regions are those of even gradients; then all that is large lies in that of one rank."""
    ranks, sent, found = 16, [], []
    for uneven in (oktopk.UNEVEN, ranks + 1):
        monkeypatch.setattr(oktopk, "UNEVEN", uneven)
        world, rng = Loopback(ranks), np.random.default_rng(0)
        state = State(world.hosted, ranks)
        for iteration in range(2):
            flats = integers(ranks, rng)
            for flat in flats:
                flat[:80] *= 100 if iteration else 1
            world.bytes_sent[:] = 0
            found.append(run(OkTopk(density=0.04), flats, state, world, iteration))
        sent.append(world.bytes_sent.max())
    assert all(map(np.array_equal, found[1], found[3]))
    assert sent[0] < 0.8 * sent[1]


def test_goes_on_with_other_ranks_and_other_buckets() -> None:
    """Regions of another run are made anew; thresholds are of use."""
    world, rng = Loopback(3), np.random.default_rng(0)
    state = State(world.hosted, 3)
    run(OkTopk(density=0.04), integers(3, rng), state, world, 0)
    for edges in ([0, 1650], [0, 5, 9, 400]):
        state.put(("w", "edges"), Entry(np.array(edges), None))
        run(OkTopk(density=0.04), integers(3, rng), state, world, 1)
        assert state.shared("w", "edges", lambda: np.zeros(1))[[0, -1]].tolist() == [0, 1650]
