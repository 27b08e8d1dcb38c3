"""Data, losses and workers of the user's own on real ranks: right for 1 to 4 processes."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from test_imports import JOB, THEIRS
from training import finish

from cpdhpc import store
from cpdhpc.config import ConfigError
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import load
from cpdhpc.lab.train.losses import Accuracy, CrossEntropy
from cpdhpc.lab.train.samples import InMemory
from cpdhpc.lab.train.setup import agreed, prepare
from cpdhpc.lab.train.step import evaluate
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback, Ranks

RANKS = 12
MORE = """

class Mortal(Stripes):
    def __getitem__(self, i):
        import multiprocessing, os, signal
        if i == 39 and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def mortal():
    return Mortal(40, 0, False), Stripes(20, 0, False)
"""


@pytest.fixture
def job_file(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A job file beside a module, in the directory of process 0."""
    directory = Path(world.gather(str(tmp_path))[0])
    name = f"mpi_{request.node.originalname}"
    if world.process == 0:
        (directory / f"theirs_{name}.py").write_text(THEIRS + MORE)
        (directory / "job.toml").write_text(JOB.format(name=name))
    world.barrier()
    return directory / "job.toml"


def trained(
    path: Path, world: Ranks, out: str, settings: list[str]
) -> list[tuple[str, str, bytes]]:
    """Weights and records of a run, but for the times and bytes."""
    (job,) = load(path, settings)
    files = Files(path.parent / f"{out}.h5", path.parent / f"{out}.checkpoint.h5")
    finish(prepare(job, world, agreed(world, job.data.load), files))
    return [
        (group, name, array.tobytes())
        for group, arrays in store.read(files.checkpoint)[0].items()
        for name, array in sorted(arrays.items())
        if name not in ("time_s", "wire_bytes")
    ]


@pytest.mark.two_ranks
def test_a_third_partys_training_has_the_same_bits_with_workers(
    world: World, job_file: Path
) -> None:
    """Network, data, loss and metric of a module beside the job; augmented; read by workers."""
    if RANKS % world.processes:
        pytest.skip(f"{world.processes} processes do not divide {RANKS} ranks")
    settings = ["augment={crop=1, flip=true, cutout=2}", "train.batch=20"]
    real = World(virtual_ranks=RANKS // world.processes)
    found = trained(job_file, real, "real", [*settings, "loader.workers=1"])
    same = True
    if world.process == 0:
        same = found == trained(job_file, Loopback(RANKS), "alone", settings)
    ended = not multiprocessing.active_children()
    assert world.gather((same, ended)) == [(True, True)] * world.processes
    real.free()


class Picky(torch.nn.Module):
    """It does not take the last sample, which comes to the last rank alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 11).any():
            raise RuntimeError("no elevens")
        return x.expand(-1, 3)


def test_what_evaluation_raises_on_one_rank_ends_all_alike(world: World) -> None:
    samples = InMemory(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.int64))
    told = ""
    try:
        evaluate(Picky(), world, samples, CrossEntropy().build(), [Accuracy()])
    except RuntimeError as error:
        told = str(error)
    assert world.gather(told) == ["no elevens"] * world.processes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mortal", ": a worker died: killed, or out of memory"),
        ("broken", ": item 7: OSError: image 7 is damaged"),
    ],
)
def test_what_happens_to_the_worker_of_one_rank_is_told_on_all(
    world: World, job_file: Path, name: str, says: str
) -> None:
    module: Any = next(job_file.parent.glob("theirs_*.py")).stem
    told = ""
    try:
        trained(job_file, world, "x", [f"data.import={module}:{name}", "loader.workers=1"])
    except ConfigError as error:
        told = str(error)
    everyone = world.gather(told)
    assert says in told and "\n" not in told and everyone == [told] * world.processes
