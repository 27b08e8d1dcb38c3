"""Batches of studies on real ranks: smaller cases on some of them, failures, signals, proofs."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from studies import small_study
from training import write_idx

from cpdhpc.config import UserError
from cpdhpc.lab import provenance
from cpdhpc.lab.claim import Claim, read_claim
from cpdhpc.lab.kinds.allreduce_cases import TimedCase
from cpdhpc.lab.study.batch import (
    FAILED,
    FINISHED,
    UNFINISHED,
    PlacementError,
    measure_batch,
    prove,
)
from cpdhpc.lab.study.cases import batches, expand, load_study
from cpdhpc.lab.study.collect import collect, find
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study_data.study_file import SAME_FOR_ALL
from cpdhpc.lab.train import training
from cpdhpc.store import StoreError


@pytest.fixture
def shared(world, tmp_path):
    """A directory that all ranks see."""
    return Path(world.gather(str(tmp_path))[0])


def freeze(world, directory, **changes):
    """A folder that holds the small study with changes, for all ranks."""
    study = small_study(directory, **changes) if world.process == 0 else None
    folder = Folder(directory / "x")
    if study is not None:
        folder.prepare(study)
    world.barrier()
    return folder


def test_a_part_of_the_processes_is_a_world(world):
    last = world.processes - 1
    part = world.part([0, last], timeout_s=600)
    assert (part is None) == (world.process not in (0, last))
    if part is not None:
        assert part.gather(world.process) == [0, last]
        part.free()
    world.barrier()


def test_a_long_wait_leaves_the_core_to_others(world):
    world.barrier()
    began_s, cpu_s = time.monotonic(), time.process_time()
    if world.process == 0:
        time.sleep(0.5)
    world.barrier("long", 0.005)
    waited_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    assert waited_s > 0.4
    assert cpu_s < 0.25 * waited_s


def test_worlds_that_are_not_what_was_asked_for(world):
    size, nodes = world.processes, len(set(world.nodes))
    if nodes > 1:
        pytest.skip("the ranks are on several nodes")
    prove(world, 1, size)
    with pytest.raises(
        PlacementError, match=rf"MPI has {size} processes, asked for were {size + 1}"
    ):
        prove(world, 1, size + 1)
    with pytest.raises(PlacementError, match=rf"has {size} processes, by nodes; asked for were"):
        prove(world, size, 1)
    world.nodes = (0,) * (size - 1) + (1,)
    try:
        if size == 2:
            prove(world, 2, 1)
        if size == 4:
            with pytest.raises(
                PlacementError, match=r"has 3 \+ 1 processes, by nodes; .*per-node=2"
            ):
                prove(world, 2, 2)
    finally:
        world.nodes = (0,) * size


def test_smaller_cases_run_on_some_of_the_ranks(world, shared):
    """Nested: 1 to all ranks in one batch, with baselines, packed and exact sums."""
    size = world.processes
    folder = freeze(
        world,
        shared,
        sweep={
            "ranks": list(range(1, size + 1)),
            "ppn": size,
            "algorithm": ["tree", "mpi", "gloo"],
        },
        zip=[{"wire": ["raw", "e3m0"], "accumulate": ["", "exact"]}],
        run={"bundle": "nested"},
        measure={"confidence": 0.9, "min_repeats": 5, "block": 5, "max_repeats": 5},
    )
    study = folder.study()
    cases = expand(study).cases
    assert len(cases) == 4 * size and len(batches(study, cases)) == 1
    assert measure_batch(world, folder.path, 0) == FINISHED
    found = find(folder, cases)
    assert not found.missing and not found.rejected
    for case, result in found.results:
        assert result.is_warmup.tolist() == [1, 0, 0, 0, 0, 0]
        slowest, fastest, mean = result.times_s.T
        assert (slowest >= mean).all() and (mean >= fastest).all() and (fastest > 0).all()
        packed = case.factors["wire"] == "e3m0"
        assert (result.outcomes["error"] > 0) == packed
        assert np.isnan(result.outcomes["bound_s"]) == (case.ranks == 1)
        ours = case.factors["algorithm"] == "tree"
        assert np.isnan(result.outcomes["wire_bytes"]) != ours
        if ours and case.ranks == 2:
            # 1,024 values are a tile. A sum of two e3m0 takes 8 bits: it is within 2 * 32 steps.
            assert result.outcomes["wire_bytes"] == (1024 if packed else 4096)
    claim = read_claim(folder.claim_file(0))
    assert claim.state == "ended" and claim.restarts == 0
    assert measure_batch(world, folder.path, 0) == FINISHED
    world.barrier()


@pytest.mark.two_ranks
def test_a_case_that_fails_stops_no_other(world, shared, monkeypatch):
    size = world.processes
    folder = freeze(
        world, shared, sweep={"ranks": [1, size], "ppn": size}, run={"bundle": "nested"}
    )
    check = TimedCase.check

    def wrong(case, place):
        check(case, place)
        if "ring" in case.name.split() and place.size == size:
            raise ArithmeticError("the sum of integers is not exact")

    monkeypatch.setattr(TimedCase, "check", wrong)
    assert measure_batch(world, folder.path, 0) == FAILED
    study = folder.study()
    cases = expand(study).cases
    unfinished = [case for case in cases if not folder.finished(case)]
    assert [(case.ranks, case.factors["algorithm"]) for case in unfinished] == [(size, "ring")]
    says = "ArithmeticError: the sum of integers is not exact"
    assert folder.failure(unfinished[0]) == says
    if world.process == 0:
        assert len(collect(study, folder).missing) == 1
    world.barrier()
    monkeypatch.undo()
    assert measure_batch(world, folder.path, 0) == FINISHED
    assert folder.failure(unfinished[0]) == ""
    world.barrier()


def test_a_signal_to_one_rank_stops_all_between_two_visits(world, shared, monkeypatch):
    size = world.processes
    endless = {"min_repeats": 10**6, "max_repeats": 10**6, "max_time_s": 300.0}
    folder = freeze(world, shared, sweep={"ranks": [size], "ppn": size}, measure=endless)
    check, last = TimedCase.check, world.processes - 1

    def with_a_signal(case, place):
        check(case, place)
        if world.process == last:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TimedCase, "check", with_a_signal)
    assert measure_batch(world, folder.path, 0) == UNFINISHED
    assert not any(map(folder.finished, expand(folder.study()).cases))
    assert read_claim(folder.claim_file(0)).state == "stopped"
    world.barrier()


@pytest.mark.two_ranks
def test_a_training_goes_on_from_its_checkpoint(world, shared, monkeypatch):
    size = world.processes
    path = shared / "train.toml"
    if world.process == 0:
        write_idx(shared)
        path.write_text(
            f"kind = 'train'\n[job.data]\nname = 'idx'\ndir = '{shared}'\n"
            "[job.train]\nbatch = 7\nthreads = 1\ntelemetry_every = 2\n"
            f"[sweep]\nranks = {size}\nppn = {size}\n'train.epochs' = 4\n"
            "'gradient.aggregator' = 'lowbit'\n[measure]\nwarmup = 2\n"
        )
    world.barrier()
    study, folder = load_study(path), Folder(shared / "x")
    if world.process == 0:
        folder.prepare(study)
    world.barrier()
    (case,) = expand(study).cases
    step, calls = training.step, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) in (4, 8) and world.process == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(*arguments)

    monkeypatch.setattr(training, "step", stopping)
    assert measure_batch(world, folder.path, 0) == UNFINISHED
    assert len(calls) == 4 and not folder.finished(case)
    there = provenance.identity()
    monkeypatch.setattr(provenance, "identity", lambda: there | {"mpi_library": "another"})
    assert measure_batch(world, folder.path, 0) == FAILED
    library = " ".join(there["mpi_library"].split())  # MPICH's has many blanks
    assert folder.failure(case).endswith(
        f"was trained so far with mpi_library {library}, not another: go on there, or delete it"
    )
    world.barrier()
    monkeypatch.setattr(provenance, "identity", lambda: there)
    assert measure_batch(world, folder.path, 0) == UNFINISHED
    assert measure_batch(world, folder.path, 0) == FINISHED
    assert len(calls) == 12, "three steps an epoch, and none twice"
    (result,) = [result for _, result in find(folder, [case]).results]
    # Each of the three processes is cold for two steps: from 0, from 4 and from 8 on.
    assert result.is_warmup.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert not folder.work(case).exists(), "a finished case needs no checkpoint"
    assert result.outcomes["restarts"] == 3 and 0 < result.outcomes["accuracy"] <= 100
    assert result.series["training"]["epoch"].tolist() == [1, 2, 3, 4]
    assert result.series["telemetry"]["iteration"].tolist() == [0, 2, 4, 6, 8, 10]
    assert (result.times_s[:, 0] > 0).all()
    world.barrier()


@pytest.mark.two_ranks
def test_cases_of_two_libraries_are_not_mixed(world, shared, monkeypatch):
    size = world.processes
    folder = freeze(world, shared, sweep={"ranks": [size], "ppn": size})
    (first, other) = expand(folder.study()).cases
    assert measure_batch(world, folder.path, 0) == FINISHED
    world.barrier()
    if world.process == 0:
        folder.case_file(other).unlink()
    there = provenance.identity()
    assert there.keys() == SAME_FOR_ALL.keys() - {"program", "program_commit"}, (
        "which studies of programs have"
    )
    for name, value in there.items():
        monkeypatch.setattr(provenance, "identity", lambda n=name: there | {n: "another"})
        with pytest.raises(UserError, match=re.escape(f"{value or 'unknown'}, not another")):
            measure_batch(world, folder.path, 0)
    assert read_claim(folder.claim_file(0)).restarts == 0, "it has not begun"
    world.barrier()
    monkeypatch.undo()
    assert measure_batch(world, folder.path, 0) == FINISHED
    assert folder.finished(first) and folder.finished(other)
    world.barrier()


def test_what_the_user_can_mend_is_raised_on_all_ranks(world, shared):
    folder = freeze(world, shared, sweep={"ranks": [world.processes], "ppn": world.processes})
    with pytest.raises(UserError, match=r"batch 7: .* has batches 0 to 0"):
        measure_batch(world, folder.path, 7)
    with pytest.raises(UserError, match=r"cannot be read"):
        measure_batch(world, shared / "nothing", 0)
    with pytest.raises(PlacementError, match="asked for were"):
        measure_batch(world, folder.path, 0, nodes=world.processes + 1, ppn=1)
    blocked = folder.claim_file(0)
    if world.process == 0:
        blocked.mkdir()
    world.barrier()
    with pytest.raises(UserError, match="cannot be written"):
        measure_batch(world, folder.path, 0)
    world.barrier()


def test_a_disk_that_is_full_ends_all_ranks(world, shared, monkeypatch):
    """At the last claim, and at the word on a failure: only process 0 writes them."""
    folder = freeze(world, shared, sweep={"ranks": [world.processes], "ppn": world.processes})

    def full(*_):
        raise StoreError("cannot be written: No space left on device")

    monkeypatch.setattr(Claim, "end", full)
    with pytest.raises(UserError, match="No space left"):
        measure_batch(world, folder.path, 0)
    assert all(map(folder.finished, expand(folder.study()).cases))
    world.barrier()
    monkeypatch.undo()
    for case in expand(folder.study()).cases if world.process == 0 else ():
        folder.case_file(case).unlink()
        folder.failure_file(case).mkdir()
    world.barrier()

    def wrong(*_):
        raise ArithmeticError("wrong")

    monkeypatch.setattr(TimedCase, "check", wrong)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        measure_batch(world, folder.path, 0)
    world.barrier()


def test_a_job_that_trains_nothing_fails_alone(world, shared):
    size = world.processes
    path = shared / "train.toml"
    if world.process == 0:
        path.write_text(
            "kind = 'train'\n[job.data]\nname = 'idx'\ndir = 'nowhere'\n[sweep]\n"
            f"ranks = {size}\nppn = {size}\nseed = [0]\n"
        )
        Folder(shared / "x").prepare(load_study(path))
    world.barrier()
    folder = Folder(shared / "x")
    assert measure_batch(world, folder.path, 0) == FAILED
    (case,) = expand(folder.study()).cases
    assert "nowhere/train-images-idx3-ubyte: there is no such file" in folder.failure(case)
    world.barrier()


def test_codecs_share_the_data(world, shared):
    size = world.processes
    path = shared / "codec.toml"
    if world.process == 0:
        write_idx(shared)
        path.write_text(
            f"kind = 'codec'\n[sweep]\nranks = [1, {size}]\nppn = {size}\nsize_bytes = '64KiB'\n"
            "format = 'e4m3'\noperation = ['memcpy', 'encode tile', 'stochastic', 'hop block16']\n"
            "[measure]\nmin_repeats = 6\nmax_repeats = 6\n[run]\nbundle = 'nested'\n"
        )
        Folder(shared / "x").prepare(load_study(path))
    world.barrier()
    folder = Folder(shared / "x")
    assert measure_batch(world, folder.path, 0) == FINISHED
    for case, result in find(folder, expand(folder.study()).cases).results:
        share = -(-(1 << 14) // case.ranks)
        assert result.outcomes["payload_bytes"] in (4 * share, 4 * (share - 1), 4 * (share + 1))
        if case.factors["operation"] == "memcpy":
            assert "error" not in result.outcomes
            continue
        # e4m3 to nearest: a relative error of 2**-4 at most; stochastic twice that. Subnormal
        # values, below 2**-6, are lost more, but are less than 2% of the norm of normal data.
        assert 0.01 < result.outcomes["error"] < 2**-3
        assert result.outcomes["wire_bytes"] < result.outcomes["payload_bytes"] / 3
    world.barrier()
