"""What an aggregator asks of the network: counted once, and its time on any number of ranks.

A method is run on a few virtual ranks, and the collectives that it calls are written down with the
bytes that a rank gives to each. Their times follow from the costs that the collectives have by
construction. So a new row of COMPRESSORS needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...collectives.allreduce import Allreduce
from ...collectives.method import Machine
from ...collectives.predict import predict
from ...collectives.sparse import DTYPES, GATHERED_BYTES
from ...compress.base import Aggregator, Array, Context
from ...compress.bucket import Bucket, State, split_bucket
from ...world.ranks import Loopback
from .accuracy import contributions

RANKS = 4  # virtual ones that a method is run on
WARMUP = 1  # iterations before the one that is counted, so that residuals are not empty
LATE = 1_000_000  # epoch and first iteration: all warming up of a method is over
FACTORS = [1 << i for i in range(10)]  # by which large layers are made smaller
LEAST_VALUES, LEAST_ROWS = 1 << 13, 16  # that they keep


class Call(NamedTuple):
    """A collective; size_bytes: what one of RANKS gives, the mean over them.

    method, values: of an all-reduce; divided: all ranks together give as much however many they are
    """

    name: str
    size_bytes: float
    method: Allreduce | None = None
    values: float = 0.0
    divided: bool = False


class CountedRanks(Loopback):
    """Virtual ranks in one process that write down which collectives they are asked for."""

    def __init__(self, virtual_ranks: int) -> None:
        super().__init__(virtual_ranks)
        self.calls: list[Call] = []
        self.account = self._take_down
        self._neighbours: int | None = None  # the call of neighbours that goes on
        self._before_bytes = 0  # sent before it

    def max(self, values: Array, what: str = "max") -> Array:
        """Return a copy. An all-reduce's own agreements are in its prediction."""
        if not what.startswith("allreduce"):
            self.calls.append(Call("agreement", values.nbytes))
        return super().max(values, what)

    def _take_down(self, name: str, arguments: Mapping[str, Any], numbers: Sequence[int]) -> None:
        self.close()
        if name == "allreduce":
            method = Allreduce(**{field.name: arguments[field.name] for field in fields(Allreduce)})
            n = prod(arguments["x.shape"])
            self.calls.append(Call(name, method.payloads.size_bytes(n), method, n))
            return
        self.calls.append(Call(name, self._given_bytes(name, arguments, numbers)))

    def _given_bytes(
        self, name: str, arguments: Mapping[str, Any], numbers: Sequence[int]
    ) -> float:
        """Return what a rank gives to a collective of cpdhpc.collectives.sparse."""
        if name == "allgather":
            return sum(numbers) / self.ranks * np.dtype(arguments["dtype"]).itemsize
        if name == "broadcast":
            length, dtype = numbers
            return length * np.dtype(DTYPES[dtype]).itemsize
        if name == "sum":
            return prod(arguments["shape"]) * np.dtype(arguments["dtype"]).itemsize
        assert name == "neighbours", name
        self._neighbours, self._before_bytes = len(self.calls), int(self.bytes_sent.sum())
        return 0  # until it is over: see close

    def close(self) -> None:
        """Give a call of neighbours that is over what it has sent."""
        if self._neighbours is not None:
            sent = int(self.bytes_sent.sum()) - self._before_bytes
            self.calls[self._neighbours] = Call("neighbours", sent / self.ranks)
            self._neighbours = None


class Cost(NamedTuple):
    """Of a collective: messages and bytes one after another, and bytes that leave a rank (mean)."""

    messages: int
    path_bytes: float
    sent_bytes: float


def _gathered(ranks: int, size: float) -> Cost:
    return Cost((ranks - 1).bit_length(), (ranks - 1) * size, (ranks - 1) * size)


def _summed(ranks: int, size: float) -> Cost:
    if size <= GATHERED_BYTES:
        return _gathered(ranks, size)
    both = 2 * (ranks - 1) / ranks * size
    return Cost(ranks - 1 + (ranks - 1).bit_length(), both, both)


def _spread(ranks: int, size: float) -> Cost:
    depth = (ranks - 1).bit_length()
    return Cost(depth, depth * size, (ranks - 1) / ranks * size)


def _to_all(ranks: int, size: float) -> Cost:
    """Of neighbours, where each rank gives every other one a part; size: as of RANKS ranks."""
    sent = size * RANKS / (RANKS - 1) * (ranks - 1) / ranks
    return Cost(ranks - 1 + (ranks - 1).bit_length(), sent, sent)


COSTS: dict[str, Callable[[int, float], Cost]] = {  # as collectives.sparse has it
    "agreement": lambda ranks, size: _spread(ranks, size)._replace(sent_bytes=0.0),
    "allgather": _gathered,
    "sum": _summed,
    "broadcast": _spread,
    "neighbours": _to_all,
}


def price(
    machine: Machine, call: Call, ranks: int, algorithms: Sequence[str]
) -> tuple[float, float]:
    """Return the time in s of a collective on so many ranks, and the bytes that leave a rank.

    algorithms: of which an all-reduce takes the one that is predicted to be fastest
    """
    if ranks == 1:
        return 0.0, 0.0
    if call.method is not None:
        ways = [replace(call.method, algorithm=name) for name in algorithms]
        nodes, n = tuple(range(ranks)), round(call.values)
        found = min(predict(machine, way, nodes, n) for way in ways)
        return found.time_s, found.wire_bytes
    size = call.size_bytes * (RANKS / ranks if call.divided else 1.0)
    cost = COSTS[call.name](ranks, size)
    call_s, step_s = machine.call_s, machine.step_s
    if call.name == "agreement":  # of MPI's own: no step of ours
        call_s, step_s = 0.0, 0.0
    message_s, byte_s = machine.alpha_s + step_s, machine.beta_s + 2 * machine.host_s
    return call_s + cost.messages * message_s + cost.path_bytes * byte_s, cost.sent_bytes


def count_calls(method: Aggregator, bucket: Bucket, ranks: int = RANKS) -> list[Call]:
    """Return the collectives of an iteration in which a method averages a bucket's gradients.

    They are alike for any number of ranks. The gradients are random, of magnitudes that spread over
    many binades.
    """
    world = CountedRanks(ranks)
    state = State(world.hosted, ranks)
    for step in range(WARMUP + 1):
        world.calls.clear()
        flats = contributions("spread", ranks, bucket.size, seed=step)
        context = Context(world, state, iteration=LATE + step, epoch=float(LATE))
        method.aggregate(flats, bucket, context)
    world.close()
    return world.calls


def calls_of(method: Aggregator, bucket: Bucket, bucket_mib: float) -> list[Call]:
    """Return the collectives of an iteration, of all the buckets that a reducer makes.

    Large layers are not run as they are: rows, which are output units, are left out. What a method
    sends is linear in rows, so two sizes give the whole; a bucket whose calls differ between the
    two is run in full.
    """
    found: list[Call] = []
    for part in split_bucket(Bucket(bucket.names, bucket.shapes, method.align), bucket_mib):
        factor = min(FACTORS, key=lambda f: _shrunk(part.bucket, f, 2).size)
        whole = _shrunk(part.bucket, factor, 1)
        calls = _marked(method, whole)
        more = count_calls(method, _shrunk(part.bucket, factor, 2)) if factor > 1 else calls
        if _kinds(calls) != _kinds(more):
            factor, calls = 1, _marked(method, part.bucket)
            more = calls
        found += [_extended(a, b, factor) for a, b in zip(calls, more, strict=True)]
    return found


def _marked(method: Aggregator, bucket: Bucket) -> list[Call]:
    """Return the calls of a bucket, divided where half as many ranks would give twice as much."""
    calls, few = count_calls(method, bucket), count_calls(method, bucket, RANKS // 2)
    if _kinds(calls) != _kinds(few):
        return calls
    return [
        a._replace(divided=a.name == "allgather" and b.size_bytes > 2**0.5 * a.size_bytes)
        for a, b in zip(calls, few, strict=True)
    ]


def _kinds(calls: Sequence[Call]) -> list[tuple[str, Allreduce | None]]:
    return [(call.name, call.method) for call in calls]


def _shrunk(bucket: Bucket, factor: int, times: int) -> Bucket:
    """Return a bucket whose large layers have times / factor of their rows."""
    shapes = []
    for shape in bucket.shapes:
        rows, columns = shape[0], prod(shape[1:])
        if rows >= LEAST_ROWS * factor and rows * columns >= LEAST_VALUES * factor > LEAST_VALUES:
            rows = times * -(-rows // factor)
        shapes.append((rows, *shape[1:]))
    return Bucket(bucket.names, tuple(shapes), bucket.align)


def _extended(small: Call, large: Call, factor: int) -> Call:
    """Return the call of the whole, from those of a part of its rows and of twice as many."""
    size, values = (
        getattr(small, name) + (factor - 1) * (getattr(large, name) - getattr(small, name))
        for name in ("size_bytes", "values")
    )
    return small._replace(size_bytes=size, values=values)
