"""Tables for the terminal and the page, and the sections that hold them with their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from .figures import Chart

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """A heading of one or two lines, the cell of a thing below it, and whether it is a number."""

    heading: str
    cell: Callable[[T], str] = str
    numbers: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells below columns; page_only: too long for a terminal."""

    title: str
    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    page_only: bool = False

    def rich(self) -> RichTable:
        """Return the table for the terminal."""
        result = RichTable(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            caption=Text(self.caption, "dim") if self.caption else None,
            caption_justify="left",
        )
        for column in self.columns:
            justify: Literal["right", "left"] = "right" if column.numbers else "left"
            result.add_column(column.heading, justify=justify, no_wrap=column.numbers)
        for row in self.rows:
            result.add_row(*(Text(cell) for cell in row))
        return result


def tabulate(
    title: str,
    columns: Sequence[Column[T]],
    of: Iterable[T],
    caption: str = "",
    page_only: bool = False,
) -> Table:
    """Return the table with a row for each thing."""
    rows = [[column.cell(each) for column in columns] for each in of]
    return Table(title, columns, rows, caption, page_only)


def words(*headings: str) -> list[Column[str]]:
    """Return columns of text."""
    return [Column(heading, numbers=False) for heading in headings]


@dataclass(frozen=True)
class Section:
    """A part of a report: what it says, its tables, its figures."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


@dataclass(frozen=True)
class Listed:
    """Points or runs that are not as they were asked for: what of them, and which."""

    what: str
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What is shown of one study, or of the records of training.

    texts: files that belong to it: name and content
    """

    title: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    listed: Sequence[Listed] = ()
    rules: Sequence[str] = ()
    provenance: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()

    @property
    def charts(self) -> list[Chart]:
        """All figures, in order."""
        return [chart for section in self.sections for chart in section.charts]
