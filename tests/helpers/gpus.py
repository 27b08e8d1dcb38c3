"""GPUs for tests: the machine's, or simulated and emulated ones in their place."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from simulated_cupy import simulated
from simulated_gpu import Gpu

from cpdhpc.world import gpu_messages
from cpdhpc.world.mpi import World


def real_cupy() -> ModuleType:
    """Return CuPy; skip the test if it or a GPU is missing."""
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    cupy = import_module("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if not count:
        pytest.skip("no GPU: CuPy sees none")
    return cupy


@contextmanager
def either_cupy(where: str) -> Iterator[ModuleType]:
    """Yield the CuPy of a "simulated" GPU, or of the machine's; skip the test if it has none."""
    if where == "simulated":
        with simulated() as (_, cupy):
            yield cupy
    else:
        yield real_cupy()


@contextmanager
def card(direct: bool = False, place: int = 0) -> Iterator[Gpu | None]:
    """Let there be a GPU in the block; yield the simulated one, None for the machine's.

    direct: whether MPI takes the memory of the simulated one; place: of that on the bus
    """
    import torch

    emulated = sys.modules.get("emulated_torch")
    if emulated is None:
        if not torch.cuda.is_available() or find_spec("cupy") is None:
            pytest.skip("no GPU that torch and CuPy see, and no -p emulated_gpu")
        if direct:
            skip_unless_aware()
        yield None
        return
    with simulated(place) as (gpu, _), emulated.cuda(gpu):
        gpu.aware, gpu.first = direct, place
        answer = gpu_messages.Answer(direct, "simulated")
        with patch.object(gpu_messages, "query", lambda: answer):
            yield gpu


TIMEOUT_S = 600.0


def skip_unless_aware() -> None:
    """Skip the test on all processes if MPI does not take GPU memory. Collective."""
    world = World(timeout_s=TIMEOUT_S)
    answer = gpu_messages.gpu_aware(world)
    world.free()
    if not answer.yes:
        pytest.skip(f"GPU-aware MPI: {answer}")


N = 2500
SPIN = """extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}"""


def real(cupy, direct):
    """Return None, CuPy, and what keeps the GPU busy; skip if MPI does not take its memory."""
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))  # compiled now, not in the middle of a test
    cupy.cuda.Device().synchronize()
    if direct:
        skip_unless_aware()
    return None, cupy, lambda: spin((1,), (1,), (np.int64(50_000_000),))  # 25 ms or more


def stand_in(stack, direct):
    """Return a simulated GPU, its cupy, whose memory MPI may read if direct, and its delay."""
    simulation, cupy = stack.enter_context(simulated())
    simulation.aware = direct
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        gpu_messages, "query", lambda: gpu_messages.Answer(direct, "simulated")
    )
    return simulation, cupy, simulation.delay


def opened(kind, direct, request):
    """Yield cupy, world, world_of(virtual), delay() of the current stream, direct, simulation.

    simulation: of the GPU, None of the machine's
    """
    with ExitStack() as stack:
        if kind == "gpu":
            simulation, cupy, delay = real(request.getfixturevalue("cupy"), direct)
        else:
            simulation, cupy, delay = stand_in(stack, direct)

        def world_of(virtual=1):
            world = World(virtual_ranks=virtual, timeout_s=TIMEOUT_S, gpu_direct=direct)
            stack.callback(world.free)
            return world

        yield SimpleNamespace(
            cupy=cupy, world=world_of(), world_of=world_of, delay=delay, direct=direct,
            simulation=simulation,
        )  # fmt: skip


def gradients(ranks, n=N, power=0):
    """The same arrays on every process."""
    rng = np.random.default_rng((ranks, n))
    powers = 2.0 ** (rng.integers(-9, 3) + power)
    return list((rng.standard_normal((ranks, n)) * powers).astype(np.float32))


def late(gpu, array):
    """Return an array on the GPU that is written only after a delay of the current stream."""
    values = gpu.cupy.asarray(array)
    x = gpu.cupy.zeros(array.shape, np.float32)
    gpu.delay()
    x[...] = values
    return x


def same(got, expected):
    return got.get().tobytes() == expected.tobytes()
