"""Replaces the gradients of a torch model by their mean over all ranks."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ..comm import Bucket, Ranks, as_world
from ..compress import COMPRESSORS, Aggregator, Mean
from ..config import suggest
from ..randomness import random_key
from .overlap import Overlap, check_overlap, copy_gradient, join
from .parts import split_bucket

Array = npt.NDArray[Any]


class GradientReducer:
    """Averages the gradients of a model over the ranks between backward and step.

    Collective: constructing it gives all processes the parameters and buffers of process 0.

    world: World, Loopback or an mpi4py communicator
    model: its parameters that require a gradient must be float32 on the CPU
    aggregator: a name in COMPRESSORS with its options, or an Aggregator without any
    bucket_mib: layers are reduced in buckets of at most so many MiB, or of one larger layer, the
        last layers first; with other buckets the mean may have other bits
    overlap: reduce a bucket in a thread while backward goes on, with the same bits. One backward
        a step then, p.grad left alone and no other call of MPI until reduce(); not with
        virtual ranks; MPI must give the thread level "serialized". close() ends the thread.
    Raises ValueError or TypeError for an unknown name, unknown options, other parameters, a world
    that does not go with overlap.

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
        bucket_mib: float = 25.0,
        overlap: bool = False,
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
        self.parts = split_bucket(self.bucket, bucket_mib)
        self.flats = [np.zeros(self.bucket.size, np.float32) for _ in self.world.hosted]
        self.state: dict[str, Array] = {}
        if overlap:
            check_overlap(self.world)
        for tensor in (*model.parameters(), *model.buffers()):
            _broadcast(self.world, tensor.detach())
        views = self.bucket.views(self.flats[0])
        self._overlap = (
            Overlap(self.world, self.parameters, views, self.parts, self._aggregate)
            if overlap
            else None
        )
        self._closed = False

    def stash(self, hosted: int = 0) -> None:
        """Keep p.grad as the gradient of a hosted rank; a missing one counts as zero.

        hosted: 0..virtual_ranks - 1; every one is stashed before reduce where there are several
        """
        views = self.bucket.views(self.flats[hosted])
        for parameter, view in zip(self.parameters, views, strict=True):
            copy_gradient(parameter, view)

    def reduce(self) -> Mean:
        """Set p.grad of every parameter to the mean over all ranks. Collective.

        Raises NonFiniteGradient on all ranks alike, with p.grad untouched, where a gradient
        holds NaN or infinity; RuntimeError after close.
        """
        if self._closed:
            raise RuntimeError("GradientReducer.reduce: the reducer is closed")
        mean = join(self.bucket.size, self.parts, self._means())
        self.iteration += 1
        for parameter, view in zip(self.parameters, self.bucket.views(mean.flat), strict=True):
            parameter.grad = torch.from_numpy(view.copy())
        return mean

    def _means(self) -> list[Mean]:
        """Return the mean of every part."""
        if self._overlap is not None:
            return self._overlap.wait()
        if len(self.flats) == 1:
            self.stash()
        return [self._aggregate(index) for index in range(len(self.parts))]

    def _aggregate(self, index: int) -> Mean:
        """Return the mean of a part. Collective. A random stream has one part: see part_seed."""
        part = self.parts[index]
        return self.aggregator.aggregate(
            self.world,
            [flat[part.start : part.stop] for flat in self.flats],
            part.bucket,
            self.state,
            seed=part_seed(self.seed, index),
            iteration=self.iteration,
        )

    def close(self) -> None:
        """Let go of the model and end the thread of overlap; call it between two steps."""
        self._end(finish=True)

    def _end(self, *, finish: bool) -> None:
        if self._overlap is not None and not self._closed:
            self._overlap.close(finish=finish)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; an error is let through at once, without a wait for other ranks."""
        self._end(finish=kind is None)


def part_seed(seed: int, index: int) -> int:
    """Return the seed of a part: seed itself for the first one, others for the others."""
    if index == 0:
        return seed
    low, high = random_key(seed, index)
    return low | high << 32


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


def _broadcast(world: Ranks, tensor: torch.Tensor) -> None:
    """Give all processes the tensor of process 0, in place."""
    values = np.ascontiguousarray(tensor.numpy())
    world.broadcast(values)
    tensor.copy_(torch.from_numpy(values))
