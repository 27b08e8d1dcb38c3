"""Windows of distributed arrays on real ranks: the bits of numpy.pad, and exact transposes.

Continuous integration runs these on 2, 3 and 4 ranks with two MPIs: 1,200 cases, no two alike, on
1 to 4 ranks; make test-slow has 2,000 more on 2 ranks.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from darray_cases import PADS, Case, check_case, draw, draw_layout, draw_window, shown

from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import Constant
from cpdhpc.world.mpi import World, library_version

TIMEOUT_S = 600.0
CASES = {"memory": 40, "messages": 40}
IN_PARTS = 30  # of each of two parts


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "messages"])
def world(request: pytest.FixtureRequest) -> Any:
    """All ranks; what they send goes through memory that they share, or through MPI."""
    torch.set_num_threads(1)
    world = World(timeout_s=TIMEOUT_S, share_memory=request.param)
    yield world
    world.free()


def together(world: World, problems: list[str]) -> None:
    """Fail on all ranks alike where one has problems."""
    assert [each for some in world.gather(problems) for each in some] == []


def check_cases(world: Any, group: int, cases: int) -> list[str]:
    """Do cases that no other group, number of ranks and MPI has."""
    mpi, problems = "Open MPI" in library_version(), []
    for number in range(cases):
        problems += check_case(world, draw((group, number, mpi), world.size))
    return problems


def test_random_cases_are_those_of_numpy(world: World, request: pytest.FixtureRequest) -> None:
    way = request.node.callspec.id
    together(world, check_cases(world, list(CASES).index(way), CASES[way]))


def test_random_cases_in_parts_of_the_world(world: World) -> None:
    """One rank, and the others, at the same time; the halves where ranks are even in number."""
    group = world.rank // 2 if world.size == 4 else min(world.rank, 1)
    part = world.split(group)
    shared = part.shared() is not None
    together(world, check_cases(part, 100 * world.size + 10 * shared + group, IN_PARTS))
    part.free()


@pytest.mark.slow
def test_many_random_cases(world: World, request: pytest.FixtureRequest) -> None:
    """2,000 more on all ranks, of which mpirun may start any number."""
    together(world, check_cases(world, 1000 + len(request.node.callspec.id), 1000))


BOUNDARIES = [*PADS, "constant"]


def dense(world: World, case: Case, plan: WindowPlan) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of exchange and accumulate over all ranks, column by column, of 0s and 1s.

    Rows of the first are the cells of all windows, rank after rank; columns those of the domain.
    """
    cells = [box.size for box in case.layout.owners]
    windows = [box.size for box in case.windows]
    fill = plan.exchange(np.zeros(plan.owned.shape))  # what is constant
    forth = np.empty((plan.window.size, sum(cells)))
    back = np.empty((plan.owned.size, sum(windows)))
    for matrix, do, box, sizes, constant in (
        (forth, plan.exchange, plan.owned, cells, fill),
        (back, plan.accumulate, plan.window, windows, 0),
    ):
        first = sum(sizes[: world.rank])
        for column in range(sum(sizes)):
            unit = np.zeros(box.size)
            if first <= column < first + box.size:
                unit[column - first] = 1
            matrix[:, column] = (do(unit.reshape(box.shape)) - constant).ravel()
    return np.vstack(world.gather(forth)), np.vstack(world.gather(back))


def small_case(world: World, number: int, modes: tuple[str, ...]) -> Case:
    """A case of at most 12 cells and small windows, so that its matrices are small."""
    rng = np.random.default_rng((number, world.size))
    shape = (int(rng.integers(2, 4)), int(rng.integers(2, 5)))
    layout, windows = draw_layout(rng, shape, world.size), []
    for owned in layout.owners:
        window = draw_window(rng, shape, owned)
        while window.size > 25:
            window = draw_window(rng, shape, owned)
        windows.append(window)
    filled = tuple(Constant(7) if mode == "constant" else mode for mode in modes)
    return Case((number,), layout, tuple(windows), filled, "numpy", "float64", ())


def test_matrices_are_transposes_of_each_other(world: World) -> None:
    """Exactly; and every row of the exchange has a single 1, or none where a window is filled."""
    problems, transposed = [], 0
    pairs = list(product(BOUNDARIES, repeat=2))[world.shared() is None :: 2]
    for number, modes in enumerate(pairs):
        case = small_case(world, number, modes)
        with WindowPlan(world, case.layout, case.windows[world.rank], case.modes) as plan:
            forth, back = dense(world, case, plan)
        filled = sum((shown_by_none(case, rank)).sum() for rank in range(world.size))
        ones = forth.sum(axis=1)
        right = set(np.unique(forth)) <= {0, 1} and (ones == 0).sum() == filled
        if not (right and set(ones) <= {0, 1} and (forth == back.T).all()):
            problems.append(f"{case}")
        transposed += forth.size > 0
    together(world, problems)
    assert transposed > 12


def shown_by_none(case: Case, rank: int) -> np.ndarray:
    """Which cells of a rank's window are filled."""
    modes = [Constant(0) if isinstance(m, Constant) else m for m in case.modes]
    return shown(np.ones(case.layout.shape), case.windows[rank], modes) == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_sums_of_floats_have_the_same_bits_every_time(world: World, dtype: type) -> None:
    """The first call goes by slices, the next ones are compiled; sums are rounded alike."""
    problems = []
    for number in range(12):
        case = draw((77, number), world.size)
        box, rng = case.windows[world.rank], case.rng(world.rank)
        y = (rng.standard_normal(box.shape + case.trail) * 100).astype(dtype)
        with WindowPlan(world, case.layout, box, case.modes) as plan:
            sums = [plan.accumulate(each).tobytes() for each in (y, y, np.asfortranarray(y), y)]
        if len(set(sums)) != 1:
            problems.append(str(case))
    together(world, problems)
