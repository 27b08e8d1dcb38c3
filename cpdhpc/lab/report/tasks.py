"""Training runs of several tasks: each method's score to float32 against its bytes, by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ..study_data.study_file import ReportError
from . import units
from .figures import BLACK, IDEAL, Axis, Chart, Panel, Series, Style, styles
from .tables import Column, Report, Section, tabulate
from .trainings import RunGroup, baseline

TITLE = "Accuracy against bytes"
CAPTION = (
    "Points: test score at the end to float32's mean, of the same task and steps; mean over seeds, "
    "± sample standard deviation of the method's seeds. Bytes: those that the rank that sends most "
    "sends in a step, mean over the run."
)
FLOAT32 = Style(BLACK, "o")


class Task:
    """A task's runs: groups by name, of which one is float32's. Raises ReportError without it."""

    def __init__(self, title: str, groups: Sequence[RunGroup]) -> None:
        base = baseline(groups)
        if base is None or not base.mean("wire_bytes"):
            raise ReportError(f"{title}: no float32 all-reduce of several ranks among the runs")
        self.title, self.base, self.measure = title, base, base.runs[0].measure
        self.groups = {group.name: group for group in groups}

    def share(self, group: RunGroup) -> float:
        """Return a group's bytes, of float32's."""
        return group.mean("wire_bytes") / self.base.mean("wire_bytes")

    def points(self, name: str) -> str:
        """Return a cell: a method's points to float32, of float32 its score."""
        group = self.groups.get(name)
        if group is None or group is self.base:
            return units.NONE if group is None else self.measure.told(group.scores)
        told = self.measure.told(group.scores - self.base.score)
        text = told if told.startswith("-") else f"+{told}"
        return units.Cell(text, **told.numbers)

    def shared(self, name: str) -> str:
        """Return a cell: the share of float32's bytes."""
        group = self.groups.get(name)
        return units.NONE if group is None else units.fixed(self.share(group), 4)

    def panel(self, looks: Mapping[str, Style]) -> Panel:
        """Return the points against the share of bytes, both logarithmic in bytes."""
        zero, series = self.base.score, []
        for name, group in self.groups.items():
            style = FLOAT32 if group is self.base else looks[name]
            low, high = [group.scores.min() - zero], [group.scores.max() - zero]
            at = [self.share(group)], [group.score - zero]
            series.append(Series(name, style, *at, low, high, "none"))
        least = min(self.share(group) for group in self.groups.values())
        series.append(Series("", IDEAL, [least, 1.0], [0.0, 0.0]))
        unit = f" / {self.measure.points}" if self.measure.points else ""
        y = Axis(f"{self.measure.label} to float32{unit}")
        title = f"{self.title}: float32 {self.measure.told(self.base.scores)} {self.measure.unit}"
        return Panel(title.rstrip(), Axis("bytes sent, of float32", "log"), y, series)


def tasks_report(tasks: Sequence[Task]) -> Report:
    """Return a table with a row for each method, and a figure with a panel for each task."""
    names = dict.fromkeys(name for task in tasks for name in task.groups)
    columns: list[Column[str]] = [Column("run", numbers=False)]
    for task in tasks:
        columns.append(Column(f"{task.title}\npoints", partial(Task.points, task)))
        columns.append(Column("of\nfloat32", partial(Task.shared, task)))
    looks = styles(names)
    note = "Mean over seeds; bars: from the least to the greatest of the seeds."
    chart = Chart(
        "tasks",
        TITLE,
        [note],
        CAPTION,
        [task.panel(looks) for task in tasks],
        2,
        shared=False,
        scale=(1.3, 1.0),
    )
    section = Section(TITLE, tables=[tabulate("", columns, names, CAPTION)], charts=[chart])
    return Report(TITLE, [("tasks", ", ".join(task.title for task in tasks))], [section])
