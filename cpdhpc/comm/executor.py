"""Carries out one rank's part of a schedule with a wire: the program that the engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from .chunk import Chunk, Piece, Plan
from .engine import Exchange, Program, Take
from .exact import Exact
from .exact_chunk import ExactChunk
from .step import Layout, Step
from .wire import Array, coders

ALIGNED_BYTES = 16  # kernels read payloads word by word


def program(
    plan: Plan, piece: Piece, rank: int, x: Array, out: Array | None, take: Take
) -> Program[int]:
    """Carry out a rank's part in a piece: yield exchanges, add what comes in, write the result.

    x: float32[n], not written; out: float32[n] for the result, or None where another rank of this
    process writes it; take: for payloads
    Returns how many values of the result are not finite; 0 for a raw wire.
    """
    layout, span = Layout(plan.nodes, piece.number), (piece.start, piece.stop)
    count = plan.schedule.chunks(layout)
    sent = coders(plan.wire, span, count, plan.sent_shifts, take)
    result = coders(plan.wire.of(layout.ranks), span, count, plan.result_shifts, take)
    kind = ExactChunk if isinstance(plan.wire, Exact) else Chunk
    chunks = [
        kind(plan, rank, i, *each, x, out) for i, each in enumerate(zip(sent, result, strict=True))
    ]
    for number, step in enumerate(plan.schedule.steps(rank, layout)):
        received = yield _exchange(chunks, step, number, take)
        if step.recv_from is not None:
            into = [chunks[i] for i in step.recv_chunks]
            parts = _parts(received, _sizes(into, step), take)
            for each, part, terms in zip(into, parts, step.recv_terms, strict=True):
                each.incoming(step.kind, step.recv_from, part, terms)
    return sum(each.write() for each in chunks)


def _exchange(chunks: Sequence[Chunk], step: Step, number: int, take: Take) -> Exchange:
    into = [chunks[i] for i in step.recv_chunks]
    out = [chunks[i].outgoing(step.kind) for i in step.send_chunks]
    return Exchange(
        send_to=step.send_to,
        payload=None if step.send_to is None else _message(out, take),
        recv_from=step.recv_from,
        nbytes=sum(_sizes(into, step)),
        round=number,
        recv_chunks=step.recv_chunks,
        send_chunks=step.send_chunks,
        place=into[0].place if step.kind == "copy" and len(into) == 1 else None,
    )


def _sizes(into: Sequence[Chunk], step: Step) -> list[int]:
    """Return the bytes of each payload in the message that comes in."""
    return [
        each.sent.of(terms).size_bytes for each, terms in zip(into, step.recv_terms, strict=True)
    ]


def _message(payloads: Sequence[Array], take: Take) -> Array:
    """Return payloads one after another."""
    if len(payloads) == 1:
        return payloads[0]
    ends = list(accumulate(payload.size for payload in payloads))
    message = take(ends[-1])
    for payload, end in zip(payloads, ends, strict=True):
        message[end - payload.size : end] = payload
    return message


def _parts(message: Array, sizes: Sequence[int], take: Take) -> Iterator[Array]:
    """Yield the payloads of these sizes that a message holds, each where kernels can read it."""
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        part = message[end - size : end]
        if (end - size) % ALIGNED_BYTES:
            aligned = take(size)
            aligned[:] = part
            part = aligned
        yield part
