"""Studies on this machine, with mpirun: killed, stopped, resumed, collected; wrong worlds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_study import Storm
from studies import small_study, start, study_file

from cpdhpc import store
from cpdhpc.claim import read_claim
from cpdhpc.cli import main
from cpdhpc.study.cases import batches, expand
from cpdhpc.study.folder import Folder

pytestmark = pytest.mark.mpi_skip
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line; return its status and what it shows, errors last."""

    def call(*words: object) -> tuple[int, str]:
        status = main([*map(str, words)])
        return status, "".join(capsys.readouterr())

    return call


def test_a_study_survives_kills_and_is_resumed_and_collected(tmp_path: Path, run: Run) -> None:
    """18 cases; killed once a case is finished, and once anywhere."""
    storm = Storm(tmp_path, seed=2)
    storm.kill()
    while not storm.known:  # where it died too early
        storm.kill()
    assert len(storm.known) < len(storm.cases) == 18 and storm.studies == 1
    begun = {  # cases that are not finished, of batches that had begun: starts of their batch
        case.id: claim.restarts + 1
        for batch in batches(storm.folder.study(), storm.cases)
        if (claim := read_claim(storm.folder.claim_file(batch.number))) is not None
        for case in batch.cases
        if case not in storm.known
    }
    status, shown = run("study", "resume", storm.path, "--out", storm.folder.path)
    assert status == 0, shown
    assert shown.endswith("study.h5: 18 of 18 cases\n")
    storm.check()
    assert len(storm.known) == 18
    groups, attributes = store.read(storm.folder.study_file)
    assert attributes["status"] == "complete"
    samples = groups["samples"]
    assert samples["case_id"].tolist() == [case.id for case in storm.cases]
    restarts = dict(zip(samples["case_id"].tolist(), samples["restarts"].tolist(), strict=True))
    assert {case: restarts[case] for case in begun} == begun
    assert (groups["summary"]["n"] == 60).all()
    assert (samples["error"] == 0).all(), "sums of integers are exact"
    two = samples["ranks"] == 2
    assert (samples["bound_s"][two] > 0).all()
    assert (groups["summary"]["median_s"] > 0).all()
    status, shown = run("study", "status", storm.path, "--out", storm.folder.path)
    assert status == 0 and shown.endswith("small: 18 cases: 18 finished\n")


def test_a_failing_batch_does_not_stop_the_others(tmp_path: Path, run: Run) -> None:
    """A case of the first batch cannot be written: a directory is in its place."""
    path, folder = study_file(tmp_path), Folder(tmp_path / "out")
    case = expand(small_study(tmp_path)).cases[0]
    folder.case_file(case).mkdir(parents=True)
    status, shown = run("study", "run", path, "--out", folder.path)
    assert status == 1, shown
    assert "batch 0: status 2, " in shown and "batch 1: " not in shown
    assert f"batch 0: {case.id}: not measured" in shown
    assert f"\ncpdhpc: error: {folder.case_file(case)}: cannot be written" in shown
    assert f"{case.id}.h5: cannot be written" in folder.log_file(0).read_text()
    assert [each.ranks for each in expand(folder.study()).cases if folder.finished(each)][-2:] == [
        2,
        2,
    ]


def test_ctrl_c_stops_the_ranks_cleanly(tmp_path: Path) -> None:
    endless = {"min_repeats": 10**6, "max_repeats": 10**6, "max_time_s": 300.0}
    path = study_file(tmp_path, measure=endless, sweep={"ranks": [2]})
    folder = Folder(tmp_path / "out")
    process = start("study", "run", path, "--out", folder.path)
    claim = folder.claim_file(0)
    until_s = time.monotonic() + 1800
    while read_claim(claim) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=1800)
    assert process.returncode == 130, out + error
    assert "stopped; resume goes on from here" in out and "not measured" in out
    found = read_claim(claim)
    assert found is not None and found.state == "stopped"
    assert not list(folder.cases.iterdir())


def test_processes_that_are_all_alone_are_an_error(tmp_path: Path) -> None:
    """Two processes that no launcher has joined, as after srun with the wrong --mpi."""
    folder = Folder(tmp_path / "x")
    folder.prepare(small_study(tmp_path))
    two = [start("batch", folder.path, 1) for _ in range(2)]
    for process in two:
        out, error = process.communicate(timeout=1800)
        assert process.returncode == 2 and out == ""
        assert error.startswith(
            "cpdhpc: error: batch: MPI has 1 process, asked for were 2 (nodes x ranks per node: "
            "1 x 2): every process is alone: start it by the mpirun that belongs to "
        )
        assert "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)" in error
    assert not list(folder.logs.iterdir()) and not list(folder.cases.iterdir())
