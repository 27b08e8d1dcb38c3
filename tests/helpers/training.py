"""Small training jobs for the tests, and how to run them."""

import gzip
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpdhpc import store
from cpdhpc.config import merge, validate
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.data import Idx
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.samples import Dataset, StreamedData
from cpdhpc.lab.train.setup import prepare
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Ranks

ROOT = Path(__file__).parents[2]
IDX = Idx(dir="")
SMALL = {
    "name": "small",
    "model": {"name": "mlp", "hidden": [8]},
    "train": {
        **{"epochs": 2, "batch": 24, "threads": 1, "telemetry_every": 2},
        "checkpoint_every": 9,  # epochs; a file takes longer than one of these
    },
}
ROWS: dict[str, dict[str, Any]] = {
    "float32": {"aggregator": "none", "algorithm": "tree"},
    "tile": {"aggregator": "lowbit", "wire": "e4m3", "scaling": "tile"},
    "aps": {"aggregator": "lowbit", "wire": "e5m2", "scaling": "aps", "algorithm": "direct"},
    "stochastic": {"aggregator": "lowbit", "wire": "e3m0", "rounding": "stochastic"},
}


def small_job(**changes: Any) -> Job:
    """The small job with changes laid over its tables."""
    return validate(Job, merge(SMALL, changes), "test")


def small_data(seed: int = 0) -> Dataset:
    """100 training and 40 test images of 8 x 8 pixels: stripes, so that there is much to learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, 140)
    images = rng.random((140, 8, 8), np.float32) / 2
    images[np.arange(140), labels] += 0.5
    return Dataset(images[:100], labels[:100], images[100:], labels[100:], classes=8)


def prepared(
    job: Job, world: Ranks, place: Path | Files, data: Dataset | StreamedData | None = None
) -> Training:
    """A run that is about to begin, on the small data or others; place: its directory or files."""
    files = place if isinstance(place, Files) else Files.of(place, job)
    return prepare(job, world, small_data() if data is None else data, files)


def finish(training: Training) -> Training:
    """Run to the end, and say nothing."""
    run(training, Caught(), Display(False, 1))
    return training


def told(training: Training, capsys: pytest.CaptureFixture[str]) -> str:
    """Run to the end, and return what is said."""
    run(training, Caught(), Display(True, 1))
    return capsys.readouterr().out


class Stop(Display):
    """Raises a flag after some steps, as a signal would; stays: and leaves it."""

    def __init__(self, caught: Caught, after: int, stays: bool = False) -> None:
        super().__init__(False, 1)
        self.caught, self.after, self.stays = caught, after, stays

    def step(self, samples: int = 1, note: str | None = None) -> None:
        self.after -= 1
        is_raised = self.after == 0 or (self.stays and self.after < 0)
        self.caught.number = signal.SIGTERM if is_raised else 0


def stop(training: Training, after: int, stays: bool = False) -> Training:
    """Run until a signal after some steps has ended it."""
    caught = Caught()
    with pytest.raises(Interrupted):
        run(training, caught, Stop(caught, after, stays))
    return training


def run_job(
    job: Job,
    world: Ranks,
    place: Path | Files,
    data: Dataset | StreamedData | None = None,
    *,
    resume: bool = False,
) -> Training:
    """Run a job to the end; see prepared. resume: from its checkpoint if there is one."""
    training = prepared(job, world, place, data)
    if resume:
        training.resume()
    return finish(training)


def assert_same_records(one: Path, other: Path) -> None:
    """All but the times."""
    left, right = store.read(one)[0], store.read(other)[0]
    for group, columns in left.items():
        for name, column in columns.items():
            if name != "time_s":
                assert column.tobytes() == right[group][name].tobytes(), (group, name)


def model_bytes(checkpoint: Path) -> bytes:
    """The weights and the momentum in a checkpoint."""
    groups, _ = store.read(checkpoint)
    return b"".join(
        array.tobytes() for group in ("model", "optimizer") for array in groups[group].values()
    )


def idx_bytes(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    """An IDX file of a uint8 array."""
    dims = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + dims + array.tobytes()


def write_idx(directory: Path, suffix: str = "") -> None:
    """Twenty training and ten test images of 5 x 4 pixels."""
    rng = np.random.default_rng(0)
    for images, labels, n in (
        (IDX.train_images, IDX.train_labels, 20),
        (IDX.test_images, IDX.test_labels, 10),
    ):
        contents = rng.integers(0, 256, (n, 5, 4)), np.arange(n) % 3
        for name, content in zip((images, labels), contents, strict=True):
            data = idx_bytes(content.astype(np.uint8))
            data = gzip.compress(data) if suffix else data
            (directory / (name + suffix)).write_bytes(data)


def write_job(directory: Path, name: str, data: Path) -> str:
    """Write a job of one epoch over the images of a directory; return its path."""
    path = directory / f"{name}.toml"
    path.write_text(
        f"[data]\nname = 'idx'\ndir = '{data}'\n[train]\nepochs = 1\nbatch = 4\nthreads = 1\n"
    )
    return str(path)


def environment() -> dict[str, str]:
    """For subprocesses: this package and the launcher beside this Python are found first.

    A thread each: with two ranks on two cores, beside other tests, more only wait for one another.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def leave_sessions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what killed launchers leave, of all numbers that the next processes may have."""
    highest = int(Path("/proc/sys/kernel/pid_max").read_text())
    for ahead in range(2000):
        left = directory / f"ompi.{(os.getpid() + ahead) % highest}"
        left.mkdir()
        (left / f"pmix.{socket.gethostname().split('.')[0]}.tool").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))


def ran(
    command: Iterable[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in environment() by default, and keep what it prints."""
    return subprocess.run(
        [*map(str, command)], env=environment() if env is None else env, cwd=cwd, input=input,
        check=check, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


def mpirun(
    ranks: int, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments on so many processes."""
    local = ROOT / "slurm" / "mpirun-local"
    return ran([local, ranks, sys.executable, *arguments], cwd=cwd)
