"""Windows of GPU arrays: the bits of the CPU, over real messages and however late the GPU is.

The same tests run on a GPU (-m gpu) and on tests/simulated_gpu.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from darray_arrays import any_bits, numbers
from darray_cases import Case, draw, own, shown, summed

from cpdhpc.darray.array import DistArray
from cpdhpc.darray.by_slices import CUPY, array_backend
from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan

pytestmark = pytest.mark.mpi
CASES = 25
DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"]


def late(gpu: Any, values: np.ndarray) -> Any:
    """The values on the GPU, written only after a delay of the current stream."""
    given, x = gpu.cupy.asarray(values), gpu.cupy.empty(values.shape, values.dtype)
    gpu.delay()
    x[...] = given
    return x


def cases(gpu: Any) -> list[Case]:
    """Random cases with further axes, of dtypes that CuPy has."""
    drawn = [draw((41, number), gpu.world.size) for number in range(CASES)]
    return [
        each._replace(dtype=DTYPES[i % len(DTYPES)], trail=each.trail[:1])
        for i, each in enumerate(drawn)
        if not any("Constant" in repr(mode) for mode in each.modes)
    ]


def test_exchanges_have_the_bits_of_numpy(gpu: Any) -> None:
    problems = []
    for case in cases(gpu):
        world, shape = gpu.world, case.layout.shape + case.trail
        wholes = [any_bits(case.rng(i), shape, case.dtype) for i in range(2)]
        wants = [shown(whole, case.windows[world.rank], case.modes) for whole in wholes]
        xs = [late(gpu, own(case, world.rank, whole)) for whole in wholes]
        with WindowPlan(world, case.layout, case.windows[world.rank], case.modes) as plan:
            first = plan.exchange(xs[0])
            handles = [plan.begin(x) for x in xs]
            got = [first, *(handle.finish() for handle in handles)]
            on_cpu = plan.exchange(own(case, world.rank, wholes[1]))  # kinds may be mixed
        bits = [each.get().tobytes() for each in got]
        if bits != [wants[i].tobytes() for i in (0, 0, 1)] or on_cpu.tobytes() != bits[2]:
            problems.append(str(case))
    assert gpu.world.gather(problems) == [[]] * gpu.world.size


def test_sums_have_the_bits_of_numpy(gpu: Any) -> None:
    problems = []
    for case in cases(gpu):
        if case.dtype == "bool":
            continue
        world = gpu.world
        ys = [numbers(case.rng(3, r), (*box.shape, *case.trail), case.dtype, 1)
              for r, box in enumerate(case.windows)]  # fmt: skip
        want = own(case, world.rank, summed(case, ys))
        with WindowPlan(world, case.layout, case.windows[world.rank], case.modes) as plan:
            got = [plan.accumulate(late(gpu, ys[world.rank])) for _ in range(2)]
        if any(each.get().tobytes() != want.tobytes() for each in got):
            problems.append(str(case))
    assert gpu.world.gather(problems) == [[]] * gpu.world.size


def test_sums_of_subnormal_numbers_survive(gpu: Any) -> None:
    """Where CuPy's own additions give zeros."""
    layout = Layout.grid((4 * gpu.world.size,), (gpu.world.size,))
    (start,), (stop,) = layout.owner(gpu.world.rank)
    y = np.full((stop - start + 4, 3), 3e-40, np.float32)
    verdict = []
    for mode in ("wrap", "edge"):
        with WindowPlan(gpu.world, layout, Box((start - 2,), (stop + 2,)), mode) as plan:
            want, got = plan.accumulate(y), plan.accumulate(late(gpu, y))
        verdict.append(got.get().tobytes() == want.tobytes() and want.min() > 0)
    assert gpu.world.gather(verdict) == [[True, True]] * gpu.world.size


@pytest.mark.parametrize("wire", ["e4m3", "e2m1fn"])
def test_packed_wires_have_the_bits_of_the_cpu(gpu: Any, wire: str) -> None:
    layout = Layout.grid((6 * gpu.world.size, 50), (gpu.world.size, 1))
    start, stop = layout.owner(gpu.world.rank)
    window = Box((start[0] - 2, -1), (stop[0] + 2, 51))
    x = np.random.default_rng(gpu.world.rank).standard_normal((6, 50)).astype(np.float32)
    with WindowPlan(gpu.world, layout, window, "reflect", wire=wire) as plan:
        want = plan.exchange(x)
        got = plan.exchange(late(gpu, x)).get()
        back = plan.accumulate(want), plan.accumulate(late(gpu, want)).get()
    verdict = got.tobytes() == want.tobytes(), back[0].tobytes() == back[1].tobytes()
    assert gpu.world.gather(verdict) == [(True, True)] * gpu.world.size


def test_distributed_arrays_and_what_is_refused(gpu: Any) -> None:
    layout = Layout.grid((2, 3 * gpu.world.size), (1, gpu.world.size))
    data = np.arange(6.0 * gpu.world.size).reshape(2, -1)
    array = DistArray.from_global(gpu.world, layout, gpu.cupy.asarray(data))
    gathered = array.gather()
    assert array_backend("gathered", gathered) is CUPY and (gathered.get() == data).all()
    with WindowPlan(gpu.world, layout, layout.owner(gpu.world.rank)) as plan:
        with pytest.raises(TypeError, match="out is ndarray of float64"):
            plan.exchange(array.local, np.zeros(plan.window.shape))
        with pytest.raises(ValueError, match="out has shape"):
            plan.exchange(array.local, gpu.cupy.zeros((1, 1)))
