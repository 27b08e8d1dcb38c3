"""Random cases of distributed arrays, and what they must give by numpy.pad and NumPy's indexing.

Nothing here uses cpdhpc's geometry: boxes are cut and padded by NumPy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.windows import Constant

PADS = {"zero": "constant", "wrap": "wrap", "reflect": "reflect", "symmetric": "symmetric",
        "edge": "edge"}  # fmt: skip
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = {
    "numpy": ["bool", *INTEGERS, *FLOATS, "bfloat16"],
    "torch": ["bool", *INTEGERS, *FLOATS, "bfloat16", "bfloat16"],
}
EXTENTS = {1: 24, 2: 9, 3: 6, 4: 4}  # axes -> the largest extent
WINDOWS = {"halo": 0.4, "near": 0.3, "own": 0.05, "wide": 0.1, "far": 0.05, "empty": 0.1}
MOST_CELLS = 3000  # of a window
WHOLE_UP_TO = {"float16": 2048, "bfloat16": 256}  # integers are exact; elsewhere far beyond


class Case(NamedTuple):
    """A plan of some ranks, and the arrays that go through it.

    kind: numpy or torch; dtype: by name
    """

    seed: tuple[int, ...]
    layout: Layout
    windows: tuple[Box, ...]
    modes: tuple[Any, ...]
    kind: str
    dtype: str
    trail: tuple[int, ...]

    def rng(self, *more: int) -> np.random.Generator:
        """Random numbers of this case, alike on all ranks."""
        return np.random.default_rng((*self.seed, *more))


def empty_box(rng: np.random.Generator, shape: Sequence[int]) -> Box:
    """A box somewhere that has no cells along one axis or more."""
    start = [int(rng.integers(-2, n + 3)) for n in shape]
    stop = [a + int(rng.integers(0, 3)) for a in start]
    axis = int(rng.integers(len(shape)))
    stop[axis] = start[axis] - int(rng.integers(0, 2))
    return Box(tuple(start), tuple(stop))


def uneven_grid(rng: np.random.Generator, shape: Sequence[int], ranks: int) -> list[Box]:
    """A Cartesian grid with cuts anywhere, so with empty parts too; ranks along random axes."""
    procs, left = [1] * len(shape), ranks
    for prime in (2, 3, 5):
        while left % prime == 0:
            procs[rng.integers(len(shape))] *= prime
            left //= prime
    assert left == 1, "ranks with larger primes are not drawn"
    cuts = [
        [0, *sorted(rng.integers(0, n + 1, p - 1).tolist()), n]
        for n, p in zip(shape, procs, strict=True)
    ]
    places = np.ndindex(*procs)
    return [
        Box(tuple(c[i] for c, i in zip(cuts, place, strict=True)),
            tuple(c[i + 1] for c, i in zip(cuts, place, strict=True)))
        for place in places
    ]  # fmt: skip


def any_boxes(rng: np.random.Generator, shape: Sequence[int], ranks: int) -> list[Box]:
    """The domain cut in two again and again, dealt to ranks anyhow; some get nothing."""
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(int(rng.integers(0, ranks))):
        box = boxes.pop(int(rng.integers(len(boxes))))
        axis = int(rng.integers(len(shape)))
        cut = int(rng.integers(box.start[axis], box.stop[axis] + 1))
        low, high = list(box.stop), list(box.start)
        low[axis] = high[axis] = cut
        boxes += [Box(box.start, tuple(low)), Box(tuple(high), box.stop)]
    while len(boxes) < ranks:
        boxes.append(empty_box(rng, shape))
    return [boxes[i] for i in rng.permutation(ranks)]


def draw_layout(rng: np.random.Generator, shape: tuple[int, ...], ranks: int) -> Layout:
    """A layout of some kind."""
    make = uneven_grid if rng.random() < 0.4 else any_boxes
    return Layout.boxes(shape, make(rng, shape, ranks))


def draw_window(rng: np.random.Generator, shape: Sequence[int], owned: Box) -> Box:
    """A window of some kind: own cells and a halo, anything near, far outside, or nothing."""
    how = rng.choice([*WINDOWS], p=[*WINDOWS.values()])
    if how == "empty":
        return empty_box(rng, shape)
    if how == "own":
        return owned
    ends = []
    for n, a, b in zip(shape, *owned, strict=True):
        if how == "halo":
            ends.append((a - int(rng.integers(0, 3)), max(a, b) + int(rng.integers(0, 4))))
        elif how == "wide":
            ends.append((-int(rng.integers(0, 3 * n)), n + int(rng.integers(0, 3 * n))))
        else:
            start = int(rng.integers(-2 * n, 2 * n)) if how == "near" else int(rng.integers(5 * n))
            ends.append((start, start + int(rng.integers(0, 2 * n + 1))))
    starts, stops = zip(*ends, strict=True)
    return Box(starts, stops)


def draw_mode(rng: np.random.Generator, dtype: str) -> Any:
    """A boundary mode."""
    mode = rng.choice([*PADS, "constant"])
    if mode == "constant":
        values = [1, 2.5, 7] if dtype == "bool" or "int" in dtype else [2.5, -1, np.nan, -np.inf]
        return Constant([*values, 1 + 2j][rng.integers(len(values) + dtype.startswith("complex"))])
    return str(mode)


def draw(seed: Sequence[int], ranks: int) -> Case:
    """The case of a seed for so many ranks."""
    rng = np.random.default_rng((*seed, ranks))
    ndim = int(rng.choice([1, 2, 3, 4], p=[0.25, 0.4, 0.3, 0.05]))
    shape = tuple(rng.integers(1, EXTENTS[ndim] + 1, ndim).tolist())
    layout, windows = draw_layout(rng, shape, ranks), []
    for owned in layout.owners:
        window = draw_window(rng, shape, owned)
        while window.size > MOST_CELLS:
            window = draw_window(rng, shape, owned)
        windows.append(window)
    kind = str(rng.choice(["numpy", "torch"], p=[0.7, 0.3]))
    dtype = str(rng.choice(DTYPES[kind]))
    trail = tuple(rng.integers(0, 4, rng.choice([0, 0, 0, 1, 1, 2])).tolist())
    modes = tuple(draw_mode(rng, dtype) for n in shape)
    return Case((*seed, ranks), layout, tuple(windows), modes, kind, dtype, trail)


def shown(x: np.ndarray, window: Box, modes: Sequence[Any]) -> np.ndarray:
    """The window of a whole array: numpy.pad and indexing, axis after axis."""
    for axis, mode in enumerate(modes):
        start, stop, extent = window.start[axis], window.stop[axis], x.shape[axis]
        before, after = max(0, -start), max(0, stop - extent)
        widths = [(before, after) if i == axis else (0, 0) for i in range(x.ndim)]
        if isinstance(mode, Constant):
            x = np.pad(x, widths, "constant", constant_values=mode.value)
        else:
            x = np.pad(x, widths, PADS[mode])
        x = x.take(range(start + before, max(start, stop) + before), axis)
    return x


def cells_shown(case: Case, rank: int) -> np.ndarray:
    """The number of the domain's cell that each cell of a rank's window shows; -1 for none."""
    numbers = np.arange(np.prod(case.layout.shape)).reshape(case.layout.shape)
    fills = [isinstance(mode, Constant) or mode == "zero" for mode in case.modes]
    modes = [Constant(-1) if fill else m for fill, m in zip(fills, case.modes, strict=True)]
    return shown(numbers, case.windows[rank], modes)


def summed(case: Case, ys: Sequence[np.ndarray]) -> np.ndarray:
    """The transpose: what the windows of all ranks add up to on the whole domain."""
    total = np.zeros((int(np.prod(case.layout.shape)), *case.trail), ys[0].dtype)
    for rank, y in enumerate(ys):
        cells = cells_shown(case, rank)
        np.add.at(total, cells[cells >= 0], y[cells >= 0])
    return total.reshape(case.layout.shape + case.trail)


def own(case: Case, rank: int, whole: np.ndarray) -> np.ndarray:
    """What a rank owns of a whole array."""
    box = case.layout.owners[rank]
    return whole[tuple(map(slice, *box))]
