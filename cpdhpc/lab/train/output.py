"""The files of runs, and the directory of them: made, tried and claimed before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...config import ConfigError
from ...world.ranks import Ranks
from ..claim import alone
from . import gradients, weights
from .job import Job


@dataclass(frozen=True)
class Files:
    """Where the files of a run are."""

    record: Path
    checkpoint: Path

    @classmethod
    def of(cls, directory: Path, job: Job) -> Files:
        """Return the paths of a job's files in a directory."""
        return cls.called(directory, job.id)

    @classmethod
    def called(cls, directory: Path, run: str) -> Files:
        """Return the paths of the files of a run of that name in a directory."""
        return cls(directory / f"{run}.h5", directory / f"{run}.checkpoint.h5")

    def written(self, job: Job) -> list[Path]:
        """Return all files of a job's run, with those of gradients and weights that it keeps."""
        several = [gradients.path_of(self.record, i) for i in job.train.record_gradients]
        kept = [weights.path_of(self.record, epoch) for epoch in job.train.kept_epochs]
        recordings = [self.recording(job)] if job.record.number else []
        return [self.checkpoint, self.record, *several, *kept, *recordings]

    def recording(self, job: Job) -> Path:
        """Return where [record] of a job goes."""
        beside = self.record.with_name(f"{self.record.stem}.recording.h5")
        return Path(job.record.file) if job.record.file else beside


@contextmanager
def claimed(
    world: Ranks, directory: Path, runs: Mapping[str, Collection[Path]], resume: bool
) -> Iterator[None]:
    """Keep others from writing the files of some runs, until the end of the block. Collective.

    runs: files by the name of the run, for which process 0 holds .NAME.lock
    Raises UserError on all processes alike where the directory cannot be written, another process
    is at work on a run, or without resume a file is there already.
    """
    with ExitStack() as locks:
        world.on_first(partial(_claim, locks, directory, runs, resume), "output")
        yield


def _claim(
    locks: ExitStack, directory: Path, runs: Mapping[str, Collection[Path]], resume: bool
) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from None
    for name, files in runs.items():
        present = [path for path in files if path.exists()]
        if present and not resume:
            raise ConfigError(
                f"{present[0]}: is there already: --resume goes on from it, "
                "--out DIR writes to another directory"
            )
        locks.enter_context(alone(directory / f".{name}.lock", f"run of {name}", print))
