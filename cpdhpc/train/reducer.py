"""Replaces the gradients of a torch model by their mean over all ranks, in buckets.

With overlap a thread reduces buckets while backward computes the others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ..compress import COMPRESSORS
from ..compress.base import Aggregator, Context, Mean
from ..compress.bucket import Bucket
from ..compress.state import State
from ..config import UserError, suggest
from ..randomness import random_key
from ..world.mpi import as_world
from ..world.ranks import Ranks

BYTES = 4  # of a float32
MIB = 1 << 20


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model that are reduced together: a bucket of a larger one.

    layers: their indices in the model's bucket; start, stop: where they lie in its buffer
    bucket: their own layout, that of buffer[start:stop]
    """

    layers: range
    bucket: Bucket
    start: int
    stop: int


def split_bucket(whole: Bucket, bucket_mib: float) -> list[Part]:
    """Return parts of at most bucket_mib MiB of values, or one larger layer, the last ones first.

    Layers go into parts in reverse, about the order in which backward finishes them; within a part
    they keep the model's order, so that one part is laid out as the model itself.
    Raises ValueError unless bucket_mib is above zero.
    """
    if not bucket_mib > 0:
        raise ValueError(f"GradientReducer: bucket_mib={bucket_mib}: should be above 0")
    parts, stop, size_bytes = [], len(whole.names), 0
    for layer in reversed(range(len(whole.names))):
        layer_bytes = math.prod(whole.shapes[layer]) * BYTES
        if layer + 1 < stop and size_bytes + layer_bytes > bucket_mib * MIB:
            parts.append(_part(whole, range(layer + 1, stop)))
            stop, size_bytes = layer + 1, 0
        size_bytes += layer_bytes
    return [*parts, _part(whole, range(stop))]


def _part(whole: Bucket, layers: range) -> Part:
    span = slice(layers.start, layers.stop)
    bucket = Bucket(whole.names[span], whole.shapes[span], whole.align)
    segments = whole.segments[span]
    return Part(layers, bucket, segments[0].start, segments[-1].stop)


Array = npt.NDArray[Any]
Aggregate = Callable[[int], Mean]  # index of a part -> its mean over the ranks; collective

ENOUGH = ("serialized", "multiple")  # thread levels with which another thread may call MPI


def check_overlap(world: Ranks) -> None:
    """Raise UserError on all processes alike unless a world allows overlap. Collective."""
    error = None
    if world.virtual_ranks > 1:
        error = UserError(
            f"GradientReducer: overlap=True: virtual_ranks={world.virtual_ranks}: should be 1: "
            "a process that plays several ranks has all gradients only after the last backward"
        )
    elif world.thread_level not in ENOUGH:
        error = UserError(
            f"GradientReducer: overlap=True: MPI gave the thread level {world.thread_level!r}: "
            "should be 'serialized' or 'multiple': set mpi4py.rc.thread_level = 'multiple' "
            "(its default) before mpi4py.MPI is imported, with an MPI library built for threads"
        )
    world.agree(error, "overlap")


class Overlap:
    """Watches the gradients of a model, and hands each complete part to one thread, in order.

    All processes go through the parts in the same order, so their collectives match. From the
    first part of a step until wait returns, the world belongs to the thread: World refuses the
    thread that computes, so that MPI is called by one thread at a time.
    aggregate: reduces a part from flat, where the gradients of parameters are gathered in views
    """

    def __init__(
        self,
        world: Ranks,
        parameters: list[torch.nn.Parameter],
        views: list[Array],
        parts: list[Part],
        aggregate: Aggregate,
    ) -> None:
        self.world, self.parameters, self.views = world, parameters, views
        self.parts, self.aggregate = parts, aggregate
        self.executor: ThreadPoolExecutor | None = None
        self._part_of = {layer: i for i, part in enumerate(parts) for layer in part.layers}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(layer))  # type: ignore[no-untyped-call]
            for layer, parameter in enumerate(parameters)
        ]
        self._begin()

    def _begin(self) -> None:
        self._seen = [False] * len(self.parameters)
        self._missing = [len(part.layers) for part in self.parts]
        self._futures: list[Future[Mean]] = []

    def _hook(self, layer: int) -> Callable[[torch.Tensor], None]:
        def take(_: torch.Tensor) -> None:
            if self._seen[layer]:
                raise RuntimeError(
                    f"GradientReducer: overlap=True: {self._name(layer)} has a second gradient "
                    "before reduce(): its first one may be on its way already"
                )
            self._take(layer)
            self._submit()

        return take

    def _name(self, layer: int) -> str:
        part = self.parts[self._part_of[layer]]
        return repr(part.bucket.names[layer - part.layers.start])

    def _take(self, layer: int) -> None:
        copy_gradient(self.parameters[layer], self.views[layer])
        self._seen[layer] = True
        self._missing[self._part_of[layer]] -= 1

    def _submit(self) -> None:
        """Hand over the parts that are next and complete."""
        while len(self._futures) < len(self.parts) and not self._missing[len(self._futures)]:
            if self.executor is None:
                self.executor = ThreadPoolExecutor(1, thread_name_prefix="cpdhpc-reduce")
            self.world.lent_by = threading.get_ident()
            previous = self._futures[-1] if self._futures else None
            index = len(self._futures)
            self._futures.append(self.executor.submit(self._reduce, index, previous))

    def _reduce(self, index: int, previous: Future[Mean] | None) -> Mean:
        """Reduce a part, in the thread; after an error, which all ranks have, none is any more."""
        if previous is not None:
            previous.result()  # is there already: raises the step's first error
        return self.aggregate(index)

    def wait(self) -> list[Mean]:
        """Return the means of all parts, with parameters that got no gradient as they are.

        Raises what the thread raised, the first error of the step, with no part under way.
        Every wait of the thread has the world's time-out, so this one ends too.
        """
        for layer, seen in enumerate(self._seen):
            if not seen:
                self._take(layer)
        self._submit()
        wait(self._futures)
        self.world.lent_by = None
        futures = self._futures
        self._begin()
        return [future.result() for future in futures]

    def close(self, *, finish: bool = True) -> None:
        """Let go of the model and end the thread; finish: after the part that is under way."""
        for hook in self._hooks:
            hook.remove()
        if self.executor is not None:
            self.executor.shutdown(wait=finish, cancel_futures=True)
        if finish:
            self.world.lent_by = None


def copy_gradient(parameter: torch.nn.Parameter, view: Array) -> None:
    """Copy p.grad into a view of a buffer; where there is none, zeros."""
    view[...] = 0 if parameter.grad is None else parameter.grad.detach().numpy()


def join(whole_size: int, parts: list[Part], means: list[Mean]) -> Mean:
    """Return the mean of the whole model, its layers in the model's order, from that of parts."""
    if len(means) == 1:
        return means[0]
    flat = np.zeros(whole_size, np.float32)
    for part, mean in zip(parts, means, strict=True):
        flat[part.start : part.stop] = mean.flat
    names = set.intersection(*(set(mean.layers) for mean in means))
    layers = {n: np.concatenate([mean.layers[n] for mean in reversed(means)]) for n in names}
    return Mean(flat, layers)


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
    iteration, epoch: of the next reduce; the epoch is the caller's to set, for methods that ask
    state: what the aggregator keeps, in checkpoints together with iteration
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
        self.seed, self.iteration, self.epoch = seed, 0, 0.0
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
        self.state = State(self.world.hosted, self.world.ranks)
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
        seed = part_seed(self.seed, index)
        context = Context(self.world, self.state, seed, self.iteration, self.epoch)
        gradients = [flat[part.start : part.stop] for flat in self.flats]
        return self.aggregator.aggregate(gradients, part.bucket, context)

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
