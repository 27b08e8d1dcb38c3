"""What an update rule is: how the gradients of all ranks become the next parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ....compress.base import Array, Mean
from ....compress.bucket import State
from ....config import Section

if TYPE_CHECKING:
    import torch

    from ....torch.reducer import GradientReducer


class Update(ABC):
    """One step behind backward. All processes do the same, in this order:

        for each hosted rank:  begin(hosted); forward and backward; keep(hosted)
        reduce(); step()

    model: the one model of a process, which plays its hosted ranks one after the other
    state: what the rule keeps of each rank, as parameters that differ; it is in checkpoints
    interval: steps from one reduce that averages to the next
    """

    interval = 1
    at_rest = True  # whether a checkpoint may be taken now

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> None:
        self.model, self.optimizer, self.reducer = model, optimizer, reducer
        self.world = reducer.world
        self.state = State(self.world.hosted, self.world.ranks)

    def batch(self, coming: Array, size: int) -> Array:
        """Return the next global batch; coming: int64[n], samples of the epoch not yet seen."""
        return coming[:size]

    @property
    def sent_bytes(self) -> Array | int:
        """int64[hosted], bytes that went through other worlds than the training's; or 0."""
        return 0

    def begin(self, hosted: int) -> None:
        """Make the model that of a hosted rank, before its forward."""

    @abstractmethod
    def keep(self, hosted: int) -> None:
        """Take p.grad as the gradient of a hosted rank."""

    @abstractmethod
    def reduce(self) -> Mean:
        """Exchange what the ranks need of one another. Collective.

        Returns the mean of the gradients, for telemetry, or NOTHING where a step has none. Raises
        NonFiniteGradient on all ranks alike, with all parameters as they were.
        """

    @abstractmethod
    def step(self) -> None:
        """Change the parameters of all hosted ranks."""

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Make the model the one that is evaluated and saved, alike on all ranks. Collective."""
        yield

    def note(self) -> None:
        """Bring state up to date, as it is about to be saved."""

    def resumed(self, former_ranks: int) -> str:
        """Go on from what a checkpoint has put into model and state.

        former_ranks: how many ranks the run had that saved state. Returns what is to be said of it.
        """
        return ""


NOTHING = Mean(np.empty(0, np.float32))  # of a step in which no mean is formed


class UpdateRule(Section):
    """[update]: the rule, named in UPDATES.

    needs: the one value that other keys of a job may have, by table.key
    """

    needs: ClassVar[Mapping[str, object]] = {}

    name: str

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError where it cannot do with so many ranks, virtual ones included."""

    @abstractmethod
    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> Update:
        """Return the rule at work. Collective where it gives ranks what they begin with."""


class AllreduceUpdate(Update):
    """The mean gradient, then the optimiser's step: all ranks hold the same parameters."""

    def keep(self, hosted: int) -> None:
        """Take p.grad. See Update.keep."""
        if self.world.virtual_ranks > 1:  # else reduce takes p.grad itself
            self.reducer.stash(hosted)

    def reduce(self) -> Mean:
        """Set p.grad to the mean over all ranks. Collective. See Update.reduce."""
        return self.reducer.reduce()

    def step(self) -> None:
        """Let the optimiser step."""
        self.optimizer.step()


class ByAllreduce(UpdateRule):
    """[update] name = "allreduce": the optimiser steps with the mean gradient."""

    name: Literal["allreduce"] = "allreduce"

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> Update:
        """Return the rule at work. See UpdateRule.build."""
        return AllreduceUpdate(model, optimizer, reducer)
