"""All-reduce of float32 arrays with any algorithm, wire, scaling and accumulation.

As one call, as an object for many calls, and prepared for repeated calls with the same arrays.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import finalize

import numpy as np

from ..errors import Refused
from ..formats import Format, Overflow, Rounding
from ..methods import USUAL, said_by
from ..ops import backend_of, on_gpu, to_host
from ..ops.payloads import Array
from ..world.mpi import World, as_world
from ..world.ranks import Loopback, Ranks
from .checks import (
    check_alike,
    check_arrays,
    check_count,
    check_out,
    check_run,
    check_shifts,
    check_simulated,
    check_world,
    is_finite,
    iteration_error,
    name_of_x,
    note_written,
    of_tensor,
    raise_nonfinite,
    shared_amax,
)
from .engine import Program, Take, run, sum_by_mpi
from .method import (
    CHOSEN,
    MPI_ALLREDUCE,
    Machine,
    Method,
    Op,
    Reduced,
    Segment,
    Shifts,
    as_machine,
    configured,
    named_as,
)
from .rank_program import CollectivePlan, program
from .recorded import RecordedCall, are_plain, know, know_as, recording_of, run_known
from .schedules import SCHEDULES

if TYPE_CHECKING:
    from .cuda_graphs import Graphed


class Unagreed(Exception):
    """A call of Allreduce.run has skipped a comparison over ranks; the caller must make it.

    The next comparison by checks.check_alike then includes all ranks that reach one, whichever
    call they are in.
    """


def warn_of_error(method: Method, world: Ranks) -> None:
    """Warn on rank 0 if the error of sums is expected to be large."""
    if method.algorithm in SCHEDULES and method.rounded_sums(world.nodes) is not None:
        from .predict import stagnation

        line = stagnation(method, world.nodes)
        if line and world.rank == 0:
            warnings.warn(line, stacklevel=3)


def run_programs(
    world: Ranks, plan: CollectivePlan, xs: Sequence[Array], outs: Sequence[Array | None], what: str
) -> int:
    """Run the programs of the hosted ranks; count non-finite values that they write."""
    pieces = plan.pieces()

    def start(piece: int, take: Take) -> list[Program[int]]:
        return [
            program(plan, pieces[piece], rank, x, out, take)
            for rank, x, out in zip(world.hosted, xs, outs, strict=True)
        ]

    counts = run(world, start, len(pieces), xs[0], what, plan.schedule.window(world.ranks))
    bad = (each for piece in counts for each in piece)  # arrays, if on a GPU
    return sum(int(to_host(each) if hasattr(each, "get") else each) for each in bad)


def of_prepare(error: Exception) -> Exception:
    """Return an error of an all-reduce worded for prepare, which takes xs and outs."""
    if isinstance(error, Refused) and error.argument.startswith(("x", "out")):
        name = re.sub(r"^(x|out)\b", r"\1s", error.argument)
        fields = name, error.value, error.allowed, error.shown, error.state
        return type(error)("Allreduce.prepare", *fields)
    return said_by("Allreduce.prepare", error)


def refuse_freed(world: Ranks) -> NoReturn:
    """Raise RuntimeError for a freed prepared call, or end the job; see Ranks.refuse."""
    error, by_all = world.refuse(RuntimeError("Prepared.run: is freed"))
    if not by_all:
        world.abort("Prepared.run: is freed, but not on other ranks")
    raise error


class Repeatable:
    """A call of fixed arrays that is prepared, and freed by free, "with" or its loss."""

    _recording: RecordedCall | Graphed | None = None
    _freed = False

    def free(self) -> None:
        """Free the requests; then run raises an error. Not collective.

        A dropped object is freed, too. Node memory is reused once all processes have freed it.
        """
        self._freed = True
        if self._recording is not None:
            self._recording.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


class Prepared(Repeatable):
    """A repeatable all-reduce of fixed arrays; made by Allreduce.prepare. Collective.

    is_fast: whether run executes a compiled call list, without the interpreter: with one rank per
        process and NumPy arrays, unless algorithm is "mpi" or wire "nvfp4". Otherwise it does the
        same as Allreduce.run, without comparing the arguments. A small collective precedes the
        data if a step depends on all values or on the call: scaling "aps", rounding "stochastic",
        NaN that neither codes nor shifts show.
    """

    def __init__(
        self,
        method: Allreduce,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None,
        segments: Sequence[Segment] | None,
        graphs: bool,
    ) -> None:
        self._method, self._world = method, world
        self._parts = method.check(world, xs, outs, None, segments, graphs=graphs)
        self._xs, self._outs = list(xs), [np.empty_like(xs[0])] if outs is None else list(outs)
        self._compares = method.hides_nonfinite or method.is_random  # iterations, over the ranks
        self._asks = method.shares_shifts or self._compares
        is_list = world.virtual_ranks == 1 and isinstance(xs[0], np.ndarray)
        if (is_list and method.is_compiled) or graphs:
            self._record()

    @property
    def is_fast(self) -> bool:
        """Whether run is a call list."""
        return isinstance(self._recording, RecordedCall)

    def _record(self) -> None:
        """Record or capture the call."""
        x, out = self._xs[0], self._outs[0]
        flat, total = x.reshape(-1), np.empty_like(x) if np.may_share_memory(x, out) else out
        shifts = self._method.first_shifts(self._parts)
        arguments = self._world, self._method, flat, total.reshape(-1), self._parts, shifts
        if on_gpu(x):
            from .cuda_graphs import Graphed

            self._recording = Graphed(*arguments)
        else:
            self._recording = RecordedCall(*arguments, moves=False)
        finalize(self, self._recording.drop)
        self._copies = total is not out  # a non-finite result must leave x unchanged
        self._reduced = self._returned(shifts)

    def _returned(self, shifts: Shifts) -> Reduced:
        return Reduced(
            tuple(self._outs), tuple(shifts[0]), tuple(shifts[1]), self._method.algorithm
        )

    def run(self, *, iteration: int = 0) -> Reduced:
        """All-reduce the arrays' current values; return the same as Allreduce.run. Collective.

        iteration: as in allreduce, if rounding is "stochastic"; otherwise it is ignored
        The result lies in the same array every time.
        Raises on all ranks NonFiniteGradient as allreduce, and TypeError for a wrong iteration,
        maybe after the sum; with "mpi" only on the ranks that passed it; RankFailure. After free
        it raises RuntimeError, or ends the job if other ranks have not freed it.
        """
        world = self._world
        if self._freed:
            refuse_freed(world)
        if world.lent_by is not None:
            world.check_thread()
        if type(iteration) is not int and not self._compares:
            error = iteration_error(iteration, "Prepared.run")
            if error is not None and self._method.algorithm == MPI_ALLREDUCE:
                self._method.reduce(world, self._xs, self._outs, self._parts, 0)
                raise error  # others would not learn of it: MPI_Allreduce blocks
            if error is not None:  # the others may have begun
                iteration, _ = 0, world.refuse(error, behind=True)
        try:
            shifts = self._ask(iteration) if self._asks else None
            if self._recording is None:
                reduced = self._method.reduce(
                    world, self._xs, self._outs, self._parts, iteration, shifts=shifts
                )
            else:
                if self._recording.run(None, None, iteration):
                    raise_nonfinite(world, [self._recording.x], self._parts, self._recording.out)
                if self._copies:
                    np.copyto(self._outs[0].reshape(-1), self._recording.out)
                reduced = self._reduced
        except Exception:  # raised on all ranks, instead of an error that one has refused with
            world.postponed = None
            raise
        if world.postponed is not None:
            raise world.take_postponed()
        return reduced

    def _ask(self, iteration: int) -> Shifts | None:
        """Return shifts computed from all ranks' values, and compare the ranks' iterations."""
        method, world = self._method, self._world
        flat = [x.reshape(-1) for x in self._xs]
        if self._compares:
            what = f"allreduce {method.algorithm}: iteration"
            suspect = method.hides_nonfinite and not all(map(is_finite, flat))
            error = iteration_error(iteration, "Prepared.run")
            if any(check_alike(world, error, {"iteration": iteration}, [suspect], what)):
                raise_nonfinite(world, flat, self._parts, None)
        if not method.shares_shifts:
            return None
        shifts = method.shifts(world, flat, self._parts)
        if self._recording is not None:
            self._recording.adapt(self._parts, shifts)
            self._reduced = self._returned(shifts)
        return shifts


@dataclass(frozen=True)
class Allreduce(Method):
    """The choices of an all-reduce, checked."""

    def run(
        self,
        world: Any,
        xs: Sequence[Array],
        outs: Sequence[Array] | None = None,
        *,
        iteration: int = 0,
        segments: Sequence[Segment] | None = None,
        every: bool = False,
        error: Exception | None = None,
        shifts: Shifts | None = None,
        agreed: int = 0,
    ) -> Reduced:
        """All-reduce the arrays of the hosted ranks. Collective.

        xs, outs: one for each hosted rank; just one out, or with every one for each
        every: let each hosted rank form the result by itself
        shifts: known shifts, instead of those of scaling "aps"
        error: of this process, known before the call: raised on all
        agreed: a number of 56 bits that is compared over the ranks with the other arguments.
            Unagreed is raised, with nothing done, if it differs, or on the first such call
        Other arguments and errors: see allreduce.
        """
        if type(world) is not World:
            world = as_world(world, "Allreduce.run")
        guesses = not every and error is None and shifts is None
        if guesses:
            known = run_known(world, id(self), segments, iteration, xs, outs, agreed)
            if known is not None:
                return known
        if agreed:
            raise Unagreed
        # The chosen algorithm is compared over ranks like all arguments.
        method = self.chosen(world, xs) if self.algorithm in CHOSEN else self
        error = error or iteration_error(iteration)
        parts = method.check(world, xs, outs, iteration, segments, every, error, shifts)
        reduced = method.reduce(world, xs, outs, parts, iteration, every, shifts)
        if guesses and are_plain(xs, outs):
            know(world, id(self), self, method, xs[0], segments, parts, reduced)
        return reduced

    def prepare(
        self,
        world: Any,
        xs: Sequence[Array],
        outs: Sequence[Array] | None = None,
        *,
        segments: Sequence[Segment] | None = None,
        graphs: bool = False,
    ) -> Prepared:
        """Return a repeatable all-reduce of exactly these arrays. Collective.

        graphs: launch CUDA graphs: for CuPy arrays, one rank per process, not rounded "stochastic"
        The arguments are compared over the ranks here, and not in later runs; they and the errors
        are those of run.
        """
        world = as_world(world, "Allreduce.prepare")
        method = self.chosen(world, xs) if self.algorithm in CHOSEN else self
        return Prepared(method, world, xs, outs, segments, graphs)

    def reduce(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None,
        parts: tuple[Segment, ...],
        iteration: int,
        every: bool = False,
        shifts: Shifts | None = None,
    ) -> Reduced:
        """Do the same as run, with arguments that check has accepted; parts: their segments."""
        flat = [x.reshape(-1) for x in xs]
        shifts = shifts or self.shifts(world, flat, parts)
        # A non-finite result must leave the xs unchanged.
        shares = any(np.may_share_memory(o, x) for o in outs or () for x in xs)
        totals = list(
            (not shares and outs) or [np.empty_like(x) for x in (xs if every else xs[:1])]
        )
        sums = [total.reshape(-1) for total in totals]
        recording = recording_of(world, self, flat[0], parts, shifts)
        with np.errstate(over="ignore", invalid="ignore"):
            if recording is not None:
                bad = recording.run(flat[0], sums[0], iteration)
            elif self.algorithm == MPI_ALLREDUCE:
                bad = sum_by_mpi(world, flat, sums)
            else:
                plan = self.plan(world.nodes, flat[0], parts, shifts, iteration)
                places = [*sums, *[None] * (len(flat) - len(sums))]
                bad = run_programs(world, plan, flat, places, f"allreduce {self.algorithm}")
            if recording is None and self.result_unseen:
                bad = not is_finite(sums[0])
            if bad:
                raise_nonfinite(world, flat, parts, sums[0])
            divisor = self.divisor(world.ranks) if recording is None else None
            for total in [] if divisor is None else sums:
                backend_of(total).divide(total, divisor, total)
        if outs is not None and shares:
            for out, total in zip(outs, totals, strict=True):
                out[...] = total
        return Reduced(tuple(outs or totals), tuple(shifts[0]), tuple(shifts[1]), self.algorithm)

    def chosen(self, world: Ranks, xs: Sequence[Array]) -> Allreduce:
        """Return this with the algorithm that "usual" or "auto" selects for arrays like xs."""
        if self.algorithm == USUAL:
            name = self.usual(world.nodes)
            world.chosen.add(name)
            return named_as(self, name)
        x = xs[0] if isinstance(xs, Sequence) and len(xs) else None
        from .predict import choose

        size = getattr(x, "size", 0)  # other types are refused later
        method = choose(self, world.nodes, size if isinstance(size, int) else 0)
        assert isinstance(method, Allreduce)  # the class of self
        world.chosen.add(method.algorithm)
        return method

    def check(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None,
        iteration: int | None,
        segments: Sequence[Segment] | None,
        every: bool = False,
        error: Exception | None = None,
        shifts: Shifts | None = None,
        graphs: bool = False,
    ) -> tuple[Segment, ...]:
        """Return the segments; raise any rank's error on all ranks. Collective.

        iteration: None if the values do not matter yet, in prepare
        """
        of_run, parts = iteration is not None, tuple[Segment, ...]()
        try:
            check_run(every, error)
            if error is None:
                parts = check_arrays(world, xs, segments, self.fmt is not None)
                if shifts is not None:
                    check_shifts(shifts, parts, self.fmt)
                if outs is not None:
                    check_out(xs, outs, len(xs) if every else 1)
                if self.exact or self.algorithm == MPI_ALLREDUCE:
                    check_world(self, world)
                if graphs is not False:
                    from .cuda_graphs import check_graphs

                    check_graphs(self, world, xs, graphs)
        except Exception as wrong:  # of any class: it must be raised on all ranks
            error = wrong if of_run else of_prepare(wrong)
        flat = [] if error else [x.reshape(-1) for x in xs]
        shape, place = (xs[0].shape, on_gpu(xs[0])) if flat else ((), False)
        arguments = {
            "x.shape": shape, "x on GPU": place, **self.choices,
            "iteration": iteration, "segments": parts, "shifts": shifts, "graphs": graphs,
        }  # fmt: skip
        text = f"{self.description} {iteration} {parts} {shape} {place} {shifts} {graphs}"
        blind = self.hides_nonfinite if shifts is None else self.codes_hide_nonfinite
        suspect = blind and of_run and not all(map(is_finite, flat))
        call = "allreduce" if of_run else "Allreduce.prepare"
        what = f"{call} {self.algorithm}: arguments"
        if any(check_alike(world, error, arguments, [suspect], what, text)):
            raise_nonfinite(world, flat, parts, None)
        warn_of_error(self, world)
        return parts

    def shifts(self, world: Ranks, flat: Sequence[Array], parts: Sequence[Segment]) -> Shifts:
        """Return the shift of each segment, for contributions, and for sums and the result."""
        if not self.shares_shifts:
            return self.first_shifts(parts)
        amax = shared_amax(world, flat, parts, f"allreduce {self.algorithm}: exponents")
        return self.shifts_of(amax, world.ranks)


def allreduce(
    world: Any,
    x: Array | Sequence[Array],
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    accumulate: str | None = None,
    op: Op = "sum",
    out: Array | None = None,
    *,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    headroom: str = "n",
    seed: int = 0,
    iteration: int = 0,
    segments: Sequence[Segment] | None = None,
    machine: Machine | str | Path | None = None,
) -> Array:
    """Return the sum, or mean, of all ranks' arrays: the same bits on every rank. Collective.

    world: World, Loopback or an mpi4py communicator
    x: float32, C-contiguous, of one shape everywhere, all NumPy or all CuPy arrays or torch tensors
        on the CPU, which are not copied; if the world has virtual ranks, a sequence of one array
        for each; never written, unless out shares its memory. No gradient flows
    wire: "raw" (float32 bytes), a Format or its name, "int2" .. "int16" (integers times a power of
        two) or "ternary" (-1, 0, 1 times a power of two, 1.6 bits per value);
        "mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2" and "mxfp4" are OCP's: blocks of 32
        neighbours, by its rule and in its bytes
    algorithm: a name from SCHEDULES ("ring", "biring", "torus", "rhd", "tree", "dbtree", "direct",
        "hier", "gather"), or "mpi" (MPI_Allreduce, wire "raw"). hier sums inside nodes first:
        see world.nodes. "usual" is ring for wire "raw". For other wires it is an algorithm whose
        error does not grow with ranks: hier if there are several nodes of several ranks, else rhd.
        "auto" is the algorithm that is predicted to be fastest for x on machine, among those
        whose expected error is below three times that of one rounding. Algorithms add in different
        orders, so the bits of "usual" depend on ranks and nodes, those of "auto" also on size and
        machine
    scaling: "none", "static:K" (by 2**K), "aps" (a shift for each segment from the largest value
        of all ranks), "tile" (a shift for each 1,024 values, sent with them), "block32" or
        "block16" (a shift for each 32 or 16 values). Wire "raw" is not scaled and ignores it.
        Default: "tile", for exact sums "aps"; integers allow only "aps".
    accumulate: "requantise" (round to the wire after each addition), "grow" (partial sums travel
        with the mantissa bits that they need, and are then rounded stochastically), "float32" or
        "kahan"; None for the algorithm's own: grow for ring, biring, torus, rhd and hier, float32
        for direct, requantise for the others and for formats given by a table, in hier float32.
        hier rounds between nodes, whatever it does inside them; for wire "raw" all these are the
        same. If the expected error of sums is at least three times that of one rounding (for
        example "requantise" over many ranks in rank order), a UserWarning is issued.
        "exact", in all algorithms but "mpi" and wires but "raw": contributions are rounded to one
        grid for all ranks; their integer sums travel unrounded and become float32 at the end, so
        the result does not depend on the order. Integers allow only this; float formats allow it
        if scaling is "aps", "static:K" or "none" and the sums take at most 32 bits.
    op: "mean" divides the sum by the number of ranks, in float32
    out: float32, like x, for the result, and returned. Default: a new array of x's kind. If it
        shares memory with x, x is unchanged after an error, which costs one more copy; otherwise
        the content of out is undefined after an error
    rounding, overflow, random_bits: see formats.Cast. With scalings other than "none" and
        "static:K", which move the range, every finite contribution fits. A value that does not
        fit (a partial sum with less headroom, for example) raises NonFiniteGradient, unless
        overflow is "saturate"; formats without infinity and NaN, such as e2m1fn and mxfp*, and
        exact sums always saturate
    headroom: the room that aps leaves for the sum of p ranks: "n" p times the largest value,
        "sqrt" sqrt(p) times, "none"; with accumulate "float32" contributions need none, and with
        "exact" nothing does
    seed, iteration: integers of 64 bits, for the random bits of rounding "stochastic"
    segments: the named parts of x, in order, starting on tiles: aps scales each by itself
    machine: for "auto": a Machine, the TOML file of bench fit, or None for DEFAULT of method.py,
        round figures that were not measured on any machine
    Raises, on all ranks and before data moves, TypeError and ValueError for arguments that are
    wrong or differ between ranks; NonFiniteGradient on all ranks if NaN or infinity meets a packed
    wire. Wire "raw" follows IEEE 754 instead.
    CuPy arrays are processed in CuPy's current stream and on its current GPU: work queued there
    before the call may still be producing x, and work queued afterwards may use the result and
    overwrite x. For raw wires the call returns before the stream has finished: the host and other
    streams must wait for it. A torch tensor on a GPU is passed by cupy.from_dlpack, and the result
    by torch.from_dlpack, which let one stream wait for the other.
    """
    ranks = world if type(world) is World else as_world(world, "allreduce")
    # The options, in the order of Method; from here on they are one object.
    key = wire, algorithm, scaling, accumulate, op, rounding, overflow, random_bits, headroom, seed
    guesses = segments is None and machine is None and type(seed) is type(random_bits) is int
    if guesses:
        known = run_known(ranks, key, None, iteration, (x,), None if out is None else (out,))
        if known is not None:
            return known.arrays[0]
    error: Exception | None = None
    try:
        method = configured(Allreduce, *key, None if machine is None else as_machine(machine))
    except Exception as wrong:  # of any class: it must be raised on all ranks
        method, error = Allreduce(), wrong  # the default only serves to raise the error
    arrays: Sequence[Any] = x if ranks.virtual_ranks > 1 and isinstance(x, Sequence) else [x]
    xs: list[Any] = []
    outs = None
    try:
        check_count(ranks, "x", arrays)
        xs = [of_tensor(name_of_x(ranks, r), each) for r, each in enumerate(arrays, ranks.rank)]
        outs = None if out is None else [of_tensor("out", out)]
    except (TypeError, ValueError) as wrong:
        error = error or wrong
    reduced = method.run(ranks, xs, outs, iteration=iteration, segments=segments, error=error)
    if guesses and type(x) is np.ndarray:
        know_as(ranks, key, id(method), xs[0])
    if out is not None:
        return note_written(out)
    result = reduced.arrays[0]
    return result if not arrays or arrays[0] is xs[0] else sys.modules["torch"].from_numpy(result)


def simulate(
    xs: Sequence[Array],
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    accumulate: str | None = None,
    op: Op = "sum",
    out: Array | None = None,
    *,
    nodes: Sequence[Hashable] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    headroom: str = "n",
    seed: int = 0,
    iteration: int = 0,
    segments: Sequence[Segment] | None = None,
    machine: Machine | str | Path | None = None,
) -> Array:
    """Return the result of allreduce for ranks with these arrays, from the same code.

    xs: one array for each rank; nodes: see Loopback, for algorithm "hier"; other arguments and
    errors: see allreduce. Raises ValueError for algorithm "mpi", which has no schedule.
    """
    check_simulated(xs)
    try:
        world = Loopback(len(xs), nodes=nodes)
    except (TypeError, ValueError) as error:
        raise said_by("simulate", error) from None
    x = xs if len(xs) != 1 else xs[0]
    return allreduce(
        world, x, wire, algorithm, scaling, accumulate, op, out,
        rounding=rounding, overflow=overflow, random_bits=random_bits, headroom=headroom,
        seed=seed, iteration=iteration, segments=segments, machine=machine,
    )  # fmt: skip
