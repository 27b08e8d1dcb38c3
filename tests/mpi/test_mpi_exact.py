"""Exact sums of real runs: the bits and the bytes of the simulation."""

import hashlib

import numpy as np
import pytest
from refusing import refused

from cpdhpc.collectives.allreduce import allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.world.ranks import Loopback


def gradients(ranks, n=2500):
    """The same arrays on every process."""
    rng = np.random.default_rng((ranks, n))
    return list(rng.standard_normal((ranks, n)).astype(np.float32))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_real_is_simulated(world, algorithm, rounding):
    xs = gradients(world.ranks)
    for wire in ("int4", "ternary", "e4m3"):
        options = {"accumulate": "exact", "rounding": rounding, "seed": 3}
        before = world.bytes_sent.copy()
        got = allreduce(world, xs[world.process], wire, algorithm, **options)
        sent = int((world.bytes_sent - before)[0])
        found = world.gather((hashlib.sha256(got.tobytes()).hexdigest(), sent))
        simulated = Loopback(world.ranks, nodes=world.nodes)
        alone = world.ranks == 1
        expected = allreduce(simulated, xs[0] if alone else xs, wire, algorithm, **options)
        digest = hashlib.sha256(expected.tobytes()).hexdigest()
        assert found == [(digest, each) for each in simulated.bytes_sent.tolist()]
        np.testing.assert_array_equal(expected, simulate(xs, wire, "ring", **options))


def test_errors_are_the_same_on_all(world):
    xs = gradients(world.ranks)
    with refused("allreduce", "scaling", "known are aps"):
        allreduce(world, xs[world.process], "int8", scaling="tile")
    x = xs[world.process]
    if world.process == world.processes - 1:
        x[7] = np.nan
    before = world.messages_sent.copy()
    with pytest.raises(NonFiniteGradient) as caught:
        allreduce(world, x, "ternary")
    assert caught.value.ranks == (world.ranks - 1,)
    assert np.array_equal(world.messages_sent, before)
