"""What is shown of a file of bench compress: methods side by side on recorded gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .. import store
from ..kinds.factors import Array
from ..study.study_file import ReportError
from . import units
from .tables import Column, Report, Section, tabulate

BENCHMARK = "compress"  # attribute of its files
FIGURES = {  # column -> heading
    "error": "error",
    "cosine": "cosine",
    "sum_error": "error\nof the sum",
    "sent_share": "share\nsent",
    "nonzero_share": "share\nnon-zero",
}
NEEDED = ("method", "ranks", "sent_bytes", "time_s", *FIGURES)
CAPTION = (
    "Bytes: messages in an iteration of the rank that sends most. Errors and cosine: of the mean "
    "against the exact one; of the sum: of all iterations' means. Time: of an iteration of one "
    "process, all its ranks one after the other."
)


def compress_report(path: Path) -> Report:
    """Return the report of a file. Raises ReportError where it lacks an array of bench compress."""
    groups, attributes = store.read(path)
    points = groups.get("points", {})
    if lost := [name for name in NEEDED if name not in points]:
        raise ReportError(f"{path}: has no /points/{lost[0]}: is not the file of bench compress")
    most_bytes = np.nanmax(points["sent_bytes"], axis=1)
    columns = [
        Column[int]("method", lambda i: str(points["method"][i]), numbers=False),
        Column[int]("ranks", lambda i: str(points["ranks"][i])),
        Column[int]("bytes\nper rank", lambda i: units.size(float(most_bytes[i]))),
        *(_figure(heading, points[name]) for name, heading in FIGURES.items()),
        Column[int]("time", lambda i: units.time(float(points["time_s"][i]))),
    ]
    table = tabulate("Methods", columns, range(len(points["method"])), CAPTION)
    facts = [(name, str(attributes.get(name, ""))) for name in ("gradients", "iterations", "hosts")]
    return Report("Compressors on recorded gradients", facts, [Section("Methods", tables=[table])])


def _figure(heading: str, values: Array) -> Column[int]:
    return Column(heading, lambda i: units.digits(float(values[i])))
