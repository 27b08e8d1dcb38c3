"""Everything a run works with, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .. import provenance, store
from ..config import ConfigError, UserError
from ..ops import set_kernel_threads
from ..split_images import partition
from ..split_images.grid import ImageGrid
from ..world.cores import threads_of_rank
from ..world.ranks import Ranks
from . import checkpoint
from .data import Dataset
from .job import Job
from .record import SCHEMA, Record
from .reducer import GradientReducer

T = TypeVar("T")
Array = npt.NDArray[Any]


def agreed(world: Ranks, make: Callable[[], T]) -> T:
    """Return make(), which has no collective in it, unless some process fails. Collective.

    Raises the first failing process's UserError on all of them; a ValueError becomes one.
    """
    error, result = None, None
    try:
        result = make()
    except UserError as problem:
        error = problem
    except ValueError as problem:
        error = ConfigError(str(problem))
    world.agree(error)
    assert result is not None, "make returned a result or raised"
    return result


@dataclass(frozen=True)
class Files:
    """Where the files of a run are."""

    record: Path
    checkpoint: Path

    @classmethod
    def of(cls, directory: Path, job: Job) -> Files:
        """Return the paths of a job's files in a directory."""
        return cls(directory / f"{job.id}.h5", directory / f"{job.id}.checkpoint.h5")


@dataclass
class Training:
    """A run and where it stands.

    train, test: images and labels; of split images this rank's parts
    iteration: the next one; grid: how images are split, None where they are not
    """

    job: Job
    world: Ranks
    model: torch.nn.Module
    optimizer: torch.optim.SGD
    reducer: GradientReducer
    record: Record
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    files: Files
    provenance: dict[str, str | int]
    iteration: int = 0
    grid: ImageGrid | None = None

    @property
    def sharing(self) -> int:
        """The number of ranks that share an image."""
        return 1 if self.grid is None else self.grid.sharing

    @property
    def sent_bytes(self) -> Array:
        """int64[hosted], the bytes that each hosted rank has sent so far."""
        worlds = {self.world} if self.grid is None else {self.world, self.grid.group}
        return sum(
            (each.bytes_sent + each.collective_bytes for each in worlds),
            np.zeros(self.world.virtual_ranks, np.int64),
        )

    def close(self) -> None:
        """Free what the run alone used. Collective."""
        if self.grid is not None:
            self.grid.free()

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train[1])

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that go through all samples once; the last batch may be smaller."""
        return -(-self.samples // self.job.train.batch)

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return self.iterations_per_epoch * self.job.train.epochs

    def save(self, status: str) -> None:
        """Write checkpoint and record from process 0, while the others wait. Collective.

        status: "running", "interrupted" or "complete"
        """
        if self.world.process == 0:
            checkpoint.save(
                self.files.checkpoint,
                checkpoint.tensors(self.model, self.optimizer) | self.record.arrays(),
                iteration=self.iteration,
                ranks=self.world.ranks,
                toml=self.job.toml(),
            )
            self._write_record(status)
        self.world.barrier("checkpoint")

    def save_record(self, status: str) -> None:
        """Write only the record; process 0 writes, after a failure that all processes share."""
        if self.world.process == 0:
            self._write_record(status)

    def _write_record(self, status: str) -> None:
        attributes = {
            "kind": "run",
            "schema": SCHEMA,
            "name": self.job.name,
            "seed": self.job.seed,
            "toml": self.job.toml(),
            "parameters": sum(p.numel() for p in self.reducer.parameters),
            **self.provenance,
            "status": status,
        }
        store.write(self.files.record, self.record.groups(), attributes)

    def resume(self) -> None:
        """Take over the checkpoint, where there is one. Collective.

        Raises CheckpointError or StoreError on all processes alike.
        """
        path, loaded = self.files.checkpoint, None
        if self.world.process == 0:
            loaded = _attempt(self, path)
        loaded = self.world.gather(loaded)[0]
        if isinstance(loaded, UserError):
            raise loaded
        if loaded is None:
            return
        groups, self.iteration = loaded
        self.reducer.iteration = self.iteration
        checkpoint.load_tensors(groups, self.model, self.optimizer)
        self.record.restore(groups)


def _attempt(training: Training, path: Path) -> tuple[checkpoint.Groups, int] | UserError | None:
    if not path.exists():
        return None
    try:
        ranks, toml = training.world.ranks, training.job.toml()
        return checkpoint.load(path, ranks=ranks, toml=toml)
    except UserError as error:
        return error


def prepare(job: Job, world: Ranks, data: Dataset, files: Files) -> Training:
    """Return a run that is about to begin. Collective.

    Raises UserError on all processes alike where the job does not go with the data.
    """
    threads = job.train.threads or threads_of_rank(world)
    torch.set_num_threads(threads)
    set_kernel_threads(1 if job.train.overlap else threads)  # else they would slow backward down
    model = agreed(world, lambda: _model(job, data))
    grid = None
    if job.train.image_grid != (1, 1):
        grid, model = _split(job, world, data, model)
    images = [torch.from_numpy(x) for x in (data.train_x, data.test_x)]
    train_x, test_x = images if grid is None else map(grid.cut, images)
    reducer = GradientReducer(
        model,
        world,
        job.gradient,
        seed=job.seed,
        bucket_mib=job.train.bucket_mib,
        overlap=job.train.overlap,
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=job.train.learning_rate,
        momentum=job.optimizer.momentum,
        weight_decay=job.optimizer.weight_decay,
        nesterov=job.optimizer.nesterov,
    )
    return Training(
        job,
        world,
        model,
        optimizer,
        reducer,
        Record(world.ranks, reducer.bucket.names),
        train=(train_x, torch.from_numpy(data.train_y)),
        test=(test_x, torch.from_numpy(data.test_y)),
        files=files,
        provenance=provenance.attributes(world) | {"torch_threads": torch.get_num_threads()},
        grid=grid,
    )


def _split(
    job: Job, world: Ranks, data: Dataset, model: torch.nn.Module
) -> tuple[ImageGrid, torch.nn.Module]:
    """Return how images are split, and the network that takes their parts. Collective."""
    try:
        grid = ImageGrid(world, job.train.image_grid)
        return grid, partition(model, data.image_shape, grid)
    except (TypeError, ValueError) as error:  # alike on all ranks
        raise ConfigError(f"{job.id}: train.image_grid={job.train.image_grid}: {error}") from None


def _model(job: Job, data: Dataset) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        return job.model.build(data.image_shape, data.classes)
