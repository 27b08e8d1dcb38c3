"""All-reduces and other collectives: of cpdhpc, MPI, gloo and NCCL, by size, method and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isnan, nan
from statistics import median
from typing import TYPE_CHECKING, Any

from ...config import ConfigError, Raw, UserError, among
from ...formats import SHARED, sum_bits, wire_format
from ...methods import (
    ACCUMULATES,
    ALGORITHMS,
    BASELINE_DEVICES,
    BASELINES,
    COLLECTIVES,
    EXACT,
    MAX_SUM_BITS,
    MEMCPY,
    SCALINGS,
    SUMMING,
)
from ..report import units
from ..report.figures import BOUND, LIBRARIES, Axis, Chart, Series, panels_with, spread, thinned
from ..report.points import (
    Estimate,
    Facets,
    Line,
    Panels,
    SeedGroup,
    drawn,
    is_baseline,
    label,
    of_factors,
    quotient,
    times_as_fast,
    timing,
    varying,
)
from ..report.tables import Column, Section, Table, tabulate
from ..study_data import DEVICE, SEATS, Case, Factor, Factors, Value, device_used, float32_size
from ..study_data.study_file import Point, StudyFile
from .base import Call, Kind, MeasuredStudy

if TYPE_CHECKING:
    from ...world.mpi import World
    from .allreduce_cases import CaseArrays, TimedCase
    from .place import JobRanks

ALL_REDUCE = "allreduce"
MPI = "mpi"
PLAIN, PREPARED = "plain", "prepared"
CALLS = {  # how ours are called: on which devices
    PLAIN: ("cpu", "gpu"),
    PREPARED: ("cpu", "gpu"),
    "shared": ("cpu",),
    "graphs": ("gpu",),
}
PAIRS = PING_PONG, STREAM = "ping_pong", "stream"  # of MPI, between rank i and rank i + p / 2
TITLES = {ALL_REDUCE: "All-reduce"} | {
    name: name.replace("_", "-").capitalize() for name in (*COLLECTIVES, *PAIRS)
}
GUESS = 1e-9  # s per byte and rank: a slow all-reduce


def _check_scaling(scaling: str) -> None:
    kind, _, number = scaling.partition(":")
    if kind == "static" and number.lstrip("-").isdigit():
        return
    if scaling not in (*SHARED, "none", "aps"):
        raise ConfigError(f"known are {', '.join(SCALINGS)}, with an integer K")


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors, with the method's defaults; see Kind.used."""
    algorithm, wire = str(given["algorithm"]), str(given["wire"])
    device = device_used(given)
    found = {"size_bytes": given["size_bytes"], "algorithm": algorithm, "wire": wire} | device
    name = str(given.get("collective") or ALL_REDUCE)
    if algorithm not in BASELINES and (call := given.get("call") or PLAIN) != PLAIN:
        found["call"] = _call(str(call), name, str(device.get("device", "cpu")))
    if name != ALL_REDUCE:
        known = (*COLLECTIVES.get(name, ()), MPI)
        if algorithm not in known:
            raise ValueError(f"{name} has no algorithm {algorithm}, only {', '.join(known)}")
        if algorithm == MPI and wire != "raw":
            raise ValueError(f"{name} of mpi is measured for wire raw")
        return found | {"collective": name} | _rounded(name, given)
    if algorithm in BASELINES:
        kind = str(device.get("device", "cpu"))
        if kind not in BASELINE_DEVICES[algorithm]:
            raise ValueError(f"{algorithm} takes no arrays of device {kind}")
        wires = BASELINES[algorithm]
        if wire not in wires:
            raise ValueError(f"{algorithm} has no wire {wire}, only {', '.join(wires)}")
        return found
    return found | _rounded(ALL_REDUCE, given)


def _call(call: str, name: str, device: str) -> str:
    """Return how a collective is called. Raises ValueError if it cannot be called so."""
    if device not in CALLS[call]:
        raise ValueError(f"call {call} takes no arrays of device {device}")
    if name != ALL_REDUCE and call != PREPARED:
        raise ValueError(f"{name} is called plain or prepared, not {call}")
    return call


def _rounded(name: str, given: Factors) -> dict[str, Value]:
    """Return scaling and accumulation, of a method that has them; by default its own.

    Raises ValueError if the method does.
    """
    from ...collectives.allreduce import Allreduce
    from ...collectives.collective import Collective

    keys = "wire", "algorithm", "value_scaling", "accumulate"
    wire, algorithm, scaling, way = (str(given[key]) or None for key in keys)
    if wire == "raw":  # has neither scaling nor rounding
        return {}
    assert wire and algorithm, "every case has them"
    choices = wire, algorithm, scaling, way
    try:
        if name == ALL_REDUCE:
            return factors_of(Allreduce(*choices))
        return factors_of(Collective(*choices, collective=name))
    except ValueError as error:
        raise ValueError(f"{algorithm}: {str(error).removeprefix(f'{name}: ')}") from None


def factors_of(method: Any) -> dict[str, Value]:
    """Return the factors of a method: of class Allreduce, or Collective."""
    from ...collectives.method import AUTO

    found: dict[str, Value] = {"algorithm": method.algorithm, "wire": str(method.wire)}
    if method.fmt is None:
        return found
    found["value_scaling"] = method.scaling or method.parsed_scaling.kind
    if method.algorithm == AUTO:
        return found | ({"accumulate": method.accumulate} if method.accumulate else {})
    adds = getattr(method, "collective", ALL_REDUCE) in (ALL_REDUCE, *SUMMING)
    return found | ({"accumulate": method.accumulating} if adds else {})


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    if used.get("collective") in PAIRS and ranks % 2:
        return f"{used['collective']} is between pairs of ranks, and {ranks} are not even"
    if used.get("accumulate") != EXACT:
        return None
    wire = str(used["wire"])
    fmt = wire_format(wire)
    assert fmt is not None, "raw has no exact sums"
    bits = sum_bits(fmt, ranks)
    if bits <= MAX_SUM_BITS:
        return None
    return f"exact sums of {ranks} ranks in {wire} take {bits} bits, more than {MAX_SUM_BITS}"


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    return repeats * (1e-3 + GUESS * float(used["size_bytes"]) * ranks)


@contextmanager
def _measure(study: MeasuredStudy, case: Case, place: JobRanks, check: bool) -> Iterator[Call]:
    """Prepare a collective; see Kind.measure. Collective."""
    factors, world = case.factors, place.world
    device = place.take_device(factors)
    with _torch_group(world, factors):
        timed = _timed(place, factors, device)
        try:
            call = Call(timed.run, timed.prepare)
            if check:
                timed.check(world)
                call.outcomes |= {
                    "error": timed.error,
                    "wire_bytes": timed.wire_bytes,
                    "payload_bytes": int(factors["size_bytes"]),
                    "bound_s": _bound_s(place, factors, device),
                }
                if timed.chosen not in ("", factors["algorithm"]):
                    call.chosen = {"chosen": timed.chosen}
                if place.machine and timed.method and factors.get("call", PLAIN) == PLAIN:
                    call.outcomes["predicted_s"] = _predicted_s(place, timed, factors)
            yield call
        finally:
            timed.free()


def _bound_s(place: JobRanks, factors: Factors, device: str) -> float:
    """Return the least time of an all-reduce of several ranks; NaN of another call. Collective."""
    from .allreduce_cases import bound_s, wire_bytes
    from .timing import link_s

    if place.world.ranks == 1 or factors.get("collective"):
        return nan
    copy_s = _arrays(place, int(factors["size_bytes"]) // 4, device).copy_s
    return bound_s(place.world, wire_bytes(factors), copy_s, link_s(place))


def _arrays(place: JobRanks, n: int, device: str) -> CaseArrays:
    from .allreduce_cases import CaseArrays

    return place.kept((n, device), lambda: CaseArrays(place.world, n, device))


def _timed(place: JobRanks, factors: Factors, device: str) -> TimedCase:
    """Return the call of a case, not checked yet."""
    from ...collectives.allreduce import Allreduce
    from ...collectives.collective import Collective
    from .allreduce_cases import BASELINES as OTHERS
    from .allreduce_cases import schedule_case
    from .collective_cases import collective_case, given, pair_case

    world, n = place.world, int(factors["size_bytes"]) // 4
    name, algorithm, wire, call, scaling, way = (
        str(factors[each]) if factors.get(each) else None
        for each in ("collective", "algorithm", "wire", "call", "value_scaling", "accumulate")
    )
    assert algorithm and wire, "every case has them"
    if name in PAIRS:
        return pair_case(world, n, device, window(4 * n) if name == STREAM else 0)
    if name and algorithm != MEMCPY:
        other = Collective(wire, algorithm, scaling, way, collective=name)
        exact = other.fmt is None
        data = place.kept((name, n, exact), lambda: given(name, n, world, exact))
        return collective_case(world, other, data, device, call or PLAIN)
    arrays = _arrays(place, n, device)
    if algorithm in (*BASELINES, MEMCPY):
        return OTHERS[algorithm if wire == "raw" else f"{algorithm}-{wire}"](world, arrays)
    method = Allreduce(wire, algorithm, scaling, way, machine=place.machine)
    return schedule_case(world, method, arrays, call or PLAIN)


def _predicted_s(place: JobRanks, timed: TimedCase, factors: Factors) -> float:
    """Return the predicted time of a plain call."""
    from ...collectives.predict import predict

    assert place.machine and timed.method, "what is predicted, and by which times"
    method = replace(timed.method, algorithm=timed.chosen or timed.method.algorithm)
    return predict(place.machine, method, place.world.nodes, int(factors["size_bytes"]) // 4).time_s


@contextmanager
def _torch_group(world: World, factors: Factors) -> Iterator[None]:
    """Open torch's process group if the algorithm is torch's. Collective.

    Raises UserError on all ranks if torch or one of its libraries is missing.
    """
    from .allreduce_cases import group_of, missing

    library = str(factors["algorithm"])
    if library in BASELINES and (reason := missing(world, library)):
        raise UserError(f"algorithm {library}: {reason}")
    with group_of(world, [library] if library in BASELINES else []):
        yield


ON_WIRE = ("wire", "value_scaling")  # what decides the bytes on the wire


def _one_bound(file: StudyFile) -> StudyFile:
    """Return a study with one bound for all cases of a shape, size and bytes on the wire.

    It is the median over their bounds: each case has timed copies of its own.
    """
    found: dict[frozenset[Any], list[float]] = {}
    for point in file.points:
        if not isnan(bound_s := point.outcomes.get("bound_s", nan)):
            found.setdefault(_bounded(point), []).append(bound_s)
    bounds_s = {key: median(each) for key, each in found.items()}
    points = [
        replace(each, outcomes={**each.outcomes, "bound_s": bounds_s.get(_bounded(each), nan)})
        for each in file.points
    ]
    return replace(file, points=tuple(points))


def _bounded(point: Point) -> frozenset[Any]:
    """Return what points share that have one bound; within a node nothing is on a wire."""
    without = {"algorithm", "chosen", "call", "accumulate"} | (
        set() if int(point.factors["nodes"]) > 1 else {*ON_WIRE}
    )
    return frozenset(item for item in point.factors.items() if item[0] not in without)


def _share(group: SeedGroup) -> float:
    return share(_collective(group), group.ranks, int(_size(group)))


WINDOW, MOST_BYTES = 64, 1 << 28  # of stream: messages in flight, and all of them together


def window(size_bytes: int) -> int:
    """Return how many messages of a size are in flight in a stream, two at least."""
    return max(2, min(WINDOW, MOST_BYTES // size_bytes))


def share(name: str, ranks: int, size_bytes: int = 0) -> float:
    """Return the least share of the data that leaves a rank that sends, as in nccl-tests.

    The message of ping_pong goes there and back; size_bytes: of the messages of a stream
    """
    if name in PAIRS:
        return 2.0 if name == PING_PONG else float(window(size_bytes))
    if name in ("broadcast", "reduce"):
        return float(ranks > 1)
    return (1 + (name == ALL_REDUCE)) * (ranks - 1) / ranks


def _collective(group: SeedGroup) -> str:
    return str(group.factors.get("collective") or ALL_REDUCE)


SHAPES = 3  # that have figures
METHOD = ("algorithm", "chosen", "call", "wire", "value_scaling", "accumulate", "device", *SEATS)
CAPTION = (
    "Median of the slowest rank's times; repeats: without warm-ups. busbw: size / median times "
    "the least share that leaves a rank: 2 (p - 1) / p of p ranks, half of it where nothing is "
    "summed or nothing gathered, 1 for broadcast and reduce, 2 for ping-pong (there and back), the "
    "messages of a window for stream. mpi: MPI's own of float32 in the same "
    "study, at the same size and ranks; in brackets the interval, which takes in both medians'. "
    "Times as fast: the ratio of the medians; bench allreduce prints the median of the ratios of "
    "single calls. Bound, of all-reduces: the longer of a copy of the data by all ranks at once "
    "(memcpy) and of 2 (N - 1) / N of the bytes on the wire over the link of each of N nodes; of "
    "several copies the fastest counts, and the table has the median over the cases of a place. "
    "Error: in the Euclidean norm."
)
BOUNDED = (
    "Bound: the longer of a copy of the data by all ranks at once and of 2 (N - 1) / N of the "
    "bytes on the wire over the link of each of N nodes."
)


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return time and bus bandwidth by size of each collective, beside MPI's and the bound."""
    every = layout.every or groups
    names = list(dict.fromkeys(map(_collective, groups)))
    found = []
    for name in names:
        own, all_of_it = ([g for g in each if _collective(g) == name] for each in (groups, every))
        found.append(_section(file, TITLES[name], own, all_of_it, layout))
    return found


def _section(
    file: StudyFile,
    title: str,
    groups: Sequence[SeedGroup],
    every: Sequence[SeedGroup],
    layout: Facets,
) -> Section:
    shapes: dict[tuple[int, ...], list[SeedGroup]] = {}
    for group in groups:
        shapes.setdefault(group.shape, []).append(group)
    drawn = thinned(list(shapes.values()), SHAPES)
    charts = [chart for own in drawn for chart in _charts(file, own, layout)]
    notes = [f"Figures of {len(drawn)} of {len(shapes)} shapes."] if len(shapes) > SHAPES else []
    return Section(f"{title} by size", notes, [_table(file, title, groups, every)], charts)


def _size(group: SeedGroup) -> float:
    return float(group.factors["size_bytes"])


def _place(group: SeedGroup) -> tuple[Any, ...]:
    """Return the shape, size and device, which compared cases have in common."""
    return group.shape, _size(group), group.factors.get("device")


def _bus_bandwidth(group: SeedGroup, time: Estimate) -> Estimate:
    """Return the share that leaves a rank, times size / time in GB/s, unknown for one rank."""
    return time.inverse(_share(group) * _size(group) / 1e9 or nan)


def _table(
    file: StudyFile, title: str, groups: Sequence[SeedGroup], every: Sequence[SeedGroup]
) -> Table:
    """Return the table of groups; every: of the study, with those of mpi and memcpy."""
    base, copies = (
        {_place(g): g for g in every if g.factors["algorithm"] == name} for name in ("mpi", MEMCPY)
    )
    differing = varying([group.factors for group in groups])
    predicted = any(point.outcomes.get("predicted_s", nan) >= 0 for point in file.points)

    def by_memcpy(group: SeedGroup) -> str:
        copy = copies.get(_place(group))
        return units.digits(quotient(group.time_s.value, copy.time_s.value)) if copy else "-"

    columns: list[Column[SeedGroup]] = [
        Column("ranks", lambda g: str(g.ranks)),
        Column("size", lambda g: units.size(_size(g))),
        *of_factors([name for name in METHOD if name in differing or name == "algorithm"], groups),
        *timing(file),
        Column("busbw\nGB/s", lambda g: units.digits(_bus_bandwidth(g, g.time_s).value)),
        Column("times as\nfast as mpi", lambda g: times_as_fast(base.get(_place(g)), g)),
        *([Column("time by\nmemcpy", by_memcpy)] if copies else []),
        Column("bound", lambda g: units.time(g.mean("bound_s"))),
        Column(
            "time by\nbound", lambda g: units.digits(quotient(g.time_s.value, g.mean("bound_s")))
        ),
        *([Column("predicted", lambda g: units.time(g.mean("predicted_s")))] if predicted else []),
        Column("relative\nerror", lambda g: units.digits(g.mean("error"), 2)),
    ]
    return tabulate(title, columns, groups, CAPTION)


Shown = Callable[["SeedGroup", "Estimate"], "Estimate"]  # of a group and a time of it


def _charts(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Chart]:
    """Return the figures of one shape, none for a single size."""
    if len({_size(group) for group in groups}) < 2:
        return []
    scale, unit = units.time_unit(median(group.time_s.value for group in groups))
    shown: dict[str, tuple[str, Shown]] = {
        "time": (f"time / {unit}", lambda _, time: time.scaled(1 / scale))
    }
    if groups[0].ranks > 1:
        shown["bandwidth"] = "bus bandwidth / (GB/s)", _bus_bandwidth
    methods: dict[tuple[str, ...], list[SeedGroup]] = {}
    for group in groups:
        methods.setdefault(tuple(str(group.factors.get(n, "")) for n in METHOD), []).append(group)
    by_size = [sorted(each, key=_size) for each in methods.values()]
    baselines = [each for each in by_size if is_baseline(each[0].factors)]
    own = [each for each in by_size if not is_baseline(each[0].factors)]
    beside = [
        Line(label(each[0].factors, METHOD[:3]), style, each)
        for style, each in zip(LIBRARIES, baselines, strict=False)
    ]
    panels = layout.arrange(own or baselines, without=["size_bytes"])
    ending = "x".join(map(str, groups[0].shape[:2]))
    if (name := _collective(groups[0])) != ALL_REDUCE:
        ending = f"{name}_{ending}"
    return [
        _chart(file, *axis, panels, beside if own else [], f"{what}_by_size_{ending}")
        for what, axis in shown.items()
    ]


def _chart(
    file: StudyFile, axis: str, shown: Shown, panels: Panels, baselines: Sequence[Line], name: str
) -> Chart:
    what, groups = axis.partition(" /")[0], panels.groups
    kind = f"{TITLES[_collective(groups[0])].lower()}s"
    known = not all(isnan(group.mean("bound_s")) for group in groups)
    nodes, _, ranks = groups[0].shape
    why = (
        "the bandwidth of this machine was not measured" if ranks > 1 else "one rank sends nothing"
    )
    bounds = BOUNDED if known else f"No bound: {why}."
    shape = f"{units.count(ranks, 'rank')} on {units.count(nodes, 'node')}"
    beside = (
        f" {' and '.join(line.name for line in baselines)} in every panel." if baselines else ""
    )
    return Chart(
        name,
        f"{file.name}: {what} of {kind} by size, {shape}",
        [f"Medians of the slowest rank's times, bars: {file.percent} CI.{beside} {bounds}"],
        f"{what.capitalize()} by size on {shape}.",
        panels_with(
            {title: _series(lines, baselines, shown) for title, lines in panels.lines.items()},
            Axis("float32 data of a rank", "size", ticks=sorted({_size(each) for each in groups})),
            lambda values: spread(axis, values, "log", 10),
        ),
        panels.columns,
    )


def _series(own: Sequence[Line], baselines: Sequence[Line], shown: Shown) -> list[Series]:
    """Return the lines, and the bound of cpdhpc's."""
    found = [
        drawn(line, _size, lambda g: shown(g, g.time_s), "line") for line in [*own, *baselines]
    ]
    known = [g for line in own for g in line.groups if not isnan(g.mean("bound_s"))]
    least = {_size(g): shown(g, g.exact("bound_s")).value for g in known}
    if least:
        found.append(Series("bound", BOUND, sorted(least), [least[size] for size in sorted(least)]))
    return found


ALLREDUCE = Kind(
    factors={
        "size_bytes": float32_size("float32 data of a rank"),
        "algorithm": Factor(
            "algorithm; mpi, gloo and nccl are those libraries' own",
            str,
            default="ring",
            check=among([*ALGORITHMS, *BASELINES]),
        ),
        "wire": Factor("what travels: raw float32 or a format", str, "1", "raw", wire_format),
        "value_scaling": Factor("scaling of values before encoding", str, check=_check_scaling),
        "accumulate": Factor("how partial sums are kept", str, check=among([*ACCUMULATES, EXACT])),
        "device": DEVICE,
        "call": Factor(
            "plain, prepared, shared (prepared, with arrays that the node shares) or graphs",
            str,
            check=among(CALLS),
        ),
        "collective": Factor(
            "all-reduce or another collective, whose size is that of the whole array; ping_pong "
            "and stream are messages of mpi between pairs",
            str,
            default=ALL_REDUCE,
            check=among([ALL_REDUCE, *COLLECTIVES, *PAIRS]),
        ),
    },
    work="size_bytes",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one call, from a barrier to its end on the slowest rank",
    measure=_measure,
    sections=_sections,
    panels=("size_bytes", "wire", "value_scaling"),
    in_common=_one_bound,
)
