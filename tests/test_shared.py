"""Memory that processes share, here with two of them played by one process."""

import os
import pickle

import numpy as np
import pytest

from cpdhpc.ops.cpu import read_memory
from cpdhpc.world.node_memory import ALIGNED_BYTES, BLOCK_BYTES, Name, Shared, round_trip_ns, share
from cpdhpc.world.ranks import Loopback


@pytest.fixture
def two():
    """Two that have met."""
    pair = Shared(), Shared()
    for mine, other in (pair, pair[::-1]):
        assert mine.meet(1, other.name)
    yield pair
    for each in pair:
        each.free()


def test_a_payload_is_read_where_it_was_written(two):
    writer, reader = two
    for size in (1, ALIGNED_BYTES, 1000, BLOCK_BYTES + 1):
        payload = writer.take(size)
        payload[:] = np.arange(size, dtype=np.int64).view(np.uint8)[:size]
        came = reader.payload(writer.note(payload))
        assert np.array_equal(came, payload)
        payload[-1] += 1
        assert came[-1] == payload[-1], "the same memory, no copy"


def test_a_payload_can_be_handed_on(two):
    writer, reader = two
    payload = writer.take(3000)
    came = reader.payload(writer.note(payload))
    again = writer.payload(reader.note(came[1000:2000]))
    payload[1500] = 77
    assert again.size == 1000 and again[500] == 77


def test_arrays_do_not_touch(two):
    arrays = [two[0].take(size) for size in (1, 63, 64, 65, 5)]
    places = [array.__array_interface__["data"][0] for array in arrays]
    assert all(place % ALIGNED_BYTES == 0 for place in places)
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))


def test_what_is_not_shared_has_no_note(two):
    assert two[0].note(np.zeros(100, np.uint8)) is None
    assert two[0].note(two[1].take(100)) is None, "it knows the memory by its own address"


def test_a_stranger_is_not_met(two):
    name = two[1].name
    assert not two[0].meet(2, name._replace(secret=bytes(len(name.secret))))
    assert not two[0].meet(2, name._replace(descriptor=10_000)), "no such descriptor"


class Neighbours(Loopback):
    """The first of two processes of a node; sizes: of what it hands to the others."""

    def __init__(self):
        super().__init__(2, nodes=[0, 0])
        self.virtual_ranks, self.processes, self.sizes = 1, 2, []

    def gather(self, value, what="gather"):
        self.sizes.append(len(pickle.dumps(value)))
        return [value, value]

    def max(self, values, what="max"):
        self.sizes.append(values.nbytes)
        return values


def test_what_is_told_has_one_size_whatever_the_numbers_are(monkeypatch):
    """Steps count what they send, which is the same in all runs: pickled integers are not."""
    sizes, met = [], []
    monkeypatch.setattr(Shared, "meet", lambda self, process, name: met.append(name) or True)
    monkeypatch.setattr(Shared, "round_trip_ns", lambda self, process: trip_ns)
    for pid, trip_ns in ((7, 90), (300, 300), (70_000, 70_000), (4_000_000, 2**40)):
        name = Name(pid, pid, 2**47 + pid, bytes(16))
        monkeypatch.setattr(Shared, "name", name)
        world = Neighbours()
        shared, why = share(world, True)
        assert shared is not None, why
        monkeypatch.setattr(world, "shared", lambda: shared)  # noqa: B023
        assert round_trip_ns(world) == trip_ns and met[-1] == name
        sizes.append(world.sizes)
        shared.free()
    assert sizes == [sizes[0]] * 4


def test_memory_that_cannot_be_read_is_known(two):
    assert two[0].reads
    assert two[0].meet(2, two[1].name._replace(address=8)), "blocks are mapped all the same"
    assert not two[0].reads
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), 8, np.zeros(3, np.uint8))
    found = np.zeros(3, np.uint8)
    there = np.array([7, 8, 9], np.uint8)
    read_memory(os.getpid(), there.ctypes.data, found)
    assert found.tolist() == [7, 8, 9]


def test_free_closes_the_descriptors():
    shared = Shared()
    descriptor = shared.name.descriptor
    shared.free()
    with pytest.raises(OSError):
        os.fstat(descriptor)
