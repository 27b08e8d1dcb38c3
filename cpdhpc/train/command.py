"""python -m cpdhpc train: every row of a job file, with every seed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .. import store
from ..config import ConfigError
from ..signals import catching
from ..world.mpi import World
from .checkpoint import check_job
from .data import Dataset
from .job import Job, load
from .loop import run
from .progress import Display
from .setup import Files, agreed, prepare


def train(
    world: World, path: Path, settings: Iterable[str], directory: Path, resume: bool
) -> list[Path]:
    """Run all of a job file's runs and return the files of their records. Collective.

    resume: go on from checkpoints and skip the runs that are complete; else the directory must
        not hold files of these runs
    Raises UserError or Interrupted on all processes alike.
    """
    jobs = agreed(world, lambda: load(path, settings))
    agreed(world, lambda: _check_grids(jobs, world))
    files = {job.id: Files.of(directory, job) for job in jobs}
    agreed(world, lambda: _directory(directory, files.values(), world.process == 0, resume))
    todo = agreed(world, lambda: _todo(jobs, files, resume) if world.process == 0 else [])
    todo = world.gather(todo)[0]
    display = Display(world.process == 0, len(todo))
    display.line(_announcement(world, jobs, todo, directory))
    worlds: dict[tuple[int, float], World] = {}
    data: dict[object, Dataset] = {}
    with catching() as caught:
        for job in todo:
            shape = job.train.virtual_ranks, job.train.timeout_s
            if shape not in worlds:
                worlds[shape] = World(virtual_ranks=shape[0], timeout_s=shape[1])
            if job.data not in data:
                data[job.data] = agreed(world, job.data.load)
            training = prepare(job, worlds[shape], data[job.data], files[job.id])
            if resume:
                training.resume()
            run(training, caught, display)
            training.close()
    return [each.record for each in files.values()]


def _check_grids(jobs: list[Job], world: World) -> bool:
    for job in jobs:
        rows, columns = job.train.image_grid
        if world.processes % (rows * columns):
            raise ConfigError(
                f"{job.id}: train.image_grid=[{rows}, {columns}] on {world.processes} processes: "
                f"their number must be a multiple of {rows * columns}"
            )
    return True


def _directory(directory: Path, files: Iterable[Files], writes: bool, resume: bool) -> bool:
    if not writes:
        return True
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from None
    present = [path for each in files for path in (each.checkpoint, each.record) if path.exists()]
    if present and not resume:
        raise ConfigError(
            f"{present[0]}: is there already: --resume goes on from it, "
            "--out DIR writes to another directory"
        )
    return True


def _todo(jobs: list[Job], files: dict[str, Files], resume: bool) -> list[Job]:
    """Return the jobs that are not complete. Raises CheckpointError where a file is another's."""
    return [job for job in jobs if not (resume and _complete(job, files[job.id].record))]


def _complete(job: Job, record: Path) -> bool:
    if not record.exists():
        return False
    attributes = store.read_attributes(record)
    check_job(record, str(attributes.get("toml", "")), job.toml())
    return bool(attributes.get("status") == "complete")


def _announcement(world: World, jobs: list[Job], todo: list[Job], directory: Path) -> str:
    skipped = f", {len(jobs) - len(todo)} complete already" if len(todo) < len(jobs) else ""
    return f"cpdhpc: {len(todo)} runs on {world.processes} processes into {directory}{skipped}"
