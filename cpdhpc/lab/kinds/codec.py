"""The codec: float32 to packed codes and back, all ranks at once, beside memcpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ...config import ConfigError, Raw, UserError, among
from ...formats import SHARED, TILE, Cast, packed_bytes, parse_format, shift_count
from ...methods import CODEC_OPERATIONS, MEMCPY, SPARSE_OPERATIONS
from ..report import units
from ..report.figures import IDEAL, Axis, Chart, Panel, Series, Style, styles
from ..report.points import Estimate, Layout, SeedGroup, label, of_factors, times_as_fast, timing
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
    from ...world.mpi import World
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
    import numpy as np

    from ...ops import cpu, kernel_threads, set_kernel_threads, to_host
    from ...partition import split
    from .codec_cases import (
        CHECKED,
        check_against_reference,
        format_of,
        operations,
        sparse_operations,
    )
    from .timing import on_device, whole

    factors, world = case.factors, place.world
    operation, device = str(factors["operation"]), place.take_device(factors)
    start, stop = split(int(factors["size_bytes"]) // 4, world.processes, world.process)
    n, name = stop - start, str(factors.get("format", ANY_FORMAT))
    cast, density = Cast(format_of(name)), float(factors.get("density", DENSITY))

    def data(count: int = n) -> Any:
        """Return the first values of this rank."""
        values = np.random.default_rng(world.process).standard_normal(count, np.float32)
        return on_device(values, device)

    def copies() -> dict[str, Callable[[], object]]:
        x = data()
        out = np.zeros_like(x)
        return {MEMCPY: whole(lambda: np.copyto(out, x), x)}

    if operation == MEMCPY:
        runs = place.kept((n, device), copies)
    elif operation in SPARSE_OPERATIONS:
        make = partial(place.kept, (n, density), lambda: sparse_operations(data(), density))
        runs = world.agreed(make, told=ArithmeticError)
    else:
        runs = place.kept((n, name, device), lambda: operations(data(), cast))
    before = cpu.clone(), kernel_threads()
    clone, threads = str(factors.get("clone", before[0])), int(factors.get("threads", before[1]))
    world.agreed(lambda: _check_clone(clone))

    def prepare() -> None:
        cpu.use_clone(clone)
        set_kernel_threads(threads)

    call = Call(runs[operation], prepare, {"payload_bytes": 4 * n})
    try:
        if check:
            prepare()
            head = data(min(n, CHECKED))
            world.agreed(lambda: check_against_reference(head, cast), told=ArithmeticError)
            if operation in CODEC_OPERATIONS:
                shared = _shared(operation)
                shifts = shift_count(n, shared) if shared else 0
                call.outcomes["wire_bytes"] = packed_bytes(n, cast.fmt.bits) + shifts
                call.outcomes["error"] = _error(world, to_host(data()), cast, operation)
        yield call
    finally:
        cpu.use_clone(before[0])
        set_kernel_threads(before[1])


def _shared(operation: str) -> int | None:
    """Return how many values share a shift, if the operation chooses shifts."""
    return SHARED.get(operation.rpartition(" ")[2])


def _error(world: World, x: Any, cast: Cast, operation: str) -> float:
    """Return the error of x encoded and decoded, over all ranks' values. Collective.

    It has the rounding and scaling of the operation; decode and hop have those of plain encode.
    """
    import numpy as np

    from ...ops import cpu

    shared = _shared(operation)
    rounding = Cast(cast.fmt, "stochastic") if operation == "stochastic" else cast
    words = np.zeros(packed_bytes(x.size, cast.fmt.bits), np.uint8)
    shifts, out = np.full(shift_count(x.size, shared or TILE), 127, np.uint8), np.empty_like(x)
    cpu.encode_tiles(x, rounding, words, shifts, fit=shared is not None)
    cpu.decode_tiles(words, shifts, cast.fmt, out)
    wrong = float(np.sum((out.astype(np.float64) - x) ** 2))
    whole = float(np.sum(x.astype(np.float64) ** 2))
    sums = np.sum(world.gather((wrong, whole)), axis=0)
    return float(np.sqrt(sums[0] / sums[1]))


APART = 0.1  # distance of operations in a row of a figure, whose height is 1
CAPTION = (
    "Rate: float32 data of all ranks / median time of the slowest. Of memcpy's: of the same data "
    "on as many ranks in this study; in brackets the interval, which takes in both medians'."
)


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> list[Section]:
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
