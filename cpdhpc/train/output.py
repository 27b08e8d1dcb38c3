"""The directory that runs write to: made, tried and claimed before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ..claim import alone
from ..config import ConfigError
from ..world.ranks import Ranks


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
