"""Pools dealt to the panels of figures, with names and looks that are the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .look import LIBRARIES, Look, looks
from .naming import Factors, heading, is_number, label, varying
from .pool import Estimate, Pool
from .series import Join, Series
from .study_file import PLACES, StudyFile

ROWS, WIDEST = 5, 4  # of panels in a figure
APART, REACH = 0.06, 0.28  # of a doubling: series beside one another, and all at a place
FOREIGN = ("mpi", "gloo")  # algorithms that are not ours


@dataclass(frozen=True)
class Line:
    """Pools that are drawn as one series."""

    name: str
    look: Look
    pools: Sequence[Pool]


@dataclass(frozen=True)
class Dealt:
    """The lines of each panel, by the panel's title; columns: of their grid."""

    panels: dict[str, list[Line]]
    columns: int

    def figures(self, name: str) -> list[tuple[str, Dealt]]:
        """Return what goes into each figure, with its name: numbered where there are several."""
        items, most = list(self.panels.items()), ROWS * self.columns
        parts = [dict(items[i : i + most]) for i in range(0, len(items), most)]
        return [
            (f"{name}_{number}" if len(parts) > 1 else name, Dealt(part, self.columns))
            for number, part in enumerate(parts, 1)
        ]


@dataclass(frozen=True)
class Layout:
    """panels, lines: factors that name panels and lines; looks: of each line's name.

    free: factors that are not the same in a series
    """

    panels: Sequence[str]
    lines: Sequence[str]
    looks: dict[str, Look]
    free: Collection[str]

    @classmethod
    def of(cls, file: StudyFile, pools: Sequence[Pool], apart: Sequence[str]) -> Layout:
        """Return the layout of a study's figures.

        apart: words that have panels of their own; numbers always have
        """
        factors = [pool.factors for pool in pools]
        hidden = {*PLACES, *file.weak} - ({"ppn"} if _tells_apart(pools) else set())
        free = hidden if file.over == "ranks" else {file.over}
        names = varying(factors, hidden | free)
        panels = [n for n in names if n in apart or is_number(n, factors)]
        lines = [n for n in names if n not in panels]
        own = looks(label(each, lines) for each in factors if not is_foreign(each))
        foreign = dict.fromkeys(label(each, lines) for each in factors if is_foreign(each))
        return cls(panels, lines, own | dict(zip(foreign, LIBRARIES, strict=False)), free)

    def series(self, pools: Iterable[Pool]) -> list[list[Pool]]:
        """Return pools that differ only in what is free, from few ranks and little work to much."""
        return _grouped(pools, self.free)

    @property
    def heading(self) -> str:
        """What lines are called at the head of a column."""
        if len(self.lines) == 1:
            return heading(self.lines[0])
        return "gradients" if any(n.startswith("gradient.") for n in self.lines) else "method"

    def line(self, pools: Sequence[Pool]) -> Line:
        """Return pools that differ only in what is on the x axis."""
        name = label(pools[0].factors, self.lines)
        return Line(name, self.looks[name], pools)

    def deal(self, groups: Iterable[Sequence[Pool]], without: Iterable[str] = ()) -> Dealt:
        """Return groups of pools by panel. without: factors that name no panel here."""
        groups = list(groups)
        alone = any(len({pool.ranks for pool in group}) == 1 for group in groups)
        ranks = ["ranks"] if alone and len({group[0].ranks for group in groups}) > 1 else []
        names = [*ranks, *(name for name in self.panels if name not in without)]
        found: dict[str, list[Line]] = {}
        inner = set()
        for group in groups:
            title = label(group[0].factors, names)
            found.setdefault(title, []).append(self.line(group))
            inner.add(label(group[0].factors, names[1:]))
        by_rows = names[:1] == ["size_bytes"] and 1 < len(inner) <= WIDEST
        even = 2 if len(found) == 4 else 3
        return Dealt(found, len(inner) if by_rows else even)


def _tells_apart(pools: Sequence[Pool]) -> bool:
    """Return whether it takes the ranks per node to tell points of equal ranks apart."""
    return any(len(group) > 1 for group in _grouped(pools, ("nodes", "ppn")))


def _grouped(pools: Iterable[Pool], free: Collection[str]) -> list[list[Pool]]:
    found: dict[Any, list[Pool]] = {}
    for pool in pools:
        key = frozenset((k, v) for k, v in pool.factors.items() if k not in free)
        found.setdefault(key, []).append(pool)
    return [sorted(group, key=lambda pool: pool.ranks) for group in found.values()]


def is_foreign(factors: Factors) -> bool:
    """Return whether an all-reduce is another library's."""
    return factors.get("algorithm") in FOREIGN


def drawn(
    line: Line,
    x: Callable[[Pool], float],
    y: Callable[[Pool], Estimate],
    join: Join,
    shift: float = 1.0,
) -> Series:
    """Return a series of pools; shift: factor of x."""
    values = [y(pool) for pool in line.pools]
    return Series(
        line.name,
        line.look,
        [shift * x(pool) for pool in line.pools],
        [each.value for each in values],
        [each.low for each in values],
        [each.high for each in values],
        join,
    )


def side_by_side(index: int, count: int) -> float:
    """Return the factor by which a series is moved aside on a logarithmic axis."""
    step = min(APART, REACH / count)
    return float(2 ** (step * (index - (count - 1) / 2)))
