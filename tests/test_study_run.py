"""Studies on this machine, with mpirun: killed, stopped, resumed, collected; wrong worlds."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kill_study import Storm
from studies import small_study, study_file
from training import leave_sessions

from cpdhpc import store
from cpdhpc.lab.claim import read_claim
from cpdhpc.lab.study import run_here
from cpdhpc.lab.study.cases import batches, expand
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.run_here import GRACE_S, LOG_LINES

Run = Callable[..., tuple[int, str]]


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


@contextmanager
def interrupted(ready: Callable[[], bool], every_s: float = 0) -> Iterator[None]:
    """Send SIGINT to this process once it is ready for it, and again where every_s is given."""
    over = threading.Event()

    def send() -> None:
        while not ready():
            if over.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGINT)
        while every_s and not over.wait(every_s):
            os.kill(os.getpid(), signal.SIGINT)

    def unexpected(*_: object) -> None:
        raise AssertionError("SIGINT is not handled")

    before = signal.signal(signal.SIGINT, unexpected)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGINT, before)


def fake_launcher(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a launcher on PATH that says that it is Open MPI's and does what the script says."""
    program = directory / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo "Open MPI"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_where_no_log_can_be_opened(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in a log's place, and no place for temporary files: a line, no traceback."""
    path, folder = study_file(tmp_path), Folder(tmp_path / "out")
    fake_launcher(tmp_path, monkeypatch, "exit 0")
    folder.log_file(0).mkdir(parents=True)
    status, shown = run("study", "run", path, "--out", folder.path)
    assert status == 2
    assert f"cpdhpc: error: {folder.log_file(0)}: cannot be written: Is a directory\n" in shown
    folder.log_file(0).rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    status, shown = run("study", "resume", folder.path)
    assert status == 2
    assert "directory for temporary files: cannot be written: No such file" in shown


def test_a_failing_batch_does_not_stop_the_others(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of the first batch cannot be written: a directory is in its place.

    And killed launchers have had the numbers that these will have.
    """
    leave_sessions(tmp_path, monkeypatch)
    path, folder = study_file(tmp_path), Folder(tmp_path / "out")
    case = expand(small_study(tmp_path)).cases[0]
    folder.claim_file(0).mkdir(parents=True)
    status, shown = run("study", "run", path, "--out", folder.path)
    assert status == 1, shown
    assert "batch 0: status 2, " in shown and "batch 1: " not in shown
    assert f"batch 0: {case.id}: not measured" in shown
    assert f"\ncpdhpc: error: {folder.claim_file(0)}: cannot be written" in shown
    assert f"{folder.claim_file(0)}: cannot be written" in folder.log_file(0).read_text()
    assert [each.ranks for each in expand(folder.study()).cases if folder.finished(each)][-2:] == [
        2,
        2,
    ]


def test_a_directory_in_place_of_a_case_fails_that_case_alone(tmp_path: Path, run: Run) -> None:
    path, folder = study_file(tmp_path, sweep={"ranks": [1]}), Folder(tmp_path / "out")
    first, other = expand(small_study(tmp_path, sweep={"ranks": [1]})).cases
    folder.case_file(first).mkdir(parents=True)
    status, shown = run("study", "run", path, "--out", folder.path)
    says = f"FolderError: {first.id}.h5: is a directory: remove this directory, then study resume"
    assert status == 1 and f"batch 0: {first.id}: {says}\n" in shown
    assert f"left out: {first.id}.h5: " in shown and "measures it again" not in shown
    assert folder.finished(other)
    folder.case_file(first).rmdir()
    assert run("study", "resume", folder.path)[0] == 0


def test_ctrl_c_stops_the_ranks_cleanly(tmp_path: Path, run: Run) -> None:
    """As soon as there is a claim: all ranks are ready for it by then."""
    endless = {"min_repeats": 10**6, "max_repeats": 10**6, "max_time_s": 300.0}
    path = study_file(tmp_path, measure=endless, sweep={"ranks": [2]})
    folder = Folder(tmp_path / "out")
    claim = folder.claim_file(0)
    with interrupted(lambda: read_claim(claim) is not None):
        status, shown = run("study", "run", path, "--out", folder.path)
    assert status == 130, shown
    assert "stopped; resume goes on from here" in shown and "not measured" in shown
    found = read_claim(claim)
    assert found is not None and found.state == "stopped"
    assert not list(folder.cases.iterdir())


def test_a_launcher_that_outlives_its_ranks_is_ended(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Open MPI's does now and then; what the ranks have measured counts."""
    monkeypatch.setattr(run_here, "SEARCH_S", 0.1)
    monkeypatch.setattr(run_here, "LOST_S", 1.0)
    rank = '"$@" & wait; while :; do sleep 1; done'
    fake_launcher(tmp_path, monkeypatch, f"shift 5; {rank}")
    path = study_file(tmp_path, sweep={"ranks": [1]})
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    assert "mpirun outlives its ranks: is ended" in shown
    assert status == 0, shown


def test_ctrl_c_ends_a_launcher_that_has_not_begun(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured, so nothing is asked for; where it does not end, at the second."""
    started, told = tmp_path / "started", tmp_path / "told"
    script = f"trap 'echo USR1 >{told}' USR1; trap 'echo TERM >{told}' TERM; touch {started}"
    fake_launcher(tmp_path, monkeypatch, script + "; while :; do sleep 0.1; done")
    start_s = time.monotonic()
    with interrupted(started.exists, every_s=1):
        status, shown = run("study", "run", study_file(tmp_path), "--out", tmp_path / "out")
    assert status == 130, shown
    assert "stopped; resume goes on from here" in shown and "batch 1, " not in shown
    assert told.read_text() == "TERM\n" and time.monotonic() - start_s < GRACE_S


def test_a_launcher_that_fails_is_shown(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says last is the reason, where no error of cpdhpc is."""
    fake_launcher(tmp_path, monkeypatch, "seq 100 1 130; echo; echo no slots; exit 213")
    path = study_file(tmp_path, sweep={"ranks": [2]})
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    assert status == 1 and "batch 0: status 213, 2 case(s) left: see " in shown
    lines = shown.splitlines()
    last = lines.index("no slots")
    assert lines[last - LOG_LINES + 1 : last] == [*map(str, range(132 - LOG_LINES, 131))]


def test_a_batch_that_leaves_an_empty_log_says_so(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, which takes no line."""
    fake_launcher(tmp_path, monkeypatch, "exit 1")
    path = study_file(tmp_path, sweep={"ranks": [2]})
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    assert status == 1 and "batch-0.log: is empty: its disk is full, or nothing" in shown


def test_processes_that_are_all_alone_are_an_error(tmp_path: Path, run: Run) -> None:
    """One of two that no launcher has joined, as after srun with the wrong --mpi."""
    folder = Folder(tmp_path / "x")
    folder.prepare(small_study(tmp_path))
    status, error = run("batch", folder.path, 1)
    assert status == 2
    assert error.startswith(
        "cpdhpc: error: batch: MPI has 1 process, asked for were 2 (nodes x ranks per node: "
        "1 x 2): every process is alone: start it by the mpirun that belongs to "
    )
    assert "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)" in error
    assert not list(folder.logs.iterdir()) and not list(folder.cases.iterdir())
