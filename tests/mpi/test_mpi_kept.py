"""What a world keeps of all-reduces has a bound, however many sizes a job has."""

import tracemalloc

import numpy as np
import pytest

from cpdhpc.collectives import method as choices
from cpdhpc.collectives import recorded
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.engine import BufferPool
from cpdhpc.collectives.recorded import KEPT, Recordings, forget
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import TILE
from cpdhpc.world.mpi import World

WAYS = [(name, way) for name, row in SCHEDULES.items() for way in (*row.accumulates, "exact")]


@pytest.fixture(params=[-1, 1 << 62], ids=["far", "near"])
def distance(request, monkeypatch):
    """Have lists taken for those of cores without a cache in common, or with one: as measured,
    a list may be either, and each kind has buffers of its own."""
    monkeypatch.setattr(recorded, "FAR_NS", request.param)


def buffer_bytes(world):
    """Bytes of the buffers that a world keeps, and how much of the node's memory it has taken."""
    kept = sum(
        array.nbytes
        for _, each in world.cache.items()
        if isinstance(each, BufferPool)
        for array in each._arrays
    )
    shared = world.shared()
    if shared is None:
        return kept, 0
    free = sum(stop - start for _, start, stop in shared._free)
    return kept, sum(block.memory.size for block in shared._blocks) - free


@pytest.mark.two_ranks
@pytest.mark.usefixtures("distance")
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_buffers_are_those_of_the_largest_size(world, algorithm):
    """A buffer that is too small becomes as large as is asked for, or twice as large as it was.

    So it has at most twice what was ever asked for, and with all that it was before, which lists
    may still use in memory of the node, four times. A smaller size may ask for up to twice as much:
    it has fewer parts, each of half a part to a part.
    """
    way, most = SCHEDULES[algorithm].accumulates[-1], 2 * KEPT
    method = Allreduce("e4m3", algorithm, "aps", way)
    x, found = np.ones(TILE * most, np.float32), []
    for sizes in ([most], range(2, most + 1, 2)):
        own = World(timeout_s=world.timeout_s)
        for size in sizes:
            for _ in range(2):
                method.run(own, [x[: TILE * size]])
        found.append(buffer_bytes(own))
        assert len(own.cache.get(Recordings, Recordings)) <= KEPT
        own.free()
    (kept, taken), (most_kept, most_taken) = found
    assert 0 < most_kept <= 4 * kept and most_taken <= 8 * taken, found


@pytest.mark.two_ranks
@pytest.mark.usefixtures("distance")
@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_a_recording_has_no_arrays_of_its_own(world, algorithm, accumulate):
    """Of a size below one that came before: it has the buffers of that, and objects of Python."""
    method, own = Allreduce("e4m3", algorithm, "aps", accumulate), World(timeout_s=world.timeout_s)
    x = np.ones(1 << 20, np.float32)
    out = np.empty_like(x)

    def call(n, times):
        for _ in range(times):
            method.run(own, [x[:n]], [out[:n]])

    call(x.size, 2)
    call(x.size - TILE, 1)
    tracemalloc.start()
    call(x.size - TILE, 1)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(own.cache.get(Recordings, Recordings)) == 2
    assert grown < x.nbytes / 16, "else of half of x or more: the chunks of a rank"
    own.free()


@pytest.mark.two_ranks
def test_recordings_are_few_and_small(world, monkeypatch):
    own = World(timeout_s=world.timeout_s, share_memory=False)
    method = Allreduce("raw", "tree")
    x, recordings = np.ones(2 * KEPT, np.float32), own.cache.get(Recordings, Recordings)

    def call(n):
        for _ in range(3):
            assert (method.run(own, [x[:n]]).arrays[0] == own.size).all()
        return recordings[method, n].recording

    assert all([call(n) is not None for n in range(1, 2 * KEPT)])
    assert len(recordings) == KEPT and own.cache.held == (KEPT if own.size > 1 else 0)
    own.nodes = tuple(range(own.ranks))
    monkeypatch.setattr(choices, "MOST_RANKS", own.ranks - 1)
    if own.ranks > 1:  # too many on several nodes
        with pytest.raises(KeyError):
            call(2 * KEPT)
    own.free()


@pytest.mark.two_ranks
def test_what_is_forgotten_is_recorded_anew(world):
    """Calls that were known by their arguments, too; others stay."""
    own = World(timeout_s=world.timeout_s)
    method, other, x = (
        Allreduce("e4m3", "rhd"),
        Allreduce("raw", "ring"),
        np.ones(5 * TILE, np.float32),
    )
    kept = own.cache.get(Recordings, Recordings)
    for _ in range(4):
        for each in (method, other):
            assert (each.run(own, [x]).arrays[0] == own.ranks).all()
    first, stays = (kept[each, x.size].recording for each in (method, other))
    forget(own, method, x.size)
    forget(own, method, x.size + 1)  # of which nothing is known
    assert first.freed and not stays.freed and (method, x.size) not in kept
    for _ in range(3):
        assert (method.run(own, [x]).arrays[0] == own.ranks).all()
    again = kept[method, x.size].recording
    assert again is not first and not again.freed
    own.free()
