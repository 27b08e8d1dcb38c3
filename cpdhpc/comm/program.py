"""Programs of ranks: what a schedule makes of a rank, one exchange of messages after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

Array = npt.NDArray[Any]
Result = TypeVar("Result")


class ScheduleError(RuntimeError):
    """A schedule that cannot be carried out: a deadlock, or a message that nobody receives."""


class Exchange(NamedTuple):
    """What a program asks for: one message out, one in, or both at once.

    send_to, recv_from: rank or None; payload: uint8[any], not changed by anyone afterwards
    nbytes: bytes of the message in; no bytes mean no message
    round, recv_chunks, send_chunks: for error messages
    place: uint8[nbytes], where the message in should be put, if that matters
    """

    send_to: int | None
    payload: Array | None
    recv_from: int | None
    nbytes: int
    round: int
    recv_chunks: Sequence[int]
    send_chunks: Sequence[int]
    place: Array | None = None


Program = Generator[Exchange, Array, Result]
Take = Callable[[int], Array]  # size_bytes -> uint8[size_bytes] for a program's payloads


def why_receive(what: str, exchange: Exchange) -> str:
    """Return the reason of a Wait for the message in."""
    return (
        f"{what}: waited {{:.1f}} s for rank {exchange.recv_from}, "
        f"round {exchange.round}, {named(exchange.recv_chunks)}"
    )


def why_send(what: str, exchange: Exchange) -> str:
    """Return the reason of a Wait for the message out."""
    return (
        f"{what}: waited {{:.1f}} s for rank {exchange.send_to} to receive, "
        f"round {exchange.round}, {named(exchange.send_chunks)}"
    )


def named(chunks: Sequence[int]) -> str:
    """Return chunks as errors name them."""
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return f"chunk {chunks[0]}{more}"
