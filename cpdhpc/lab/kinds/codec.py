"""The codec: float32 to packed codes and back, all ranks at once, beside memcpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ...config import ConfigError, Raw, UserError, among
from ...formats import Cast, parse_format
from ...methods import CODEC_OPERATIONS, MEMCPY, SPARSE_OPERATIONS
from ..report import units
from ..report.figures import IDEAL, Axis, Chart, Panel, Series, Style, styles
from ..report.points import Estimate, Facets, SeedGroup, label, of_factors, times_as_fast, timing
from ..report.tables import Column, Section, Table, tabulate
from ..study_data import (
    ABSENT,
    DEVICE,
    Case,
    Factor,
    Factors,
    Value,
    at_least,
    device_used,
    float32_size,
)
from ..study_data.study_file import StudyFile
from .base import Call, Kind, MeasuredStudy

if TYPE_CHECKING:
    from .place import JobRanks

GUESS = 1e-9  # s per byte: a slow codec


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors; memcpy and sparse operations have no format. See Kind.used."""
    operation, name = str(given["operation"]), str(given["format"])
    device = device_used(given)
    found = {"size_bytes": given["size_bytes"], "operation": operation} | device
    of_cpu = {key: given[key] for key in ("threads", "clone") if given.get(key, ABSENT) != ABSENT}
    if device and (of_cpu or operation in SPARSE_OPERATIONS):
        raise ValueError(f"{next(iter(of_cpu), operation)} is of the CPU, not of device gpu")
    found |= of_cpu
    if operation in SPARSE_OPERATIONS:
        return found | {"density": given.get("density") or DENSITY}
    if operation == MEMCPY:
        return found
    if name == ABSENT:
        raise ValueError(f"operation {operation} needs a format")
    return found | {"format": name}


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ConfigError("should be above 0 and at most 1")


def _check_clone(name: str) -> None:
    from ...ops import cpu

    if name not in cpu.clones():
        raise UserError(f"clone {name}: this processor has {', '.join(cpu.clones())}")


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    return repeats * (1e-4 + GUESS * float(used["size_bytes"]))


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    values = int(used["size_bytes"]) // 4
    return None if values >= ranks else f"{values} values are fewer than {ranks} ranks"


ANY_FORMAT = "e4m3"  # if the operation has none
DENSITY = 0.01


@contextmanager
def _measure(study: MeasuredStudy, case: Case, place: JobRanks, check: bool) -> Iterator[Call]:
    """Prepare an operation on a rank's share of the data; see Kind.measure. Collective."""
    from ...ops import cpu, kernel_threads, set_kernel_threads
    from .codec_cases import RankValues, check_against_reference, format_of

    factors, world = case.factors, place.world
    operation, device = str(factors["operation"]), place.take_device(factors)
    values = RankValues(world, int(factors["size_bytes"]) // 4, device)
    name, density = str(factors.get("format", ANY_FORMAT)), float(factors.get("density", DENSITY))
    cast = Cast(format_of(name))
    if operation == MEMCPY:
        runs = place.kept((values.n, device), values.copies)
    elif operation in SPARSE_OPERATIONS:
        make = partial(place.kept, (values.n, density), lambda: values.sparse(density))
        runs = world.agreed(make, told=ArithmeticError)
    else:
        runs = place.kept((values.n, name, device), lambda: values.coded(cast))
    before = cpu.clone(), kernel_threads()
    clone, threads = str(factors.get("clone", before[0])), int(factors.get("threads", before[1]))
    world.agreed(lambda: _check_clone(clone))

    def prepare() -> None:
        cpu.use_clone(clone)
        set_kernel_threads(threads)

    call = Call(runs[operation], prepare, {"payload_bytes": 4 * values.n})
    try:
        if check:
            prepare()
            world.agreed(lambda: check_against_reference(values.head, cast), told=ArithmeticError)
            if operation in CODEC_OPERATIONS:
                call.outcomes |= values.outcomes(cast, operation)
        yield call
    finally:
        cpu.use_clone(before[0])
        set_kernel_threads(before[1])


APART = 0.1  # distance of operations in a row of a figure, whose height is 1
CAPTION = (
    "Rate: float32 data of all ranks / median time of the slowest. Of memcpy's: of the same data "
    "on as many ranks in this study; in brackets the interval, which takes in both medians'."
)


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return rates by format and operation, beside memcpy."""
    places: dict[str, list[SeedGroup]] = {}
    for group in groups:
        places.setdefault(_place(group), []).append(group)
    drawn = styles(str(group.factors["operation"]) for group in groups if not _is_base(group))
    panels = [_panel(place, own, drawn) for place, own in places.items()]
    chart = Chart(
        "rate_by_format",
        f"{file.name}: rate of the codec",
        [f"float32 data of all ranks / median time of the slowest; bars: {file.percent} CI."],
        "Rate by format, with memcpy of the same data on as many ranks.",
        [panel for panel in panels if panel.y.names],
        columns=2,
    )
    return [
        Section(
            "Codec",
            tables=[_table(file, groups, layout.every or groups)],
            charts=[chart] if chart.panels else [],
        )
    ]


def _place(group: SeedGroup) -> str:
    return label(group.factors, ("size_bytes", "ranks", "device"))


def _format(group: SeedGroup) -> str:
    return str(group.factors.get("format", "no format"))


def _is_base(group: SeedGroup) -> bool:
    return group.factors["operation"] == MEMCPY


def _rate(group: SeedGroup) -> Estimate:
    """Return bytes of float32 of all ranks by the time, GB/s."""
    return group.time_s.inverse(float(group.factors["size_bytes"]) / 1e9)


def _panel(place: str, groups: Sequence[SeedGroup], drawn: Mapping[str, Style]) -> Panel:
    own = [group for group in groups if not _is_base(group)]
    rows = list(dict.fromkeys(_format(group) for group in own))
    series = []
    for index, (name, style) in enumerate(drawn.items()):
        aside = APART * (index - (len(drawn) - 1) / 2)
        some = [group for group in own if group.factors["operation"] == name]
        rates = [_rate(group) for group in some]
        at = [aside + rows.index(_format(group)) for group in some]
        x, low, high = (list(column) for column in zip(*rates, strict=True)) if rates else ([],) * 3
        series.append(Series(name, style, x, at, join="none", x_low=low, x_high=high))
    for group in filter(_is_base, groups):
        rate = _rate(group).value
        series.append(Series(MEMCPY, IDEAL, [rate, rate], [-0.6, len(rows) - 0.4]))
    return Panel(place, Axis("rate / (GB/s)", limits=(0, None)), Axis("", names=rows), series)


def _table(file: StudyFile, groups: Sequence[SeedGroup], every: Sequence[SeedGroup]) -> Table:
    """Return the table of groups; every: of the study, with those of memcpy."""
    base = {_place(group): group for group in every if _is_base(group)}
    optional = ("density", "threads", "clone", "device")
    further = [name for name in optional if any(name in group.factors for group in groups)]
    columns: list[Column[SeedGroup]] = [
        Column("ranks", lambda g: str(g.ranks)),
        *of_factors(("size_bytes", "operation", "format", *further), groups),
        *timing(file),
        Column("rate\nGB/s", lambda g: units.digits(_rate(g).value)),
        Column("of memcpy's", lambda g: times_as_fast(base.get(_place(g)), g)),
    ]
    return tabulate("Codec", columns, groups, CAPTION)


CODEC = Kind(
    factors={
        "size_bytes": float32_size("float32 data of all ranks together"),
        "operation": Factor(
            "operation of the codec",
            str,
            default="encode tile",
            check=among([MEMCPY, *CODEC_OPERATIONS, *SPARSE_OPERATIONS]),
        ),
        "format": Factor("format of the codec", str, check=parse_format),
        "device": DEVICE,
        "density": Factor(
            "share of the largest values, for sparse operations", float, check=_check_density
        ),
        "threads": Factor("threads that share an operation", int, check=at_least(1)),
        "clone": Factor("processors that the loops were compiled for", str),
    },
    work="size_bytes",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one operation on a rank's share of the data, all ranks at once; the slowest rank",
    measure=_measure,
    sections=_sections,
    panels=("operation",),
)
