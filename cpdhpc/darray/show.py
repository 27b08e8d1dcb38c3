"""What a plan looks like and costs, for any number of ranks: nothing is sent, no MPI is needed."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from ..config import ConfigError, Section, UserError, read_toml, validate
from ..formats import INTEGERS, Cast
from ..ops.payloads import Packed, parse_wire
from .describe import Description, describe
from .layout import Box, Layout, receptive
from .windows import MODES, Constant, Mode, Windows, parse_boundary

CUT = "none"  # instead of a boundary mode: windows end where the domain ends
Ends = list[list[int]]  # start and stop of a box
Numbers = int | list[int]


class Spec(Section):
    """A plan's geometry and its cells.

    shape: of the domain; procs: parts along each axis, or owners: the box of each rank
    halo: cells around the owned box, a number, one for each axis, or [below, above] for each; or
    windows: the box of each rank; or size, step, dilation, pad: those of a filter whose outputs
    are split over procs
    boundary: a mode or one for each axis: "none" (windows are cut), "constant:VALUE", or a name
    dtype: NumPy's; trail: further axes; wire: "raw" or a format
    """

    shape: list[int] = Field(min_length=1)
    procs: list[int] | None = None
    owners: list[Ends] | None = None
    halo: int | list[int | list[int]] = 0
    windows: list[Ends] | None = None
    size: Numbers | None = None
    step: Numbers = 1
    dilation: Numbers = 1
    pad: Numbers = 0
    boundary: str | list[str] = "zero"
    dtype: str = "float32"
    trail: list[int] = Field(default=[])
    wire: str = "raw"

    @model_validator(mode="after")
    def _check(self) -> Spec:
        ways = {"halo": self.halo != 0, "windows": self.windows is not None,
                "size": self.size is not None}  # fmt: skip
        named = [name for name, given in ways.items() if given]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: windows are given by one of them")
        if self.owners is not None and (self.procs is not None or self.size is not None):
            raise ValueError("owners: goes not with procs or size")
        try:
            np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype={self.dtype!r}: is no dtype of NumPy") from None
        if self.wire != "raw" and self.dtype != "float32":
            raise ValueError(f"wire={self.wire!r}: takes dtype float32, not {self.dtype}")
        self.packed  # noqa: B018  raises for an unknown format
        if any(n < 1 for n in self.trail):
            raise ValueError(f"trail={self.trail}: must be 1 or more")
        self.geometry()
        return self

    @property
    def packed(self) -> Packed | None:
        """What encodes the cells that travel, or None."""
        fmt = parse_wire(self.wire)
        if self.wire in INTEGERS:
            raise ValueError(f"wire={self.wire!r}: integers are for sums: use raw or a format")
        return None if fmt is None else Packed(Cast(fmt), fit=True)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The boundary mode of each axis; of axes where windows are cut, one that is not met."""
        return parse_boundary(
            tuple("zero" if name == CUT else _mode(name) for name in self._names), len(self.shape)
        )

    @property
    def _names(self) -> list[str]:
        one = isinstance(self.boundary, str)
        names = [self.boundary] * len(self.shape) if one else self.boundary
        if len(names) != len(self.shape):
            raise ValueError(f"boundary={self.boundary}: needs one mode, or {len(self.shape)}")
        return names  # type: ignore[return-value]

    def geometry(self) -> Windows:
        """Return the layout and all ranks' windows. Raises ValueError where they do not fit."""
        layout = self._layout()
        boxes = self._boxes(layout)
        if len(boxes) != layout.ranks:
            raise ValueError(f"windows: {len(boxes)} for {layout.ranks} ranks")
        cut = [self._cut(box) for box in boxes]
        return Windows(layout, cut, self.modes)

    def _layout(self) -> Layout:
        if self.owners is not None:
            return Layout.boxes(self.shape, [_box("owners", ends) for ends in self.owners])
        return Layout.grid(self.shape, self.procs or [1] * len(self.shape))

    def _boxes(self, layout: Layout) -> list[Box]:
        if self.windows is not None:
            return [_box("windows", ends) for ends in self.windows]
        if self.size is not None:
            filters = self.size, self.step, self.pad, self.dilation
            outputs = Layout.grid(self._outputs(), self.procs or [1] * len(self.shape))
            return [receptive(box, *filters) for box in outputs.owners]
        widths = self.widths
        return [box if box.empty else _grown(box, widths) for box in layout.owners]

    def _outputs(self) -> list[int]:
        """Return the shape of what a filter makes of the domain."""
        domain = Box((0,) * len(self.shape), (1,) * len(self.shape))
        one = receptive(domain, self.size or 1, self.step, self.pad, self.dilation)
        next_ = receptive(domain.shift((1,) * domain.ndim), self.size or 1, self.step, self.pad,
                          self.dilation)  # fmt: skip
        found = []
        for axis, n in enumerate(self.shape):
            step = next_.start[axis] - one.start[axis]
            found.append((n - one.start[axis] - one.stop[axis]) // step + 1)
        return found

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Return the cells below and above of each axis."""
        each = [self.halo] * len(self.shape) if isinstance(self.halo, int) else self.halo
        pairs = [(w, w) if isinstance(w, int) else tuple(w) for w in each]
        if len(pairs) != len(self.shape) or any(len(p) != 2 or min(p) < 0 for p in pairs):
            raise ValueError(f"halo={self.halo}: needs a number, or one or two for each axis")
        return pairs  # type: ignore[return-value]

    def _cut(self, box: Box) -> Box:
        """Return the box without what is beyond the domain along axes where windows are cut."""
        if box.empty:
            return box
        start, stop = list(box.start), list(box.stop)
        for axis, name in enumerate(self._names):
            if name == CUT:
                start[axis] = min(max(start[axis], 0), self.shape[axis])
                stop[axis] = max(min(stop[axis], self.shape[axis]), start[axis])
        return Box(tuple(start), tuple(stop))


def _mode(name: str) -> Mode:
    word, _, value = name.partition(":")
    if word != "constant":
        if name not in MODES:
            known = ", ".join((CUT, *MODES))
            raise ValueError(f"boundary={name!r}: known are {known} and constant:VALUE")
        return name
    try:
        return Constant(float(value))
    except ValueError:
        raise ValueError(f"boundary={name!r}: must be constant:VALUE, a number") from None


def _box(what: str, ends: Ends) -> Box:
    if len(ends) != 2 or len(ends[0]) != len(ends[1]):
        raise ValueError(f"{what}={ends}: a box is [start, stop], alike in length")
    return Box(tuple(ends[0]), tuple(ends[1]))


def _grown(box: Box, widths: list[tuple[int, int]]) -> Box:
    start = tuple(a - low for a, (low, _) in zip(box.start, widths, strict=True))
    return Box(start, tuple(b + high for b, (_, high) in zip(box.stop, widths, strict=True)))


def read_spec(path: Path) -> Spec:
    """Return the plan that a file describes. Raises ConfigError."""
    return spec_of(read_toml(path), str(path))


def spec_of(raw: dict[str, Any], source: str) -> Spec:
    """Return a plan of tables as a file has them. Raises ConfigError."""
    try:
        return validate(Spec, raw, source)
    except (TypeError, IndexError) as error:
        raise ConfigError(f"{source}: {error}") from None


OPTIONS = {  # option -> (its form, what it is, whether it holds integers)
    "shape": ("12,16", "cells of the domain along each axis", True),
    "procs": ("2,3", "ranks along each axis", True),
    "halo": ("1 or 1,0:2", "cells around each rank's box; below:above where they differ", True),
    "boundary": ("MODE,...", "for all axes, or for each: none (windows end with the domain), zero, "
                 "constant:VALUE, wrap, reflect, symmetric, edge", False),
    "trail": ("3,96", "further axes of the arrays, which are not split", True),
}  # fmt: skip
FILTER = {  # the same, of windows that filters need
    "size": ("3", "of a filter whose outputs are split over the ranks, instead of a halo", True),
    "step": ("1", "of the filter", True),
    "dilation": ("1", "of the filter", True),
    "pad": ("0", "of the filter", True),
}
PLAIN = {"dtype": "of NumPy", "wire": "raw, or a format in which float32 cells travel"}


def add_options(parser: argparse.ArgumentParser, *, filters: bool) -> None:
    """Add the options. filters: those of filters, too."""
    for name, (form, text, _) in (OPTIONS | FILTER if filters else OPTIONS).items():
        parser.add_argument(f"--{name}", metavar=form, help=text)
    for name, text in PLAIN.items():
        parser.add_argument(f"--{name}", help=text)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say, as a file would. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, (_, _, integers) in (OPTIONS | FILTER).items():
        text = getattr(arguments, name, None)
        if text is not None:
            found[name] = _integers(f"--{name}", text) if integers else _one_or_more(text)
    for name in PLAIN:
        if getattr(arguments, name) is not None:
            found[name] = getattr(arguments, name)
    for name in ("shape", "procs", "trail"):
        if isinstance(found.get(name), int):
            found[name] = [found[name]]
    return found


def _one_or_more(text: str) -> Any:
    words = text.split(",")
    return words[0] if len(words) == 1 else words


def _integers(option: str, text: str) -> Any:
    """Return 1, [1, 2], [[1, 2], 3] of "1", "1,2", "1:2,3"."""
    if not text:
        return []
    found: list[Any] = []
    for word in text.split(","):
        if not re.fullmatch(r"-?\d+(:-?\d+)?", word.strip()):
            raise ConfigError(f"{option} {text}: must be integers, as 2,3")
        numbers = [int(number) for number in word.split(":")]
        found.append(numbers[0] if len(numbers) == 1 else numbers)
    return found[0] if len(found) == 1 and isinstance(found[0], int) else found


def ranges(option: str, text: str) -> list[list[int]]:
    """Return [start, stop] of a box written as "-1:7,0:9". Raises ConfigError."""
    pairs = [re.fullmatch(r"(-?\d+):(-?\d+)", word.strip()) for word in text.split(",")]
    found = [(int(pair[1]), int(pair[2])) for pair in pairs if pair is not None]
    if len(found) != len(pairs):
        raise ConfigError(f"{option} {text}: must be start:stop of each axis, as -1:7,0:9")
    return [[start for start, _ in found], [stop for _, stop in found]]


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE.toml",
        help="the plan: keys as the options, also owners and windows, [start, stop] of each rank",
    )  # fmt: skip
    add_options(parser, filters=True)
    parser.add_argument(
        "--window", metavar="-1:7,-1:9", help="of --rank alone, instead of a halo: any box"
    )
    parser.add_argument(
        "--rank", type=int, help="whose window is drawn (default: with the most neighbours)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw a plan of two axes into an image"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the table of a plan, and draw it. Raises UserError."""
    spec = spec_from(arguments)
    windows = spec.geometry()
    described = describe(windows, spec.dtype, spec.trail, spec.packed, "shown")
    rank = rank_of(arguments.rank, described)
    if arguments.png is not None:
        _check_png(arguments.png, windows)
    print(described)
    print(f"rank {rank}: owns {windows.layout.owner(rank)}, window {windows.boxes[rank]}")
    if arguments.png is not None:
        draw(arguments.png, windows, rank)
        print(f"picture: {arguments.png}")


def spec_from(arguments: argparse.Namespace) -> Spec:
    """Return the plan of the file, or of the options, or of options laid over the file's."""
    laid_over: dict[str, Any] = given(arguments)
    if arguments.file is None and "shape" not in laid_over:
        raise ConfigError("darray show: needs FILE.toml or --shape")
    raw = {} if arguments.file is None else read_spec(arguments.file).model_dump(exclude_unset=True)
    source = "darray show" if arguments.file is None else str(arguments.file)
    spec = spec_of(raw | laid_over, source)
    if arguments.window is None:
        return spec
    owners = spec.geometry().layout.owners
    if arguments.rank is None or not 0 <= arguments.rank < len(owners):
        raise ConfigError(f"--window {arguments.window}: needs --rank, of 0..{len(owners) - 1}")
    boxes = [[list(side) for side in box] for box in owners]
    boxes[arguments.rank] = ranges("--window", arguments.window)
    return spec_of(raw | laid_over | {"windows": boxes}, source)


def rank_of(wanted: int | None, described: Description) -> int:
    """Return the rank to show: the one that is wanted, or with the most neighbours."""
    ranks = len(described.ranks)
    if wanted is None:
        return max(range(ranks), key=lambda rank: len(described.ranks[rank].recvs_from))
    if not 0 <= wanted < ranks:
        raise UserError(f"--rank {wanted}: must be 0..{ranks - 1}")
    return wanted


def _check_png(path: Path, windows: Windows) -> None:
    ndim = len(windows.layout.shape)
    if ndim != 2:
        raise UserError(f"--png {path}: draws plans of 2 axes, this one has {ndim}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--png {path}: {path.parent} is no directory that can be written to")
