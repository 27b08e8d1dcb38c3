"""torch's own tests of torch.distributed, over MPI: make test-torch runs all of them."""

import shutil
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch_suite import NOT_OURS, case, names

import cpdhpc.torch

assert cpdhpc.torch, "makes the backend known"

SKIPS = range(70, 100)  # statuses by which torch's tests say that they cannot run here
FAST = (  # in make test, too: one of each kind, that takes less than a second
    *("test_destroy_group", "test_get_rank_size_full_group", "test_Backend_enum_class"),
    *("test_send_recv", "test_send_recv_any_source", "test_send_recv_with_tag_torch_profiler"),
    *("test_isend", "test_irecv", "test_batch_isend_irecv_gloo", "test_broadcast"),
    *("test_reduce_sum", "test_reduce_full_group_product", "test_all_reduce_min"),
    *("test_all_reduce_sum_async", "test_all_reduce_sum_complex", "test_sparse_all_reduce_sum"),
    *("test_all_reduce_coalesced_max", "test_scatter_checks", "test_scatter_complex"),
    *("test_gather", "test_all_gather_complex", "test_all_gather_coalesced_with_empty"),
    *("test_all_to_all", "test_all_to_all_single_unequal_split_complex", "test_barrier"),
    *("test_all_gather_object_subgroup", "test_scatter_object_list", "test_get_future"),
    *("test_accumulate_gradients_no_sync_allreduce_with_then_hook", "test_new_subgroups"),
)


@pytest.fixture(scope="module")
def folder(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder of all ranks."""
    yield world.gather(str(tmp_path_factory.mktemp("suite")))[0]


def cases() -> list[Any]:
    """The tests, all but the fast ones marked slow."""
    return [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in names()
        if name not in NOT_OURS
    ]


@pytest.mark.parametrize("name", cases())
def test_of_torch(name: str, folder: str, world: Any) -> None:
    shutil.rmtree(Path(folder) / "barrier", ignore_errors=True)
    world.barrier()
    suite = case(world.rank, world.size, folder)
    if not hasattr(suite, name):
        pytest.skip("torch makes it where there are GPUs")
    (Path(folder) / "barrier").mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    suite.barriers.barrier_id = 0
    limit = timedelta(seconds=300)
    dist.init_process_group("cpdhpc", init_method="mpi://", timeout=limit)
    try:
        test = suite(name)
        test.setUp()
        getattr(test, name)()
    except unittest.SkipTest as reason:
        pytest.skip(str(reason))
    except SystemExit as end:
        if end.code not in SKIPS:
            raise
        pytest.skip(f"torch's status {end.code}")
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            dist.destroy_process_group()


def test_what_says_nothing_of_this_backend_is_still_there() -> None:
    assert set(NOT_OURS) | set(FAST) <= set(names())
