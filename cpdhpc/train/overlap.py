"""Reduces parts of a gradient in a thread of its own, while backward computes the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..comm import Ranks
from ..compress import Mean
from ..config import UserError
from .parts import Part

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
    shifts = [mean.shifts for mean in reversed(means) if mean.shifts is not None]
    return Mean(flat, np.concatenate(shifts) if shifts else None)
