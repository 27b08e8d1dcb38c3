"""Arrays of known integers, and what an exchange and an accumulation must make of them.

By remainders, cell by cell, and not by the segments and pieces that plans are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..darray import WindowPlan
from ..darray.boundary import fill_value
from ..darray.verify import cells_shown, flat_index

Array = NDArray[Any]
LARGEST = {True: 30, False: 2}  # by whether cells travel as they are: every format has 0, 1 and 2
FACTORS = 7, 13, 5  # of a cell's number, a window's rank and a further place


def owned_numbers(plan: WindowPlan, trail: Sequence[int], dtype: str) -> Array:
    """Return the integers at the cells that this rank owns."""
    axes = [np.arange(a, max(a, b)) for a, b in zip(*plan.owned, strict=True)]
    return _numbers(flat_index(axes, plan.layout.shape), 0, trail, plan).astype(dtype)


def window_numbers(plan: WindowPlan, rank: int, trail: Sequence[int], dtype: str) -> Array:
    """Return other integers, on the window of a rank."""
    return _on_window(plan, rank, trail).astype(dtype)


def exchanged(plan: WindowPlan, trail: Sequence[int], dtype: str) -> Array:
    """Return what this rank's window must show."""
    axes = [cells_shown(plan, plan.window, axis) for axis in range(plan.window.ndim)]
    wanted = _numbers(flat_index(axes, plan.layout.shape), 0, trail, plan).astype(dtype)
    for axis, mode in enumerate(plan.windows.modes):  # the last axis counts
        value = fill_value(mode)
        if value is not None:
            wanted[(slice(None),) * axis + (axes[axis] < 0,)] = value
    return wanted


def accumulated(plan: WindowPlan, trail: Sequence[int], dtype: str) -> Array:
    """Return the sums that this rank must find at its cells."""
    total = np.zeros((*plan.owned.shape, *trail), np.int64)
    for rank in plan.windows.readers(plan.rank):
        window, values = plan.windows.boxes[rank], _on_window(plan, rank, trail)
        for axis in range(window.ndim):
            shown = cells_shown(plan, window, axis) - plan.owned.start[axis]
            values = _summed(values, axis, shown, plan.owned.shape[axis])
        total += values
    return total.astype(dtype)


def _numbers(index: Array, rank: int, trail: Sequence[int], plan: WindowPlan) -> Array:
    largest = LARGEST[plan.packed is None]
    of_cell, of_rank, of_place = FACTORS
    index = of_cell * index + of_rank * rank
    if trail:
        place = flat_index([np.arange(n) for n in trail], trail)
        index = index.reshape(index.shape + (1,) * len(trail)) + of_place * place
    values: Array = index % (2 * largest + 1) - largest
    return values


def _on_window(plan: WindowPlan, rank: int, trail: Sequence[int]) -> Array:
    shape = plan.windows.boxes[rank].shape
    return _numbers(flat_index([np.arange(n) for n in shape], shape), 1 + rank, trail, plan)


def _summed(values: Array, axis: int, shown: Array, extent: int) -> Array:
    """Return the sums of the values that show each of extent cells along an axis."""
    moved = np.moveaxis(values, axis, 0)
    total = np.zeros((extent, *moved.shape[1:]), np.int64)
    for place, cell in enumerate(shown):
        if 0 <= cell < extent:
            total[cell] += moved[place]
    return np.moveaxis(total, 0, axis)
