"""Random all-reduces against the simulator for a set time: make soak MINUTES=30.

All processes draw the same: how many of them take part, sizes from 0 to 2**26 values, wires, floats
and integers, with everything that goes with them, in how many calls, with or without NaN. One of
them simulates each call on one thread and compares bit for bit, errors too; the others compare
checksums. Every minute the memory is looked at; it must not have grown at the end.
"""

import argparse
import ctypes
import gc
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpdhpc.collectives.allreduce import Allreduce, Prepared
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.engine import BufferPool
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.recorded import Recordings
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import INTEGERS, MICROSCALING, TILE, tiles
from cpdhpc.methods import EXACT
from cpdhpc.ops import set_kernel_threads
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, np.dtype[np.float32]]
MOST = 1 << 26  # values
EDGES = (0, 1, TILE - 1, TILE, TILE + 1)  # sizes drawn more often
FLOATS = ("e4m3", "e5m2", "e3m0", "e2m1fn", "e4m3fn", "e1m3", "e5m6", "fp16", "bf16")
WIRES = ("raw", "raw", *FLOATS, *INTEGERS, *MICROSCALING)
SCALINGS = (None, "none", "static:3", "aps", "tile", "block32", "block16")
ROUNDINGS = ("nearest", "zero", "stochastic")
OVERFLOWS = ("saturate", "saturate", "inf")


class Draw(NamedTuple):
    """An all-reduce, called a few times with other values of as many ranks."""

    ranks: int
    n: int
    method: Allreduce
    segments: tuple[Segment, ...]
    way: str
    threads: int
    calls: int
    poison: float  # put at a random place of a random rank; 0: nothing
    seed: int


def draw(rng: np.random.Generator, size: int, ways: Sequence[str]) -> Draw:
    """Return an all-reduce of up to so many ranks; sizes are evenly spread over the binades.

    ways: the names of how it may be called
    """
    n = int(2 ** rng.uniform(0, np.log2(MOST)))
    n = int(rng.choice(EDGES)) if rng.random() < 0.1 else n
    return Draw(
        ranks=int(rng.integers(1, size + 1)),
        n=n,
        method=draw_method(rng),
        segments=draw_segments(rng, n),
        way=str(rng.choice(list(ways))),
        threads=int(rng.integers(1, 4)),
        calls=int(rng.integers(1, 4)),
        poison=float(rng.choice([np.nan, np.inf])) if rng.random() < 0.05 else 0.0,
        seed=int(rng.integers(1 << 30)),
    )


def draw_method(rng: np.random.Generator) -> Allreduce:
    """Return choices that go together."""
    while True:
        algorithm = str(rng.choice(list(SCHEDULES)))
        accumulates = [None, EXACT, *SCHEDULES[algorithm].accumulates]
        chosen: dict[str, Any] = {
            name: values[int(rng.integers(len(values)))]
            for name, values in {
                "wire": WIRES,
                "scaling": SCALINGS,
                "accumulate": accumulates,
                "op": ("sum", "mean"),
                "rounding": ROUNDINGS,
                "overflow": OVERFLOWS,
                "headroom": ("n", "sqrt", "none"),
            }.items()
        }
        try:
            return Allreduce(algorithm=algorithm, seed=int(rng.integers(1 << 30)), **chosen)
        except ValueError:
            continue


def draw_segments(rng: np.random.Generator, n: int) -> tuple[Segment, ...]:
    """Return up to four parts of n values; some end within a tile that nobody owns the rest of."""
    count = tiles(n)
    borders = sorted({0, count, *rng.integers(0, count + 1, rng.integers(4)).tolist()})
    parts = []
    for i, (first, last) in enumerate(pairwise(borders)):
        stop = n if last == count else last * TILE - int(rng.integers(2)) * 7
        parts.append(Segment(f"part {i}", first * TILE, stop))
    return tuple(parts) or (Segment("nothing", 0, 0),)


def values(seed: Sequence[int], n: int) -> Array:
    """float32[n] over many binades, some zeros; long ones repeat a block that is no whole tiles."""
    rng = np.random.default_rng(seed)
    block = min(n, (1 << 20) - 317)
    x = rng.standard_normal(block, np.float32) * np.exp2(rng.integers(-30, 5, block))
    x[rng.random(block) < 0.05] = 0
    return np.resize(x.astype(np.float32), n)


def contribution(d: Draw, number: int, rank: int) -> Array:
    """Return the values of a rank in a call."""
    x = values((d.seed, number, rank), d.n)
    rng = np.random.default_rng((d.seed, number))
    where, place = int(rng.integers(d.ranks)), int(rng.integers(max(1, d.n)))
    if d.poison and d.n and where == rank:
        x[place] = d.poison
    return x


# What is no leak. Buffers that are kept grow until the largest of each kind has been drawn, which
# took 25 minutes of 30; objects until all caches of formats and methods are full, as long.
PAGE_BYTES = 4096
SHARE, GROWTH = 0.02, {"kept_mib": 256, "other_mib": 8, "objects": 5000}


class Look(NamedTuple):
    """What a process has in use between two calls.

    kept_mib: buffers that worlds keep, in memory of their own and in memory that the node shares
    other_mib: all other memory of its own; objects: of Python
    """

    kept_mib: float
    other_mib: float
    objects: int


def is_own(world: World, array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is no memory that the node shares, whose blocks are counted as a whole."""
    shared = world.shared()
    return shared is None or shared.note(array) is None


def forget(world: World) -> None:
    """Free what a world has recorded: the last sizes drawn, so between 10 and 500 thousand objects.

    Collective, as all must know the same.
    """
    recordings = world.cache.get(Recordings, Recordings)
    for entry in recordings.values():
        entry.free()
    recordings.clear()
    if world.board is not None:
        world.board.known.clear()


def look(worlds: Collection[World]) -> Look:
    """Look at the memory of this process, without what is recorded. Collective.

    What is free but held by glibc's malloc goes back first: it depends on the last calls. All pages
    that are kept are touched: else they would count as other memory when a call first needs them.
    """
    for world in worlds:
        forget(world)
    kept = [
        array.reshape(-1).view(np.uint8)
        for world in worlds
        for _, each in world.cache.items()
        if isinstance(each, BufferPool)
        for array in each._arrays
        if is_own(world, array)
    ]
    for array in kept:
        array[::PAGE_BYTES] |= 0  # an assignment of itself would be left out
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    own_bytes = 1024 * int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0])
    kept_bytes, shared_bytes = sum(array.nbytes for array in kept), 0
    for world in worlds:
        shared = world.shared()
        shared_bytes += 0 if shared is None else sum(b.memory.nbytes for b in shared._blocks)
    mib = 1 << 20
    objects = sys.getallocatedblocks()
    return Look((kept_bytes + shared_bytes) / mib, (own_bytes - kept_bytes) / mib, objects)


def grown(looks: Sequence[Look]) -> list[str]:
    """Return what there is more of in the last third of the looks than in the middle third."""
    third = len(looks) // 3
    if not third:
        return []
    middle = np.median(looks[-2 * third : -third], axis=0)
    last = np.median(looks[-third:], axis=0)
    return [
        f"{name}: {before:.0f}, then {after:.0f}"
        for name, before, after in zip(Look._fields, middle, last, strict=True)
        if after > before * (1 + SHARE) + GROWTH[name]
    ]


PERIOD_S = 60.0  # between two looks at the memory, and a tenth of the whole time at most
TIMEOUT_S = 1800.0  # a busy machine is no difference

Call = Callable[[Array, int], Array]  # (x of this rank, iteration) -> result


@contextmanager
def plain(d: Draw, world: World) -> Iterator[Call]:
    """Let each call make the array, or give it the same one every time, or what is summed."""
    another = np.full(d.n, np.nan, np.float32)

    def call(x: Array, iteration: int) -> Array:
        outs = {"returned": None, "into another": [another], "in place": [x]}[d.way]
        how: dict[str, Any] = {"iteration": iteration, "segments": d.segments}
        return d.method.run(world, [x], outs, **how).arrays[0]

    yield call


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
    **dict.fromkeys(("returned", "into another", "in place"), plain),
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
