"""How to all-reduce: the choices, checked once, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from ..formats import INTEGERS, Cast, FloatFormat, Overflow, Rounding
from ..ops import on_gpu
from .accumulate import ACCUMULATES
from .chunk import Plan
from .device_wire import DeviceRaw
from .exact import Exact
from .machine import Machine, as_machine
from .scaling import HEADROOMS, SCALINGS, Scaling, Segment, parse_scaling, shift_bytes
from .schedule import SCHEDULES
from .wire import Array, Packed, Raw, Wire, parse_wire

Op = Literal["sum", "mean"]
MPI_ALLREDUCE = "mpi"  # the one algorithm that is no schedule
AUTO = "auto"  # the schedule that is predicted to be fastest
EXACT = "exact"  # the way to accumulate that every schedule knows


@dataclass(frozen=True)
class Method:
    """The choices of an all-reduce; the arguments are those of allreduce.

    Raises ValueError for unknown names and what does not go together, TypeError for other types.
    """

    wire: str | FloatFormat = "raw"
    algorithm: str = "ring"
    scaling: str | None = None
    accumulate: str | None = None
    op: Op = "sum"
    rounding: Rounding = "nearest"
    overflow: Overflow = "saturate"
    headroom: str = "n"
    seed: int = 0
    machine: Machine | str | Path | None = None

    def __post_init__(self) -> None:
        if self.machine is not None:  # its numbers, so that ranks whose files differ are noticed
            object.__setattr__(self, "machine", as_machine(self.machine))
        if self.fmt is not None:
            Cast(self.fmt, self.rounding, self.overflow)
        assert self.parsed_scaling  # raises for an unknown name
        known: dict[str, Sequence[str]] = {
            "algorithm": (*SCHEDULES, MPI_ALLREDUCE, AUTO),
            "op": get_args(Op),
            "headroom": tuple(HEADROOMS),
            "accumulate": self._accumulates(),
        }
        for name, allowed in known.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "accumulate" and value is None):
                raise ValueError(f"allreduce: {name}={value!r}: known are {', '.join(allowed)}")
        if self.fmt is not None and self.algorithm == MPI_ALLREDUCE:
            raise ValueError(f"allreduce: algorithm='mpi': wire={self.wire!r}: must be 'raw'")
        if self.exact:
            self._check_exact()

    def _check_exact(self) -> None:
        """Raise ValueError for what has no exact sum."""
        if self.algorithm == AUTO:
            raise ValueError(
                "allreduce: algorithm='auto': the time of exact sums is not predicted: name one of "
                f"{', '.join(SCHEDULES)}"
            )
        kinds = ("aps",) if self.integers else ("aps", "static", "none")
        what = f"wire={self.wire!r}" if self.integers else "accumulate='exact'"
        if self.parsed_scaling.kind not in kinds:
            names = ", ".join(name for name in SCALINGS if name.partition(":")[0] in kinds)
            raise ValueError(
                f"allreduce: scaling={self.scaling!r}: {what} needs shifts that all ranks share: "
                f"known are {names}"
            )
        if self.overflow != "saturate":
            raise ValueError(
                f"allreduce: overflow={self.overflow!r}: {what} knows saturate only: no integer "
                "is infinite"
            )

    def _accumulates(self) -> tuple[str, ...]:
        """Return what accumulate may be; for raw, float32 and requantise are the same."""
        if self.integers:
            return (EXACT,)
        schedule = SCHEDULES.get(self.algorithm)
        allowed = schedule.accumulates if schedule else ()
        if self.algorithm == AUTO:
            allowed = tuple(ACCUMULATES)
        if self.fmt:
            return (*allowed, EXACT)
        return tuple(dict.fromkeys((*allowed, "requantise", "float32")))

    @cached_property
    def description(self) -> str:
        """All choices in words."""
        return repr(self)

    @cached_property
    def fmt(self) -> FloatFormat | None:
        """The format of a packed wire, None for raw."""
        return parse_wire(self.wire)

    @property
    def integers(self) -> bool:
        """Whether the wire is one of integers, which have exact sums only."""
        return isinstance(self.wire, str) and self.wire in INTEGERS

    @property
    def exact(self) -> bool:
        """Whether sums are exact."""
        return self.integers or self.accumulate == EXACT

    @cached_property
    def parsed_scaling(self) -> Scaling:
        """The scaling; for a raw wire it has no meaning. Default: aps for exact sums, else tile."""
        default = "aps" if self.exact else "tile"
        return parse_scaling(default if self.scaling is None else self.scaling, self.fmt)

    @property
    def accumulating(self) -> str:
        """The name of the way in which the schedule's partial sums are kept."""
        if self.exact:
            return EXACT
        schedule = SCHEDULES[self.algorithm]
        return self.accumulate if self.accumulate in schedule.accumulates else schedule.default

    @property
    def hides_nonfinite(self) -> bool:
        """Whether neither the codes nor the scaling would show NaN or infinity."""
        if self.fmt is None or self.parsed_scaling.kind in ("aps", "tile"):
            return False
        return self.exact or not self.fmt.carries_nonfinite

    @cached_property
    def repeats(self) -> bool:
        """Whether a call is the same operations of the wire every time, shifts aside."""
        if self.algorithm not in SCHEDULES or self.accumulating == "kahan":
            return False
        if self.fmt is not None and self.rounding == "stochastic":
            return False
        return SCHEDULES[self.algorithm].result_travels or self.accumulating != "float32"

    @cached_property
    def shares_shifts(self) -> bool:
        """Whether the shifts of a call come from the data of all ranks."""
        return self.fmt is not None and self.parsed_scaling.kind == "aps"

    def plan(
        self,
        nodes: tuple[int, ...],
        x: Array,
        segments: Sequence[Segment],
        shifts: tuple[Sequence[int], Sequence[int]],
        iteration: int,
    ) -> Plan:
        """Return what the programs of all ranks share.

        nodes: of all ranks; x: an array of the call; shifts: of the segments, for contributions,
        and for partial sums and the result
        """
        schedule, wire = SCHEDULES[self.algorithm], self._wire(x)
        outside = isinstance(wire, Exact) or (isinstance(wire, Packed) and not wire.fit)
        sent, result = (
            shift_bytes(each, segments, x.size, x) if outside else None for each in shifts
        )
        return Plan(
            schedule=schedule,
            accumulate=None if self.exact else ACCUMULATES[self.accumulating],
            wire=wire,
            sent_shifts=sent,
            result_shifts=result,
            result_rounded=schedule.result_travels or self.accumulating != "float32",
            nodes=nodes,
            stream=(self.seed, iteration),
        )

    def _wire(self, x: Array) -> Wire:
        if self.fmt is None:
            return DeviceRaw() if on_gpu(x) else Raw()
        cast = Cast(self.fmt, self.rounding, self.overflow)
        if self.exact:
            return Exact(cast, trits=self.wire == "ternary")
        return Packed(cast, fit=self.parsed_scaling.kind == "tile")
