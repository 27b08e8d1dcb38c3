"""Carries out one rank's part of a schedule with a wire: the program that the engine runs."""

from __future__ import annotations

from collections.abc import Sequence

from .chunk import Chunk, Plan
from .engine import Exchange, Program, Take
from .exact import Exact
from .exact_chunk import ExactChunk
from .schedule import Step
from .terms import recv_terms
from .wire import Array, coders


def program(
    plan: Plan, span: tuple[int, int], rank: int, x: Array, out: Array | None, take: Take
) -> Program[int]:
    """Carry out a rank's part in a piece: yield exchanges, add what comes in, write the result.

    span: the piece; x: float32[n], not written; out: float32[n] for the result, or None where
    another rank of this process writes it; take: for payloads
    Returns how many values of the result are not finite; 0 for a raw wire.
    """
    count = plan.schedule.chunks(plan.ranks)
    sent = coders(plan.wire, span, count, plan.sent_shifts, take)
    result = coders(plan.wire.of(plan.ranks), span, count, plan.result_shifts, take)
    kind = ExactChunk if isinstance(plan.wire, Exact) else Chunk
    chunks = [
        kind(plan, rank, i, *each, x, out) for i, each in enumerate(zip(sent, result, strict=True))
    ]
    for number, step in enumerate(plan.schedule.steps(rank, plan.ranks)):
        terms = recv_terms(plan.schedule, step, number, rank, plan.ranks)
        received = yield _exchange(chunks, step, number, terms)
        if step.recv_from is not None:
            chunks[step.recv_chunk].incoming(step.kind, step.recv_from, received, terms)
    return sum(each.write() for each in chunks)


def _exchange(chunks: Sequence[Chunk], step: Step, number: int, terms: int) -> Exchange:
    payload = None if step.send_to is None else chunks[step.send_chunk].outgoing(step.kind)
    chunk = chunks[step.recv_chunk]
    return Exchange(
        send_to=step.send_to,
        payload=payload,
        recv_from=step.recv_from,
        nbytes=chunk.incoming_bytes(step.kind, terms),
        round=number,
        recv_chunk=step.recv_chunk,
        send_chunk=step.send_chunk,
        place=chunk.place if step.kind == "copy" else None,
    )
