"""Buckets of gradients are reduced in a thread while backward computes the others."""

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

ENOUGH = ("serialized", "multiple")  # thread levels with which another thread may call MPI
PAUSE_S = 2e-4  # between two looks of the thread for messages of other nodes


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
    """Return whether overlap is expected to make steps shorter, alike on all ranks.

    So it is where messages leave a node, and a part can leave before the last gradient is there.
    Within a node the ranks' own cores do the copying, so there is nothing to hide.
    """
    several = len(set(world.nodes)) > 1 and len(parts) > 1
    return several and world.virtual_ranks == 1 and world.thread_level in ENOUGH


def pause_s(world: Ranks) -> float:
    """Return how long the thread sleeps between two looks while backward computes on its core.

    Between nodes sockets go on meanwhile. Within one a message moves by the ranks' own copying:
    there sleep made steps longer.
    """
    return PAUSE_S if len(set(world.nodes)) > 1 else 0.0


def reducing_thread(world: Ranks) -> ThreadPoolExecutor:
    """Return the executor of one thread, which gets the core soon after a sleep."""
    begin = take_short_slices if pause_s(world) else None
    return ThreadPoolExecutor(1, thread_name_prefix="cpdhpc-reduce", initializer=begin)


class Overlap:
    """Is told of the gradients of a model, and hands each complete part to one thread, in order.

    All processes go through the parts in the same order, so their collectives match. From the
    first part of a step until means ends, the world belongs to the thread: World refuses the
    thread that computes, so that MPI is called by one thread at a time. Another model's parts wait
    from this one's first gradient on, which all ranks have, until its means end.
    take: gathers the gradient of a layer; aggregate: reduces a part, by index, in the thread
    again: told of a layer whose gradient comes a second time within a step
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
        """Take the gradient of a layer, which backward has just made."""
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
        """Hand over the parts that are next and complete; none while those of another model go."""
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
        """Reduce a part, in the thread; after an error, which all ranks have, none is any more."""
        if previous is not None:
            previous.result()  # is there already: raises the step's first error
        with self.stream.after(gathered):
            return self.aggregate(index)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up, with none handed over."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def means(self) -> list[Mean]:
        """Return the means of all parts, parameters without gradient as they are.

        Raises what the thread raised, the first error of the step, with no part under way.
        Every wait of the thread has the world's time-out, so this one ends too.
        """
        if self.world.lent_to not in (None, self):
            self._begin()
            raise RuntimeError(
                "GradientReducer.reduce: overlap=True: gradients of another model are on their way "
                "since its backward: call reduce() of models in the order of their backward, "
                "and keep those that are not to be reduced in no_sync() of their reducer"
            )
        self.world.lent_to = self
        for layer, seen in enumerate(self._seen):
            if not seen:
                self._take(layer)
        self._submit()
        self.world.pause_s = 0.0  # nobody computes any more
        try:
            return [future.result() for future in self._futures]
        finally:
            wait(self._futures)  # after an error, too: parts read what the next step writes
            self.stream.join()
            self.world.lent_by = self.world.lent_to = None
            self._begin()

    def close(self, *, finish: bool = True) -> None:
        """End the thread; finish: after the part that is under way."""
        if self.executor is not None:
            self.executor.shutdown(wait=finish, cancel_futures=True)
        if finish and self.world.lent_to in (None, self):
            self.world.lent_by, self.world.lent_to, self.world.pause_s = None, None, 0.0
