"""What a search of bits is asked for, and what cannot be searched."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..compress import LowBit, NoCompression
from ..config import ConfigError, dump_toml, override, read_toml
from ..train.controllers import BySchedule
from ..train.job import Job, load
from ..train.update import ByAllreduce
from .policy import PRODUCTS

BEFORE, UNSEEN = 2, 3  # trainings: float32 and uniform; these and what was found, of unseen seeds


@dataclass(frozen=True)
class Asked:
    """What is searched for.

    jobs: one for each seed
    budget: points that the accuracy may be below that of float32
    gradient_error: that the mean gradient may have, relative to the float64 one; one of the two
    most: trainings at most, of all; unseen: seeds to test with; over: of OVER
    """

    jobs: list[Job]
    budget: float | None
    gradient_error: float | None
    most: int
    unseen: int
    over: str = "wire"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the search."""
        return tuple(job.seed for job in self.jobs)

    @property
    def wire(self) -> bool:
        """Whether formats of gradients that travel are searched for."""
        return self.over != "arithmetic"

    @property
    def arithmetic(self) -> bool:
        """Whether formats of products are searched for."""
        return self.over != "wire"

    @property
    def reserved(self) -> int:
        """The trainings behind the search: float32, uniform and found, with unseen seeds."""
        return UNSEEN if self.unseen else 0

    @property
    def cost(self) -> str:
        """What it takes at most."""
        seeds = len(self.seeds)
        runs = (self.most - self.reserved) * seeds + self.reserved * self.unseen
        told = f"{self.most} trainings of {seeds} seeds"
        if self.unseen:
            told += f", of {self.unseen} others the last {self.reserved},"
        return f"{told} at most: {runs} runs of {self.jobs[0].train.epochs} epochs"

    @property
    def further(self) -> tuple[int, ...]:
        """Seeds that the search does not see."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.unseen))

    @property
    def method(self) -> LowBit:
        """How gradients travel, but for the format."""
        given = self.jobs[0].gradient
        if isinstance(given, LowBit):
            return replace(given, layers={})
        assert isinstance(given, NoCompression), "check has seen it"
        return LowBit(algorithm=given.algorithm, machine=given.machine)

    def toml(self) -> str:
        """Return all of it as TOML text."""
        search = {
            "budget": self.budget,
            "gradient_error": self.gradient_error,
            "over": self.over,
            "trials": self.most,
            "test_seeds": self.unseen,
            "seeds": list(self.seeds),
        }
        return dump_toml(self.jobs[0].plain() | {"search": search})


def asked_of(arguments: argparse.Namespace, settings: Sequence[str], processes: int) -> Asked:
    """Return what is asked for. Raises ConfigError for what cannot be searched."""
    of = arguments
    if (of.budget is None) == (of.gradient_error is None):
        raise ConfigError("search: --budget POINTS or --gradient-error SHARE: give one of them")
    for name, value in (("--budget", of.budget), ("--gradient-error", of.gradient_error)):
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"search: {name} {value:g}: must be above 0, and finite")
    least = BEFORE + 1 + (UNSEEN if of.test_seeds else 0)
    if of.trials < least or of.test_seeds < 0:
        raise ConfigError(
            f"search: --trials {of.trials}, --test-seeds {of.test_seeds}: must be {least} or more, "
            "those of float32 and uniform formats included, and 0 or more"
        )
    jobs, train = load(of.file, settings), override(read_toml(of.file), settings).get("train", {})
    if len({job.name for job in jobs}) > 1:
        names = ", ".join(dict.fromkeys(job.name for job in jobs))
        raise ConfigError(f"{of.file}: compare: has rows {names}: a search takes one")
    if not {"seed", "seeds"} & train.keys():
        raise ConfigError(f"{of.file}: train.seeds: is missing: a search needs to know them")
    job = jobs[0]
    asked = Asked(jobs, of.budget, of.gradient_error, of.trials, of.test_seeds, of.over)
    ruled = {key for rule in job.precision.rules for key in rule.said().keys() & PRODUCTS}
    constant = isinstance(job.controller, BySchedule) and job.train.loss_scaling == "static"
    wrong = {
        "gradient.aggregator": (
            not asked.wire or type(job.gradient) in (LowBit, NoCompression), "none or lowbit"),
        "update.name": (isinstance(job.update, ByAllreduce), "allreduce"),
        "stages.count": (job.stages.count == 1, "1"),
        "metric.name": (of.budget is None or job.metric.label == "accuracy", "accuracy: --budget "
            "counts its points; other metrics take --gradient-error"),
        "gradient.algorithm": (
            not asked.wire or getattr(job.gradient, "algorithm", "") != "mpi", "one that rounds"),
        "precision": (not asked.arithmetic or not ruled, f"no rule of {', '.join(sorted(ruled))} "
            "where it goes over arithmetic: it finds them"),
        "controller": (not asked.arithmetic or of.budget is not None or constant, "a constant "
            "batch and loss scale where --gradient-error goes over arithmetic"),
    }  # fmt: skip
    for key, (fits, allowed) in wrong.items():
        if not fits:
            raise ConfigError(f"{of.file}: {key}: a search takes {allowed}")
    if asked.wire and processes * job.train.virtual_ranks == 1:
        raise ConfigError(
            f"{of.file}: one rank sends no gradient, nothing can be saved: mpirun or "
            "train.virtual_ranks=2 or more, or --over arithmetic"
        )
    return asked
