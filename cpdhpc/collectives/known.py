"""What a world keeps of all-reduces that come again: recordings, by method and by arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy import empty, float32, ndarray

from ..ops.call_list import OVERLAPS, STRANGE, UNLIKE
from ..ops.payloads import Array
from ..world.ranks import Ranks
from .checks import raise_nonfinite
from .engine import BufferPool
from .method import Method, Reduced, Segment, Shifts
from .recorded import Recording

KEPT = 64  # methods and sizes, those that were used last
# Of 62 bits, so that hardly one is a digest of check_alike, of 56. Two numbers, so that no
# iteration of one recording is one of another.
DIGEST, ITERATION, MASK = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, (1 << 62) - 1

LISTS = list, tuple
new_reduced = partial(tuple.__new__, Reduced)  # in half the time that Reduced takes


@dataclass
class Entry:
    """What a world knows of a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    recording: Recording | None = None
    digest: int = 0  # of the recording, the same on all processes

    def free(self) -> None:
        """Free the recording."""
        if self.recording is not None:
            self.recording.free()


@dataclass(slots=True)
class Known:
    """What a call of an all-reduce comes to that is known by its arguments."""

    nodes: tuple[int, ...]
    recording: Recording
    digest: int  # of the recording
    keeps: object  # as it may be known by its identity
    segments: tuple[Segment, ...]
    told: tuple[tuple[int, ...], tuple[int, ...], str]  # of Reduced, but for the arrays


class Recordings(dict[tuple[Method, int], Entry]):
    """The entries of a world for methods and sizes, those used last at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 0
        self._arrays = BufferPool(partial(np.empty, dtype=np.uint8))

    def entry(self, method: Method, n: int, nodes: tuple[int, ...]) -> Entry:
        """Return the entry of a method and a size; forget the one that was not used longest."""
        entry = self.pop((method, n), None)
        if entry is None or entry.nodes is not nodes:
            if entry is not None:
                entry.free()
            entry = Entry(nodes)
        self[method, n] = entry
        if len(self) > KEPT:
            self.pop(next(iter(self))).free()
        return entry

    def next_digest(self) -> int:
        """Return the digest of one more recording, the same on all processes."""
        self._made += 1
        return DIGEST * self._made & MASK | 1

    def arrays(self, n: int) -> tuple[Array, Array]:
        """Return x and out, float32[n], to record: all recordings have the same, and touch none."""
        self._arrays.rewind()
        x, out = (self._arrays.take(np.float32().itemsize * n) for _ in range(2))
        return x.view(np.float32), out.view(np.float32)


def recording_of(
    world: Ranks, method: Method, x: Array, segments: Sequence[Segment], shifts: Shifts
) -> Recording | None:
    """Return the recording for arrays like x with these shifts, from the second call on.

    None where a call is not recorded. A function of the calls, so the same on all processes, as it
    must be. Collective.
    The arguments are those of Method.plan.
    """
    is_list = world.virtual_ranks == 1 and isinstance(x, np.ndarray)
    if not (is_list and method.is_recorded(world.nodes)):
        return None
    recordings = world.cache.get(Recordings, Recordings)
    entry = recordings.entry(method, x.size, world.nodes)
    entry.calls += 1
    if entry.calls == 2:
        arrays = recordings.arrays(x.size)
        entry.recording = Recording(world, method, *arrays, segments, shifts, moves=True)
        entry.digest = recordings.next_digest()
    elif entry.recording is not None and method.shares_shifts:
        entry.recording.adapt(segments, shifts)
    return entry.recording


def forget(world: Ranks, method: Method, n: int) -> None:
    """Forget a method and a size: calls that come again are recorded anew. Collective."""
    entry = world.cache.get(Recordings, Recordings).pop((method, n), None)
    if entry is not None:
        entry.free()


def are_plain(xs: Any, outs: Any) -> bool:
    """Whether these are one NumPy array, and none or one."""
    if type(xs) not in LISTS or len(xs) != 1 or type(xs[0]) is not ndarray:
        return False
    return outs is None or (type(outs) in LISTS and len(outs) == 1 and type(outs[0]) is ndarray)


def listed(segments: Any) -> Any:
    """Return segments as a tuple, if they are a list."""
    return tuple(segments) if type(segments) is list else segments


def know(
    world: Ranks,
    what: Hashable,
    keeps: object,
    method: Method,
    x: Array,
    segments: Any,
    parts: tuple[Segment, ...],
    reduced: Reduced,
) -> None:
    """Let a call with these arguments be run at once from now on, if it is a recording alone.

    what: the other arguments; keeps: what that knows by its identity; x: an array of the call
    segments: as given; parts: what they are; reduced: what the call gave
    """
    if world.board is None or not (segments is None or type(segments) in LISTS):
        return
    entry = world.cache.get(Recordings, Recordings).get((method, x.size))
    if entry is None or entry.recording is None:
        return
    if not (method.shares_shifts or method.hides_nonfinite):
        whole = parts or (Segment("x", 0, x.size),)
        told = Known(entry.nodes, entry.recording, entry.digest, keeps, whole, reduced[1:])
        with suppress(TypeError):  # segments may be lists, which cannot be hashed
            keep(world.board.known, (what, x.shape, listed(segments)), told)


def know_as(world: Ranks, what: Hashable, other: Hashable, x: Array) -> None:
    """Let a call without segments that is known by other be known by what, too."""
    if world.board is not None and (other, x.shape, None) in world.board.known:
        keep(world.board.known, (what, x.shape, None), world.board.known[other, x.shape, None])


def keep(calls: dict[Hashable, Known], key: Hashable, known: Known) -> None:
    """Keep what is known of a call; forget all where it is too much."""
    if len(calls) >= KEPT:
        calls.clear()
    calls[key] = known


def run_known(
    world: Ranks,
    what: Hashable,
    segments: Any,
    iteration: object,
    xs: Sequence[Any],
    outs: Sequence[Any] | None,
) -> Reduced | None:
    """Run a call whose arguments were seen before, without a look at them. Collective.

    what: the other arguments; iteration: compared over the ranks, if nothing else
    Returns None, with nothing done, where it is not known here or elsewhere, or others are about
    to do something else. Raises NonFiniteGradient, as run.
    """
    # It is a third of a call of 4 KiB: no function is called that need not be.
    board = world.board
    if board is None or board.has_failed or world.account is not None or world.lent_by is not None:
        return None
    try:
        x = xs[0]
        known = board.known[what, x.shape, segments if segments is None else listed(segments)]
    except Exception:  # whatever is wrong with the arguments is said later
        return None
    recording, number = known.recording, known.digest
    if recording.freed or world.nodes is not known.nodes or type(iteration) is not int:
        return None
    if iteration:
        if iteration >> 62:  # more than digests tell
            return None
        number = (number + ITERATION * iteration) & MASK | 1
    totals = (empty(x.shape, float32),) if outs is None else outs
    bad = recording.run_agreed(number, xs, totals, iteration)
    if bad == OVERLAPS:
        totals = (empty(x.shape, float32),)
        bad = recording.run_agreed(number, xs, totals, iteration)
    if bad:
        if bad == UNLIKE:
            board.has_failed = True  # a guess was wrong
        if bad in (UNLIKE, STRANGE):
            return None
        raise_nonfinite(world, [x.reshape(-1)], known.segments, totals[0].reshape(-1))
    if outs is not None and totals is not outs:
        np.copyto(outs[0], totals[0])
        totals = outs
    sent_shifts, result_shifts, algorithm = known.told
    return new_reduced(((totals[0],), sent_shifts, result_shifts, algorithm))
