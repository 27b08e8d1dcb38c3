"""Distributed arrays from layout to layout, and plans that ranks do not agree on."""

from typing import Any

import numpy as np
import pytest
import torch
from darray_cases import any_bits, draw, draw_layout, own
from verdicts import together

from cpdhpc.darray.array import DistArray, redistribute
from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import Constant
from cpdhpc.world.mpi import World


def drawn(world: World, number: int) -> tuple[list[Layout], np.ndarray]:
    """Three layouts of a domain and an array, alike on all ranks."""
    rng = np.random.default_rng((number, world.size))
    shape = tuple(rng.integers(1, 8, rng.integers(1, 4)).tolist())
    layouts = [draw_layout(rng, shape, world.size) for _ in range(3)]
    return layouts, any_bits(rng, (*shape, 2), ["int16", "float64", "bool"][number % 3])


def test_from_layout_to_layout_and_back(world: World) -> None:
    for number in range(20):
        (a, b, c), data = drawn(world, number)
        first = DistArray.from_global(world, a, data)
        by_b, straight = first.redistribute(b).redistribute(c), first.redistribute(c)
        want = DistArray.from_global(world, c, data).local
        together(
            world,
            by_b.local.tobytes() == straight.local.tobytes() == want.tobytes(),
            by_b.redistribute(a).local.tobytes() == first.local.tobytes(),
            redistribute(world, first.local, a, a).tobytes() == first.local.tobytes(),
        )


def test_from_and_to_a_root_or_everywhere(world: World) -> None:
    for number in range(12):
        (a, _, _), data = drawn(world, number)
        root = number % world.size
        given = data if world.rank == root else data[(slice(0, 0),) * (data.ndim - 1)]
        array = DistArray.from_global(world, a, given, root)
        whole, at_root = array.gather(), array.gather(root)
        together(
            world,
            whole.tobytes() == data.tobytes() and whole.shape == data.shape,
            (at_root is None) == (world.rank != root),
            at_root is None or at_root.tobytes() == data.tobytes(),
        )
    data[...] = 0  # from_global has copied
    together(world, array.gather().tobytes() == whole.tobytes())


def test_torch_tensors_and_windows(world: World) -> None:
    layout = Layout.grid((2 * world.size, 3), (world.size, 1))
    data = torch.arange(6.0 * world.size).reshape(-1, 3)
    array = DistArray.from_global(world, layout, data)
    start, stop = layout.owner(world.rank)
    plan = WindowPlan(world, layout, Box((start[0] - 1, 0), (stop[0] + 1, 3)), "wrap")
    rows = np.arange(start[0] - 1, stop[0] + 1) % (2 * world.size)
    together(
        world,
        isinstance(array.local, torch.Tensor) and torch.equal(array.gather(), data),
        torch.equal(array.window(plan), data[rows]),
    )


def test_a_plan_without_messages_makes_no_call_of_mpi(world: World) -> None:
    """Own boxes as windows: no message; ranks need not come together."""
    layout = Layout.grid((4, 4), (1, world.size))
    plan = WindowPlan(world, layout, layout.owner(world.rank))
    sent = world.messages_sent.copy()
    x = np.ones(plan.owned.shape)
    for _ in range(world.rank + 2):  # not as often on all ranks
        assert (plan.exchange(x) == x).all() and (plan.accumulate(x) == x).all()
    together(world, (world.messages_sent == sent).all(), not plan.sends, not plan.recvs)
    assert plan.interior == plan.window and plan.boundary_parts == []


def test_renumbering_ranks_permutes_messages_and_nothing_else(world: World) -> None:
    """The last rank plays the first and so on: the same windows, the same bits."""
    case = draw((8, 3), world.size)
    data = any_bits(case.rng(1), (*case.layout.shape, 3), "float32")
    turned = Layout.boxes(case.layout.shape, case.layout.owners[::-1])
    one = WindowPlan(world, case.layout, case.windows[world.rank], case.modes)
    other = WindowPlan(world, turned, case.windows[::-1][world.rank], case.modes)
    mine = one.exchange(own(case, world.rank, data))
    theirs = other.exchange(own(case, world.size - 1 - world.rank, data))
    everyone = world.gather(theirs.tobytes())
    together(world, mine.tobytes() == everyone[world.size - 1 - world.rank])
    costs = [world.gather((p.describe().sent_bytes, p.describe().messages)) for p in (one, other)]
    assert costs[0] == costs[1]


def disagreements(world: World) -> dict[str, Any]:
    """What the last rank does otherwise -> a call, and what is said."""
    last, n = world.rank == world.size - 1, world.size
    layout = Layout.grid((6, 4), (n, 1))
    other = Layout.grid((6, 4), (1, n))
    smaller = Layout.grid((5, 4), (n, 1))
    box = layout.owner(world.rank)
    local = np.zeros(box.shape)

    def plan(layout: Any = layout, window: Any = box, *arguments: Any, **options: Any) -> Any:
        return lambda: WindowPlan(world, layout, window, *arguments, name="disputed", **options)

    differ = rf"WindowPlan: arguments differ: \w+=.* on rank 0, \w+=.* on rank {n - 1}"
    return {
        "layout": (plan(other if last else layout), differ),
        "domain": (plan(smaller if last else layout), differ),
        "boundary": (plan(layout, box, "wrap" if last else "zero"), differ),
        "constant": (plan(layout, box, Constant(float(last))), differ),
        "wire": (plan(layout, box, wire="e4m3" if last else "raw"), differ),
        "window": (
            plan(window=(0, 4) if last else box),
            rf"rank {n - 1} \| WindowPlan: window=\(.*\): must be a Box",
        ),
        "axes": (
            plan(window=Box((0,), (4,)) if last else box),
            rf"rank {n - 1} \| WindowPlan: window=.*must have 2 axes",
        ),
        "ends": (
            plan(window=Box((0, 0.5), (4, 4)) if last else box),
            rf"rank {n - 1} \| WindowPlan: window=.*must hold integers",
        ),
        "mode": (
            plan(layout, box, "mirror" if last else "zero"),
            rf"rank {n - 1} \| WindowPlan: boundary='mirror': known are",
        ),
        "ranks": (
            plan(Layout.grid((6, 4), (n + 1, 1)) if last else layout),
            rf"rank {n - 1} \| WindowPlan: layout=one of {n + 1} boxes: must have {n}",
        ),
        "type": (plan(None if last else layout), rf"rank {n - 1} \| WindowPlan: layout=None"),
        "integers": (
            plan(layout, box, wire="int8"),
            r"rank 0 \| WindowPlan: wire='int8': integers are for sums",
        ),
        "target": (
            lambda: redistribute(world, np.zeros(box.shape), layout, other if last else layout),
            "redistribute: layout_to differs between ranks: ",
        ),
        "dtype": (
            lambda: redistribute(world, local.astype("f4" if last else "f8"), layout, layout),
            r"redistribute: x differs between ranks: .*'float64, further axes \(\)'.*'float32",
        ),
        "no array": (
            lambda: redistribute(world, 3 if last else local, layout, layout),
            rf"rank {n - 1} \| redistribute: x is int: known are arrays",
        ),
        "further axes": (
            lambda: DistArray(world, layout, local[..., None] if last else local).gather(),
            r"DistArray\.gather: local differs between ranks: ",
        ),
        "one root": (
            lambda: DistArray(world, layout, local).gather(0 if last else None),
            r"DistArray\.gather: root differs between ranks: \[None",
        ),
        "boxes": (
            lambda: DistArray.from_global(
                world, Layout.grid((6, 4), (n + 1, 1)) if last else layout, np.zeros((6, 4))
            ),
            rf"rank {n - 1} \| DistArray\.from_global: layout=one of {n + 1} boxes: must have {n}",
        ),
        "saved": (
            lambda: DistArray(world, layout, local).save(3 if last else "none/x.h5"),
            rf"rank {n - 1} \| DistArray\.save: path=3: must be a path",
        ),
    }


@pytest.mark.mpi(min_size=2)
def test_what_ranks_do_not_agree_on_is_the_same_error_on_all(world: World) -> None:
    for what, (call, said) in disagreements(world).items():
        with pytest.raises((TypeError, ValueError), match=said) as raised:
            call()
        everyone = world.gather((what, type(raised.value).__name__, str(raised.value)))
        together(world, all(each == everyone[0] for each in everyone))


WANTED = r"others must give an empty array of the root's dtype, of shape \(0, 0\) and the root's"
NOT_ROOTS: dict[str, tuple[Any, str]] = {  # what the last rank gives, where rank 0 has the whole
    "nothing": (None, rf"rank \d \| DistArray\.from_global: array is None: root=0: {WANTED}"),
    "no axes": (np.empty(0), rf"array of rank \d begins with \(0,\): root=0: {WANTED}"),
    "a whole": (np.ones((6, 4)), rf"array of rank \d begins with \(6, 4\): root=0: {WANTED}"),
    "dtype": (np.empty((0, 0), np.int8), r"from_global: array differs between ranks: .*int8"),
    "further": (np.empty((0, 0, 3)), r"from_global: array differs between ranks: .*\(3,\)"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", NOT_ROOTS)
def test_what_others_than_the_root_give_is_told_on_all(world: World, case: str) -> None:
    given, said = NOT_ROOTS[case]
    mine: Any = np.ones((6, 4)) if world.rank == 0 else np.empty((0, 0))
    if world.rank == world.size - 1:
        mine = given
    with pytest.raises((TypeError, ValueError), match=said) as raised:
        DistArray.from_global(world, Layout.grid((6, 4), (world.size, 1)), mine, root=0)
    told = world.gather(str(raised.value))
    together(world, told == [told[0]] * world.size)
