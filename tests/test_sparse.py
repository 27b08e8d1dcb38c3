"""Collectives for compressors, simulated, against NumPy, and what they send."""

import numpy as np
import pytest
from every import every
from sparse_cases import calls, same, wrong_calls

from cpdhpc.collectives import sparse
from cpdhpc.world.ranks import Loopback


@every("ranks", range(1, 10))
def test_against_numpy(ranks):
    for root_rank in {0, ranks // 2, ranks - 1}:
        for name, (got, expected) in calls(Loopback(ranks), root_rank, 400).items():
            assert same(got, expected), name


def test_bytes_and_messages_of_allgather():
    world = Loopback(6)
    sizes = [10, 0, 7, 1, 0, 4]
    sparse.allgather(world, [np.zeros(size, np.int16) for size in sizes])
    assert world.messages_sent.max() == 3  # ceil(log2(6))
    assert world.bytes_sent.sum() == 2 * 5 * sum(sizes)  # everybody gets the others' arrays once


def test_bytes_and_messages_of_broadcast():
    world = Loopback(6)
    sparse.broadcast(world, [None, np.zeros(10, np.float64), *[None] * 4], 1)
    assert world.messages_sent.tolist() == [0, 3, 0, 1, 0, 1]  # from 1 to 5, 3, 2; 3 to 4; 5 to 0
    assert world.bytes_sent.sum() == 80 * 5


@pytest.mark.parametrize("n, size_bytes", [(8, 3 * 8 * 8), (1 << 12, 2 * 3 * 8 * (1 << 10))])
def test_bytes_of_sum(n, size_bytes):
    world = Loopback(4)
    sparse.sum(world, [np.ones(n)] * 4)
    assert world.bytes_sent.tolist() == [size_bytes] * 4


def test_what_is_given_is_not_touched_and_what_comes_is_new():
    world = Loopback(3)
    given = [np.full(4, rank, np.float32) for rank in range(3)]
    before = [each.copy() for each in given]
    for got in (*sparse.allgather(world, given), sparse.sum(world, given)):
        got[:] = 9
    assert same(given, before)
    strided = [np.arange(8, dtype=np.int64)[::2]] * 3
    assert same(sparse.allgather(world, strided), [np.arange(0, 8, 2)] * 3)
    assert same([sparse.sum(world, strided)], [3 * np.arange(0, 8, 2)])
    leader = np.arange(5)[::-1]
    assert sparse.broadcast(world, [None, leader, None], 1) is leader


def test_sums_overflow_as_their_dtypes_do():
    world = Loopback(2)
    huge = np.full(2, np.finfo(np.float32).max)
    assert np.isinf(sparse.sum(world, [huge, huge])).all()
    most = np.full(1, np.iinfo(np.int64).max)
    assert sparse.sum(world, [most, np.ones(1, np.int64)])[0] == np.iinfo(np.int64).min


@every("number", range(len(wrong_calls(Loopback(3), True))))
def test_wrong_arguments(number):
    world = Loopback(3)
    call, error, words = wrong_calls(world, True)[number]
    with pytest.raises(error, match=words):
        call()
    assert world.messages_sent.sum() == 0
    wrong_calls(world, False)[number][0]()


def test_arrays_that_do_not_go_together():
    world, x = Loopback(2), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="rank 1 has dtype float64: the first has float32"):
        sparse.allgather(world, [x, x.astype(np.float64)])
    with pytest.raises(ValueError, match=r"rank 1 has shape \(2,\), of rank 0 \(3,\)"):
        sparse.sum(world, [x, x[:2]])
    with pytest.raises(
        ValueError, match=r"neighbours: arrays are float32\[2\], float32\[3\]: with"
    ):
        sparse.neighbours(world, [{1: x}, {0: x[:2]}], [[1], [0]])
    with pytest.raises(
        ValueError, match=r"neighbours: sources of rank 1: \[1\]: must be others of"
    ):
        sparse.neighbours(world, [{1: x}, {0: x}], [[1], [1]])
    with pytest.raises(ValueError, match="rank 1 has an array: only the root"):
        sparse.broadcast(world, [x, x], 0)
