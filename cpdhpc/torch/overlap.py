"""Reduction of gradient buckets in a thread while backward computes the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from ..compress.base import Mean
from ..compress.bucket import Part
from ..errors import UserError
from ..ops.common import take_short_slices
from ..ops.tensors import OwnStream
from ..world.ranks import Ranks

ENOUGH = ("serialized", "multiple")  # thread levels that let another thread call MPI
PAUSE_S = 2e-4  # between polls of the thread for messages of other nodes


def check_overlap(world: Ranks) -> None:
    """Raise UserError unless a world allows overlap."""
    if world.virtual_ranks > 1:
        raise UserError(
            f"GradientReducer: overlap=True: virtual_ranks={world.virtual_ranks}: should be 1: "
            "a process that plays several ranks has all gradients only after the last backward"
        )
    if world.thread_level not in ENOUGH:
        raise UserError(
            f"GradientReducer: overlap=True: MPI gave the thread level {world.thread_level!r}: "
            "should be 'serialized' or 'multiple': set mpi4py.rc.thread_level = 'multiple' "
            "(its default) before mpi4py.MPI is imported, with an MPI library built for threads"
        )


def hides(world: Ranks, parts: Sequence[Part]) -> bool:
    """Return whether overlap is expected to make steps shorter; the same on all ranks.

    It is if messages leave a node and there are several parts. Within a node the ranks' own cores
    copy the data, so nothing can be hidden.
    """
    several = len(set(world.nodes)) > 1 and len(parts) > 1
    return several and world.virtual_ranks == 1 and world.thread_level in ENOUGH


def pause_s(world: Ranks) -> float:
    """Return how long the thread sleeps between polls while backward computes on its core.

    Between nodes sockets make progress meanwhile. Within a node the ranks copy messages
    themselves, and sleeping made steps longer.
    """
    return PAUSE_S if len(set(world.nodes)) > 1 else 0.0


def reducing_thread(world: Ranks) -> ThreadPoolExecutor:
    """Return an executor of one thread, which soon gets the core again after a sleep."""
    begin = take_short_slices if pause_s(world) else None
    return ThreadPoolExecutor(1, thread_name_prefix="cpdhpc-reduce", initializer=begin)


class Overlap:
    """Collects the gradients of a model, and submits each complete part to a thread, in order.

    All processes reduce the parts in the same order, so their collectives match. From the first
    part of a step until means ends, only this thread may use the world: World refuses the thread
    that computes, so that only one thread calls MPI. From this model's first gradient until its
    means end, parts of other models wait.
    take: gathers the gradient of a layer; aggregate: reduces a part, by index, in the thread
    again: called with a layer whose gradient comes a second time within a step
    stream: of the thread, which begins a part when backward's stream has gathered it
    """

    def __init__(
        self,
        world: Ranks,
        parts: Sequence[Part],
        take: Callable[[int], None],
        aggregate: Callable[[int], Mean],
        again: Callable[[int], None],
        stream: OwnStream,
    ) -> None:
        self.world, self.parts, self.stream = world, parts, stream
        self.take, self.aggregate, self.again = take, aggregate, again
        self.executor: ThreadPoolExecutor | None = None
        self._paused = False
        self._part_of = {layer: i for i, part in enumerate(parts) for layer in part.layers}
        self._begin()

    def _begin(self) -> None:
        self._seen = [False] * len(self._part_of)
        self._missing = [len(part.layers) for part in self.parts]
        self._futures: list[Future[Mean]] = []

    def has_come(self, layer: int) -> None:
        """Take the gradient of a layer, just computed by backward."""
        if self._seen[layer]:
            self.again(layer)
        elif not self._paused:
            if self.world.lent_to is None:
                self.world.lent_to = self
            self._take(layer)
            self._submit()

    def _take(self, layer: int) -> None:
        self.take(layer)
        self._seen[layer] = True
        self._missing[self._part_of[layer]] -= 1

    def _submit(self) -> None:
        """Submit the next parts that are complete; none while another model has the world."""
        if self.world.lent_to is not self:
            return
        while len(self._futures) < len(self.parts) and not self._missing[len(self._futures)]:
            if self.executor is None:
                self.executor = reducing_thread(self.world)
            self.world.lent_by, self.world.pause_s = threading.get_ident(), pause_s(self.world)
            previous = self._futures[-1] if self._futures else None
            index = len(self._futures)
            gathered = self.stream.mark()
            self._futures.append(self.executor.submit(self._reduce, index, previous, gathered))

    def _reduce(self, index: int, previous: Future[Mean] | None, gathered: Any) -> Mean:
        """Reduce a part, in the thread, unless an earlier part had an error, as on all ranks."""
        if previous is not None:
            previous.result()  # complete: raises the step's first error
        with self.stream.after(gathered):
            return self.aggregate(index)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients accumulate; none is submitted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def means(self) -> list[Mean]:
        """Return the means of all parts, including those of layers without gradient.

        Raises the thread's first error of the step, once no part is being reduced. Every wait of
        the thread has the world's time-out, so this one ends, too.
        """
        if self.world.lent_to not in (None, self):
            self._begin()
            raise RuntimeError(
                "GradientReducer.reduce: overlap=True: gradients of another model are being "
                "reduced since its backward: call reduce() of models in the order of their "
                "backward, and use no_sync() of their reducer for those that are not to be reduced"
            )
        self.world.lent_to = self
        for layer, seen in enumerate(self._seen):
            if not seen:
                self._take(layer)
        self._submit()
        self.world.pause_s = 0.0  # backward is over
        try:
            return [future.result() for future in self._futures]
        finally:
            wait(self._futures)  # also after an error: the next step writes to their arrays
            self.stream.join()
            self.world.lent_by = self.world.lent_to = None
            self._begin()

    def close(self, *, finish: bool = True) -> None:
        """End the thread; finish: wait for the part that it reduces."""
        if self.executor is not None:
            self.executor.shutdown(wait=finish, cancel_futures=True)
        if finish and self.world.lent_to in (None, self):
            self.world.lent_by, self.world.lent_to, self.world.pause_s = None, None, 0.0
