"""Faults put into exchanges and accumulations, by slices and compiled, to see that they are found.

python -m mpi4py tests/helpers/darray_mutants.py prints how many of 200 random plans verify refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from darray_cases import draw

from cpdhpc.darray import by_slices, compiled
from cpdhpc.darray.compiled import ACCUMULATE
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.ops import moves

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
    return of_sums(unpack=lambda *_: None, unpack_rows=lambda *_: [])


def assigned() -> Any:
    """What comes from other ranks takes the place of the sum."""

    def unpack(cut: Any, pieces: Any, values: Any, out: Any) -> None:
        for piece, part in by_slices.parts(cut, pieces, out, values):
            out[piece.source.slices(cut.owned.start)] = part

    def rows(frame: Any, piece: Any, base: int, offset: int) -> Any:
        came = frame.message(base, offset, piece)
        shape = piece.source.shape + frame.trail
        return moves.copy(shape, frame.itemsize, came, frame.source(piece))

    return of_sums(unpack=unpack, unpack_rows=rows)


@contextmanager
def ignored_flip() -> Iterator[None]:
    """Mirrored cells are shown, and summed, in the order of their sources."""
    target = compiled.Frame.target

    def straight(self: Any, piece: Any) -> Any:
        return target(self, piece._replace(steps=tuple(map(abs, piece.steps))))

    with ExitStack() as stack:
        stack.enter_context(patch.object(compiled.Frame, "target", straight))
        stack.enter_context(patch.object(by_slices.ArrayBackend, "flip", lambda self, x, axes: x))
        yield


@contextmanager
def one_of_many() -> Iterator[None]:
    """Of the cells that show the same cell at an edge only the first is summed."""
    repeats = by_slices.Piece.repeats

    def gathered(self: Any, y: Any, piece: Any) -> Any:
        return self.turned(y[self.target(piece)], piece)[next(repeats(piece))]

    with ExitStack() as stack:
        stack.enter_context(patch.object(by_slices.Cut, "gathered", gathered))
        stack.enter_context(
            patch.object(by_slices.Piece, "repeats", lambda self: [next(repeats(self))])
        )
        yield


@contextmanager
def own_overwritten() -> Iterator[None]:
    """Mirrors of a rank's own cells take the place of the sum."""

    def own(cut: Any, plan: Any, y: Any, out: Any) -> None:
        for box in plan.uncovered:
            out[box.slices(cut.owned.start)] = 0
        for piece in plan.local:
            out[piece.source.slices(cut.owned.start)] = cut.gathered(y, piece)

    def rows(frame: Any, piece: Any, base: int, offset: int) -> Any:
        return moves.copy(
            piece.source.shape + frame.trail, frame.itemsize,
            frame.message(base, offset, piece), frame.source(piece),
        )  # fmt: skip

    def own_rows(*arguments: Any) -> Any:
        with patch.object(compiled, "add_sums", rows):
            return before(*arguments)

    before = ACCUMULATE.own_rows
    with of_sums(own=own, own_rows=own_rows):
        yield


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
