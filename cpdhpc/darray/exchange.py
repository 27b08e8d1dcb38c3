"""Exchanges over a plan: pack, send, receive, unpack; and the transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.ranks import Wait
from .windows import Piece

if TYPE_CHECKING:
    from .plan import Message, WindowPlan

Array = Any


class Handle:
    """An exchange under way; finish, once on each rank, gives the array on the window."""

    def __init__(self, plan: WindowPlan, x: Array, out: Array) -> None:
        self._plan, self.out = plan, out
        trail, world = x.shape[plan.owned.ndim :], plan.world
        self._recvs = [_Buffer(plan, m, trail, x.dtype) for m in plan.recvs]
        self._sends = [_Buffer(plan, m, trail, x.dtype) for m in plan.sends]
        for each in self._recvs:
            each.wait = world.irecv(each.rank, plan.rank, each.bytes)
        for each in self._sends:
            for piece, values in each.pieces():
                values[...] = x[piece.source.slices(plan.owned.start)]
            each.wait = world.isend(plan.rank, each.rank, each.bytes)
        for fill in plan.fills:
            out[fill.target.slices(plan.window.start)] = fill.value
        for piece in plan.local:
            _show(plan, piece, x[piece.source.slices(plan.owned.start)], out)

    def finish(self) -> Array:
        """Wait for the messages and return the array on the window. Collective."""
        plan = self._plan
        for each in self._recvs:
            _wait(plan, each, "exchange")
            for piece, values in each.pieces():
                _show(plan, piece, values, self.out)
        for each in self._sends:
            _wait(plan, each, "exchange")
        return self.out


class _Buffer:
    """A message of cells: what is packed, in the order of the pieces."""

    def __init__(
        self, plan: WindowPlan, message: Message, trail: tuple[int, ...], dtype: Any
    ) -> None:
        self.rank, self.message, self.trail = message.rank, message, trail
        self.values = np.empty((message.cells, *trail), dtype)
        self.bytes = self.values.reshape(-1).view(np.uint8)
        self.wait: list[Any] = []

    def pieces(self) -> Any:
        start = 0
        for piece in self.message.pieces:
            cells = self.values[start : start + piece.source.size]
            yield piece, cells.reshape(piece.source.shape + self.trail)
            start += piece.source.size


def _wait(plan: WindowPlan, buffer: _Buffer, what: str) -> None:
    reason = f"{what} of plan {plan.name!r}: waited {{:.1f}} s for rank {buffer.rank}"
    plan.world.wait_any([Wait(buffer.wait, plan.rank, reason)])


def _flips(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(None, None, -1) if step < 0 else slice(None) for step in piece.steps)


def _show(plan: WindowPlan, piece: Piece, values: Array, out: Array) -> None:
    out[piece.target.slices(plan.window.start)] = values[_flips(piece)]


def begin(plan: WindowPlan, x: Array, out: Array) -> Handle:
    """Start an exchange."""
    if x.shape[: plan.owned.ndim] != plan.owned.shape:
        raise ValueError(f"exchange: x has shape {x.shape}: must begin with {plan.owned.shape}")
    shape = plan.window.shape + x.shape[plan.owned.ndim :]
    if out is None:
        out = np.empty(shape, x.dtype)
    if out.shape != shape or out.dtype != x.dtype:
        raise ValueError(f"exchange: out is {out.dtype}{out.shape}: must be {x.dtype}{shape}")
    return Handle(plan, x, out)


def accumulate(plan: WindowPlan, y: Array, out: Array) -> Array:
    """Return the sums of cells of windows at the owned cells."""
    if y.shape[: plan.owned.ndim] != plan.window.shape:
        raise ValueError(f"accumulate: y has shape {y.shape}: must begin with {plan.window.shape}")
    trail, world = y.shape[plan.owned.ndim :], plan.world
    shape = plan.owned.shape + trail
    if out is None:
        out = np.empty(shape, y.dtype)
    if out.shape != shape or out.dtype != y.dtype:
        raise ValueError(f"accumulate: out is {out.dtype}{out.shape}: must be {y.dtype}{shape}")
    came = [_Buffer(plan, m, trail, y.dtype) for m in plan.sends]
    gone = [_Buffer(plan, m, trail, y.dtype) for m in plan.recvs]
    for each in came:
        each.wait = world.irecv(each.rank, plan.rank, each.bytes)
    for each in gone:
        for piece, values in each.pieces():
            values[...] = _gathered(plan, piece, y)
        each.wait = world.isend(plan.rank, each.rank, each.bytes)
    out[...] = 0
    for piece in plan.local:
        out[piece.source.slices(plan.owned.start)] += _gathered(plan, piece, y)
    for each in came:
        _wait(plan, each, "accumulate")
        for piece, values in each.pieces():
            out[piece.source.slices(plan.owned.start)] += values
    for each in gone:
        _wait(plan, each, "accumulate")
    return out


def _gathered(plan: WindowPlan, piece: Piece, y: Array) -> Array:
    """Return the cells of a window that show a piece, in the source's shape: sums along steps 0."""
    values = y[piece.target.slices(plan.window.start)][_flips(piece)]
    for axis, step in enumerate(piece.steps):
        if step == 0:
            values = values.sum(axis=axis, keepdims=True, dtype=y.dtype)
    return values
