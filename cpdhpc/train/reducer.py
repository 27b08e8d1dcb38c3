"""Replaces the gradients of a torch model by their mean over all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..comm import Bucket, Ranks, as_world
from ..compress import COMPRESSORS, Aggregator, Mean
from ..config import suggest

Array = npt.NDArray[Any]


class GradientReducer:
    """Averages the gradients of a model over the ranks between backward and step.

    Collective: constructing it gives all processes the parameters and buffers of process 0.

    world: World, Loopback or an mpi4py communicator
    model: its parameters that require a gradient must be float32 on the CPU
    aggregator: a name in COMPRESSORS with its options, or an Aggregator without any
    Raises ValueError or TypeError for an unknown name, unknown options, other parameters.

        reducer = GradientReducer(model, World(), "lowbit", wire="e4m3")
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            reducer.reduce()
            optimizer.step()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world: Any,
        aggregator: str | Aggregator = "none",
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.world: Ranks = as_world(world)
        self.seed, self.iteration = seed, 0
        self.aggregator = _aggregator(aggregator, options)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        _check(named)
        self.parameters = [parameter for _, parameter in named]
        self.bucket = Bucket(
            tuple(name for name, _ in named),
            tuple(tuple(p.shape) for _, p in named),
            self.aggregator.align,
        )
        self.flats = [np.zeros(self.bucket.size, np.float32) for _ in self.world.hosted]
        self.state: dict[str, Array] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            _broadcast(self.world, tensor.detach())

    def stash(self, hosted: int = 0) -> None:
        """Keep p.grad as the gradient of a hosted rank; a missing one counts as zero.

        hosted: 0..virtual_ranks - 1; every one is stashed before reduce where there are several
        """
        arrays = [_array(parameter) for parameter in self.parameters]
        self.bucket.flatten(arrays, self.flats[hosted])

    def reduce(self) -> Mean:
        """Set p.grad of every parameter to the mean over all ranks. Collective.

        Raises NonFiniteGradient on all ranks alike, with p.grad untouched, where a gradient
        holds NaN or infinity.
        """
        if len(self.flats) == 1:
            self.stash()
        mean = self.aggregator.aggregate(
            self.world,
            self.flats,
            self.bucket,
            self.state,
            seed=self.seed,
            iteration=self.iteration,
        )
        self.iteration += 1
        for parameter, view in zip(self.parameters, self.bucket.views(mean.flat), strict=True):
            parameter.grad = torch.from_numpy(view.copy())
        return mean


def _aggregator(aggregator: str | Aggregator, options: dict[str, Any]) -> Aggregator:
    if isinstance(aggregator, Aggregator):
        if options:
            raise TypeError(f"GradientReducer: options={options}: the aggregator has its own")
        return aggregator
    if aggregator not in COMPRESSORS:
        raise ValueError(
            f"GradientReducer: aggregator={aggregator!r}: {suggest(aggregator, COMPRESSORS)}"
        )
    return COMPRESSORS[aggregator](**options)


def _check(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise ValueError("GradientReducer: model: no parameter requires a gradient")
    for name, parameter in named:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"GradientReducer: model: {name} is {parameter.dtype} on {parameter.device}: "
                "should be torch.float32 on cpu"
            )


def _array(parameter: torch.nn.Parameter) -> Array:
    if parameter.grad is None:
        return np.zeros(tuple(parameter.shape), np.float32)
    return parameter.grad.detach().numpy()


def _broadcast(world: Ranks, tensor: torch.Tensor) -> None:
    """Give all processes the tensor of process 0, in place."""
    values = np.ascontiguousarray(tensor.numpy())
    world.broadcast(values)
    tensor.copy_(torch.from_numpy(values))
