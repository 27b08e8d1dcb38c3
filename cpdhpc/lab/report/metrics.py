"""Tables and figures of the metrics of programs, in their own units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ..study_data import SHAPE
from ..study_data.study_file import ReportError, StudyFile
from . import units
from .figures import Chart
from .points import Facets, SeedGroup, is_number, label, of_factors, varying
from .scaling import Choice, chosen
from .tables import Column, Section, Table, tabulate

BETTER = {"lower": "lower is better", "higher": "higher is better", "": "recorded only"}


def metric_sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return a section for each metric: its medians with intervals, and a figure of them."""
    found = []
    for name, row in file.metrics.items():
        there = [group for group in groups if len(group.metric_samples(name))]
        if there:
            charts, notes = _charts(file, there, name)
            table = _table(file, there, name, row)
            said = _finding(there, name, row)
            found.append(Section(f"Metric {name}", notes, [table], charts, said))
    return found


def _finding(groups: Sequence[SeedGroup], name: str, row: Mapping[str, Any]) -> str:
    """Return in a sentence which point has the best median, of a metric that can be better."""
    known = [group for group in groups if isfinite(group.metric(name).value)]
    if not row["better"] or not known:
        return ""
    choose = min if row["better"] == "lower" else max
    best = choose(known, key=lambda group: group.metric(name).value)
    unit = "" if row["unit"] == "1" else f" {row['unit']}"
    of = label(best.factors, varying([group.factors for group in groups], ("nodes", "ppn")))
    among = f", the best of {units.count(len(known), 'point')}" if len(known) > 1 else ""
    value = units.with_interval(*best.metric(name))
    at = f" at {of}" if of else ""
    return f"the metric {name} is {value}{unit}{at}{among}; {BETTER[row['better']]}."


def _table(
    file: StudyFile, groups: Sequence[SeedGroup], name: str, row: Mapping[str, Any]
) -> Table:
    unit = "" if row["unit"] == "1" else f"\n{row['unit']}"
    factors = [group.factors for group in groups]
    names = varying(factors, set(SHAPE) - {"ranks"})

    def interval(group: SeedGroup) -> str:
        return units.interval(group.metric(name).low, group.metric(name).high)

    columns: list[Column[SeedGroup]] = [
        *of_factors(names, groups),
        Column("samples", lambda g: str(len(g.metric_samples(name)))),
        Column(f"{name}{unit}", lambda g: units.digits(g.metric(name).value)),
        Column(f"{file.percent} CI", interval),
        Column("least", lambda g: units.digits(float(g.metric_samples(name).min()))),
        Column("greatest", lambda g: units.digits(float(g.metric_samples(name).max()))),
    ]
    caption = f"Medians over repeats; {BETTER[row['better']]}. Samples: without warm-ups."
    return tabulate(f"Metric {name}", columns, groups, caption)


def _charts(
    file: StudyFile, groups: Sequence[SeedGroup], name: str
) -> tuple[list[Chart], list[str]]:
    """Return the figure of a metric, none if nothing varies, or too much; and the reason."""
    over = _over(file, groups)
    if over is None:
        return [], []
    try:
        return list(chosen(file, groups, Choice(x=over, y=name)).charts), []
    except ReportError as error:
        return [], [f"No figure: {error}."]


def _over(file: StudyFile, groups: Sequence[SeedGroup]) -> str | None:
    """Return the factor of the x axis: ranks or work, or the number with the most values."""
    factors = [group.factors for group in groups]
    values = {
        name: len({each.get(name) for each in factors})
        for name in varying(factors, ("nodes", "ppn"))
        if is_number(name, factors)
    }
    named = [name for name in (file.over, "ranks", file.attributes["work"]) if name in values]
    return next(iter(named), max(values, key=lambda name: values[name], default=None))
