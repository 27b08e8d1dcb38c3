"""Carries out one rank's part of a schedule with a wire: the program that the engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from .chunk import Chunk, Piece, Plan
from .exact import Exact
from .exact_chunk import ExactChunk
from .program import Exchange, Program, Take
from .step import Layout, Step
from .wire import Array, coders

ALIGNED_BYTES = 16  # kernels read and write payloads word by word


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
            parts = _parts(plan, received, _sizes(into, step.recv_terms), take)
            for each, part, terms in zip(into, parts, step.recv_terms, strict=True):
                each.incoming(step.kind, step.recv_from, part, terms)
    return sum(each.write() for each in chunks)


def _exchange(chunks: Sequence[Chunk], step: Step, number: int, take: Take) -> Exchange:
    into = [chunks[i] for i in step.recv_chunks]
    out = [chunks[i] for i in step.send_chunks]
    return Exchange(
        send_to=step.send_to,
        payload=None if step.send_to is None else _message(out, step, take),
        recv_from=step.recv_from,
        nbytes=sum(_sizes(into, step.recv_terms)),
        round=number,
        recv_chunks=step.recv_chunks,
        send_chunks=step.send_chunks,
        place=into[0].place if step.kind == "copy" and len(into) == 1 else None,
    )


def _sizes(chunks: Sequence[Chunk], terms: Sequence[int]) -> list[int]:
    """Return the bytes of each payload in a message."""
    return [each.sent.of(m).size_bytes for each, m in zip(chunks, terms, strict=True)]


def _message(chunks: Sequence[Chunk], step: Step, take: Take) -> Array:
    """Return the payloads of chunks one after another."""
    if len(chunks) == 1:
        return chunks[0].outgoing(step.kind)
    sizes = _sizes(chunks, step.send_terms)
    message = take(sum(sizes))
    for each, size, end in zip(chunks, sizes, accumulate(sizes), strict=True):
        place = message[end - size : end]
        payload = each.outgoing(step.kind, None if (end - size) % ALIGNED_BYTES else place)
        if payload is not place:
            each.plan.copy(place, payload)
    return message


def _parts(plan: Plan, message: Array, sizes: Sequence[int], take: Take) -> Iterator[Array]:
    """Yield the payloads of these sizes that a message holds, each where kernels can read it."""
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        part = message[end - size : end]
        if (end - size) % ALIGNED_BYTES:
            aligned = take(size)
            plan.copy(aligned, part)
            part = aligned
        yield part
