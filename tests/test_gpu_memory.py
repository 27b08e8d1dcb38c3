"""Memory that the GPU has still to read or write is kept: shown without a GPU, and without others.

The simulated GPU hands out what is freed as pools do (tests/test_simulated_gpu.py). In each test
the GPU is behind when the code lets go of something, and somebody takes memory right afterwards.
"""

import importlib
from typing import Any

import numpy as np
import pytest

from cpdhpc.darray.device import PROGRAMS
from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.world.ranks import Loopback

X = np.arange(1, 5, dtype=np.float32)


def spaced(cupy: Any, n: int, step: int) -> Any:
    """Return float32[n] on the GPU of a stride that no other step has."""
    return cupy.zeros(n * step, np.float32)[::step]


@pytest.mark.parametrize("finished", [True, False])
def test_tables_of_moves_are_kept_until_they_were_read(gpu: Any, finished: bool) -> None:
    """A plan has so many; a call that is begun only has read its table as late as others."""
    simulation, cupy = gpu
    x = cupy.asarray(X)
    windows = [spaced(cupy, 6, step) for step in range(1, PROGRAMS + 2)]
    with WindowPlan(Loopback(), Layout.grid((4,), (1,)), Box((-1,), (5,)), "wrap") as plan:
        for window in windows[:PROGRAMS]:
            plan.exchange(x, window)
        cupy.cuda.get_current_stream().synchronize()
        windows[0][...] = 0
        simulation.delay()
        first = plan.begin(x, windows[0])
        if finished:
            first.finish()
        plan.exchange(x, windows[PROGRAMS])  # its table takes the place of the first
        if not finished:
            first.finish()
        for window in (windows[0], windows[PROGRAMS]):
            assert window.get().tolist() == np.pad(X, 1, "wrap").tolist()


def test_a_plan_is_freed_once_the_gpu_is_done_with_it(gpu: Any) -> None:
    simulation, cupy = gpu
    x = cupy.asarray(X)
    plan = WindowPlan(Loopback(), Layout.grid((4,), (1,)), Box((-1,), (5,)), "wrap")
    simulation.delay()
    window = plan.exchange(x)
    plan.free()
    importlib.import_module("cpdhpc.ops.gpu_runtime").to_device(X)  # takes memory as tables do
    assert window.get().tolist() == np.pad(X, 1, "wrap").tolist()
