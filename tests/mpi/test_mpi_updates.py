"""Training on real ranks: right for any number of processes that divides 6."""

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from test_models import SEQUENCES, TINY, text
from test_precision_policy import PRECISION
from training import finish, prepared, run_job, stop, write_idx
from verdicts import together

from cpdhpc import store
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.config import UserError, dump_toml, merge, validate
from cpdhpc.lab.cli import main
from cpdhpc.lab.signals import Interrupted, catching
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.command import train
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.lab.train.models import MODELS, Model
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.samples import Dataset
from cpdhpc.lab.train.setup import prepare
from cpdhpc.torch.controllers import Scheduled
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.cores import threads_of_rank
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

RANKS = 6
ROWS: dict[str, dict[str, Any]] = {
    "float32": {"aggregator": "none"},
    "stochastic": {"aggregator": "lowbit", "wire": "e4m3", "rounding": "stochastic"},
    "aps": {"aggregator": "lowbit", "wire": "e5m2", "scaling": "aps", "algorithm": "tree"},
}
RULES: dict[str, dict[str, Any]] = {
    "decentlam": {
        "update": {"name": "decentlam", "graph": "exponential", "wire": "e4m3"},
        "optimizer": {"momentum": 0.0},
    },
    "diloco": {
        "update": {"name": "diloco", "period": 3},
        "optimizer": {"name": "adamw"},
        "gradient": {"aggregator": "lowbit", "wire": "e4m3", "error_feedback": True},
    },
}


NORMALISED: dict[str, dict[str, Any]] = {
    "normalised": {},
    "codes": {"model": {"name": "quantized_cnn", "channels": [2, 2], "hidden": 4}},
    "copies": {"adversarial": {"epsilon": 0.1, "tau": 2, "alternate": "ranks"}},
    "rounded": {"precision": PRECISION},
    "outer": {
        "precision": PRECISION,
        "update": {"name": "diloco", "period": 2},
        "optimizer": {"name": "adamw"},
    },
    "scales": {"precision": {"preset": "fp8-hybrid"}},
    "skipped": {"precision": {"preset": "fp16"}, "train": {"loss_scale": 2.0**24}},
}


def job_of(**changes: Any) -> Job:
    train = {"epochs": 2, "batch": 20, "threads": 1, "telemetry_every": 2}
    model = {"name": "mlp", "hidden": [8]}
    return validate(Job, merge({"name": "m", "model": model, "train": train}, changes), "test")


def data() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.random((90, 8, 8), np.float32), rng.integers(0, 4, 90)
    return Dataset(x[:60], y[:60], x[60:], y[60:], classes=4)


def normalised_job(row: str = "normalised", **train: Any) -> Job:
    train = {"epochs": 2, "threads": 1, "telemetry_every": 2, **train}
    tables = {"name": "n", "model": {"name": "normalised"}, "train": train}
    return validate(Job, merge(tables, (NORMALISED | RULES)[row]), "test")


def test_what_forward_raises_on_one_rank_ends_all_alike(world: World, folder: Path) -> None:
    """One sample a rank, of which BatchNorm has no variance, comes to the last ranks alone."""
    job = normalised_job(batch=2 * world.processes - 1)
    training = prepared(job, world, folder, data())
    told = ""
    try:
        finish(training)
    except UserError as error:
        told = str(error)
    said = "forward or backward: ValueError: Expected more than 1 value per channel" in told
    who = told.partition(" | ")[0] in {f"rank {rank}" for rank in range(world.size)}
    together(world, said and who and "iteration 0: " in told, training.iteration == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.two_ranks
def test_jobs_that_differ_are_told_on_all_ranks(world: World, folder: Path) -> None:
    """As where a node has an old copy of their file."""
    path = folder / f"{world.process}.toml"
    path.write_text(f"[train]\nepochs = 1\nlearning_rate = 0.{1 + world.process}\n")
    told = ""
    try:
        train(world, path, ['name="j"'], folder / "out", False)
    except UserError as error:
        told = str(error)
    together(world, "train.learning_rate=0.1 on rank 0" in told, "=0.2 on rank 1" in told)


USERS_DATA = """
import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset


def samples(kind):
    rank = MPI.COMM_WORLD.Get_rank()
    count, value = 64 - 10 * rank * (kind == "length"), 1.0 + rank * (kind == "values")
    x, y = torch.full((count, 9), value), torch.arange(count) % 2
    return TensorDataset(x, y), TensorDataset(torch.ones(9, 9), torch.arange(9) % 2)
"""


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("length", "arguments differ: training samples=64 on rank 0, training samples=54 on rank"),
        ("values", "samples of rank 1 differ from those of rank 0"),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_data_that_differ_are_told_on_all_ranks(
    world: World, folder: Path, kind: str, said: str
) -> None:
    """Each process would train on shares of other data."""
    path = folder / "job.toml"
    if world.process == 0:
        (folder / f"theirs_{kind}.py").write_text(USERS_DATA)
        path.write_text(f'[data]\nimport = "theirs_{kind}:samples"\nkind = "{kind}"\n')
    world.barrier()
    told = ""
    try:
        train(world, path, [], folder / "out", False)
    except UserError as error:
        told = str(error)
    together(world, said in told, told.startswith("train: "))


def quiet() -> Display:
    return Display(False, 1)


class Normalised(Model):
    """With BatchNorm, whose running statistics every rank's forward changes, and dropout."""

    name: Literal["normalised"] = "normalised"

    def build(self, image_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        flat, hidden = torch.nn.Flatten(), torch.nn.Linear(math.prod(image_shape), 8)
        norm, last = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, classes)
        drop = torch.nn.Dropout(0.25)
        return torch.nn.Sequential(flat, hidden, norm, torch.nn.ReLU(), drop, last)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "normalised", Normalised)


CONTROLLED: dict[str, dict[str, Any]] = {
    "noise_scale": {"controller": {"name": "noise_scale"}, "gradient": ROWS["stochastic"]},
    "adaptive_batch": {"controller": {"name": "adaptive_batch", "smoothing": 0.5, "share": 1e6}},
    "autowu": {
        "controller": {
            **{"name": "autowu", "patience": 1, "warmup_share": 0.9},
            **{"min_rate": 0.01, "max_rate": 50.0},
        },
        "train": {"epochs": 4, "batch": 10},
    },
}


# What ranks compute by themselves does not know how many share a process: with three, of each kind.
ON_THREE = ("stochastic", "copies", "decentlam", "adaptive_batch")
TRAINED = [
    pytest.param(row, marks=() if row in ON_THREE else pytest.mark.two_ranks)
    for row in (*ROWS, *NORMALISED, *RULES, *CONTROLLED)
]


@pytest.mark.parametrize("row", TRAINED)
def test_real_and_virtual_ranks_give_the_same_bits(world: World, folder: Path, row: str) -> None:
    """6 ranks on so many processes, and the 6 emulated by process 0 alone."""
    if RANKS % world.processes:
        pytest.skip(f"{world.processes} processes do not divide {RANKS} ranks")
    own = CONTROLLED | {name: {"gradient": table} for name, table in ROWS.items()}
    job = job_of(**own[row]) if row in own else normalised_job(row, batch=30)
    real = World(virtual_ranks=RANKS // world.processes)
    files = Files(folder / "real.h5", folder / "real.checkpoint.h5")
    run_job(job, real, files, data())
    same = True
    if world.process == 0:
        alone = Files(folder / "alone.h5", folder / "alone.checkpoint.h5")
        run_job(job, Loopback(RANKS), alone, data())
        same = contents(files) == contents(alone)
    together(world, same)
    real.free()


@pytest.mark.parametrize("name", sorted(CONTROLLED))
def test_decisions_are_taken_in_the_runs_above(world: World, folder: Path, name: str) -> None:
    """The batch grows, and the rate falls before the 22 steps of the warm-up are over."""
    job = job_of(**CONTROLLED[name])
    training = prepare(job, World(virtual_ranks=2), data(), Files.of(folder, job))
    finish(training)
    steps = training.record.arrays()["steps"]
    verdict = {
        "noise_scale": lambda: np.isfinite(steps["gradient_norm2"]).all(),
        "adaptive_batch": lambda: steps["samples"].max() >= 40,
        "autowu": lambda: np.argmax(steps["learning_rate"]) <= 18,
    }
    together(world, bool(verdict[name]()))


class Uneven(Scheduled):
    """The last process goes another way."""

    def next(self, samples_seen: int) -> tuple[float, int]:
        rate, batch = super().next(samples_seen)
        return rate * (1 + (self.settings.world.rank == self.settings.world.ranks - 1)), batch


def test_ranks_that_decide_differently_are_told(world: World, folder: Path) -> None:
    if world.processes == 1:
        pytest.skip("one process decides alike")
    job = job_of()
    training = prepared(job, world, folder, data())
    training.controller = Uneven(job.settings(60, world))
    said = ""
    try:
        finish(training)
    except ValueError as error:
        said = str(error)
    together(world, "learning rate" in said, training.iteration == 0)


def contents(files: Files) -> list[tuple[str, str, bytes]]:
    """Weights, momentum, what each rank keeps, and records, but for the times, and the bytes.

    A process alone has none for MPI's own collectives, which check the arguments and find APS's
    largest exponents.
    """
    (kept,) = [*files.checkpoint.parent.glob(files.state("*").name)] or [None]
    return [
        ("state", "", kept.read_bytes() if kept else b""),
        *(
            (group, name, array.tobytes())
            for group, arrays in store.read(files.checkpoint)[0].items()
            for name, array in sorted(arrays.items())
            if name != "wire_bytes" and not name.endswith("time_s")
        ),
    ]


@pytest.mark.parametrize("name", ["resnet_cifar", "wide_resnet", "row_lstm", *SEQUENCES])
def test_the_models_give_the_same_bits_on_real_and_virtual_ranks(
    world: World, folder: Path, name: str
) -> None:
    """Batch norm, dropout, weights that layers share: 4 ranks here, and played by process 0."""
    if 4 % world.processes:
        pytest.skip(f"{world.processes} processes do not divide 4 ranks")
    source = text() if name in SEQUENCES else data()
    job = job_of(train={"epochs": 1, "batch": 20})
    job = validate(Job, job.plain() | {"model": {"name": name, **TINY[name]}}, "test")
    real = World(virtual_ranks=4 // world.processes)
    files = Files(folder / "real.h5", folder / "real.checkpoint.h5")
    run_job(job, real, files, source)
    same = True
    if world.process == 0:
        alone = Files(folder / "alone.h5", folder / "alone.checkpoint.h5")
        run_job(job, Loopback(4), alone, source)
        same = contents(files) == contents(alone)
    together(world, same)
    real.free()


@pytest.mark.parametrize("later", [True, False])
def test_residuals_are_saved_by_all_and_taken_over(world: World, folder: Path, later: bool) -> None:
    """From 6 ranks on these processes to as many elsewhere, and to one a process.

    The first has the bits of a run that nothing stopped; with other ranks the sum is kept.
    """
    if RANKS % world.processes:
        pytest.skip(f"{world.processes} processes do not divide {RANKS} ranks")
    job = job_of(
        gradient={"aggregator": "topk", "density": 0.2}, train={"bucket_mib": 1e-4, "epochs": 1}
    )
    files = Files(folder / "real.h5", folder / "real.checkpoint.h5")
    real = World(virtual_ranks=RANKS // world.processes)
    first = stop(prepared(job, real, files, data()), 1)
    kept = {key: np.concatenate(world.gather(entry.array)) for key, entry in first.reducer.state}
    there = World(virtual_ranks=1) if later else real
    training = prepared(job, there, files, data())
    training.resume()
    found = {
        key: np.concatenate(world.gather(entry.array)) for key, entry in training.reducer.state
    }
    same = kept.keys() == found.keys()
    for key, rows in found.items():
        total = kept[key].sum(axis=0, dtype=np.float64).astype(np.float32)
        as_it_was = len(rows) == RANKS and np.array_equal(rows, kept[key])
        same &= as_it_was or (later and np.array_equal(rows.sum(axis=0), total))
    finish(training)
    if world.process == 0 and not later:
        alone = Files(folder / "alone.h5", folder / "alone.checkpoint.h5")
        run_job(job, Loopback(RANKS), alone, data())
        same &= contents(files) == contents(alone)
    together(world, same)
    real.free()


WITHOUT_MOMENTUM: dict[str, dict[str, Any]] = {
    "sgd": {},
    "dgc": {"gradient": {"aggregator": "dgc"}},
    "dsgd": {"update": {"name": "dsgd"}},
    "dmsgd": {"update": {"name": "dmsgd"}},
    "decentlam": {"update": {"name": "decentlam"}},
    "localsgd": {"update": {"name": "localsgd", "period": 2}},
    "stages": {"model": {"hidden": [8, 8]}, "stages": {"count": 2, "refresh_every": 3}},
}


@pytest.mark.two_ranks
@pytest.mark.parametrize("row", sorted(WITHOUT_MOMENTUM))
def test_a_run_whose_optimizer_keeps_nothing_goes_on(world: World, folder: Path, row: str) -> None:
    """As if nothing had been, though a group of the checkpoint is empty, which all must know."""
    if RANKS % world.processes:
        pytest.skip(f"{world.processes} processes do not divide {RANKS} ranks")
    real = World(virtual_ranks=RANKS // world.processes)
    found = []
    for name, lengths in (("whole", [2]), ("parts", [1, 2])):
        files = Files(folder / f"{name}.h5", folder / f"{name}.checkpoint.h5")
        for epochs in lengths:
            job = job_of(
                **WITHOUT_MOMENTUM[row] | {"optimizer": {"momentum": 0.0}}, train={"epochs": epochs}
            )
            run_job(job, real, files, data(), resume=True)
        found.append(contents(files) if world.process == 0 else None)
    together(world, found[0] == found[1])
    real.free()


def test_all_processes_hold_the_same_model(world: World, folder: Path) -> None:
    job = job_of(gradient=ROWS["aps"])
    training = run_job(job, world, folder, data())
    weights = b"".join(p.detach().numpy().tobytes() for p in training.model.parameters())
    together(world, len(set(world.gather(weights))) == 1)


@pytest.mark.two_ranks
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(world: World, folder: Path) -> None:
    job = job_of(train={"epochs": 100000})
    files = Files.of(folder, job)
    training = prepared(job, world, files, data())
    if world.process == world.processes - 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    stopped = None
    with catching() as caught:
        try:
            run(training, caught, quiet())
        except Interrupted as stop:
            stopped = stop.number
    status = store.read_attributes(files.record)["status"]
    at = store.read_attributes(files.checkpoint)["iteration"]
    together(world, stopped == signal.SIGUSR1, status == "interrupted", at == training.iteration)
    again = prepared(job, world, files, data())
    again.resume()
    together(world, again.iteration == at)


@pytest.mark.two_ranks
def test_the_command_ends_with_the_status_of_a_death_by_the_signal(
    world: World, folder: Path
) -> None:
    if world.process == 0:
        write_idx(folder)
        train = {"epochs": 100000, "batch": 4, "threads": 1}
        job = {"data": {"name": "idx", "dir": str(folder)}, "train": train}
        (folder / "job.toml").write_text(dump_toml(job))
    world.barrier()
    if world.process == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    status = main(["train", str(folder / "job.toml"), "--out", str(folder / "out")])
    closed = store.read_attributes(folder / "out" / "job-s0.h5")["status"]
    usable = store.read(folder / "out" / "job-s0.checkpoint.h5")[1]["iteration"]
    together(world, status == 128 + signal.SIGTERM, closed == "interrupted", usable > 0)


def test_nan_on_one_process_stops_all_with_the_checkpoint_as_it_was(
    world: World, folder: Path
) -> None:
    job = job_of(gradient=ROWS["stochastic"])
    files = Files.of(folder, job)
    run_job(job, world, files, data())
    before = files.checkpoint.read_bytes()
    world.barrier()
    training = prepared(job, world, files, data())
    if world.process == world.processes - 1:
        training.train.x[:] = torch.nan
    said = ""
    try:
        finish(training)
    except Diverged as error:
        said = str(error)
    where = f"on rank {world.processes - 1}"
    together(world, "'1.weight'" in said, where in said, files.checkpoint.read_bytes() == before)


def test_the_reducer_in_a_plain_loop(world: World) -> None:
    """Rank r's gradient is r + 1 throughout: the mean is (ranks + 1) / 2, exact in few bits."""
    torch.manual_seed(world.process)
    model = torch.nn.Linear(4, 3)
    reducer = GradientReducer(model, world, "lowbit", wire="e5m10", algorithm="direct")
    weights = world.gather(model.weight.detach().numpy().tobytes())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, world.process + 1)
    reducer.reduce()
    means = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.tensor((world.processes + 1) / 2)
    together(world, len(set(weights)) == 1, all(bool((m == expected).all()) for m in means))
    model.weight.grad = torch.full((3, 4), torch.inf if world.process == 0 else 1.0)
    raised = False
    try:
        reducer.reduce()
    except NonFiniteGradient as error:
        raised = error.segments == ("weight",) and error.ranks == (0,)
    together(world, raised, float(model.weight.grad[0, 0]) in (torch.inf, 1.0))


def test_threads_share_the_cores(world: World) -> None:
    cores = len(os.sched_getaffinity(0))
    together(world, threads_of_rank(world) == max(1, cores // world.processes))
