"""Cases of a study of the collectives beside the all-reduce: right, and wrong ones noticed."""

import numpy as np
import pytest

from cpdhpc.lab.kinds import KINDS, collective_cases
from cpdhpc.lab.kinds.allreduce import PAIRS
from cpdhpc.lab.kinds.place import JobRanks
from cpdhpc.lab.study_data import Case
from cpdhpc.methods import COLLECTIVES

KIND = KINDS["allreduce"]
DEFAULTS = {"value_scaling": "", "accumulate": "", "device": "cpu"}


def used(**factors):
    return KIND.used({**DEFAULTS, "size_bytes": 40_000, "wire": "raw", **factors})


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_case_is_checked(world, name):
    for algorithm, wire in (*((a, w) for a in COLLECTIVES[name] for w in ("raw", "e4m3")),
                            ("mpi", "raw")):  # fmt: skip
        factors = used(collective=name, algorithm=algorithm, wire=wire)
        case = Case("allreduce", factors, 1, world.ranks)
        with KIND.measure(None, case, JobRanks(world), True) as call:
            for _ in range(3):
                call.prepare()
                call.run()
            error = call.outcomes["error"]
            assert error == 0 if wire == "raw" else 0 < error < 0.1, (algorithm, wire)
            assert np.isnan(call.outcomes["bound_s"])
            assert (algorithm == "mpi") == np.isnan(call.outcomes["wire_bytes"])


def test_a_wrong_result_is_noticed(world, monkeypatch):
    real = collective_cases.given

    def shifted(*arguments):
        found = real(*arguments)
        return found._replace(result=found.result + 1)

    monkeypatch.setattr(collective_cases, "given", shifted)
    factors = used(collective="all_gather", algorithm="ring")
    case = Case("allreduce", factors, 1, world.ranks)
    measured = KIND.measure(None, case, JobRanks(world), True)
    with pytest.raises(ArithmeticError, match="a result is not exact"), measured:
        pass


def test_what_goes_together(world):
    for factors, words in (
        ({"collective": "gather", "algorithm": "ring"}, "gather has no algorithm ring"),
        ({"collective": "gather", "algorithm": "gloo"}, "gather has no algorithm gloo"),
        ({"collective": "reduce", "algorithm": "mpi", "wire": "e4m3"}, "measured for wire raw"),
        ({"collective": "all_gather", "algorithm": "ring", "wire": "e4m3", "accumulate": "exact"},
         "ring: accumulate='exact': must be left out: nothing is added"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            used(**factors)
    plain = {"size_bytes": 40_000, "algorithm": "ring", "wire": "raw"}
    assert used(algorithm="ring", collective="allreduce") == plain  # ids are what they were
    assert used(algorithm="ring", collective="reduce") == {**plain, "collective": "reduce"}


@pytest.mark.parametrize("name", PAIRS)
def test_messages_between_pairs_arrive(world, name):
    if world.ranks % 2:
        pytest.skip("pairs need an even number of ranks")
    for size_bytes in (4, 40_000):
        factors = used(collective=name, algorithm="mpi", size_bytes=size_bytes)
        assert KIND.fits({}, factors, world.ranks) is None
        case = Case("pairs", factors, 1, world.ranks)
        with KIND.measure(None, case, JobRanks(world), True) as call:
            for _ in range(3):
                call.run()
            assert call.outcomes["error"] == 0


def test_a_message_that_is_another_is_noticed(world, monkeypatch):
    if world.ranks % 2:
        pytest.skip("pairs need an even number of ranks")
    monkeypatch.setattr(collective_cases, "LARGEST", 1 + world.rank)
    case = Case("pairs", used(collective="ping_pong", algorithm="mpi"), 1, world.ranks)
    measured = KIND.measure(None, case, JobRanks(world), True)
    with pytest.raises(ArithmeticError, match="a result is not exact"), measured:
        pass


def test_pairs_are_mpis_and_even(world):
    with pytest.raises(ValueError, match="ping_pong has no algorithm ring, only mpi"):
        used(collective="ping_pong", algorithm="ring")
    factors = used(collective="stream", algorithm="mpi")
    assert KIND.fits({}, factors, 3) == "stream is between pairs of ranks, and 3 are not even"
