"""Boxes, layouts, boundaries and plans on one rank; costs of exchanges before they are done."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from darray_cases import check_case, draw, draw_layout
from every import every
from refusing import refused

from cpdhpc.darray import describe
from cpdhpc.darray.array import DistArray, redistribute
from cpdhpc.darray.layout import Box, Layout, receptive
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import (
    MODES,
    Constant,
    RankPieces,
    Windows,
    parse_boundary,
    segments,
    sources,
)
from cpdhpc.world.ranks import Loopback

ONE = Layout.grid((4,), (1,))


def cells(box: Box) -> set[tuple[int, ...]]:
    """The cells of a box, one by one."""
    return set(product(*(range(a, b) for a, b in zip(*box, strict=True))))


def random_box(rng: np.random.Generator, ndim: int) -> Box:
    start = rng.integers(-4, 5, ndim)
    return Box(tuple(start.tolist()), tuple((start + rng.integers(-1, 5, ndim)).tolist()))


def test_boxes_are_sets_of_cells() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        one, other = (random_box(rng, 2) for _ in range(2))
        mine, its = cells(one), cells(other)
        assert one.size == len(mine) and one.empty == (not mine) and one.ndim == 2
        assert cells(one.intersect(other)) == mine & its
        assert one.contains(other) == (its <= mine)
        rest = [cells(each) for each in one.without(other)]
        assert set().union(*rest) == mine - its and sum(map(len, rest)) == len(mine - its)
        assert cells(one.shift((3, -2))) == {(a + 3, b - 2) for a, b in mine}
        array = np.zeros((20, 20))
        array[one.slices((-8, -8))] = 1
        assert {(int(a) - 8, int(b) - 8) for a, b in np.argwhere(array)} == mine
    assert str(Box((0, -1), (4, 7))) == "[0:4, -1:7]" and Box((1,), (0,)).shape == (0,)


def test_layouts_tile_or_say_what_is_wrong() -> None:
    grid = Layout.grid((7, 3), (2, 2))
    assert [box.size for box in grid.owners] == [8, 4, 6, 3] and grid.ranks == 4
    rng = np.random.default_rng(1)
    for _ in range(200):
        shape = tuple(rng.integers(1, 5, 2).tolist())
        layout = draw_layout(rng, shape, int(rng.integers(1, 7)))
        owned = [cells(box) for box in layout.owners]
        assert set().union(*owned) == cells(layout.domain)
        assert sum(map(len, owned)) == layout.domain.size
        assert all(np.zeros(shape)[b.slices((0, 0))].shape == b.shape for b in layout.owners)
        same = Layout.boxes(shape, layout.owners)
        assert same == layout and same.digest == layout.digest
    assert Layout.at((2, 2), 1, 3).owner(1) == Box((0, 0), (2, 2))


BAD_LAYOUTS = {
    "ranks 0 and 2 both own [2:3]": ((4,), [(0, 3), (3, 3), (2, 4)]),
    "no rank owns [1:2] of [0:4], 1 cells": ((4,), [(0, 1), (2, 4)]),
    "rank 1 has [2:5]: reaches outside the domain [0:4]": ((4,), [(0, 2), (2, 5)]),
    "needs axes, of 1 cell or more": ((0,), [(0, 0)]),
    "no rank owns [0:4]": ((4,), []),
}


@every("said, given", BAD_LAYOUTS.items())
def test_bad_layouts_name_ranks_and_cells(said: str, given: Any) -> None:
    shape, ends = given
    with pytest.raises(ValueError) as raised:
        Layout.boxes(shape, [Box((a,), (b,)) for a, b in ends])
    assert said in str(raised.value)


@every("shape, boxes", [((4.5,), []), ((4,), [((0,), (4,))]),
                                          ((4,), [Box((0,), (4.5,))])])  # fmt: skip
def test_layouts_of_other_types_are_refused(shape: Any, boxes: Any) -> None:
    with refused("Layout", "box of rank 0" if boxes else "shape") as caught:
        Layout.boxes(shape, boxes)
    assert isinstance(caught.value, TypeError)


@every("procs", [(2,), (0, 2), (1, 1, 1)])
def test_bad_grids_are_refused(procs: Any) -> None:
    with refused("Layout", "procs"):
        Layout.grid((4, 4), procs)


def test_receptive_is_what_the_outputs_read() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        size, step, dilation = rng.integers(1, 4, 3)
        pad, low, n = rng.integers(0, 4), rng.integers(0, 5), rng.integers(0, 5)
        window = receptive(Box((int(low),), (int(low + n),)), size, step, pad, dilation)
        read = {
            o * step - pad + k * dilation for o in range(low, low + n) for k in range(int(size))
        }
        assert window.empty == (not read)
        if read:
            assert window == Box((min(read),), (max(read) + 1,))
    box = Box((0, 0), (2, 3))
    assert receptive(box, (3, 1), 2, (1, 0)) == Box((-1, 0), (4, 5))
    for name, bad in (("size", 0), ("step", 0), ("dilation", 0), ("pad", (1, 1, 1))):
        with refused("receptive", name):
            receptive(box, **{"size": 1, name: bad})  # type: ignore[arg-type]


@every("mode", [*MODES, Constant(2)])
def test_segments_are_the_cells_that_remainders_give(mode: Any) -> None:
    for extent, start, n in product(range(1, 6), range(-14, 15), range(15)):
        shown = np.full(n, -1)
        for target, source, length, step in segments(start, start + n, extent, mode):
            run = source + step * np.arange(length) + (length - 1 if step < 0 else 0)
            assert (shown[target - start : target - start + length] == -1).all()
            shown[target - start : target - start + length] = run
        assert (shown == sources(start, start + n, extent, mode)).all()


def test_boundaries_are_checked() -> None:
    assert parse_boundary("wrap", 2) == ("wrap", "wrap")
    for bad in ("periodic", ("wrap",), ("wrap", "zero", "zero"), 3, (3, 3)):
        with refused("WindowPlan", "boundary") as caught:
            parse_boundary(bad, 2)  # type: ignore[arg-type]
        assert isinstance(caught.value, TypeError if 3 in np.ravel(bad) else ValueError)


def test_random_cases_on_one_rank() -> None:
    """No MPI at all; tests/mpi has more, on more ranks."""
    torch.set_num_threads(1)
    problems: list[str] = []
    for number in range(150):
        problems += check_case(Loopback(), draw((500, number), 1))
    assert problems == []


def test_interior_and_boundary_parts_are_the_window() -> None:
    """For layouts of several ranks, by geometry: no message changes a cell of the interior."""
    rng = np.random.default_rng(3)
    for number in range(150):
        case = draw((600, number), int(rng.integers(2, 6)))
        found = describe(Windows(case.layout, case.windows, case.modes))
        for each, box in zip(found.ranks, case.windows, strict=True):
            assert 0 <= each.interior_cells <= box.size == each.window_cells
            assert each.rank not in (*each.sends_to, *each.recvs_from)
            pieces = RankPieces(Windows(case.layout, case.windows, case.modes), each.rank)
            shown = [*pieces.local, *(p for m in pieces.recvs for p in m.pieces), *pieces.fills]
            assert sum(part.target.size for part in shown) == box.size  # each cell is written once
        assert found.sent_bytes == sum(each.received_bytes for each in found.ranks)
        assert found.messages == sum(len(each.recvs_from) for each in found.ranks)
        assert 0 <= found.interior_share <= 1 <= found.imbalance_owned


def test_interiors_beside_deep_halos_keep_the_cells_of_the_rank() -> None:
    """Seven rows show each other rank's twice or once, all columns are the rank's own."""
    boxes = [Box((r - 3, 0), (r + 4, 5)) for r in range(5)]
    found = describe(Windows(Layout.grid((5, 5), (5, 1)), boxes, ("wrap", "wrap")))
    assert [each.interior_cells for each in found.ranks] == [5] * 5
    grid = Layout.grid((4, 5), (4, 1))
    plan = Windows(grid, [Box((r - 2, -3), (r + 3, 8)) for r in range(4)], ("wrap", "wrap"))
    assert [RankPieces(plan, r).interior for r in range(4)] == [
        Box((r, -3), (r + 1, 8)) for r in range(4)
    ]


def test_description_of_a_plan_counted_by_hand() -> None:
    layout = Layout.grid((8,), (4,))
    boxes = [Box((a - 1,), (b + 1,)) for (a,), (b,) in layout.owners]
    found = describe(Windows(layout, boxes, ("wrap",)), "float64", (3,), name="ring")
    assert [each.sends_to for each in found.ranks] == [(1, 3), (0, 2), (1, 3), (0, 2)]
    assert {each.sent_bytes for each in found.ranks} == {48} and found.messages == 8
    assert found.most_neighbours == 2 and found.most_bytes == 48
    assert found.interior_share == 0.5 and found.imbalance_window == 1.0
    assert "plan 'ring': 4 ranks, a cell is float64 x 3" in str(found)


FOUR = np.zeros(4)
BAD_CALLS = [  # the argument, its value, and what is given to a plan of 4 cells and a window of 6
    ("x", (5,), (np.zeros(5),)),
    ("x", "object", (np.zeros(4, object),)),
    ("x", ">f4", (np.zeros(4, ">f4"),)),
    ("x", True, (torch.zeros(4, requires_grad=True),)),
    ("x", "list", ([1, 2, 3, 4],)),
    ("out", (5,), (FOUR, np.zeros(5))),
    ("out", "numpy.ndarray of float32", (FOUR, np.zeros(6, np.float32))),
    ("out", (0,), (torch.zeros(4), torch.zeros(1).expand(6))),  # strides
]


@every("argument, value, given", BAD_CALLS)
def test_arrays_that_do_not_fit_are_refused(argument: str, value: Any, given: Any) -> None:
    plan = WindowPlan(Loopback(), ONE, Box((-1,), (5,)), Constant(300))
    for _ in range(2):  # the first call and later ones
        with refused("exchange", argument, value=value):
            plan.exchange(*given)
        with pytest.raises(ValueError, match="read-only"):
            plan.exchange(FOUR, np.broadcast_to(0.0, 6))
        plan.exchange(FOUR)
    with pytest.raises(ValueError, match="fills with 300, x is of uint8"):
        plan.exchange(np.zeros(4, np.uint8))


@every("dtype", ["bool", "M8[s]", "S3", "i4,f4"])
def test_what_has_no_sums_is_not_accumulated(dtype: str) -> None:
    plan = WindowPlan(Loopback(), ONE, Box((-1,), (5,)), "wrap")
    with refused("accumulate", "y", "summed"):
        plan.accumulate(np.zeros(6, dtype))
    x = np.frombuffer(np.random.default_rng(0).bytes(np.dtype(dtype).itemsize * 4), dtype)
    if dtype != "bool":
        assert plan.exchange(x).tobytes() == x[[3, 0, 1, 2, 3, 0]].tobytes()


def test_out_that_overlaps_is_refused_unless_it_is_the_inside() -> None:
    plan, memory = WindowPlan(Loopback(), ONE, Box((-1,), (5,)), "wrap"), np.arange(10.0)
    for _ in range(3):
        with pytest.raises(ValueError, match="overlaps"):
            plan.exchange(memory[2:6], memory[0:6])
        assert plan.exchange(memory[1:5], memory[0:6]) is not None
        assert plan.exchange(np.zeros(8)[::2], np.zeros(6)) is not None  # strides of the next one
        with pytest.raises(ValueError, match="overlaps"):
            plan.exchange(memory[1:9:2], memory[0:6])  # begins as the inside does


def test_handles_and_freed_plans() -> None:
    plan = WindowPlan(Loopback(), ONE, Box((-1,), (5,)), "wrap")
    one, two = plan.begin(np.ones(4)), plan.begin(np.ones(4))
    with pytest.raises(RuntimeError, match="2 are under way"):
        plan.begin(np.ones(4))
    assert (one.finish() == two.finish()).all()
    with pytest.raises(RuntimeError, match="finished"):
        one.finish()
    with plan:
        pass
    with pytest.raises(RuntimeError, match="plan 'windows' is freed"):
        plan.exchange(np.ones(4))


def test_distributed_arrays_are_checked() -> None:
    world, two = Loopback(), Layout.grid((4,), (2,))
    for what, call in {
        ("DistArray", "local"): lambda: DistArray(world, ONE, np.zeros(3)),
        ("DistArray", "layout"): lambda: DistArray(world, two, np.zeros(2)),
        ("DistArray.gather", "root"): lambda: DistArray(world, ONE, FOUR).gather(1),
        ("DistArray.from_global", "array"): lambda: DistArray.from_global(world, ONE, np.zeros(5)),
        ("redistribute", "layout_to"): lambda: redistribute(world, FOUR, ONE, two),
    }.items():
        with refused(*what):
            call()
    with pytest.raises(ValueError, match="another layout"):
        plan = WindowPlan(world, Layout.grid((5,), (1,)), Box((0,), (5,)))
        DistArray(world, ONE, FOUR).window(plan)
