"""python -m cpdhpc train: every row of a job file, with every seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ... import store
from ...collectives.checks import check_alike
from ...config import ConfigError, flatten, value_of
from ...errors import ArgumentError
from ...torch.overlap import check_overlap
from ...world.mpi import World
from ..signals import Caught, catching
from .checkpoint import Files, check_job, claimed, few_digest
from .job import EPOCHS, Job, load
from .loop import run
from .losses import Diverged
from .progress import Display
from .samples import Dataset, StreamedData
from .setup import agreed, build_model, check_layers, names_layers, prepare, samples_of
from .training import Training


def train(
    world: World, path: Path, settings: Iterable[str], directory: Path, resume: bool
) -> tuple[list[Path], list[str]]:
    """Run all of a job file's runs; return their records, and the messages of diverged ones.

    Collective. A run that diverges ends, and the others continue.

    resume: resume from checkpoints and skip the runs that are complete; otherwise the directory
        must not hold files of these runs
    Raises UserError or Interrupted on all processes.
    """
    jobs = agreed(world, lambda: load(path, settings))
    check_jobs(world, jobs, "train: jobs")
    diverged: list[str] = []
    with catching() as caught:
        return Trainer(world, caught).train(jobs, directory, resume, diverged), diverged


def check_jobs(world: World, jobs: Sequence[Job], what: str) -> None:
    """Raise ConfigError if jobs differ, for example by an outdated copy of a file. Collective."""
    keys = {f"{job.id}: {k}": v for job in jobs for k, v in flatten(job.model_dump()).items()}
    _agree_on(world, keys, what)


def _check_data(world: World, data: Dataset | StreamedData) -> None:
    """Raise ConfigError if samples differ between ranks, which share them out. Collective."""
    train, test = samples_of(data)
    found = {"training samples": len(train), "test samples": len(test)}
    _agree_on(world, found, "train: data")
    first, again = few_digest(train, test), few_digest(train, test)
    digests = world.gather(first if first == again else "")  # otherwise they are drawn when taken
    for rank, digest in enumerate(digests):
        if "" not in digests and digest != digests[0]:
            raise ConfigError(
                f"train: samples of rank {rank} differ from those of rank 0: all ranks must take "
                "their shares from the same samples"
            )


def _agree_on(world: World, found: dict[str, Any], what: str) -> None:
    try:
        check_alike(world, None, found, [0], what)
    except ValueError as error:
        raise ConfigError(str(error)) from None


class Trainer:
    """Trains the runs of jobs, in one call or many; ranks and data are made once. Collective.

    caught: signals, which end a run after the iteration; quiet: show nothing
    """

    def __init__(self, world: World, caught: Caught, *, quiet: bool = False) -> None:
        self.world, self.caught, self.shown = world, caught, world.process == 0 and not quiet
        self._worlds: dict[tuple[int, float, bool], World] = {}
        self._data: dict[str, Dataset | StreamedData] = {}

    def world_of(self, job: Job) -> World:
        """Return the ranks of a job, virtual ones included. Collective.

        Raises ConfigError on all processes if there are too many of them.
        """
        shape = job.train.virtual_ranks, job.train.timeout_s, job.train.gpu_direct != "never"
        if shape not in self._worlds:
            virtual_ranks, timeout_s, direct = shape
            try:  # its limits depend on the MPI library; raised on all processes
                self._worlds[shape] = World(
                    virtual_ranks=virtual_ranks, timeout_s=timeout_s, gpu_direct=direct
                )
            except ArgumentError as error:
                raise ConfigError(f"{job.id}: {error}") from None
        return self._worlds[shape]

    def data_of(self, job: Job) -> Dataset | StreamedData:
        """Return the samples of a job. Collective. Raises UserError on all processes."""
        if repr(job.data) not in self._data:
            data = agreed(self.world, job.data.load)
            _check_data(self.world, data)
            self._data[repr(job.data)] = data
        return self._data[repr(job.data)]

    def train(
        self, jobs: list[Job], directory: Path, resume: bool, diverged: list[str] | None = None
    ) -> list[Path]:
        """Run jobs and return the files of their records. Collective. See train.

        diverged: collects the messages of diverged runs; without it the first one raises Diverged
        """
        world = self.world
        agreed(world, lambda: _check_ranks(jobs, world))
        agreed(world, lambda: [job.aggregator() for job in jobs])
        files = {job.id: Files.of(directory, job) for job in jobs}
        written = {job.id: files[job.id].written(job) for job in jobs}
        with claimed(world, directory, written, resume):
            todo = world.on_first(lambda: _todo(jobs, files, resume), "resume")
            for job, _ in todo:
                self.world_of(job)  # raises before any of them trains
            self._check_layers([job for job, _ in todo])
            display = Display(self.shown, len(todo))
            done = len(jobs) - len(todo)
            skipped = f", {done} complete already" if done else ""
            runs = f"{len(todo)} runs on {world.processes} processes into {directory}{skipped}"
            display.line(f"cpdhpc: {runs}")
            for job, former_epochs in todo:
                training = prepare(job, self.world_of(job), self.data_of(job), files[job.id])
                if resume:
                    _resume(training, former_epochs, display)
                try:
                    run(training, self.caught, display)
                except Diverged as error:  # on all processes
                    if diverged is None:
                        raise
                    diverged.append(str(error))
                    display.end(f"{error}: ended")
                training.close()
        return [each.record for each in files.values()]

    def _check_layers(self, jobs: Sequence[Job]) -> None:
        """Raise ConfigError if gradient names a layer that does not exist. Collective.

        Builds a network for each job that names one, so that later runs' errors appear at once.
        """
        for job in jobs if len(jobs) > 1 else ():
            if names_layers(job) and job.stages.count == 1 and job.train.image_grid == (1, 1):
                data = self.data_of(job)
                agreed(self.world, partial(_check_layers, job, data))


def _check_layers(job: Job, data: Dataset | StreamedData) -> None:
    check_layers(job, build_model(job, data))


def _resume(training: Training, former_epochs: int, display: Display) -> None:
    """Resume from the checkpoint, if there is one. Collective."""
    job, said = training.job, training.resume()
    if said:
        display.line(f"{job.id}: {said}")
    if not _same_rates(training, former_epochs):
        display.line(
            f"{job.id}: it began as a run of {former_epochs} epochs, whose learning "
            f"rates are not those of one of {job.train.epochs}"
        )


def _check_ranks(jobs: list[Job], world: World) -> None:
    """Raise ConfigError, naming the row, if a job does not suit the number of ranks."""
    for job in jobs:
        job.check_ranks(world.processes * job.train.virtual_ranks)
        try:
            if job.stages.count > 1:
                job.stages.layout(world.processes)
            if job.train.overlap:
                check_overlap(world)
        except ValueError as error:
            raise ConfigError(f"{job.id}: {error}") from None
        rows, columns = job.train.image_grid
        if world.processes % (rows * columns):
            raise ConfigError(
                f"{job.id}: train.image_grid=[{rows}, {columns}] on {world.processes} processes: "
                f"their number must be a multiple of {rows * columns}"
            )


def _todo(jobs: list[Job], files: dict[str, Files], resume: bool) -> list[tuple[Job, int]]:
    """Return the jobs that are not complete, with the epochs of their former or current plan.

    Raises CheckpointError if a file belongs to another job.
    """
    todo = []
    for job in jobs:
        record, epochs = files[job.id].record, job.train.epochs
        attributes = store.read_attributes(record) if resume and record.exists() else {}
        if attributes:
            there = str(attributes.get("toml", ""))
            check_job(record, there, job.toml())
            epochs = value_of(there, EPOCHS)
        if attributes.get("status") != "complete" or epochs < job.train.epochs:
            todo.append((job, epochs))
    return todo


def _same_rates(training: Training, former_epochs: int) -> bool:
    """Return whether a run of so many epochs had the rates and batches that this one begins with.

    As far as this is known from controllers that do not depend on the loss.
    """
    settings = training.job.settings(training.samples)
    build = training.job.controller.build
    former, now = build(replace(settings, epochs=former_epochs)), build(settings)
    steps = range(0, training.samples_seen, training.job.train.batch)
    return all(former.next(seen) == now.next(seen) for seen in steps)
