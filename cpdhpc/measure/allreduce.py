"""All-reduces in a job: ours, MPI_Allreduce and gloo, checked before they are timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..bench.allreduce import BASELINES, Case, Data, integer_data, normal_data, schedule_case
from ..bench.harness import together
from ..collectives.allreduce import Allreduce
from ..config import UserError
from ..formats import TRIT_BYTES, packed_bytes, tiles
from ..ops.payloads import parse_wire
from ..study.cases import Case as Point
from ..study.spec import Study
from ..world.mpi import World
from .repeats import Call, Calls, Place

KEPT = 2  # sizes whose data are kept from one visit to the next


@lru_cache(maxsize=KEPT)
def _integers(n: int, world: World) -> Data:
    return integer_data(n, world)


@lru_cache(maxsize=KEPT)
def _normal(n: int, world: World) -> Data:
    return normal_data(n, world)


class _Allreduce(Calls):
    """A case of the kind "allreduce"."""

    @contextmanager
    def call(self, place: Place, check: bool) -> Iterator[Call]:
        """Make an all-reduce ready; see Calls.call."""
        factors, world = self.case.factors, place.world
        with _group(world) if factors["algorithm"] == "gloo" else nullcontext():
            case = _case(world, self.case)
            if not check:
                yield Call(case.run, case.prepare)
                return
            case.check(world)
            yield Call(case.run, case.prepare, {
                "error": case.error,
                "wire_bytes": case.wire_bytes,
                "payload_bytes": int(factors["size_bytes"]),
                "bound_s": _bound_s(place, self.case),
            })  # fmt: skip


def start(study: Study, case: Point, directory: Path) -> _Allreduce:
    """Return a case of the kind "allreduce", about to be measured."""
    return _Allreduce(case, study.measure, directory)


def _case(world: World, point: Point) -> Case:
    """Return the call of a point, not checked yet."""
    factors = point.factors
    n, algorithm, wire = int(factors["size_bytes"]) // 4, factors["algorithm"], str(factors["wire"])
    out = np.empty(n, np.float32)
    if algorithm in ("mpi", "gloo"):
        name = str(algorithm) if wire == "raw" else "gloo-bf16"
        return BASELINES[name](world, _integers(n, world), _normal(n, world), out)
    method = Allreduce(
        wire,
        str(algorithm),
        None if wire == "raw" else str(factors["value_scaling"]),
        None if wire == "raw" else str(factors["accumulate"]),
    )
    data = _normal(n, world) if method.fmt else _integers(n, world)
    return schedule_case(world, method, data, out)


@contextmanager
def _group(world: World) -> Iterator[None]:
    """Open torch's process group. Collective. Raises UserError where torch is missing."""

    def installed() -> bool:
        if find_spec("torch") is None:
            raise UserError("algorithm gloo: torch is not installed on every process")
        return True

    together(world, installed)
    from ..bench.baselines import gloo

    with gloo(world):
        yield


def _bound_s(place: Place, point: Point) -> float:
    """Return the least time for the bytes that each rank must send. Collective.

    2 (p - 1) / p of the payload, whatever the algorithm: Patarasuk, Yuan: Bandwidth optimal
    all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009, theorem 1.
    """
    ranks = place.world.ranks
    if ranks == 1:
        return float("nan")
    return 2 * (ranks - 1) / ranks * _wire_size(point) * place.seconds_per_byte


def _wire_size(point: Point) -> int:
    """Return the bytes of a rank's data on the wire."""
    n, wire = int(point.factors["size_bytes"]) // 4, str(point.factors["wire"])
    if wire == "raw":
        return 4 * n
    if wire == "ternary":
        return tiles(n) * TRIT_BYTES
    fmt = parse_wire(wire)
    assert fmt is not None, "only raw has no format"
    shifts = tiles(n) if point.factors.get("value_scaling") == "tile" else 0
    return packed_bytes(n, fmt.bits) + shifts
