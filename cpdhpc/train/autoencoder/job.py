"""The file of an autoencoder: every key, its type and its default."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from ...comm import Ranks
from ...comm.threads import threads_of_rank
from ...config import ConfigError, Section, dump_toml, override, read_toml, validate
from ..memory import keep_freed_memory
from .geometry import Count, Layer
from .images import Source

Pair = Annotated[tuple[Count, Count], Field(strict=False)]
MAY_DIFFER = (  # from the job of a checkpoint: the model is the same but for rounding
    "train.timeout_s",
    "train.checkpoint_every",
    "train.cell_procs",
    "train.block_procs",
    "train.threads",
    "train.keep_memory",
)


class Train(Section):
    """[train]: stochastic gradient descent with momentum, one layer after the other.

    iterations: of each layer; batch: images of an iteration, the same on all ranks
    cell_procs, block_procs: ranks along both axes that cells, and blocks and pools, are dealt to;
        not given: as square as can be
    threads: of torch, 0 for the cores that the rank owns
    keep_memory: freed memory stays with the process, see memory.keep_freed_memory: iterations on
        large layers take half the time or less, and up to 1.6 times the memory
    """

    iterations: Count = 200
    batch: Count = 32
    learning_rate: Annotated[float, Field(gt=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    seed: Annotated[int, Field(ge=0)] = 0
    dtype: Literal["float32", "float64"] = "float32"
    cell_procs: Pair | None = None
    block_procs: Pair | None = None
    threads: Annotated[int, Field(ge=0)] = 0
    keep_memory: bool = True
    checkpoint_every: Count = 100
    timeout_s: Annotated[float, Field(gt=0)] = 600.0


class Autoencoder(Section):
    """A whole file; layers are trained in order, each on what those before it give."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
    data: Source
    layer: Annotated[tuple[Layer, ...], Field(strict=False, min_length=1)]
    train: Train = Train()

    def set_process(self, world: Ranks) -> None:
        """Set torch's threads, and what becomes of freed memory, for this process."""
        torch.set_num_threads(self.train.threads or threads_of_rank(world))
        if self.train.keep_memory:
            keep_freed_memory()

    def toml(self) -> str:
        """Return the job as TOML text, every default filled in."""
        return dump_toml(self.model_dump(mode="python"))


def load(path: Path, settings: Iterable[str] = ()) -> Autoencoder:
    """Return the job of a file. Raises ConfigError for whatever is wrong in it."""
    raw = override(read_toml(path), settings)
    return validate(Autoencoder, {"name": path.stem} | raw, str(path))


def procs_of(given: tuple[int, int] | None, ranks: int, key: str) -> tuple[int, int]:
    """Return the grid of ranks. Raises ConfigError where a given one has another number."""
    if given is None:
        first = next(p for p in range(isqrt(ranks), 0, -1) if ranks % p == 0)
        return first, ranks // first
    if given[0] * given[1] != ranks:
        raise ConfigError(f"train.{key}={list(given)}: {given[0] * given[1]} ranks, not {ranks}")
    return given
