"""Faults put into the description of exchanges and accumulations, to see that they are found.

python -m mpi4py tests/helpers/darray_mutants.py prints how many of 200 random plans verify refuses.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from darray_cases import draw

from cpdhpc.darray import copies
from cpdhpc.darray.copies import ACCUMULATE
from cpdhpc.darray.plan import WindowPlan

PLANS = 200


@contextmanager
def of_sums(**functions: Any) -> Iterator[None]:
    """Other functions in the accumulation, which is frozen."""
    before = {name: getattr(ACCUMULATE, name) for name in functions}
    try:
        for name, function in functions.items():
            object.__setattr__(ACCUMULATE, name, function)
        yield
    finally:
        for name, function in before.items():
            object.__setattr__(ACCUMULATE, name, function)


def dropped() -> Any:
    """What other ranks' windows send back is not added."""
    return of_sums(unpack=lambda *_: [])


def assigned() -> Any:
    """What comes from other ranks takes the place of the sum."""
    return of_sums(unpack=lambda *given: assigning(copies.add_sums(*given)))


def own_overwritten() -> Any:
    """Mirrors of a rank's own cells take the place of the sum."""
    return of_sums(own=lambda frame: assigning(copies.sum_own(frame)))


def assigning(found: Iterable[copies.Copy]) -> Iterator[copies.Copy]:
    for each in found:
        yield each._replace(adds=False)


def ignored_flip() -> Any:
    """Mirrored cells are shown, and summed, in the order of their sources."""
    return patch.object(copies.Frame, "turned", lambda self, values, piece: values)


def one_of_many() -> Any:
    """Of the cells that show the same cell at an edge only the first is summed."""
    repeats = copies.Piece.repeats
    return patch.object(copies.Piece, "repeats", lambda self: [next(repeats(self))])


MUTANTS: dict[str, Callable[[], Any]] = {
    "remote gradients dropped": dropped,
    "assignment for addition": assigned,
    "flips ignored": ignored_flip,
    "one cell of an edge summed": one_of_many,
    "own mirrors overwrite": own_overwritten,
}


def refused(world: Any, number: int) -> bool:
    """Whether verify refuses the plan of a random case."""
    case = draw((31, number), world.size)
    plan = WindowPlan(world, case.layout, case.windows[world.rank], case.modes, name="mutant")
    try:
        plan.verify()
    except ArithmeticError:
        return True
    finally:
        plan.free()
    return False


if __name__ == "__main__":
    from cpdhpc.world.mpi import World

    everyone = World(timeout_s=300)
    found = {"nothing": sum(refused(everyone, i) for i in range(PLANS))}
    for title, mutant in MUTANTS.items():
        with mutant():
            found[title] = sum(refused(everyone, i) for i in range(PLANS))
    if everyone.rank == 0:
        print(everyone.size, "ranks:", found)
