"""What is shown of the records of training runs: groups of a name, figures, maps of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from ... import store
from ...config import difference, keys_of, value_of
from ..study_data.factors import Array
from ..study_data.study_file import ReportError, check_arrays
from . import units
from .critical import noise_charts, predicted
from .figures import Axis, Chart, Map, Style, styles
from .score import PADDED, Score, Trained, learning_charts, score_charts
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
    def measure(self) -> Score:
        """What tells how well it went."""
        return Score.of(str(self.attributes["toml"]))

    @property
    def score(self) -> float:
        """The score of the test samples at the end."""
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
        """Mean over seeds."""
        return float(self.scores.mean())

    def mean(self, name: str) -> float:
        """Return the mean over the runs of a quantity of them."""
        return float(np.mean([getattr(run, name) for run in self.runs]))

    @property
    def step_time_ms(self) -> float:
        """Median time of a step, over all steps of all runs."""
        return 1e3 * float(np.median(np.concatenate([run.step_times_s for run in self.runs])))


NEEDED = {  # of a record, which a damaged one may lack
    "steps": ("phase", "time_s", "wire_bytes"),
    "epochs": ("epoch", "test_loss", "time_s"),
    "layers": ("layer", "iteration", "nonzero"),
}
NEEDED_NOTES = ("name", "status", "toml", "date", "seed")


def load_run(path: Path | str) -> Run:
    """Return a run. Raises StoreError for what cannot be read, ReportError for what is no run."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != "run":
        raise ReportError(f"{path}: is not the file of a run")
    if lost := [name for name in NEEDED_NOTES if name not in attributes]:
        raise ReportError(f"{path}: has no attribute {lost[0]}: is not the file of a run")
    check_arrays(path, groups, NEEDED, "is not the file of a run")
    run = Run(Path(path), attributes, groups["steps"], groups["epochs"], groups["layers"])
    check_arrays(path, groups, {"epochs": [run.measure.column]}, "is not the file of a run")
    return run


def run_groups(runs: Iterable[Run]) -> list[RunGroup]:
    """Return the runs grouped by name, in the order in which the names come.

    Names without a complete run are left out. Raises ReportError where runs of one name differ
    in more than the seed and what they record.
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
        recorded = {key for text in texts for key in keys_of(text, "record")}
        recorded |= {"train.record_gradients", "train.seeds"}
        key = difference(*texts, ignored=recorded)
        if key is not None:
            raise ReportError(
                f"{run.path} and {first.path} are both {run.name}, but differ in {key}"
            )


def baseline(groups: Iterable[RunGroup]) -> RunGroup | None:
    """Return the first group of a float32 all-reduce, if there is one."""
    return next((each for each in groups if each.is_float32), None)


LAYER_SHARES = {  # what is drawn, and how it is called
    "underflow": "non-zero gradient values that become zero on the wire",
    "saturated": "non-zero gradient values that saturate on the wire",
}
LEAST = 1.0  # %: in maps below it throughout nothing can be seen


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
            [
                f"{LAYER_SHARES[what].capitalize()}, mean over seeds. Maps below {LEAST:g} % "
                "throughout are left out.",
                *(["Grey: not known."] if any(np.isnan(m.values).any() for m in maps) else []),
            ],
            f"{what.capitalize()} of each layer over the training.",
            maps,
            colours=f"{what} / %",
        )
        for panel, maps in drawn.items()
    ]


def layer_map(name: str, iterations: Array, layers: Sequence[str], values: Array) -> Map:
    """Return a training's map. iterations: int64[samples]; values: float64[layers, samples], %."""
    return Map(name, Axis("iteration"), Axis(""), iterations, layers, values)


TITLE = "Training runs"
CAPTION = (
    "Accuracy, or other score: of test samples, mean ± sample standard deviation over seeds. Step: "
    "median. Data: share of the time of all steps that a rank waits for samples. Underflow: share "
    "of non-zero gradient values that become zero when a rank encodes its own."
)
CRITICAL = " Critical batch: what the noise scale predicts for the whole run, mean over seeds."
NO_FLOAT32 = " No float32 all-reduce among the runs: columns beside one are left out."
NOT_SHOWN = ("kind", "schema", "name", "seed", "toml", "status", "parameters")


def runs_report(runs: Sequence[Run], groups: Sequence[RunGroup]) -> Report:
    """Return the report of runs. Raises ReportError where none is complete."""
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
    return Report(
        TITLE,
        [("runs", str(len(runs))), ("hosts", units.hosts(runs[0].attributes.get("hosts", "")))],
        [
            Section("Training", tables=[table(groups)], charts=charts),
            *([Section("Rounding by layer", charts=maps)] if maps else []),
        ],
        [Listed("left out", left)] if left else [],
        provenance=[_files(runs), _first(runs[0])],
        texts=[(group.name, str(group.runs[0].attributes["toml"])) for group in groups],
    )


def _measure(groups: Sequence[RunGroup]) -> Score:
    """Return what tells how well all went. Raises ReportError where it is not the same."""
    found = {group.name: group.runs[0].measure for group in groups}
    (name, first), *others = found.items()
    for other, measure in others:
        if measure != first:
            raise ReportError(
                f"{name} has {first.column} by {first.loss_unit or 'another'} loss and {other} "
                f"{measure.column}: runs of one report must have one metric and loss"
            )
    return first


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
    first = group.runs[0]
    measure = first.measure
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
    return "", layer_map(group.name, first["iteration"], names, 100 * shares.T)


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


def _files(runs: Sequence[Run]) -> Table:
    measure = runs[0].measure

    def score(run: Run) -> str:
        return measure.told(np.array([run.score])) if run.complete else units.NONE

    columns: list[Column[Run]] = [
        Column("file", lambda run: run.path.name, numbers=False),
        Column("seed", lambda run: str(run.attributes["seed"])),
        Column("status", lambda run: str(run.attributes["status"]), numbers=False),
        Column(f"test {measure.heading}", score),
    ]
    return tabulate("Runs", columns, runs, page_only=True)


def _first(run: Run) -> Table:
    cells = [
        [key.replace("_", " "), str(value)]
        for key, value in run.attributes.items()
        if key not in NOT_SHOWN and value != ""
    ]
    return Table("Where the first run was made", words("", ""), cells, page_only=True)
