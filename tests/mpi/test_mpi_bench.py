"""What benchmarks and "auto" do on real ranks: baselines, and errors that all ranks raise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpdhpc.bench.allreduce import BASELINES, cases_of_size
from cpdhpc.bench.baselines import gloo, sum_bfloat16, sum_float32
from cpdhpc.bench.harness import check_out, together, write_samples
from cpdhpc.bench.replay import replay
from cpdhpc.collectives.allreduce import Allreduce, allreduce
from cpdhpc.collectives.method import DEFAULT
from cpdhpc.compress import COMPRESSORS
from cpdhpc.config import UserError
from cpdhpc.train.gradients import Gradients
from cpdhpc.world.ranks import Loopback

pytestmark = [pytest.mark.mpi, pytest.mark.two_ranks]


def test_mpi_sums_a_source_and_leaves_it_alone(world):
    x, out = np.full(7, world.process + 1, np.float32), np.empty(7, np.float32)
    expected = np.full(7, world.processes * (world.processes + 1) / 2, np.float32)
    world.sum_by_mpi(out, x)
    np.testing.assert_array_equal(out, expected)
    assert (x == world.process + 1).all()
    world.sum_by_mpi(x)
    np.testing.assert_array_equal(x, expected)
    world.sum_by_mpi(np.empty(0, np.float32))


def test_gloo_sums(world):
    with gloo(world):
        x, out = np.full(9, world.process + 1, np.float32), np.empty(9, np.float32)
        sum_bfloat16(x, out)
        expected = np.full(9, world.processes * (world.processes + 1) / 2, np.float32)
        np.testing.assert_array_equal(out, expected)  # small integers are bfloat16
        sum_float32(x)
        np.testing.assert_array_equal(x, expected)
        cases = cases_of_size(world, 4096, [Allreduce("e4m3", "direct")], list(BASELINES))
    errors = [case.error for case in cases]
    assert errors[:2] == [0, 0] and 0 < errors[2] < errors[3] < 2**-3
    assert cases[3].wire_bytes > 0


def test_auto_is_one_algorithm_on_all_ranks(world):
    x = np.full(5000, world.process + 1, np.float32)
    reduced = Allreduce("raw", "auto").run(world, [x])
    assert len(set(world.gather(reduced.algorithm))) == 1
    assert (reduced.arrays[0] == world.processes * (world.processes + 1) / 2).all()


def test_machines_that_differ_are_an_error_on_all_ranks(world):
    own = replace(DEFAULT, alpha_s=1e-6 * (1 + (world.process == world.processes - 1)))
    with pytest.raises(
        ValueError, match=r"arguments differ: machine=.*alpha_s=1e-06.* on rank 0, .* on rank \d"
    ):
        allreduce(world, np.ones(9, np.float32), algorithm="auto", machine=own)
    path = "none.toml" if world.process == 0 else None
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read"):
        allreduce(world, np.ones(9, np.float32), algorithm="auto", machine=path)


def test_what_one_process_finds_wrong_is_raised_by_all(world):
    path = Path("nowhere/x.h5") if world.process == world.processes - 1 else None
    with pytest.raises(UserError, match="nowhere is no directory"):
        together(world, lambda: check_out(path))
    with pytest.raises(UserError, match=r"nowhere/x\.h5: cannot be written"):
        write_samples(Path("nowhere/x.h5"), world, "x", {}, [np.zeros((3, world.processes))], 1)
    assert together(world, lambda: world.process) == world.process


@pytest.mark.parametrize("name", ["none", "topk", "terngrad"])
def test_replayed_gradients_have_the_figures_of_the_simulation(world, name):
    """Real ranks tell one another more than payloads: agreements, in MPI's own collectives."""
    values = np.random.default_rng(0).standard_normal((world.ranks, 40, 50)).astype(np.float32)
    recorded = [Gradients(t, world.ranks, {"w": values * (1 + t)}, "made") for t in range(2)]
    found, expected = (
        replay(each, COMPRESSORS[name](), recorded) for each in (world, Loopback(world.ranks))
    )
    figures = ("error", "cosine", "sum_error", "nonzero_share", "sent_share")
    alike = [repr(getattr(found, f)) == repr(getattr(expected, f)) for f in figures]
    more = found.sent_bytes - expected.sent_bytes
    verdicts = [*alike, found.sent_bytes.size == world.ranks, 0 < more.min() <= more.max() < 1000]
    assert world.gather(all(verdicts)) == [True] * world.processes, verdicts
