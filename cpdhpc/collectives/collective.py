"""Collectives beside the all-reduce, with any wire: their choices, checks, and what they do.

Reduce-scatter, all-gather and the others are parts of all-reduces: the same programs, engine, call
lists and checks of arguments. blocks.py says which rounds each has, and where values lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..methods import USUAL, check_whole, said_by, suggest
from ..ops import backend_of, on_gpu, to_host
from ..ops.payloads import Array
from ..partition import split
from ..world.mpi import as_world
from ..world.ranks import Ranks
from .allreduce import named
from .blocks import SHARES, Blocks, Share
from .by_mpi import move_by_mpi
from .checks import (
    NONFINITE_BITS,
    NonFiniteGradient,
    amax_of,
    check_alike,
    check_array,
    check_count,
    check_place,
    check_world,
    is_finite,
    iteration_error,
    name_of_x,
)
from .engine import Program, Take, run
from .method import MPI_ALLREDUCE, Method, Segment, Shifts, aps_shift, integer_shift
from .rank_program import program
from .recorded import recording_of

Shape = tuple[int, ...]
KNOWN = tuple(name for name, share in SHARES.items() if share.algorithms)


class Sketch(NamedTuple):
    """What a process knows of a call before all have spoken.

    shape: of x; of the root's where only that counts; dtype: of x; gpu: whether arrays are there
    counts: in rows, of each rank's block; of all_to_all None, or a row of counts and one of
        recv_counts, maybe None, for each hosted rank
    """

    shape: Shape
    dtype: Any
    gpu: bool
    counts: Any


class Call(NamedTuple):
    """What a call is, once its arguments are known.

    dtype: of the values; shapes: of the result of each hosted rank, None where it has none
    """

    blocks: Blocks
    dtype: Any
    gpu: bool
    shapes: tuple[Shape | None, ...]


@dataclass(frozen=True)
class Collective(Method):
    """A collective with its choices made and checked; an all-reduce is an Allreduce.

    collective: "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather" or
        "scatter"; root: of the last four
    The other choices, and errors, are those of the function of that name.
    """

    collective: str = field(default="all_gather", kw_only=True)
    root: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.collective not in KNOWN:
            said = suggest(self.collective, KNOWN)
            raise ValueError(f"Collective: collective={self.collective!r}: {said}")
        try:
            super().__post_init__()
            self._check_own()
        except (TypeError, ValueError) as error:
            raise said_by(self.collective, error) from None

    def _check_own(self) -> None:
        check_whole("allreduce: root", self.root, 0)
        object.__setattr__(self, "root", int(self.root))
        known = (*self.share.algorithms, MPI_ALLREDUCE, USUAL)
        if self.algorithm not in known:
            said = suggest(self.algorithm, known)
            raise ValueError(f"allreduce: algorithm={self.algorithm!r}: {said}")
        for name, usual in (("accumulate", None), ("op", "sum")):
            given = getattr(self, name)
            if not self.share.sums and given != usual:
                raise ValueError(f"allreduce: {name}={given!r}: must be left out: nothing is added")

    @property
    def call(self) -> str:
        """The collective, as messages name it."""
        return self.collective

    @property
    def share(self) -> Share:
        """What the collective is."""
        return SHARES[self.collective]

    @cached_property
    def accumulating(self) -> str:
        """The name of the way in which partial sums are kept."""
        return super().accumulating if self.share.sums or self.exact else "float32"

    @cached_property
    def result_rounded(self) -> bool:
        """Whether the result is rounded to the wire: not where a reduce-scatter leaves it."""
        return self.exact or self.collective != "reduce_scatter"

    @property
    def takes_dtypes(self) -> str:
        """Which dtypes it takes, of checks.DTYPES."""
        if self.fmt is not None:
            return "float32"
        if self.op == "mean":
            return "floats"
        return "numbers" if self.share.sums else "any"

    def usual(self, nodes: tuple[int, ...]) -> str:
        """Return the schedule of "usual".

        nodes: the node of each rank
        Sums of a packed wire go as in the all-reduce. Else it is hier if ranks share nodes and
        there are several; direct on one node, where a payload is read where it lies; rhd on nodes
        of one rank each. Broadcasts go down a tree on one node, else along a chain.
        """
        several = len(set(nodes)) > 1
        if len(self.share.algorithms) == 1:
            return self.share.algorithms[0]
        if self.collective == "broadcast":
            return "ring" if several else "tree"
        if self.share.sums and self.fmt is not None:
            return super().usual(nodes)
        return ("hier" if len(set(nodes)) < len(nodes) else "rhd") if several else "direct"

    def chosen(self, world: Ranks, call: Call) -> Collective:
        """Return this with the algorithm that "usual" stands for."""
        if self.algorithm != USUAL:
            return self
        return named(self, self.usual(world.nodes))

    def check(
        self,
        world: Ranks,
        xs: Sequence[Any],
        outs: Sequence[Any] | None,
        counts: Any = None,
        recv_counts: Any = None,
        iteration: int = 0,
        error: Exception | None = None,
    ) -> Call:
        """Return what the call is; raise on all ranks alike what is wrong on any. Collective."""
        error = error or iteration_error(iteration, self.call)
        sketch, call = Sketch((), "", False, counts), None
        is_scatter, is_uneven = self.collective == "scatter", self._has_pairs and counts is not None
        try:
            if error is None:
                sketch = self._sketch(world, xs, counts, recv_counts)
                if not (is_scatter or is_uneven):
                    call = self._call(world, sketch, outs)
        except Exception as found:  # whatever: the other ranks are to hear of it
            error = said_by(self.call, found)
        arguments: dict[str, object] = {
            "x.shape": sketch.shape if counts is None else sketch.shape[1:],
            "x.dtype": str(sketch.dtype), "x on GPU": sketch.gpu, **self.choices,
            "counts": "uneven" if is_uneven else sketch.counts, "iteration": iteration,
        }  # fmt: skip
        if is_scatter:  # the root alone has something to say of x
            arguments |= {"x.shape": (), "x.dtype": "", "x on GPU": False, "counts": counts}
        hides = self.hides_nonfinite and error is None
        suspect = hides and not all(is_finite(x.reshape(-1)) for x in xs if x is not None)
        text = f"{self.description} {[*arguments.values()]}"
        what = f"{self.call} {self.algorithm}: arguments"
        if any(check_alike(world, error, arguments, [suspect], what, text)):
            self._raise_nonfinite(world, xs)
        if call is None:
            whole = self._told(world, sketch) if is_scatter else self._matrix(world, sketch)
            call, error = None, None
            try:
                call = self._call(world, whole, outs)
            except Exception as found:
                error = said_by(self.call, found)
            world.agree(error, what, of_call=True)
        assert call is not None, "else there is an error"
        return call

    @property
    def _has_pairs(self) -> bool:
        return self.collective == "all_to_all"

    def _sketch(self, world: Ranks, xs: Any, counts: Any, recv_counts: Any) -> Sketch:
        """Return what this process knows; raise what is wrong with its arguments."""
        check_count(world, "x", xs)
        if self.root >= world.ranks:
            raise ValueError(f"allreduce: root={self.root}: must be below {world.ranks}")
        if self.exact or self.algorithm == MPI_ALLREDUCE:
            check_world(self, world)
        given = []
        for rank, x in zip(world.hosted, xs, strict=True):
            if self.collective == "scatter" and rank != self.root:
                if x is not None:
                    raise ValueError(f"allreduce: x of rank {rank}: must be None: is not the root")
                continue
            check_array(name_of_x(world, rank), x, self.takes_dtypes)
            given.append((rank, x))
            self._check_like(rank, x, given[0][1], counts)
        if not given:
            return Sketch((), "", False, counts)
        x = given[0][1]
        if not self.share.whole and x.ndim == 0:
            raise ValueError("allreduce: x has no dimension: must have one or more")
        if self._has_pairs:
            shares = self._shares(world, xs, counts, recv_counts)
        else:
            shares = self._counts(world, x.shape, counts)
            self._check_rows(world, xs, shares)
        if self.algorithm == MPI_ALLREDUCE and on_gpu(x):
            raise ValueError("allreduce: algorithm='mpi': x is on a GPU: must be on the CPU")
        return Sketch(x.shape, x.dtype, on_gpu(x), shares)

    def _check_like(self, rank: int, x: Array, first: Array, counts: Any) -> None:
        """Raise TypeError or ValueError unless an array is like the first."""
        free = counts is not None and self.collective in ("all_gather", "gather", "all_to_all")
        mine, its = (each.shape[1:] if free else each.shape for each in (x, first))
        if (mine, x.dtype) != (its, first.dtype):
            raise ValueError(
                f"allreduce: x of rank {rank} is {x.dtype}{list(x.shape)}, of another "
                f"{first.dtype}{list(first.shape)}: must be the same"
            )
        check_place(f"x of rank {rank}", x, first)

    def _counts(self, world: Ranks, shape: Shape, counts: Any) -> tuple[int, ...]:
        """Return the rows of each rank's block; none where the whole is one."""
        if self.share.whole:
            if counts is not None:
                raise ValueError("allreduce: counts: must be left out: there is one block")
            return ()
        if counts is not None:
            return checked_counts("counts", counts, world.ranks)
        if self.collective in ("all_gather", "gather"):
            return (shape[0],) * world.ranks
        return even(shape[0], world.ranks)

    def _check_rows(self, world: Ranks, xs: Sequence[Any], shares: tuple[int, ...]) -> None:
        """Raise ValueError unless arrays have the rows that counts say."""
        for rank, x in zip(world.hosted, xs, strict=True):
            if x is None or self.share.whole:
                continue
            rows = shares[rank] if self.collective in ("all_gather", "gather") else sum(shares)
            if x.shape[0] != rows:
                raise ValueError(
                    f"allreduce: x of rank {rank} has {x.shape[0]} rows: counts say {rows}"
                )

    def _shares(self, world: Ranks, xs: Any, counts: Any, recv_counts: Any) -> Any:
        """Return the counts of all_to_all, and of what comes, for each hosted rank."""
        ranks, several = world.ranks, world.virtual_ranks > 1
        if counts is None:
            rows = xs[0].shape[0]
            if rows % ranks:
                raise ValueError(
                    f"allreduce: x has {rows} rows: without counts must be a multiple of {ranks}"
                )
            if recv_counts is not None:
                raise ValueError("allreduce: recv_counts: must be left out where counts are")
            return (rows // ranks,) * ranks
        sent, came = ([each] if not several else each for each in (counts, recv_counts))
        check_count(world, "counts", sent)
        came = [None] * world.virtual_ranks if recv_counts is None else came
        check_count(world, "recv_counts", came)
        rows_of = [checked_counts("counts", each, ranks) for each in sent]
        for rank, x, each in zip(world.hosted, xs, rows_of, strict=True):
            if sum(each) != x.shape[0]:
                raise ValueError(
                    f"allreduce: x of rank {rank} has {x.shape[0]} rows: counts say {sum(each)}"
                )
        expected = [each and checked_counts("recv_counts", each, ranks) for each in came]
        return rows_of, expected

    def _told(self, world: Ranks, sketch: Sketch) -> Sketch:
        """Return what the root knows of the array that it scatters. Collective."""
        told = (sketch.shape, np.dtype(sketch.dtype).str, sketch.gpu) if sketch.dtype else None
        found = world.gather(told, f"{self.call}: shape")
        shape, dtype, gpu = next(each for each in found if each is not None)
        return Sketch(shape, np.dtype(dtype), gpu, self._counts(world, shape, sketch.counts))

    def _matrix(self, world: Ranks, sketch: Sketch) -> Sketch:
        """Return what all ranks send to all. Collective."""
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

    def _call(self, world: Ranks, sketch: Sketch, outs: Any) -> Call:
        """Return what a call is; raise TypeError or ValueError for outs that do not fit."""
        shape, dtype, gpu, counts = sketch
        rest, ranks, name = shape[1:], world.ranks, self.collective
        each = 1 if self.share.whole else prod(rest)
        if self._has_pairs and len(counts) == ranks:
            counts = counts * ranks
        in_values = tuple(each * rows for rows in counts) or (prod(shape),)
        keeps = name == "broadcast" and self.fmt is None
        blocks = blocks_of(name, in_values, self.root, keeps, np.dtype(dtype).str, self.fmt is None)
        shapes: list[Shape | None] = []
        for rank in world.hosted:
            found: Shape | None = shape
            if not self.share.whole:
                rows = sum(counts)
                if name == "all_to_all":
                    rows = sum(counts[rank::ranks])
                elif name in ("reduce_scatter", "scatter"):
                    rows = counts[rank]
                found = (rows, *rest)
            if name in ("reduce", "gather") and rank != self.root:
                found = None
            shapes.append(found)
        call = Call(blocks, np.dtype(dtype), gpu, tuple(shapes[:1] if self.share.alike else shapes))
        if outs is not None:
            self._check_outs(call, outs)
        return call

    def _check_outs(self, call: Call, outs: Any) -> None:
        if not isinstance(outs, Sequence) or len(outs) != len(call.shapes):
            raise ValueError(f"allreduce: out: must be {len(call.shapes)}, one for each result")
        for out, shape in zip(outs, call.shapes, strict=True):
            if out is None:
                continue
            check_array("out", out, self.takes_dtypes)
            if shape is None:
                raise ValueError("allreduce: out: must be None on ranks that have no result")
            if (out.shape, out.dtype) != (shape, call.dtype):
                raise ValueError(
                    f"allreduce: out is {out.dtype}{list(out.shape)}: must be "
                    f"{call.dtype}{list(shape)}"
                )
            if on_gpu(out) != call.gpu:
                place = "GPU" if call.gpu else "CPU"
                raise TypeError(f"allreduce: out must be on the {place}, as x")
            if not getattr(out.flags, "writeable", True):
                raise ValueError("allreduce: out is read-only")

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
    ) -> list[Array | None]:
        """Do it for the arrays of the hosted ranks; return their results. Collective.

        xs: one for each hosted rank, of scatter None but for the root
        outs: for the results: one for each hosted rank, or one of all where they are the same
        counts, recv_counts, iteration: as the function; with virtual ranks those of all_to_all are
            a list for each hosted rank
        error: of this process, known before the call: raised on all
        Returns as many as outs has; None for a rank that has none.
        """
        ranks = as_world(world, self.call)
        call = self.check(ranks, xs, outs, counts, recv_counts, iteration, error)
        return self.move(ranks, xs, outs, call, iteration)

    def move(
        self,
        world: Ranks,
        xs: Sequence[Any],
        outs: Sequence[Any] | None,
        call: Call,
        iteration: int,
    ) -> list[Array | None]:
        """Do what run does with arguments that check has seen. Collective."""
        results = self._results(xs, outs, call)
        sizes = [call.blocks.sizes(rank, world.ranks) for rank in world.hosted]
        taken = [self._taken(x, call)[:size] for x, (size, _) in zip(xs, sizes, strict=True)]
        keeps = call.blocks.keeps and world.hosts(self.root)
        shared = [r for r in results if r is not None and not keeps and overlaps(r, taken)]
        written = [r if r is None or not shared else np.empty_like(r) for r in results]
        flat = [None if w is None or keeps else self._flat(w) for w in written]
        totals = [*flat, *[None] * (len(taken) - len(flat))]
        method = self.chosen(world, call)
        with np.errstate(over="ignore", invalid="ignore"):
            method._into(world, taken, totals, call, iteration)
            divisor = method.divisor(world.ranks)
            for total in [] if divisor is None else [each for each in totals if each is not None]:
                divide = backend_of(total).divide if call.dtype == np.float32 else np.divide
                divide(total, divisor if call.dtype == np.float32 else world.ranks, total)
        if keeps:  # the root has it already, in the same process
            written = [xs[self.root - world.rank]]
        for result, each in zip(results, written, strict=True):
            if result is not None and each is not result:
                result[...] = each
        return results

    def _results(self, xs: Sequence[Any], outs: Any, call: Call) -> list[Array | None]:
        """Return the arrays that results are to lie in."""
        like = next((x for x in xs if x is not None), np.empty(0))
        given = [None] * len(call.shapes) if outs is None else outs
        if call.gpu != on_gpu(like) and any(out is None for out in given):
            raise TypeError(f"{self.call}: out: must be given where x of the root is on a GPU")
        return [
            out if out is not None or shape is None
            else np.empty_like(like, shape=shape, dtype=call.dtype)
            for out, shape in zip(given, call.shapes, strict=True)
        ]  # fmt: skip

    def _flat(self, x: Array) -> Array:
        """Return an array as programs see it: its values, or its bytes."""
        flat = x.reshape(-1)
        return flat.view(np.uint8) if self.fmt is None and not self.share.sums else flat

    def _taken(self, x: Any, call: Call) -> Array:
        """Return what a hosted rank gives, as programs see it."""
        return self._flat(np.empty(0, call.dtype) if x is None else x)

    def _into(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array | None],
        call: Call,
        iteration: int,
    ) -> None:
        """Do it, from flat arrays into flat arrays. Raises NonFiniteGradient on all ranks alike."""
        blocks, shifts = call.blocks, self._shifts(world, xs)
        if self.algorithm == MPI_ALLREDUCE:
            out = xs[0][:0] if outs[0] is None else outs[0]
            move_by_mpi(world, blocks, xs[0], out)
            return
        recording = None
        if self.fmt is not None or call.blocks.dtype in RECORDED:
            out = xs[0][:0] if outs[0] is None else outs[0]
            recording = recording_of(world, self, xs[0], WHOLE, shifts, out, blocks)
        if recording is not None:
            bad = recording.run(xs[0], out, iteration)
        else:
            bad = self._run_programs(world, xs, outs, blocks, shifts, iteration)
        if self.fmt is None:
            return
        if not self.share.alike:
            what = f"{self.call} {self.algorithm}: results"
            (bad,) = check_alike(world, None, {}, [bad > 0], what)
        if bad:
            self._raise_nonfinite(world, xs)

    def _run_programs(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array | None],
        blocks: Blocks,
        shifts: Shifts,
        iteration: int,
    ) -> int:
        """Run the programs of the hosted ranks; count what is not finite in what they write."""
        plan = self.plan(world.nodes, xs[0], WHOLE, shifts, iteration, blocks)
        pieces = plan.pieces()

        def start(piece: int, take: Take) -> list[Program[int]]:
            return [
                program(plan, pieces[piece], rank, x, out, take)
                for rank, x, out in zip(world.hosted, xs, outs, strict=True)
            ]

        what, window = f"{self.call} {self.algorithm}", plan.schedule.window(world.ranks)
        found = run(world, start, len(pieces), xs[0], what, window)
        if self.result_unseen:
            return int(not all(is_finite(out) for out in outs if out is not None))
        bad = (each for piece in found for each in piece)  # on a GPU: an array
        return sum(int(to_host(each) if hasattr(each, "get") else each) for each in bad)

    def _shifts(self, world: Ranks, xs: Sequence[Array]) -> Shifts:
        """Return the shift of all values, for contributions, and for sums and results."""
        if not self.shares_shifts:
            return self.first_shifts(WHOLE)
        assert self.fmt is not None, "else none are shared"
        own = np.array([max(amax_of(x) for x in xs)], np.int64)
        (bits,) = world.max(own, f"{self.call} {self.algorithm}: exponents").tolist()
        if bits >= NONFINITE_BITS:
            self._raise_nonfinite(world, xs)
        if self.integers:
            k = integer_shift(bits, self.fmt)
            return [k], [k]
        if self.exact or not self.share.sums:
            k = aps_shift(bits, self.fmt, 1, "none")
            return [k], [k]
        sent = aps_shift(bits, self.fmt, world.ranks, "none" if self.sums_held else self.headroom)
        return [sent], [aps_shift(bits, self.fmt, world.ranks, self.headroom)]

    def _raise_nonfinite(self, world: Ranks, xs: Sequence[Any]) -> NoReturn:
        """Raise NonFiniteGradient that names the ranks. Collective."""
        found = [
            rank
            for rank, x in zip(world.hosted, xs, strict=True)
            if x is not None and not is_finite(x.reshape(-1))
        ]
        ranks = [rank for each in world.gather(found, "non-finite") for rank in each]
        raise NonFiniteGradient(["x"], sorted(ranks), call=self.call)


RECORDED = ("float32", "uint8")  # as values are seen by programs: compiled code adds or copies them
WHOLE = (Segment("x", 0, 1 << 62),)  # all tiles, which have one shift


def even(rows: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank where they are shared out as evenly as can be."""
    found = (split(rows, ranks, i) for i in range(ranks))
    return tuple(stop - start for start, stop in found)


def checked_counts(name: str, counts: Any, ranks: int) -> tuple[int, ...]:
    """Return counts as a tuple. Raises TypeError or ValueError unless there is one a rank."""
    if not isinstance(counts, Sequence | np.ndarray) or isinstance(counts, str):
        raise TypeError(f"allreduce: {name}={counts!r}: must be a list of integers")
    if len(counts) != ranks:
        raise ValueError(f"allreduce: {name}={counts!r}: must be {ranks}, one a rank")
    for each in counts:
        check_whole(f"allreduce: {name}", each, 0)
    return tuple(map(int, counts))


def overlaps(array: Array, others: Sequence[Array]) -> bool:
    """Whether an array has memory of one of the others."""
    return any(np.may_share_memory(array, each) for each in others)


@lru_cache(maxsize=256)
def blocks_of(
    name: str, counts: tuple[int, ...], root: int, keeps: bool, dtype: str, raw: bool
) -> Blocks:
    """Return the blocks of so many values; of bytes where these travel as they are."""
    if raw and not SHARES[name].sums:
        size = np.dtype(dtype).itemsize
        return Blocks(name, tuple(size * each for each in counts), root, keeps, "uint8")
    return Blocks(name, counts, root, keeps, np.dtype(dtype).name)
