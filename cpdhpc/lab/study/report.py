"""The report on a study file, and on the file of bench compress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, isnan
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ... import store
from ...config import UserError, validate
from ...methods import MEMCPY
from ..kinds import kind_of
from ..report import units
from ..report.points import (
    Facets,
    SeedGroup,
    constant,
    heading,
    is_number,
    label,
    of_factors,
    quotient,
    said,
    seed_groups,
    varying,
)
from ..report.scaling import ALL, THROUGHPUT, Choice, chosen, scaling
from ..report.tables import (
    Column,
    Listed,
    Report,
    Section,
    Table,
    capital,
    counted,
    tabulate,
    words,
)
from ..study_data import SHAPE, Array, Case, Factors, Value, grouped
from ..study_data.study_file import (
    SAME_FOR_ALL,
    Point,
    ReportError,
    StudyFile,
    check_arrays,
    read_result,
    table_of,
)
from .cases import check_factors, expand
from .folder import Folder
from .spec import Study

NOT_SHOWN = ("study", "title", "kind", "scaling", "sample", "work", "Conventions")


def rules(file: StudyFile) -> list[str]:
    """Return how the figures were made, in sentences. Source: Hoefler and Belli, SC15."""
    return [
        f"A repeat is {file.attributes.get('sample', 'one call')}. Times are {file.times}.",
        *_repeats(file, file.toml.get("measure", {})),
        f"Figures are medians with {file.percent} intervals from order statistics: no distribution "
        "is assumed, only that repeats are independent.",
        "The interval of a ratio takes in those of both medians, each wide enough for both to hold "
        f"with {file.percent} (Bonferroni).",
        *(
            []
            if file.benchmark or file.scaling == THROUGHPUT
            else [f"Baseline of speed-ups: {file.base_rule}."]
        ),
        "Rates are bytes over the median time. Ratios are never averaged.",
        "Bytes and errors are counted or computed, not sampled: they have no interval. A bound is "
        "from one measurement of the ping-pong's rate, and from copies that each case has timed.",
        "Lines join points only where values between them are meant; dotted ones lead the eye.",
    ]


def _repeats(file: StudyFile, asked: Mapping[str, Any]) -> list[str]:
    """Return how often a point was measured, in sentences."""
    warmup, most = asked.get("warmup", "?"), asked.get("max_repeats", "?")
    if file.benchmark:
        return [
            f"Warm-up calls: {warmup}, in the file with a flag and in no figure "
            f"here; then {most} repeats, all cases in turns."
        ]
    if file.kind == "train":
        return [
            f"Warm-up steps at the start, and after a restart: {warmup}. They are "
            "kept in the file with a flag, and in no figure of times.",
            "Every training goes to its end. Seeds are taken together: the repeats are the steps "
            "of all of them, which may depend on one another more than independent repeats do.",
        ]
    runs = file.kind == "command"
    blocks = [
        f"Warm-up {'runs' if runs else 'calls'} before each block of repeats: {warmup}. They are "
        "kept in the file with a flag, and in no figure here.",
        f"Repeats: {asked.get('min_repeats', '?')} to {most}, until the "
        f"interval of the median is within {100 * asked.get('relative', float('nan')):g} % of it "
        f"or {asked.get('max_time_s', '?')} s are over; all ranks stop together.",
        "The cases of a batch take turns in shuffled order "
        f"(seed {asked.get('seed', '?')}), so that drift is not taken for an effect.",
    ]
    of_calls = (
        "Besides the slowest rank's times the file has those of the fastest, and means over ranks."
    )
    of_runs = (
        "Of a program with metrics that are better when lower or higher, their intervals decide. "
        "Several values of a run count as repeats if the study says so (take = 'all'); they may "
        "depend on one another."
    )
    return [*blocks, of_runs] if runs else [of_calls, *blocks]


def provenance(file: StudyFile) -> list[Table]:
    """Return the tables of the file and of the environments."""
    known = {key: value for key, value in file.attributes.items() if key not in NOT_SHOWN}
    rows = [
        ["path", str(file.path)],
        *([key.replace("_", " "), str(v)] for key, v in known.items()),
    ]
    return [Table("File", words("", ""), rows, page_only=True), *_environments(file)]


def _environments(file: StudyFile) -> list[Table]:
    if not file.environments:
        return []
    counts = Counter(int(point.outcomes.get("environment", 0)) for point in file.points)
    keys = list(dict.fromkeys(key for each in file.environments for key in each))
    columns = words("", *(f"environment {i}" for i in range(len(file.environments))))
    rows = [["points", *(str(counts[i]) for i in range(len(file.environments)))]]
    for key in keys:
        values = [_plain(each.get(key, "")) for each in file.environments]
        if any(values):
            rows.append([key.replace("_", " "), *values])
    return [Table("Environment", columns, rows, page_only=True)]


def _plain(value: str) -> str:
    """Return JSON tables as text."""
    table = table_of(value)
    return value if table is None else ", ".join(f"{key} {item}" for key, item in table.items())


SHARED = "ranks share cores"  # begins the placement of such ranks; see world.cores


def _missing(file: StudyFile, is_chosen: Callable[[Factors], bool]) -> list[Listed]:
    """Return the cases without a point, and the impossible ones, each with the reason."""
    if file.benchmark:
        return []  # it has no further cases
    try:
        study = validate(Study, dict(file.toml), str(file.path))
        check_factors(study, str(file.path))
        found = expand(study)
    except UserError as error:
        count = units.count(int(file.attributes.get("missing", 0)), "case")
        return [Listed(f"missing, {count}; which cannot be said: {error}")]
    there = {frozenset(_asked(point)) for point in file.points}
    missing = [
        case
        for case in found.cases
        if is_chosen(case.all_factors) and frozenset(case.all_factors.items()) not in there
    ]
    impossible = [(case.id, why) for case, why in found.impossible if is_chosen(case.all_factors)]
    reasons = grouped(impossible, itemgetter(1))
    lost = [f"{case.id}{_why(file, case)}" for case in missing]
    return [
        *counted([("missing", lost)], "case"),
        *(
            Listed(
                f"impossible, {units.count(len(some), 'case')}: {why}", [name for name, _ in some]
            )
            for why, some in reasons.items()
        ),
    ]


def _asked(point: Point) -> Iterator[tuple[str, Value]]:
    """Yield the factors of a point that its study names."""
    return ((name, value) for name, value in point.factors.items() if name not in SAME_FOR_ALL)


def _why(file: StudyFile, case: Case) -> str:
    """Return why a case has no point, by the folder of the study if the file is still in it."""
    folder = Folder(file.path.parent)
    if folder.case_file(case).exists():
        try:
            read_result(folder.case_file(case), case)
        except UserError as error:
            return f": {error}"
        return ": finished since; study collect takes it in"
    failure = folder.failure(case).splitlines()
    return f": {failure[-1]}" if failure else ""


def _shared(file: StudyFile) -> list[Listed]:
    """Return the points whose ranks shared cores."""
    found: dict[str, list[str]] = {}
    for point in file.points:
        index = int(point.outcomes.get("environment", -1))
        known = 0 <= index < len(file.environments)
        placement = file.environments[index].get("placement", "") if known else ""
        if placement.startswith(SHARED):
            found.setdefault(placement, []).append(point.case_id)
    return counted(found.items())


def _reserves(file: StudyFile) -> list[Listed]:
    asked = file.toml.get("measure", {}) if not file.benchmark else {}
    relative = asked.get("relative", float("inf"))
    few = [point for point in file.points if isnan(point.summary["ci_low_s"])]
    stops = file.kind != "train"  # a training does not stop at an interval
    wide = [point for point in file.points if stops and _half_width(point) > relative]
    fast = [p for p in file.points if p.summary["median_s"] < p.outcomes.get("bound_s", 0.0)]
    restarted = [point for point in file.points if point.outcomes.get("restarts", 0) > 0]
    too_wide = f"interval wider than the ±{100 * relative:g} % requested"
    found = {
        "no interval, too few repeats": [point.case_id for point in few],
        too_wide: [f"{point.case_id} (±{100 * _half_width(point):.3g} %)" for point in wide],
        "faster than the bound, which then is none": [point.case_id for point in fast],
        "measured after a restart of the batch": [point.case_id for point in restarted],
    }
    return counted(found.items())


def _half_width(point: Point) -> float:
    """Return the larger distance of an end of the interval from the median, as a share of it."""
    s = point.summary
    reach = max(s["median_s"] - s["ci_low_s"], s["ci_high_s"] - s["median_s"])
    return quotient(reach, s["median_s"])


def study_report(file: StudyFile, choice: Choice = ALL) -> Report:
    """Return the report of a study, of all points or the chosen ones.

    Raises ReportError for an unknown kind, or a choice that the file cannot have.
    """
    try:
        kind = kind_of(file.kind)
    except UserError as error:
        raise ReportError(f"{file.path}: kind={file.kind!r}: {error}") from None
    file = kind.in_common(file)
    every = seed_groups(file)
    found = choice.select(every)
    layout = replace(Facets.of(file, found, kind.panels), every=every)
    points = tuple(point for group in found for point in group.points)
    part = replace(file, points=tuple(sorted(points, key=lambda point: point.index)))
    sections = [*scaling(file, found, layout), *kind.sections(file, found, layout)]
    if choice.draws:
        plain = [replace(section, charts=()) for section in sections]
        sections = [chosen(file, found, choice), *plain]
    slowdowns = _slowdowns(found)
    asked = [("where", " and ".join(choice.where))] if choice.where else []
    return Report(
        file.name,
        [
            ("found", _finding(file, found, slowdowns, sections)),
            *asked,
            *_facts(part, found, len(file.points)),
        ],
        [
            *_fastest(slowdowns),
            *sections,
            Section("Spread of times", tables=[_spread(file, found)]),
        ],
        [*_missing(file, choice.test(every)), *_shared(part), *_reserves(part)],
        rules(file),
        provenance(part),
        [("study.toml", str(file.attributes["study"]))],
    )


def _facts(file: StudyFile, found: Sequence[SeedGroup], total: int) -> list[tuple[str, str]]:
    """Return the facts that begin the report, of the chosen points; total: number of all points."""
    missing = int(file.attributes.get("missing", 0))
    ranks = sorted({group.ranks for group in found})
    repeats = [len(point.times_s) for point in file.points]
    factors = [group.factors for group in found]
    same = [said(k, v) for k, v in constant(factors, SHAPE).items()]
    used = {int(point.outcomes.get("environment", 0)) for point in file.points}
    there = [each for i, each in enumerate(file.environments) if i in used]
    hosts = dict.fromkeys(units.hosts(each.get("hosts", "")) for each in there)
    count = len(file.points)
    rest = f" of {total}" if count < total else f", {missing} missing" if missing else ""
    return [
        (
            "what",
            f"benchmark of {file.kind}"
            if file.benchmark
            else f"{file.scaling} scaling of {file.kind}",
        ),
        ("points", f"{count}{rest}"),
        ("ranks", ", ".join(map(str, ranks))),
        ("repeats", f"{_range(repeats)} a point, without warm-ups"),
        *([] if file.benchmark else [("baseline", file.base_rule)]),
        *([("the same in all", ", ".join(same))] if same else []),
        ("hosts", "; ".join(hosts)),
        ("written", str(file.attributes.get("date", ""))),
    ]


@dataclass(frozen=True)
class Slowdowns:
    """Methods compared at shared settings.

    words, numbers: factors that are the method, and those that are the setting
    by: method -> slowdown against the fastest, at each setting
    """

    words: Sequence[str]
    numbers: Sequence[str]
    by: Mapping[str, Sequence[float]]

    @property
    def ordered(self) -> list[str]:
        """The methods, those first that are most often the fastest."""
        return sorted(self.by, key=lambda name: -self.by[name].count(1.0))


def _slowdowns(found: Sequence[SeedGroup]) -> Slowdowns | None:
    """Return the slowdowns of methods; None without several methods at two settings or more."""
    found = [group for group in found if group.factors.get("algorithm") != MEMCPY]  # sums nothing
    factors = [group.factors for group in found]
    differing = varying(factors, ())
    numbers = [name for name in differing if is_number(name, factors)]
    words = [name for name in differing if name not in numbers]
    places = grouped(found, lambda group: tuple(group.factors.get(name) for name in numbers))
    shared = [each for each in places.values() if len(each) > 1]
    if len(shared) < 2:
        return None
    by: dict[str, list[float]] = {}
    for each in shared:
        best_s = min(group.time_s.value for group in each)
        for group in each:
            name = label(group.factors, words) or units.NONE
            by.setdefault(name, []).append(quotient(group.time_s.value, best_s))
    return Slowdowns(words, numbers, by)


def _fastest(slowdowns: Slowdowns | None) -> list[Section]:
    """Return how often each method is the fastest, if methods are compared."""
    if slowdowns is None:
        return []
    by, numbers, words = slowdowns.by, slowdowns.numbers, slowdowns.words
    columns: list[Column[str]] = [
        Column(" ".join(heading(name) for name in words), numbers=False),
        Column("places", lambda name: str(len(by[name]))),
        Column("fastest\nat", lambda name: str(by[name].count(1.0))),
        Column("slowdown against\nthe fastest: median", lambda n: units.digits(median(by[n]))),
        Column("largest", lambda name: units.digits(max(by[name]))),
    ]
    caption = (
        f"A place is one setting of {', '.join(map(heading, numbers))}. Slowdown: time over that "
        "of the fastest method there. If intervals overlap, which one is fastest may be chance."
    )
    table = tabulate("Fastest methods", columns, slowdowns.ordered, caption)
    return [Section("Summary", tables=[table])]


def _finding(
    file: StudyFile,
    found: Sequence[SeedGroup],
    slowdowns: Slowdowns | None,
    sections: Sequence[Section],
) -> str:
    """Return the results in sentences: of the sections, the scaling, and the fastest method."""
    most = max(group.ranks for group in found)
    far = [
        group
        for group in found
        if group.ranks == most and group.base_points and group.base_points[0].ranks < most
    ]
    said = [capital(section.found) for section in sections if section.found][:1]
    if far and file.scaling != THROUGHPUT:
        names = varying([group.factors for group in far])
        best, worst = max(far, key=_efficiency), min(far, key=_efficiency)
        text = f"On {units.count(most, 'rank')} the best speed-up is "
        text += f"{units.with_interval(*best.speedup)}, {_share_of_ideal(best, names)}"
        if len(far) > 1:
            least = units.digits(worst.speedup.value)
            text += f"; the lowest of {len(far)} settings is {least}, "
            text += _share_of_ideal(worst, names)
        said.append(f"{text}.")
    if slowdowns is not None and len(slowdowns.by) > 1:
        first, *_, last = slowdowns.ordered
        times = slowdowns.by[first]
        most_often = [n for n, each in slowdowns.by.items() if each.count(1.0) == times.count(1.0)]
        others = units.count(len(most_often) - 1, "other method")
        ties = f", as often as {others}" if len(most_often) > 1 else ""
        said.append(
            f"{first} is the fastest at {times.count(1.0)} of {units.count(len(times), 'place')}"
            f"{ties}; {last} takes a median of {units.digits(median(slowdowns.by[last]))} times "
            "as long as the fastest."
        )
    if not said:
        slowest = max(found, key=lambda group: group.time_s.value)
        quickest = min(found, key=lambda group: group.time_s.value)
        said.append(
            f"Medians of {units.count(len(found), 'point')} are from "
            f"{units.time(quickest.time_s.value)} to {units.time(slowest.time_s.value)}."
        )
    return " ".join(said[:2])


def _share_of_ideal(group: SeedGroup, names: Sequence[str]) -> str:
    """Return the efficiency of a group in words. names: of the factors that describe it"""
    setting = label(group.factors, names)
    share = f"{units.digits(100 * _efficiency(group))} % of the ideal"
    return f"{share} ({setting})" if setting else share


def _efficiency(group: SeedGroup) -> float:
    value = group.efficiency.value
    return value if isfinite(value) else 0.0


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _spread(file: StudyFile, found: Sequence[SeedGroup]) -> Table:
    columns: list[Column[SeedGroup]] = [
        *of_factors(varying([group.factors for group in found], ()), found, missing=""),
        Column("repeats", lambda g: str(len(g.samples_s))),
        *(Column(name, partial(_time, call)) for name, call in STATISTICS.items()),
    ]
    caption = (
        f"{file.times.capitalize()}, without warm-ups. Quantiles between neighbouring samples."
    )
    return tabulate("Spread of times", columns, found, caption, page_only=True)


def _time(of: Callable[[Array], float], group: SeedGroup) -> str:
    return units.time(float(of(group.samples_s))) if len(group.samples_s) else units.NONE


def _deviation(samples_s: Array) -> float:
    return float(samples_s.std(ddof=1)) if len(samples_s) > 1 else float("nan")


STATISTICS: dict[str, Callable[[Array], float]] = {
    **{
        name: partial(np.quantile, q=share)
        for name, share in {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}.items()
    },
    "mean": np.mean,
    "standard\ndeviation": _deviation,
}


BENCHMARK = "compress"  # attribute of its files
FIGURES = {  # column -> heading
    "error": "error",
    "cosine": "cosine",
    "sum_error": "error\nof the sum",
    "sent_share": "share\nsent",
    "nonzero_share": "share\nnon-zero",
}
NEEDED = ("method", "ranks", "sent_bytes", "time_s", *FIGURES)
CAPTION = (
    "Bytes: messages in an iteration of the rank that sends most. Errors and cosine: of the mean "
    "against the exact one; of the sum: of all iterations' means. Time: of an iteration of one "
    "process, all its ranks one after the other."
)


def compress_report(path: Path) -> Report:
    """Return the report of a file. Raises ReportError if it lacks an array of bench compress."""
    groups, attributes = store.read(path)
    check_arrays(path, groups, {"points": NEEDED}, "is not the file of bench compress")
    points = groups["points"]
    most_bytes = np.nanmax(points["sent_bytes"], axis=1)
    columns = [
        Column[int]("method", lambda i: str(points["method"][i]), numbers=False),
        Column[int]("ranks", lambda i: str(points["ranks"][i])),
        Column[int]("bytes\nper rank", lambda i: units.size(float(most_bytes[i]))),
        *(_figure(heading, points[name]) for name, heading in FIGURES.items()),
        Column[int]("time", lambda i: units.time(float(points["time_s"][i]))),
    ]
    table = tabulate("Methods", columns, range(len(points["method"])), CAPTION)
    facts = [(name, str(attributes.get(name, ""))) for name in ("gradients", "iterations")]
    facts.append(("hosts", units.hosts(attributes.get("hosts", ""))))
    return Report("Compressors on recorded gradients", facts, [Section("Methods", tables=[table])])


def _figure(heading: str, values: Array) -> Column[int]:
    return Column(heading, lambda i: units.digits(float(values[i])))
