"""What benchmarks and "auto" do on real ranks: baselines, and errors that all ranks raise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpdhpc.bench.allreduce import BASELINES, cases_of_size
from cpdhpc.bench.baselines import gloo, sum_bfloat16, sum_float32
from cpdhpc.bench.harness import Measured, Point, check_out, together
from cpdhpc.collectives.allreduce import Allreduce, allreduce
from cpdhpc.collectives.method import DEFAULT
from cpdhpc.config import UserError
from cpdhpc.study.benchmark import write_benchmark

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
        point = Point({"size_bytes": 4}, {}, np.zeros((3, world.processes)))
        write_benchmark(Path("nowhere/x.h5"), Measured("x", "allreduce", [point], 1), world)
    assert together(world, lambda: world.process) == world.process
