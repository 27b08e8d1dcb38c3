"""Output directories: tried and claimed before the first step, by one process at a time."""

import errno
import fcntl
import json
import os
import resource
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from every import every

from cpdhpc.config import UserError
from cpdhpc.lab.claim import Claim, ClaimError, alone
from cpdhpc.lab.train.checkpoint import claimed
from cpdhpc.world.ranks import Loopback

DEAD = 2**22 + 1  # no process has a number above 2^22


def claim(path: Path, resume: bool = False) -> None:
    """Claim a run of three in a directory, and let it go."""
    runs = {name: (path / f"{name}.h5", path / f"{name}.checkpoint.h5") for name in "abc"}
    with claimed(Loopback(), path, runs, resume):
        assert sorted(each.name for each in path.glob(".*")) == [".a.lock", ".b.lock", ".c.lock"]


def test_two_runs_do_not_write_the_same_files(tmp_path: Path) -> None:
    with alone(tmp_path / ".b.lock", "run of b", print):
        with pytest.raises(ClaimError) as raised:
            claim(tmp_path)
        claimant = rf"process {os.getpid()} on "
        assert f"{tmp_path}/.b.lock: another run of b is at work: {claimant}" in str(raised.value)
        assert ", since 20" in str(raised.value)
    claim(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_requeued_job_waits_for_the_ranks_of_its_former_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job does not wait, and nobody for ever."""
    monkeypatch.setattr("cpdhpc.lab.claim.LOOK_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    said: list[str] = []
    with ExitStack() as former:
        former.enter_context(alone(tmp_path / ".b.lock", "run of b", print))
        with pytest.raises(ClaimError), alone(tmp_path / ".b.lock", "run of b", said.append):
            pass
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        monkeypatch.setattr("cpdhpc.lab.claim.REQUEUED_S", 0.05)
        with pytest.raises(ClaimError), alone(tmp_path / ".b.lock", "run of b", said.append):
            pass
        assert len(said) == 1 and "Slurm job 9" in said[0]
        assert "of this job before it was requeued, to end" in said[0]
        monkeypatch.setattr("cpdhpc.lab.claim.REQUEUED_S", 60.0)
        given_back = former.pop_all()
        with alone(tmp_path / ".b.lock", "run of b", lambda text: given_back.close()):
            assert (tmp_path / ".b.lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    """Its file is still there, but no process has it locked."""
    gone = replace(Claim.here(), host="elsewhere", pid=1)
    (tmp_path / ".a.lock").write_text(json.dumps(asdict(gone)))
    (tmp_path / ".b.lock").write_text("")
    claim(tmp_path)


@every(
    ("changes", "free"),
    [
        ({"pid": DEAD}, True),
        ({"pid": 1, "host": "elsewhere"}, False),
        ({"pid": 1, "host": "elsewhere", "job_id": "7"}, True),  # this job, started again
        ({"state": "ended"}, True),
    ],
)
def test_where_there_are_no_locks_the_claim_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], free: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    there = replace(Claim.here(), **{"job_id": "6", **changes})
    (tmp_path / ".a.lock").write_text(json.dumps(asdict(there)))
    if free:
        claim(tmp_path)
        return
    with pytest.raises(ClaimError, match=r"on elsewhere, Slurm job 6, since .* remove the file"):
        claim(tmp_path)
    assert (tmp_path / ".a.lock").exists()
    with alone(tmp_path / ".a.lock", "batch", print, doubted=False):
        pass


def test_a_full_disk_is_seen_before_the_first_step(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ClaimError, match=r"\.a\.lock: cannot be written: File too large"):
            claim(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_there_are_refused_unless_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.h5").write_text("")
    with pytest.raises(UserError, match=r"b\.h5: is there already: --resume goes on from it"):
        claim(tmp_path)
    claim(tmp_path, resume=True)
    (tmp_path / "b.h5").unlink()

    def ended(path: Path, *_: object) -> ExitStack:
        (tmp_path / "a.h5").write_text("")  # another run has made it, and given its lock back
        return ExitStack()

    with monkeypatch.context() as patched:
        patched.setattr("cpdhpc.lab.train.checkpoint.alone", ended)
        with pytest.raises(UserError, match=r"a\.h5: is there already"):
            claim(tmp_path)
    (tmp_path / "wall").write_text("")
    with pytest.raises(UserError, match=r"wall/x: cannot be made: Not a directory"):
        claim(tmp_path / "wall" / "x")
