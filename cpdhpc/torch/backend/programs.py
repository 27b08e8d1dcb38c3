"""The collectives as programs: each yields steps of messages, and reduces between them.

All tensors are contiguous and in the memory of the host. Each value of a result is computed by one
rank or, in the order of ranks, by all, so that all ranks have the same bits.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from .board import VALUES_BYTES, move
from .channel import (
    INLINE_BYTES,
    NEAR,
    Channel,
    Link,
    Memory,
    Mismatch,
    Moves,
    Portions,
    cut,
    portions,
)
from .progress import Step, Waits
from .reductions import Reduction

Tensor = torch.Tensor

WHOLE_BYTES = 1 << 18  # received from others: up to here each rank reduces all values itself
KEPT_BYTES = 1 << 23  # of scratch memory that is reused; what no call writes takes no memory
MOST_KEPT = 8
ALIGN = 64  # elements: chunks begin at multiples; also of bytes, of the parts of a turn
NOTHING: Memory = b""
TURNS_BYTES = 1 << 21  # of a part: longer ones do not stay in caches, and messages are copied once
SPREAD_BYTES = 1 << 18  # least size of a broadcast in chunks that ranks forward
# Between nodes long messages go in segments, to all ranks in turn. Open MPI sends up to 64 KiB
# over TCP without asking the receiver first; a question and its answer wait for the data before
# them, on slow links for many milliseconds.
SEGMENT_BYTES = 60 << 10
AHEAD = 4  # segments to each rank that are under way; more fill the queues of switches
CAME = b"\0"  # for the sender of a segment
TREE = 3  # least number of ranks for that


class Scratch:
    """Memory that calls reuse, as the system clears each page of new memory.

    Memory of a failed call is not reused: a late message may still write to it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size_bytes: int) -> Tensor:
        """Return at least so many bytes."""
        if size_bytes <= KEPT_BYTES:
            try:
                return self._free.pop()
            except IndexError:
                size_bytes = KEPT_BYTES
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def give(self, held: Tensor) -> None:
        """Keep memory for later calls."""
        if len(held) == KEPT_BYTES and len(self._free) < MOST_KEPT:
            self._free.append(held)


SCRATCH = Scratch()


def chunks(count: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of each rank's share of count elements."""
    each = -(-count // ranks)
    each = -(-each // ALIGN) * ALIGN
    return [(min(i * each, count), min((i + 1) * each, count)) for i in range(ranks)]


def folded(size_bytes: int, ranks: int, room_bytes: int) -> bool:
    """Whether values accompany the text of their call, and each rank reduces all of them."""
    return size_bytes <= room_bytes and size_bytes * (ranks - 1) <= WHOLE_BYTES


def fold_found(
    link: Link,
    mine: Tensor,
    reduction: Reduction,
    out: Tensor,
    found: Sequence[Memory],
    start: int = 0,
) -> None:
    """Reduce mine, and the values that each other rank has at start, in bytes, into out."""
    count = mine.numel()
    if count:
        dtype = mine.dtype
        operands = [
            mine
            if rank == link.rank
            else torch.frombuffer(each, dtype=dtype, count=count, offset=start)
            for rank, each in enumerate(found)
        ]
        reduction.fold(operands, out)


def turns(longest: int, each: int) -> int:
    """Return the number of turns of each bytes, of which there is at least one."""
    return max(1, -(-longest // each))


def part_bytes(ranks: int, longest: int = VALUES_BYTES) -> int:
    """Return the room of each rank in a turn, whole elements of any dtype."""
    return min(VALUES_BYTES // ranks // ALIGN, max(1, -(-longest // ALIGN))) * ALIGN


def reduce_on_board(
    link: Link,
    text: str,
    reduction: Reduction,
    mine: Tensor,
    out: Tensor | None,
    gives: Portions,
    each: int,
    longest: int,
    *,
    start: int = 0,
    takes: Portions = (),
) -> Waits:
    """Reduce mine, and the values that others have at start in their places, into out.

    out: None: other ranks only read what this one gives; longest: the largest size, on all ranks
    Other arguments: see Link.exchange.
    """
    count, item, size, kind = turns(longest, each), mine.element_size(), mine.nbytes, reduction.kind
    if out is None:
        yield from link.exchange(text, count, each, gives, takes, held=mine)
    elif kind is None:

        def take(first: int, found: Sequence[Memory]) -> None:
            part = slice(first // item, (first + each) // item)
            fold_found(link, mine[part], reduction, out[part], found, start)

        yield from link.exchange(text, count, each, gives, takes, take=take)
    else:
        fold = (0, start, mine.data_ptr(), size, 0, 0, out.data_ptr(), size)
        yield from link.exchange(
            text, count, each, gives, takes, kind=kind, fold=fold, held=(mine, out)
        )
        reduction.finish(out)


def copy_from(outs: Sequence[Memory], found: Sequence[Memory]) -> None:
    """Copy what each rank has sent to its out."""
    for out, values in zip(outs, found, strict=True):
        if len(out):
            move(values[: len(out)], out)


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
    if link.board is not None:
        for x, reduction in zip(xs, reductions, strict=True):
            if link.size == 2 or folded(x.nbytes, link.size, link.room_bytes):
                yield from _reduce_all(link, text, x, reduction, x)
            else:
                yield from _reduce_in_turns(link, text, x, reduction)
        return
    if len(xs) == 1 and folded(xs[0].nbytes, link.size, link.room_bytes):
        (x,), (reduction,) = xs, reductions
        take = partial(fold_found, link, x, reduction, x)
        yield from link.agree(text, link.memory(x), take)
        return
    yield from link.agree(text)
    for x, reduction in zip(xs, reductions, strict=True):
        if x.nbytes * (link.size - 1) <= WHOLE_BYTES:
            yield from _reduce_whole(link, x, reduction)
        else:
            yield from _reduce_chunks(link, x, chunks(x.numel(), link.size), reduction, x)


def _reduce_all(
    link: Link, text: str, x: Tensor, reduction: Reduction, out: Tensor | None
) -> Waits:
    """Reduce all values of a tensor into out, in the memory of the node; None: give them only."""
    gives, size = portions([(0, 0, link.memory(x))]), x.nbytes
    yield from reduce_on_board(link, text, reduction, x, out, gives, VALUES_BYTES, size)


def _reduce_in_turns(link: Link, text: str, x: Tensor, reduction: Reduction) -> Waits:
    """Reduce a tensor in place, in the memory of the node.

    In a turn a rank gives a piece of each other rank's chunk, and the sums of its own chunk's
    previous piece.
    """
    rank, item, room = link.rank, x.element_size(), part_bytes(link.size)
    bounds, each, memory = chunks(x.numel(), link.size), room // item, link.memory(x)

    def piece(of: int, number: int) -> slice:
        """Return the elements of a chunk's piece; of none before the first."""
        first, last = bounds[of]
        start = min(first + number * each, last)
        return slice(start, min(start + each, last)) if number >= 0 else slice(first, first)

    def placed(of: int, number: int) -> tuple[int, int, Memory]:
        part = piece(of, number)
        return of, of * room, memory[part.start * item : part.stop * item]

    for number in range(-(-bounds[0][1] // each) + 1):
        gives = [placed(other, number) for other in link.others] + [placed(rank, number - 1)]
        takes = portions([placed(other, number - 1) for other in link.others])
        own = x[piece(rank, number)]
        yield from reduce_on_board(
            link, text, reduction, own, own, portions(gives), room, room,
            start=rank * room, takes=takes,
        )  # fmt: skip


def _reduce_whole(link: Link, x: Tensor, reduction: Reduction) -> Waits:
    """Reduce a tensor in place; every rank reduces all values."""
    others = len(link.others)
    held = SCRATCH.take(x.nbytes * others)
    operands = list(held[: x.nbytes * others].view(x.dtype).view(others, x.numel()))
    operands.insert(link.rank, x)
    given = [[link.memory(x)]] * link.size
    yield from exchanged(link, [[link.memory(each)] for each in operands], given)
    reduction.fold(operands, x)
    SCRATCH.give(held)


def ahead(start: Callable[[int], Moves], count: int) -> Waits:
    """Start count steps by their numbers, AHEAD at a time, and wait for each in turn."""
    under_way: deque[Moves] = deque()
    for number in range(count):
        under_way.append(start(number))
        if len(under_way) == AHEAD:
            yield under_way.popleft()
    yield from under_way


def exchanged(
    link: Link, outs: Sequence[Sequence[Memory]], ins: Sequence[Sequence[Memory]]
) -> Waits:
    """Send ins[rank] to each other rank, and receive its values into outs[rank]."""
    size, rank = link.size, link.rank
    longest = max([len(x) for each in (*outs, *ins) for x in each], default=0)
    each = SEGMENT_BYTES if link.board is None else max(1, longest)

    def exchange(number: int) -> Moves:
        part, moves = slice(number * each, (number + 1) * each), link.step()
        for i in range(1, size):
            for out in outs[(rank - i) % size]:
                moves.receive(out[part], (rank - i) % size)
        for i in range(1, size):
            for x in ins[(rank + i) % size]:
                moves.send(x[part], (rank + i) % size)
        return moves

    yield from ahead(exchange, -(-longest // each))


def _reduce_chunks(
    link: Link,
    x: Tensor,
    bounds: Sequence[tuple[int, int]],
    reduction: Reduction,
    target: Tensor | None,
    own: Tensor | None = None,
) -> Waits:
    """Reduce this rank's chunk of x, in pieces, into own; and send pieces to the others' target.

    target: x itself, if all ranks are to have all chunks; None: each has only its own
    own: the result's memory; None: the chunk of x
    """
    size, rank, item = link.size, link.rank, x.element_size()
    given = link.memory(x)
    each = SEGMENT_BYTES // item
    start, stop = bounds[rank]
    into = x[start:stop] if own is None else own
    count = -(-max([stop - start for start, stop in bounds]) // each)
    held = SCRATCH.take(AHEAD * size * each * item)
    places = held[: AHEAD * size * each * item].view(x.dtype).view(AHEAD, size, each)

    def piece(of: int, number: int) -> tuple[int, int]:
        """Return the first element of a chunk's piece, and the one after its last."""
        first, last = bounds[of]
        return min(first + number * each, last), min(first + (number + 1) * each, last)

    def part(of: int, number: int) -> Memory:
        first, last = piece(of, number)
        return given[first * item : last * item]

    def exchange(number: int) -> Moves:
        """Start to send the pieces of other ranks' chunks, and to receive this rank's."""
        moves, (first, last) = link.step(), piece(rank, number)
        for other in link.others:
            moves.receive(link.memory(places[number % AHEAD, other, : last - first]), other)
        for other in link.others:
            moves.send(part(other, number), other)
        return moves

    def hand(number: int) -> Moves:
        """Start to send this rank's sums, and to receive those of others."""
        moves = link.step()
        for other in link.others:
            moves.receive(part(other, number), other)
        for other in link.others:
            moves.send(part(rank, number), other)
        return moves

    handed: deque[Moves] = deque()
    for number, coming in enumerate(ahead(exchange, count)):
        yield coming
        first, last = piece(rank, number)
        if first < last:
            got = places[number % AHEAD, :, : last - first]
            operands = [x[first:last] if r == rank else got[r] for r in range(size)]
            reduction.fold(operands, into[first - start : last - start])
        if target is not None:
            handed.append(hand(number))
        if len(handed) > AHEAD:
            yield handed.popleft()
    yield from handed
    SCRATCH.give(held)


def reduce_scatter(
    link: Link,
    text: str,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    reductions: Sequence[Reduction],
) -> Waits:
    """Reduce flat tensors; each rank gets its equal share of the result."""
    if link.board is None and len(outs) == 1 and folded(ins[0].nbytes, link.size, link.room_bytes):
        parts = ins[0].tensor_split(link.size)
        found = yield from link.agree_by_messages(text, [link.memory(part) for part in parts])
        fold_found(link, parts[link.rank], reductions[0], outs[0], found)
        return
    if link.board is None:
        yield from link.agree(text)
    for out, x, reduction in zip(outs, ins, reductions, strict=True):
        count = out.numel()
        bounds = [(rank * count, (rank + 1) * count) for rank in range(link.size)]
        yield from _scatter_sums(link, text, x, bounds, reduction, out)


def _scatter_sums(
    link: Link,
    text: str,
    x: Tensor,
    bounds: Sequence[tuple[int, int]],
    reduction: Reduction,
    out: Tensor,
) -> Waits:
    """Reduce this rank's chunk of x into out; x is not changed. On a board, compare the text."""
    if link.board is None:
        yield from _reduce_chunks(link, x, bounds, reduction, None, out)
        return
    item, memory, rank = x.element_size(), link.memory(x), link.rank
    longest = item * max([b - a for a, b in bounds])
    room = part_bytes(link.size, longest)
    given = [(to, to * room, memory[a * item : b * item]) for to, (a, b) in enumerate(bounds)]
    del given[rank]
    own = x[slice(*bounds[rank])]
    yield from reduce_on_board(
        link, text, reduction, own, out, portions(given), room, longest, start=rank * room
    )


def reduce_scatter_uneven(
    link: Link, text: str, out: Tensor, x: Tensor, counts: Sequence[int], reduction: Reduction
) -> Waits:
    """Reduce a flat tensor; each rank gets counts[rank] elements of the result."""
    if link.board is None:
        yield from link.agree(text)
    ends = list(accumulate(counts))
    bounds = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    yield from _scatter_sums(link, text, x, bounds, reduction, out)


def one_for_all(
    link: Link, text: str, given: Memory, outs: Sequence[Memory], longest: int
) -> Waits:
    """Send values to all ranks, on a board or with the text, in which they have room.

    outs: by rank, where its values arrive, or nothing; longest: the largest size, on all ranks
    """
    if link.board is None:
        yield from link.agree(text, given, partial(copy_from, outs))
        return
    own = portions([(0, 0, given), (0, 0, outs[link.rank])]) if len(outs[link.rank]) else ()
    takes = portions([(rank, 0, outs[rank]) for rank in link.others])
    count, gives = turns(longest, VALUES_BYTES), portions([(0, 0, given)])
    yield from link.exchange(text, count, VALUES_BYTES, gives, takes, own=own)


def all_gather(
    link: Link, text: str, outs: Sequence[Sequence[Tensor]], ins: Sequence[Tensor]
) -> Waits:
    """Send each rank's tensors to all: outs[i][rank] is ins[i] of that rank."""
    longest = [max([each.nbytes for each in out]) for out in outs]
    most = TURNS_BYTES if link.board is not None else link.room_bytes if len(ins) == 1 else -1
    if max(longest) <= most:
        for out, x, size in zip(outs, ins, longest, strict=True):
            to = [link.memory(each) for each in out]
            if out[link.rank].data_ptr() == x.data_ptr():
                to[link.rank] = NOTHING
            yield from one_for_all(link, text, link.memory(x), to, size)
        return
    yield from link.agree(text)
    to = [[link.memory(out[rank]) for out in outs] for rank in range(link.size)]
    given = [link.memory(x) for x in ins]
    yield from exchanged(link, to, [given] * link.size)
    for out, x, own in zip(outs, ins, to[link.rank], strict=True):
        if out[link.rank].data_ptr() != x.data_ptr():
            move(link.memory(x), own)


def broadcast(link: Link, text: str, xs: Sequence[Tensor], root: int) -> Waits:
    """Send the root's tensors to all."""
    if link.board is not None or (len(xs) == 1 and xs[0].nbytes <= link.room_bytes):
        for each in xs:
            outs, x = [NOTHING] * link.size, link.memory(each)
            if link.rank != root:
                outs[root] = x
            given = x if link.rank == root else NOTHING
            yield from one_for_all(link, text, given, outs, len(x))
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
    """Send the root's tensor to all: each segment to one rank, which forwards it to the others.

    So the root sends each byte once. It waits for a byte of each forwarder before it goes on:
    otherwise TCP would serve some first, and others could forward theirs only at the end.
    """
    memory, size = link.memory(x), link.size
    forwarders = [(root + i) % size for i in range(1, size)]
    rest = [rank for rank in forwarders if rank != link.rank]
    rounds = -(-len(memory) // (SEGMENT_BYTES * len(forwarders)))

    def part(number: int, forwarder: int) -> Memory:
        """Return the segment that a rank forwards in a round."""
        first = number * (size - 1) + (forwarder - root - 1) % size
        return memory[first * SEGMENT_BYTES : (first + 1) * SEGMENT_BYTES]

    def hand(number: int) -> Moves:
        """Start the root's messages of a round."""
        moves = link.step()
        for rank in forwarders:
            moves.receive(bytearray(1), rank)
            moves.send(part(number, rank), rank)
        return moves

    def come(number: int, forwarders: Sequence[int]) -> Moves:
        """Start to receive segments of a round."""
        moves = link.step()
        for rank in forwarders:
            moves.receive(part(number, rank), root if rank == link.rank else rank)
        return moves

    def forward(number: int) -> Moves:
        """Start to send this rank's segment of a round to the others."""
        moves = link.step()
        moves.send(CAME, root)
        for rank in rest:
            moves.send(part(number, link.rank), rank)
        return moves

    if link.rank == root:
        yield from ahead(hand, rounds)
        return
    own, others, sent = deque[Moves](), deque[Moves](), deque[Moves]()
    for number in range(rounds + 2 * AHEAD):
        if number < rounds:
            own.append(come(number, [link.rank]))
            others.append(come(number, rest))
        if AHEAD <= number < rounds + AHEAD:
            yield own.popleft()
            sent.append(forward(number - AHEAD))
        if number >= 2 * AHEAD:
            yield others.popleft()
            yield sent.popleft()


def reduce(link: Link, text: str, x: Tensor, root: int, reduction: Reduction, out: Tensor) -> Waits:
    """Reduce a flat tensor into the root's out; no other tensor is changed."""
    if link.board is not None:
        yield from _reduce_all(link, text, x, reduction, out if link.rank == root else None)
        return
    if folded(x.nbytes, link.size, link.room_bytes):
        take = partial(fold_found, link, x, reduction, out) if link.rank == root else None
        yield from link.agree(text, NOTHING if link.rank == root else link.memory(x), take)
        return
    yield from link.agree(text)
    bounds = chunks(x.numel(), link.size)
    start, stop = bounds[link.rank]
    mine = out[start:stop] if link.rank == root else x.new_empty(stop - start)
    yield from _reduce_chunks(link, x, bounds, reduction, None, mine)
    moves = link.step()
    if link.rank == root:
        for rank in link.others:
            moves.receive(link.memory(out[slice(*bounds[rank])]), rank)
    else:
        moves.send(link.memory(mine), root)
    yield moves


def gather(link: Link, text: str, outs: Sequence[Tensor], x: Tensor, root: int) -> Waits:
    """Send all ranks' tensors to the root; outs: on the root, one for each rank."""
    is_root = link.rank == root
    to = [link.memory(out) for out in outs] if is_root else [NOTHING] * link.size
    own, to[root] = to[root], NOTHING
    if link.board is not None and x.nbytes <= TURNS_BYTES:
        given = NOTHING if is_root else link.memory(x)
        yield from one_for_all(link, text, given, to, x.nbytes)
    else:
        yield from link.agree(text)
        moves = link.step()
        for rank in link.others:
            moves.receive(to[rank], rank)
        if not is_root:
            moves.send(link.memory(x), root)
        yield moves
    if is_root:
        move(link.memory(x), own)


def scatter(link: Link, text: str, out: Tensor, xs: Sequence[Tensor], root: int) -> Waits:
    """Send each rank one of the root's tensors; xs: on the root, one for each rank."""
    is_root, into = link.rank == root, link.memory(out)
    given = [link.memory(x) for x in xs] if is_root else [NOTHING] * link.size
    own, given[root] = given[root], NOTHING
    if link.board is not None and len(into) <= TURNS_BYTES:
        room = part_bytes(link.size, len(into))
        gives = portions([(to, to * room, x) for to, x in enumerate(given)])
        takes = () if is_root else portions([(root, link.rank * room, into)])
        yield from link.exchange(text, turns(len(into), room), room, gives, takes)
    else:
        yield from link.agree(text)
        moves = link.step()
        for rank in link.others:
            moves.send(given[rank], rank)
        if not is_root:
            moves.receive(into, root)
        yield moves
    if is_root:
        move(own, into)


def all_to_all(
    link: Link, text: str, outs: Sequence[Memory], ins: Sequence[Memory], _: object
) -> Waits:
    """Send ins[rank] to each rank, which receives it in its outs[this rank].

    The last argument are the tensors whose memory these are, to keep them alive.
    Raises Mismatch on all ranks if a rank does not send the length that another expects.
    """
    rank = link.rank
    sizes = array("q", [*map(len, ins), *map(len, outs)]).tobytes()
    given, to = list(ins), list(outs)
    given[rank] = to[rank] = NOTHING
    if link.board is not None:
        yield from _all_to_all_in_turns(link, text, to, given, sizes)
    elif link.size <= NEAR:
        room = INLINE_BYTES - len(sizes)
        short = [sizes + bytes(x) if len(x) <= room else sizes for x in given]
        found = yield from link.agree_by_messages(text, short)
        check_sizes(text, [bytes(each[: len(sizes)]) for each in found])
        for other in link.others:
            if len(to[other]) <= room:
                move(found[other][len(sizes) :][: len(to[other])], to[other])
        long = [[[x] if len(x) > room else [] for x in each] for each in (to, given)]
        yield from exchanged(link, *long)
    else:
        yield from link.agree(text)
        rows = torch.empty(link.size, len(sizes), dtype=torch.uint8, device="cpu")
        row = torch.frombuffer(bytearray(sizes), dtype=torch.uint8)
        yield from all_gather(link, text, [list(rows)], [row])
        check_sizes(text, [bytes(link.memory(each)) for each in rows])
        yield from exchanged(link, [[x] for x in to], [[x] for x in given])
    move(ins[rank], outs[rank])


def _all_to_all_in_turns(
    link: Link, text: str, outs: Sequence[Memory], ins: Sequence[Memory], sizes: bytes
) -> Waits:
    """Exchange parts in the memory of the node, the rest of long ones by messages.

    The first turn tells the sizes of all parts.
    """
    room, longest = part_bytes(link.size), max(map(len, (*outs, *ins)))

    def count() -> int:
        return turns(longest, room) if longest <= TURNS_BYTES else 1

    def recount(found: Sequence[bytes]) -> int:
        """Return the number of turns, given the sizes of all parts."""
        nonlocal longest
        longest = check_sizes(text, found)
        return count()

    gives = portions([(to, to * room, x) for to, x in enumerate(ins)])
    takes = portions([(rank, link.rank * room, out) for rank, out in enumerate(outs)])
    yield from link.exchange(text, count(), room, gives, takes, note=sizes, renewed=recount)
    if longest > TURNS_BYTES:
        yield from exchanged(link, [[x[room:]] for x in outs], [[x[room:]] for x in ins])


def check_sizes(text: str, told: Sequence[bytes]) -> int:
    """Return the longest part of an all_to_all; raise Mismatch if ranks differ in a length.

    told: by rank, what it sends to each rank and expects of each, int64[2 * ranks]
    """
    size, first = len(told), told[0]
    if first[:8] * 2 * size == first and all([each == first for each in told]):
        return int.from_bytes(first[:8], sys.byteorder)
    every = [memoryview(each).cast("q").tolist() for each in told]
    for source, sent in enumerate(every):
        for to, expected in enumerate(every):
            if sent[to] != expected[size + source]:
                raise differing(text, source, to, sent[to], expected[size + source])
    return int(max(map(max, every)))


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
    to = [[link.memory(out)] for out in outs]
    yield from exchanged(link, to, [[link.memory(x)]] * link.size)
    outs[link.rank].copy_(x)


class Received:
    """The request of a receive: its message is matched first, then received.

    So a message that is longer than the memory goes elsewhere. Open MPI 5.0.11 writes one of 4 KiB
    or more beyond the end of the memory, before it reports the error.
    """

    def __init__(self, channel: Channel, call: str, memory: Memory, source: int, tag: int) -> None:
        self._channel, self._call, self._memory = channel, call, memory
        self._asked, self._tag, self._status = source, tag, channel.mpi.Status()
        self._request: Any = None
        channel.awaited.append(self)

    def precedes(self, other: Received) -> bool:
        """Whether a message for another receive must be left to this one."""
        everyone = self._channel.mpi.ANY_SOURCE
        here, there = self._asked, other._asked
        return self._tag == other._tag and (here == there or everyone in (here, there))

    def take(self) -> bool:
        """Match a message and begin to receive it, if one has come."""
        found = self._channel.comm.Improbe(self._asked, self._tag, self._status)
        if found is None:
            return False
        size = self.size_bytes
        into = self._memory if size <= len(self._memory) else bytearray(size)
        self._request = found.Irecv([into, self._channel.mpi.BYTE])
        return True

    def Test(self) -> bool:  # as MPI's
        """Whether the message is complete. Raises Mismatch for one of another length."""
        if self._request is None:
            self._channel.match()
            if self._request is None:
                return False
        if not self._request.Test():
            return False
        if self.size_bytes != len(self._memory):
            raise Mismatch(
                f"{self._call}: the message of rank {self.source} has {self.size_bytes} bytes: "
                f"must have {len(self._memory)}"
            )
        return True

    def end(self) -> None:
        """Leave a message that has not come to another receive."""
        self._channel.leave(self)

    @property
    def source(self) -> int:
        """The rank of the sender."""
        return int(self._status.Get_source())

    @property
    def size_bytes(self) -> int:
        """The length of the message."""
        return int(self._status.Get_count(self._channel.mpi.BYTE))


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
        message = Received(channel, call, each, source, tag)
        ends.append(message.end)
        yield Step([message], [source])
        source = message.source
    arrived.append(source)
