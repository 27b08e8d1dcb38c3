"""What is shown of the record of an autoencoder, and of what its neurons have learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ... import store
from ..study_data.factors import Array
from ..study_data.study_file import check_arrays
from . import units
from .figures import Axis, Chart, Panel, Series, spread, styles
from .tables import Column, Report, Section, tabulate

NEEDED = {
    "steps": ("layer", "iteration", "loss", "error", "energy", "time_s", "exchange_s", "sent_bytes")
}
JUDGED = {"selectivity": ("layer", "concept", "accuracy", "random", "pixel")}
CAPTION = (
    "Error: of the reconstruction, of the energy of the layer's input, first and last iteration. "
    "Times: the slowest rank, median over iterations. Sent: in an iteration, by the rank that "
    "sends most."
)


def autoencoder_report(path: Path) -> Report:
    """Return the report of a record. Raises ReportError where it lacks an array."""
    groups, attributes = store.read(path)
    check_arrays(path, groups, NEEDED, "is not the record of an autoencoder")
    steps = groups["steps"]
    rows = [np.flatnonzero(steps["layer"] == layer) for layer in np.unique(steps["layer"])]

    def error(row: Array, at: int) -> float:
        i = row[at]
        return float(steps["error"][i] / steps["energy"][i]) if steps["energy"][i] else np.nan

    columns = [
        Column[Array]("layer", lambda r: str(steps["layer"][r[0]])),
        Column[Array]("itera-\ntions", lambda r: units.fixed(len(r))),
        Column[Array]("objective\nfirst", lambda r: units.digits(steps["loss"][r[0]], 4)),
        Column[Array]("last", lambda r: units.digits(steps["loss"][r[-1]], 4)),
        Column[Array]("error %\nfirst", lambda r: units.digits(100 * error(r, 0))),
        Column[Array]("last", lambda r: units.digits(100 * error(r, -1))),
        Column[Array]("time", lambda r: units.time(float(np.median(steps["time_s"][r])))),
        Column[Array](
            "in ex-\nchanges", lambda r: units.time(float(np.median(steps["exchange_s"][r])))
        ),
        Column[Array]("sent", lambda r: units.size(float(np.median(steps["sent_bytes"][r])))),
    ]
    style = styles([f"layer {steps['layer'][r[0]]}" for r in rows])
    series = [
        Series(name, style[name], steps["iteration"][r], steps["loss"][r])
        for name, r in zip(style, rows, strict=True)
    ]
    losses = [value for each in series for value in each.y]
    chart = Chart(
        "objective_by_iteration",
        f"{attributes.get('name', path.stem)}: objective",
        ["Mean over the images of a batch."],
        "Objective of the layer that is trained, by iteration.",
        [Panel("", Axis("iteration"), spread("objective", losses, "log", 10, start=None), series)],
    )
    facts = [
        (name, str(attributes[name]))
        for name in ("status", "parameters", "ranks", "date")
        if name in attributes
    ]
    table = tabulate("Layers", columns, rows, CAPTION)
    title = f"Autoencoder: {attributes.get('name', path.stem)}"
    charts = [chart] if rows else []
    return Report(title, facts, [Section("Layers", tables=[table], charts=charts)])


def probe_report(path: Path) -> Report:
    """Return the report of a file of autoencoder probe. Raises ReportError as the other."""
    groups, _ = store.read(path)
    check_arrays(path, groups, JUDGED, "is not of autoencoder probe")
    of = groups["selectivity"]

    def shown(values: Array) -> str:
        return units.fixed(100 * float(values), 1)

    columns = [
        Column[int]("concept", lambda i: str(of["concept"][i])),
        Column[int]("pixel", lambda i: shown(of["pixel"][i])),
    ]
    for layer in range(len(of["layer"])):
        columns += [
            Column[int](f"layer {layer}", lambda i, n=layer: shown(of["accuracy"][n, i])),  # type: ignore[misc]
            Column[int]("random", lambda i, n=layer: shown(of["random"][n, i])),  # type: ignore[misc]
        ]
    caption = (
        "Accuracy of the best neuron in %, judged on images that did not choose it; a guess: 50. "
        "Random: of filters that were not trained."
    )
    table = tabulate("Concepts", columns, range(len(of["concept"])), caption)
    held = of.get("held_out_error", np.empty(0))
    notes = [f"Layer {i}: error of held-out images {error:.4f} of the energy."
             for i, error in enumerate(held)]  # fmt: skip
    return Report(f"Probe: {path.name}", [], [Section("Concepts", notes, [table])])
