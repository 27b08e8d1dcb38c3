"""What a window finds beyond the domain: index maps, axis by axis, in a few segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCKS = {  # mode -> cells that a block has less than the extent; whether every other is reversed
    "wrap": (0, False),
    "reflect": (1, True),
    "symmetric": (0, True),
}
MODES = ("zero", *BLOCKS, "edge")


@dataclass(frozen=True)
class Constant:
    """The mode that fills with a value, converted to the array's dtype as NumPy assigns it."""

    value: complex


Mode = str | Constant
Boundary = Mode | Sequence[Mode]


class Segment(NamedTuple):
    """length cells from target on, of a window, and the cells of the domain that they show.

    step 1: source, source + 1, ...; step -1: the same cells backwards, so that the last one shows
    source; step 0: all show source
    """

    target: int
    source: int
    length: int
    step: int

    @property
    def sources(self) -> int:
        """How many cells of the domain are shown."""
        return self.length if self.step else 1


def parse_boundary(boundary: Boundary, ndim: int) -> tuple[Mode, ...]:
    """Return the mode of each axis, given one for all or one for each.

    Raises ValueError for unknown modes or a number of them that does not fit; TypeError for
    anything else.
    """
    one = isinstance(boundary, str | Constant)
    modes = (boundary,) * ndim if one else boundary
    if not isinstance(modes, Sequence) or not all(isinstance(m, str | Constant) for m in modes):
        raise TypeError(f"WindowPlan: boundary={boundary!r}: must be a mode, or one for each axis")
    unknown = [mode for mode in modes if isinstance(mode, str) and mode not in MODES]
    if unknown:
        raise ValueError(
            f"WindowPlan: boundary={unknown[0]!r}: known are {', '.join(MODES)} and Constant(value)"
        )
    if len(modes) != ndim:
        raise ValueError(f"WindowPlan: boundary={boundary!r}: needs one mode, or {ndim}")
    return tuple(modes)  # type: ignore[arg-type]


def fill_value(mode: Mode) -> complex | None:
    """Return the value that a mode fills with; None where it shows cells of the domain."""
    if isinstance(mode, Constant):
        return mode.value
    return 0 if mode == "zero" else None


def check_fits(what: str, start: int, stop: int, extent: int, mode: Mode) -> None:
    """Raise ValueError where a mode has no cell to show: reflect has none of an extent of 1."""
    if mode == "reflect" and extent == 1 and start < stop and (start < 0 or stop > 1):
        raise ValueError(f"{what}: reflect needs an extent of 2 or more, here it is 1")


def segments(start: int, stop: int, extent: int, mode: Mode) -> Iterator[Segment]:
    """Yield the segments of the cells start..stop of a window, but for those that are filled.

    They are disjoint and in order of the targets.
    """
    low, high = min(max(start, 0), extent), max(min(stop, extent), 0)
    if start < 0:
        yield from _beyond(start, min(stop, 0), extent, mode)
    if low < high:
        yield Segment(low, low, high - low, 1)
    if stop > extent:
        yield from _beyond(max(start, extent), stop, extent, mode)


def _beyond(start: int, stop: int, extent: int, mode: Mode) -> Iterator[Segment]:
    """Yield the segments of cells that are all on one side of the domain."""
    if start >= stop or fill_value(mode) is not None:
        return
    if mode == "edge":
        yield Segment(start, 0 if start < 0 else extent - 1, stop - start, 0)
        return
    less, reverses = BLOCKS[str(mode)]
    block = extent - less
    for k in range(start // block, (stop - 1) // block + 1):
        low, high = max(start, k * block), min(stop, (k + 1) * block)
        if reverses and k % 2:
            last = (k + 1) * block - 1 + less  # cell c shows last - c
            yield Segment(low, last - (high - 1), high - low, -1)
        else:
            yield Segment(low, low - k * block, high - low, 1)


def sources(start: int, stop: int, extent: int, mode: Mode) -> npt.NDArray[np.int64]:
    """Return the cell of the domain that each cell start..stop shows, -1 where it is filled.

    By remainders, cell by cell, and not by segments: what segments are checked against.
    """
    cells = np.arange(start, stop)
    if fill_value(mode) is not None:
        return np.where((cells >= 0) & (cells < extent), cells, -1)
    if mode == "edge":
        return np.clip(cells, 0, extent - 1)
    if mode == "wrap":
        return cells % extent
    if mode == "symmetric":
        within = cells % (2 * extent)
        return np.minimum(within, 2 * extent - 1 - within)
    within = cells % max(1, 2 * (extent - 1))
    return np.minimum(within, 2 * (extent - 1) - within)
