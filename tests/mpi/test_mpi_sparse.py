"""Collectives for compressors over MPI: bits and bytes of the simulation, errors on all ranks."""

import importlib

import numpy as np
import pytest
from sparse_cases import calls, same, sent, wrong_calls

from cpdhpc.collectives import sparse
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

TIMEOUT_S = 600.0


@pytest.fixture(scope="module", params=[1, 2, 3])
def many(request):
    """Worlds of one to three ranks a process."""
    world = World(virtual_ranks=request.param, timeout_s=TIMEOUT_S)
    yield world
    world.free()


def test_real_is_simulated(many, monkeypatch):
    """Also where messages go in pieces."""
    for message_bytes in (1 << 30, 1000):
        monkeypatch.setattr(
            importlib.import_module("cpdhpc.world.mpi"), "MESSAGE_BYTES", message_bytes
        )
        for root_rank in {0, many.ranks // 2, many.ranks - 1}:
            simulated = Loopback(many.ranks)
            calls(simulated, root_rank, 5000)
            many.bytes_sent[:] = many.messages_sent[:] = 0
            for name, (got, expected) in calls(many, root_rank, 5000).items():
                assert same(got, expected), name
            hosted = slice(many.hosted.start, many.hosted.stop)
            assert sent(many) == tuple(each[hosted] for each in sent(simulated))


@pytest.mark.parametrize("number", range(len(wrong_calls(Loopback(), True))))
def test_an_error_on_one_rank_is_raised_on_all(many, number):
    many.messages_sent[:] = 0
    call, error, words = wrong_calls(many, many.process == many.processes - 1)[number]
    with pytest.raises(error, match=words):
        call()
    assert not many.messages_sent.any()


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ(many):
    last = many.process == many.processes - 1
    xs = [np.zeros(3, np.float64 if last else np.float32)] * many.virtual_ranks
    for call, words in (
        (
            lambda: sparse.allgather(many, xs),
            "allgather: arguments differ: dtype='float32' on rank 0, dtype='float64'",
        ),
        (
            lambda: sparse.sum(many, xs),
            "sum: arguments differ: dtype='float32' on rank 0, dtype='float64'",
        ),
        (
            lambda: sparse.broadcast(
                many, [xs[0] if rank == last else None for rank in many.hosted], int(last)
            ),
            "broadcast: ",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
