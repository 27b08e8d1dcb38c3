"""Collectives beside the all-reduce, with any wire: their choices, checks and execution.

Reduce-scatter, all-gather and the others are parts of all-reduces: they use the same programs,
engine, call lists and checks of arguments. blocks.py defines the rounds of each, and the places of
values.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from ..errors import ArgumentError
from ..methods import COLLECTIVES, USUAL, check_whole, said_by, suggest
from ..ops import backend_of, on_gpu, type_name
from ..ops.payloads import Array
from ..partition import split
from ..world.mpi import as_world
from ..world.ranks import Ranks
from .allreduce import Repeatable, refuse_freed, run_programs, warn_of_error
from .blocks import SHARES, DataBlocks, Share
from .by_mpi import MOST_BYTES, Move, is_faster, mover, takes
from .checks import (
    check_alike,
    check_array,
    check_count,
    check_place,
    check_world,
    check_writable,
    is_finite,
    iteration_error,
    name_of_x,
    raise_nonfinite,
    shared_amax,
)
from .method import MPI_ALLREDUCE, Method, Segment, Shifts, named_as, wrong_type, wrong_value
from .recorded import MASK, RecordedCall, Recordings, keep, recording_of, with_iteration
from .schedules import usual_algorithms

Shape = tuple[int, ...]
SHORT_BYTES = 1 << 16  # up to here the number of rounds decides the time of a broadcast


class Sketch(NamedTuple):
    """A process's own information on a call, before processes exchange it.

    shape: of x, or of the root's x if only that matters; dtype: of x; gpu: whether arrays are there
    counts: in rows, of each rank's block; for all_to_all None, or a row of counts and one of
        recv_counts, maybe None, for each hosted rank
    """

    shape: Shape
    dtype: Any
    gpu: bool
    counts: Any


class CollectiveCall(NamedTuple):
    """The properties of a call, derived from its arguments.

    dtype: of the values; shapes: of the result of each hosted rank, None if it has none
    row, rows: shape of a row of the data and the rows of each block, the same on all processes;
        for one block its shape, and nothing
    """

    blocks: DataBlocks
    dtype: Any
    gpu: bool
    shapes: tuple[Shape | None, ...]
    row: Shape
    rows: tuple[int, ...]

    def mixed(self, digest: int) -> int:
        """Return a digest of blocks mixed with that of their dtype and shape, of 62 bits."""
        text = f"{self.dtype.str} {self.row} {self.rows}".encode()
        return (digest ^ int.from_bytes(blake2b(text, digest_size=8).digest())) & MASK | 1


class CallArrays(NamedTuple):
    """The arrays of a call.

    xs, outs: of the hosted ranks, flattened to values or bytes for programs; a rank whose x is not
        read has an empty one, and None for a result that it does not get
    results: returned by the call; written: the arrays that results are copied from afterwards, or
        the results themselves
    """

    xs: Sequence[Array]
    outs: Sequence[Array | None]
    results: list[Array | None]
    written: Sequence[Array | None]

    @property
    def flat(self) -> tuple[Array, Array]:
        """x and out of the one rank of this process, each empty if there is none."""
        x, out = self.xs[0], self.outs[0]
        return x, x[:0] if out is None else out

    def copied(self) -> list[Array | None]:
        """Return the results, after copying into those that were not written directly."""
        for result, each in zip(self.results, self.written, strict=True):
            if result is not None and each is not result:
                result[...] = each
        return self.results


@dataclass(frozen=True)
class Collective(Method):
    """The choices of a collective, checked; for an all-reduce see Allreduce.

    collective: "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather" or
        "scatter"; root: of the last four
    The other choices, and errors, are those of the function of that name.
    """

    collective: str = field(default="all_gather", kw_only=True)
    root: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            known = suggest(self.collective, COLLECTIVES)
            raise ArgumentError("Collective", "collective", self.collective, known)
        try:
            self._check_added()
            super().__post_init__()
            self._check_own()
        except (TypeError, ValueError) as error:
            raise said_by(self.collective, error) from None

    def _check_own(self) -> None:
        check_whole("allreduce", "root", self.root, 0)
        object.__setattr__(self, "root", int(self.root))

    @property
    def algorithms(self) -> Sequence[str]:
        """See Method.algorithms."""
        return (*COLLECTIVES[self.collective], MPI_ALLREDUCE, USUAL)

    def _check_added(self) -> None:
        for name, usual in (("accumulate", None), ("op", "sum")):
            value = getattr(self, name)
            if not self.share.sums and value != usual:
                raise wrong_value(name, value, "must be left out: nothing is added")
        if self.finite:
            raise wrong_value("finite", True, "must be left out: only all-reduces take it")

    @property
    def call(self) -> str:
        """The name of the collective in messages."""
        return self.collective

    @property
    def share(self) -> Share:
        """The definition of the collective."""
        return SHARES[self.collective]

    @cached_property
    def accumulating(self) -> str:
        """The name of the way in which partial sums are accumulated."""
        return super().accumulating if self.share.sums or self.exact else "float32"

    @cached_property
    def result_rounded(self) -> bool:
        """Whether the result is rounded to the wire: not the blocks of a reduce-scatter."""
        return self.exact or self.collective != "reduce_scatter"

    def blocks_of(self, n: int, ranks: int) -> DataBlocks:
        """Return even blocks of n float32 values in all; for all_to_all, per rank."""
        counts = (n,) if self.share.whole else even(n, ranks)
        if self.collective == "all_to_all":
            counts *= ranks
        return DataBlocks(self.collective, counts, self.root)

    @property
    def takes_dtypes(self) -> str:
        """The dtypes that it takes, a key of checks.DTYPES."""
        if self.fmt is not None:
            return "float32"
        if self.op == "mean":
            return "floats"
        return "numbers" if self.share.sums else "any"

    def usual(self, nodes: tuple[int, ...], size_bytes: int = SHORT_BYTES + 1) -> str:
        """Return the schedule of "usual".

        nodes: the node of each rank; size_bytes: of all blocks before they are encoded
        Sums of a packed wire use that of the all-reduce; for the others see USUALS.
        """
        known = COLLECTIVES[self.collective]
        if len(known) == 1:
            return known[0]
        if self.share.sums and self.fmt is not None:
            return super().usual(nodes)
        is_short = size_bytes <= SHORT_BYTES
        broadcast = "short broadcast" if is_short else "long broadcast"
        return usual_algorithms(broadcast if self.collective == "broadcast" else "values", nodes)[0]

    def chosen(self, world: Ranks, call: CollectiveCall) -> Collective:
        """Return this with the algorithm that "usual" selects.

        A schedule, or MPI's own collective if is_faster returns True.
        """
        if self.algorithm != USUAL:
            return self
        by_mpi = self.fmt is None and not call.gpu and is_faster(world, call.blocks)
        size_bytes = call.blocks.size * np.dtype(call.blocks.dtype).itemsize
        name = MPI_ALLREDUCE if by_mpi else self.usual(world.nodes, size_bytes)
        return named_as(self, name)

    def check(
        self,
        world: Ranks,
        xs: Sequence[Any],
        outs: Sequence[Any] | None,
        counts: Any = None,
        recv_counts: Any = None,
        iteration: int = 0,
        error: Exception | None = None,
    ) -> CollectiveCall:
        """Return the properties of the call; raise any rank's error on all. Collective."""
        error = error or iteration_error(iteration, self.call)
        sketch, call = Sketch((), "", False, counts), None
        is_scatter, is_uneven = (
            self.collective == "scatter",
            self.collective == "all_to_all" and counts is not None,
        )
        try:
            if error is None:
                sketch = self._sketch(world, xs, counts, recv_counts)
                if not (is_scatter or is_uneven):
                    call = self._call(world, sketch, outs)
        except Exception as wrong:  # of any class: it must be raised on all ranks
            error = said_by(self.call, wrong)
        arguments: dict[str, object] = {
            "counts passed": counts is not None,
            "x.shape": sketch.shape if counts is None else sketch.shape[1:],
            "x.dtype": str(sketch.dtype), "x on GPU": sketch.gpu, **self.choices,
            "counts": "uneven" if is_uneven else sketch.counts, "iteration": iteration,
        }  # fmt: skip
        if is_scatter:  # only the root has x
            arguments |= {"x.shape": (), "x.dtype": "", "x on GPU": False, "counts": counts}
        read = [] if error is not None else self._read(world, xs)
        suspect = self.hides_nonfinite and not all(
            is_finite(x.reshape(-1)) for x in read if x is not None
        )
        text = f"{self.description} {[*arguments.values()]}"
        what = f"{self.call} {self.algorithm}: arguments"
        if any(check_alike(world, error, arguments, [suspect], what, text)):
            flat = [None if x is None else x.reshape(-1) for x in read]
            raise_nonfinite(world, flat, WHOLE, None, self.call)
        if call is None:
            whole = self._of_root(world, sketch) if is_scatter else self._matrix(world, sketch)
            call, error = None, None
            try:
                call = self._call(world, whole, outs)
            except Exception as wrong:
                error = said_by(self.call, wrong)
            world.agree(error, what, of_call=True)
        assert call is not None, "otherwise there is an error"
        return call

    def _read(self, world: Ranks, xs: Sequence[Any]) -> list[Any]:
        """Return the arrays of the hosted ranks, None for those that are not read."""
        if self.collective != "broadcast":
            return list(xs)
        return [x if r == self.root else None for r, x in zip(world.hosted, xs, strict=True)]

    def _sketch(self, world: Ranks, xs: Any, counts: Any, recv_counts: Any) -> Sketch:
        """Return this process's information; raise the errors of its arguments."""
        check_count(world, "x", xs)
        if self.root >= world.ranks:
            raise wrong_value("root", self.root, f"must be below {world.ranks}")
        if self.exact:
            check_world(self, world)
        first = None
        for rank, x in zip(world.hosted, xs, strict=True):
            if self.collective == "scatter" and rank != self.root:
                if x is not None:
                    allowed = "must be None: is not the root"
                    raise wrong_value(f"x of rank {rank}", type_name(x), allowed, state="")
                continue
            check_array(name_of_x(world, rank), x, self.takes_dtypes)
            first = x if first is None else first
            self._check_like(rank, x, first, counts)
        if first is None:
            return Sketch((), "", False, counts)
        x = first
        if not self.share.whole and x.ndim == 0:
            raise wrong_value("x", 0, "must have one or more", state=" has no dimension")
        if self.collective == "all_to_all":
            shares = self._shares(world, xs, counts, recv_counts)
        else:
            shares = self._counts(world, x.shape, counts)
            self._check_rows(world, xs, shares)
        return Sketch(x.shape, x.dtype, on_gpu(x), shares)

    def _check_like(self, rank: int, x: Array, first: Array, counts: Any) -> None:
        """Raise TypeError or ValueError unless an array is like the first."""
        free = counts is not None and self.collective in ("all_gather", "gather", "all_to_all")
        mine, its = (each.shape[1:] if free else each.shape for each in (x, first))
        if (mine, x.dtype) != (its, first.dtype):
            kind, other = (f"{each.dtype}{list(each.shape)}" for each in (x, first))
            state = f" is {kind}, of another {other}"
            raise wrong_value(f"x of rank {rank}", kind, "must be the same", state=state)
        check_place(f"x of rank {rank}", x, first)

    def _counts(self, world: Ranks, shape: Shape, counts: Any) -> tuple[int, ...]:
        """Return the rows of each rank's block; empty if the data are one block."""
        if self.share.whole:
            if counts is not None:
                allowed = "must be left out: there is one block"
                raise wrong_value("counts", counts, allowed, state="")
            return ()
        if counts is not None:
            return checked_counts("counts", counts, world.ranks)
        if self.collective in ("all_gather", "gather"):
            return (shape[0],) * world.ranks
        return even(shape[0], world.ranks)

    def _check_rows(self, world: Ranks, xs: Sequence[Any], shares: tuple[int, ...]) -> None:
        """Raise ValueError unless arrays have the numbers of rows in counts."""
        for rank, x in zip(world.hosted, xs, strict=True):
            if x is None or self.share.whole:
                continue
            rows = shares[rank] if self.collective in ("all_gather", "gather") else sum(shares)
            check_rows(rank, x, rows)

    def _shares(self, world: Ranks, xs: Any, counts: Any, recv_counts: Any) -> Any:
        """Return counts and recv_counts of all_to_all for each hosted rank."""
        ranks, several = world.ranks, world.virtual_ranks > 1
        if counts is None:
            rows = xs[0].shape[0]
            if rows % ranks:
                allowed = f"without counts must be a multiple of {ranks}"
                raise wrong_value("x", rows, allowed, state=f" has {rows} rows")
            if recv_counts is not None:
                allowed = "must be left out if counts are"
                raise wrong_value("recv_counts", recv_counts, allowed, state="")
            return (rows // ranks,) * ranks
        sent, came = ([each] if not several else each for each in (counts, recv_counts))
        check_count(world, "counts", sent)
        came = [None] * world.virtual_ranks if recv_counts is None else came
        check_count(world, "recv_counts", came)
        rows_of = [checked_counts("counts", each, ranks) for each in sent]
        for rank, x, each in zip(world.hosted, xs, rows_of, strict=True):
            check_rows(rank, x, sum(each))
        expected = [
            None if each is None else checked_counts("recv_counts", each, ranks) for each in came
        ]
        return rows_of, expected

    def _of_root(self, world: Ranks, sketch: Sketch) -> Sketch:
        """Return the root's information on the array that it scatters. Collective."""
        own = (sketch.shape, np.dtype(sketch.dtype), sketch.gpu) if sketch.dtype else None
        all_ranks = world.gather(own, f"{self.call}: shape")
        shape, dtype, gpu = next(each for each in all_ranks if each is not None)
        return Sketch(shape, dtype, gpu, self._counts(world, shape, sketch.counts))

    def _matrix(self, world: Ranks, sketch: Sketch) -> Sketch:
        """Return the counts from all ranks to all ranks. Collective."""
        ranks = world.ranks
        sent, expected = sketch.counts
        known = np.full((2, ranks, ranks), -1)
        for rank, mine, wanted in zip(world.hosted, sent, expected, strict=True):
            known[0, rank] = mine
            if wanted is not None:
                known[1, :, rank] = wanted
        counts, wanted = world.max(known.ravel(), f"{self.call}: counts").reshape(known.shape)
        for i, j in np.argwhere((wanted >= 0) & (wanted != counts)).tolist():
            error = ValueError(
                f"{self.call}: counts[{j}]={counts[i, j]} on rank {i}, "
                f"recv_counts[{i}]={wanted[i, j]} on rank {j}: must be the same"
            )
            world.agree(error, self.call)
        return sketch._replace(counts=tuple(counts.ravel().tolist()))

    def _call(self, world: Ranks, sketch: Sketch, outs: Any) -> CollectiveCall:
        """Return a call's properties; raise TypeError or ValueError for outs that do not fit."""
        shape, dtype, gpu, counts = sketch
        rest, ranks, name = shape[1:], world.ranks, self.collective
        each = 1 if self.share.whole else prod(rest)
        if self.collective == "all_to_all" and len(counts) == ranks:
            counts = counts * ranks
        in_values = tuple(each * rows for rows in counts) or (prod(shape),)
        keeps = name == "broadcast" and self.fmt is None
        blocks = blocks_of(name, in_values, self.root, keeps, np.dtype(dtype).str, self.fmt is None)
        if self.algorithm == MPI_ALLREDUCE and (gpu or not takes(world, blocks)):
            allowed = (
                "must be on the CPU, in a World of one rank per process, at most "
                f"{MOST_BYTES} bytes in all; sums need a dtype that MPI can add"
            )
            raise wrong_value("algorithm", "mpi", allowed)
        shapes: list[Shape | None] = []
        for rank in world.hosted:
            result: Shape | None = shape
            if not self.share.whole:
                rows = sum(counts)
                if name == "all_to_all":
                    rows = sum(counts[rank::ranks])
                elif name in ("reduce_scatter", "scatter"):
                    rows = counts[rank]
                result = (rows, *rest)
            if name in ("reduce", "gather") and rank != self.root:
                result = None
            shapes.append(result)
        call = CollectiveCall(
            blocks, np.dtype(dtype), gpu, tuple(shapes[:1] if self.share.same else shapes),
            shape if self.share.whole else rest, counts,
        )  # fmt: skip
        if outs is not None:
            self._check_outs(call, outs)
        lacks_out = outs is None or any(out is None for out in outs)
        if gpu and name == "scatter" and not world.hosts(self.root) and lacks_out:
            allowed = "must be passed: x of the root is on a GPU"
            raise wrong_type("out", None, allowed, state="")
        return call

    def _check_outs(self, call: CollectiveCall, outs: Any) -> None:
        if not isinstance(outs, Sequence) or len(outs) != len(call.shapes):
            allowed = f"must be {len(call.shapes)}, one for each result"
            raise wrong_value("out", type_name(outs), allowed, state="")
        for out, shape in zip(outs, call.shapes, strict=True):
            if out is None:
                continue
            check_array("out", out, self.takes_dtypes)
            kind = f"{out.dtype}{list(out.shape)}"
            if shape is None:
                allowed = "must be None on ranks that have no result"
                raise wrong_value("out", kind, allowed, state="")
            if (out.shape, out.dtype) != (shape, call.dtype):
                allowed = f"must be {call.dtype}{list(shape)}"
                raise wrong_value("out", kind, allowed, state=f" is {kind}")
            if on_gpu(out) != call.gpu:
                allowed = f"must be on the {'GPU' if call.gpu else 'CPU'}, like x"
                raise wrong_type("out", kind, allowed, state="")
            check_writable(out)

    def run(
        self,
        world: Any,
        xs: Sequence[Any],
        outs: Sequence[Any] | None = None,
        *,
        counts: Any = None,
        recv_counts: Any = None,
        iteration: int = 0,
        error: Exception | None = None,
        known_by: Hashable = None,
    ) -> list[Array | None]:
        """Run the collective for the arrays of the hosted ranks; return their results. Collective.

        xs: one for each hosted rank, for scatter None except on the root
        outs: for the results: one for each hosted rank, or a single one if results are the same
        counts, recv_counts, iteration: as for the function; with virtual ranks those of all_to_all
            are a list for each hosted rank
        error: of this process, known before the call: raised on all
        known_by: a key for all arguments except arrays, under which run_known may find the call
        Returns one result for each of outs; None for a rank that has none.
        """
        ranks = as_world(world, self.call)
        call = self.check(ranks, xs, outs, counts, recv_counts, iteration, error)
        method = self.chosen(ranks, call)
        if self.share.sums:
            warn_of_error(method, ranks)
        results = method.move(ranks, xs, outs, call, iteration)
        if known_by is not None and ranks.virtual_ranks == 1:
            know(ranks, known_by, method, xs[0], call)
        return results

    def move(
        self,
        world: Ranks,
        xs: Sequence[Any],
        outs: Sequence[Any] | None,
        call: CollectiveCall,
        iteration: int,
    ) -> list[Array | None]:
        """Do the same as run, with arguments that check has accepted. Collective."""
        arrays = self._arrays(world, xs, outs, call)
        recording = self._recording(world, arrays, call)
        self._into(world, arrays, call, iteration, recording)
        return arrays.copied()

    def _arrays(
        self, world: Ranks, xs: Sequence[Any], outs: Sequence[Any] | None, call: CollectiveCall
    ) -> CallArrays:
        """Return the arrays of a call."""
        results = self._results(xs, outs, call)
        sizes = [call.blocks.sizes(rank, world.ranks) for rank in world.hosted]
        read = [self._nothing(results, call) if x is None else x for x in xs]
        taken = [self._flat(x)[:size] for x, (size, _) in zip(read, sizes, strict=True)]
        keeps = call.blocks.keeps and world.hosts(self.root)
        if keeps:  # the root, in the same process, already has it
            written: list[Array | None] = [xs[self.root - world.rank]]
        else:
            pairs = product((each for each in results if each is not None), taken)
            shares = any(np.may_share_memory(*pair) for pair in pairs)
            written = [r if r is None or not shares else np.empty_like(r) for r in results]
        flat = [None if w is None or keeps else self._flat(w) for w in written]
        return CallArrays(taken, [*flat, *[None] * (len(taken) - len(flat))], results, written)

    def prepare(
        self,
        world: Any,
        xs: Sequence[Any],
        outs: Sequence[Any] | None = None,
        *,
        counts: Any = None,
        recv_counts: Any = None,
    ) -> PreparedCollective:
        """Return a repeatable collective of exactly these arrays. Collective.

        The arguments are compared over the ranks here, and not in later runs; they and the errors
        are those of run.
        """
        ranks = as_world(world, self.call)
        call = self.check(ranks, xs, outs, counts, recv_counts)
        method = self.chosen(ranks, call)
        if self.share.sums:
            warn_of_error(method, ranks)
        return PreparedCollective(method, ranks, xs, outs, call)

    def _results(self, xs: Sequence[Any], outs: Any, call: CollectiveCall) -> list[Array | None]:
        """Return the arrays for the results."""
        like = next((x for x in xs if x is not None), np.empty(0))
        return [
            out if out is not None or shape is None
            else np.empty_like(like, shape=shape, dtype=call.dtype)
            for out, shape in zip(outs or [None] * len(call.shapes), call.shapes, strict=True)
        ]  # fmt: skip

    def _flat(self, x: Array) -> Array:
        """Return an array flattened for programs: its values, or its bytes."""
        flat = x.reshape(-1)
        return flat.view(np.uint8) if self.fmt is None and not self.share.sums else flat

    def _nothing(self, results: Sequence[Array | None], call: CollectiveCall) -> Array:
        """Return an empty array of the results' kind, for a rank without input."""
        like = next((each for each in results if each is not None), np.empty(0))
        return np.empty_like(like, shape=(0,), dtype=call.dtype)

    def _recording(
        self, world: Ranks, arrays: CallArrays, call: CollectiveCall
    ) -> RecordedCall | None:
        """Return the call list of calls like this, from the second one on. Collective."""
        if not self._is_listed(call):
            return None
        x, out = arrays.flat
        shifts = self.first_shifts(WHOLE)
        return recording_of(world, self, x, WHOLE, shifts, out, call.blocks)

    def _is_listed(self, call: CollectiveCall) -> bool:
        """Whether compiled code adds or copies the values."""
        listed = ("float32",) if self.share.sums else ("float32", "uint8")
        return self.is_compiled and call.blocks.dtype in listed

    def _into(
        self,
        world: Ranks,
        arrays: CallArrays,
        call: CollectiveCall,
        iteration: int,
        recording: RecordedCall | None,
        move: Move | None = None,
    ) -> None:
        """Run the collective, by a call list if there is one. Collective.

        move: MPI's own function, if it is already made
        Raises NonFiniteGradient on all ranks.
        """
        shifts = self._shifts(world, arrays.xs) if self.shares_shifts else self.first_shifts(WHOLE)
        if self.algorithm == MPI_ALLREDUCE:
            (move or mover(world, call.blocks))(*arrays.flat)
            count(world, *arrays.flat)
        elif recording is None:
            bad = self._run_programs(world, arrays, call.blocks, shifts, iteration)
            self._agree(world, bad, arrays.xs)
        else:
            if self.shares_shifts:
                recording.adapt(WHOLE, shifts)
            self._agree(world, recording.run(*arrays.flat, iteration), arrays.xs)
            return
        self._divide(world, arrays.outs)

    def _divide(self, world: Ranks, outs: Sequence[Array | None]) -> None:
        """Divide sums by the number of ranks, if op is "mean"."""
        divisor = self.divisor(world.ranks)
        if divisor is None:
            return
        for out in (each for each in outs if each is not None):
            if out.dtype == np.float32:
                backend_of(out).divide(out, divisor, out)
            else:
                np.divide(out, out.dtype.type(world.ranks), out)

    def _agree(self, world: Ranks, bad: int, xs: Sequence[Array]) -> None:
        """Raise NonFiniteGradient if any rank has found non-finite values. Collective."""
        if self.fmt is None:
            return
        if not self.share.same:
            what = f"{self.call} {self.algorithm}: results"
            (bad,) = check_alike(world, None, {}, [bad > 0], what)
        if bad:
            raise_nonfinite(world, xs, WHOLE, None, self.call)

    def _run_programs(
        self, world: Ranks, arrays: CallArrays, blocks: DataBlocks, shifts: Shifts, iteration: int
    ) -> int:
        """Run the programs of the hosted ranks; count non-finite values that they write."""
        xs, outs = arrays.xs, arrays.outs
        plan = self.plan(world.nodes, xs[0], WHOLE, shifts, iteration, blocks)
        with np.errstate(over="ignore", invalid="ignore"):
            bad = run_programs(world, plan, xs, outs, f"{self.call} {self.algorithm}")
        if self.result_unseen:
            return int(not all(is_finite(out) for out in outs if out is not None))
        return bad

    def _shifts(self, world: Ranks, xs: Sequence[Array]) -> Shifts:
        """Return the shifts of all values, for contributions, and for sums and results. Collective.

        Raises NonFiniteGradient.
        """
        bits = shared_amax(world, xs, WHOLE, f"{self.call} {self.algorithm}: exponents")
        return self.shifts_of(bits, world.ranks, sums=self.share.sums)


class KnownCall(NamedTuple):
    """The preparation of a call that is recognised by its arguments.

    nodes: of the world; digest: of the call, the same on all processes
    recording, move: one of them executes it
    is_read, is_written: whether the rank's x is read, and its out written
    nothing: an empty array of the dtype, for an absent x or out
    """

    nodes: tuple[int, ...]
    digest: int
    method: Collective
    call: CollectiveCall
    recording: RecordedCall | None
    move: Move | None
    is_read: bool
    is_written: bool
    nothing: Array


def know(world: Ranks, key: Hashable, method: Collective, x: Any, call: CollectiveCall) -> None:
    """Let later calls with these arguments run at once, if nothing depends on values.

    key: all arguments except arrays; method: after the choice of algorithm; x: of this rank
    """
    if world.board is None or world.virtual_ranks > 1 or call.gpu:
        return
    if method.shares_shifts or method.hides_nonfinite:
        return
    recordings = world.cache.get(Recordings, Recordings)
    recording, move = None, None
    if method.algorithm == MPI_ALLREDUCE:
        move = mover(world, call.blocks)
    else:
        entry = recordings.get((method, call.blocks))
        if entry is None or entry.recording is None:
            return
        recording = entry.recording
    digest = call.mixed(recordings.digest(method, call.blocks, world.nodes))
    is_read, is_written = (size > 0 for size in call.blocks.sizes(world.rank, world.ranks))
    known = KnownCall(
        world.nodes, digest, method, call, recording, move, is_read, is_written,
        np.empty(0, call.dtype),
    )  # fmt: skip
    with suppress(TypeError):  # counts may be arrays, which cannot be hashed
        keep(world.board.known, (key, *kind_of(x)), known)


def kind_of(x: Array | None) -> tuple[Any, ...]:
    """Return shape and dtype, by which calls are recognised."""
    return (None,) if x is None else (x.shape, x.dtype)


def run_known(
    world: Ranks, key: Hashable, x: Any, out: Any, iteration: object
) -> list[Array | None] | None:
    """Run a call whose arguments were seen before, with only a quick check of them. Collective.

    key: see know; iteration: compared over the ranks, and nothing else
    Returns None, with nothing done, if the call is not recognised here or elsewhere, or other ranks
    make another call. Raises the NonFiniteGradient of run.
    """
    board = world.board
    if board is None or board.has_failed or world.account is not None or world.lent_by is not None:
        return None
    if type(iteration) is not int or iteration >> 62 or not is_plain(x):
        return None
    try:
        known = board.known[(key, *kind_of(x))]
    except (KeyError, TypeError):  # errors of the arguments are raised later
        return None
    nodes, digest, method, call, recording, move, is_read, is_written, nothing = known
    (shape,) = call.shapes
    if nodes is not world.nodes or (recording is not None and recording.freed):
        return None
    if out is not None:
        if not (is_plain(out) and (out.shape, out.dtype) == (shape, call.dtype)):
            return None
        if not out.flags.writeable or (is_read and is_written and np.may_share_memory(x, out)):
            return None
    elif shape is not None:
        out = np.empty(shape, call.dtype)
    if not board.agrees(with_iteration(digest, iteration), method.collective, first=True):
        return None
    pair = x if is_read else nothing, out if is_written else nothing
    if move is not None:
        move(*map(method._flat, pair))
        count(world, *pair)
        method._divide(world, pair[1:])
    elif recording is not None:
        bad = recording.run(*pair, iteration)
        if method.fmt is not None:
            method._agree(world, bad, [pair[0].reshape(-1)])
    if call.blocks.keeps and is_read and out is not x:
        out[...] = x
    return [out]


def is_plain(x: object) -> bool:
    """Whether this is a C-contiguous NumPy array, or None."""
    return x is None or (type(x) is np.ndarray and x.flags.c_contiguous)


class PreparedCollective(Repeatable):
    """A repeatable collective of fixed arrays; made by Collective.prepare. Collective.

    is_fast: whether run executes a compiled call list, without the interpreter, or MPI's own
        function: with one rank per process and NumPy arrays, unless wire is "nvfp4". Otherwise it
        does the same as Collective.run, without comparing the arguments. A small collective comes
        before or after the data if a step depends on all values.
    """

    def __init__(
        self,
        method: Collective,
        world: Ranks,
        xs: Sequence[Any],
        outs: Sequence[Any] | None,
        call: CollectiveCall,
    ) -> None:
        self._method, self._world, self._call = method, world, call
        self._arrays = method._arrays(world, xs, outs, call)
        self._compares = method.hides_nonfinite or method.is_random  # iterations, over the ranks
        self._recording: RecordedCall | None = None
        self._move = mover(world, call.blocks) if method.algorithm == MPI_ALLREDUCE else None
        x, out = self._arrays.flat
        is_list = world.virtual_ranks == 1 and isinstance(x, np.ndarray)
        if is_list and method._is_listed(call):
            shifts = method.first_shifts(WHOLE)
            self._recording = RecordedCall(
                world, method, x, out, WHOLE, shifts, moves=False, blocks=call.blocks
            )
            finalize(self, self._recording.drop)

    @property
    def is_fast(self) -> bool:
        """Whether run executes a call list, or MPI's own function."""
        return self._recording is not None or self._move is not None

    def run(self, *, iteration: int = 0) -> list[Array | None]:
        """Run on the current values of the arrays; return the same as Collective.run. Collective.

        iteration: as in the function, if rounding is "stochastic"; otherwise it is ignored
        The results lie in the same arrays every time.
        Raises on all ranks NonFiniteGradient as the function, and TypeError for a wrong iteration
        if it matters; RankFailure. After free it raises RuntimeError, or ends the job if other
        ranks have not freed it.
        """
        world, method = self._world, self._method
        if self._freed:
            refuse_freed(world)
        if world.lent_by is not None:
            world.check_thread()
        if self._compares:
            error = iteration_error(iteration, "Prepared.run")
            suspect = method.hides_nonfinite and not all(map(is_finite, self._arrays.xs))
            what = f"{method.call} {method.algorithm}: iteration"
            if any(check_alike(world, error, {"iteration": iteration}, [suspect], what)):
                raise_nonfinite(world, self._arrays.xs, WHOLE, None, method.call)
        method._into(world, self._arrays, self._call, iteration, self._recording, self._move)
        return self._arrays.copied()


WHOLE = (Segment("x", 0, 1 << 62),)  # all tiles, with one shift


def count(world: Any, x: Array, out: Array) -> None:
    """Count the bytes that this process has passed to MPI's own collective."""
    world.count_collective(max(x.nbytes, out.nbytes))


def even(rows: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank for blocks as even as possible."""
    blocks = (split(rows, ranks, i) for i in range(ranks))
    return tuple(stop - start for start, stop in blocks)


def check_rows(rank: int, x: Array, rows: int) -> None:
    """Raise ValueError unless a rank's array has the number of rows that counts say."""
    if x.shape[0] != rows:
        name, state = f"x of rank {rank}", f" has {x.shape[0]} rows"
        raise wrong_value(name, x.shape[0], f"counts say {rows}", state=state)


def checked_counts(name: str, counts: Any, ranks: int) -> tuple[int, ...]:
    """Return counts as a tuple. Raises TypeError or ValueError unless there is one per rank."""
    if not isinstance(counts, Sequence | np.ndarray) or isinstance(counts, str):
        raise wrong_type(name, counts, "must be a list of integers")
    if len(counts) != ranks:
        raise wrong_value(name, counts, f"must be {ranks}, one per rank")
    for each in counts:
        check_whole("allreduce", name, each, 0)
    return tuple(map(int, counts))


@lru_cache(maxsize=256)
def blocks_of(
    name: str, counts: tuple[int, ...], root: int, keeps: bool, dtype: str, raw: bool
) -> DataBlocks:
    """Return blocks of these numbers of values; in bytes if values travel unrounded."""
    if raw and not SHARES[name].sums:
        size = np.dtype(dtype).itemsize
        return DataBlocks(name, tuple(size * each for each in counts), root, keeps, "uint8")
    return DataBlocks(name, counts, root, keeps, np.dtype(dtype).name)
