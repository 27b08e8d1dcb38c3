"""The two operations of a plan: the exchange, and the accumulation that is its transpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..ops.moves import MEMORY, Row
from . import moving, slicing
from .kinds import Array
from .moving import Frame, Pack
from .slicing import Source
from .windows import Piece

if TYPE_CHECKING:
    from .channel import Channel
    from .plan import Message, WindowPlan

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Operation:
    """An exchange or its transpose, by slices and by rows of moves.

    sent, received: the messages of a plan; own: what needs no message
    is_copy: whether cells travel and arrive as they are
    """

    name: str
    sent: Callable[[WindowPlan], Sequence[Message]]
    received: Callable[[WindowPlan], Sequence[Message]]
    pack: Callable[[Source, Sequence[Piece], Array, Array], None]
    unpack: Callable[[Source, Sequence[Piece], Array, Array], None]
    own: Callable[[Source, WindowPlan, Array, Array], None]
    pack_rows: Pack
    unpack_rows: Pack
    own_rows: Callable[[Channel, Frame], tuple[Bytes, Iterable[Row]]]
    is_copy: bool


def _show_own(channel: Channel, frame: Frame) -> tuple[Bytes, list[Row]]:
    elements = [channel.element(fill.value) for fill in channel.plan.fills]
    room = np.concatenate([*elements, np.zeros(1, np.uint8)])
    fills = [(fill, i * frame.itemsize) for i, fill in enumerate(channel.plan.fills)]
    return room, list(moving.show_own(frame, channel.plan.local, fills, MEMORY))


def _sum_own(channel: Channel, frame: Frame) -> tuple[Bytes, list[Row]]:
    largest = max((piece.source.size for piece in channel.plan.local), default=0)
    room = np.zeros(frame.itemsize + largest * frame.cell_bytes, np.uint8)
    return room, list(moving.sum_own(frame, channel.plan.local, channel.plan.uncovered, MEMORY))


EXCHANGE = Operation(
    "exchange",
    lambda plan: plan.sends,
    lambda plan: plan.recvs,
    slicing.pack_cells,
    slicing.unpack_cells,
    slicing.show_own,
    moving.pack_cells,
    moving.unpack_cells,
    _show_own,
    is_copy=True,
)
ACCUMULATE = Operation(
    "accumulate",
    lambda plan: plan.recvs,
    lambda plan: plan.sends,
    slicing.pack_sums,
    slicing.add_sums,
    slicing.sum_own,
    moving.pack_sums,
    moving.add_sums,
    _sum_own,
    is_copy=False,
)
