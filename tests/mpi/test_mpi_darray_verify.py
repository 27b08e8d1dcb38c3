"""plan.verify finds the faults put into exchanges; docs/reference/darray.md has the figures."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from darray_mutants import MUTANTS

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.world.mpi import World

MODES = ("reflect", "edge")


def plan_of(world: World, modes: Any = MODES, **options: Any) -> WindowPlan:
    """Strips of a domain; windows are wider on all sides."""
    layout = Layout.grid((3 * world.size, 5), (world.size, 1))
    start, stop = layout.owner(world.rank)
    window = Box((start[0] - 3, -3), (stop[0] + 2, 8))
    return WindowPlan(world, layout, window, modes, name="strips", **options)


def test_a_sound_plan_passes_and_shows_its_figures(world: World) -> None:
    with plan_of(world) as plan:
        found = plan.verify()
    cells = world.size * 8 * 11
    assert found.passed and found.cells == cells and found.owned_cells == 15 * world.size
    assert str(found) == (
        f"0 of {cells} cells of windows wrong, <Ex, y> - <x, E'y> = 0, 0 of {15 * world.size} "
        "counts wrong, 3 calls each"
    )


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_fault_is_found_on_all_ranks_with_figures(
    world: World, mutant: Callable[[], Any]
) -> None:
    with mutant(), plan_of(world) as plan, pytest.raises(ArithmeticError) as raised:
        plan.verify()
    said = world.gather(str(raised.value))
    assert set(said) == {said[0]}
    figures = re.fullmatch(
        r"verify: plan 'strips': (\d+) of \d+ cells of windows wrong, <Ex, y> - <x, E'y> = "
        r"(-?\d+), (\d+) of \d+ counts wrong, 3 calls each",
        said[0],
    )
    assert figures is not None and any(int(each) for each in figures.groups()), said[0]


def test_a_plan_that_rounds_cannot_be_verified(world: World) -> None:
    with plan_of(world, wire="e4m3") as plan, pytest.raises(ValueError, match="plan 'strips'"):
        plan.verify()
