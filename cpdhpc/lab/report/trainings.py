"""Reports of trainings: records by name, several tasks, the bits that batches need.

Source of the last: Han, Demmel, You: Auto-precision scaling, arXiv 1911.08907.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import isnan, nan
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ... import store
from ...config import difference, keys_of, value_of
from ...formats import wire_format
from ..study_data import Array, grouped
from ..study_data.study_file import ReportError, StudyFile, check_arrays
from . import units
from .figures import BLACK, IDEAL, Axis, Chart, Map, Panel, Series, Style, styles
from .fits import (
    PADDED,
    Score,
    Trained,
    finding,
    learning_charts,
    noise_charts,
    predicted,
    score_charts,
)
from .points import SeedGroup, but_for_gradient, decided, label, varying
from .tables import Column, Listed, Report, Section, Table, capital, tabulate, words


@dataclass(frozen=True)
class TrainingRun:
    """One training run. The arrays are those of its file."""

    path: Path
    attributes: dict[str, Any]
    steps: dict[str, Array]
    epochs: dict[str, Array]
    layers: dict[str, Array]

    @property
    def name(self) -> str:
        """The name that runs with other seeds share."""
        return str(self.attributes["name"])

    @property
    def complete(self) -> bool:
        return bool(self.attributes["status"] == "complete")

    @property
    def measure(self) -> Score:
        """The score by which it is judged."""
        return Score.of(str(self.attributes["toml"]))

    @property
    def score(self) -> float:
        return self.measure.factor * float(self.epochs[self.measure.column][-1])

    @property
    def data_share(self) -> float:
        """Share of the steps' time in which the slowest rank waited for samples."""
        waited_s = self.steps["time_s"][:, list(self.steps["phase"]).index("data")]
        return float(waited_s.sum() / max(self.steps["time_s"].sum(), 1e-9))

    @property
    def wire_bytes(self) -> float:
        """Mean payload that a rank sends in a step."""
        return float(self.steps["wire_bytes"].mean())

    @property
    def underflow_share(self) -> float:
        """Share of the non-zero gradient values observed that became zero on the wire.

        NaN if the method does not count them.
        """
        if "underflow_share" not in self.layers:
            return nan
        nonzero = self.layers["nonzero"]
        return float((self.layers["underflow_share"] * nonzero).sum() / max(nonzero.sum(), 1))


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds: the complete ones, and how many there are in all."""

    name: str
    runs: list[TrainingRun]
    found: int

    @property
    def measure(self) -> Score:
        """The score of the first run."""
        return self.runs[0].measure

    @property
    def compressed(self) -> bool:
        """Whether gradients travel in fewer bits than float32."""
        return bool(value_of(self.runs[0].attributes["toml"], "gradient.aggregator") != "none")

    @property
    def is_float32(self) -> bool:
        """Whether all ranks step by the mean that an all-reduce in float32 makes."""
        text = self.runs[0].attributes["toml"]
        rule = value_of(text, "update.name") or "allreduce"  # older records have no such table
        wired = any(key.endswith(".wire") for key in keys_of(text, "precision"))
        return not self.compressed and rule == "allreduce" and not wired

    @property
    def observed(self) -> bool:
        """Whether the method says which gradient values became zero on the wire."""
        return all("underflow_share" in run.layers for run in self.runs)

    @property
    def scores(self) -> Array:
        """float64[runs], an accuracy in percent."""
        return np.array([run.score for run in self.runs])

    @property
    def score(self) -> float:
        return float(self.scores.mean())

    def mean(self, name: str) -> float:
        """Return the mean over the runs of a quantity of them."""
        return float(np.mean([getattr(run, name) for run in self.runs]))

    @property
    def step_time_ms(self) -> float:
        """Median time of a step, over all steps of all runs."""
        times_s = [run.steps["time_s"].sum(1) for run in self.runs]  # of all phases
        return 1e3 * float(np.median(np.concatenate(times_s)))


NEEDED = {  # of a record, which a damaged one may lack
    "steps": ("phase", "time_s", "wire_bytes"),
    "epochs": ("epoch", "test_loss", "time_s"),
    "layers": ("layer", "iteration", "nonzero"),
}
PROCESSES = "processes"  # attribute: of their number depend times and bytes
NEEDED_NOTES = ("name", "status", "toml", "date", "seed")


def load_run(path: Path | str) -> TrainingRun:
    """Return a run. Raises StoreError for what cannot be read, ReportError for what is no run."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != "run":
        raise ReportError(f"{path}: is not the file of a run")
    if lost := [name for name in NEEDED_NOTES if name not in attributes]:
        raise ReportError(f"{path}: has no attribute {lost[0]}: is not the file of a run")
    check_arrays(path, groups, NEEDED, "is not the file of a run")
    run = TrainingRun(Path(path), attributes, groups["steps"], groups["epochs"], groups["layers"])
    check_arrays(path, groups, {"epochs": [run.measure.column]}, "is not the file of a run")
    return run


def without_copies(runs: Iterable[TrainingRun]) -> list[TrainingRun]:
    """Return runs, of those whose files have the same content the first one."""
    first: dict[bytes, TrainingRun] = {}
    for run in runs:
        first.setdefault(sha256(run.path.read_bytes()).digest(), run)
    return list(first.values())


def run_groups(runs: Iterable[TrainingRun]) -> list[RunGroup]:
    """Return the runs grouped by name, in the order in which the names come.

    Names without a complete run are left out. Raises ReportError if runs of one name have the
    same seed, or differ in more than the seed and what they record.
    """
    by_name = grouped(runs, lambda run: run.name)
    for same in by_name.values():
        _check_alike(same)
    groups = [
        RunGroup(name, [run for run in same if run.complete], len(same))
        for name, same in by_name.items()
    ]
    return [each for each in groups if each.runs]


def _check_alike(runs: list[TrainingRun]) -> None:
    first = runs[0]
    for run in runs[1:]:
        texts = first.attributes["toml"], run.attributes["toml"]
        recorded = {key for text in texts for key in keys_of(text, "record")}
        recorded |= {"train.record_gradients", "train.seeds"}
        key = difference(*texts, ignored=recorded)
        if key is None and first.attributes.get(PROCESSES) != run.attributes.get(PROCESSES):
            key = PROCESSES
        if key is not None:
            raise ReportError(
                f"{run.path} and {first.path} are both {run.name}, but differ in {key}"
            )
    for seed, same in grouped(runs, lambda run: run.attributes["seed"]).items():
        if len(same) > 1:
            raise ReportError(f"{same[1].path} and {same[0].path} are both {same[0].name} of "
                              f"seed {seed}, but differ: name one of them")  # fmt: skip


def baseline(groups: Iterable[RunGroup]) -> RunGroup | None:
    """Return the first group of a float32 all-reduce, if there is one."""
    return next((each for each in groups if each.is_float32), None)


LAYER_SHARES = {  # share -> its description
    "underflow": "non-zero gradient values that become zero on the wire",
    "saturated": "non-zero gradient values that saturate on the wire",
}
LEAST = 1.0  # %: in maps below it throughout nothing can be seen


def layer_charts(title: str, what: str, observed: Iterable[tuple[str, Map]]) -> list[Chart]:
    """Return a figure for each set that shares a panel's name, of those that have any of what.

    what: of LAYER_SHARES; observed: the panel's name and the map, means over seeds
    """
    drawn = [(name, m) for name, m in observed if np.nan_to_num(m.values).max(initial=0) >= LEAST]
    panels = {name: [m for _, m in some] for name, some in grouped(drawn, itemgetter(0)).items()}
    return [
        Chart(
            f"{what}_{panel}".replace(" ", "_").strip("_"),
            f"{title}: {what} by layer" + (f", {panel}" if panel else ""),
            [
                f"{LAYER_SHARES[what].capitalize()}, mean over seeds. Maps below {LEAST:g} % "
                "throughout are left out.",
                *(["Grey: not known."] if any(np.isnan(m.values).any() for m in maps) else []),
            ],
            f"{what.capitalize()} of each layer over the training.",
            maps,
            colours=f"{what} / %",
        )
        for panel, maps in panels.items()
    ]


TITLE = "Training runs"
CAPTION = (
    "Accuracy, or other score: of test samples, mean ± sample standard deviation over seeds. Step: "
    "median. Data: share of the time of all steps that a rank waits for samples. Underflow: share "
    "of non-zero gradient values that become zero when a rank encodes its own."
)
CRITICAL = " Critical batch: what the noise scale predicts for the whole run, mean over seeds."
NO_FLOAT32 = " No float32 all-reduce among the runs: columns beside one are left out."
NOT_SHOWN = ("kind", "schema", "name", "seed", "toml", "status", "parameters")


def runs_report(runs: Sequence[TrainingRun], groups: Sequence[RunGroup]) -> Report:
    """Return the report of runs. Raises ReportError if none is complete."""
    if not groups:
        raise ReportError(f"none of {len(runs)} runs is complete")
    drawn = styles(group.name for group in groups)
    base, measure = baseline(groups), _measure(groups)
    trained = [_trained(group, drawn[group.name], base) for group in groups]
    observed = [_observed(group) for group in groups if group.compressed and group.observed]
    charts = [*score_charts(TITLE, trained, measure), *learning_charts(TITLE, trained, measure)]
    steps = [(g.name, drawn[g.name], [run.steps for run in g.runs]) for g in groups]
    charts += noise_charts(TITLE, steps)
    maps = layer_charts(TITLE, "underflow", observed)
    left = [f"{run.path.name}: {run.attributes['status']}" for run in runs if not run.complete]
    shown, known = table(groups), {group.name for group in groups}
    lost = Counter(run.name for run in runs if run.name not in known)
    if lost:
        cells = [units.NONE] * (len(shown.columns) - 2)
        rows = [(name, units.Cell(f"0 of {n}", value=0), *cells) for name, n in lost.items()]
        shown = replace(shown, rows=[*shown.rows, *rows])
        note = f"Not drawn: {', '.join(lost)}: no run is complete."
        charts = [replace(chart, notes=[*chart.notes, note]) for chart in charts]
    return Report(
        TITLE,
        [
            ("found", capital(finding(trained, [base.name] if base else [], measure))),
            ("runs", str(len(runs))),
            ("hosts", units.hosts(runs[0].attributes.get("hosts", ""))),
        ],
        [
            Section("Training", tables=[shown], charts=charts),
            *([Section("Rounding by layer", charts=maps)] if maps else []),
        ],
        [Listed("left out", left)] if left else [],
        provenance=[_files(runs), _first(runs[0])],
        texts=[(group.name, str(group.runs[0].attributes["toml"])) for group in groups],
    )


def _measure(groups: Sequence[RunGroup]) -> Score:
    """Return the score of all runs. Raises ReportError if it is not the same."""
    first, other = groups[0], next((g for g in groups if g.measure != groups[0].measure), None)
    if other is not None:
        one, two = (f"{m.column}, loss in {m.loss_unit or 'no unit'}"
                    for m in (first.measure, other.measure))  # fmt: skip
        raise ReportError(
            f"{first.name} has {one} and {other.name} {two}: "
            "runs of one report must have one metric and loss"
        )
    return first.measure


def table(groups: Sequence[RunGroup]) -> Table:
    """Return the table with a row for each group. Raises ReportError for several metrics."""
    base, measure = baseline(groups), _measure(groups)

    def beside(group: RunGroup) -> str:
        if base is None or group is base:
            return units.NONE
        return measure.difference(group.score - base.score)

    def share(group: RunGroup) -> str:
        whole = base.mean("wire_bytes") if base else 0
        return units.fixed(group.mean("wire_bytes") / whole, 3) if whole else units.NONE

    def seeds(group: RunGroup) -> str:
        complete = len(group.runs)
        text = f"{complete} of {group.found}" if group.found > complete else f"{complete}"
        return units.Cell(text, value=complete)

    def underflow(group: RunGroup) -> str:
        share = group.mean("underflow_share")
        return units.NONE if isnan(share) or not group.compressed else units.fixed(100 * share, 2)

    def told(more: Score, group: RunGroup) -> str | units.Cell:
        if any(more.column not in run.epochs for run in group.runs):
            return units.NONE
        return more.told(more.factor * np.array([r.epochs[more.column][-1] for r in group.runs]))

    more = [Score.further(str(group.runs[0].attributes["toml"])) for group in groups]
    further = list(dict.fromkeys(each for several in more for each in several if each != measure))
    columns: list[Column[RunGroup]] = [
        Column("run", lambda group: group.name, numbers=False),
        Column("seeds", seeds),
        Column(measure.heading, lambda group: measure.told(group.scores)),
        *(Column(each.heading, partial(told, each)) for each in further),
        *([Column(f"to float32\n{measure.points}".strip(), beside)] if base else []),
        Column("bytes per\nstep, rank", lambda group: units.fixed(group.mean("wire_bytes"))),
        *([Column("of\nfloat32", share)] if base else []),
        Column("step\nms", lambda group: units.fixed(group.step_time_ms, 2)),
        Column("data\n%", lambda group: units.fixed(100 * group.mean("data_share"))),
        Column("under-\nflow %", underflow),
    ]
    batches, caption = {g.name: predicted([run.steps for run in g.runs]) for g in groups}, CAPTION
    if not all(map(isnan, batches.values())):
        columns.append(Column("critical\nbatch", lambda g: units.digits(batches[g.name])))
        caption += CRITICAL
    caption += "" if base else NO_FLOAT32
    return tabulate("", columns, groups, caption + PADDED)


def _trained(group: RunGroup, style: Style, base: RunGroup | None) -> Trained:
    first, measure = group.runs[0], group.measure
    return Trained(
        "",
        group.name,
        style,
        group.scores,
        group.mean("wire_bytes"),
        (base.mean("wire_bytes") / 32 or nan) if base else nan,
        np.array([run.epochs["time_s"].sum() for run in group.runs]),
        first.epochs["epoch"],
        measure.factor * np.mean([run.epochs[measure.column] for run in group.runs], axis=0),
        np.mean([run.epochs["test_loss"] for run in group.runs], axis=0),
    )


def _observed(group: RunGroup) -> tuple[str, Map]:
    first = group.runs[0].layers
    shares = np.mean([run.layers["underflow_share"] for run in group.runs], axis=0)
    names = [str(name) for name in first["layer"]]
    axes = Axis("iteration"), Axis("")
    return "", Map(group.name, *axes, first["iteration"], names, 100 * shares.T)


def overview(charts: Sequence[Chart]) -> Chart:
    """Return the figure of the score and of the loss."""
    score = next(chart for chart in charts if chart.name.endswith(("_by_bits", "_by_time")))
    loss = next(chart for chart in charts if chart.name == "loss_by_epoch")
    panels = [
        replace(
            panel, title=chart.title.removeprefix(f"{TITLE}: ") + f": {panel.title}".rstrip(": ")
        )
        for chart in (score, loss)
        for panel in chart.panels
    ]
    return Chart("overview", TITLE, score.notes, "", panels, shared=False)


def _files(runs: Sequence[TrainingRun]) -> Table:
    measure = runs[0].measure

    def score(run: TrainingRun) -> str:
        return measure.told(np.array([run.score])) if run.complete else units.NONE

    columns: list[Column[TrainingRun]] = [
        Column("file", lambda run: run.path.name, numbers=False),
        Column("seed", lambda run: str(run.attributes["seed"])),
        Column("status", lambda run: str(run.attributes["status"]), numbers=False),
        Column(f"test {measure.heading}", score),
    ]
    return tabulate("Runs", columns, runs, page_only=True)


def _first(run: TrainingRun) -> Table:
    cells = [
        [key.replace("_", " "), str(value)]
        for key, value in run.attributes.items()
        if key not in NOT_SHOWN and value != ""
    ]
    return Table("Where the first run was made", words("", ""), cells, page_only=True)


TASKS_TITLE = "Accuracy against bytes"
TASKS_CAPTION = (
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
        TASKS_TITLE,
        [note],
        TASKS_CAPTION,
        [task.panel(looks) for task in tasks],
        2,
        shared=False,
        scale=(1.3, 1.0),
    )
    section = Section(
        TASKS_TITLE, tables=[tabulate("", columns, names, TASKS_CAPTION)], charts=[chart]
    )
    return Report(
        TASKS_TITLE,
        [("found", _nearest(tasks)), ("tasks", ", ".join(task.title for task in tasks))],
        [section],
    )


def _nearest(tasks: Sequence[Task]) -> str:
    """Return in a sentence which method is nearest to float32 in its worst task, if all ran it."""
    shared = set.intersection(*({*task.groups} - {task.base.name} for task in tasks))
    worst = {
        name: min(
            task.measure.gains([task.groups[name].score - task.base.score])[0] for task in tasks
        )
        for name in shared
    }
    if not worst:
        return ""
    best = max(sorted(worst), key=worst.__getitem__)
    most = units.digits(100 * max(task.share(task.groups[best]) for task in tasks))
    return (
        f"In {units.count(len(tasks), 'task')} {best} is nearest to float32: {worst[best]:+.2f} in "
        f"the worst one, by at most {most} % of its bytes."
    )


BATCH, WIRE, AGGREGATOR = "train.batch", "gradient.wire", "gradient.aggregator"
SCALING, ACCUMULATE, ALGORITHM = "gradient.scaling", "gradient.accumulate", "gradient.algorithm"
FREE = (BATCH, WIRE, AGGREGATOR, "train.virtual_ranks")  # ranks of their own may go with batches
APART = 0.04  # of the places of neighbouring lines on the logarithmic axis


@dataclass(frozen=True)
class Needed:
    """The fewest bits of a line at a batch; NaN: not even the most are enough.

    wire: the best format of so many bits; difference: of its score to float32's
    """

    bits: float
    wire: str
    difference: float


def bits_by_batch(file: StudyFile, groups: Sequence[SeedGroup], measure: Score) -> list[Section]:
    """Return the bits that batches need; nothing without float32, three widths and two batches.

    A number of bits is enough if its best format, and that of every larger number that was
    measured, is at most the study's train.tolerance points below float32 at the same batch.
    """
    tolerance = float(file.toml.get("train", {}).get("tolerance", 1.0))
    float32 = {
        but_for_gradient(g.factors): g for g in groups if g.factors.get(AGGREGATOR) == "none"
    }
    given = [g for g in groups if g.factors.get(WIRE) and BATCH in g.factors]
    sent = [g for g in given if but_for_gradient(g.factors) in float32]
    batches = sorted({int(g.factors[BATCH]) for g in sent})
    if measure.label != "accuracy" or len(batches) < 2 or len({_width(g) for g in sent}) < 3:
        return []
    of = [g.factors for g in sent]
    names = [
        n for n in varying(of, ("ranks", "nodes", "ppn", *FREE)) if not decided(n, [BATCH], of)
    ]
    if ALGORITHM in names and decided(ALGORITHM, [ACCUMULATE], of):
        names.remove(ALGORITHM)

    def named(group: SeedGroup) -> str:
        unscaled = {SCALING: "unscaled"} if group.factors.get(SCALING) == "none" else {}
        return label({**group.factors, **unscaled}, names)

    def above(group: SeedGroup) -> float:
        return group.mean("accuracy") - float32[but_for_gradient(group.factors)].mean("accuracy")

    found = {
        name: {
            batch: needed([(g, above(g)) for g in some], tolerance)
            for batch, some in grouped(line, lambda g: int(g.factors[BATCH])).items()
        }
        for name, line in grouped(sent, named).items()
    }
    base = {int(group.factors[BATCH]): group.mean("accuracy") for group in float32.values()}
    return [_section(found, batches, base, tolerance)]


def _width(group: SeedGroup) -> int:
    fmt = wire_format(str(group.factors[WIRE]))
    return 32 if fmt is None else fmt.bits


def needed(of: Sequence[tuple[SeedGroup, float]], tolerance: float) -> Needed:
    """Return the fewest bits so that the best format of these and more is within the tolerance.

    of: groups of one line and batch, with the points that each is above float32
    """
    best: dict[int, tuple[float, str]] = {}
    for group, above in of:
        known = best.get(_width(group), (-float("inf"), ""))
        best[_width(group)] = max(known, (above, str(group.factors[WIRE])))
    found = Needed(nan, "", nan)
    for width in sorted(best, reverse=True):
        above, wire = best[width]
        if not above >= -tolerance:  # NaN is no accuracy
            break
        found = Needed(width, wire, above)
    return found


def _section(
    found: dict[str, dict[int, Needed]],
    batches: Sequence[int],
    base: dict[int, float],
    tolerance: float,
) -> Section:
    def cell(name: str, batch: int) -> str:
        one = found[name].get(batch)
        if one is None:
            return units.NONE
        if not one.wire:
            return units.Cell("more", value=nan)
        return units.Cell(f"{one.bits:g} ({one.wire}, {one.difference:+.1f})", value=one.bits)

    columns = [Column[str]("gradients", lambda name: name, numbers=False)]
    for batch in batches:
        heading = f"batch {batch}\nfloat32 {base[batch]:.1f} %"
        columns.append(Column(heading, lambda name, batch=batch: cell(name, batch)))  # type: ignore[misc]
    told = (
        "Fewest bits whose best format, and that of all larger numbers measured, is at most "
        f"{tolerance:g} points below float32 at the same batch; means over seeds. In brackets: "
        "that format, and its points to float32. more: the most bits measured are not enough."
    )
    most = max(one.bits for line in found.values() for one in line.values() if one.wire)
    series = []
    for number, (name, style) in enumerate(styles(found).items()):
        line = sorted(found[name].items())
        aside = 1 + APART * (number - (len(found) - 1) / 2)
        places, bits = [batch * aside for batch, _ in line], [one.bits for _, one in line]
        series.append(Series(name, style, places, bits, aside=aside))
        beyond = [x for x, (_, one) in zip(places, line, strict=True) if not one.wire]
        if beyond:
            top = [most + 1.5] * len(beyond)
            series.append(Series("", replace(style, marker="+"), beyond, top, join="none"))
    axes = Axis("batch", "log2", ticks=batches), Axis("bits needed", limits=(0, most + 3))
    chart = Chart(
        "bits_by_batch",
        "Bits that gradients need, by batch",
        [
            f"At most {tolerance:g} point{'s' * (tolerance != 1)} below float32 at the same batch. "
            "+ at the top: more bits. No mark: not measured."
        ],
        told,
        [Panel("", *axes, series)],
        scale=(1.6, 1.1),
    )
    return Section("Bits by batch", tables=[tabulate("Bits by batch", columns, found, told)],
                   charts=[chart])  # fmt: skip
