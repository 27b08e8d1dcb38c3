"""Memory that processes share, here with two of them played by one process."""

import os

import numpy as np
import pytest

from cpdhpc.ops.cpu import read_memory
from cpdhpc.world.node_memory import ALIGNED_BYTES, BLOCK_BYTES, Shared


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
