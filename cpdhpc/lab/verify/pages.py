"""Tables and figures of the results of verify, for one machine or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..report import units
from ..report.figures import BOUND, Axis, Chart, Map, Panel, Series, styles
from ..report.tables import Column, Listed, Report, Section, Table, tabulate, words
from ..study_data import grouped
from .base import Array, Ratio
from .results import NOT_RUN, CheckRow, Results, read

SHOWN_ATTRIBUTES = ("date", "hosts", "processor", "cpu_clone", "mpi_library", "versions",
                    "kernel_threads", "git_commit", "slurm_job_id")  # fmt: skip


def verify_report(results: Results) -> Report:
    bad = [row for row in results.rows if row.bad]
    listed = [Listed(f"{row.name}: {row.status}", row.said) for row in bad]
    if results.ended:
        listed.insert(0, Listed(f"not all was checked: {results.ended}"))
    slow = [each for each in results.ratios if not each.expected]
    listed += [Listed(f"{_name(r)}: {_value(r)} times as fast as {r.beside}", [r.advice])
               for r in slow]  # fmt: skip
    attributes = [[name.replace("_", " "), str(results.attributes.get(name, ""))]
                  for name in SHOWN_ATTRIBUTES]  # fmt: skip
    facts = Table("What is there", words("", ""), [[*each] for each in results.facts.items()])
    return Report(
        results.title,
        [("verdict", results.verdict), ("where", str(results.attributes.get("hosts", "")))],
        [
            Section("Checks", tables=[_checks(results.rows)], charts=_coverage(results)),
            Section("Speed", [SPEED], [_ratios(results.ratios)], _speeds([results], [""])),
            Section("What is there", tables=[facts], charts=_links(results)),
        ],
        listed,
        rules=[
            "A kernel is compared with ops.reference, which is NumPy, bit for bit; a collective "
            "with the simulator of its ranks.",
            "A time is that of the slowest rank from a barrier; ratios are of medians over calls "
            "that took turns in this run.",
        ],
        provenance=[Table("File", words("", ""), attributes, page_only=True)],
    )


def report_of(path: Path) -> Report:
    return verify_report(read(path))


SPEED = (
    "Each row compares two times with the same data in the same run: above 1 is faster than the "
    "other. An unexpected speed is no error: other programs, or the cores of ranks, may be why."
)


def _outcome(row: CheckRow) -> str:
    """Return the subject of a check, or its first errors: the page lists all of them."""
    more = [f"{len(row.said) - 2} more lines"] if len(row.said) > 2 else []
    return "; ".join([*row.said[:2], *more]) or row.what


def _checks(rows: Sequence[CheckRow]) -> Table:
    columns = [
        Column[CheckRow]("check", lambda r: r.name, numbers=False),
        Column[CheckRow]("result", lambda r: r.status, numbers=False),
        Column[CheckRow]("comparisons", lambda r: f"{r.counted:,}" if r.counted else units.NONE),
        Column[CheckRow]("time", lambda r: units.time(r.time_s)),
        Column[CheckRow]("what, or what is wrong", _outcome, numbers=False),
    ]
    return tabulate("Checks", columns, rows)


def _name(ratio: Ratio) -> str:
    device = " on the GPU" if ratio.device == "gpu" else ""
    return f"{ratio.what}, {units.size(ratio.size_bytes)}{device}"


def _value(ratio: Ratio) -> str:
    return units.digits(ratio.value)


def _expected(ratio: Ratio) -> str:
    if ratio.high == float("inf"):
        return f"{ratio.low:g} or more" if ratio.low else units.NONE
    return f"{ratio.low:g} to {ratio.high:g}"


def _ratios(ratios: Sequence[Ratio]) -> Table:
    def rate(ratio: Ratio) -> str:
        return units.digits(ratio.size_bytes / float(np.median(ratio.times_s)) / 1e9)

    columns = [
        Column[Ratio]("what", _name, numbers=False),
        Column[Ratio]("time", lambda r: units.time(float(np.median(r.times_s)))),
        Column[Ratio]("GB/s", rate),
        Column[Ratio]("beside", lambda r: r.beside, numbers=False),
        Column[Ratio]("its time", lambda r: units.time(float(np.median(r.beside_s)))),
        Column[Ratio]("times\nas fast", _value),
        Column[Ratio]("expected", _expected, numbers=False),
        Column[Ratio]("if not", lambda r: "" if r.expected else r.advice, numbers=False),
    ]
    return tabulate("Speeds", columns, ratios)


SHORT_S = 0.01  # shorter checks are drawn there


def _coverage(results: Results) -> list[Chart]:
    """Return the times of checks that were run, a row for each."""
    rows = [row for row in results.rows if row.status != NOT_RUN]
    if not rows:
        return []
    series = []
    for (label, bad), style in zip(
        (("right", False), ("wrong or failed", True)), styles("ab").values(), strict=True
    ):
        some = [(max(row.time_s, SHORT_S), i) for i, row in enumerate(rows) if row.bad == bad]
        if some:
            x, y = zip(*some, strict=True)
            series.append(Series(label, style, x, y, join="none"))
    panel = Panel(
        "",
        Axis(f"time of the check, s, at least {SHORT_S:g}", "log"),
        Axis("", names=[row.name for row in rows]),
        series,
    )
    caption = "Time of each check on the slowest rank, by its result."
    scale = (1.9, 0.075 * len(rows) + 0.35)
    return [Chart("checks", "Checks", [], caption, [panel], columns=1, scale=scale)]


def _speeds(several: Sequence[Results], names: Sequence[str]) -> list[Chart]:
    """Return ratios, a row for each, with the least that is expected; names: of machines."""
    known = {_key(r): r for each in several for r in each.ratios}
    charts = []
    for beside, keys in grouped(known, lambda key: key[1]).items():
        series = [
            Series(name or "measured", style, *_values(each, keys), join="none")
            for each, name, style in zip(several, names, styles(names).values(), strict=True)
        ]
        bounds = [(known[key].low, i) for i, key in enumerate(keys) if known[key].low > 0]
        for i, (low, at) in enumerate(bounds):
            label = "least that is expected" if i == 0 else ""
            series.append(Series(label, BOUND, [low, low], [at - 0.4, at + 0.4], join="line"))
        axis = Axis(f"times as fast as {beside}", "log")
        labels = [_name(known[key]) for key in keys]
        panel = Panel("", axis, Axis("", names=labels), series)
        caption = f"Speed over that of {beside}, by medians. Right of the mark is as expected."
        scale = (1.9, 0.09 * len(keys) + 0.35)
        charts.append(
            Chart(f"speeds_beside_{beside}", f"Speeds beside {beside}", [], caption, [panel],
                  columns=1, scale=scale)
        )  # fmt: skip
    return charts


def _key(ratio: Ratio) -> tuple[str, str, str, int]:
    return ratio.what, ratio.beside, ratio.device, ratio.size_bytes


def _values(results: Results, keys: Sequence[tuple[str, str, str, int]]) -> tuple[Array, Array]:
    """Return the values of the ratios with some keys, and their rows."""
    found = {_key(r): r.value for r in results.ratios}
    some = [(found[key], i) for i, key in enumerate(keys) if key in found]
    both = np.array(some, float).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _links(results: Results) -> list[Chart]:
    """Return the times of messages by size, and the rates between all pairs of several ranks."""
    charts = []
    for name in ("links", "links of GPUs"):
        if f"{name}: times_s" not in results.arrays:
            continue
        pairs, sizes, times_s = (
            results.arrays[f"{name}: {each}"] for each in ("pairs", "bytes", "times_s")
        )
        shown = [f"ranks {a} and {b}" for a, b in pairs.tolist()][:9]
        series = [
            Series(label, style, sizes, row * 1e6)
            for (label, style), row in zip(styles(shown).items(), times_s, strict=False)
        ]
        size = Axis("message", "size", ticks=sizes.tolist())
        panels: list[Panel | Map] = [Panel("", size, Axis("time, µs", "log"), series)]
        caption = "Half of the time of a message there and back, medians."
        file = f"{name} by size".replace(" ", "_")
        chart = Chart(file, f"Messages: {name}", [], caption, panels, 1, scale=(1.5, 1.2))
        charts.append(chart)
        if len(pairs) > 1:
            charts.append(_rates(name, pairs, sizes, times_s))
    return charts


def _rates(name: str, pairs: Array, sizes: Array, times_s: Array) -> Chart:
    """Return the rates of the longest message between pairs, as shares of the highest."""
    ranks = int(pairs.max()) + 1
    rates = np.full((ranks, ranks), np.nan)
    for (a, b), row in zip(pairs.tolist(), times_s, strict=True):
        rates[a, b] = rates[b, a] = sizes[-1] / row[-1]
    most = np.nanmax(rates)
    panel = Map("", Axis("rank"), Axis("rank"), range(ranks), [str(i) for i in range(ranks)],
                100 * rates / most)  # fmt: skip
    caption = f"Messages of {units.size(float(sizes[-1]))}; the highest is {most / 1e9:.3g} GB/s."
    return Chart(f"{name} rates".replace(" ", "_"), f"Rates: {name}", [], caption, [panel],
                 columns=1, colours="% of the highest rate", scale=(1.4, 1.2))  # fmt: skip


def side_by_side(*paths: Path) -> Report:
    """Return the report of several files side by side. Raises StoreError."""
    several = [read(path) for path in paths]
    names = [path.stem for path in paths]
    return compare_report(several, names if len({*names}) == len(names) else [*map(str, paths)])


def compare_report(several: Sequence[Results], names: Sequence[str]) -> Report:
    """Return the report of machines side by side; names: of the machines."""
    verdicts = [["verdict", *(each.verdict for each in several)]]
    rows = dict.fromkeys(row.name for each in several for row in each.rows)
    status = [{row.name: row.status for row in each.rows} for each in several]
    checks = [[name, *(each.get(name, units.NONE) for each in status)] for name in rows]
    facts = dict.fromkeys(name for each in several for name in each.facts)
    there = [[name, *(each.facts.get(name, units.NONE) for each in several)] for name in facts]
    keys = list(dict.fromkeys(_key(r) for each in several for r in each.ratios))
    found = [{_key(r): r for r in each.ratios} for each in several]
    speeds = []
    for key in keys:
        cells = [next(_name(each[key]) for each in found if key in each), key[1]]
        for each in found:
            ratio = each.get(key)
            cells.append(units.time(float(np.median(ratio.times_s))) if ratio else units.NONE)
            cells.append(_value(ratio) if ratio else units.NONE)
        speeds.append(cells)
    columns = words("what", "beside") + [
        Column(f"{what}\n{name}") for name in names for what in ("time", "times as fast")
    ]
    side = words("", *names)
    return Report(
        f"Verification of {' and '.join(names)}",
        [],
        [
            Section("Checks", tables=[Table("Checks", side, [*verdicts, *checks])]),
            Section("Speed", [SPEED], [Table("Speeds", columns, speeds)], _speeds(several, names)),
            Section("What is there", tables=[Table("What is there", side, there)]),
        ],
    )
