"""What the halo benchmark measures unless it is told: faces of arrays that are usual."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..darray.spec import spec_of
from .halo_cases import Setting


class Usual(NamedTuple):
    """A setting for any number of ranks.

    block: cells of a rank; axes: that are split, evenly where there are several
    """

    block: tuple[int, ...]
    axes: tuple[int, ...]
    halo: list[int]
    trail: tuple[int, ...] = ()
    boundary: str = "none"
    text: str = ""


USUAL = {
    "rows": Usual((100, 200), (0,), [10, 0], (96,), text="images, batch innermost, by rows"),
    "columns": Usual((200, 100), (1,), [0, 10], (96,), text="the same by columns"),
    "nchw": Usual((96, 2, 200, 100), (3,), [0, 0, 0, 5], text="batch first, by columns"),
    "cube": Usual((64, 64, 64), (2,), [0, 0, 1], text="a block of 64^3, by its last axis"),
    "small": Usual((16, 16, 16), (1,), [0, 1, 0], text="a block of 16^3, by its middle axis"),
    "torus": Usual((256, 256), (0, 1), [1, 1], boundary="wrap", text="a periodic grid, corners"),
}  # fmt: skip


def usual(name: str, ranks: int, laid_over: dict[str, Any]) -> Setting:
    """Return a usual setting for so many ranks, some of its keys replaced.

    Raises ConfigError where they do not fit.
    """
    of = USUAL[name]
    procs = [1] * len(of.block)
    for axis, n in zip(of.axes, factors(ranks, len(of.axes)), strict=True):
        procs[axis] = n
    raw = {
        "shape": [n * p for n, p in zip(of.block, procs, strict=True)],
        "procs": procs,
        "halo": of.halo,
        "boundary": of.boundary,
        "trail": list(of.trail),
    }
    return Setting(name, spec_of(raw | laid_over, f"bench halo: {name}"))


def factors(ranks: int, count: int) -> list[int]:
    """Return so many factors of a number, as near to one another as can be, rising."""
    if count == 1:
        return [ranks]
    first = next(n for n in range(int(ranks ** (1 / count) + 1e-9), 0, -1) if ranks % n == 0)
    return [first, *factors(ranks // first, count - 1)]
