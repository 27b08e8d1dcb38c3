"""The table of a report."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .runs import Group, baseline

NONE = "-"  # where there is nothing to say


@dataclass(frozen=True)
class Column:
    """A heading of one or two lines, and whether numbers are below it."""

    heading: str
    numbers: bool = True


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


def rows(groups: list[Group]) -> list[list[str]]:
    """Return the cells below COLUMNS, one row per group."""
    base = baseline(groups)
    return [_row(each, base) for each in groups]


def _row(group: Group, base: Group | None) -> list[str]:
    other = base is not None and group is not base
    unfinished = f" of {group.found}" if group.found > len(group.runs) else ""
    spread = "" if isnan(group.spread) else f" ± {group.spread:.2f}"
    share = group.wire_bytes / base.wire_bytes if base and base.wire_bytes else None
    return [
        group.name,
        f"{len(group.runs)}{unfinished}",
        f"{group.accuracy:.2f}{spread}",
        f"{round(group.accuracy - base.accuracy, 2) + 0.0:+.2f}" if base and other else NONE,
        f"{group.wire_bytes:,.0f}",
        NONE if share is None else f"{share:.3f}",
        f"{group.step_time_ms:.2f}",
        f"{100 * group.underflow_share:.2f}" if group.compressed else NONE,
    ]


def table(groups: list[Group]) -> Table:
    """Return the groups as a table for the terminal."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION, caption_justify="left")
    for column in COLUMNS:
        justify: Literal["right", "left"] = "right" if column.numbers else "left"
        result.add_column(column.heading, justify=justify, no_wrap=True)
    for row in rows(groups):
        result.add_row(*row)
    return result


CAPTION = (
    "Accuracy: of test samples, mean ± sample standard deviation over seeds. Step: median. "
    "Underflow: share of non-zero gradient values that become zero when a rank encodes its own."
)
