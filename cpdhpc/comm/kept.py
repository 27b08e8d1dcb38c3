"""Small all-reduces: a world keeps a tape for each method and size that comes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .method import Method
from .ranks import Ranks
from .scaling import Segment, shift_bytes
from .tape import Tape
from .wire import Array

SMALL_BYTES = 1 << 16  # of float32: copies to and from the tape cost little up to here
KEPT = 64  # methods and sizes, those that were used last
MOST_BYTES, MOST_MESSAGES = 1 << 18, 256  # of a tape that is kept


@dataclass
class _Entry:
    """What a world knows of a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    tape: Tape | None = None


def kept_tape(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: tuple[Sequence[int], Sequence[int]],
) -> Tape | None:
    """Return the tape for arrays like x with these shifts, from the second call on, if it is small.

    Processes need not agree: the messages of a tape are those of the program. The arguments are
    those of Method.plan.
    """
    if x.nbytes > SMALL_BYTES or world.virtual_ranks > 1 or not method.repeats:
        return None
    if type(x) is not np.ndarray:
        return None
    entry = _entry(world, (method, x.size))
    entry.calls += 1
    if entry.calls == 2:
        entry.tape = _new(world, method, x, segments, shifts)
    elif entry.tape is not None and method.shares_shifts:
        plan = entry.tape.plan
        for place, each in zip((plan.sent_shifts, plan.result_shifts), shifts, strict=True):
            assert place is not None, "they are what the ranks share"
            place[:] = shift_bytes(each, segments, x.size, x)
    return entry.tape


def _entry(world: Ranks, key: tuple[Method, int]) -> _Entry:
    """Return the entry of a method and a size; forget the one that has not been used longest."""
    entry: _Entry | None = world.kept.pop(key, None)
    if entry is None or entry.nodes is not world.nodes:
        _free(entry)
        entry = _Entry(world.nodes)
    world.kept[key] = entry
    if len(world.kept) > KEPT:
        _free(world.kept.pop(next(iter(world.kept))))
    return entry


def _new(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: tuple[Sequence[int], Sequence[int]],
) -> Tape | None:
    plan = method.plan(world.nodes, x, segments, shifts, 0)
    what = f"allreduce {method.algorithm}"
    tape = Tape(world, plan, np.empty_like(x), np.empty_like(x), what)
    if tape.size_bytes <= MOST_BYTES and tape.messages <= MOST_MESSAGES:
        return tape
    tape.free()
    return None


def _free(entry: _Entry | None) -> None:
    if entry is not None and entry.tape is not None:
        entry.tape.free()
