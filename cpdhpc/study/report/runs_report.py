"""What is shown of the records of training runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from . import text
from .chart import Chart
from .layers import Observed, layer_charts
from .look import Look, looks
from .runs import Group, Run, baseline
from .study_file import ReportError
from .table import Column, Listed, Report, Section, Table
from .trained import Trained, accuracy_charts, learning_charts

TITLE = "Training runs"
COLUMNS = (
    Column("run", numbers=False),
    Column("seeds"),
    Column("accuracy\n%"),
    Column("to float32\npoints"),
    Column("bytes per\nstep, rank"),
    Column("of\nfloat32"),
    Column("step\nms"),
    Column("under-\nflow %"),
)
CAPTION = (
    "Accuracy: of test samples, mean ± sample standard deviation over seeds. Step: median. "
    "Underflow: share of non-zero gradient values that become zero when a rank encodes its own."
)
NOT_SHOWN = ("kind", "schema", "name", "seed", "toml", "status", "parameters")


def runs_report(runs: Sequence[Run], groups: Sequence[Group]) -> Report:
    """Return the report of runs. Raises ReportError where none is complete."""
    if not groups:
        raise ReportError(f"none of {len(runs)} runs is complete")
    drawn = looks(group.name for group in groups)
    base = baseline(groups)
    trained = [_trained(group, drawn[group.name], base) for group in groups]
    observed = [_observed(group) for group in groups if group.compressed]
    charts = [*accuracy_charts(TITLE, trained), *learning_charts(TITLE, trained)]
    maps = layer_charts(TITLE, "underflow", observed)
    left = [f"{run.path.name}: {run.attributes['status']}" for run in runs if not run.complete]
    return Report(
        TITLE,
        [("runs", str(len(runs))), ("hosts", str(runs[0].attributes.get("hosts", "")))],
        [
            Section("Training", tables=[Table("", COLUMNS, rows(groups), CAPTION)], charts=charts),
            *([Section("Rounding by layer", charts=maps)] if maps else []),
        ],
        [Listed("left out", left)] if left else [],
        provenance=[_files(runs), _first(runs[0])],
        texts=[(group.name, str(group.runs[0].attributes["toml"])) for group in groups],
    )


def rows(groups: Sequence[Group]) -> list[list[str]]:
    """Return the cells below COLUMNS, one row per group."""
    base = baseline(groups)
    return [_row(each, base) for each in groups]


def _row(group: Group, base: Group | None) -> list[str]:
    unfinished = f" of {group.found}" if group.found > len(group.runs) else ""
    beside = base is not None and group is not base
    share = group.wire_bytes / base.wire_bytes if base and base.wire_bytes else None
    return [
        group.name,
        f"{len(group.runs)}{unfinished}",
        text.with_deviation(group.accuracies),
        text.signed(group.accuracy - base.accuracy) if base and beside else text.NONE,
        f"{group.wire_bytes:,.0f}",
        text.NONE if share is None else f"{share:.3f}",
        f"{group.step_time_ms:.2f}",
        f"{100 * group.underflow_share:.2f}" if group.compressed else text.NONE,
    ]


def _trained(group: Group, look: Look, base: Group | None) -> Trained:
    first = group.runs[0]
    return Trained(
        "",
        group.name,
        look,
        group.accuracies,
        group.wire_bytes,
        base.wire_bytes / 32 if base and base.wire_bytes else nan,
        np.array([run.epochs["time_s"].sum() for run in group.runs]),
        first.epochs["epoch"],
        100 * np.mean([run.epochs["test_accuracy"] for run in group.runs], axis=0),
        np.mean([run.epochs["test_loss"] for run in group.runs], axis=0),
    )


def _observed(group: Group) -> Observed:
    first = group.runs[0].layers
    shares = np.mean([run.layers["underflow_share"] for run in group.runs], axis=0)
    names = [str(name) for name in first["layer"]]
    return Observed("", group.name, first["iteration"], names, 100 * shares.T)


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
    columns = (
        Column("file", numbers=False),
        Column("seed"),
        Column("status", numbers=False),
        Column("test accuracy\n%"),
    )
    cells = [
        [
            run.path.name,
            str(run.attributes["seed"]),
            str(run.attributes["status"]),
            f"{100 * run.accuracy:.2f}" if run.complete else text.NONE,
        ]
        for run in runs
    ]
    return Table("Runs", columns, cells, page_only=True)


def _first(run: Run) -> Table:
    cells = [
        [key.replace("_", " "), str(value)]
        for key, value in run.attributes.items()
        if key not in NOT_SHOWN and value != ""
    ]
    names = (Column("", numbers=False), Column("", numbers=False))
    return Table("Where the first run was made", names, cells, page_only=True)
