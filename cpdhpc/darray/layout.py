"""Who owns which cells of a domain, and which cells a sliding filter needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product

import numpy as np

from ..partition import split
from .box import Box, as_box, whole


@dataclass(frozen=True)
class Layout:
    """The boxes that ranks own: disjoint, together the domain; some may be empty.

    shape: cells of the domain along each axis, 1 or more; owners: the box of each rank, empty ones
        moved into the domain, so that they cut arrays of it as all others do
    Made by grid or boxes. Raises ValueError for boxes that overlap, leave cells out or reach out
    of the domain, and names them; TypeError for what is no box.
    """

    shape: tuple[int, ...]
    owners: tuple[Box, ...]

    def __post_init__(self) -> None:
        if not all(hasattr(n, "__index__") for n in self.shape):
            raise TypeError(f"Layout: shape={self.shape}: must hold integers")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"Layout: shape={self.shape}: needs axes, of 1 cell or more each")
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        named = enumerate(self.owners)
        boxes = [as_box(f"Layout: box of rank {i}", box, len(self.shape)) for i, box in named]
        boxes = [_clipped(box, self.shape) if box.empty else box for box in boxes]
        object.__setattr__(self, "owners", tuple(boxes))
        _check_tiling(whole(self.shape), boxes)

    @classmethod
    def grid(cls, shape: Sequence[int], procs: Sequence[int]) -> Layout:
        """Return a Cartesian grid of procs[axis] parts along each axis, as even as can be.

        The last axis of the grid counts fastest; parts are empty where there are more of them
        than cells. Raises ValueError where procs does not fit shape or holds less than 1.
        """
        shape, procs = tuple(shape), tuple(procs)
        if len(shape) != len(procs) or min(procs, default=1) < 1:
            raise ValueError(f"Layout: procs={procs}: needs 1 or more for each axis of {shape}")
        cuts = [[split(n, p, i) for i in range(p)] for n, p in zip(shape, procs, strict=True)]
        return cls(shape, tuple(Box(*zip(*part, strict=True)) for part in product(*cuts)))

    @classmethod
    def boxes(cls, shape: Sequence[int], boxes: Sequence[Box]) -> Layout:
        """Return the layout of any disjoint boxes that tile the domain, one for each rank."""
        return cls(tuple(shape), tuple(boxes))

    @classmethod
    def at(cls, shape: Sequence[int], root: int, ranks: int) -> Layout:
        """Return the layout in which one rank owns everything."""
        nothing = Box((0,) * len(shape), (0,) * len(shape))
        boxes = [whole(shape) if rank == root else nothing for rank in range(ranks)]
        return cls(tuple(shape), tuple(boxes))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.owners)

    @property
    def domain(self) -> Box:
        """All cells."""
        return whole(self.shape)

    def owner(self, rank: int) -> Box:
        """Return the box that a rank owns."""
        return self.owners[rank]

    @property
    def digest(self) -> str:
        """A hash of shape and boxes, the same for equal layouts."""
        return sha256(repr((self.shape, self.owners)).encode()).hexdigest()


def _clipped(box: Box, shape: Sequence[int]) -> Box:
    """Return an empty box as one of the domain."""
    start = tuple(min(max(a, 0), n) for a, n in zip(box.start, shape, strict=True))
    stop = tuple(min(max(a, b), n) for a, b, n in zip(start, box.stop, shape, strict=True))
    return Box(start, stop)


def _check_tiling(domain: Box, boxes: Sequence[Box]) -> None:
    """Raise ValueError unless the boxes are disjoint, inside the domain and together all of it."""
    for rank, box in enumerate(boxes):
        if not domain.contains(box):
            raise ValueError(f"Layout: rank {rank} has {box}: reaches out of the domain {domain}")
    _check_disjoint(boxes)
    if sum(box.size for box in boxes) == domain.size:
        return
    left = [domain]
    for box in boxes:
        left = [rest for each in left for rest in each.without(box)]
    cells = sum(each.size for each in left)
    raise ValueError(f"Layout: nobody owns {left[0]} of {domain}, {cells} cells in all")


def _check_disjoint(boxes: Sequence[Box]) -> None:
    """Raise ValueError, naming two ranks, where boxes overlap."""
    if not boxes:
        return
    starts = np.array([box.start for box in boxes])
    stops = np.array([box.stop for box in boxes])
    filled = np.asarray((stops > starts).all(axis=1))
    for rank in np.flatnonzero(filled).tolist():
        lows = np.maximum(starts[rank], starts[rank + 1 :])
        overlap = (lows < np.minimum(stops[rank], stops[rank + 1 :])).all(axis=1)
        overlap &= filled[rank + 1 :]
        if overlap.any():
            other = rank + 1 + int(np.flatnonzero(overlap)[0])
            raise ValueError(
                f"Layout: ranks {rank} and {other} both own "
                f"{boxes[rank].intersect(boxes[other])}: {boxes[rank]} and {boxes[other]} overlap"
            )


PerAxis = int | Sequence[int]


def receptive(
    box: Box, size: PerAxis, step: PerAxis = 1, pad: PerAxis = 0, dilation: PerAxis = 1
) -> Box:
    """Return the window that the outputs in box need: [lo step - pad, (hi - 1) step - pad + reach).

    reach = dilation (size - 1) + 1 cells; each argument is one number, or one for each axis
    Raises ValueError where size, step or dilation is less than 1 or their number does not fit.
    """
    given = {"size": size, "step": step, "pad": pad, "dilation": dilation}
    numbers = {name: _each_axis(name, value, box.ndim) for name, value in given.items()}
    for name in ("size", "step", "dilation"):
        if min(numbers[name]) < 1:
            raise ValueError(f"receptive: {name}={given[name]}: must be 1 or more")
    axes = list(zip(box.start, box.stop, *numbers.values(), strict=True))
    start = tuple(lo * t - p for lo, _, _, t, p, _ in axes)
    stop = tuple((hi - 1) * t - p + d * (s - 1) + 1 for _, hi, s, t, p, d in axes)
    return Box(start, start if box.empty else stop)


def _each_axis(name: str, value: PerAxis, ndim: int) -> tuple[int, ...]:
    numbers = [int(n) for n in np.ravel(value)] * (ndim if np.ndim(value) == 0 else 1)
    if len(numbers) != ndim or np.ndim(value) > 1:
        raise ValueError(f"receptive: {name}={value}: needs one number, or {ndim}, one an axis")
    return tuple(numbers)
