"""What is shown of two studies beside one another."""

from __future__ import annotations

from collections.abc import Sequence

from . import text
from .axis import Axis, spread
from .chart import HEIGHT, Chart
from .compare import VERDICTS, Change, Comparison, Verdict, asked, computed, environments
from .look import IDEAL, Look
from .naming import label, varying
from .panel import Panel
from .series import Series
from .table import Column, Listed, Report, Section, Table

MOST = 50  # rows of the figure
ROW = 0.2  # height of one, inches
LOOKS: dict[Verdict, Look] = {
    "slower": Look("#b3204d", ">"),
    "faster": Look("#63b8ee", "<"),
    "unknown": Look("#000000", "x"),
    "alike": Look("#b9bec5", "o"),
}
SAID: dict[Verdict, str] = {
    "slower": "slower",
    "faster": "faster",
    "unknown": "no interval: too few repeats",
    "alike": "no change beyond the intervals",
}


def compare_report(comparison: Comparison) -> Report:
    """Return the report of a comparison."""
    before, after = comparison.before, comparison.after
    counts = {verdict: len(comparison.having(verdict)) for verdict in VERDICTS}
    points = len(comparison.changes)
    chance = f"{points * (1 - before.level):.2g}"
    notes = [
        f"A point changed if the {before.percent} interval of the ratio of its medians does not "
        "hold 1: the intervals of both medians, each wide enough for both to hold, do not overlap. "
        f"Were nothing different, {chance} of {text.count(points, 'point')} or fewer would be "
        "called changed by chance on average."
    ]
    return Report(
        f"{before.name} and {after.name}" if before.name != after.name else before.name,
        [
            ("A", f"{before.path}, {before.attributes.get('date', '')}"),
            ("B", f"{after.path}, {after.attributes.get('date', '')}"),
            ("points in both", str(points)),
            *((SAID[verdict], str(count)) for verdict, count in counts.items()),
        ],
        [
            Section("Changes", notes, [_table(comparison)], [_chart(comparison)]),
            *_environments(comparison),
        ],
        _listed(comparison),
    )


def _name(change: Change, names: Sequence[str]) -> str:
    return label(change.before.factors, names) or "the point"


def _names(comparison: Comparison) -> list[str]:
    return varying([change.before.factors for change in comparison.changes], ("nodes", "ppn"))


def _table(comparison: Comparison) -> Table:
    names = _names(comparison)
    columns = [
        Column("point", numbers=False),
        Column("A: median"),
        Column("B: median"),
        Column("B / A"),
        Column(f"{comparison.before.percent} CI"),
        Column("", numbers=False),
    ]
    rows = [
        [
            _name(change, names),
            text.time(change.before.summary["median_s"]),
            text.time(change.after.summary["median_s"]),
            text.digits(change.times.value),
            text.interval(change.times.low, change.times.high),
            SAID[verdict],
        ]
        for verdict in VERDICTS
        for change in comparison.having(verdict)
    ]
    return Table("Times of B by times of A", columns, rows)


def _chart(comparison: Comparison) -> Chart:
    names = _names(comparison)
    ordered = [change for verdict in VERDICTS for change in comparison.having(verdict)][:MOST]
    ordered.sort(key=lambda change: -change.times.value)
    series = [_series(ordered, verdict) for verdict in VERDICTS]
    series.append(Series("", IDEAL, [1, 1], [-0.6, len(ordered) - 0.4]))
    left = len(comparison.changes) - len(ordered)
    note = f"Ratio of medians; bars: {comparison.before.percent} CI."
    note += f" The {MOST} that changed most; {left} more are in the table." if left else ""
    ends = [end for c in ordered for end in c.times if end > 0]
    x = spread("time of B / time of A", ends, "log", 4, start=None)
    rows = [_name(change, names) for change in ordered]
    return Chart(
        "changes",
        f"{comparison.before.name}: B by A",
        [note],
        "Right of 1: B takes longer.",
        [Panel("", x, Axis(""), [each for each in series if each.x], rows=rows)],
        scale=(2.0, max((len(ordered) + 3) * ROW / HEIGHT, 0.4)),
    )


def _series(ordered: Sequence[Change], verdict: Verdict) -> Series:
    rows = [i for i, change in enumerate(ordered) if change.verdict == verdict]
    times = [ordered[i].times for i in rows]
    return Series(
        SAID[verdict],
        LOOKS[verdict],
        [each.value for each in times],
        [float(row) for row in rows],
        join="none",
        x_low=[each.low for each in times],
        x_high=[each.high for each in times],
    )


def _listed(comparison: Comparison) -> list[Listed]:
    found = [
        ("only in A", [point.case_id for point in comparison.only_before]),
        ("only in B", [point.case_id for point in comparison.only_after]),
        *((f"{name} differs (A, B)", items) for name, items in computed(comparison).items()),
    ]
    listed = [
        Listed(f"{what}, {text.count(len(items), 'point')}", items)
        for what, items in found
        if items
    ]
    keys = asked(comparison)
    return listed + ([Listed("the studies differ in", keys)] if keys else [])


def _environments(comparison: Comparison) -> list[Section]:
    rows = environments(comparison)
    if not rows:
        return [Section("Environments", ["Nothing that the files say of them differs."])]
    columns = [Column(name, numbers=False) for name in ("", "A", "B")]
    return [Section("Environments", tables=[Table("What differs", columns, rows)])]
