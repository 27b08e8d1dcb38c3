"""The collectives as programs: each yields steps of messages, and reduces between them.

All tensors are contiguous and in the memory of the host. Each value of a result is computed by one
rank or, in the order of ranks, by all, so that all ranks have the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from .channel import NEAR, Channel, Link, Memory, Mismatch, Moves, cut
from .progress import Step, Waits
from .reductions import Reduction

Tensor = torch.Tensor

PIECE_BYTES = 1 << 21  # of a chunk, reduced at a time while it is in the cache
WHOLE_BYTES = 1 << 18  # received from others: up to here each rank reduces all values itself
MOST_KEPT = 16  # pieces
ALIGN = 64  # elements: chunks begin at multiples
SPREAD_BYTES = 1 << 18  # least size of a broadcast in chunks that ranks forward
TREE = 3  # least number of ranks for that


class Scratch:
    """Memory that calls reuse, as the system clears each page of new memory.

    Memory of a failed call is not reused: a late message may still write to it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size_bytes: int) -> Tensor:
        """Return at least so many bytes."""
        if size_bytes <= PIECE_BYTES:
            try:
                return self._free.pop()
            except IndexError:
                size_bytes = PIECE_BYTES
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def give(self, held: Sequence[Tensor]) -> None:
        """Keep memory for later calls."""
        room = MOST_KEPT - len(self._free)
        self._free += [each for each in held if len(each) == PIECE_BYTES][: max(0, room)]


SCRATCH = Scratch()


def chunks(count: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of each rank's share of count elements."""
    each = -(-count // ranks)
    each = -(-each // ALIGN) * ALIGN
    return [(min(i * each, count), min((i + 1) * each, count)) for i in range(ranks)]


def folded(size_bytes: int, link: Link) -> bool:
    """Whether values accompany the text of their call, and each rank reduces all of them."""
    return size_bytes <= link.room_bytes and size_bytes * (link.size - 1) <= WHOLE_BYTES


def fold_inline(
    link: Link, found: Sequence[Memory], mine: Tensor, reduction: Reduction, out: Tensor
) -> None:
    """Reduce mine, and the other ranks' values that accompanied the text of a call, into out."""
    count = mine.numel()
    if count:
        operands = [
            mine if rank == link.rank else torch.frombuffer(each, dtype=mine.dtype, count=count)
            for rank, each in enumerate(found)
        ]
        reduction.fold(operands, out)


def take_inline(data: Memory, out: Tensor, link: Link) -> None:
    """Set out to the values that accompanied the text of a call."""
    if out.numel():
        link.memory(out)[:] = memoryview(data)[: out.nbytes]


def one_by_one(given: Sequence[Waits]) -> Waits:
    """Run programs one after another."""
    for program in given:
        yield from program


def barrier(link: Link, text: str) -> Waits:
    """Wait for all ranks."""
    yield from link.agree(text)


def all_reduce(
    link: Link, text: str, xs: Sequence[Tensor], reductions: Sequence[Reduction]
) -> Waits:
    """Reduce flat tensors in place."""
    if len(xs) == 1 and folded(xs[0].nbytes, link):
        (x,), (reduction,) = xs, reductions
        found = yield from link.agree(text, link.memory(x))
        fold_inline(link, found, x, reduction, x)
        return
    yield from link.agree(text)
    for x, reduction in zip(xs, reductions, strict=True):
        if x.nbytes * (link.size - 1) <= WHOLE_BYTES:
            yield from _reduce_whole(link, x, reduction)
        else:
            yield from _reduce_chunks(link, x, chunks(x.numel(), link.size), reduction, x)


def _reduce_whole(link: Link, x: Tensor, reduction: Reduction) -> Waits:
    """Reduce a tensor in place; every rank reduces all values."""
    held = [SCRATCH.take(x.nbytes) for _ in link.others]
    operands = [each.view(x.dtype)[: x.numel()] for each in held]
    operands.insert(link.rank, x)
    moves = link.step()
    _to_all(moves, link, operands, x)
    yield moves
    reduction.fold(operands, x)
    SCRATCH.give(held)


def _to_all(moves: Moves, link: Link, outs: Sequence[Tensor], x: Tensor) -> None:
    """Add the messages of a tensor to all other ranks, and of theirs to outs, by rank."""
    for rank in link.others:
        moves.receive(link.memory(outs[rank]), rank)
    given = link.memory(x)
    for rank in link.others:
        moves.send(given, rank)


def _reduce_chunks(
    link: Link,
    x: Tensor,
    bounds: Sequence[tuple[int, int]],
    reduction: Reduction | Unchanged,
    target: Tensor | None,
    own: Tensor | None = None,
) -> Waits:
    """Reduce this rank's chunk of x, in pieces, into own; and send pieces to the others' target.

    target: x itself, if all ranks are to have all chunks; None: each has only its own
    own: the result's memory; None: the chunk of x
    """
    size, rank, item = link.size, link.rank, x.element_size()
    given = link.memory(x)
    longest = max(stop - start for start, stop in bounds)
    each = max(1, min(longest, PIECE_BYTES // item))
    start, stop = bounds[rank]
    into = x[start:stop] if own is None else own
    count = -(-longest // each)
    held = [SCRATCH.take(each * item) for _ in range(min(2, count) * (size - 1))]
    scratch = [
        {
            other: held[turn * (size - 1) + i].view(x.dtype)[:each]
            for i, other in enumerate(link.others)
        }
        for turn in range(min(2, count))
    ]

    def piece(of: int, number: int) -> slice:
        """Return the elements of a chunk's piece."""
        first, last = bounds[of]
        return slice(min(first + number * each, last), min(first + (number + 1) * each, last))

    def bytes_of(part: slice) -> slice:
        return slice(part.start * item, part.stop * item)

    def exchange(number: int) -> Moves:
        """Start to send the pieces of other ranks' chunks, and to receive this rank's."""
        moves, here = link.step(), piece(rank, number)
        count = here.stop - here.start
        if count:
            for other in link.others:
                moves.receive(link.memory(scratch[number % 2][other][:count]), other)
        for other in link.others:
            moves.send(given[bytes_of(piece(other, number))], other)
        return moves

    handed: list[Moves] = []
    coming = exchange(0) if count else link.step()
    for number in range(count):
        yield coming
        if number + 1 < count:
            coming = exchange(number + 1)
        here = piece(rank, number)
        if here.start < here.stop:
            mine = x[here]
            got = scratch[number % 2]
            operands = [mine if r == rank else got[r][: len(mine)] for r in range(size)]
            reduction.fold(operands, into[here.start - start : here.stop - start])
        if target is not None:
            moves, done = link.step(), given[bytes_of(here)]
            for other in link.others:
                moves.receive(given[bytes_of(piece(other, number))], other)
            for other in link.others:
                moves.send(done, other)
            handed.append(moves)
    for moves in handed:
        if moves.requests:
            yield moves
    SCRATCH.give(held)


def reduce_scatter(
    link: Link,
    text: str,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    reductions: Sequence[Reduction],
) -> Waits:
    """Reduce flat tensors; each rank gets its equal share of the result."""
    if len(outs) == 1 and folded(ins[0].nbytes, link):
        (out,), (x,), (reduction,) = outs, ins, reductions
        count, given = out.numel(), link.memory(x)
        parts = [given[r * out.nbytes : (r + 1) * out.nbytes] for r in range(link.size)]
        found = yield from link.agree(text, parts=parts)
        mine = x[link.rank * count : (link.rank + 1) * count]
        fold_inline(link, found, mine.clone(), reduction, out)
        return
    yield from link.agree(text)
    for out, x, reduction in zip(outs, ins, reductions, strict=True):
        count = out.numel()
        bounds = [(rank * count, (rank + 1) * count) for rank in range(link.size)]
        yield from _scatter_sums(link, x, bounds, reduction, out)


def _scatter_sums(
    link: Link, x: Tensor, bounds: Sequence[tuple[int, int]], reduction: Reduction, out: Tensor
) -> Waits:
    """Reduce this rank's chunk of x into out; x is not changed."""
    yield from _reduce_chunks(link, x, bounds, Unchanged(reduction, link.rank), None, out)


class Unchanged:
    """A reduction that does not overwrite this rank's operand."""

    def __init__(self, reduction: Reduction, rank: int) -> None:
        self._reduction, self._rank = reduction, rank

    def fold(self, operands: Sequence[Tensor], out: Tensor) -> None:
        """Reduce operands, in their order, into out."""
        given = list(operands)
        if self._rank == 0 and len(given) > 2:
            out.copy_(given[0])
            given[0] = out
        self._reduction.fold(given, out)


def reduce_scatter_uneven(
    link: Link, text: str, out: Tensor, x: Tensor, counts: Sequence[int], reduction: Reduction
) -> Waits:
    """Reduce a flat tensor; each rank gets counts[rank] elements of the result."""
    if len(set(counts)) == 1:
        yield from reduce_scatter(link, text, [out], [x], [reduction])
        return
    yield from link.agree(text)
    ends = list(accumulate(counts))
    bounds = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    yield from _scatter_sums(link, x, bounds, reduction, out)


def all_gather(
    link: Link, text: str, outs: Sequence[Sequence[Tensor]], ins: Sequence[Tensor]
) -> Waits:
    """Send each rank's tensors to all: outs[i][rank] is ins[i] of that rank."""
    if len(ins) == 1 and max([each.nbytes for each in outs[0]]) <= link.room_bytes:
        found = yield from link.agree(text, link.memory(ins[0]))
        for each, came in zip(outs[0], found, strict=True):
            take_inline(came, each, link)
        return
    yield from link.agree(text)
    moves = link.step()
    for out, x in zip(outs, ins, strict=True):
        _to_all(moves, link, out, x)
        if out[link.rank].data_ptr() != x.data_ptr():
            out[link.rank].copy_(x)
    yield moves


def broadcast(link: Link, text: str, xs: Sequence[Tensor], root: int) -> Waits:
    """Send the root's tensors to all."""
    if len(xs) == 1 and xs[0].nbytes <= link.room_bytes:
        x = xs[0]
        found = yield from link.agree(text, link.memory(x) if link.rank == root else b"")
        if link.rank != root:
            take_inline(found[root], x, link)
        return
    yield from link.agree(text)
    for x in xs:
        if link.size >= TREE and x.nbytes >= SPREAD_BYTES:
            yield from _spread(link, x, root)
        else:
            yield from _down_a_tree(link, x, root)


def _down_a_tree(link: Link, x: Tensor, root: int) -> Waits:
    """Send the root's tensor to all, along a binomial tree."""
    place = (link.rank - root) % link.size
    memory, span = link.memory(x), 1
    while span < link.size:
        moves = link.step()
        if place < span and place + span < link.size:
            moves.send(memory, (link.rank + span) % link.size)
        elif span <= place < 2 * span:
            moves.receive(memory, (link.rank - span) % link.size)
        yield moves
        span *= 2


def _spread(link: Link, x: Tensor, root: int) -> Waits:
    """Send the root's tensor to all: a chunk to each rank, which forwards it to the others."""
    bounds = [(a * x.element_size(), b * x.element_size()) for a, b in chunks(x.numel(), link.size)]
    memory, moves = link.memory(x), link.step()
    parts = [memory[start:stop] for start, stop in bounds]
    if link.rank == root:
        for rank in link.others:
            moves.send(parts[rank], rank)
        for rank in link.others:
            moves.send(parts[root], rank)
        yield moves
        return
    moves.receive(parts[link.rank], root)
    yield moves
    moves = link.step()
    moves.receive(parts[root], root)
    for rank in link.others:
        if rank != root:
            moves.receive(parts[rank], rank)
            moves.send(parts[link.rank], rank)
    yield moves


def reduce(link: Link, text: str, x: Tensor, root: int, reduction: Reduction, out: Tensor) -> Waits:
    """Reduce a flat tensor into the root's out; no other tensor is changed."""
    if folded(x.nbytes, link):
        given = [link.memory(x) if rank == root else b"" for rank in range(link.size)]
        found = yield from link.agree(text, parts=given)
        if link.rank == root:
            fold_inline(link, found, x.clone(), reduction, out)
        return
    yield from link.agree(text)
    bounds = chunks(x.numel(), link.size)
    start, stop = bounds[link.rank]
    mine = out[start:stop] if link.rank == root else x.new_empty(stop - start)
    yield from _scatter_sums(link, x, bounds, reduction, mine)
    moves = link.step()
    if link.rank == root:
        for rank in link.others:
            moves.receive(link.memory(out[slice(*bounds[rank])]), rank)
    else:
        moves.send(link.memory(mine), root)
    yield moves


def gather(link: Link, text: str, outs: Sequence[Tensor], x: Tensor, root: int) -> Waits:
    """Send all ranks' tensors to the root; outs: on the root, one for each rank."""
    yield from link.agree(text)
    moves = link.step()
    if link.rank == root:
        for rank in link.others:
            moves.receive(link.memory(outs[rank]), rank)
        outs[root].copy_(x)
    else:
        moves.send(link.memory(x), root)
    yield moves


def scatter(link: Link, text: str, out: Tensor, xs: Sequence[Tensor], root: int) -> Waits:
    """Send each rank one of the root's tensors; xs: on the root, one for each rank."""
    yield from link.agree(text)
    moves = link.step()
    if link.rank == root:
        for rank in link.others:
            moves.send(link.memory(xs[rank]), rank)
        out.copy_(xs[root])
    else:
        moves.receive(link.memory(out), root)
    yield moves


def all_to_all(
    link: Link,
    text: str,
    outs: Sequence[Memory],
    ins: Sequence[Memory],
    own: tuple[Tensor, Tensor],
) -> Waits:
    """Send ins[rank] to each rank, which receives it in its outs[this rank].

    own: this rank's tensors of outs and ins for itself
    Raises Mismatch on all ranks if a rank does not send the length that another expects.
    """
    size, rank = link.size, link.rank
    row = array("q", [len(each) for each in (*ins, *outs)])
    sizes = row.tobytes()
    room = link.part_bytes(len(sizes))
    is_near = size <= NEAR
    small = [is_near and max(row[j], row[size + j]) <= room for j in range(size)]
    if is_near:
        given = [
            b"".join((sizes, each)) if fits and j != rank else sizes
            for j, (each, fits) in enumerate(zip(ins, small, strict=True))
        ]
        found = yield from link.agree(text, parts=given)
        every = [memoryview(each)[: len(sizes)].cast("q").tolist() for each in found]
    else:
        yield from link.agree(text)
        rows = torch.empty(size, 2 * size, dtype=torch.int64, device="cpu")
        yield from all_gather(link, text, [list(rows)], [torch.frombuffer(row, dtype=torch.int64)])
        every = rows.tolist()
    for source, sent in enumerate(every):
        for to, expected in enumerate(every):
            if sent[to] != expected[size + source]:
                raise differing(text, source, to, sent[to], expected[size + source])
    moves = link.step()
    for other in link.others:
        if not small[other]:
            moves.receive(outs[other], other)
    for other in link.others:
        if not small[other]:
            moves.send(ins[other], other)
        elif len(outs[other]):
            outs[other][:] = memoryview(found[other])[len(sizes) :][: len(outs[other])]
    own[0].copy_(own[1])
    yield moves


def differing(text: str, source: int, to: int, sent: int, expected: int) -> Exception:
    """Return the error of two ranks that differ in the length of a message."""
    return Mismatch(
        f"{text}: rank {source} sends {sent} bytes to rank {to}, which expects {expected}"
    )


def all_reduce_sparse(link: Link, text: str, x: Tensor) -> Waits:
    """Sum sparse tensors in place, in the order of ranks."""
    yield from link.agree(text)
    own = x.coalesce()
    count = torch.tensor([own._nnz()], device="cpu")
    counts = [torch.empty_like(count) for _ in range(link.size)]
    yield from _gather_uneven(link, counts, count)
    dense = own.values().shape[1:]
    indices = [own.indices().new_empty(own.sparse_dim(), int(n)) for n in counts]
    values = [own.values().new_empty(int(n), *dense) for n in counts]
    yield from _gather_uneven(link, indices, own.indices().contiguous())
    yield from _gather_uneven(link, values, own.values().contiguous())
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), x.shape).coalesce()
    x.copy_(total)


def _gather_uneven(link: Link, outs: Sequence[Tensor], x: Tensor) -> Waits:
    """Send a tensor, whose length may differ by rank, to all."""
    moves = link.step()
    _to_all(moves, link, outs, x)
    outs[link.rank].copy_(x)
    yield moves


class Received:
    """The request of a receive, which knows the sender and the length afterwards."""

    def __init__(self, channel: Channel, request: Any, call: str, room_bytes: int) -> None:
        self._request, self._mpi = request, channel.mpi
        self._status = channel.mpi.Status()
        self._call, self._room_bytes = call, room_bytes

    def Test(self) -> bool:  # as MPI's
        """Whether the message is complete. Raises Mismatch for a longer one."""
        try:
            return bool(self._request.Test(self._status))
        except self._mpi.Exception as error:
            if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            longer = f"{self._call}: the message is longer than {self._room_bytes} bytes"
            raise Mismatch(longer) from None

    def end(self) -> None:
        """Cancel the receive, so that a late message is left to another one."""
        if self._request != self._mpi.REQUEST_NULL:
            self._request.Cancel()
            self._request.Test()

    @property
    def source(self) -> int:
        """The rank of the sender."""
        return int(self._status.Get_source())

    @property
    def size_bytes(self) -> int:
        """The length of the message."""
        return int(self._status.Get_count(self._mpi.BYTE))


def receive(
    channel: Channel,
    call: str,
    x: Tensor,
    source: int,
    tag: int,
    arrived: list[int],
    ends: list[Callable[[], None]],
) -> Waits:
    """Receive a flat tensor; arrived: gets the sender's rank; ends: of the operation."""
    memory = channel.memory(x)
    for each in cut(memory) if len(memory) else [memory]:
        (request,) = channel.receive(each, source, tag)
        message = Received(channel, request, call, len(each))
        ends.append(message.end)
        yield Step([message], [source])
        source = message.source
        if message.size_bytes != len(each):
            raise Mismatch(
                f"{call}: the message of rank {source} has {message.size_bytes} bytes: "
                f"must have {len(each)}"
            )
    arrived.append(source)
