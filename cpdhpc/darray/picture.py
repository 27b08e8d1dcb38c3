"""A picture of a plan of two axes: who owns what, and where a rank's window has its cells from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .box import Box
from .windows import Windows

# A grid takes the first four, which differ in lightness by 14 of 100 and more.
COLOURS = ("#f9dc6b", "#d9694f", "#7db8e0", "#6d5ba8", "#d7ead0", "#3f8f6f", "#fbc4ab", "#8a8a8a")
PALE = 0.3  # how much is left of the colour of cells that the window does not show
SIDE_INCHES = 7.0
MOST_LINES = 48  # cells along an axis that are parted by lines
BEYOND, FILLED = "////", "xxx"  # hatches
NUMBERED = 1 / 40  # of the picture's side: the least side of a piece that has room for a number
HATCH = "#444444"


class Part(NamedTuple):
    """Cells of the window that show those of a rank; beyond: where the domain has ended."""

    box: Box
    owner: int
    beyond: bool


def draw(path: Path, windows: Windows, rank: int) -> None:
    """Write a picture of all ranks' boxes and of one rank's window."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    frame = frame_of(windows, rank)
    high, wide = frame.shape
    longest = max(high, wide)
    size = (SIDE_INCHES * wide / longest + 3.2, max(3.0, SIDE_INCHES * high / longest + 0.9))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _draw_domain(axes, windows, windows.boxes[rank])
    _draw_window(axes, windows, rank, longest)
    _draw_frame(axes, windows, rank, frame)
    axes.legend(handles=_legend(windows, rank), loc="upper left", bbox_to_anchor=(1.01, 1.0),
                borderaxespad=0, frameon=False, fontsize=9)  # fmt: skip
    figure.savefig(path, dpi=120)


def frame_of(windows: Windows, rank: int) -> Box:
    """Return a box around the domain and the window."""
    domain, window = windows.layout.domain, windows.boxes[rank]
    boxes = [domain] if window.empty else [domain, window]
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    return Box(start, tuple(map(max, zip(*(box.stop for box in boxes), strict=True))))


def parts_of(windows: Windows, rank: int) -> Iterator[Part]:
    """Yield the parts of a rank's window, but for what is filled."""
    for owner in windows.owners(rank):
        for piece in windows.pieces(owner, rank):
            yield Part(piece.target, owner, not piece.is_itself)


@lru_cache(maxsize=1)
def colours_of(boxes: tuple[Box, ...]) -> list[int]:
    """Return a number of a colour for each box, such that boxes that touch have different ones.

    Greedy, so eight are enough for grids; where more are needed, touching boxes may be alike.
    """
    chosen: list[int] = []
    for i, box in enumerate(boxes):
        around = Box(tuple(a - 1 for a in box.start), tuple(b + 1 for b in box.stop))
        near = [j for j in range(i) if not box.empty and not around.intersect(boxes[j]).empty]
        taken = {chosen[j] for j in near}
        free = [c for c in range(len(COLOURS)) if c not in taken]
        chosen.append(free[0] if free else i % len(COLOURS))
    return chosen


def _colour(windows: Windows, owner: int) -> str:
    return COLOURS[colours_of(windows.layout.owners)[owner]]


def _rectangle(box: Box, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    (top, left), (high, wide) = box.start, box.shape
    return Rectangle((left, top), wide, high, **look)


def _number(axes: Any, box: Box, text: str, **look: Any) -> None:
    (top, left), (high, wide) = box.start, box.shape
    axes.text(left + wide / 2, top + high / 2, text, ha="center", va="center", **look)


def _draw_domain(axes: Any, windows: Windows, window: Box) -> None:
    """Draw the boxes of all ranks, pale, with their numbers, outside the window if they can be."""
    for owner, box in enumerate(windows.layout.owners):
        if box.empty:
            continue
        axes.add_patch(_rectangle(box, facecolor=_mixed(_colour(windows, owner), PALE), zorder=1))
        axes.add_patch(_rectangle(box, fill=False, edgecolor="black", linewidth=1.0, zorder=4))
        rest = max(box.without(window), key=lambda each: min(each.shape), default=box)
        _number(axes, rest, str(owner), fontsize=14, fontweight="bold", zorder=7)


def _mixed(colour: str, share: float) -> str:
    """Return a colour mixed with white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def _draw_window(axes: Any, windows: Windows, rank: int, longest: int) -> None:
    """Draw the cells of a window in the colours of those whose they are."""
    window = windows.boxes[rank]
    for fill in windows.fills(rank):
        axes.add_patch(_rectangle(fill.target, facecolor="white", edgecolor=HATCH, hatch=FILLED,
                                  linewidth=0, zorder=2))  # fmt: skip
    for box, owner, beyond in parts_of(windows, rank):
        colour = _colour(windows, owner)
        hatched: dict[str, Any] = {"hatch": BEYOND, "edgecolor": HATCH} if beyond else {}
        axes.add_patch(_rectangle(box, facecolor=colour, linewidth=0, zorder=2, **hatched))
        if owner != rank or beyond:
            axes.add_patch(_rectangle(box, fill=False, edgecolor="black", linewidth=0.8, zorder=4))
            numbered = not beyond and window.contains(windows.layout.owner(owner))
            if not numbered and min(box.shape) >= NUMBERED * longest:
                _number(axes, box, str(owner), fontsize=8, zorder=6,
                        bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8, "alpha": 0.85},
                        )  # fmt: skip
    if not window.empty:
        axes.add_patch(_rectangle(window, fill=False, edgecolor="white", linewidth=4.5, zorder=5))
        axes.add_patch(
            _rectangle(window, fill=False, edgecolor="black", linewidth=2.4, linestyle=(0, (5, 2)),
                       zorder=5)
        )  # fmt: skip


def _draw_frame(axes: Any, windows: Windows, rank: int, frame: Box) -> None:
    """Draw axes with labels, and lines between cells where there is room."""
    from matplotlib.ticker import MaxNLocator

    (top, left), (bottom, right) = frame
    margin = 0.02 * max(frame.shape)
    axes.set_xlim(left - margin, right + margin)
    axes.set_ylim(bottom + margin, top - margin)  # axis 0 points down, as in a matrix
    axes.set_aspect("equal")
    if max(frame.shape) <= MOST_LINES:
        line = {"color": "black", "linewidth": 0.3, "alpha": 0.35, "zorder": 3}
        axes.vlines(range(left, right + 1), top, bottom, **line)
        axes.hlines(range(top, bottom + 1), left, right, **line)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("axis 1 (cells)")
    axes.set_ylabel("axis 0 (cells)")
    shape = " x ".join(map(str, windows.layout.shape))
    axes.set_title(
        f"{shape} cells over {windows.layout.ranks} ranks; window of rank {rank}: "
        f"{windows.boxes[rank]}",
        fontsize=10,
    )


def _legend(windows: Windows, rank: int) -> list[Any]:
    """Return what explains the colours, of those that the picture has."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    own = _colour(windows, rank)
    found = list(parts_of(windows, rank))
    senders = sorted({part.owner for part in found if part.owner != rank})
    handles = [Line2D([], [], color="black", linewidth=2.4, linestyle=(0, (5, 2)),
                      label=f"window of rank {rank}"),
               Patch(facecolor=own, edgecolor="black", label=f"cells of rank {rank} itself"),
               Patch(facecolor=_mixed("#888888", PALE), edgecolor="black",
                     label="pale: not in the window")]  # fmt: skip
    for owner in senders:
        cells = sum(part.box.size for part in found if part.owner == owner)
        text = f"halo from rank {owner}: {cells} cell{'s' * (cells > 1)}"
        handles.append(Patch(facecolor=_colour(windows, owner), edgecolor="black", label=text))
    if any(part.beyond for part in found):
        handles.append(Patch(facecolor="white", edgecolor=HATCH, hatch=BEYOND,
                             label="beyond the domain:\nshows a cell of that rank"))  # fmt: skip
    if windows.fills(rank):
        handles.append(Patch(facecolor="white", edgecolor=HATCH, hatch=FILLED,
                             label="beyond the domain: filled"))  # fmt: skip
    return handles
