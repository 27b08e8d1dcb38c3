"""Exchanges of halos: cpdhpc's, and those by MPI's datatypes and neighbour collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import nan
from typing import TYPE_CHECKING, Any

from ...config import ConfigError, Raw, UserError, among
from ...formats import INTEGERS, wire_format
from ...methods import HALO_COPIED, HALO_MPI_TYPES, HALO_OURS, HALO_PACKED
from ..report import units
from ..report.points import Facets, SeedGroup, of_factors, quotient, times_as_fast, timing, varying
from ..report.tables import Column, Section, tabulate
from ..study_data import DEVICE, Case, Factor, Factors, Value, device_used, positive
from ..study_data.study_file import StudyFile
from .base import Call, Kind, MeasuredStudy

if TYPE_CHECKING:
    from .halo_cases import Setting
    from .place import JobRanks

TRANSFERS = ("exchange", "accumulate")
OURS = (HALO_OURS, HALO_COPIED)
BY_MPI = (*HALO_MPI_TYPES, HALO_PACKED)
SPLITS = ("rows", "columns", "grid")
CUT = "none"  # windows end at the edge of the domain
BOUNDARIES_OF_MPI = (CUT, "zero", "wrap")  # those without reversed or repeated cells
BYTES = {"float32": 4, "float64": 8, "float16": 2, "int8": 1, "int32": 4, "int64": 8}
GUESS = 2e-9  # s per byte of a window, prepared and copied by a slow machine


def _check_wire(wire: str) -> None:
    if wire in INTEGERS:
        raise ConfigError("integers are for sums: should be raw or a format")
    wire_format(wire)


def _boundary(name: str) -> str:
    from ...darray.windows import MODES

    return among((CUT, *MODES))(name)


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors. Raises ValueError if they do not go together. See Kind.used."""
    way, wire, boundary = str(given["way"]), str(given["wire"]), str(given["boundary"])
    if way in BY_MPI and wire != "raw":
        raise ValueError(f"{way} has no wire {wire}, only raw")
    if way in BY_MPI and boundary not in BOUNDARIES_OF_MPI:
        raise ValueError(f"{way} cannot show cells as {boundary} does")
    if wire != "raw" and given["dtype"] != "float32":
        raise ValueError(f"wire {wire} takes float32, not {given['dtype']}")
    if wire != "raw" and boundary == "edge" and given["transfer"] == "accumulate":
        raise ValueError(f"sums of many cells, rounded to {wire}, cannot be checked exactly")
    return {name: given[name] for name in given if name != "device"} | device_used(given)


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    cells = int(used["rows"]) * int(used["columns"])
    lines = {"rows": used["rows"], "columns": used["columns"], "grid": cells}[str(used["split"])]
    return None if ranks <= int(lines) else f"{lines} {used['split']} are fewer than {ranks} ranks"


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    cells = int(used["rows"]) * int(used["columns"]) * int(used["values"])
    return repeats * (1e-4 + GUESS * cells * BYTES[str(used["dtype"])] / ranks)


@contextmanager
def _measure(study: MeasuredStudy, case: Case, place: JobRanks, check: bool) -> Iterator[Call]:
    """Prepare an exchange; see Kind.measure. Collective."""
    from .halo_cases import open_cases, relative_error

    of, world = case.factors, place.world
    setting = _setting(case, world.processes)
    with setting.plan(world) as plan:
        ways = [str(of["transfer"])], [str(of["way"])]
        device = place.take_device(of)
        error = 0.0  # raw: the check below proves that it is exact
        if check and setting.spec.wire != "raw":
            error = relative_error(world, ways[0][0], plan, setting.spec, device)
        with open_cases(world, setting, plan, *ways, check=check, device=device) as cases:
            if not cases:
                raise UserError(f"case {case.id}: way={ways[1][0]}: MPI takes no GPU memory here")
            call = Call(cases[0].run)
            if check:
                spec = setting.spec
                described = plan.describe(spec.dtype, spec.trail)
                call.outcomes |= {
                    "payload_bytes": max(world.gather(setting.sent_bytes(plan))),
                    "wire_bytes": max(each.sent_bytes for each in described.ranks),
                    "error": error,
                }
            yield call


def _setting(case: Case, ranks: int) -> Setting:
    from ...darray.layout import balanced_grid
    from ..darray_show import spec_of
    from .halo_cases import Setting

    of = case.factors
    if "shape" in of:  # a benchmark's
        return Setting.of(of)
    grids = {"rows": [ranks, 1], "columns": [1, ranks], "grid": balanced_grid(ranks, 2)}
    split = str(of["split"])
    widths = {"rows": (1, 0), "columns": (0, 1), "grid": (1, 1)}[split]
    raw: dict[str, Any] = {
        "shape": [of["rows"], of["columns"]],
        "procs": grids[split],
        "halo": [int(of["halo"]) * n for n in widths],
        "boundary": of["boundary"],
        "dtype": of["dtype"],
        "trail": [of["values"]] if int(of["values"]) > 1 else [],
        "wire": of["wire"],
    }
    return Setting("halo", spec_of(raw, f"case {case.id}"))


NOT_COMPARED = ("way", "wire")  # factors in which compared cases may differ
CAPTION = (
    "Sent: on the wire, by the rank that sends most, a call. Rate: bytes of its cells over the "
    "median time. Times as fast: as the fastest of subarray, persistent and alltoallw, which send "
    "the same cells raw, in this study; in brackets the interval, which takes in both medians'."
)
ERRORS = " Relative error: of all that ranks get, their own cells too, in the Euclidean norm."


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return rates of exchanges, beside the fastest of MPI's ways with datatypes."""

    def rate(group: SeedGroup) -> str:
        sent_bytes = group.mean("payload_bytes")
        return units.digits(quotient(sent_bytes / 1e9, group.time_s.value) or nan)

    def sent(group: SeedGroup) -> str:
        some = group.mean("payload_bytes")
        return units.size(group.mean("wire_bytes")) if some else units.NONE

    types = [group for group in layout.every or groups if group.factors["way"] in HALO_MPI_TYPES]
    slowest_first = sorted(types, key=lambda group: -group.time_s.value)
    by_mpi = {_cells(group): group for group in slowest_first}

    def times(group: SeedGroup) -> str:
        some = group.mean("payload_bytes")
        return times_as_fast(by_mpi.get(_cells(group)), group) if some else units.NONE

    lossy = any(group.mean("error") > 0 for group in groups)
    known = list(HALO.factors)  # other factors are those of a benchmark
    names = sorted(
        varying([group.factors for group in groups]),
        key=lambda name: known.index(name) if name in known else -1,
    )
    columns: list[Column[SeedGroup]] = [
        Column("ranks", lambda g: str(g.ranks)),
        *of_factors(names, groups),
        *timing(file),
        Column("sent", sent),
        Column("rate\nGB/s", rate),
        Column("times as fast", times),
        *([Column("relative\nerror", lambda g: units.digits(g.mean("error"), 2))] if lossy else []),
    ]
    caption = CAPTION + ERRORS * lossy
    return [Section("Halos", tables=[tabulate("Halos", columns, groups, caption)])]


def _cells(group: SeedGroup) -> frozenset[Any]:
    """Return the factors that points have in common if they send the same cells."""
    return frozenset(item for item in group.factors.items() if item[0] not in NOT_COMPARED)


HALO = Kind(
    factors={
        "rows": positive("cells of the domain along axis 0", None),
        "columns": positive("cells of the domain along axis 1", 1024),
        "values": positive("values of a cell, which lie together", 1),
        "halo": positive("cells around the box of a rank, along the axes that are split", 1),
        "split": Factor("axes that are split", str, default="rows", check=among(SPLITS)),
        "boundary": Factor(
            "what lies beyond the domain along them", str, default=CUT, check=_boundary
        ),
        "dtype": Factor("numbers", str, default="float32", check=among(BYTES)),
        "wire": Factor("what travels: raw numbers or a format", str, "1", "raw", _check_wire),
        "transfer": Factor(
            "exchange, or accumulation of halos", str, default="exchange", check=among(TRANSFERS)
        ),
        "way": Factor(
            "ours, in place or copied, or MPI's own",
            str,
            default=HALO_OURS,
            check=among([*OURS, *BY_MPI]),
        ),
        "device": DEVICE,
    },
    work="rows",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one exchange, from a barrier to its end on the slowest rank",
    measure=_measure,
    sections=_sections,
    panels=("way", "transfer"),
)
