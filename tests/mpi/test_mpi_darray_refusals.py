"""Arguments that are wrong on one rank alone: the same error on all, before any time-out."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusing import refused

from cpdhpc.collectives.allreduce import allreduce
from cpdhpc.config import UserError
from cpdhpc.darray import Box, DistArray, Layout, WindowPlan, redistribute
from cpdhpc.torch import autograd
from cpdhpc.world.mpi import World


class Setting:
    """A plan whose windows are the whole domain, so that all ranks wait for one another."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.last = world, folder, world.rank == world.size - 1
        self.layout = Layout.grid((8,), (world.size,))
        self.plan = WindowPlan(world, self.layout, Box((-1,), (9,)), "wrap", name="all")
        self.x = np.ones(self.plan.owned.shape)
        self.y = np.ones(self.plan.window.shape)
        self.array = DistArray(world, self.layout, self.x)

    def bad(self, wrong: Any, right: Any) -> Any:
        return wrong if self.last else right


def readonly(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


EXCHANGES: dict[str, Callable[[Setting], Any]] = {
    "x list": lambda s: s.plan.exchange(s.bad([1.0], s.x)),
    "x shape": lambda s: s.plan.exchange(s.bad(np.ones(9), s.x)),
    "x objects": lambda s: s.plan.exchange(s.bad(s.x.astype(object), s.x)),
    "x bytes": lambda s: s.plan.exchange(s.bad(s.x.astype(">f8"), s.x)),
    "x gradient": lambda s: s.plan.exchange(
        s.bad(torch.ones(s.x.shape, requires_grad=True), torch.ones(s.x.shape))
    ),
    "out dtype": lambda s: s.plan.exchange(s.x, out=s.bad(s.y.astype(np.float32), s.y.copy())),
    "out shape": lambda s: s.plan.exchange(s.x, out=s.bad(s.y[1:].copy(), s.y.copy())),
    "out read-only": lambda s: s.plan.exchange(s.x, out=s.bad(readonly(s.y), s.y.copy())),
    "out strides": lambda s: s.plan.exchange(
        s.x, out=s.bad(np.lib.stride_tricks.as_strided(s.y, s.y.shape, (0,)), s.y.copy())
    ),
    "out overlaps": lambda s: s.plan.exchange(
        s.bad(s.y[: s.x.size], s.x), out=s.bad(s.y, s.y.copy())
    ),
    "number": lambda s: s.plan.exchange(s.x, number=s.bad("a", 0)),
    "y bool": lambda s: s.plan.accumulate(s.bad(s.y.astype(bool), s.y)),
    "y shape": lambda s: s.plan.accumulate(s.bad(s.y[1:], s.y)),
    "y text": lambda s: s.plan.accumulate(s.bad(s.y.astype(str), s.y)),
    "begin": lambda s: s.plan.begin(s.bad(None, s.x)).finish(),
    "begin_accumulate": lambda s: s.plan.begin_accumulate(s.bad(None, s.y)).finish(),
    "autograd x": lambda s: autograd.exchange(s.bad(s.x, torch.from_numpy(s.x)), s.plan),
    "autograd y": lambda s: autograd.accumulate(
        s.bad(torch.ones(3), torch.from_numpy(s.y)), s.plan
    ),
    "local": lambda s: DistArray(s.world, s.layout, s.bad(np.ones(9), s.x)).window(s.plan),
    "local kind": lambda s: DistArray(s.world, s.layout, s.bad(3, s.x)).window(s.plan),
    "layout": lambda s: DistArray(s.world, s.bad(None, s.layout), s.x).window(s.plan),
    "plan": lambda s: s.array.window(s.bad(3, s.plan)),
}
COLLECTIVES: dict[str, Callable[[Setting], Any]] = {
    "to": lambda s: redistribute(s.world, s.x, s.layout, s.bad(None, s.layout)),
    "from": lambda s: redistribute(s.world, s.x, s.bad(3, s.layout), s.layout),
    "DistArray.redistribute": lambda s: s.array.redistribute(s.bad("a", s.layout)),
    "gather": lambda s: s.array.gather(s.bad(99, 0)),
    "gather kind": lambda s: s.array.gather(s.bad("0", 0)),
    "global shape": lambda s: DistArray.from_global(s.world, s.layout, np.ones(s.bad(7, 8))),
    "global kind": lambda s: DistArray.from_global(s.world, s.layout, s.bad([1.0] * 8, np.ones(8))),
    "global root": lambda s: DistArray.from_global(s.world, s.layout, np.ones(8), s.bad(0, None)),
    "global layout": lambda s: DistArray.from_global(s.world, s.bad(None, s.layout), np.ones(8)),
    "save path": lambda s: s.array.save(s.bad(None, s.folder / "x.h5")),
    "save name": lambda s: s.array.save(s.folder / "x.h5", s.bad(3, "data")),
    "save compression": lambda s: s.array.save(s.folder / "x.h5", compression=s.bad(3.5, "gzip")),
    "load path": lambda s: DistArray.load(s.world, s.bad(None, s.folder / "good.h5"), s.layout),
    "load name": lambda s: DistArray.load(
        s.world, s.folder / "good.h5", s.layout, s.bad(3, "data")
    ),
    "load layout": lambda s: DistArray.load(s.world, s.folder / "good.h5", s.bad(3, s.layout)),
    "window": lambda s: WindowPlan(s.world, s.layout, s.bad(None, Box((0,), (8,)))),
    "boundary": lambda s: WindowPlan(
        s.world, s.layout, Box((0,), (8,)), s.bad(["zero", 3], "zero")
    ),
    "wire": lambda s: WindowPlan(s.world, s.layout, Box((0,), (8,)), wire=s.bad(object(), "raw")),
    "name": lambda s: WindowPlan(s.world, s.layout, Box((0,), (8,)), name=s.bad(3, "x")),
}


CASES = [(name, used) for name in EXCHANGES for used in (False, True)]
CASES += [(name, False) for name in COLLECTIVES]


@pytest.mark.parametrize(("name", "used"), CASES)
def test_what_one_rank_alone_does_wrong_is_every_ranks_error(
    world: World, folder: Path, name: str, used: bool
) -> None:
    """In the first call of a plan, or where the other ranks repeat one; the world works on."""
    setting = Setting(world, folder)
    if used:
        setting.plan.exchange(setting.x), setting.plan.exchange(setting.x)
        setting.plan.accumulate(setting.y), setting.plan.accumulate(setting.y)
    if name.startswith("load"):
        setting.array.save(folder / "good.h5")
    said = "", ""
    try:
        {**EXCHANGES, **COLLECTIVES}[name](setting)
    except (TypeError, ValueError, UserError) as error:
        said = type(error).__name__, str(error)
    everyone = world.gather(said)
    assert everyone == [everyone[0]] * world.size and everyone[0][1], everyone
    same = DistArray.from_global(world, setting.layout, np.arange(8.0)).gather()
    assert (same == np.arange(8.0)).all()


def test_what_all_ranks_do_wrong_leaves_the_plan_as_it_was(world: World, tmp_path: Path) -> None:
    setting = Setting(world, tmp_path)
    with refused("exchange", "x", value=(9,)):
        setting.plan.exchange(np.ones(9))
    assert (setting.plan.exchange(setting.x) == 1).all()


@pytest.mark.mpi(min_size=2)
def test_a_plan_that_was_broken_is_refused_on_all(world: World, tmp_path: Path) -> None:
    setting = Setting(world, tmp_path)
    first, second, third = (
        world.gather(caught(lambda x=x: setting.plan.exchange(x)))  # type: ignore[misc]
        for x in (setting.bad(np.ones(9), setting.x), setting.bad(np.ones(7), setting.x), setting.x)
    )
    assert len(set(first)) == 1 and "x has shape (9,): must begin with" in first[0]
    for told in (second, third):  # the error that ended the plan, not the one after it
        assert len(set(told)) == 1
        assert "plan 'all' was ended by an earlier error" in told[0] and told[0].endswith(first[0])
    setting.plan.free()
    assert world.gather(caught(lambda: setting.plan.exchange(setting.x))) == third
    plan = Setting(world, tmp_path).plan
    plan.free()
    freed = world.gather(caught(lambda: plan.exchange(setting.x)))
    assert freed == ["rank 0 | exchange: plan 'all' is freed"] * world.size


def caught(call: Callable[[], Any]) -> str:
    """The words of the error that a call raises."""
    with pytest.raises((ValueError, RuntimeError)) as error:
        call()
    return str(error.value)


def broadcasts(world: World) -> None:
    """Process 0 is through with them before the others begin, and waits behind them."""
    for n in (1, 7, 1000):
        world.broadcast(np.full(n, 3.0))
    world.barrier()


ELSEWHERE: dict[str, Callable[[World], Any]] = {
    "barrier": World.barrier,
    "gather": lambda world: world.gather(world.rank),
    "max": lambda world: world.max(np.arange(5)),
    "broadcasts": broadcasts,
    "agreement": lambda world: allreduce(world, np.ones(5, np.float32)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_refusal_that_is_heard_in_another_call_leaves_the_world_usable(name: str) -> None:
    """The call in which the others wait comes to its end on all ranks, and none is left over."""
    world, x = World(timeout_s=600), np.ones(5, np.float32)
    layout = Layout.grid((8,), (world.size,))
    for _ in range(4):
        with refused("DistArray", "local", value="int"):
            if world.rank == world.size - 1:
                DistArray(world, layout, 3)
            else:
                ELSEWHERE[name](world)
        assert world.gather(world.rank) == list(range(world.size))
        assert world.max(np.array([world.rank]))[0] == world.size - 1
        assert (allreduce(world, x) == world.size).all()
    world.free()


def test_ranks_without_cells_may_give_out(world: World) -> None:
    """NumPy gives empty arrays strides of 0."""
    layout = Layout.grid((1, 3), (world.size, 1))
    window = layout.owner(world.rank)
    with WindowPlan(world, layout, window) as plan:
        for trail in ((), (0,), (2,)):
            x, out = np.ones(plan.owned.shape + trail), np.empty(plan.window.shape + trail)
            found = plan.exchange(x, out=out), plan.accumulate(out, out=x)
            same = [(each == 1).all() for each in found]
            assert world.gather(same) == [[True, True]] * world.size


def test_copies_share_plans(world: World, tmp_path: Path) -> None:
    setting = Setting(world, tmp_path)
    other = copy.deepcopy(setting.array)
    assert copy.deepcopy(setting.plan) is setting.plan and other.world is setting.array.world
    assert other.local is not setting.array.local


def test_a_plan_with_a_call_under_way_is_not_freed(world: World, tmp_path: Path) -> None:
    """Its time-out would come long after; finished, it goes on."""
    plan = Setting(world, tmp_path).plan
    handle = plan.begin(np.full(plan.owned.shape, 2.0))
    told = ""
    try:
        plan.free()
    except RuntimeError as error:
        told = str(error)
    result = handle.finish()
    plan.free()
    said = told == "plan 'all': free: a call is in progress: finish it first"
    verdicts = world.gather((said or world.size == 1, bool((result == 2).all()), plan.freed))
    assert verdicts == [(True, True, True)] * world.size
