"""Timelines: what each rank does when, in one file that Perfetto and chrome://tracing open.

Kernels and messages of call lists and halos are written by compiled code (kernels/cpu_timeline.h),
the rest by done. The format is that of Chrome's trace events: complete events ("ph": "X"), whose
times are in microseconds; a rank is a process there, and a thread a thread.
Source: Trace Event Format, Google, 2016; https://ui.perfetto.dev opens such files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .._cpu import set_timeline, timeline_add, timeline_now
from .ranks import Ranks, Wait

Rows = npt.NDArray[np.int64]  # [n, 5]: kind, thread, begin_ns, end_ns, amount

# Those up to wait are numbers in kernels/cpu_timeline.h, the others phases of a training step.
KINDS = (
    *("compute", "encode", "copy", "send", "wait"),
    *("data", "forward_backward", "reduce", "optimizer"),
)
COMPUTE, ENCODE, COPY, SEND, WAIT = range(5)
PHASES = KINDS[5:]
ROWS = 1 << 20  # of a rank, 40 MiB: what comes after that is counted, and left out
TRIALS = 20  # of a clock: the message that took least time says most


def began() -> int:
    """Return the time, in ticks, if a timeline is written, else 0."""
    return timeline_now()


def done(kind: int, since: int, amount: int = 0) -> None:
    """Write that this thread did something since a time of began, if that was not 0.

    kind: a place in KINDS; amount: values or bytes
    """
    if since:
        timeline_add(kind, since, amount)


@contextmanager
def traced(world: Ranks, path: Path | None, rows: int = ROWS) -> Iterator[None]:
    """Write into a file what all ranks do in the block. Collective.

    path: on all processes the same, written by process 0 if the block ends without an error; None:
        nothing is done; one that ends in .gz is compressed
    rows: that there is room for on each process
    The clocks of processes are compared with that of process 0 before and after the block, by
    messages; in between the difference is taken to change linearly. It is known to half the time
    that a message and its answer take.
    Raises StoreError on all processes if the file cannot be written.
    """
    if path is None:
        yield
        return
    memory = np.empty((rows, 5), np.int64)
    memory.fill(0)  # so that all of it is there
    first = _difference(world)
    _, *start = set_timeline(memory)
    try:
        yield
    finally:
        wanted, *end = set_timeline(None)
    last = _difference(world)
    own = _aligned(_in_ns(memory[: min(wanted, rows)], start, end), first, last)
    lost = world.gather(max(0, wanted - rows), "timeline")
    _write_together(world, path, own, lost)


def _in_ns(rows: Rows, start: list[int], end: list[int]) -> Rows:
    """Return rows whose times are nanoseconds; start, end: the same moments, in ticks and in ns."""
    rate = (end[1] - start[1]) / max(end[0] - start[0], 1)
    rows[:, 2:4] = start[1] + np.rint((rows[:, 2:4] - start[0]) * rate).astype(np.int64)
    return rows


Difference = tuple[int, int]  # when, and how far the clock of process 0 is ahead then; in ns


def _difference(world: Ranks) -> Difference:
    """Return how far the clock of process 0 is ahead of this process's, and when. Collective."""
    each, first = world.virtual_ranks, np.zeros(2, np.int64)
    found = (time.monotonic_ns(), 0)
    for process in range(1, world.processes):
        shortest = 0
        for _ in range(TRIALS if world.process in (0, process) else 0):
            if world.process == 0:
                _receive(world, process * each, 0, first[:1])
                first[1] = time.monotonic_ns()
                _send(world, 0, process * each, first[1:])
                continue
            asked_ns = time.monotonic_ns()
            _send(world, process * each, 0, first[:1])
            _receive(world, 0, process * each, first[1:])
            answered_ns = time.monotonic_ns()
            took_ns = answered_ns - asked_ns
            if not shortest or took_ns < shortest:
                shortest = took_ns
                found = (answered_ns, int(first[1]) - (asked_ns + answered_ns) // 2)
    return found


def _send(world: Ranks, rank: int, to: int, values: npt.NDArray[Any]) -> None:
    if values.size:
        requests = world.isend(rank, to, values.reshape(-1).view(np.uint8))
        reason = f"timeline: waited {{:.1f}} s for rank {to} to receive"
        world.wait_any([Wait(requests, rank, reason)])


def _receive(world: Ranks, source: int, rank: int, values: npt.NDArray[Any]) -> None:
    if values.size:
        requests = world.irecv(source, rank, values.reshape(-1).view(np.uint8))
        reason = f"timeline: waited {{:.1f}} s for rank {source}"
        world.wait_any([Wait(requests, rank, reason)])


def _aligned(rows: Rows, first: Difference, last: Difference) -> Rows:
    """Return rows by the clock of process 0."""
    (since, ahead), (until, ahead_then) = first, last
    drift = (ahead_then - ahead) / max(until - since, 1)
    rows[:, 2:4] += ahead + np.rint((rows[:, 2:4] - since) * drift).astype(np.int64)
    return rows


def _write_together(world: Ranks, path: Path, own: Rows, lost: list[int]) -> None:
    """Write the rows of all processes, one after the other. Collective."""
    counts = world.gather(len(own), "timeline")
    error: Exception | None = None
    if world.process:
        _send(world, world.hosted.start, 0, np.ascontiguousarray(own))
    else:
        try:
            _write(world, path, own, counts, lost)
        except Exception as wrong:
            error = wrong
    world.agree(error, "writing a timeline")


def _write(world: Ranks, path: Path, own: Rows, counts: list[int], lost: list[int]) -> None:
    import gzip

    from ..whole_files import replacing  # an all-reduce loads as little as it can

    every, start_ns = [own], own[:, 2].min(initial=np.iinfo(np.int64).max)
    for process, count in enumerate(counts[1:], start=1):
        rows = np.empty((count, 5), np.int64)
        _receive(world, process * world.virtual_ranks, 0, rows)
        start_ns = min(start_ns, rows[:, 2].min(initial=start_ns))
        every.append(rows)
    with replacing(path) as file:
        if path.suffix == ".gz":
            with gzip.open(file, "wt", encoding="utf-8", compresslevel=3) as text:
                _write_events(text, every, int(start_ns), world.virtual_ranks, lost)
            return
        lines = _Text(file)
        _write_events(lines, every, int(start_ns), world.virtual_ranks, lost)


class _Text:
    """Writes text into a file of bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.write(text.encode())


def _write_events(
    to: Any, every: list[Rows], start_ns: int, virtual_ranks: int, lost: list[int]
) -> None:
    """Write the events of all processes, from start_ns on, in the order of their beginnings."""
    about = {"displayTimeUnit": "ns", "otherData": {"events left out": sum(lost)}}
    to.write(json.dumps(about)[:-1] + ', "traceEvents": [')
    for process, rows in enumerate(every):
        ranks = range(process * virtual_ranks, (process + 1) * virtual_ranks)
        name = f"rank {ranks[0]}" if virtual_ranks == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        head = {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        to.write(("," if process else "") + "\n" + json.dumps(head))
        order = np.lexsort((-rows[:, 3], rows[:, 2]))
        for kind, thread, begin, end, amount in rows[order].tolist():
            args = f',"args":{{"amount":{amount}}}' if amount else ""
            to.write(
                f',\n{{"ph":"X","name":"{KINDS[kind]}","cat":"{KINDS[kind]}","pid":{process},'
                f'"tid":{thread},"ts":{(begin - start_ns) / 1000:.3f},'
                f'"dur":{(end - begin) / 1000:.3f}{args}}}'
            )
    to.write("\n]}\n")
