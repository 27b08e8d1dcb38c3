"""Series dealt to the panels of figures, with looks that are the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .look import Look, looks
from .series import Join, Series
from .pool import Estimate, Pool, label

MOST = 12  # panels in a figure
APART = 0.06  # of a doubling: series beside one another at the same ranks


@dataclass(frozen=True)
class Line:
    """Pools that are drawn as one series."""

    name: str
    look: Look
    pools: Sequence[Pool]


@dataclass(frozen=True)
class Dealt:
    """The series of each panel, by the panel's title."""

    panels: dict[str, list[Line]]

    def parts(self) -> list[Dealt]:
        """Return them in figures of at most MOST panels."""
        items = list(self.panels.items())
        return [Dealt(dict(items[i : i + MOST])) for i in range(0, len(items), MOST)]


def deal(
    groups: Iterable[Sequence[Pool]], panels: Sequence[str], lines: Sequence[str]
) -> Dealt:
    """Return groups of pools by panel; panels, lines: the factors that name them."""
    groups = [list(group) for group in groups]
    names = [label(group[0].factors, lines) for group in groups]
    drawn = looks(names)
    found: dict[str, list[Line]] = {}
    for name, group in zip(names, groups, strict=True):
        title = label(group[0].factors, panels)
        found.setdefault(title, []).append(Line(name, drawn[name], group))
    return Dealt(found)


def numbered(name: str, index: int, count: int) -> str:
    """Return a figure's name, with its number where there are several."""
    return name if count == 1 else f"{name}{index + 1}"


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


def side_by_side(index: int, count: int, step: float = APART) -> float:
    """Return the factor by which a series is moved aside on a logarithmic axis."""
    return float(2 ** (step * (index - (count - 1) / 2)))
