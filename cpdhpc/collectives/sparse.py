"""Collectives for gradient compressors, whose ranks have arrays of different lengths.

All-gather sparse payloads, broadcast a leader's choice, sum small vectors, exchange with
neighbours. They are programs for the engine, so they have its messages, time-outs, byte counts and
virtual ranks, and give the same bits and bytes in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ops import misread, type_name
from ..partition import chunk
from ..world.ranks import Ranks
from .checks import alike_on_all, check_alike
from .engine import Exchange, Program, run

Array = npt.NDArray[Any]

SUMMED = ("float32", "float64", "int64")
DTYPES = (
    *SUMMED, "float16", "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
GATHERED_BYTES = 1 << 14  # up to here, sums of vectors minimise messages, above it bytes


def allgather(world: Ranks, arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays of all ranks, in order, with their own lengths. Collective.

    arrays: one of dtype[n] for each hosted rank, of one dtype from DTYPES everywhere and any n
    The returned arrays are parts of one new array. A rank sends ceil(log2(ranks)) messages, with
    the bytes of ranks - 1 arrays.
    Source: Bruck et al.: Efficient algorithms for all-to-all communications in multiport
    message-passing systems, IEEE TPDS 8(11), 1997.
    Raises TypeError and ValueError on all ranks before arrays move; other errors as engine.run.
    """

    def check() -> tuple[dict[str, object], list[int]]:
        _check_number("allgather", world, arrays)
        for rank, x in zip(world.hosted, arrays, strict=True):
            _check_vector(f"allgather: array of rank {rank}", x)
            _check_like("allgather", rank, x, arrays[0])
        lengths = [0] * world.ranks
        lengths[world.hosted.start : world.hosted.stop] = [x.size for x in arrays]
        return {"dtype": arrays[0].dtype.name}, lengths

    lengths = _agreed(world, "allgather", check, world.ranks)
    return _run(world, "allgather", lambda rank, i: _gathered(rank, lengths, arrays[i]))[0]


def broadcast(world: Ranks, arrays: Sequence[Array | None], root_rank: int) -> Array:
    """Return the array of root_rank, the same on all ranks. Collective.

    arrays: dtype[n], dtype from DTYPES and any n, for root_rank; None for each other hosted rank
    The process of root_rank gets the same array object back. A rank sends at most
    ceil(log2(ranks)) messages: a binomial tree.
    Raises TypeError and ValueError on all ranks before the array moves; other errors as engine.run.
    """

    def check() -> tuple[dict[str, object], list[int]]:
        _check_number("broadcast", world, arrays)
        if not _is_rank(root_rank, world):
            raise ValueError(f"broadcast: root_rank={root_rank!r}: must be 0..{world.ranks - 1}")
        numbers = [0, 0]
        for rank, x in zip(world.hosted, arrays, strict=True):
            if rank == root_rank:
                numbers = [_check_vector(f"broadcast: array of root_rank {rank}", x).size]
                numbers.append(DTYPES.index(x.dtype.name))  # type: ignore[union-attr]
            elif x is not None:
                raise ValueError(f"broadcast: rank {rank} has an array: only the root may have one")
        return {"root_rank": int(root_rank)}, numbers

    length, which = _agreed(world, "broadcast", check, 2)
    size_bytes = length * np.dtype(DTYPES[which]).itemsize

    def program(rank: int, i: int) -> Program[Array]:
        x = arrays[i]
        data = None if x is None else np.ascontiguousarray(x).view(np.uint8)
        return _spread(rank, world.ranks, root_rank, data, size_bytes)

    array: Array = _run(world, f"broadcast from rank {root_rank}", program)[0].view(DTYPES[which])
    own = arrays[root_rank - world.hosted.start] if world.hosts(root_rank) else None
    return array if own is None else own


def sum(world: Ranks, arrays: Sequence[Array]) -> Array:
    """Return the sum of all ranks' arrays, added in the order of ranks. Collective.

    arrays: one for each hosted rank, of one shape and one dtype from SUMMED everywhere
    The result is new; it has the same bits on all ranks, however they are placed on processes.
    Up to GATHERED_BYTES the arrays are gathered, above it each rank sums a part: then a rank sends
    2 (ranks - 1) / ranks of an array's bytes. int64 wraps around.
    Raises TypeError and ValueError on all ranks before arrays move; other errors as engine.run.
    """

    def check() -> tuple[dict[str, object], list[int]]:
        _check_number("sum", world, arrays)
        for rank, x in zip(world.hosted, arrays, strict=True):
            _check_dtype(f"sum: array of rank {rank}", x, SUMMED)
            _check_like("sum", rank, x, arrays[0])
            if x.shape != arrays[0].shape:
                raise ValueError(
                    f"sum: array of rank {rank} has shape {x.shape}, of rank {world.hosted[0]} "
                    f"{arrays[0].shape}: must be the same"
                )
        return {"dtype": arrays[0].dtype.name, "shape": arrays[0].shape}, []

    _agreed(world, "sum", check, 0)
    way = _sum_of_all if arrays[0].nbytes <= GATHERED_BYTES else _sum_of_parts
    total = _run(
        world,
        "sum",
        lambda rank, i: way(rank, world.ranks, np.ascontiguousarray(arrays[i]).ravel()),
    )[0]
    return total.reshape(arrays[0].shape)


def neighbours(
    world: Ranks,
    sends: Sequence[Mapping[int, Array]],
    sources: Sequence[Collection[int]] | None = None,
) -> list[dict[int, Array]]:
    """Send arrays to some ranks; return those received from others, {rank: array}. Collective.

    sends: for each hosted rank a dict {other rank: array}, dtype[n], dtype from DTYPES and any n;
    all ranks call, with an empty dict if they send nothing
    sources: for each hosted rank the ranks that send to it, if they are known. Then every rank must
    send, all arrays have one dtype and length, and only the arrays travel. None: these data are
    gathered first, with a few bytes for each message, from all ranks to all.
    Returns a dict for each hosted rank, in the order of the senders, including arrays of length 0.
    Between ranks of a process they may be the sender's own array objects.
    Raises TypeError and ValueError on all ranks before arrays move; other errors as engine.run.
    """
    with alike_on_all(world, "neighbours: arguments") as alike:
        _check_sends(world, sends)
        if sources is not None:
            alike |= _one_kind(world, sends, sources)
    if sources is None:
        comes = _told(world, sends)
    else:
        kind = str(alike["dtype"]), int(str(alike["length"]))
        comes = [[(source, *kind) for source in each] for each in sources]
    return _run(world, "neighbours", lambda rank, i: _exchanged(sends[i], comes[i]))


def _check_sends(world: Ranks, sends: Sequence[Mapping[int, Array]]) -> None:
    _check_number("neighbours", world, sends)
    for rank, each in zip(world.hosted, sends, strict=True):
        if not isinstance(each, Mapping):
            raise TypeError(
                f"neighbours: sends of rank {rank} is {type(each).__name__}: must be a dict"
            )
        for to, x in each.items():
            if not _is_rank(to, world) or to == rank:
                raise ValueError(
                    f"neighbours: rank {rank} sends to {to!r}: must be another of "
                    f"0..{world.ranks - 1}"
                )
            _check_vector(f"neighbours: array of rank {rank} to {to}", x)


def _one_kind(
    world: Ranks, sends: Sequence[Mapping[int, Array]], sources: Sequence[Collection[int]]
) -> dict[str, object]:
    """Return the dtype and length of all arrays. Raises ValueError if there are several."""
    _check_number("neighbours: sources", world, sources)
    kinds = set[tuple[str, int]]()
    for rank, each, heard in zip(world.hosted, sends, sources, strict=True):
        if not each:
            raise ValueError(f"neighbours: rank {rank} sends nothing: with sources all ranks must")
        others = all(_is_rank(source, world) and source != rank for source in heard)
        if not others or len(set(heard)) < len(heard):
            raise ValueError(
                f"neighbours: sources of rank {rank}: {list(heard)}: must be others of "
                f"0..{world.ranks - 1}, each once"
            )
        kinds |= {(x.dtype.name, x.size) for x in each.values()}
    if len(kinds) > 1:
        names = ", ".join(f"{dtype}[{n}]" for dtype, n in sorted(kinds))
        raise ValueError(f"neighbours: arrays are {names}: with sources they must have one kind")
    ((dtype, length),) = kinds
    return {"dtype": dtype, "length": length}


def _told(world: Ranks, sends: Sequence[Mapping[int, Array]]) -> list[list[tuple[int, str, int]]]:
    """Return for each hosted rank its incoming arrays: (rank, dtype, n). Collective."""
    mine = [
        (rank, to, x.dtype.name, x.size)
        for rank, each in zip(world.hosted, sends, strict=True)
        for to, x in each.items()
    ]
    comes: dict[int, list[tuple[int, str, int]]] = {rank: [] for rank in world.hosted}
    for process in world.gather(mine, "neighbours: who sends to whom"):
        for source, to, dtype, length in process:
            if world.hosts(to):
                comes[to].append((source, dtype, length))
    return list(comes.values())


def _is_rank(rank: object, world: Ranks) -> bool:
    whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    return whole and 0 <= rank < world.ranks  # type: ignore[operator]


def _check_number(name: str, world: Ranks, xs: Sequence[object]) -> None:
    if not isinstance(xs, list | tuple):
        raise TypeError(f"{name}: {type(xs).__name__}: must be a list, one for each hosted rank")
    if len(xs) != world.virtual_ranks:
        raise ValueError(f"{name}: {len(xs)} entries for {world.virtual_ranks} hosted ranks")


def _check_dtype(name: str, x: Any, dtypes: Sequence[str]) -> Array:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type_name(x)}: must be a NumPy array")
    if advice := misread(x):
        raise TypeError(f"{name} is {type_name(x)}: {advice}")
    if x.dtype.name not in dtypes or not x.dtype.isnative:
        raise TypeError(f"{name} has dtype {x.dtype!r}: known are {', '.join(dtypes)}")
    return x


def _check_vector(name: str, x: Any) -> Array:
    array = _check_dtype(name, x, DTYPES)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: must have one dimension")
    return array


def _check_like(name: str, rank: int, x: Array, first: Array) -> None:
    if x.dtype != first.dtype:
        raise TypeError(
            f"{name}: array of rank {rank} has dtype {x.dtype}: the first has {first.dtype}"
        )


def _agreed(
    world: Ranks, name: str, check: Callable[[], tuple[dict[str, object], list[int]]], count: int
) -> list[int]:
    """Return the maximum of each of the count numbers over the processes' checks. Collective.

    Raises any process's error, and ValueError if arguments differ, on all processes.
    """
    error: Exception | None = None
    arguments, numbers = dict[str, object](), [0] * count
    try:
        arguments, numbers = check()
    except Exception as wrong:  # of any class: it must be raised on all ranks
        error = wrong
    return check_alike(world, error, arguments, numbers, f"{name}: arguments")


def _run(world: Ranks, what: str, program: Callable[[int, int], Program[Any]]) -> list[Any]:
    """Run program(rank, its index here) of each hosted rank; return the results."""
    return run(
        world,
        lambda piece, take: [program(rank, i) for i, rank in enumerate(world.hosted)],
        1,
        np.empty(0, np.uint8),
        what,
    )[0]


def _transfer(
    number: int,
    to: int | None,
    payload: Array | None,
    source: int | None,
    place: Array | None,
    chunks: tuple[Sequence[int], Sequence[int]],
) -> Generator[Exchange, Array, None]:
    """Send the bytes of payload, and receive into place; chunks: in and out, for messages."""
    bytes_out = None if payload is None else payload.view(np.uint8)
    bytes_in = None if place is None else place.view(np.uint8)
    size_bytes = 0 if bytes_in is None else bytes_in.size
    received = yield Exchange(to, bytes_out, source, size_bytes, number, *chunks, bytes_in)
    if bytes_in is not None and received is not bytes_in:
        bytes_in[:] = received


def _gathered(rank: int, lengths: Sequence[int], own: Array) -> Program[list[Array]]:
    """Collect the blocks of all ranks, of these lengths; each message sends all blocks held so far.

    They lie in the order rank, rank + 1, ..., around the ring.
    """
    ranks = len(lengths)
    order = [(rank + i) % ranks for i in range(ranks)]
    ends = [0, *accumulate(lengths[each] for each in order)]
    blocks = np.empty(ends[-1], own.dtype)
    blocks[: own.size] = own
    held, number = 1, 0
    while held < ranks:
        more = min(held, ranks - held)
        to, source = (rank - held) % ranks, (rank + held) % ranks
        place = blocks[ends[held] : ends[held + more]]
        chunks = order[held : held + more], order[:more]
        yield from _transfer(number, to, blocks[: ends[more]], source, place, chunks)
        held, number = held + more, number + 1
    return [blocks[ends[(i - rank) % ranks] :][: lengths[i]] for i in range(ranks)]


def _spread(
    rank: int, ranks: int, root_rank: int, data: Array | None, size_bytes: int
) -> Program[Array]:
    """Receive the bytes from the parent in a binomial tree, and pass them to the children."""
    place = (rank - root_rank) % ranks  # in a tree whose root is 0
    distance = place & -place if place else 1 << (ranks - 1).bit_length()
    if data is None:
        data, source = np.empty(size_bytes, np.uint8), (rank - distance) % ranks
        yield from _transfer(0, None, None, source, data, ([0], []))
    for number, step in enumerate(1 << i for i in reversed(range(distance.bit_length() - 1))):
        if place + step < ranks:
            yield from _transfer(number + 1, (rank + step) % ranks, data, None, None, ([], [0]))
    return data


def _sum_of_all(rank: int, ranks: int, own: Array) -> Program[Array]:
    """Gather all arrays, and sum them."""
    return _in_order((yield from _gathered(rank, [own.size] * ranks, own)))


def _sum_of_parts(rank: int, ranks: int, own: Array) -> Program[Array]:
    """Sum one part of all ranks' arrays, and gather the parts."""
    parts = [slice(*chunk(own.size, ranks, i)) for i in range(ranks)]
    terms = {rank: own[parts[rank]]}
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        terms[source] = np.empty_like(terms[rank])
        yield from _transfer(step, to, own[parts[to]], source, terms[source], ([rank], [to]))
    total = _in_order([terms[i] for i in range(ranks)])
    return np.concatenate((yield from _gathered(rank, [p.stop - p.start for p in parts], total)))


def _in_order(terms: Sequence[Array]) -> Array:
    """Return the sum of arrays from the first to the last."""
    total = terms[0].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for each in terms[1:]:
            np.add(total, each, out=total)
    return total


def _exchanged(
    sends: Mapping[int, Array], comes: Sequence[tuple[int, str, int]]
) -> Program[dict[int, Array]]:
    """Send all messages, then receive from each sender in sources: (rank, dtype, n)."""
    for to in sorted(sends):
        data = np.ascontiguousarray(sends[to])
        yield from _transfer(0, to, data, None, None, ([], [to]))
    received: dict[int, Array] = {}
    for source, dtype, length in sorted(comes):
        received[source] = np.empty(length, dtype)
        yield from _transfer(1, None, None, source, received[source], ([source], []))
    return received
