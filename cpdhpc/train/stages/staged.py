"""Stages at work in a training: who holds which, and what takes the place of an ordinary step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import fsum
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...collectives import sparse
from ...collectives.checks import NonFiniteGradient
from ...collectives.engine import Program, run
from ...compress.base import Aggregator, Mean
from ...partition import split
from ...randomness import random_key
from ...world.mpi import World
from ...world.ranks import Loopback, Ranks
from ..averaging import Averaging, part_seed
from ..data import Samples, shard
from ..reducer import GradientReducer
from ..replicas import as_bytes
from ..step import FORWARD, Step, Stopwatch
from ..update import Update
from .cut import Stage
from .pipeline import Done, Loss, Part, Work
from .section import Stages

Array = npt.NDArray[Any]
PHASES = ("correction", "refresh", "local")


class Placement:
    """Which rank holds which stage of which share. Collective.

    A rank is a stage of a share: of a share's stages each process holds as many as another. The
    hosted ranks of a process are its stages in turn, of each the shares.

    given: [stages]; world: of the training, whose virtual ranks are shares
    world: of all ranks; group: of the ranks that hold the same stages here
    shares: of each batch; here: those of this process; stages: that it holds
    Raises ValueError on all processes alike where stages do not go with processes.
    """

    def __init__(self, given: Stages, world: Ranks) -> None:
        across, copies = given.layout(world.processes)
        each, place = world.virtual_ranks, world.process % across
        stages = given.count // across
        self.count, self.shares, self.across, self.each = given.count, copies * each, across, each
        self.stages = range(place * stages, (place + 1) * stages)
        first = world.process // across * each
        self.here = range(first, first + each)
        if isinstance(world, World) and world.processes > 1:
            every = range(world.processes)
            virtual, timeout_s = each * stages, world.timeout_s
            whole = world.part(every, virtual_ranks=virtual, timeout_s=timeout_s)
            assert whole is not None, "every process is in it"
            self.world: Ranks = whole
        else:
            self.world = Loopback(each * stages)
        self.group: Ranks | None = self.world.split(place) if copies > 1 else None

    def rank(self, stage: int, share: int) -> int:
        """Return the rank that holds a stage of a share."""
        copy, number = divmod(share, self.each)
        process = copy * self.across + stage // len(self.stages)
        local = stage % len(self.stages) * self.each + number
        return process * self.world.virtual_ranks + local

    def group_of(self, stage: int) -> Ranks:
        """Return a world of a stage's shares: one of its own where a process holds them all."""
        return Loopback(self.each) if self.group is None else self.group

    def free(self) -> None:
        """Free the worlds. Collective."""
        if self.group is not None:
            self.group.free()
        self.world.free()


class StageReducers(Averaging):
    """The reducers of the stages of this process, in the place of one of the whole network.

    Collective. Options as of GradientReducer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stages: Sequence[Stage],
        placement: Placement,
        aggregator: Aggregator,
        *,
        seed: int,
        bucket_mib: float,
    ) -> None:
        super().__init__(placement.world, seed)
        self.aggregator, self.placement = aggregator, placement
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.layers = {name: list(p.shape) for name, p in named}
        self.bucket = SimpleNamespace(names=tuple(self.layers))
        self.of: dict[int, GradientReducer] = {}
        error: Exception | None = None
        try:
            for index in placement.stages:
                world = placement.group_of(index)
                self.of[index] = GradientReducer(
                    stages[index].blocks,
                    world,
                    aggregator,
                    seed=part_seed(seed, index),
                    bucket_mib=bucket_mib,
                )
        except Exception as found:  # of some stages alone
            error = found
        self.world.agree(error, "stages")

    def __enter__(self) -> StageReducers:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def reduce(self, errors: dict[int, Exception], iteration: int) -> Mean:
        """Set p.grad of the stages here to means over shares; return one of them. Collective.

        errors: by stage, what was found before. Raises on all processes alike one of these, or
        NonFiniteGradient, with p.grad of some stages set and no parameter changed.
        """
        error: Exception | None = None
        means = list[Mean]()
        for stage, reducer in self.of.items():
            reducer.iteration, reducer.epoch = iteration, self.epoch
            if stage in errors:
                reducer.fail(errors[stage])
            try:
                means.append(reducer.reduce())
            except NonFiniteGradient as found:
                ranks = [self.placement.rank(stage, share) for share in found.ranks]
                error = error or NonFiniteGradient(found.segments, ranks, found.dtype)
            except Exception as found:
                error = error or found
        self.world.agree(error, "stages")
        return means[0]
