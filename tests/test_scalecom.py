"""ScaleCom: the paper's choice and memory value by value, and bytes that do not grow with ranks."""

from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.compress import COMPRESSORS, Aggregator, Context, ScaleCom, State, TopK
from cpdhpc.compress.bucket import Bucket
from cpdhpc.torch import GradientReducer
from cpdhpc.world.ranks import Loopback

Array = Any
RANKS = 4


def by_hand(x: Array, rate: int, per_chunk: int) -> list[int]:
    """Which values of a layer a leading rank chooses: of equal ones the first."""
    size, found = rate * per_chunk, []
    for at in range(0, len(x), size):
        chunk = range(at, min(at + size, len(x)))
        found += sorted(chunk, key=lambda i: -abs(x[i]))[:per_chunk]
    return sorted(found)


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_ranks_lead_by_turns_and_the_memory_is_filtered(per_chunk: int) -> None:
    """Integers and quarters, so that all is exact; many values are equal, last chunks are short."""
    sizes, rates = {"a": 301, "b": 60, "c": 90, "d": 803}, {"a": 7, "b": 2, "c": 25, "d": 400}
    bucket = Bucket((*sizes, "bias"), (*((n, 1) for n in sizes.values()), (5,)))
    costs = {"c": 196.0, "d": 127.9}
    method = ScaleCom(rate=7, per_chunk=per_chunk, rates={"b": 2}, costs=costs, beta=0.25)
    world, rng = Loopback(RANKS), np.random.default_rng(0)
    state, kept = State(world.hosted, RANKS), np.zeros((RANKS, bucket.size), np.float32)
    for iteration in range(6, 11):
        flats = [rng.integers(-40, 40, bucket.size).astype(np.float32) for _ in range(RANKS)]
        found = method.aggregate(flats, bucket, Context(world, state, iteration=iteration))
        waiting, expected, shares = kept + flats, np.mean(flats, axis=0), dict[str, float]()
        for (name, start, stop), shape in zip(bucket.segments, bucket.shapes, strict=True):
            if len(shape) > 1:
                leader = waiting[iteration % RANKS, start:stop]
                chosen = start + np.array(by_hand(leader, rates[name], per_chunk))
                shares[name] = len(chosen) / (stop - start)
                expected[start:stop] = 0
                expected[chosen] = waiting[:, chosen].mean(axis=0)
                waiting[:, chosen] = 0  # now g - c, and what was in the memory
                kept[:, start:stop] += (waiting - kept)[:, start:stop] / 4
                own = np.stack(state.own(name, "residual", (stop - start,)))
                assert np.array_equal(own, kept[:, start:stop])
        assert np.array_equal(found.flat, expected)
        assert found.layers["sent_share"].tolist() == [*shares.values(), 1]  # and the bias


def bytes_and_values(method: Aggregator, ranks: int, bucket: Bucket) -> tuple[Array, int]:
    """What each rank sends in the second of two iterations, and how many values the mean has."""
    world = Loopback(ranks)
    state, rng = State(world.hosted, ranks), np.random.default_rng(0)
    for iteration in range(2):
        flats = [rng.standard_normal(bucket.size).astype(np.float32) for _ in range(ranks)]
        world.bytes_sent[:] = 0
        mean = method.aggregate(flats, bucket, Context(world, state, iteration=iteration))
    return world.bytes_sent, np.count_nonzero(mean.flat)


def test_neither_values_nor_bytes_grow_with_the_ranks() -> None:
    """The union of the ranks' own largest does, and so do the bytes of their all-gather."""
    bucket, k = Bucket(("w", "v"), ((80, 100), (20, 100))), 100
    method, other = ScaleCom(rate=100, algorithm="rhd"), TopK(density=0.01)
    unions, all_bytes = [], []
    for ranks in (2, 8, 16, 64):
        sent, count = bytes_and_values(method, ranks, bucket)
        assert count == k
        # A value goes once around and back, in 4 bytes, and its position to all others, in one.
        assert sent.sum() == (ranks - 1) * k * (2 * 4 + 1)
        sent, count = bytes_and_values(other, ranks, bucket)
        unions.append(count)
        all_bytes.append(sent.mean())
    assert k < unions[0] < unions[1] / 3 < unions[2] / 5 < unions[3] / 10
    assert all_bytes[3] > 60 * all_bytes[0]


def test_sends_65_times_less_than_float32_all_in_all() -> None:
    shapes = (64, 32, 3, 3), (64,), (500, 576), (500,), (10, 500), (10,)
    bucket = Bucket(tuple(map(str, range(len(shapes)))), shapes)
    sent, _ = bytes_and_values(ScaleCom(rate=100), 8, bucket)
    assert bytes_and_values(COMPRESSORS["none"](), 8, bucket)[0].mean() / sent.mean() >= 65


def test_warm_up_and_excluded_layers_are_whole() -> None:
    bucket = Bucket(("first", "second"), ((20, 10), (30, 10)))
    flats = [np.random.default_rng(rank).integers(-9, 9, 500).astype(np.float32) for rank in (0, 1)]
    world = Loopback(2)
    method = ScaleCom(rate=10, dense_epochs=1, exclude=("first",))
    for epoch, count in ((0.5, 500), (1.0, 230)):
        context = Context(world, State(world.hosted, 2), epoch=epoch)
        found = method.aggregate(flats, bucket, context)
        exact = np.mean(flats, axis=0)
        assert np.array_equal(found.flat[:200], exact[:200])
        assert found.layers["sent_share"].tolist() == [1, (count - 200) / 300]
        if count == 500:
            assert np.array_equal(found.flat, exact)


@every(
    ("options", "says"),
    [
        ({"rates": {"weight": 0}}, "rates.weight=0: should be greater"),
        ({"rates": {"weigt": 5}}, r"ScaleCom.rates: no layer is called 'weigt': did you mean weig"),
        ({"costs": {"bia": 5.0}}, "ScaleCom.costs: no layer is called 'bia'"),
        ({"costs": {"weight": 5.0}, "rates": {"weight": 5}}, "costs: 'weight' has a rate in rates"),
        ({"rate": 1000, "per_chunk": 66}, "per_chunk=66: chunks have 1000 . per_chunk values"),
        ({"beta": 0.0}, "beta=0.0: should be greater"),
        ({"wire": "e4m9x"}, "'e4m9x': known are"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    import torch

    with pytest.raises(ValueError, match=says):
        GradientReducer(torch.nn.Linear(3, 2), Loopback(), "scalecom", **options)
