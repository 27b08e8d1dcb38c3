"""A call that comes again passes few files: so one who reads what a step does reads little."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from reducing import backward, model_of

import cpdhpc
from cpdhpc.darray import Box, Layout, WindowPlan
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World

pytestmark = pytest.mark.two_ranks
PACKAGE = Path(cpdhpc.__file__).parent
TIMEOUT_S = 600.0
MOST_OF_REDUCE = 14  # half of the 29 there once were
MOST_OF_EXCHANGE = 3  # one that need not wait at all enters one file
WAITING = {"world/mpi.py", "world/ending.py", "world/timeline.py"}  # if messages are long in coming


def entered(call: Callable[[], object]) -> list[str]:
    """The files of cpdhpc of which a call runs a function in this thread, WAITING left out."""
    found = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(found - WAITING)


def check(world: World, files: list[str], first: str, most: int) -> None:
    """Fail on all ranks alike; first: a file without which nothing was seen."""
    for found in world.gather(files):
        assert first in found and len(found) <= most, "\n".join(found)


@pytest.mark.parametrize("wire", [None, "e4m3"])
def test_reduce_enters_few_files(world: World, wire: str | None) -> None:
    """The call list is made in the second step and run in the third."""
    model = model_of()
    method = {"aggregator": "lowbit", "wire": wire} if wire else {"aggregator": "none"}
    with GradientReducer(model, world, **method) as reducer:
        for step in range(2):
            backward(model, step)
            reducer.reduce()
        backward(model, 2)
        check(world, entered(reducer.reduce), "torch/reducer.py", MOST_OF_REDUCE)


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("operation", ["exchange", "accumulate"])
def test_an_exchange_enters_few_files(share_memory: bool, operation: str) -> None:
    """The first call goes by slices, the next compiles a list, and later ones run it."""
    world = World(timeout_s=TIMEOUT_S, share_memory=share_memory)
    layout = Layout.grid((2 * world.size, 3), (world.size, 1))
    start, stop = layout.owner(world.rank)
    with WindowPlan(world, layout, Box((start[0] - 1, 0), (stop[0] + 1, 3)), "wrap") as plan:
        call = getattr(plan, operation)
        x = np.ones((plan.owned if operation == "exchange" else plan.window).shape)
        for _ in range(2):
            call(x)
        check(world, entered(lambda: call(x)), "darray/plan.py", MOST_OF_EXCHANGE)
    world.free()
