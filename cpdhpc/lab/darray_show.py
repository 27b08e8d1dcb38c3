"""Grids with halos as options and tables say them: what they cost and look like. Sends nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from .. import store
from ..config import ConfigError, Section, UserError, validate
from ..darray.describe import Description, describe, packed_wire
from ..darray.layout import Box, Layout
from ..darray.windows import MODES, Constant, Mode, Windows, parse_boundary
from ..methods import nearest, suggest
from ..ops.payloads import Packed

MOST_RANKS = 4096  # in a table; geometry of more takes minutes
CUT = "none"  # instead of a boundary mode: windows end where the domain ends


class HaloSpec(Section):
    """A grid of ranks, each with a window of its own cells and a halo around them.

    shape: cells of the domain; procs: ranks along each axis
    halo: cells around the owned box, a number, one for each axis, or [below, above] for each
    boundary: a mode or one for each axis: "none" (windows are cut), "constant:VALUE", or a name
    dtype: NumPy's; trail: further axes; wire: "raw" or a format
    """

    shape: list[int] = Field(min_length=1)
    procs: list[int] | None = None
    halo: int | list[int | list[int]] = 0
    boundary: str | list[str] = "zero"
    dtype: str = "float32"
    trail: list[int] = Field(default=[])
    wire: str = "raw"

    @model_validator(mode="after")
    def _check(self) -> HaloSpec:
        try:
            np.dtype(self.dtype)
        except TypeError:
            known = [name for name in np.sctypeDict if isinstance(name, str)]
            meant = " or ".join(nearest(self.dtype, known)[:1])
            said = f"did you mean {meant}?" if meant else "is no dtype of NumPy"
            raise ValueError(f"dtype={self.dtype!r}: {said}") from None
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
        return packed_wire(self.wire)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The boundary mode of each axis; of axes where windows are cut, one that is not met."""
        names = self._names()
        return parse_boundary([_mode("zero" if n == CUT else n) for n in names], len(self.shape))

    def _names(self) -> list[str]:
        names = self.boundary
        if isinstance(names, str):
            return [names] * len(self.shape)
        if len(names) != len(self.shape):
            raise ValueError(f"boundary={names}: needs one mode, or {len(self.shape)}")
        return names

    @property
    def widths(self) -> list[tuple[int, int]]:
        """Return the cells of the halo below and above, for each axis."""
        each = [self.halo] * len(self.shape) if isinstance(self.halo, int) else self.halo
        pairs = [(w, w) if isinstance(w, int) else tuple(w) for w in each]
        if len(pairs) != len(self.shape) or any(len(p) != 2 or min(p) < 0 for p in pairs):
            raise ValueError(
                f"halo={self.halo}: needs a number, 0 or more, or one or two for each axis"
            )
        return pairs  # type: ignore[return-value]

    def geometry(self) -> Windows:
        """Return the layout and all ranks' windows. Raises ValueError where they do not fit."""
        layout = Layout.grid(self.shape, self.procs or [1] * len(self.shape))
        boxes = [box if box.empty else self._window(box) for box in layout.owners]
        return Windows(layout, boxes, self.modes)

    def _window(self, box: Box) -> Box:
        axes = []
        for n, name, ends, widths in zip(
            self.shape, self._names(), zip(*box, strict=True), self.widths, strict=True
        ):
            start, stop = ends[0] - widths[0], ends[1] + widths[1]
            axes.append((max(start, 0), min(stop, n)) if name == CUT else (start, stop))
        return Box(*zip(*axes, strict=True))


def _mode(name: str) -> Mode:
    word, _, value = name.partition(":")
    if word != "constant":
        if name not in MODES:
            names = (CUT, *MODES, "constant:VALUE")
            raise ValueError(f"boundary={name!r}: {suggest(name, names)}")
        return name
    try:
        return Constant(float(value))
    except ValueError:
        raise ValueError(f"boundary={name!r}: must be constant:VALUE, a number") from None


def spec_of(raw: dict[str, Any], source: str) -> HaloSpec:
    """Return what a table says, as keys of HaloSpec. Raises ConfigError, naming the source."""
    try:
        return validate(HaloSpec, raw, source)
    except (TypeError, IndexError) as error:
        raise ConfigError(f"{source}: {error}") from None


OPTIONS = {  # option -> (its form, what it is)
    "shape": ("N,...", "cells of the domain along each axis, as 12,16"),
    "procs": ("N,...", "ranks along each axis, as 2,3"),
    "halo": ("N,...", "cells around each rank's box, as 1 or 1,0:2: below:above where they differ"),
    "boundary": ("MODE,...", "for all axes, or for each: none (windows end with the domain), "
                 f"constant:VALUE, {', '.join(MODES)}; default: zero"),
    "trail": ("N,...", "further axes of the arrays, which are not split"),
    "dtype": ("NAME", "of the cells, as NumPy names it"),
    "wire": ("NAME", "raw, or a format in which float32 cells travel"),
}  # fmt: skip
WORDS = ("boundary", "dtype", "wire")  # options that are words; the others are integers
LISTS = ("shape", "procs", "trail")  # options that are lists even if they have one number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say a HaloSpec."""
    for name, (form, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=form, help=text)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of HaloSpec that options say. Raises ConfigError."""
    texts = {name: getattr(arguments, name) for name in OPTIONS}
    return parsed({name: text for name, text in texts.items() if text is not None})


def parsed(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return keys of HaloSpec, whose values are texts as options have. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, text in texts.items():
        values: list[Any] = text.split(",") if text else []
        if name not in WORDS:
            values = [_integers(f"--{name} {text}", word) for word in values]
        single = len(values) == 1 and name not in LISTS and not isinstance(values[0], list)
        found[name] = values[0] if single else values
    return found


def _integers(option: str, word: str) -> int | list[int]:
    """Return 2 of "2", [1, 2] of "1:2"."""
    if not re.fullmatch(r"-?\d+(:-?\d+)?", word.strip()):
        raise ConfigError(f"{option}: must be integers, as 2,3")
    numbers = [int(number) for number in word.split(":")]
    return numbers[0] if len(numbers) == 1 else numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_options(parser)
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="whose window is drawn (default: with the most neighbours)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE.png", help="draw a plan of two axes into an image"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the table of a plan, and draw it. Raises UserError."""
    if arguments.shape is None:
        raise ConfigError("darray show: needs --shape")
    asked = given(arguments)
    ranks = prod(n for n in asked.get("procs", ()) if isinstance(n, int))
    if ranks > MOST_RANKS:
        raise UserError(f"--procs {arguments.procs}: {ranks} ranks: at most {MOST_RANKS} are shown")
    spec = spec_of(asked, "darray show")
    windows = spec.geometry()
    described = describe(windows, spec.dtype, spec.trail, spec.packed, "shown")
    rank = _rank_of(arguments.rank, described)
    if arguments.png is not None:
        _check_png(arguments.png, windows)
    print(described)
    print(
        "interior: the cells of one box of the window, halo too, that waits for no message\n"
        "of another rank, as large as cuts leave it; share: of all windows' cells "
        "(docs/reference/darray.md)"
    )
    print(f"rank {rank}: owns {windows.layout.owner(rank)}, window {windows.boxes[rank]}")
    if arguments.png is not None:
        draw(arguments.png, windows, rank)
        print(f"picture: {arguments.png}")


def _rank_of(asked: int | None, described: Description) -> int:
    """Return the rank to show: the one that is asked for, or with the most neighbours."""
    ranks = len(described.ranks)
    if asked is None:
        return max(range(ranks), key=lambda rank: len(described.ranks[rank].recvs_from))
    if not 0 <= asked < ranks:
        raise UserError(f"--rank {asked}: must be 0..{ranks - 1}")
    return asked


def _check_png(path: Path, windows: Windows) -> None:
    ndim = len(windows.layout.shape)
    if ndim != 2:
        raise UserError(f"--png {path}: draws plans of 2 axes, this one has {ndim}")


# Up to eight ranks have a colour each; the first four differ in lightness by 14 of 100 and more.
COLOURS = ("#f9dc6b", "#d9694f", "#7db8e0", "#6d5ba8", "#d7ead0", "#3f8f6f", "#fbc4ab", "#8a8a8a")
Style = dict[str, Any]
PALE = 0.3  # opacity of cells that the window does not show
SIDE_INCHES = 7.0
MOST_LINES = 48  # cells along an axis that are parted by lines
BEYOND: Style = {
    "hatch": "////",
    "edgecolor": "#444444",
}  # shows a cell from beyond the domain's edge
FILLED: Style = {"hatch": "xxx", "edgecolor": "#444444", "facecolor": "white"}
OUTLINE: Style = {"edgecolor": "black", "fill": False}
DASHED: Style = {**OUTLINE, "linewidth": 2.4, "linestyle": "--"}  # of the window


class WindowPart(NamedTuple):
    """Cells of the window that show those of a rank; beyond: where the domain has ended."""

    box: Box
    owner: int
    beyond: bool


def parts_of(windows: Windows, rank: int) -> Iterator[WindowPart]:
    """Yield the parts of a rank's window, but for what is filled."""
    for owner in windows.owners(rank):
        for piece in windows.pieces(owner, rank):
            yield WindowPart(piece.target, owner, not piece.is_itself)


def colours_of(boxes: Sequence[Box]) -> list[str]:
    """Return a colour for each box, all different as far as there are colours.

    Of more, boxes that touch are different in grids; elsewhere, where eight do not suffice, they
    may be alike.
    """
    chosen: list[int] = []
    for i, box in enumerate(boxes):
        around = Box(tuple(a - 1 for a in box.start), tuple(b + 1 for b in box.stop))
        near = [j for j in range(i) if not box.empty and not around.intersect(boxes[j]).empty]
        free = set(range(len(COLOURS))) - {chosen[j] for j in near}
        chosen.append(min(free, key=chosen.count, default=i % len(COLOURS)))
    return [COLOURS[number] for number in chosen]


def draw(path: Path, windows: Windows, rank: int) -> None:
    """Write a picture of all ranks' boxes, with their numbers, and of one rank's window.

    Cells of the window have the full colour of the rank whose they are, others a pale one.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    (top, left), (bottom, right) = around = _around(windows.layout.domain, windows.boxes[rank])
    high, wide = around.shape
    inches = SIDE_INCHES / max(high, wide)
    size = wide * inches + 3.2, max(3.0, high * inches + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _draw_boxes(axes, windows, rank)
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal",  # axis 0 points down
             xlabel="axis 1 (cells)", ylabel="axis 0 (cells)")  # fmt: skip
    if max(high, wide) <= MOST_LINES:
        axes.vlines(range(left, right + 1), top, bottom, "black", linewidth=0.3, alpha=0.35)
        axes.hlines(range(top, bottom + 1), left, right, "black", linewidth=0.3, alpha=0.35)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    shape = " x ".join(map(str, windows.layout.shape))
    title = f"{shape} cells over {windows.layout.ranks} ranks; window of rank {rank}: "
    axes.set_title(title + str(windows.boxes[rank]), fontsize=10)
    handles = _legend(windows, rank)
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
    store.put_figure(path, figure, 120)


def _draw_boxes(axes: Any, windows: Windows, rank: int) -> None:
    """Draw the boxes of all ranks, and the parts of a window over them."""
    window, colours = windows.boxes[rank], colours_of(windows.layout.owners)
    for owner, box in enumerate(windows.layout.owners):
        if not box.empty:
            _cover(axes, box, facecolor=colours[owner], alpha=PALE, zorder=1)
            _cover(axes, box, **OUTLINE, zorder=4)
            rest = max(box.without(window), key=lambda each: min(each.shape), default=box)
            y, x = ((a + b) / 2 for a, b in zip(*rest, strict=True))
            axes.text(x, y, str(owner), ha="center", va="center", fontsize=14, zorder=7)
    for box, owner, beyond in parts_of(windows, rank):
        _cover(axes, box, facecolor=colours[owner], zorder=2, **(BEYOND if beyond else {}))
    for fill in windows.fills(rank):
        _cover(axes, fill.target, **FILLED, zorder=2)
    _cover(axes, window, **DASHED, zorder=5)


def _legend(windows: Windows, rank: int) -> list[Any]:
    """Return what explains the colours, of those that the picture has."""
    from matplotlib.patches import Patch

    colours, parts = colours_of(windows.layout.owners), list(parts_of(windows, rank))
    handles = [Patch(**DASHED, label=f"window of rank {rank}")]
    for owner in sorted({part.owner for part in parts}):
        cells = sum(part.box.size for part in parts if part.owner == owner)
        label = f"shows {cells} cell{'s' * (cells > 1)} of rank {owner}"
        handles.append(Patch(facecolor=colours[owner], label=label))
    if any(part.beyond for part in parts):
        label = "beyond the domain:\nshows a cell of that rank"
        handles.append(Patch(facecolor="white", **BEYOND, label=label))
    if windows.fills(rank):
        handles.append(Patch(**FILLED, label="beyond the domain: filled"))
    return handles


def _around(domain: Box, window: Box) -> Box:
    """Return a box around the domain and the window."""
    boxes = [domain] if window.empty else [domain, window]
    start, stop = (zip(*side, strict=True) for side in zip(*boxes, strict=True))
    return Box(tuple(map(min, start)), tuple(map(max, stop)))


def _cover(axes: Any, box: Box, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    (top, left), (high, wide) = box.start, box.shape
    axes.add_patch(Rectangle((left, top), wide, high, **style))
