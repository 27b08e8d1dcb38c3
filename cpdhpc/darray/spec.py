"""Plans written down: shape, ranks, windows and boundary, from a file or the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from ..comm.wire import Packed, parse_wire
from ..config import ConfigError, Section, read_toml, validate
from ..formats import INTEGERS, Cast
from .boundary import MODES, Constant, Mode, parse_boundary
from .box import Box
from .layout import Layout, receptive
from .windows import Windows

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
