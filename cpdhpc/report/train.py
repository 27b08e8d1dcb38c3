"""Studies of trainings: a table, accuracy against bits and time, underflow by layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from ..study.study_file import Stored, StudyFile
from . import units
from .points import Layout, Pool, cell, finite, heading, label
from .tables import Column, Section, Table
from .trainings import KEPT, Observed, Trained, accuracy_charts, layer_charts, learning_charts

Array = npt.NDArray[Any]
PANELS = ("data.name", "model.name")


def sections(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return what is shown of a study of trainings, besides its scaling."""
    trained = [_trained(file, pool, layout) for pool in pools]
    charts = [*accuracy_charts(file.name, trained), *learning_charts(file.name, trained)]
    found = [Section("Training", tables=[_table(file, pools, layout)], charts=charts)]
    maps = [
        chart
        for name in KEPT
        if name in file.telemetry
        for chart in layer_charts(
            file.name, name, [_observations(file, pool, layout, name) for pool in pools]
        )
    ]
    return found + ([Section("Rounding by layer", charts=maps)] if maps else [])


def _trained(file: StudyFile, pool: Pool, layout: Layout) -> Trained:
    line = layout.line([pool])
    share = 2 * (pool.ranks - 1) / pool.ranks
    bit_bytes = share * pool.mean("payload_bytes") / 32
    epochs, accuracy, loss, times_s = _curves(file, pool)
    return Trained(
        label(pool.factors, _apart(layout)),
        line.name,
        line.look,
        pool.outcome("accuracy"),
        pool.mean("wire_bytes") if pool.ranks > 1 else 0.0,
        bit_bytes or nan,
        times_s,
        epochs,
        accuracy,
        loss,
    )


def _apart(layout: Layout) -> list[str]:
    return ["ranks", *layout.panels]


def _curves(file: StudyFile, pool: Pool) -> tuple[Array, Array, Array, Array]:
    """Return epochs, means over seeds of accuracy and loss by epoch, and each seed's time."""
    rows = [point.index for point in pool.points]
    if "epoch" not in file.training:
        return np.empty(0), np.empty(0), np.empty(0), np.full(len(rows), nan)
    accuracy, loss = (file.training[f"test_{name}"][rows] for name in ("accuracy", "loss"))
    ran = ~np.isnan(accuracy).all(axis=0)
    times_s = file.training["epoch_time_s"][rows]
    return (
        file.training["epoch"][ran],
        accuracy[:, ran].mean(axis=0),
        loss[:, ran].mean(axis=0),
        np.nansum(times_s, axis=1),
    )


def _table(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> Table:
    names = [*file.weak, *layout.panels]
    columns = [
        Column("ranks"),
        *(Column(heading(name)) for name in names),
        Column("gradients", numbers=False),
        Column("seeds"),
        Column("accuracy\n%"),
        Column("to float32\npoints"),
        Column("step"),
        Column(f"{file.percent} CI"),
        Column("training\ns"),
        Column("sent per\nstep, rank"),
        Column("bits per\nvalue"),
        Column("under-\nflow %"),
    ]
    rows = [_row(file, pool, names, layout, _float32(pool, pools)) for pool in pools]
    return Table("Training", columns, rows, CAPTION)


CAPTION = (
    "Accuracy: of test samples at the end, mean ± sample standard deviation over seeds. Step: "
    "median over the steps of all seeds. Training: mean over seeds of the time of all epochs. Bits "
    "per value: bytes sent by the least number of values that must leave a rank, 2 (p - 1) / p of "
    "all. Underflow: mean over layers and steps observed."
)


def _float32(pool: Pool, pools: Sequence[Pool]) -> Pool | None:
    """Return the pool that differs only in that its gradients travel as float32."""
    rest = _but_gradients(pool)
    found = [p for p in pools if p.factors.get(AGGREGATOR) == "none" and _but_gradients(p) == rest]
    return found[0] if found else None


AGGREGATOR = "gradient.aggregator"


def _but_gradients(pool: Pool) -> dict[str, Stored]:
    return {k: v for k, v in pool.factors.items() if not k.startswith("gradient.")}


def _row(
    file: StudyFile, pool: Pool, names: Sequence[str], layout: Layout, base: Pool | None
) -> list[str]:
    accuracies, time = pool.outcome("accuracy"), pool.time_s
    *_, times_s = _curves(file, pool)
    share = 2 * (pool.ranks - 1) / pool.ranks * pool.mean("payload_bytes")
    sent = pool.mean("wire_bytes")
    return [
        str(pool.ranks),
        *(cell(name, pool.factors[name]) if name in pool.factors else units.NONE for name in names),
        layout.line([pool]).name,
        str(len(pool.points)),
        units.with_deviation(accuracies),
        units.signed(pool.mean("accuracy") - base.mean("accuracy"))
        if base and base is not pool
        else units.NONE,
        units.time(time.value),
        units.time_interval(time.low, time.high, time.value),
        units.digits(float(times_s.mean())),
        units.NONE if isnan(sent) else f"{sent:,.0f} B",
        units.digits(32 * sent / share) if share else units.NONE,
        _underflow(file, pool),
    ]


def _observed(file: StudyFile, pool: Pool, name: str) -> Array:
    """Return float64[samples, layers], the mean over seeds, without samples that none has."""
    rows = [point.index for point in pool.points]
    if name not in file.telemetry:
        return np.empty((0, 0))
    ran = (file.telemetry["iteration"][rows] >= 0).all(axis=0)
    return file.telemetry[name][rows][:, ran].mean(axis=0)


def _underflow(file: StudyFile, pool: Pool) -> str:
    if pool.factors.get(AGGREGATOR) == "none":
        return units.NONE
    values = finite(_observed(file, pool, "underflow").ravel())
    return f"{np.mean(values):.2f}" if values else units.NONE


def _observations(file: StudyFile, pool: Pool, layout: Layout, name: str) -> Observed:
    at = file.telemetry["iteration"][pool.points[0].index]
    values = _observed(file, pool, name).T
    layers = [str(layer) for layer in file.telemetry["layer"]]
    panel = label(pool.factors, _apart(layout))
    return Observed(panel, layout.line([pool]).name, at[at >= 0][: values.shape[1]], layers, values)
