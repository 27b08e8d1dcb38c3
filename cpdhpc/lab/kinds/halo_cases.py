"""The cases of the halo benchmark: cpdhpc's, those that MPI programs write, and right results.

The right numbers are computed by remainders, cell by cell, without the segments and pieces of
plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...darray.describe import expected_window, owned_index
from ...darray.plan import WindowPlan
from ...darray.windows import flat_index
from ...methods import HALO_COPIED, HALO_MPI_TYPES, HALO_OURS
from ...ops import to_host
from ...ops.reference import random31
from ...randomness import random_key
from ...world.gpu_messages import gpu_aware
from ...world.mpi import World
from ...world.ranks import Ranks
from ..darray_show import OPTIONS, HaloSpec, parsed, spec_of
from ..study_data import Factors, Value
from .timing import on_device, whole

Array = NDArray[Any]
Run = Callable[[], object]
OURS, COPIED, MPI_TYPES = HALO_OURS, HALO_COPIED, HALO_MPI_TYPES
EXCHANGE, ACCUMULATE = "exchange", "accumulate"


@dataclass
class HaloCase:
    """A call to time.

    prepare: sets the arrays before a check; out: the result; expected: the right result
    free: frees requests and datatypes
    """

    operation: str
    way: str
    run: Run
    prepare: Run
    out: Array
    expected: Array
    free: Run = lambda: None

    def check(self, world: Ranks) -> None:
        """Run once on fresh arrays. Collective.

        Raises ArithmeticError on all ranks if a cell of one is wrong.
        """
        self.prepare()
        world.barrier("bench halo")
        self.run()
        wrong = world.gather(int((to_host(self.out) != self.expected).sum()), "bench halo")
        if any(wrong):
            raise ArithmeticError(
                f"bench halo: {self.operation} by {self.way}: {sum(wrong)} values are wrong, the "
                f"first on rank {next(i for i, n in enumerate(wrong) if n)}"
            )


class Setting(NamedTuple):
    """A grid with halos, with a name."""

    name: str
    spec: HaloSpec

    def __str__(self) -> str:
        """Return the keys as text."""
        spec = self.spec
        trail = f" x {spec.trail}" if spec.trail else ""
        return (
            f"{self.name}: {spec.shape}{trail} {spec.dtype} over {spec.procs}, halo {spec.halo}, "
            f"boundary {spec.boundary}, wire {spec.wire}"
        )

    @classmethod
    def of(cls, factors: Factors) -> Setting:
        """Return the setting of a case that has a shape, see factors. Raises ConfigError."""
        keys = {key: str(factors["widths" if key == "halo" else key]) for key in OPTIONS}
        return cls(str(factors["setting"]), spec_of(parsed(keys), "halo"))

    @property
    def factors(self) -> dict[str, Value]:
        """The factors of cases with this setting, as texts of options."""
        keys = {key: _text(getattr(self.spec, key)) for key in OPTIONS}
        return {"setting": self.name, "widths": keys.pop("halo"), **keys}

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, with all its further axes."""
        return np.dtype(self.spec.dtype).itemsize * prod(self.spec.trail)

    def plan(self, world: Ranks) -> WindowPlan:
        """Return the plan. Collective."""
        windows, spec = self.spec.geometry(), self.spec
        window = windows.boxes[world.process]
        given = world, windows.layout, window, spec.modes
        return WindowPlan(*given, wire=spec.wire, name=self.name)

    def sent_bytes(self, plan: WindowPlan) -> int:
        """Return the bytes of cells that this rank sends in an exchange."""
        return sum(message.cells for message in plan.sends) * self.cell_bytes


def _text(value: Any) -> str:
    """Return 1,0:2 of [1, [0, 2]]."""
    if not isinstance(value, list):
        return str(value)
    return ",".join(":".join(map(str, n)) if isinstance(n, list) else str(n) for n in value)


def possible_ways(
    world: World, plan: WindowPlan, ways: Sequence[str], device: str
) -> Sequence[str]:
    """Return those of some ways that a plan can go. Collective.

    Those of MPI are left out if a window shows cells backwards or many times, which no datatype
    describes, and for arrays on a GPU whose memory MPI does not take.
    """
    inside = plan.window.contains(plan.owned)
    everyone = world.gather((inside, _has_datatypes(plan)), "bench halo")
    if not all(each[0] for each in everyone):
        ways = [way for way in ways if way == COPIED]
    if not all(each[1] for each in everyone) or (device == "gpu" and not gpu_aware(world).yes):
        ways = [way for way in ways if way not in WAYS]
    return ways


@contextmanager
def open_cases(
    world: World,
    setting: Setting,
    plan: WindowPlan,
    operations: Sequence[str],
    ways: Sequence[str],
    check: bool = True,
    device: str = "cpu",
) -> Iterator[list[HaloCase]]:
    """Yield the cases of a setting, checked if check is true. Collective.

    ways: of OURS, COPIED and the names of WAYS; only possible_ways are taken, and accumulations
        only if has_sums
    """
    spec = setting.spec
    window = on_device(np.empty((*plan.window.shape, *spec.trail), spec.dtype), device)
    ways = possible_ways(world, plan, ways, device)
    cases: list[HaloCase] = []
    for operation in operations:
        if operation == EXCHANGE or has_sums(spec):
            given, expected = given_and_expected(operation, plan, spec)
            numbers = on_device(given, device), expected
            cases += [_case(world, way, operation, plan, window, *numbers) for way in ways]
    try:
        for case in cases if check else ():
            case.check(world)
        yield cases
    finally:
        for case in cases:
            case.free()


def has_sums(spec: HaloSpec) -> bool:
    """Return whether the result of an accumulation is known exactly."""
    return spec.dtype != "bool" and (spec.wire == "raw" or "edge" not in spec.modes)


def _has_datatypes(plan: WindowPlan) -> bool:
    """Return whether datatypes can express the cells that this rank receives and sends."""
    pieces = [p for message in (*plan.sends, *plan.recvs) for p in message.pieces] + [*plan.local]
    return all(min(piece.steps) == 1 for piece in pieces)


def _case(
    world: World,
    way: str,
    operation: str,
    plan: WindowPlan,
    window: Array,
    given: Array,
    expected: Array,
) -> HaloCase:
    adds = operation == ACCUMULATE
    apart = np.empty_like(window, shape=(expected if adds else given).shape)
    own = apart if way == COPIED else plan.inside(window)
    source, out = (window, own) if adds else (own, window)

    def prepare() -> None:
        out[...] = 77  # must be overwritten
        if way in WAYS and not adds:  # MPI programs fill cells beyond the domain once
            for fill in plan.fills:
                window[fill.target.slices(plan.window.start)] = fill.value
        source[...] = given

    if way in WAYS:
        messages = MpiMessages(*world.plain_mpi(), window, *_places(plan, adds), adds)
        run = whole(WAYS[way](messages), window)
        return HaloCase(operation, way, run, prepare, out, expected, messages.free)
    call = plan.accumulate if adds else plan.exchange
    run = whole(lambda: call(source, out), window)
    return HaloCase(operation, way, run, prepare, out, expected)


Draw = Callable[[Array, Array, int], Array]  # (cells, places in a cell, rank) -> their values


def given_and_expected(
    operation: str, plan: WindowPlan, spec: HaloSpec, draw: Draw | None = None
) -> tuple[Array, Array]:
    """Return the input of an operation and its right result, of spec's dtype.

    draw: values by flat indices, and by 1 + the rank of a window, 0 for the domain; by default
    small integers that every format has. Sums are exact, or of float64.
    """
    numbers, trail = draw or _integers(LARGEST[plan.packed is None]), spec.trail
    places = flat_index([np.arange(n) for n in trail], trail) if trail else np.zeros((), np.int64)

    def values_of(index: Array, rank: int = 0) -> Array:
        return numbers(index.reshape(index.shape + (1,) * len(trail)), places, rank)

    def on_window(rank: int) -> Array:
        shape = plan.windows.boxes[rank].shape
        return values_of(flat_index([np.arange(n) for n in shape], shape), 1 + rank)

    if operation == EXCHANGE:
        given = values_of(owned_index(plan)).astype(spec.dtype)
        return given, expected_window(plan, values_of, spec.dtype)
    given = on_window(plan.rank).astype(spec.dtype)
    dtype = np.int64 if draw is None else np.float64
    total: Array = np.zeros((*plan.owned.shape, *trail), dtype)
    for rank in plan.windows.readers(plan.rank):
        values = on_window(rank)
        for axis, shown in enumerate(plan.windows.shown(rank)):
            cells = shown - plan.owned.start[axis]
            values = _summed(values, axis, cells, plan.owned.shape[axis])
        total += values
    return given, total.astype(spec.dtype)


def relative_error(
    world: Ranks, operation: str, plan: WindowPlan, spec: HaloSpec, device: str = "cpu"
) -> float:
    """Return the relative error of a transfer of standard normal data. Collective.

    It is in the Euclidean norm, over the results of all ranks: whole windows, with a rank's own
    cells, or the sums. Arrays are new, of float32.
    """
    given, expected = given_and_expected(operation, plan, spec, _normal)
    call = plan.accumulate if operation == ACCUMULATE else plan.exchange
    found = to_host(call(on_device(given, device))).astype(np.float64)
    exact = expected.astype(np.float64)
    own = float(np.sum((found - exact) ** 2)), float(np.sum(exact**2))
    wrong, whole_norm = np.sum(world.gather(own, "bench halo: errors"), axis=0)
    return float(np.sqrt(wrong / whole_norm)) if whole_norm else 0.0


def _summed(values: Array, axis: int, cells: Array, extent: int) -> Array:
    """Return the sums of the values that show each of extent cells along an axis."""
    moved = np.moveaxis(values, axis, 0)
    total = np.zeros((extent, *moved.shape[1:]), values.dtype)
    for place, cell in enumerate(cells):
        if 0 <= cell < extent:
            total[cell] += moved[place]
    return np.moveaxis(total, 0, axis)


LARGEST = {True: 30, False: 2}  # by whether the wire is raw: every format has 0, 1 and 2
FACTORS = 7, 13, 5  # of a cell's number, a window's rank and a further place


def _integers(largest: int) -> Draw:
    """Return a function of small integers that differ from cell to cell and window to window."""
    of_cell, of_rank, of_place = FACTORS

    def draw(cells: Array, places: Array, rank: int) -> Array:
        numbers = of_cell * cells + of_rank * rank + of_place * places
        values: Array = numbers % (2 * largest + 1) - largest
        return values

    return draw


def _normal(cells: Array, places: Array, rank: int) -> Array:
    """Return standard normal values that float32 has, as float64[cells, places].

    They are functions of the indices, as each rank needs those of the others.
    Source: Box, Muller: A note on the generation of random normal deviates, 1958.
    """
    index = (cells * places.size + places).astype(np.uint64)
    one, two = ((random31(random_key(rank, i), index) + 0.5) / 2**31 for i in range(2))
    values: Array = np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * two)
    return values.astype(np.float32).astype(np.float64)


Place = tuple[slice, ...]  # a box of an array, by the first axes
Places = Mapping[int, Sequence[Place]]  # of each rank that a rank exchanges messages with
NAMED = "fdbBhHiIlLqQFD?"  # dtypes, by NumPy's characters, for which every MPI has a datatype


def _places(plan: WindowPlan, adds: bool) -> tuple[Places, Places]:
    """Return the boxes of sent and received messages in the window, also of those to itself."""
    own = [piece for piece in plan.local if not piece.is_itself]
    to_self = {plan.rank: own} if own else {}
    origin = plan.window.start
    sources = {message.rank: message.pieces for message in plan.sends} | to_self
    targets = {message.rank: message.pieces for message in plan.recvs} | to_self
    gives = {r: [p.source.slices(origin) for p in sources[r]] for r in sorted(sources)}
    takes = {r: [p.target.slices(origin) for p in targets[r]] for r in sorted(targets)}
    return (takes, gives) if adds else (gives, takes)


class PackedPlaces:
    """Contiguous memory for the cells of places of an array, one part for each rank."""

    def __init__(self, array: Array, places: Places) -> None:
        sizes = {rank: sum(array[p].size for p in each) for rank, each in places.items()}
        self.memory = np.empty_like(array, shape=(sum(sizes.values()),))
        ends = np.cumsum([0, *sizes.values()]).tolist()
        self.parts = {r: self.memory[a:b] for r, a, b in zip(sizes, ends, ends[1:], strict=False)}
        self.offsets_bytes = [first * array.dtype.itemsize for first in ends[:-1]]
        self._pairs: list[tuple[Array, Array]] = []  # a place, and its cells in the memory
        last = 0
        for there in (array[place] for each in places.values() for place in each):
            self._pairs.append((there, self.memory[last : last + there.size].reshape(there.shape)))
            last += there.size

    def pack(self) -> None:
        """Copy the places into the memory."""
        for there, part in self._pairs:
            part[...] = there

    def unpack(self) -> None:
        """Copy the memory to the places."""
        for there, part in self._pairs:
            there[...] = part

    def add(self) -> None:
        """Add the memory to the places."""
        for there, part in self._pairs:
            there += part


class MpiMessages:
    """The messages of a rank's array to and from others, for MPI.

    array: C-contiguous, of NumPy or CuPy
    sends, receives: places by rank, this one included, in the same order on both ranks
    adds: whether received cells are added to the array, rank by rank
    received: memory for cells to be added; outgoing, incoming: (buffer, rank) by datatypes
    """

    def __init__(
        self, mpi: Any, comm: Any, array: Array, sends: Places, receives: Places, adds: bool
    ) -> None:
        self.mpi, self.comm, self.array, self.adds = mpi, comm, array, adds
        self.sends, self.receives = sends, receives
        self._made: list[Any] = []
        # MPI reads and writes at once: a GPU must have finished with the memory before.
        self.ready: Run = whole(lambda: None, array)

    def use_datatypes(self) -> None:
        """Make the datatypes of all messages: subarrays, or memory for cells to be added."""
        if self.array.dtype.char in NAMED:
            self._element = self.mpi.Datatype.fromcode(self.array.dtype.char)
        else:
            self._element = self._commit(self.mpi.BYTE.Create_contiguous(self.array.dtype.itemsize))
        self.outgoing = [([self.array, 1, self._type(p)], r) for r, p in self.sends.items()]
        self.received = PackedPlaces(self.array, self.receives) if self.adds else None
        if self.received is None:
            self.incoming = [([self.array, 1, self._type(p)], r) for r, p in self.receives.items()]
        else:
            self.incoming = [
                ([part, 1, self._commit(self._element.Create_contiguous(part.size))], rank)
                for rank, part in self.received.parts.items()
            ]

    def add(self) -> None:
        """Add the received cells, if adds is true."""
        if self.received is not None:
            self.received.add()

    def keep(self, made: Any) -> Any:
        """Return an MPI object, after noting that it is freed with the messages, last one first."""
        self._made.append(made)
        return made

    def free(self) -> None:
        """Free requests, datatypes and communicators."""
        while self._made:
            self._made.pop().Free()

    def _commit(self, datatype: Any) -> Any:
        return self.keep(datatype.Commit())

    def _type(self, places: Sequence[Place]) -> Any:
        """Return the datatype of a message: of places of the array."""
        shape = list(self.array.shape)
        types = []
        for place in places:
            ends = [each.indices(n)[:2] for each, n in zip(place, shape, strict=False)]
            ends += [(0, n) for n in shape[len(place) :]]
            sizes, starts = [b - a for a, b in ends], [a for a, _ in ends]
            types.append(self._commit(self._element.Create_subarray(shape, sizes, starts)))
        if len(types) == 1:
            return types[0]
        once, nowhere = [1] * len(types), [0] * len(types)
        return self._commit(self.mpi.Datatype.Create_struct(once, nowhere, types))


def subarrays(messages: MpiMessages) -> Run:
    """Return Isend and Irecv of datatypes of subarrays."""
    messages.use_datatypes()
    comm, mpi = messages.comm, messages.mpi

    def run() -> None:
        messages.ready()
        requests = [comm.Irecv(*each) for each in messages.incoming]
        requests += [comm.Isend(*each) for each in messages.outgoing]
        mpi.Request.Waitall(requests)
        messages.add()

    return run


def persistent(messages: MpiMessages) -> Run:
    """Return persistent requests of datatypes of subarrays."""
    messages.use_datatypes()
    comm, mpi, keep = messages.comm, messages.mpi, messages.keep
    requests = [keep(comm.Recv_init(*each)) for each in messages.incoming]
    requests += [keep(comm.Send_init(*each)) for each in messages.outgoing]

    def run() -> None:
        messages.ready()
        mpi.Prequest.Startall(requests)
        mpi.Request.Waitall(requests)
        messages.add()

    return run


def neighbours(messages: MpiMessages) -> Run:
    """Return MPI_Neighbor_alltoallw of datatypes of subarrays, on the graph of the messages."""
    messages.use_datatypes()
    ranks = list(messages.receives), list(messages.sends)
    graph = messages.keep(messages.comm.Create_dist_graph_adjacent(*ranks))
    into, offsets_bytes = messages.array, [0] * len(messages.receives)
    if messages.received is not None:
        into, offsets_bytes = messages.received.memory, messages.received.offsets_bytes

    def side(buffer: Array, ends: Sequence[Any], offsets: Sequence[int]) -> list[Any]:
        return [buffer, ([1] * len(ends), offsets), [end[0][2] for end in ends]]

    source = side(messages.array, messages.outgoing, [0] * len(messages.sends))
    target = side(into, messages.incoming, offsets_bytes)

    def run() -> None:
        messages.ready()
        graph.Neighbor_alltoallw(source, target)
        messages.add()

    return run


def packed(messages: MpiMessages) -> Run:
    """Return slices of NumPy copied to memory that travels by persistent requests, and back."""
    mpi, comm, keep = messages.mpi, messages.comm, messages.keep
    outgoing = PackedPlaces(messages.array, messages.sends)
    incoming = PackedPlaces(messages.array, messages.receives)

    def requests(init: Any, parts: Mapping[int, Array]) -> list[Any]:
        return [keep(init([p.view(np.uint8), mpi.BYTE], rank)) for rank, p in parts.items()]

    receives, sends = (
        requests(comm.Recv_init, incoming.parts),
        requests(comm.Send_init, outgoing.parts),
    )
    take = incoming.add if messages.adds else incoming.unpack

    def run() -> None:
        messages.ready()
        mpi.Prequest.Startall(receives)
        outgoing.pack()
        messages.ready()
        mpi.Prequest.Startall(sends)
        mpi.Request.Waitall(receives)
        take()
        mpi.Request.Waitall(sends)

    return run


WAYS: dict[str, Callable[[MpiMessages], Run]] = {
    "subarray": subarrays,
    "subarray, persistent": persistent,
    "alltoallw": neighbours,
    "packed": packed,
}
