"""The cases of the halo benchmark: usual ones, ours and MPI's ways, and what must come out.

The right numbers are found by remainders, cell by cell, and not by the segments and pieces that
plans are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..darray.describe import cells_shown, flat_index
from ..darray.plan import WindowPlan
from ..darray.show import Spec, spec_of
from ..darray.windows import Piece, fill_value
from ..methods import HALO_COPIED, HALO_MPI_TYPES, HALO_OURS
from ..world.mpi import World
from ..world.ranks import Ranks
from .baselines import WAYS, Halo, Place

Array = NDArray[Any]
OURS, COPIED, MPI_TYPES = HALO_OURS, HALO_COPIED, HALO_MPI_TYPES
EXCHANGE, ACCUMULATE = "exchange", "accumulate"


class Arrays(NamedTuple):
    """A rank's arrays: on the window, the part of it that the rank owns, and the same apart."""

    window: Array
    own: Array
    apart: Array


@dataclass
class Case:
    """A call to time.

    prepare: what the arrays must hold before a check; out: where the result is
    wanted: what it must be
    """

    operation: str
    way: str
    run: Callable[[], object]
    prepare: Callable[[], object]
    out: Array
    wanted: Array
    free: Callable[[], object] = field(default=lambda: None)

    @property
    def is_mpi_types(self) -> bool:
        """Whether it is one of MPI's ways that are given a datatype."""
        return self.way in MPI_TYPES

    def check(self, world: Ranks) -> None:
        """Run once on fresh arrays. Collective.

        Raises ArithmeticError on all ranks where a cell of one is wrong.
        """
        self.prepare()
        world.barrier("bench halo")
        self.run()
        wrong = int((self.out != self.wanted).sum())
        found = world.gather(wrong, "bench halo")
        if any(found):
            raise ArithmeticError(
                f"bench halo: {self.operation} by {self.way}: {sum(found)} values are wrong, the "
                f"first on rank {next(i for i, n in enumerate(found) if n)}"
            )


class Setting(NamedTuple):
    """What is measured: a plan that is written down, by a name."""

    name: str
    spec: Spec

    def plan(self, world: Ranks) -> WindowPlan:
        """Return the plan. Collective."""
        windows, spec = self.spec.geometry(), self.spec
        return WindowPlan(
            world, windows.layout, windows.boxes[world.process], spec.modes, wire=spec.wire,
            name=self.name,
        )  # fmt: skip


@contextmanager
def open_cases(
    world: World,
    setting: Setting,
    plan: WindowPlan,
    operations: Sequence[str],
    ways: Sequence[str],
    check: bool = True,
) -> Iterator[list[Case]]:
    """Yield the cases of a setting, checked unless they have been. Collective.

    ways: of OURS, COPIED and the names of WAYS; those of MPI are left out where a window shows
    cells backwards or many times, which no datatype says, and accumulations of what has no sum or
    is rounded
    """
    spec = setting.spec
    trail = tuple(spec.trail)
    window = np.empty((*plan.window.shape, *trail), spec.dtype)
    inside = plan.window.contains(plan.owned)
    own = plan.inside(window) if inside else np.empty((*plan.owned.shape, *trail), spec.dtype)
    arrays = Arrays(window, own, np.empty(own.shape, own.dtype))
    cases: list[Case] = []
    everyone = world.gather((inside, by_datatypes(plan)), "bench halo")
    if not all(each[0] for each in everyone):
        ways = [way for way in ways if way == COPIED]
    if not all(each[1] for each in everyone):
        ways = [way for way in ways if way not in WAYS]
    for operation in operations:
        if operation == ACCUMULATE and not has_sums(spec):
            continue
        numbers = _settings(operation, plan, trail, spec.dtype)
        cases += [_case(world, way, operation, plan, arrays, numbers) for way in ways]
    try:
        for case in cases if check else ():
            case.check(world)
        yield cases
    finally:
        for case in cases:
            case.free()


def has_sums(spec: Spec) -> bool:
    """Whether what an accumulation gives is known exactly."""
    return spec.dtype != "bool" and (spec.wire == "raw" or "edge" not in spec.modes)


def by_datatypes(plan: WindowPlan) -> bool:
    """Whether datatypes can say what this rank receives and sends."""
    pieces = [p for message in (*plan.sends, *plan.recvs) for p in message.pieces] + [*plan.local]
    return all(min(piece.steps) == 1 for piece in pieces)


def _settings(
    operation: str, plan: WindowPlan, trail: tuple[int, ...], dtype: str
) -> tuple[Array, Array]:
    """Return what is given and what it must become."""
    if operation == EXCHANGE:
        given = owned_numbers(plan, trail, dtype)
        return given, exchanged(plan, trail, dtype)
    given = window_numbers(plan, plan.rank, trail, dtype)
    return given, accumulated(plan, trail, dtype)


def _case(
    world: World,
    way: str,
    operation: str,
    plan: WindowPlan,
    arrays: Arrays,
    numbers: tuple[Array, Array],
) -> Case:
    given, wanted = numbers
    adds = operation == ACCUMULATE
    own = arrays.apart if way == COPIED else arrays.own
    source, out = (arrays.window, own) if adds else (own, arrays.window)

    def prepare() -> None:
        out[...] = 77  # what must be overwritten
        if way in WAYS and not adds:  # MPI codes fill what lies beyond the domain once
            for fill in plan.fills:
                arrays.window[fill.target.slices(plan.window.start)] = fill.value
        source[...] = given

    if way in WAYS:
        halo = halo_of(plan, arrays.window, adds)
        baseline = WAYS[way](*world.plain_mpi(), halo)
        return Case(operation, way, baseline.run, prepare, out, wanted, baseline.free)
    call = plan.accumulate if adds else plan.exchange
    return Case(operation, way, lambda: call(source, out), prepare, out, wanted)


def halo_of(plan: WindowPlan, window: Array, adds: bool) -> Halo:
    """Return the messages of a plan as places in the window; those to this rank itself, too."""
    own = [piece for piece in plan.local if not piece.is_itself]
    to_self = {plan.rank: own} if own else {}
    sources = {m.rank: m.pieces for m in plan.sends} | to_self
    targets = {m.rank: m.pieces for m in plan.recvs} | to_self
    gives = {rank: [_place(plan, p.source) for p in sources[rank]] for rank in sorted(sources)}
    takes = {rank: [_place(plan, p.target) for p in targets[rank]] for rank in sorted(targets)}
    return Halo(window, takes, gives, True) if adds else Halo(window, gives, takes, False)


def _place(plan: WindowPlan, box: Any) -> Place:
    place: Place = box.slices(plan.window.start)
    return place


def run_bytes(plan: WindowPlan, pieces: Sequence[Piece], cell_bytes: int) -> int:
    """Return the bytes that lie together in the window, of the first piece; 0 of none."""
    if not pieces:
        return 0
    run, shape = cell_bytes, pieces[0].target.shape
    for n, extent in zip(reversed(shape), reversed(plan.window.shape), strict=True):
        run *= n
        if n != extent:
            break
    return run


def sent_bytes(plan: WindowPlan, spec: Spec) -> int:
    """Return the bytes of cells that this rank sends in an exchange."""
    cell_bytes = np.dtype(spec.dtype).itemsize * prod(spec.trail)
    return sum(message.cells for message in plan.sends) * cell_bytes


class Usual(NamedTuple):
    """A setting for any number of ranks.

    block: cells of a rank; axes: that are split, evenly where there are several
    """

    block: tuple[int, ...]
    axes: tuple[int, ...]
    halo: list[int]
    trail: tuple[int, ...] = ()
    boundary: str = "none"
    text: str = ""


USUAL = {
    "rows": Usual((100, 200), (0,), [10, 0], (96,), text="images, batch innermost, by rows"),
    "columns": Usual((200, 100), (1,), [0, 10], (96,), text="the same by columns"),
    "nchw": Usual((96, 2, 200, 100), (3,), [0, 0, 0, 5], text="batch first, by columns"),
    "cube": Usual((64, 64, 64), (2,), [0, 0, 1], text="a block of 64^3, by its last axis"),
    "small": Usual((16, 16, 16), (1,), [0, 1, 0], text="a block of 16^3, by its middle axis"),
    "torus": Usual((256, 256), (0, 1), [1, 1], boundary="wrap", text="a periodic grid, corners"),
}  # fmt: skip


def usual(name: str, ranks: int, laid_over: dict[str, Any]) -> Setting:
    """Return a usual setting for so many ranks, some of its keys replaced.

    Raises ConfigError where they do not fit.
    """
    of = USUAL[name]
    procs = [1] * len(of.block)
    for axis, n in zip(of.axes, factors(ranks, len(of.axes)), strict=True):
        procs[axis] = n
    raw = {
        "shape": [n * p for n, p in zip(of.block, procs, strict=True)],
        "procs": procs,
        "halo": of.halo,
        "boundary": of.boundary,
        "trail": list(of.trail),
    }
    return Setting(name, spec_of(raw | laid_over, f"bench halo: {name}"))


def factors(ranks: int, count: int) -> list[int]:
    """Return so many factors of a number, as near to one another as can be, rising."""
    if count == 1:
        return [ranks]
    first = next(n for n in range(int(ranks ** (1 / count) + 1e-9), 0, -1) if ranks % n == 0)
    return [first, *factors(ranks // first, count - 1)]


LARGEST = {True: 30, False: 2}  # by whether cells travel as they are: every format has 0, 1 and 2
FACTORS = 7, 13, 5  # of a cell's number, a window's rank and a further place


def owned_numbers(plan: WindowPlan, trail: Sequence[int], dtype: str) -> Array:
    """Return the integers at the cells that this rank owns."""
    axes = [np.arange(a, max(a, b)) for a, b in zip(*plan.owned, strict=True)]
    return _numbers(flat_index(axes, plan.layout.shape), 0, trail, plan).astype(dtype)


def window_numbers(plan: WindowPlan, rank: int, trail: Sequence[int], dtype: str) -> Array:
    """Return other integers, on the window of a rank."""
    return _on_window(plan, rank, trail).astype(dtype)


def exchanged(plan: WindowPlan, trail: Sequence[int], dtype: str) -> Array:
    """Return what this rank's window must show."""
    axes = [cells_shown(plan, plan.window, axis) for axis in range(plan.window.ndim)]
    wanted = _numbers(flat_index(axes, plan.layout.shape), 0, trail, plan).astype(dtype)
    for axis, mode in enumerate(plan.windows.modes):  # the last axis counts
        value = fill_value(mode)
        if value is not None:
            wanted[(slice(None),) * axis + (axes[axis] < 0,)] = value
    return wanted


def accumulated(plan: WindowPlan, trail: Sequence[int], dtype: str) -> Array:
    """Return the sums that this rank must find at its cells."""
    total = np.zeros((*plan.owned.shape, *trail), np.int64)
    for rank in plan.windows.readers(plan.rank):
        window, values = plan.windows.boxes[rank], _on_window(plan, rank, trail)
        for axis in range(window.ndim):
            shown = cells_shown(plan, window, axis) - plan.owned.start[axis]
            values = _summed(values, axis, shown, plan.owned.shape[axis])
        total += values
    return total.astype(dtype)


def _numbers(index: Array, rank: int, trail: Sequence[int], plan: WindowPlan) -> Array:
    largest = LARGEST[plan.packed is None]
    of_cell, of_rank, of_place = FACTORS
    index = of_cell * index + of_rank * rank
    if trail:
        place = flat_index([np.arange(n) for n in trail], trail)
        index = index.reshape(index.shape + (1,) * len(trail)) + of_place * place
    values: Array = index % (2 * largest + 1) - largest
    return values


def _on_window(plan: WindowPlan, rank: int, trail: Sequence[int]) -> Array:
    shape = plan.windows.boxes[rank].shape
    return _numbers(flat_index([np.arange(n) for n in shape], shape), 1 + rank, trail, plan)


def _summed(values: Array, axis: int, shown: Array, extent: int) -> Array:
    """Return the sums of the values that show each of extent cells along an axis."""
    moved = np.moveaxis(values, axis, 0)
    total = np.zeros((extent, *moved.shape[1:]), np.int64)
    for place, cell in enumerate(shown):
        if 0 <= cell < extent:
            total[cell] += moved[place]
    return np.moveaxis(total, 0, axis)
