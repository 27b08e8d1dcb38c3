"""Under mpirun: one verdict for each test over all ranks, and worlds whose waits end."""

import sys
from functools import cache
from pathlib import Path

import pytest

TIMEOUT_S = 600.0  # of a machine that is slow, or does other things too


@cache
def verdict_world():
    """A world of its own, so that messages of tests cannot meet verdicts."""
    from cpdhpc.world.mpi import World

    return World(timeout_s=3 * TIMEOUT_S)


@pytest.fixture(scope="module")
def world():
    """All ranks, with a time-out that suits tests.

    One for each file, so that no messages of refused calls are left for other tests. It is not
    freed, because that waits until such messages are read.
    """
    from cpdhpc.world.mpi import World

    return World(timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def messages(world):
    """All ranks, every payload a message of MPI's."""
    from cpdhpc.world.mpi import World

    world = World(timeout_s=TIMEOUT_S, share_memory=False)
    yield world
    world.free()


@pytest.fixture
def folder(world, tmp_path):
    """Process 0's temporary folder, on all processes."""
    return Path(world.gather(str(tmp_path))[0])


@pytest.fixture(scope="module")
def group(world, tmp_path_factory):
    """torch's own processes, over gloo, beside MPI's."""
    import torch
    from torch import distributed

    directory = world.gather(str(tmp_path_factory.mktemp("store")))[0]
    store = distributed.FileStore(f"{directory}/store", world.processes)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bits of backward in both
    yield
    torch.set_num_threads(threads)
    distributed.destroy_process_group()


def pytest_itemcollected(item):
    """All tests of this folder need MPI."""
    item.add_marker(pytest.mark.mpi)


GPUS = [
    pytest.param((kind, direct), id=f"{kind}-{'direct' if direct else 'staged'}", marks=marks)
    for kind, marks in (("simulated", ()), ("gpu", pytest.mark.gpu))
    for direct in (False, True)
]


@pytest.fixture(scope="module", params=GPUS)
def gpu(request):
    """A GPU, or what stands in for it, whose memory goes to MPI directly or is staged."""
    from gpus import opened

    yield from opened(*request.param, request)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A phase of a test that fails on one rank fails on all, so that all go on together.

    A rank that waits in vain for one that has failed is ended by its world's time-out.
    """
    outcome = yield
    report = outcome.get_result()
    if not item.config.getoption("--with-mpi"):
        return
    if report.failed:  # at once: if the others wait for this rank, the job will be ended
        print(f"\n{item.nodeid} failed:\n{report.longreprtext}", file=sys.stderr, flush=True)
    mine = (item.nodeid, report.when, report.outcome)
    verdicts = verdict_world().gather(mine, "verdict")
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict[2] == "failed"]
    if any(verdict[:2] != mine[:2] for verdict in verdicts):
        report.outcome, report.longrepr = "failed", f"ranks run different tests: {verdicts}"
    elif failed and not report.failed:
        report.outcome, report.longrepr = "failed", f"failed on ranks {failed}"
        print(f"\n{item.nodeid} failed on ranks {failed}", file=sys.stderr, flush=True)
