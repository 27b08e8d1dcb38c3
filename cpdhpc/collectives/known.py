"""What a world keeps of all-reduces that come again: recordings, by method and by arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

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


class Known(NamedTuple):
    """What a call of an all-reduce comes to that is known by its arguments."""

    entry: Entry
    recording: Recording
    keeps: object  # as it may be known by its identity
    segments: tuple[Segment, ...]
    told: tuple[tuple[int, ...], tuple[int, ...], str]  # of Reduced, but for the arrays


class Recordings(dict[tuple[Method, int], Entry]):
    """The entries of a world for methods and sizes, those used last at the end.

    known: calls that are a recording and nothing else, by their arguments
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Hashable, Known] = {}
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

    def keep(self, key: Hashable, known: Known) -> None:
        """Keep what is known of a call; forget all where it is too much."""
        if len(self.known) >= KEPT:
            self.known.clear()
        self.known[key] = known

    def usable(self, world: Ranks, key: Hashable) -> Known | None:
        """Return what is known of a call, None where it is not, or cannot be run at once."""
        try:
            known = self.known.get(key)
        except TypeError:  # a choice that cannot be hashed: what is wrong with it is said later
            return None
        if known is None or world.board is None or world.board.has_failed or world.account:
            return None
        if known.recording.freed or world.nodes is not known.entry.nodes:
            return None
        return known if world.lent_by is None else None


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
    if not (type(xs) in (list, tuple) and len(xs) == 1 and type(xs[0]) is np.ndarray):
        return False
    return outs is None or (
        type(outs) in (list, tuple) and len(outs) == 1 and type(outs[0]) is np.ndarray
    )


def know(
    world: Ranks,
    key: Hashable,
    keeps: object,
    method: Method,
    n: int,
    segments: tuple[Segment, ...],
    reduced: Reduced,
) -> None:
    """Let a call with these arguments be run at once from now on, if it is a recording alone.

    keeps: what the key knows by its identity; segments: none for one; reduced: what the call gave
    """
    recordings = world.cache.get(Recordings, Recordings)
    entry = recordings.get((method, n))
    if world.board is None or entry is None or entry.recording is None:
        return
    if not (method.shares_shifts or method.hides_nonfinite):
        whole = segments or (Segment("x", 0, n),)
        told = Known(entry, entry.recording, keeps, whole, reduced[1:])
        with suppress(TypeError):  # segments may be lists, which cannot be hashed
            recordings.keep(key, told)


def know_as(world: Ranks, key: Hashable, other: Hashable) -> None:
    """Let what is known by another key be known by this one, too."""
    recordings = world.cache.get(Recordings, Recordings)
    known = recordings.known.get(other)
    if known is not None:
        recordings.keep(key, known)


def run_known(
    world: Ranks,
    key: Hashable,
    iteration: object,
    xs: Sequence[Array],
    outs: Sequence[Array] | None,
) -> Reduced | None:
    """Run a call whose arguments were seen before, without a look at them. Collective.

    xs, outs: plain ones; iteration: compared over the ranks, if nothing else
    Returns None, with nothing done, where it is not known here or elsewhere, or others are about
    to do something else. Raises NonFiniteGradient, as run.
    """
    known = world.cache.get(Recordings, Recordings).usable(world, key)
    if known is None or type(iteration) is not int or iteration >> 62:  # more than digests tell
        return None
    number = known.entry.digest
    if iteration:
        number = (number + ITERATION * iteration) & MASK | 1
    x, recording = xs[0], known.recording
    total = np.empty(x.shape, np.float32) if outs is None else outs[0]
    bad = recording.run_agreed(number, x, total, iteration)
    if bad == OVERLAPS:
        total = np.empty(x.shape, np.float32)
        bad = recording.run_agreed(number, x, total, iteration)
    if bad == UNLIKE:
        world.board.has_failed = True  # a guess was wrong
    if bad in (UNLIKE, STRANGE):
        return None
    if bad:
        raise_nonfinite(world, [x.reshape(-1)], known.segments, total.reshape(-1))
    if outs is None:
        return Reduced((total,), *known.told)
    if total is not outs[0]:
        np.copyto(outs[0], total)
    return Reduced((outs[0],), *known.told)
