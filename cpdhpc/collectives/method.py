"""The choices of an all-reduce, checked once, the shifts that all ranks share, and the machine
file that "auto" uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError, ConfigError, reworded
from ..formats import (
    IN_BLOCKS,
    INTEGERS,
    RANDOM_BITS,
    SHARED,
    SHIFT_BIAS,
    TILE,
    Cast,
    FloatFormat,
    Format,
    Overflow,
    Rounding,
    TableFormat,
    TwoScales,
    named,
    tiles,
    wire_scaling,
)
from ..methods import EXACT, GROW, SCALINGS, USUAL, check_integer, said_by, suggest
from ..ops import placed
from ..ops.common import fitting_shift
from ..ops.payloads import Exact, Packed, Raw, TwoScaled, Wire, parse_wire
from ..randomness import check_key
from .blocks import ALLREDUCE, DataBlocks
from .rank_program import ACCUMULATES, CollectivePlan
from .schedules import SCHEDULES, NodeLayout, RoundedSums, usual_algorithms

Array = npt.NDArray[Any]

wrong_value = partial(ArgumentError, "allreduce")  # said_by sets the function that was called
wrong_type = partial(ArgumentTypeError, "allreduce")

HEADROOMS = {"n": 2, "sqrt": 1, "none": 0}  # H = ranks ** (half of this)


class Segment(NamedTuple):
    """A named part of an array, for example a layer: values start..stop."""

    name: str
    start: int
    stop: int


# Of each segment: for contributions, and for partial sums and the result; empty if tiles have own
Shifts = tuple[Sequence[int], Sequence[int]]


class Scaling(NamedTuple):
    """A way to choose shifts; shift is static's."""

    kind: str
    shift: int


def parse_scaling(text: str, wire: str | Format | None) -> Scaling:
    """Return a scaling parsed from its name; static's shift must suit the wire, if any.

    Raises ValueError for unknown names and shifts out of range.
    """
    if not isinstance(text, str):
        raise wrong_type("scaling", text, f"known are {', '.join(SCALINGS)}")
    kind, colon, number = text.partition(":")
    if kind not in (*SHARED, "none", "static", "aps") or (kind == "static") != bool(colon):
        raise wrong_value("scaling", text, suggest(text, SCALINGS))
    if kind != "static":
        return Scaling(kind, 0)
    if not re.fullmatch("[+-]?[0-9]+", number):
        raise wrong_value("scaling", text, "static:K needs an integer K")
    shift, fmt = int(number), None if wire is None else parse_wire(wire)
    if wire is not None and fmt is not None and not fmt.shift_min <= shift <= fmt.shift_max:
        allowed = f"K for {named(wire)} is {fmt.shift_min}..{fmt.shift_max}"
        raise wrong_value("scaling", text, allowed)
    return Scaling(kind, shift)


def tile_span(segment: Segment) -> slice:
    """Return the tiles that belong to a segment that starts on a tile."""
    return slice(tiles(segment.start), tiles(segment.stop))


def aps_shift(amax_bits: int, fmt: Format, ranks: int, headroom: str) -> int:
    """Return k = emax - ceil(log2(H * amax)), so that H * amax * 2**k fits the format.

    amax_bits: float32 bits of max|g| over all ranks, finite; zero gives k = 0
    headroom: H is ranks ("n"), its square root ("sqrt") or 1 ("none")
    With H = ranks**(h/2), the logarithm is half of that of ranks**h * amax**2, an integer times
    a power of four, whose ceiling is exact; ceil(y / 2) = ceil(ceil(y) / 2).
    k stays within fmt.shift_min .. fmt.shift_max.
    Source: Han, Demmel, You: Auto-Precision Scaling, arXiv 1911.08907.
    """
    if amax_bits == 0:
        return 0
    amax = float(np.uint32(amax_bits).view(np.float32))
    mantissa, exponent = math.frexp(amax)
    whole = int(mantissa * 2**24)
    square: int = ranks ** HEADROOMS[headroom] * whole**2
    twice = (square - 1).bit_length() + 2 * (exponent - 24)
    k = fmt.emax - -(-twice // 2)
    return max(fmt.shift_min, min(k, fmt.shift_max))


def integer_shift(amax_bits: int, fmt: Format) -> int:
    """Return the largest k with amax * 2**k <= fmt.max, so that no integer saturates.

    amax_bits: as for aps_shift; k stays within fmt.shift_min .. fmt.shift_max
    """
    return int(fitting_shift(np.array([amax_bits]), fmt)[0]) - SHIFT_BIAS


def shift_bytes(shifts: Sequence[int], segments: Sequence[Segment], n: int, like: Array) -> Array:
    """Return the shift byte of each tile, uint8[tiles(n)], from the shift of each segment.

    Made on the host: a GPU would need a fill for each segment.
    """
    out = np.empty(tiles(n), np.uint8)
    for shift, segment in zip(shifts, segments, strict=True):
        out[tile_span(segment)] = shift + SHIFT_BIAS
    return placed(out, like)


class Reduced(NamedTuple):
    """The result of an all-reduce.

    arrays: the result, float32, one array, or with every one for each hosted rank: the same bits
    sent_shifts, result_shifts: for each segment, the k that scaled contributions, and partial sums
        and the result; empty if shifts travel with the data, and for wire "raw"
    algorithm: the one that was used, after the choice of "auto"
    """

    arrays: tuple[Array, ...]
    sent_shifts: tuple[int, ...]
    result_shifts: tuple[int, ...]
    algorithm: str


UNITS = {
    "alpha_s": "s per message between nodes",
    "beta_s": "s per byte on the wire between nodes",
    "host_s": "s of a rank's processor per byte that it sends to or receives from another node",
    "near_s": "s of a rank's processor per byte that it reads in the cache of another of its node",
    "own_cache_bytes": "byte of a rank's two arrays up to which others read in its own cache",
    "memory_s": "s per byte of float32 from or to memory, beyond its time in the cache",
    "cache_bytes": "byte of a rank's two arrays that stay in its cache",
    "gamma_s": "s per byte of float32 added",
    "copy_s": "s per byte of float32 copied",
    "encode_s": "s per byte of float32 encoded and packed",
    "decode_s": "s per byte of float32 unpacked and decoded",
    "decode_add_s": "s per byte of float32 decoded and added",
    "hop_s": "s per byte of float32 decoded, added and encoded in one pass",
    "step_s": "s of a rank's processor per step and part of an all-reduce",
    "call_s": "s per all-reduce",
}


@dataclass(frozen=True)
class Machine:
    """The times of a machine whose links and ranks are all equal; UNITS has the units.

    A link takes alpha_s + bytes * beta_s: Hockney, Parallel Computing 20(3), 1994; a rank sends and
    receives one message at a time; within a node a message takes a step. Operations are in cache.
    Raises ValueError for a time that is negative or not finite.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    alpha_s: float
    beta_s: float
    host_s: float
    near_s: float
    own_cache_bytes: float
    memory_s: float
    cache_bytes: float
    gamma_s: float
    copy_s: float
    encode_s: float
    decode_s: float
    decode_add_s: float
    hop_s: float
    step_s: float
    call_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0):
                allowed = "must be 0 or more, and finite"
                raise ArgumentError("Machine", each.name, value, allowed, str(value))


DEFAULT = Machine(  # round figures for a cluster with links of 10 GB/s; not measured
    alpha_s=2e-6,
    beta_s=1e-10,
    host_s=0.0,
    near_s=5e-11,
    own_cache_bytes=1e6,
    memory_s=4e-11,
    cache_bytes=4e6,
    gamma_s=5e-11,
    copy_s=4e-11,
    encode_s=6e-11,
    decode_s=4e-11,
    decode_add_s=4e-11,
    hop_s=7e-11,
    step_s=5e-7,
    call_s=1e-5,
)


@dataclass(frozen=True)
class MachineFile:
    """A file of bench fit: the times, their units, and their provenance."""

    machine: Machine
    units: Mapping[str, str] = field(default_factory=dict)
    fit: Mapping[str, str | int | float] = field(default_factory=dict)


def read_machine(path: Path) -> MachineFile:
    """Return the content of a file that bench fit has written.

    Raises ConfigError, a ValueError, for other content; StoreError, also one, for a damaged file.
    """
    from ..options import made
    from ..whole_files import check_sealed, read_file_of

    check_sealed(path)
    return made(MachineFile, read_file_of(path, "machine"), str(path))


def as_machine(machine: Machine | str | Path | None) -> Machine:
    """Return a machine unchanged, read from a TOML file, or DEFAULT for None.

    Raises ConfigError, a ValueError, for a file that cannot be used, TypeError for other types.
    """
    if machine is None or isinstance(machine, Machine):
        return machine or DEFAULT
    if not isinstance(machine, str | Path):
        raise wrong_type("machine", machine, "must be a Machine, a path or None")
    try:
        return read_machine(Path(machine)).machine
    except ConfigError as error:
        raise reworded(error, f"allreduce: machine: {error}") from None


Op = Literal["sum", "mean"]
MPI_ALLREDUCE = "mpi"  # the only algorithm that is not a schedule
AUTO = "auto"  # the schedule that is predicted to be fastest
CHOSEN = (AUTO, USUAL)  # resolved when the ranks and their nodes are known

MOST_RANKS = 64  # on several nodes: a recording has a request for each message of a piece


UNSAID = "accumulate", "overflow"  # if None, they follow from other choices


@dataclass(frozen=True)
class Method:
    """The choices of an all-reduce; for the arguments see allreduce.

    finite: whether wire "raw", too, raises NonFiniteGradient if the result is not finite
    Raises ValueError for unknown names and combinations that do not fit, TypeError for other types.
    """

    wire: str | Format = "raw"
    algorithm: str = USUAL
    scaling: str | None = None
    accumulate: str | None = None
    op: Op = "sum"
    rounding: Rounding = "nearest"
    overflow: Overflow | None = None
    random_bits: int = 0
    headroom: str = "n"
    seed: int = 0
    machine: Machine | str | Path | None = None
    finite: bool = False

    def __post_init__(self) -> None:
        for name in ("algorithm", "accumulate", "op", "rounding", "overflow", "headroom"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name in UNSAID and value is None):
                raise wrong_type(name, value, "must be a string")
        check_key("allreduce", "seed", self.seed)
        check_integer("allreduce", "random_bits", self.random_bits)
        object.__setattr__(self, "seed", int(self.seed))  # NumPy's integers compare equal
        if self.machine is not None:  # its numbers, so that ranks whose files differ are noticed
            object.__setattr__(self, "machine", as_machine(self.machine))
        assert self.parsed_scaling  # raises for an unknown name
        known: dict[str, Sequence[str]] = {
            "algorithm": self.algorithms,
            "op": get_args(Op),
            "rounding": get_args(Rounding),
            "overflow": get_args(Overflow),
            "headroom": tuple(HEADROOMS),
            "accumulate": self._accumulates(),
        }
        for name, allowed in known.items():
            value = getattr(self, name)
            if value not in allowed and not (name in UNSAID and value is None):
                fits = [each for each in allowed if self.fmt is None or each != MPI_ALLREDUCE]
                raise wrong_value(name, value, suggest(value, fits))
        if self.fmt is not None:
            try:
                self._cast(self.fmt)
            except ValueError as error:
                raise said_by("allreduce", error) from None
        elif not 0 <= self.random_bits <= (RANDOM_BITS if self.rounding == "stochastic" else 0):
            allowed = f"0..{RANDOM_BITS} with 'stochastic', else 0"
            allowed = f"wire='raw' with rounding={self.rounding!r}: {allowed}"
            raise wrong_value("random_bits", self.random_bits, allowed, str(self.random_bits))
        if self.fmt is not None and self.algorithm == MPI_ALLREDUCE:
            raise wrong_value("algorithm", "mpi", f"wire={self.wire!r}: must be 'raw'")
        if self.exact:
            self._check_exact()
        own, kind = wire_scaling(self.wire), self.parsed_scaling.kind
        if isinstance(self.wire, str) and self.wire in IN_BLOCKS and own != kind:
            element = IN_BLOCKS[self.wire].element.name
            allowed = f"is scaled by {own}: for another scaling name its format, {element}"
            raise wrong_value("scaling", self.scaling or kind, f"wire={self.wire!r} {allowed}")

    def _cast(self, fmt: Format) -> Cast:
        overflow = "saturate" if self.exact and self.overflow is None else self.overflow
        return Cast(fmt, self.rounding, overflow, self.random_bits)

    def _check_exact(self) -> None:
        """Raise ValueError for choices that have no exact sum."""
        if isinstance(self.fmt, TableFormat):
            allowed = "exact sums are of floating-point formats and integers"
            raise wrong_value("accumulate", "exact", f"wire={self.wire!r}: {allowed}")
        if self.algorithm == AUTO:
            allowed = f"use one of {', '.join(SCHEDULES)}"
            allowed = f"bench fit does not measure exact sums: {allowed}"
            raise wrong_value("algorithm", AUTO, allowed)
        kinds = ("aps",) if self.integers else ("aps", "static", "none")
        what = f"wire={self.wire!r}" if self.integers else "accumulate='exact'"
        if self.parsed_scaling.kind not in kinds:
            names = ", ".join(name for name in SCALINGS if name.partition(":")[0] in kinds)
            allowed = f"{what} needs shifts that all ranks share: known are {names}"
            raise wrong_value("scaling", self.scaling, allowed)
        if self.overflow == "inf":
            allowed = f"{what} allows only saturate: no integer is infinite"
            raise wrong_value("overflow", self.overflow, allowed)

    @property
    def algorithms(self) -> Sequence[str]:
        """The names that the collective takes."""
        return (*SCHEDULES, MPI_ALLREDUCE, *CHOSEN)

    def _accumulates(self) -> tuple[str, ...]:
        """Return the allowed values of accumulate; for raw, float32 and requantise are the same."""
        if self.integers:
            return (EXACT,)
        schedule = SCHEDULES.get(self.algorithm)
        allowed = schedule.accumulates if schedule else ()
        if self.algorithm == AUTO or (self.algorithm == USUAL and self.fmt):
            allowed = tuple(ACCUMULATES)
        if isinstance(self.fmt, TableFormat | TwoScales):
            allowed = tuple(each for each in allowed if each != GROW)
        if isinstance(self.fmt, TwoScales):
            return allowed
        if self.fmt:
            return (*allowed, EXACT)
        return tuple(dict.fromkeys((*allowed, "requantise", "float32")))

    def usual(self, nodes: tuple[int, ...], size_bytes: int = 0) -> str:
        """Return the algorithm of "usual", whose error does not grow with ranks.

        nodes: the node of each rank; size_bytes: of the values, ignored for sums
        If its schedules do not have this accumulate, the next one that does.
        """
        names = usual_algorithms("raw sums" if self.fmt is None else "packed sums", nodes)
        if self.fmt is None or self.exact or self.accumulate is None:
            return names[0]
        return next(n for n in names if self.accumulate in SCHEDULES[n].accumulates)

    def rounded_sums(self, nodes: tuple[int, ...]) -> RoundedSums | None:
        """Return the sums that are rounded before each addition, None if their error is bounded.

        nodes: the node of each rank
        """
        if self.fmt is None or self.exact:
            return None
        return SCHEDULES[self.algorithm].rounded(NodeLayout(nodes), self.accumulating)

    @property
    def call(self) -> str:
        """The name of the collective in messages."""
        return ALLREDUCE

    def blocks_of(self, n: int, ranks: int) -> DataBlocks:
        """Return the blocks of n values: of an all-reduce one."""
        return DataBlocks(ALLREDUCE, (n,))

    @cached_property
    def choices(self) -> dict[str, object]:
        """All choices by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def description(self) -> str:
        """All choices as text."""
        return repr(self)

    @cached_property
    def fmt(self) -> Format | None:
        """The format of a packed wire, None for raw."""
        return parse_wire(self.wire)

    @cached_property
    def integers(self) -> bool:
        """Whether the wire is one of integers, which have only exact sums."""
        return isinstance(self.wire, str) and self.wire in INTEGERS

    @cached_property
    def exact(self) -> bool:
        """Whether sums are exact."""
        return self.integers or self.accumulate == EXACT

    @cached_property
    def parsed_scaling(self) -> Scaling:
        """The scaling; raw has none. Default: aps for exact sums, else the wire's own."""
        default = "aps" if self.exact else wire_scaling(self.wire)
        return parse_scaling(default if self.scaling is None else self.scaling, self.wire)

    @cached_property
    def accumulating(self) -> str:
        """The name of the way in which the schedule's partial sums are accumulated."""
        if self.exact:
            return EXACT
        known = SCHEDULES[self.algorithm].accumulation
        if self.accumulate in known.ways:
            return self.accumulate
        return known.default if isinstance(self.fmt, FloatFormat) else known.fixed

    @property
    def sums_held(self) -> bool:
        """Whether contributions that are held are summed in float32."""
        holds = "float32" in SCHEDULES[self.algorithm].accumulates
        return self.accumulating == "float32" or (holds and self.accumulating == GROW)

    @cached_property
    def hides_nonfinite(self) -> bool:
        """Whether neither the codes nor the scaling would show NaN or infinity."""
        return self.parsed_scaling.kind not in (*SHARED, "aps") and self.codes_hide_nonfinite

    @cached_property
    def codes_hide_nonfinite(self) -> bool:
        """Whether the codes would not show NaN or infinity."""
        return self.fmt is not None and (self.exact or not self.fmt.carries_nonfinite)

    @cached_property
    def result_rounded(self) -> bool:
        """Whether the result is rounded to the wire."""
        return SCHEDULES[self.algorithm].result_travels or self.accumulating != "float32"

    @property
    def result_unseen(self) -> bool:
        """Whether the result must be searched for non-finite values, as no code shows them."""
        return self.finite if self.fmt is None else not self.result_rounded

    def divisor(self, ranks: int) -> np.float32 | None:
        """Return the divisor of a sum, None if the sum is the result."""
        return np.float32(ranks) if self.op == "mean" else None

    def is_recorded(self, nodes: tuple[int, ...]) -> bool:
        """Whether repeated calls are call lists, if each process has one rank.

        nodes: the node of each rank
        """
        few = len(nodes) <= MOST_RANKS or len(set(nodes)) == 1
        return few and self.is_compiled

    @property
    def is_compiled(self) -> bool:
        """Whether compiled kernels of the CPU do all of it, so that call lists can have it."""
        return self.algorithm in SCHEDULES and not isinstance(self.fmt, TwoScales)

    @cached_property
    def shares_shifts(self) -> bool:
        """Whether the shifts of a call depend on the data of all ranks."""
        return self.fmt is not None and self.parsed_scaling.kind == "aps"

    def first_shifts(self, parts: Sequence[Segment]) -> Shifts:
        """Return the shift of each segment before any values are known."""
        kind, shift = self.parsed_scaling
        if self.fmt is None or kind in SHARED:
            return (), ()
        return [shift] * len(parts), [shift] * len(parts)

    def shifts_of(self, amax: Sequence[int], ranks: int, *, sums: bool = True) -> Shifts:
        """Return the shift of each segment from the float32 bits of its max|x| over all ranks.

        sums: whether contributions are added
        """
        assert self.fmt is not None, "otherwise none are shared"
        if self.integers:
            shifts = [integer_shift(bits, self.fmt) for bits in amax]
            return shifts, shifts
        if self.exact or not sums:  # exact sums become wider: they need no headroom
            shifts = [aps_shift(bits, self.fmt, 1, "none") for bits in amax]
            return shifts, shifts
        sent = "none" if self.sums_held else self.headroom
        return (
            [aps_shift(bits, self.fmt, ranks, sent) for bits in amax],
            [aps_shift(bits, self.fmt, ranks, self.headroom) for bits in amax],
        )

    def plan(
        self,
        nodes: tuple[int, ...],
        x: Array,
        segments: Sequence[Segment],
        shifts: Shifts,
        iteration: int,
        blocks: DataBlocks | None = None,
    ) -> CollectivePlan:
        """Return the plan that the programs of all ranks share.

        nodes: of all ranks; x: an array of the call; shifts: of the segments, for contributions,
        and for partial sums and the result; blocks: default that of an all-reduce of arrays like x
        """
        blocks = blocks or DataBlocks(ALLREDUCE, (x.size,))
        schedule, wire = SCHEDULES[self.algorithm], self.payloads
        if isinstance(wire, Raw):
            wire = Raw(np.dtype(blocks.dtype))
        if isinstance(wire, Packed) and self.accumulating == GROW:
            wire = replace(wire, growth=schedule.growth(NodeLayout(nodes)))
        outside = isinstance(wire, Exact) or (isinstance(wire, Packed) and not wire.fit)
        sent = shift_bytes(shifts[0], segments, blocks.size, x) if outside else None
        result = shift_bytes(shifts[1], segments, blocks.size, x) if outside else None
        return CollectivePlan(
            schedule=schedule,
            blocks=blocks,
            accumulate=None if self.exact else ACCUMULATES[self.accumulating],
            wire=wire,
            sent_shifts=sent,
            result_shifts=result,
            result_rounded=self.result_rounded,
            nodes=nodes,
            stream=self._stream(iteration, wire),
        )

    def _stream(self, iteration: int, wire: Wire) -> tuple[int, int] | None:
        """Return (seed, iteration) of the random numbers, None if there are none.

        Partial sums that grow are rounded stochastically even if contributions are not. They then
        use the same numbers in each iteration, as iterations may differ between ranks.
        """
        if self.is_random:
            return self.seed, iteration
        grows = isinstance(wire, Packed) and wire.growth is not None and wire.growth.any
        return (self.seed, 0) if grows else None

    @property
    def is_random(self) -> bool:
        """Whether values are rounded stochastically, so that calls differ with the iteration."""
        return self.fmt is not None and self.rounding == "stochastic"

    @cached_property
    def payloads(self) -> Wire:
        """The encoding of values while they travel."""
        if self.fmt is None:
            return Raw()
        cast = self._cast(self.fmt)
        if self.exact:
            return Exact(cast, trits=self.wire == "ternary")
        if isinstance(self.fmt, TwoScales):
            return TwoScaled(cast)
        kind = self.parsed_scaling.kind
        return Packed(cast, fit=kind in SHARED, shared=SHARED.get(kind, TILE))


P = ParamSpec("P")
Chosen = TypeVar("Chosen", bound=Method)


def configured(kind: Callable[P, Chosen], *arguments: P.args, **keywords: P.kwargs) -> Chosen:
    """Return a method of a class with these options, checked once; machine: a Machine or None."""
    try:
        return _configured(kind, *arguments, **keywords)  # type: ignore[arg-type,return-value]
    except TypeError:  # maybe an option cannot be hashed; the next line reports a wrong type
        return kind(*arguments, **keywords)


@lru_cache(maxsize=256, typed=True)
def _configured(kind: Callable[..., Method], *arguments: Any, **keywords: Any) -> Method:
    return kind(*arguments, **keywords)


def named_as(method: Chosen, algorithm: str) -> Chosen:
    """Return a method with another algorithm; the same object every time."""
    found = _named_as(method, algorithm)
    assert isinstance(found, type(method)), "replace keeps the class"
    return found


@lru_cache(maxsize=256)
def _named_as(method: Method, algorithm: str) -> Method:
    return replace(method, algorithm=algorithm)
