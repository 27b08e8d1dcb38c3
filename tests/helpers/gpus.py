"""GPUs for tests over real messages: the machine's, or simulated ones."""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cupy import simulated

from cpdhpc.world import gpu_messages
from cpdhpc.world.mpi import World

TIMEOUT_S = 600.0
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
        world = World(timeout_s=TIMEOUT_S)
        answer = gpu_messages.gpu_aware(world)
        world.free()
        if not answer.yes:
            pytest.skip(f"GPU-aware MPI: {answer}")
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
