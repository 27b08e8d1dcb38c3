"""All-reduces of GPU arrays as CUDA graphs: one launch for all work between two messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..methods import check_bool
from ..ops import backend_of, on_gpu
from ..ops.payloads import Array
from ..world.gpu_messages import Carrier, Direct, Staged
from ..world.ranks import Ranks
from .blocks import Piece
from .checks import is_finite
from .engine import BufferPool, Exchange, Program, Take, carrier_of, fresh, give_up, run
from .method import MPI_ALLREDUCE, Method, Segment, Shifts, shift_bytes
from .rank_program import program

if TYPE_CHECKING:
    from ..ops.gpu_runtime import Graphs

COUNT_BYTES = 8  # of the number of non-finite values, uint64


def check_graphs(method: Method, world: Ranks, xs: Sequence[Array], graphs: object) -> None:
    """Raise TypeError or ValueError if a call cannot be captured."""
    check_bool("Allreduce.prepare", "graphs", graphs)
    why = ""
    if world.virtual_ranks > 1:
        why = f"{world.virtual_ranks} virtual ranks: must be 1 per process"
    elif not (len(xs) and on_gpu(xs[0])):
        why = "x is not on a GPU: graphs need CuPy arrays"
    elif method.algorithm == MPI_ALLREDUCE:
        why = "algorithm='mpi': MPI sums by itself, there is nothing to launch"
    elif method.is_random:
        why = (
            "rounding='stochastic': its key differs from call to call, but the arguments of "
            "captured kernels are fixed"
        )
    if why:
        raise ArgumentError("Allreduce.prepare", "graphs", graphs, why)


class Between(NamedTuple):
    """The launches before an exchange, None for none, and the exchange; None at the end."""

    graph: Any
    exchange: Exchange | None


class _Came(NamedTuple):
    """The input of a program's next step, and the pinned memory that it comes from, if any.

    received: None before the first step
    """

    received: Array | None
    host: Array | None


class _Asked:
    """The operations of a backend, with a count of the calls."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.count = kernels, 0

    def __getattr__(self, name: str) -> Any:
        self.count += 1
        return getattr(self._kernels, name)


class Graphed:
    """One process's part in an all-reduce of GPU arrays, captured in graphs. Collective.

    Its programs run without messages, as when call lists are recorded: once to load kernels, and
    once to be captured. If MPI does not take GPU memory, the copies to and from pinned memory are
    in the graphs, too: in order with the kernels, so this is for small arrays.
    x, out: float32[n] on the GPU, that do not overlap
    segments, shifts: see Method.plan; adapt sets other shifts
    freed: whether run is an error; what: named in messages
    """

    def __init__(
        self,
        world: Ranks,
        method: Method,
        x: Array,
        out: Array,
        segments: Sequence[Segment],
        shifts: Shifts,
    ) -> None:
        from ..ops import gpu_runtime

        self.x, self.out, self.freed = x, out, False
        self.what = f"allreduce {method.algorithm}"
        self._world, self._runtime = world, gpu_runtime
        carrier = carrier_of(world, x)
        assert isinstance(carrier, Carrier), "x is on a GPU"
        self._streams, self._staged = carrier.streams, isinstance(carrier, Staged)
        # Direct passes pinned memory to MPI, too, when the stream has reached that point.
        self._carrier = Direct(world, self._streams) if self._staged else carrier
        self._divisor, self._unseen = method.divisor(world.ranks), method.result_unseen
        self.plan = method.plan(world.nodes, x, segments, shifts, 0)
        self._pieces = self.plan.pieces()
        self._kernels = _Asked(backend_of(x))
        self._counted = False  # whether pieces report how many values are not finite
        try:
            graphs = gpu_runtime.Graphs()
            self._memory: Graphs | None = graphs
            self._counts = graphs.pinned(COUNT_BYTES * len(self._pieces)).view(np.uint64)
            graphs.rehearse(lambda: self._all(np.empty_like(out), None))
            self._counts[:] = 0
            self._betweens = self._all(out, graphs)
        except Exception as error:
            give_up(world, error, self.what)
        self._ended = self._streams.mark()

    @property
    def _window(self) -> int:
        return self.plan.schedule.window(self._world.ranks)

    def _all(self, out: Array, graphs: Graphs | None) -> list[list[Between]]:
        """Launch the programs of all pieces, or capture them in graphs; return the launches."""
        pinned = self._runtime.Streams.pinned if graphs is None else graphs.pinned
        like = np.empty_like(self.x, shape=(0,))
        slots = [
            (BufferPool(partial(fresh, like)), BufferPool(pinned))
            for _ in range(min(self._window, len(self._pieces)))
        ]
        between = []
        for piece in self._pieces:
            pool, hosts = slots[piece.number % len(slots)]
            pool.rewind()
            hosts.rewind()
            between.append(list(self._piece(piece, out, graphs, pool.take, hosts.take)))
        return between

    def _piece(
        self, piece: Piece, out: Array, graphs: Graphs | None, take: Take, take_host: Take
    ) -> Iterator[Between]:
        """Yield the launches of a program, and its exchanges."""
        wire = replace(self.plan.wire, kernels=self._kernels)
        plan = replace(self.plan, wire=wire, copy=self._copy)
        steps = program(plan, piece, self._world.hosted.start, self.x, out, take)
        came, exchange = _Came(None, None), None
        while True:
            self._kernels.count = 0
            launches = partial(self._advance, steps, piece.number, came, take, take_host)
            graph, (exchange, came) = (
                (None, launches()) if graphs is None else graphs.capture(launches)
            )
            yield Between(graph if self._kernels.count else None, exchange)
            if exchange is None:
                return

    def _advance(
        self, steps: Program[Any], number: int, came: _Came, take: Take, take_host: Take
    ) -> tuple[Exchange | None, _Came]:
        """Launch a program's work up to its next exchange, and the copies around it.

        Returns the exchange for MPI, and the place of the received message.
        """
        if came.host is not None:
            self._runtime.copy_up(came.host, came.received)
            self._kernels.count += 1
        try:
            exchange = next(steps) if came.received is None else steps.send(came.received)
        except StopIteration as stop:
            if hasattr(stop.value, "get"):  # otherwise a number that was known before
                self._counted = True
                count = self._counts[number : number + 1].view(np.uint8)
                self._copy_down(stop.value.reshape(1).view(np.uint8), count)
            return None, _Came(None, None)
        payload, place, host = exchange.payload, exchange.place, None
        if exchange.send_to is not None and payload is not None and payload.size and self._staged:
            sent = take_host(payload.size)
            self._copy_down(payload, sent)
            payload = sent
        if exchange.recv_from is None or exchange.nbytes == 0:
            received, place = self.x[:0].view(np.uint8), None
        else:
            received = take(exchange.nbytes) if place is None else place
            host = take_host(exchange.nbytes) if self._staged else None
            place = received if host is None else host
        return exchange._replace(payload=payload, place=place), _Came(received, host)

    def _copy(self, place: Array, payload: Array) -> None:
        self._kernels.copy(place, payload)

    def _copy_down(self, array: Array, host: Array) -> None:
        self._runtime.copy_down(array, host)
        self._kernels.count += 1

    def adapt(self, segments: Sequence[Segment], shifts: Shifts) -> None:
        """Let runs scale by these shifts of segments."""
        self._begin()
        for place, each in zip(
            (self.plan.sent_shifts, self.plan.result_shifts), shifts, strict=True
        ):
            if place is not None:
                place[:] = shift_bytes(each, segments, self.x.size, self.x)

    def _begin(self) -> None:
        """Take CuPy's current stream, after the previous run, which may have used another."""
        carrier_of(self._world, self.x)
        self._streams.follow(self._ended)

    def run(self, x: None = None, out: None = None, iteration: int = 0) -> int:
        """All-reduce the current x into out; return the number of non-finite values. Collective.

        Raises RankFailure, or ends the job, as engine.run does; RuntimeError if it is freed or an
        earlier run failed.
        """
        if self.freed:
            raise RuntimeError(f"{self.what}: is freed, or was ended by a failure")
        self._begin()
        self.freed = True  # in case of a failure, which may leave messages in progress
        run(
            self._world, self._start, len(self._pieces), self.x, self.what, self._window,
            self._carrier,
        )  # fmt: skip
        self.freed = False
        bad = self._bad_values()
        if not bad and self._divisor is not None:
            backend_of(self.out).divide(self.out, self._divisor, self.out)
        self._ended = self._streams.mark()
        return bad

    def _start(self, number: int, _: Take) -> list[Program[int]]:
        self._runtime.check_device(f"{self.what}: x", self.x)
        return [_replay(self._betweens[number])]

    def _bad_values(self) -> int:
        if self._counted:
            self._runtime.wait(self._streams.mark())
            return int(self._counts.sum())
        return int(not is_finite(self.out)) if self._unseen else 0

    def free(self) -> None:
        """Free graphs and memory once the GPU has finished. Raises the errors of gpu_runtime.wait.

        It cannot be run any more.
        """
        self.freed = True
        self._runtime.wait(self._ended)
        self._betweens, self._memory, self._counts = [], None, np.empty(0, np.uint64)

    def drop(self) -> None:
        """Free it in a place that cannot report a failure of the GPU."""
        with suppress(RuntimeError, TimeoutError):
            self.free()


def _replay(betweens: Sequence[Between]) -> Program[int]:
    """Run the captured launches and exchanges, as a program."""
    for graph, exchange in betweens:
        if graph is not None:
            graph.launch()
        if exchange is not None:
            yield exchange
    return 0
