"""The mean gradient and one step of the optimiser: all ranks hold the same parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...compress.base import Mean
from .base import Update, UpdateRule

if TYPE_CHECKING:
    import torch

    from ..reducer import GradientReducer


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
