"""The codec in a job: every rank codes its share of the data, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..bench.codec import check_against_reference, operations
from ..formats import Cast, packed_bytes, parse_format, tiles
from ..ops import cpu
from ..partition import split
from ..study.cases import Case
from ..study.spec import Study
from ..world.mpi import World
from .repeats import Call, Calls, Place

Array = npt.NDArray[np.float32]
ANY_FORMAT = "e4m3"  # where the operation has none
TILED = ("encode tile", "hop tile")


class _Codec(Calls):
    """A case of the kind "codec"."""

    @contextmanager
    def call(self, place: Place, check: bool) -> Iterator[Call]:
        """Make an operation ready; see Calls.call."""
        factors, world = self.case.factors, place.world
        operation = str(factors["operation"])
        cast = Cast(parse_format(str(factors.get("format", ANY_FORMAT))))
        start, stop = split(int(factors["size_bytes"]) // 4, world.processes, world.process)
        x = np.random.default_rng(world.process).standard_normal(stop - start, np.float32)
        call = Call(operations(x, cast)[operation])
        if check:
            _check(world, x, cast)
            call.outcomes["payload_bytes"] = 4 * x.size
            if operation != "memcpy":
                tile = operation in TILED
                call.outcomes["wire_bytes"] = packed_bytes(x.size, cast.fmt.bits) + (
                    tiles(x.size) if tile else 0
                )
                call.outcomes["error"] = _error(world, x, cast, operation)
        yield call


def start(study: Study, case: Case, directory: Path) -> _Codec:
    """Return a case of the kind "codec", about to be measured."""
    return _Codec(case, study.measure, directory)


def _check(world: World, x: Array, cast: Cast) -> None:
    """Raise ArithmeticError on all ranks where one's codes are not as specified. Collective."""
    error: ArithmeticError | None = None
    try:
        check_against_reference(x, cast)
    except ArithmeticError as found:
        error = found
    world.agree(error)


def _error(world: World, x: Array, cast: Cast, operation: str) -> float:
    """Return the error of x encoded and decoded, over all ranks' values. Collective.

    As the operation rounds and scales; decode and hops are about the codes of plain encode.
    """
    tile = operation in TILED
    rounding = Cast(cast.fmt, "stochastic") if operation == "stochastic" else cast
    words = np.zeros(packed_bytes(x.size, cast.fmt.bits), np.uint8)
    shifts, out = np.full(tiles(x.size), 127, np.uint8), np.empty_like(x)
    cpu.encode_tiles(x, rounding, words, shifts, fit=tile)
    cpu.decode_tiles(words, shifts, cast.fmt, out)
    wrong = float(np.sum((out.astype(np.float64) - x) ** 2))
    whole = float(np.sum(x.astype(np.float64) ** 2))
    sums = np.sum(world.gather((wrong, whole)), axis=0)
    return float(np.sqrt(sums[0] / sums[1]))
