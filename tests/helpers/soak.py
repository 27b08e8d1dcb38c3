"""Random all-reduces against the simulator for a set time: make soak MINUTES=30.

All processes draw the same: how many of them take part, sizes from 0 to 2**26 values, wires, floats
and integers, with everything that goes with them, in how many calls, with or without NaN. One of
them simulates each call on one thread and compares bit for bit, errors too; the others compare
checksums. Every minute the memory is looked at; it must not have grown at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from soak_draws import MOST, Array, Draw, contribution, draw
from soak_memory import Look, grown, look

from cpdhpc.collectives.allreduce import Allreduce, Prepared
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.ops import set_kernel_threads
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

PERIOD_S = 60.0  # between two looks at the memory, and a tenth of the whole time at most
TIMEOUT_S = 1800.0  # a busy machine is no difference

Call = Callable[[Array, int], Array]  # (x of this rank, iteration) -> result


@contextmanager
def returned(d: Draw, world: World) -> Iterator[Call]:
    """Let the call make the array."""
    yield lambda x, iteration: d.method.run(
        world, [x], iteration=iteration, segments=d.segments
    ).arrays[0]


@contextmanager
def into_another(d: Draw, world: World) -> Iterator[Call]:
    """Give the array, the same one every time."""
    out = np.full(d.n, np.nan, np.float32)
    yield lambda x, iteration: d.method.run(
        world, [x], [out], iteration=iteration, segments=d.segments
    ).arrays[0]


@contextmanager
def in_place(d: Draw, world: World) -> Iterator[Call]:
    """Overwrite what is summed."""
    yield lambda x, iteration: d.method.run(
        world, [x], [x], iteration=iteration, segments=d.segments
    ).arrays[0]


@contextmanager
def prepared(d: Draw, world: World) -> Iterator[Call]:
    """Prepare in the first call, so that its errors are that call's."""
    given, made = np.empty(d.n, np.float32), list[Prepared]()

    def call(x: Array, iteration: int) -> Array:
        if not made:
            made.append(d.method.prepare(world, [given], segments=d.segments))
        np.copyto(given, x)
        return made[0].run(iteration=iteration).arrays[0]

    yield call
    for each in made:
        each.free()


WAYS: dict[str, Callable[[Draw, World], AbstractContextManager[Call]]] = {
    "returned": returned,
    "into another": into_another,
    "in place": in_place,
    "prepared": prepared,
}


def outcome(run: Callable[[], Array]) -> Array | str:
    """Return the result, or the error that all ranks raise."""
    try:
        return run()
    except (NonFiniteGradient, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def same(a: Array | str, b: Array | str) -> bool:
    """Whether all bits are equal, or both are the same error."""
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a == b
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def check(world: World, d: Draw, call: Call, number: int, iteration: int) -> None:
    """All-reduce over world and compare; the job ends where anything differs. Collective."""
    own = contribution(d, number, world.process)
    x = own.copy()
    got = outcome(lambda: call(x, iteration))
    where = f"soak: iteration {iteration}, call {number} of {d}"
    if world.process == iteration % d.ranks:
        xs = [contribution(d, number, rank) for rank in range(d.ranks)]
        simulated = Loopback(d.ranks, nodes=world.nodes)
        how: dict[str, Any] = {"iteration": iteration, "segments": d.segments}
        set_kernel_threads(1)
        wanted = outcome(lambda: d.method.run(simulated, xs, **how).arrays[0])
        set_kernel_threads(d.threads)
        if not same(got, wanted):
            world.abort(f"{where}: {got} is not {wanted}")
    overwritten = d.way == "in place" and not isinstance(got, str)
    if not overwritten and not same(x, own):
        world.abort(f"{where}: what was summed is another array now")
    digest = got if isinstance(got, str) else zlib.crc32(got.data)
    if len(set(world.gather(digest))) > 1:
        world.abort(f"{where}: ranks differ")


def largest() -> Iterator[Allreduce]:
    """Yield what takes most buffers, which worlds keep."""
    for algorithm, schedule in SCHEDULES.items():
        yield Allreduce("raw", algorithm)
        yield Allreduce("int16", algorithm)
        for accumulate in schedule.accumulates:
            yield Allreduce("bf16", algorithm, "tile", accumulate)


def soak(world: World, worlds: dict[int, World], minutes: float, seed: int) -> list[Look]:
    """All-reduce until the time is over; return what memory was in use when. Collective."""
    rng, looks = np.random.default_rng(seed), list[Look]()
    period_s = min(PERIOD_S, 6 * minutes)
    start_s = look_s = time.monotonic()
    members = {ranks: each for ranks, each in worlds.items() if world.process < ranks}
    for ranks, each in worlds.items():
        for method in largest() if ranks in members else ():
            for _ in range(2):  # by the engine, and as a call list
                method.run(each, [np.ones(MOST // 2, np.float32)])
        world.barrier("soak: buffers")  # else who is only in the last waits for all the others
    draws = calls = size_bytes = 0
    while True:
        late = [time.monotonic() > at for at in (start_s + 60 * minutes, look_s + period_s)]
        over, due = world.max(np.array(late, np.int64))
        if over or due:
            look_s = time.monotonic()
            looks.append(look(members.values()))
            show(
                world,
                f"{(look_s - start_s) / 60:.1f} min: {draws} all-reduces, {calls} calls, "
                f"{size_bytes / 2**30:.1f} GiB of float32",
                looks[-1],
            )
        if over:
            return looks
        d = draw(rng, world.processes, list(WAYS))
        set_kernel_threads(d.threads)
        if d.ranks in members:
            with WAYS[d.way](d, members[d.ranks]) as call:
                for number in range(d.calls):
                    check(members[d.ranks], d, call, number, calls + number)
            del call  # and its arrays
        draws, calls = draws + 1, calls + d.calls
        size_bytes += 4 * d.n * d.ranks * d.calls


def show(world: World, done: str, last: Look) -> None:
    """Print what is done and what all ranks have in use. Collective."""
    everyone = world.gather(last)
    if world.process == 0:
        used = "; ".join(f"{each.kept_mib:.0f} + {each.other_mib:.0f}" for each in everyone)
        print(f"{done}; MiB kept + other: {used}; objects {last.objects}", flush=True)


def main() -> None:
    """Soak, and end with status 1 where memory has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    world = World(timeout_s=TIMEOUT_S)
    from mpi4py import MPI

    worlds = {
        p: World(MPI.COMM_WORLD.Split(world.process < p, world.process), timeout_s=TIMEOUT_S)
        for p in range(1, world.processes + 1)
    }
    looks = soak(world, worlds, arguments.minutes, arguments.seed)
    found = [f"soak: rank {world.process}: grown: {what}" for what in grown(looks)]
    found = [line for lines in world.gather(found) for line in lines]
    if world.process == 0:
        print("\n".join(["soak: no difference", *found]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
