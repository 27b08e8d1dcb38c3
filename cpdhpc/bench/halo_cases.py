"""The cases of the halo benchmark: ours and MPI's ways over the same arrays, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..comm import Ranks
from ..comm.halo_baselines import WAYS, Halo, Place
from ..comm.world import World
from ..darray import WindowPlan
from ..darray.spec import Spec
from ..darray.windows import Piece
from . import halo_numbers

Array = NDArray[Any]
OURS = "cpdhpc"
COPIED = "cpdhpc, copied"  # owned cells lie elsewhere and are copied too
MPI_TYPES = ("subarray", "subarray, persistent", "alltoallw")  # without packing: to be compared to
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
            world, windows.layout, windows.boxes[world.rank], spec.modes, wire=spec.wire,
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
        numbers = _numbers(operation, plan, trail, spec.dtype)
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


def _numbers(
    operation: str, plan: WindowPlan, trail: tuple[int, ...], dtype: str
) -> tuple[Array, Array]:
    """Return what is given and what it must become."""
    if operation == EXCHANGE:
        given = halo_numbers.owned_numbers(plan, trail, dtype)
        return given, halo_numbers.exchanged(plan, trail, dtype)
    given = halo_numbers.window_numbers(plan, plan.rank, trail, dtype)
    return given, halo_numbers.accumulated(plan, trail, dtype)


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
        baseline = world.halo_by_mpi(way, halo)
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
