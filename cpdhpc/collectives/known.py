"""What a world keeps of all-reduces that come again: recordings, by method and by arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..ops.call_list import OVERLAPS
from ..ops.payloads import Array
from ..world.ranks import Ranks
from .checks import raise_nonfinite
from .method import Method, Reduced, Segment, Shifts
from .recorded import Recording

KEPT = 64  # methods and sizes, those that were used last
# Of 62 bits, so that hardly one is a digest of check_alike, of 56.
DIGEST, MASK = 0x1E3779B97F4A7C15, (1 << 62) - 1
FLOAT32 = np.dtype(np.float32)


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
    method: Method  # kept, as it may be known by its identity
    segments: tuple[Segment, ...]
    shifts: tuple[tuple[int, ...], tuple[int, ...]]


class Recordings(dict[tuple[Method, int], Entry]):
    """The entries of a world for methods and sizes, those used last at the end.

    known: calls that are a recording and nothing else, by their arguments
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Hashable, Known] = {}
        self._made = 0

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
        return DIGEST * self._made & MASK

    def run(
        self, world: Ranks, key: Hashable, iteration: int, x: Array, out: Array
    ) -> tuple[Known | None, int]:
        """Run a call that is known, without a look at its arguments. Collective.

        x, out: float32 and C-contiguous; iteration: compared over the ranks, if nothing else
        Returns what is known of it, and how many values are not finite; None with nothing done
        where it is not known here or elsewhere, or others are about to do something else.
        """
        try:
            known = self.known.get(key)
        except TypeError:  # a choice that cannot be hashed: what is wrong with it is said later
            return None, 0
        if known is None or world.board.has_failed or world.account is not None:
            return None, 0
        entry, recording = known.entry, known.recording
        if recording.freed or world.nodes is not entry.nodes or world.lent_by is not None:
            return None, 0
        number = (entry.digest + DIGEST * iteration) & MASK | 1
        if not world.board.agrees(number, recording.what, first=True):
            return None, 0
        bad = recording.run(x, out, iteration)
        if bad == OVERLAPS:
            total = np.empty_like(x)
            bad = recording.run(x, total, iteration)
            if not bad:  # else x is left alone
                np.copyto(out, total)
        return known, bad


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
        arrays = np.empty(x.size, np.float32), np.empty(x.size, np.float32)
        entry.recording = Recording(world, method, *arrays, segments, shifts, moves=True)
        entry.digest = recordings.next_digest()
    elif entry.recording is not None and method.shares_shifts:
        entry.recording.adapt(segments, shifts)
    return entry.recording


def are_plain(xs: Any, outs: Any) -> bool:
    """Whether these are one NumPy array, and none or one, that nothing can be wrong with."""
    if not (type(xs) in (list, tuple) and len(xs) == 1 and type(xs[0]) is np.ndarray):
        return False
    x = xs[0]
    if not (x.dtype is FLOAT32 and x.flags.c_contiguous):
        return False
    if outs is None:
        return True
    if not (type(outs) in (list, tuple) and len(outs) == 1 and type(outs[0]) is np.ndarray):
        return False
    return outs[0].dtype is FLOAT32 and outs[0].shape == x.shape and outs[0].flags.carray


def know(
    world: Ranks,
    key: Hashable,
    method: Method,
    n: int,
    segments: tuple[Segment, ...],
    reduced: Reduced,
) -> None:
    """Let a call with these arguments be run at once from now on, if it is a recording alone.

    segments: none for one; reduced: what the call has given
    """
    recordings = world.cache.get(Recordings, Recordings)
    entry = recordings.get((method, n))
    if world.board is None or entry is None or entry.recording is None:
        return
    if not (method.shares_shifts or method.hides_nonfinite):
        if len(recordings.known) >= KEPT:
            recordings.known.clear()
        whole = segments or (Segment("x", 0, n),)
        shifts = reduced.sent_shifts, reduced.result_shifts
        recordings.known[key] = Known(entry, entry.recording, method, whole, shifts)


def run_known(world: Ranks, key: Hashable, iteration: int, x: Array, out: Array) -> Known | None:
    """Run a call whose arguments were seen before; None, with nothing done, if they were not.

    Collective. Raises NonFiniteGradient, as run.
    """
    if type(iteration) is not int:
        return None
    known, bad = world.cache.get(Recordings, Recordings).run(world, key, iteration, x, out)
    if known is not None and bad:
        raise_nonfinite(world, [x.reshape(-1)], known.segments, out.reshape(-1))
    return known
