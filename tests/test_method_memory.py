"""Memory that methods use again: which arrays are spare, and that none of them is in use."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import Aggregator, Context, OkTopk, RandomK, ScaleCom, State, Strom
from cpdhpc.compress.base import RESIDUAL
from cpdhpc.compress.bucket import Bucket, Entry
from cpdhpc.compress.dgc import Dgc
from cpdhpc.compress.memory import give_spare, keep, take_spare, with_residuals
from cpdhpc.compress.onebit import OneBit
from cpdhpc.compress.topk import TopK
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, np.dtype[Any]]
BUCKETS = Bucket(("a", "b"), ((4, 5), (2, 5))), Bucket(("c",), ((3, 4),))


def alone(ranks: int = 1) -> Context:
    world = Loopback(ranks)
    return Context(world, State(world.hosted, ranks))


def numbers(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@every("method", [TopK(), Dgc(warmup=())])
@every("ranks", [1, 2])
def test_buckets_of_other_sizes_take_no_memory_in_a_steady_step(method: TopK, ranks: int) -> None:
    """A bucket gets its own spare back, not what another one of another size has left."""
    context, found, held = alone(ranks), [], []
    for _ in range(5):
        for bucket in BUCKETS:
            method.aggregate([numbers(bucket.size, r) for r in range(ranks)], bucket, context)
        held.append(dict(context.state.spares))  # so that no address is given away again
        wholes = {a for xs in context.state.spares.values() for a in map(id, xs)}
        wholes |= {id(entry.whole) for _, entry in context.state if entry.whole is not None}
        found.append(wholes)
    assert found[2] == found[3] == found[4]
    memories = 2 if isinstance(method, Dgc) else 1
    assert len(found[4]) == len(BUCKETS) * memories * (2 if ranks == 1 else ranks)


def test_a_spare_is_one_of_its_size() -> None:
    context, gradient = alone(), [numbers(1)]
    longer, shorter = numbers(5), numbers(3)
    for x in (longer, shorter):
        give_spare(context, "some", [x])
    assert take_spare(context, "some", 5, gradient)[0] is longer
    assert take_spare(context, "some", 3, gradient)[0] is shorter
    assert take_spare(context, "some", 3, gradient)[0] is not shorter
    give_spare(context, "some", [shorter])
    assert len(take_spare(context, "some", 3, gradient * 2)) == 2


def test_what_a_caller_has_given_is_never_spare() -> None:
    """By State.give, or as a checkpoint's: somebody else may read these arrays."""
    bucket, context = BUCKETS[0], alone()
    with_residuals(TopK(), [numbers(30)], bucket, context)  # makes the entries
    for gives in (True, False):
        own = numbers(30)
        for name, start, stop in bucket.segments:
            if gives:
                context.state.give(name, RESIDUAL, [own[start:stop]])
            else:
                context.state.put((name, RESIDUAL), Entry(own[None, start:stop], "sum"))
        before = own.copy()
        keep(context, bucket, RESIDUAL, [numbers(30, 1)])
        (spare,) = take_spare(context, RESIDUAL, 30, [own])
        assert not np.shares_memory(spare, own)
        spare[:] = np.nan
        assert own.tobytes() == before.tobytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_array_is_spare_once_no_layer_is_a_part_of_it(ranks: int) -> None:
    bucket, context = BUCKETS[0], alone(ranks)
    with_residuals(TopK(), [numbers(30)] * ranks, bucket, context)
    both, first, second = ([numbers(30, 3 * i + r) for r in range(ranks)] for i in range(3))
    keep(context, bucket, RESIDUAL, [x.copy() for x in both])
    keep(context, bucket, RESIDUAL, [x.copy() for x in first], ["a"])
    for x in take_spare(context, RESIDUAL, 30, both):  # not what "b" lies in
        x[:] = np.nan
    for row, kept in enumerate(context.state.own("b", RESIDUAL, (10,))):
        assert kept.tobytes() == both[row][20:].tobytes()
    keep(context, bucket, RESIDUAL, [x.copy() for x in second], ["b"])
    assert all(x.size == 30 for x in context.state.spares[RESIDUAL, 30])
    for row, kept in enumerate(context.state.own("a", RESIDUAL, (20,))):
        assert kept.tobytes() == first[row][:20].tobytes()


def test_onebit_without_feedback_keeps_nothing() -> None:
    """Its means are those of the gradients alone, in each step."""
    bucket, found = BUCKETS[0], []
    context, method = alone(), OneBit(error_feedback=False)
    for _ in range(2):
        found.append(method.aggregate([numbers(30)], bucket, context).flat.tobytes())
    assert found[0] == found[1]
    assert list(context.state) == [] and context.state.spares == {}


def test_memories_are_added_and_gaps_are_zeros() -> None:
    bucket, context = Bucket(("a", "b"), ((3,), (2,)), align=4), alone(2)
    give_spare(context, RESIDUAL, [np.full(6, np.nan, np.float32) for _ in range(2)])
    for name, size in (("a", 3), ("b", 2)):
        for rank, kept in enumerate(context.state.own(name, RESIDUAL, (size,))):
            kept[:] = rank + 1
    found = with_residuals(TopK(), [np.arange(6, dtype=np.float32)] * 2, bucket, context)
    assert [x.tolist() for x in found] == [[1, 2, 3, 0, 5, 6], [2, 3, 4, 0, 6, 7]]


NEXT_TO_MOST = np.float32(3e38)


@every(
    "method",
    [RandomK(density=1.0), RandomK(), Strom(), Strom(tau=0.5), OkTopk(), TopK(), ScaleCom(rate=5)],
)
@every("value", [np.nan, np.inf, NEXT_TO_MOST])
def test_the_layer_of_what_is_not_finite_is_named_and_nothing_is_kept(
    method: Aggregator, value: float
) -> None:
    """In a gradient; or in its sum with what is kept, which is taken out of it before the check."""
    bucket, context = BUCKETS[0], alone(2)
    flats = [numbers(30, rank) for rank in range(2)]
    method.aggregate(flats, bucket, context)
    flats[1][25:] = value
    if value == NEXT_TO_MOST:
        for kept in context.state.own("b", RESIDUAL, (10,)):
            kept[:] = value
    before = [entry.array.tobytes() for _, entry in context.state]
    with pytest.raises(NonFiniteGradient) as caught:
        method.aggregate(flats, bucket, replace(context, iteration=1))
    assert caught.value.segments == ("b",) and caught.value.ranks == (1,)
    assert [entry.array.tobytes() for _, entry in context.state] == before
