"""Prepared all-reduces in one process, and what becomes of them when other ranks do not answer."""

import numpy as np
import pytest
from every import every
from test_faults import MPIRUN, launch_with_a_death

from cpdhpc.collectives.allreduce import Allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.world.ranks import Loopback

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun, beside python or in PATH")


def gradients(ranks, call):
    rng = np.random.default_rng((ranks, call))
    return list(rng.standard_normal((ranks, 1500), np.float32))


@every("ranks", [1, 5])
@every("algorithm", SCHEDULES)
def test_prepared_and_repeated_calls_have_the_same_bits(algorithm, ranks):
    """One rank in a process is a list of calls, from the second call on also where it is plain."""
    for wire, scaling in (("raw", "none"), ("e4m3", "tile"), ("e3m0", "aps"), ("int4", "aps")):
        world, method = Loopback(ranks), Allreduce(wire, algorithm, scaling, op="mean")
        xs = [np.empty(1500, np.float32) for _ in range(ranks)]
        with method.prepare(world, xs) as prepared:
            assert prepared.is_fast == (ranks == 1)
            for call in range(3):
                for x, values in zip(xs, gradients(ranks, call), strict=True):
                    x[:] = values
                wanted = method.run(Loopback(ranks), xs)  # a world's first call is the engine's
                for got in (prepared.run(), method.run(world, xs)):
                    assert got.arrays[0].tobytes() == wanted.arrays[0].tobytes()
                    assert got[1:] == wanted[1:]
    assert not world.cache.held  # where there are no requests


def test_what_is_fast():
    world, x = Loopback(), np.ones(1500, np.float32)
    for method in (
        Allreduce("raw", "ring", "aps"),
        Allreduce("e4m3", "ring", "aps"),
        Allreduce("e4m3", "ring", rounding="stochastic"),
        Allreduce("e4m3", "direct", accumulate="kahan"),
        Allreduce("e4m3", "gather", accumulate="float32"),
        Allreduce("e2m1fn", "ring", "none"),
        Allreduce("int8", "ring"),
    ):
        assert method.prepare(world, [x]).is_fast
        assert not method.prepare(Loopback(2), [x, x]).is_fast
    assert Allreduce().prepare(world, [np.ones(1 << 19, np.float32)]).is_fast  # two pieces


@every("accumulate", SCHEDULES["gather"].accumulates)
def test_raw_sums_that_are_not_finite_follow_ieee(accumulate):
    """Whatever adds them; a packed sum beyond float32 is an error, prepared and not."""
    x = np.array([1, np.inf, np.nan, 3e38], np.float32)
    method = Allreduce("raw", "gather", accumulate=accumulate)
    with np.errstate(over="ignore"):
        expected = x + x
    np.testing.assert_array_equal(simulate([x, x], "raw", "gather", None, accumulate), expected)
    np.testing.assert_array_equal(method.prepare(Loopback(), [x]).run().arrays[0], x)


def test_a_sum_that_is_not_rounded_is_looked_at():
    """gather's float32 sums: infinity that only the sum has, and NaN of one rank."""
    method = Allreduce("bf16", "gather", accumulate="float32")
    x = np.full(1500, 3e38, np.float32)
    with pytest.raises(NonFiniteGradient) as caught:
        method.run(Loopback(2), [x, x])
    assert (caught.value.segments, caught.value.ranks) == (("x",), ())
    x[7] = np.nan
    prepared = method.prepare(Loopback(), [x])
    with pytest.raises(NonFiniteGradient) as caught:
        prepared.run()
    assert (caught.value.segments, caught.value.ranks) == (("x",), (0,))
    x[7] = 1
    assert prepared.run().arrays[0][7] == 1


DYING = """
import os, signal, threading
from cpdhpc import RankFailure
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.allreduce import simulate
from cpdhpc.collectives.checks import NonFiniteGradient
world, me, method = World(timeout_s=900), World().rank, Allreduce("raw", "tree")
x = np.full(1500, float(1 << me), np.float32)
kept = x.copy()
prepared = method.prepare(world, [x], [x])
for _ in range(5):
    x[:] = kept
    assert (prepared.run().arrays[0] == 15).all()
x[:] = kept
if me == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        prepared.run()
        x[:] = kept
except RankFailure as failure:
    assert "allreduce tree" in str(failure) and (x == kept).all()
try:
    prepared.run()
except RuntimeError as error:
    assert "was ended by a failure" in str(error)
prepared.free()
left = world.shrink()
with method.prepare(left, [x]) as prepared:
    for _ in range(5):
        assert (prepared.run().arrays[0] == 11).all()
left.barrier()
print("survived", me, left.size, world.cache.held, flush=True)
"""


@needs_mpirun
def test_a_death_is_a_failure_and_leaves_the_input_alone():
    status, output = launch_with_a_death(DYING)
    for rank in (0, 1, 3):
        assert f"survived {rank} 3 0" in output, output
    assert not status, output
