"""Tables for the terminal, the page, CSV and LaTeX, and the sections that hold them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .figures import Chart
from .units import NONE, Cell, count

if TYPE_CHECKING:
    from rich.table import Table as RichTable

T = TypeVar("T")
SHOWN = 40  # rows on the terminal
LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"~": r"\~{}", "^": r"\^{}", "\\": r"\textbackslash{}", "\N{EN DASH}": "--"}
    | {"µ": r"$\mu$", "±": r"$\pm$"}
)


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
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        result = RichTable(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            caption=Text(self.caption, "dim") if self.caption else None,
            caption_justify="left",
        )
        for at, column in enumerate(self.columns):
            lines = [*column.heading.split("\n"), *(row[at] for row in self.rows[:SHOWN])]
            if column.numbers:
                whole = max(map(len, lines))
                result.add_column(column.heading, justify="right", no_wrap=True, min_width=whole)
            else:  # rich cuts words if another column can be narrower
                word = max(len(word) for line in lines for word in line.split() or [""])
                result.add_column(column.heading, min_width=word)
        for row in self.rows[:SHOWN]:
            result.add_row(*(Text(cell) for cell in row))
        return result

    @property
    def left(self) -> str:
        """The number of rows that the terminal leaves out."""
        more = len(self.rows) - SHOWN
        return f"and {count(more, 'row')} more: --html, --csv" if more > 0 else ""

    @property
    def file(self) -> str:
        """The name of files of this table."""
        return slug(self.title or "table")

    @property
    def headings(self) -> list[str]:
        """The headings, each in one line."""
        return [
            re.sub("-\n|\n", lambda cut: " " * (cut[0] == "\n"), c.heading) for c in self.columns
        ]

    @property
    def _unique(self) -> list[str]:
        """The headings; one that was there before follows that of the column that it is of."""
        every = self.headings
        before = ["", *every]
        return [f"{before[i]} {h}" if h in every[:i] else h for i, h in enumerate(every)]

    def csv(self) -> str:
        """Return the table as CSV: numbers with all their digits, each in a column of its own.

        A unit follows the heading: times are in seconds, sizes in bytes. Unknown: empty.
        """
        parts = [list(dict.fromkeys(n for row in self.rows for n in numbers(row[i])))
                 for i in range(len(self.columns))]  # fmt: skip
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            f"{heading} {name.replace('value', '').replace('_', ' / ')}".replace("  ", " ").strip()
            for heading, names in zip(self._unique, parts, strict=True)
            for name in names or [""]
        )
        for row in self.rows:
            writer.writerow(
                value
                for cell, names in zip(row, parts, strict=True)
                for value in [_number(cell, name) for name in names]
                or ["" if cell == NONE else cell]
            )
        return text.getvalue()

    def latex(self) -> str:
        """Return the table in LaTeX, with the rules of the package booktabs."""
        align = "".join("r" if column.numbers else "l" for column in self.columns)
        head, *body = [
            " & ".join(cell.translate(LATEX) for cell in row) + r" \\"
            for row in (self.headings, *self.rows)
        ]
        return "\n".join(
            [rf"% {self.title}: needs \usepackage{{booktabs}}", rf"\begin{{tabular}}{{{align}}}"]
            + [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
        )


def numbers(cell: str) -> dict[str, float]:
    """Return the numbers that a cell shows, by name."""
    return dict(cell.numbers) if isinstance(cell, Cell) else {}


def _number(cell: str, name: str) -> str:
    value = float(numbers(cell).get(name, "nan"))
    return f"{value!r}".removesuffix(".0") if isfinite(value) else ""


def slug(title: str) -> str:
    """Return a title as the name of a file or of a place in a page."""
    return re.sub(r"\W+", "_", title.lower()).strip("_")


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def tabulate(
    title: str,
    columns: Sequence[Column[T]],
    of: Iterable[T],
    caption: str = "",
    page_only: bool = False,
) -> Table:
    rows = [[column.cell(each) for column in columns] for each in of]
    return Table(title, columns, rows, caption, page_only)


def words(*headings: str) -> list[Column[str]]:
    return [Column(heading, numbers=False) for heading in headings]


@dataclass(frozen=True)
class Section:
    """A part of a report: its notes, tables and figures; found: a sentence for the first screen."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    found: str = ""


@dataclass(frozen=True)
class Listed:
    """Points or runs that differ from the request: the reason, and their names."""

    what: str
    items: Sequence[str] = ()


def counted(found: Iterable[tuple[str, Sequence[str]]], of: str = "point") -> list[Listed]:
    """Return the entries with items, and their number."""
    return [Listed(f"{what}, {count(len(items), of)}", items) for what, items in found if items]


@dataclass(frozen=True)
class Report:
    """The report of one study, or of records of trainings.

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
        return [chart for section in self.sections for chart in section.charts]

    @property
    def tables(self) -> list[Table]:
        return [table for section in self.sections for table in section.tables]

    @property
    def long(self) -> bool:
        """Whether a page of it opens sections only when asked to."""
        return max((len(table.rows) for table in self.tables), default=0) > SHOWN
