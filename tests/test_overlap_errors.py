"""What goes wrong while gradients are reduced in a thread is told, and nothing hangs."""

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from reducing import Noted, active, backward, gradients, model_of
from training import small_job

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress.base import Mean
from cpdhpc.compress.none import NoCompression
from cpdhpc.config import ConfigError, UserError
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback, Ranks


@every("overlap", [False, True])
@every("layer", ["3.weight", "1.bias", "0.weight"])
def test_an_error_in_a_bucket_is_raised_and_the_next_step_goes_well(
    layer: str, overlap: bool
) -> None:
    model = model_of()
    noted = Noted(fails_at=layer)
    reducer = GradientReducer(model, Loopback(), noted, bucket_mib=1e-6, overlap=overlap)
    with reducer:
        for _ in range(2):
            noted.calls.clear()
            backward(model)
            before = gradients(model)
            with pytest.raises(OSError, match=f"at {layer}"):
                reducer.reduce()
            assert gradients(model) == before
            assert noted.calls[-1] == (layer,)  # none after it, on any rank
        reducer.aggregator = Noted()
        reducer.reduce()
        assert gradients(model) == before  # the mean over one rank


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_in_the_second_bucket(overlap: bool) -> None:
    model = model_of()
    reducer = GradientReducer(model, Loopback(), bucket_mib=1e-6, overlap=overlap)
    model[3].weight.register_hook(lambda gradient: gradient * math.nan)
    with reducer:
        backward(model)
        before = gradients(model)
        with pytest.raises(NonFiniteGradient, match=r"'3\.weight' on rank 0"):
            reducer.reduce()
    assert gradients(model) == before


def test_the_end_of_the_job_within_the_thread_is_not_lost() -> None:
    """World ends the job by SystemExit where MPI_Abort returns."""

    @dataclass(frozen=True)
    class Aborts(NoCompression):
        def aggregate(self, gradients: Any, bucket: Any, context: Any) -> Mean:
            context.world.abort("too late")

    model = model_of()
    with GradientReducer(model, Loopback(), Aborts(), overlap=True) as reducer:
        backward(model)
        with pytest.raises(SystemExit):
            reducer.reduce()


def test_a_second_backward_before_reduce_is_refused() -> None:
    model = model_of()
    with GradientReducer(model, Loopback(), overlap=True) as reducer:
        backward(model)
        backward(model)
        before = gradients(model)
        with pytest.raises(RuntimeError, match=r"'3\.(weight|bias)' on rank 0 has a second grad"):
            reducer.reduce()
        assert gradients(model) == before
        backward(model)
        reducer.reduce()


def test_gradients_that_were_set_by_hand_are_reduced_too() -> None:
    model = model_of()
    with GradientReducer(model, Loopback(), overlap=True) as reducer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        reducer.reduce()
        assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)


def test_a_closed_reducer_lets_go_of_the_model() -> None:
    model = model_of()
    reducer = GradientReducer(model, Loopback(), overlap=True)
    reducer.close()
    reducer.close()
    backward(model)
    backward(model)
    assert active() == 0
    with pytest.raises(RuntimeError, match="reducer is closed"):
        reducer.reduce()


def test_an_error_leaves_the_block_at_once_while_a_bucket_is_under_way() -> None:
    model, go_on = model_of(), threading.Event()

    @dataclass(frozen=True)
    class Waits(NoCompression):
        def aggregate(self, *args: Any, **how: Any) -> Mean:
            assert go_on.wait(1800)
            return super().aggregate(*args, **how)

    reducer = GradientReducer(model, Loopback(), Waits(), bucket_mib=1e-6, overlap=True)
    with pytest.raises(KeyError, match="of the user"), reducer:
        backward(model)
        raise KeyError("of the user")
    go_on.set()


def test_overlap_needs_one_rank_a_process_and_a_thread_level() -> None:
    with pytest.raises(UserError, match="virtual_ranks=2: should be 1"):
        GradientReducer(model_of(), Loopback(2), overlap=True)
    world = World()
    assert world.thread_level in ("serialized", "multiple")
    GradientReducer(model_of(), world, overlap=True).close()
    for level in ("single", "funneled"):
        world.thread_level = level
        GradientReducer(model_of(), world).close()
        with pytest.raises(UserError, match=f"level '{level}'.*mpi4py.rc.thread_level"):
            GradientReducer(model_of(), world, overlap=True)
    world.free()


def test_overlap_is_chosen_where_messages_leave_a_node_before_backward_ends() -> None:
    """Within a node, and of one bucket, nothing is hidden; some worlds allow none."""

    def chosen(world: Ranks, bucket_mib: float = 0.001) -> bool:
        with GradientReducer(model_of(), world, overlap=None, bucket_mib=bucket_mib) as reducer:
            return reducer._overlap is not None

    world, several = Loopback(), Loopback(2, nodes="ab")
    assert not chosen(world) and not chosen(several)
    world.nodes = (0, 1)  # as of a process of two
    assert chosen(world) and not chosen(world, 25.0)
    world.thread_level = "funneled"
    assert not chosen(world)


def test_the_world_belongs_to_the_thread_until_reduce() -> None:
    model, world = model_of(), World()
    with GradientReducer(model, world, overlap=True) as reducer:
        backward(model)
        for call in (
            world.barrier,
            lambda: world.gather(0),
            lambda: world.max(np.zeros(1, np.int64)),
        ):
            with pytest.raises(RuntimeError, match=r"another thread: call reduce\(\) first"):
                call()
        reducer.reduce()
        assert world.gather(5) == [5]
    world.free()


def test_a_job_says_what_overlap_and_gpu_direct_need() -> None:
    with pytest.raises(ConfigError, match=r"train\.overlap=true needs virtual_ranks=1"):
        small_job(train={"overlap": True, "virtual_ranks": 2})
    with pytest.raises(ConfigError, match=r"train\.gpu_direct='required' needs device='gpu'"):
        small_job(train={"gpu_direct": "required"})
