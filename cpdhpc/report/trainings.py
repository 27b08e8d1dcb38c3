"""What is shown of the records of training runs: groups of a name, figures, maps of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from .. import store
from ..config import difference, value_of
from ..kinds.factors import Array
from ..study.study_file import ReportError
from . import units
from .critical import noise_charts, predicted
from .figures import BLACK, Axis, Chart, Map, Panel, Series, Style, spread, styles
from .points import finite
from .tables import Column, Listed, Report, Section, Table, tabulate, words


@dataclass(frozen=True)
class Run:
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
        """Whether the run went to its end."""
        return bool(self.attributes["status"] == "complete")

    @property
    def accuracy(self) -> float:
        """Share of the test samples that are right at the end."""
        return float(self.epochs["test_accuracy"][-1])

    @property
    def wire_bytes(self) -> float:
        """Mean payload that a rank sends in a step."""
        return float(self.steps["wire_bytes"].mean())

    @property
    def step_times_s(self) -> Array:
        """float64[iterations], time of each step, all phases together."""
        total: Array = self.steps["time_s"].sum(1)
        return total

    @property
    def underflow_share(self) -> float:
        """Share of the non-zero gradient values observed that became zero on the wire.

        NaN where the method does not say.
        """
        if "underflow_share" not in self.layers:
            return nan
        nonzero = self.layers["nonzero"]
        return float((self.layers["underflow_share"] * nonzero).sum() / max(nonzero.sum(), 1))


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds: the complete ones, and how many there are in all."""

    name: str
    runs: list[Run]
    found: int

    @property
    def compressed(self) -> bool:
        """Whether gradients travel in fewer bits than float32."""
        return bool(value_of(self.runs[0].attributes["toml"], "gradient.aggregator") != "none")

    @property
    def observed(self) -> bool:
        """Whether the method says which gradient values became zero on the wire."""
        return all("underflow_share" in run.layers for run in self.runs)

    @property
    def accuracies(self) -> Array:
        """float64[runs], in percent."""
        return 100 * np.array([run.accuracy for run in self.runs])

    @property
    def accuracy(self) -> float:
        """Mean over seeds, in percent."""
        return float(self.accuracies.mean())

    @property
    def wire_bytes(self) -> float:
        """Mean payload that a rank sends in a step."""
        return float(np.mean([run.wire_bytes for run in self.runs]))

    @property
    def step_time_ms(self) -> float:
        """Median time of a step, over all steps of all runs."""
        return 1e3 * float(np.median(np.concatenate([run.step_times_s for run in self.runs])))

    @property
    def underflow_share(self) -> float:
        """Mean over the runs."""
        return float(np.mean([run.underflow_share for run in self.runs]))


NEEDED = {  # of a record, which a damaged one may lack
    "steps": ("time_s", "wire_bytes"),
    "epochs": ("epoch", "test_accuracy", "test_loss", "time_s"),
    "layers": ("layer", "iteration", "nonzero"),
}
NEEDED_NOTES = ("name", "status", "toml", "date", "seed")


def load_run(path: Path) -> Run:
    """Return a run. Raises StoreError for what cannot be read, ReportError for what is no run."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != "run":
        raise ReportError(f"{path}: is not the file of a run")
    if lost := [name for name in NEEDED_NOTES if name not in attributes]:
        raise ReportError(f"{path}: has no attribute {lost[0]}: is not the file of a run")
    for group, names in NEEDED.items():
        lost = [name for name in names if name not in groups.get(group, {})]
        if lost:
            raise ReportError(f"{path}: has no /{group}/{lost[0]}: is not the file of a run")
    return Run(path, attributes, groups["steps"], groups["epochs"], groups["layers"])


def run_groups(runs: Iterable[Run]) -> list[RunGroup]:
    """Return the runs grouped by name, in the order in which the names come.

    Names without a complete run are left out. Raises ReportError where runs of one name differ
    in more than the seed.
    """
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    for same in by_name.values():
        _check_alike(same)
    groups = [
        RunGroup(name, [run for run in same if run.complete], len(same))
        for name, same in by_name.items()
    ]
    return [each for each in groups if each.runs]


def _check_alike(runs: list[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        texts = first.attributes["toml"], run.attributes["toml"]
        key = difference(*texts, ignored=["train.seeds"])
        if key is not None:
            raise ReportError(
                f"{run.path} and {first.path} are both {run.name}, but differ in {key}"
            )


def baseline(groups: Iterable[RunGroup]) -> RunGroup | None:
    """Return the first group whose gradients travel as float32, if there is one."""
    return next((each for each in groups if not each.compressed), None)


LAYER_SHARES = {  # what is drawn, and how it is called
    "underflow": "non-zero gradient values that become zero on the wire",
    "saturated": "non-zero gradient values that saturate on the wire",
}
LEAST = 0.05  # %: maps without any more are not drawn


def layer_charts(title: str, what: str, observed: Iterable[tuple[str, Map]]) -> list[Chart]:
    """Return a figure for each set that shares a panel's name, of those that have any of what.

    what: of LAYER_SHARES; observed: the panel's name and the map, means over seeds
    """
    drawn: dict[str, list[Map]] = {}
    for name, each in observed:
        if each.values.size and np.nan_to_num(each.values).max() >= LEAST:
            drawn.setdefault(name, []).append(each)
    return [
        Chart(
            f"{what}_{panel}".replace(" ", "_").strip("_"),
            f"{title}: {what} by layer" + (f", {panel}" if panel else ""),
            [f"{LAYER_SHARES[what].capitalize()}, mean over seeds. Maps without any are left out."],
            f"{what.capitalize()} of each layer over the training.",
            maps,
            colours=f"{what} / %",
        )
        for panel, maps in drawn.items()
    ]


def layer_map(name: str, iterations: Array, layers: Sequence[str], values: Array) -> Map:
    """Return a training's map. iterations: int64[samples]; values: float64[layers, samples], %."""
    return Map(name, Axis("iteration"), Axis(""), iterations, layers, values)


FRONT = Style(BLACK, "", (0, (2, 2)))
NEAR = 2.0  # points of accuracy below the best that a closer look takes in


@dataclass(frozen=True)
class Trained:
    """Trainings that differ only in the seed.

    panel: what it shares with others of a panel; accuracies: float64[seeds], %
    sent_bytes: mean that the rank that sends most sends in a step; bit_bytes: what it would send
        with a bit a value, NaN if not known
    times_s: float64[seeds] of the whole training; accuracy, loss: means over seeds by epoch
    """

    panel: str
    name: str
    style: Style
    accuracies: Array
    sent_bytes: float
    bit_bytes: float
    times_s: Array
    epochs: Array
    accuracy: Array
    loss: Array


def accuracy_charts(title: str, trained: Sequence[Trained]) -> list[Chart]:
    """Return accuracy against bytes, where any are sent, and against time."""
    sending = [each for each in trained if each.sent_bytes > 0]
    timed = [each for each in trained if finite(each.times_s)]
    cost = "the bytes that a rank sends in a step"
    rows = (
        (sending, _by_bits, "accuracy_by_bits", "bits sent", cost),
        (timed, _by_time, "accuracy_by_time", "time", "the time of the training"),
    )
    return [
        Chart(
            name,
            f"{title}: accuracy against {what}",
            [SEEDS],
            f"Test accuracy at the end against {said}. {FRONTS}",
            panels := _by_panel(shown, draw),
            2 if any(panel.title.endswith(CLOSER) for panel in panels) else 3,
            shared=False,
        )
        for shown, draw, name, what, said in rows
        if shown
    ]


SEEDS = "Mean over seeds; bars: from the least to the greatest of the seeds."
FRONTS = (
    "Pareto front: no other has a mean as high for less; differences within the bars may be chance."
)


def _by_panel(
    trained: Sequence[Trained], draw: Callable[[str, Sequence[Trained]], Panel]
) -> list[Panel]:
    """Return a panel for each title, and beside it a closer look at the best where it helps."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.panel, []).append(each)
    best = {name: _near(group) for name, group in groups.items()}
    closer = any(0 < len(best[name]) < len(group) for name, group in groups.items())
    panels = []
    for name, group in groups.items():
        panel = draw(name or ("all" if closer else ""), group)
        panels.append(panel)
        if closer:
            near = best[name] or group
            ends = [end for each in near for end in (min(each.accuracies), max(each.accuracies))]
            room = 0.1 * (max(ends) - min(ends)) + 0.05
            y = Axis(panel.y.label, limits=(min(ends) - room, max(ends) + room))
            title = f"{name}: {CLOSER}" if name else CLOSER
            panels.append(Panel(title, panel.x, y, panel.series, top=panel.top))
    return panels


CLOSER = "the best, closer"


def _near(group: Sequence[Trained]) -> list[Trained]:
    """Return those of which every seed is near the best mean."""
    best = max(each.accuracies.mean() for each in group)
    return [each for each in group if each.accuracies.min() >= best - NEAR]


def _by_bits(title: str, group: Sequence[Trained]) -> Panel:
    sizes = [each.sent_bytes / 1e3 for each in group]
    bit = [each.bit_bytes for each in group if each.bit_bytes > 0]
    top = ("bits sent per value", 1e3 / bit[0], (1, 2, 4, 8, 16, 32)) if bit else None
    x = spread("sent per step and rank / kB", sizes, "log", 1.5)
    return _against(title, group, sizes, x, top)


def _by_time(title: str, group: Sequence[Trained]) -> Panel:
    times_s = [float(each.times_s.mean()) for each in group]
    x = spread("time of the training / s", times_s, "log", 10, start=None)
    return _against(title, group, times_s, x, bars=True)


def _against(
    title: str,
    group: Sequence[Trained],
    costs: Sequence[float],
    x: Axis,
    top: tuple[str, float, Sequence[float]] | None = None,
    bars: bool = False,
) -> Panel:
    """Return accuracy by cost with its Pareto front; bars: of the times too."""
    means = [float(each.accuracies.mean()) for each in group]
    series = []
    for each, cost, mean in zip(group, costs, means, strict=True):
        low, high = [each.accuracies.min()], [each.accuracies.max()]
        reach = ([each.times_s.min()], [each.times_s.max()]) if bars else (None, None)
        series.append(Series(each.name, each.style, [cost], [mean], low, high, "none", *reach))
    front = pareto(costs, means)
    along, best = [costs[i] for i in front], [means[i] for i in front]
    along, best = [*along, max(costs)], [*best, best[-1]]
    series.append(Series("Pareto front", FRONT, along, best, join="steps"))
    return Panel(title, x, Axis("test accuracy / %"), series, top=top)


def pareto(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Return which have a gain that nothing of no more cost has, cheapest first."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    front: list[int] = []
    for i in order:
        if not front or gains[i] > gains[front[-1]]:
            front.append(i)
    return front


def learning_charts(title: str, trained: Sequence[Trained]) -> list[Chart]:
    """Return test accuracy and test loss by epoch, where they were kept."""
    kept = [each for each in trained if len(each.epochs)]
    if not kept:
        return []
    accuracy = Axis("test accuracy / %")
    loss = spread("test loss / nat", [x for each in kept for x in each.loss], "log", 3)
    return [
        _learning(
            "accuracy_by_epoch", f"{title}: accuracy over epochs", kept, "accuracy", accuracy
        ),
        _learning("loss_by_epoch", f"{title}: loss over epochs", kept, "loss", loss),
    ]


def _learning(name: str, title: str, trained: Sequence[Trained], what: str, y: Axis) -> Chart:
    groups: dict[str, list[Series]] = {}
    for each in trained:
        lines = groups.setdefault(each.panel, [])
        apart = max(1, len(each.epochs) // 5)
        every = (len(lines) % apart, apart)
        lines.append(Series(each.name, each.style, each.epochs, getattr(each, what), every=every))
    panels = [Panel(panel, Axis("epoch", "whole"), y, lines) for panel, lines in groups.items()]
    caption = "Mean over seeds after each epoch; markers now and then."
    return Chart(name, title, [caption], caption, panels)


TITLE = "Training runs"
CAPTION = (
    "Accuracy: of test samples, mean ± sample standard deviation over seeds. Step: median. "
    "Underflow: share of non-zero gradient values that become zero when a rank encodes its own. "
    "Critical batch: what the noise scale predicts for the whole run, mean over seeds."
)
NOT_SHOWN = ("kind", "schema", "name", "seed", "toml", "status", "parameters")


def runs_report(runs: Sequence[Run], groups: Sequence[RunGroup]) -> Report:
    """Return the report of runs. Raises ReportError where none is complete."""
    if not groups:
        raise ReportError(f"none of {len(runs)} runs is complete")
    drawn = styles(group.name for group in groups)
    base = baseline(groups)
    trained = [_trained(group, drawn[group.name], base) for group in groups]
    observed = [_observed(group) for group in groups if group.compressed and group.observed]
    charts = [*accuracy_charts(TITLE, trained), *learning_charts(TITLE, trained)]
    steps = [(g.name, drawn[g.name], [run.steps for run in g.runs]) for g in groups]
    charts += noise_charts(TITLE, steps)
    maps = layer_charts(TITLE, "underflow", observed)
    left = [f"{run.path.name}: {run.attributes['status']}" for run in runs if not run.complete]
    return Report(
        TITLE,
        [("runs", str(len(runs))), ("hosts", str(runs[0].attributes.get("hosts", "")))],
        [
            Section("Training", tables=[table(groups)], charts=charts),
            *([Section("Rounding by layer", charts=maps)] if maps else []),
        ],
        [Listed("left out", left)] if left else [],
        provenance=[_files(runs), _first(runs[0])],
        texts=[(group.name, str(group.runs[0].attributes["toml"])) for group in groups],
    )


def table(groups: Sequence[RunGroup]) -> Table:
    """Return the table with a row for each group."""
    base = baseline(groups)

    def beside(group: RunGroup) -> str:
        if base is None or group is base:
            return units.NONE
        return units.signed(group.accuracy - base.accuracy)

    def share(group: RunGroup) -> str:
        whole = base.wire_bytes if base else 0
        return f"{group.wire_bytes / whole:.3f}" if whole else units.NONE

    def seeds(group: RunGroup) -> str:
        complete = len(group.runs)
        return f"{complete} of {group.found}" if group.found > complete else f"{complete}"

    def underflow(group: RunGroup) -> str:
        share = group.underflow_share
        return units.NONE if isnan(share) or not group.compressed else f"{100 * share:.2f}"

    columns: list[Column[RunGroup]] = [
        Column("run", lambda group: group.name, numbers=False),
        Column("seeds", seeds),
        Column("accuracy\n%", lambda group: units.with_deviation(group.accuracies)),
        Column("to float32\npoints", beside),
        Column("bytes per\nstep, rank", lambda group: f"{group.wire_bytes:,.0f}"),
        Column("of\nfloat32", share),
        Column("step\nms", lambda group: f"{group.step_time_ms:.2f}"),
        Column("under-\nflow %", underflow),
    ]
    batches = {g.name: predicted([run.steps for run in g.runs]) for g in groups}
    if not all(map(isnan, batches.values())):
        columns.append(Column("critical\nbatch", lambda g: units.digits(batches[g.name])))
    return tabulate("", columns, groups, CAPTION)


def _trained(group: RunGroup, style: Style, base: RunGroup | None) -> Trained:
    first = group.runs[0]
    return Trained(
        "",
        group.name,
        style,
        group.accuracies,
        group.wire_bytes,
        base.wire_bytes / 32 if base and base.wire_bytes else nan,
        np.array([run.epochs["time_s"].sum() for run in group.runs]),
        first.epochs["epoch"],
        100 * np.mean([run.epochs["test_accuracy"] for run in group.runs], axis=0),
        np.mean([run.epochs["test_loss"] for run in group.runs], axis=0),
    )


def _observed(group: RunGroup) -> tuple[str, Map]:
    first = group.runs[0].layers
    shares = np.mean([run.layers["underflow_share"] for run in group.runs], axis=0)
    names = [str(name) for name in first["layer"]]
    return "", layer_map(group.name, first["iteration"], names, 100 * shares.T)


def overview(charts: Sequence[Chart]) -> Chart:
    """Return the figure of accuracy and of loss."""
    shown = {chart.name: chart for chart in charts}
    accuracy = shown.get("accuracy_by_bits", shown["accuracy_by_time"])
    return Chart(
        "overview",
        TITLE,
        accuracy.notes,
        "",
        [*accuracy.panels, *shown["loss_by_epoch"].panels],
        shared=False,
    )


def _files(runs: Sequence[Run]) -> Table:
    def accuracy(run: Run) -> str:
        return f"{100 * run.accuracy:.2f}" if run.complete else units.NONE

    columns: list[Column[Run]] = [
        Column("file", lambda run: run.path.name, numbers=False),
        Column("seed", lambda run: str(run.attributes["seed"])),
        Column("status", lambda run: str(run.attributes["status"]), numbers=False),
        Column("test accuracy\n%", accuracy),
    ]
    return tabulate("Runs", columns, runs, page_only=True)


def _first(run: Run) -> Table:
    cells = [
        [key.replace("_", " "), str(value)]
        for key, value in run.attributes.items()
        if key not in NOT_SHOWN and value != ""
    ]
    return Table("Where the first run was made", words("", ""), cells, page_only=True)
