"""Windows of GPU arrays: the bits of the CPU, over real messages and however late the GPU is.

The same tests run on a GPU (-m gpu) and on tests/helpers/simulated_gpu.py.
"""

import time
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from darray_cases import Case, any_bits, draw, own, shown, wanted_sums
from refusing import refused
from verdicts import together

from cpdhpc.darray.array import DistArray
from cpdhpc.darray.copies import CUPY, array_backend
from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan

CASES = 30


def late(gpu: Any, values: np.ndarray, x: Any = None) -> Any:
    """The values on the GPU, in x or in a new array, written after a delay of the stream."""
    given = gpu.cupy.asarray(values)
    x = gpu.cupy.empty(values.shape, values.dtype) if x is None else x
    gpu.delay()
    x[...] = given
    return x


def laid_late(gpu: Any, rng: np.random.Generator, values: np.ndarray) -> Any:
    """The same somewhere in memory: with gaps, backwards, or at an address that no number has."""
    how = rng.choice(["plain", "gaps", "backwards", "odd"])
    if how == "odd" and values.size:
        raw = gpu.cupy.empty(values.nbytes + 1, np.uint8)[1:]
        late(gpu, np.ascontiguousarray(values).reshape(-1).view(np.uint8), raw)
        return raw.view(values.dtype).reshape(values.shape)
    shape, key = list(values.shape), [slice(None)] * values.ndim
    for axis in range(values.ndim if how != "plain" else 0):
        if how == "gaps":
            shape[axis], key[axis] = 2 * shape[axis] + 1, slice(1, None, 2)
        else:
            key[axis] = slice(None, None, -1)
    return late(gpu, values, gpu.cupy.zeros(tuple(shape), values.dtype)[tuple(key)])


def cases(gpu: Any) -> list[Case]:
    """Random cases of dtypes that CuPy has."""
    drawn = [draw((41, number), gpu.world.size) for number in range(CASES)]
    return [each for each in drawn if each.dtype != "bfloat16"]


def problems_of(case: Case, gpu: Any) -> Iterator[str]:
    """What is not as NumPy has it, of a plan's two operations, in all their ways."""
    world, shape = gpu.world, case.layout.shape + case.trail
    wholes = [any_bits(case.rng(i), shape, case.dtype) for i in range(2)]
    wants = [shown(whole, case.windows[world.rank], case.modes) for whole in wholes]
    wants = [want.astype(case.dtype, copy=False) for want in wants]
    rng = case.rng(world.rank, 7)
    xs = [laid_late(gpu, rng, own(case, world.rank, whole)) for whole in wholes]
    with WindowPlan(world, case.layout, case.windows[world.rank], case.modes) as plan:
        first = plan.exchange(xs[0])
        handles = [plan.begin(x) for x in xs]
        while not handles[1].progress():
            pass
        got = [first, *(handle.finish() for handle in handles)]
        if [each.get().tobytes() for each in got] != [wants[i].tobytes() for i in (0, 0, 1)]:
            yield "exchange"
        if not gpu.direct:  # kinds may be mixed
            mixed = plan.exchange(own(case, world.rank, wholes[1]) if world.rank else xs[1])
            host = mixed if world.rank else mixed.get()
            if host.tobytes() != wants[1].tobytes():
                yield "exchange of arrays of two kinds"
        if plan.window.contains(plan.owned):  # the halo alone is written
            window = gpu.cupy.zeros(wants[0].shape, case.dtype)
            late(gpu, own(case, world.rank, wholes[0]), plan.inside(window))
            if plan.exchange(plan.inside(window), window).get().tobytes() != wants[0].tobytes():
                yield "exchange in place"
        else:
            plan.exchange(xs[0])
        if case.dtype == "bool":
            return
        yss, totals = wanted_sums(case)
        want, y = own(case, world.rank, totals[0]), late(gpu, yss[0][world.rank])
        sums = [plan.accumulate(y), plan.begin_accumulate(y[...]).finish()]
        inside = plan.inside(y) if plan.window.contains(plan.owned) else None
        sums.append(plan.accumulate(y, inside))
        if any(each.get().tobytes() != want.tobytes() for each in sums):
            yield "accumulate"


def test_random_cases_have_the_bits_of_numpy(gpu: Any) -> None:
    problems = [f"{what}: {case}" for case in cases(gpu) for what in problems_of(case, gpu)]
    assert gpu.world.gather(problems) == [[]] * gpu.world.size


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_one_launch_packs_for_all_neighbours_and_one_copy_takes_them_down(
    gpu: Any, wire: str
) -> None:
    """And as many on the way back; with a wire one more each, whatever the number of neighbours."""
    world = gpu.world
    layout = Layout.grid((6, 4 * world.size), (1, world.size))
    start, stop = layout.owner(world.rank)
    window = Box((start[0] - 1, start[1] - 2), (stop[0] + 1, stop[1] + 2))
    with WindowPlan(world, layout, window, "wrap", wire=wire) as plan:
        assert len(plan.sends) == min(2, world.size - 1)
        for operation, x in (
            (plan.exchange, gpu.cupy.zeros((6, 4, 3), np.float32)),
            (plan.accumulate, gpu.cupy.zeros((8, 8, 3), np.float32)),
        ):
            operation(x)
            if gpu.simulation is None:
                continue
            gpu.simulation.launched.clear()
            gpu.simulation.copied.clear()
            operation(x)
            codec = {"encode_tiles": 1, "decode_tiles": 1} if wire != "raw" and plan.sends else {}
            moves = {"move_boxes": 2 if plan.sends else 1}
            copies = {} if gpu.direct or not plan.sends else {"down": 1, "up": 1}
            found = dict(gpu.simulation.launched), dict(gpu.simulation.copied)
            assert world.gather(found) == [(moves | codec, copies)] * world.size


def last_of_previous(gpu: Any, width: int) -> tuple[WindowPlan, list[np.ndarray], list[np.ndarray]]:
    """Return a plan whose ranks but the first also see the last row of the rank before.

    So the first sends only, and the last receives only. With it three arrays, and the windows.
    """
    layout = Layout.grid((4 * gpu.world.size, width), (gpu.world.size, 1))
    start, stop = layout.owner(gpu.world.rank)
    window = Box((max(0, start[0] - 1), 0), stop)
    wholes = [np.random.default_rng(i).random(layout.shape, np.float32) for i in range(3)]
    rows = [(slice(low, stop[0])) for low in (start[0], window.start[0])]
    owned, seen = ([whole[each] for whole in wholes] for each in rows)
    return WindowPlan(gpu.world, layout, window), owned, seen


@pytest.mark.parametrize("streams", [1, 2])
def test_a_slot_is_used_again_once_its_messages_were_unpacked(gpu: Any, streams: int) -> None:
    """The first call is unpacked late, and the third one has its slot; in one stream or another."""
    plan, owned, seen = last_of_previous(gpu, 50)
    first, *_, other = [gpu.cupy.cuda.Stream(non_blocking=True) for _ in range(streams)] * 2
    with plan, first:
        xs = [gpu.cupy.asarray(x) for x in owned]
        first.synchronize()
        handle = plan.begin(xs[0])
        gpu.delay()
        got = [handle.finish()]
        with other:
            got += [plan.exchange(x) for x in xs[1:]]
            other.synchronize()
        right = [a.get().tobytes() == b.tobytes() for a, b in zip(got, seen, strict=True)]
    together(gpu.world, *right)


def test_a_slot_is_used_again_once_its_messages_have_left(gpu: Any) -> None:
    """MPI reads long messages when they are received, and the receiver comes late."""
    plan, owned, seen = last_of_previous(gpu, 1 << 18)
    with plan:
        xs = [gpu.cupy.asarray(x) for x in owned]
        time.sleep(0.2 if gpu.world.rank else 0)
        got = [plan.exchange(x) for x in xs]
        right = [a.get().tobytes() == b.tobytes() for a, b in zip(got, seen, strict=True)]
    together(gpu.world, *right)


def test_sums_that_are_subnormal_or_rounded_have_the_bits_of_the_cpu(gpu: Any) -> None:
    """CuPy's own additions give zeros for the former; the random cases add integers only."""
    layout = Layout.grid((4 * gpu.world.size,), (gpu.world.size,))
    (start,), (stop,) = layout.owner(gpu.world.rank)
    tiny = np.full((stop - start + 4, 3), 3e-40, np.float32)
    short = np.random.default_rng(gpu.world.rank).uniform(1, 2, tiny.shape).astype(np.float16)
    verdict = []
    for mode, y in product(("wrap", "edge"), (tiny, short)):
        with WindowPlan(gpu.world, layout, Box((start - 2,), (stop + 2,)), mode) as plan:
            want, got = plan.accumulate(y), plan.accumulate(late(gpu, y))
        verdict.append(got.get().tobytes() == want.tobytes() and want.min() > 0)
    together(gpu.world, *verdict)


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
    same = got.tobytes() == want.tobytes(), back[0].tobytes() == back[1].tobytes()
    together(gpu.world, *same)


def test_distributed_arrays_and_what_is_refused(gpu: Any) -> None:
    layout = Layout.grid((2, 3 * gpu.world.size), (1, gpu.world.size))
    data = np.arange(6.0 * gpu.world.size).reshape(2, -1)
    array = DistArray.from_global(gpu.world, layout, gpu.cupy.asarray(data))
    gathered = array.gather()
    assert array_backend("gathered", gathered) is CUPY and (gathered.get() == data).all()
    with WindowPlan(gpu.world, layout, layout.owner(gpu.world.rank)) as plan:
        with refused("exchange", "out", "must be cupy.nd", "numpy.ndarray of float64"):
            plan.exchange(array.local, np.zeros(plan.window.shape))
        with refused("exchange", "out", value=(1, 1)):
            plan.exchange(array.local, gpu.cupy.zeros((1, 1)))
        with pytest.raises(ValueError, match="out overlaps the input"):
            plan.exchange(array.local, array.local[:, ::-1])
        odd = gpu.cupy.zeros(8 * array.local.size + 1, np.uint8)[1:].view(np.float64)
        with refused("accumulate", "y", "sums of float64 need multiples of 8"):
            plan.accumulate(odd.reshape(array.local.shape))
        if gpu.simulation is not None:
            elsewhere = gpu.cupy.zeros(plan.owned.shape)
            elsewhere.device = SimpleNamespace(id=1)
            with pytest.raises(ValueError, match="x is on GPU 1: must be on CuPy's current one, 0"):
                plan.exchange(elsewhere)
        assert (plan.exchange(array.local).get() == array.local.get()).all()
