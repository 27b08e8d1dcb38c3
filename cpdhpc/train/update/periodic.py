"""Ranks step by themselves, and agree on a model once in a while: local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ...compress.base import Mean
from .base import NOTHING
from .own_models import Array, OwnModels, OwnModelsRule

if TYPE_CHECKING:
    import torch

    from ..reducer import GradientReducer


class PeriodicUpdate(OwnModels):
    """Local steps of each rank's own optimiser, then one outer step, alike on all ranks.

    The outer gradient is the way from where ranks stand to where they began, averaged over them by
    the reducer's aggregator; the outer step is SGD with Nesterov's momentum.
    interval: local steps; rate, momentum: of the outer step
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        interval: int,
        rate: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(model, optimizer, reducer, reducer.bucket.align)
        self.interval, self.rate, self.momentum = interval, np.float32(rate), np.float32(momentum)
        self._anchor()

    def _anchor(self) -> Array:
        """Return where all ranks began their local steps, float32[bucket.size]."""
        return self.state.shared("", "anchor", self.parameters[0].copy)

    def reduce(self) -> Mean:
        """Step on every rank; at the end of a period the outer step. Collective.

        See Update.reduce. Where outer gradients are not finite, ranks have stepped already.
        """
        used = self.reducer.collect()
        for hosted in range(self.world.virtual_ranks):
            self.begin(hosted)
            self._local_step(hosted, used)
        return NOTHING if self.reducer.iteration % self.interval else self._outer_step()

    def step(self) -> None:
        """Do nothing: reduce has stepped, as what it exchanges is where the steps lead."""

    def _local_step(self, hosted: int, used: Sequence[int]) -> None:
        """Let the optimiser of a hosted rank step; used: by layer, whether any has a gradient."""
        import torch

        gradients = self.reducer.bucket.views(self.reducer.flats[hosted])
        for p, gradient, is_used in zip(self.reducer.parameters, gradients, used, strict=True):
            p.grad = torch.from_numpy(gradient).to(p.dtype) if is_used else None
        self.optimizer.state = self._moments[hosted]
        self.optimizer.step()
        self._store(hosted)

    def _outer_step(self) -> Mean:
        """Let all ranks go on from one model. Collective."""
        anchor = self._anchor()
        for flat, parameters in zip(self.reducer.flats, self.parameters, strict=True):
            np.subtract(anchor, parameters, out=flat)
        mean = self.reducer.average()
        direction = mean.flat
        if self.momentum:
            kept = self.state.shared("", "outer_momentum", lambda: np.zeros_like(anchor))
            kept *= self.momentum
            kept += mean.flat
            direction = mean.flat + self.momentum * kept
        anchor -= self.rate * direction
        for parameters in self.parameters:
            parameters[...] = anchor
        self._playing = None
        return mean


class LocalSgd(OwnModelsRule):
    """[update] name = "localsgd": ranks step alone, and take the mean of their models.

    period: local steps from one mean to the next. The mean is formed by [gradient], of the ways
        that ranks have gone since the last one
    Source: Stich: Local SGD converges fast and communicates little, arXiv 1805.09767.
    """

    needs: ClassVar[Mapping[str, object]] = {
        **OwnModelsRule.needs,
        "gradient.has_momentum": False,
    }

    name: Literal["localsgd"] = "localsgd"
    period: Annotated[int, Field(ge=1)] = 8

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> PeriodicUpdate:
        """Return the rule at work. See UpdateRule.build."""
        return PeriodicUpdate(model, optimizer, reducer, self.period)


class DiLoCo(LocalSgd):
    """[update] name = "diloco": ranks step alone; then an outer step along the mean of their ways.

    period: local steps, by the optimiser of the job, from one outer step to the next
    outer_rate: of the outer step, along the mean way, which [gradient] forms: in any wire, with
        error feedback too
    outer_momentum: Nesterov's, of the outer step
    Source: Douillard et al.: DiLoCo, arXiv 2311.08105, algorithm 1.
    """

    name: Literal["diloco"] = "diloco"  # type: ignore[assignment]
    period: Annotated[int, Field(ge=1)] = 50
    outer_rate: Annotated[float, Field(gt=0)] = 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> PeriodicUpdate:
        """Return the rule at work. See UpdateRule.build."""
        outer = self.outer_rate, self.outer_momentum
        return PeriodicUpdate(model, optimizer, reducer, self.period, *outer)
