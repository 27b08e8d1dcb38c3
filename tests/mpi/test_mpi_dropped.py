"""What is made and dropped, without free, leaves no descriptor, thread or memory."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.recorded import empty_shared
from cpdhpc.darray import Box, Layout, WindowPlan
from cpdhpc.torch import GradientReducer
from cpdhpc.world.mpi import World

TIMES = 200
X = np.ones(5000, np.float32)
COMMUNICATORS_KIB = 16 * TIMES  # Open MPI keeps some 10 KiB of each that is not freed


def of_world(world: World) -> None:
    Allreduce("raw", "ring").prepare(World(), [X]).run()


def of_part(world: World) -> None:
    part = world.split(0)
    Allreduce("raw", "direct").prepare(part, [X]).run()
    plan(part)


def plan(world: World) -> WindowPlan:
    layout = Layout.grid((64 * world.size,), (world.size,))
    start, stop = layout.owner(world.rank)
    found = WindowPlan(world, layout, Box((start[0] - 1,), (stop[0] + 1,)), "wrap")
    window = found.exchange(np.full(found.owned.shape, world.rank))
    neighbours = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    assert (window[0], window[-1]) == neighbours
    found.accumulate(window)
    return found


def prepared(world: World) -> None:
    Allreduce("raw", "ring").prepare(world, [X.copy()]).run()


def shared(world: World) -> None:
    x = empty_shared(world, 100_000)
    x[:] = 1
    out = Allreduce("raw", "direct").prepare(world, [x]).run().arrays[0]
    assert (out == world.size).all()


def reducer(world: World, overlap: bool = False) -> None:
    model = torch.nn.Linear(100, 100)
    found = GradientReducer(model, world, overlap=overlap)
    model(torch.ones(2, 100)).sum().backward()
    found.reduce()


def overlapping(world: World) -> None:
    reducer(world, True)


DROPPED: dict[Callable[[World], Any], int] = {  # -> KiB that may stay
    of_world: COMMUNICATORS_KIB,
    of_part: COMMUNICATORS_KIB + 2048,
    plan: 2048,
    prepared: 2048,
    shared: 4096,
    reducer: 4096,
    overlapping: 8192,
}


def held() -> tuple[int, int, int]:
    """Descriptors, threads and KiB of this process."""
    gc.collect()
    status = Path("/proc/self/statm").read_text().split()
    pages = int(status[1]) * os.sysconf("SC_PAGESIZE") // 1024
    files, threads = (len(list(Path(f"/proc/self/{of}").iterdir())) for of in ("fd", "task"))
    return files, threads, pages


@pytest.mark.parametrize("make", DROPPED, ids=lambda make: make.__name__)
def test_what_is_dropped_goes(world: World, make: Callable[[World], Any]) -> None:
    for _ in range(10):
        make(world)
    before = held()
    for number in range(TIMES):
        make(world)
        if number % 10 == 0:
            gc.collect()
    world.barrier()
    found, end = False, time.monotonic() + 20  # a thread that is asked to end takes its time
    while not found and time.monotonic() < end:
        files, threads, size_kib = (b - a for a, b in zip(before, held(), strict=True))
        found = files <= 12 and threads <= 5 and size_kib <= DROPPED[make]
        time.sleep(0 if found else 0.05)
    everyone = world.gather((found, files, threads, size_kib))
    assert all(each[0] for each in everyone), everyone


def test_memory_of_an_array_stays_while_a_part_of_it_is_there(world: World) -> None:
    part = empty_shared(world, 1000)[10:20]
    part[:] = 7
    for _ in range(5):
        empty_shared(world, 1000)[:] = 3
        gc.collect()
    assert all(world.gather(bool((part == 7).all())))


def test_a_plan_that_one_rank_drops_early_is_read_by_the_others(world: World) -> None:
    """The first rank drops it behind begin of the others; what they wait for stays."""
    kept = []
    for number in range(20):
        found = plan(world)
        x = np.full(found.owned.shape, 100 * number + world.rank)
        handle = found.begin(x)
        if world.rank == 0:
            y = handle.finish()
            del handle, found
        later = plan(world)
        if world.rank:
            y = handle.finish()
        kept.append(later)
        assert all(world.gather(bool(y[0] == 100 * number + (world.rank - 1) % world.size)))
