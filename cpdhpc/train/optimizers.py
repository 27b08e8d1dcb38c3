"""Optimisers: a section of a job file and a row in OPTIMIZERS each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from ..config import Section

if TYPE_CHECKING:
    import torch


class Optimizer(Section):
    """[optimizer]: how an averaged gradient changes the parameters."""

    @property
    def has_momentum(self) -> bool:
        """Whether a step depends on the gradients of steps before."""
        return True

    @abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Return the optimiser; each step sets its learning rate anew."""


class Sgd(Optimizer):
    """[optimizer] name = "sgd": stochastic gradient descent, as torch.optim.SGD.

    momentum: share of the last step that is added; weight_decay: times the weights is added to
        gradients; nesterov: whether the momentum looks ahead
    """

    name: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=true needs momentum above 0")
        return self

    @property
    def has_momentum(self) -> bool:
        """See Optimizer.has_momentum."""
        return self.momentum > 0

    def build(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Return torch's. See Optimizer.build."""
        import torch

        return torch.optim.SGD(
            parameters,
            lr=rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": Sgd}
