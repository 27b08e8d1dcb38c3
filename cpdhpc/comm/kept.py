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
MOST_RANKS = 64  # a tape has a request for each message, up to four for each other rank
MOST_BYTES = 1 << 20  # over all ranks, whose contributions it may hold
KEPT = 64  # methods and sizes, those that were used last


@dataclass
class _Entry:
    """What a world knows of a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    tape: Tape | None = None


def is_small(method: Method, ranks: int, n: int) -> bool:
    """Whether repeated all-reduces of n values are tapes, where each process has one rank."""
    fits = 4 * n <= SMALL_BYTES and 4 * n * ranks <= MOST_BYTES and ranks <= MOST_RANKS
    return fits and method.repeats


def kept_tape(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: tuple[Sequence[int], Sequence[int]],
) -> Tape | None:
    """Return the tape for arrays like x with these shifts, from the second call on, if it is small.

    A function of the calls, so the same on all processes, as it must be: programs may exchange
    notes of where payloads lie instead. The arguments are those of Method.plan.
    """
    alone, on_cpu = world.virtual_ranks == 1, isinstance(x, np.ndarray)
    if not (alone and on_cpu and is_small(method, world.ranks, x.size)):
        return None
    entry = _entry(world, (method, x.size))
    entry.calls += 1
    if entry.calls == 2:
        plan = method.plan(world.nodes, x, segments, shifts, 0)
        arrays = np.empty(x.size, np.float32), np.empty(x.size, np.float32)
        entry.tape = Tape(world, plan, *arrays, f"allreduce {method.algorithm}")
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


def _free(entry: _Entry | None) -> None:
    if entry is not None and entry.tape is not None:
        entry.tape.free()
