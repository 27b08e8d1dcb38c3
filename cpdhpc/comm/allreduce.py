"""All-reduce of float32 arrays with any algorithm, wire, scaling and way to accumulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..formats import sum_bits
from ..ops import backend_of, on_gpu
from .arguments import check_alike, check_arrays, check_out
from .cost import choose
from .engine import run
from .exact import MAX_BITS
from .executor import program
from .kept import kept_tape
from .method import AUTO, MPI_ALLREDUCE, Method
from .nonfinite import is_finite, raise_nonfinite, shared_amax
from .prepared import Prepared
from .program import Program, Take
from .ranks import Array, Ranks
from .scaling import Segment, aps_shift, integer_shift
from .staging import carrier_of


class Reduced(NamedTuple):
    """What an all-reduce returns.

    arrays: the result, float32, one array, or with every one for each hosted rank: the same bits
    sent_shifts, result_shifts: the k of each segment by which contributions, and partial sums
        and the result, were scaled; empty for scaling "tile" and wire "raw"
    algorithm: the one that was used: what "auto" has chosen
    """

    arrays: tuple[Array, ...]
    sent_shifts: tuple[int, ...]
    result_shifts: tuple[int, ...]
    algorithm: str


@dataclass(frozen=True)
class Allreduce(Method):
    """An all-reduce with its choices made and checked."""

    def run(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None = None,
        *,
        iteration: int = 0,
        segments: Sequence[Segment] | None = None,
        every: bool = False,
        error: Exception | None = None,
    ) -> Reduced:
        """All-reduce the arrays of the hosted ranks. Collective.

        xs, outs: one for each hosted rank, and one out, or with every one for each
        every: let each hosted rank form the result by itself
        error: of this process, known before the call: raised on all
        Other arguments, and errors: as allreduce.
        """
        if self.algorithm == AUTO:  # what is chosen is compared over ranks like all arguments
            return self.chosen(world, xs).run(
                world, xs, outs,
                iteration=iteration, segments=segments, every=every, error=error,
            )  # fmt: skip
        parts = self.check(world, xs, outs, iteration, segments, every, error)
        return self.reduce(world, xs, outs, parts, iteration, every)

    def prepare(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None = None,
        *,
        segments: Sequence[Segment] | None = None,
    ) -> Prepared:
        """Return what all-reduces these very arrays, any number of times. Collective.

        The arguments, compared over the ranks here and not again, and errors: as run.
        """
        method = self.chosen(world, xs) if self.algorithm == AUTO else self
        return Prepared(method, world, xs, outs, segments)

    def reduce(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None,
        parts: tuple[Segment, ...],
        iteration: int,
        every: bool = False,
    ) -> Reduced:
        """Do what run does with arguments that check has seen, whose segments are parts."""
        flat = [x.reshape(-1) for x in xs]
        shifts = self.shifts(world, flat, parts)
        # What is found not finite must leave the xs alone.
        given = None if outs is None or _overlap(outs, xs) else outs
        totals = list(given or [np.empty_like(x) for x in (xs if every else xs[:1])])
        with np.errstate(over="ignore", invalid="ignore"):
            self._sum(
                world, flat, [total.reshape(-1) for total in totals], parts, shifts, iteration
            )
            for total in totals if self.op == "mean" else ():
                backend_of(total).divide(total, np.float32(world.ranks), total)
        if outs is not None and given is None:
            for out, total in zip(outs, totals, strict=True):
                out[...] = total
        return self.reduced(outs or totals, shifts)

    def reduced(
        self, arrays: Sequence[Array], shifts: tuple[Sequence[int], Sequence[int]]
    ) -> Reduced:
        """Return what run returns for a result and its shifts."""
        sent, result = shifts
        return Reduced(tuple(arrays), tuple(sent), tuple(result), self.algorithm)

    def chosen(self, world: Ranks, xs: Sequence[Array]) -> Allreduce:
        """Return this with the algorithm that is predicted to be fastest for arrays like xs."""
        size = getattr(xs[0], "size", 0) if len(xs) else 0  # what is no array is refused later
        found = choose(self, world.nodes, size)
        assert isinstance(found, Allreduce)  # as self is
        return found

    def check(
        self,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None,
        iteration: int | None,
        segments: Sequence[Segment] | None,
        every: bool = False,
        error: Exception | None = None,
    ) -> tuple[Segment, ...]:
        """Return the segments; raise on all ranks alike what is wrong on any. Collective.

        iteration: None where the values do not count yet
        """
        parts: tuple[Segment, ...] = ()
        try:
            if error is None:
                parts = check_arrays(world, xs, segments, self.fmt is not None)
                check_out(xs, outs, len(xs) if every else 1)
                self._check_world(world)
        except (TypeError, ValueError) as found:
            error = found
        flat = [] if error else [x.reshape(-1) for x in xs]
        shapes: list[object] = [np.shape(x) for x in xs[:1]]
        if flat and on_gpu(flat[0]):
            shapes.append("on GPU")
        arguments = (self.description, iteration, parts, shapes)
        suspect = iteration is not None and self.suspects(flat)
        what = f"allreduce {self.algorithm}: arguments"
        if check_alike(world, error, arguments, suspect, what):
            raise_nonfinite(world, flat, parts, None)
        return parts

    def suspects(self, flat: Sequence[Array]) -> bool:
        """Whether values are not finite that neither codes nor scaling would show."""
        return self.hides_nonfinite and not all(map(is_finite, flat))

    def _check_world(self, world: Ranks) -> None:
        if self.algorithm == MPI_ALLREDUCE and not world.has_mpi:
            raise ValueError(
                "allreduce: algorithm='mpi' has no schedule to simulate: it is MPI_Allreduce"
            )
        bits = sum_bits(self.fmt, world.ranks) if self.fmt and self.exact else 0
        if bits > MAX_BITS:
            raise ValueError(
                f"allreduce: accumulate='exact', wire={self.wire!r}: sums of {world.ranks} ranks "
                f"take {bits} bits: must be {MAX_BITS} or fewer"
            )

    def _sum(
        self,
        world: Ranks,
        flat: Sequence[Array],
        totals: Sequence[Array],
        parts: Sequence[Segment],
        shifts: tuple[Sequence[int], Sequence[int]],
        iteration: int,
    ) -> None:
        """Write the sum into totals, of the first hosted ranks or of all."""
        if self.algorithm == MPI_ALLREDUCE:
            return _sum_by_mpi(world, flat, totals)
        tape = kept_tape(world, self, flat[0], parts, shifts)
        if tape is None:
            bad = self._run_programs(world, flat, totals, parts, shifts, iteration)
        else:
            np.copyto(tape.x, flat[0])
            bad = tape.run()
            np.copyto(totals[0], tape.out)
        if bad:
            raise_nonfinite(world, flat, parts, totals[0])

    def _run_programs(
        self,
        world: Ranks,
        flat: Sequence[Array],
        totals: Sequence[Array],
        parts: Sequence[Segment],
        shifts: tuple[Sequence[int], Sequence[int]],
        iteration: int,
    ) -> int:
        """Run the programs of the hosted ranks; return how many values are not finite."""
        plan = self.plan(world.nodes, flat[0], parts, shifts, iteration)
        places = [*totals, *[None] * (len(flat) - len(totals))]
        pieces = plan.pieces(flat[0].size)

        def start(piece: int, take: Take) -> list[Program[int]]:
            return [
                program(plan, pieces[piece], rank, x, place, take)
                for rank, x, place in zip(world.hosted, flat, places, strict=True)
            ]

        what, window = f"allreduce {self.algorithm}", plan.schedule.window(world.ranks)
        # A raw payload is the caller's array itself.
        packed = self.fmt is not None and not on_gpu(flat[0])
        shared = world.shared() if packed else None
        found = run(world, start, len(pieces), flat[0], what, window, shared)
        return sum(piece[0] for piece in found)

    def shifts(
        self, world: Ranks, flat: Sequence[Array], parts: Sequence[Segment]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shift of each segment, for contributions, and for sums and the result."""
        kind, shift = self.parsed_scaling
        if self.fmt is None or kind == "tile":
            return (), ()
        if kind != "aps":
            return [shift] * len(parts), [shift] * len(parts)
        fmt, sent = self.fmt, "none" if self.accumulating == "float32" else self.headroom
        amax = shared_amax(world, flat, parts, f"allreduce {self.algorithm}: exponents")
        if self.exact:  # sums become wider: they need no headroom
            grid = [
                integer_shift(bits, fmt) if self.integers else aps_shift(bits, fmt, 1, "none")
                for bits in amax
            ]
            return grid, grid
        return (
            [aps_shift(bits, fmt, world.ranks, sent) for bits in amax],
            [aps_shift(bits, fmt, world.ranks, self.headroom) for bits in amax],
        )


def _sum_by_mpi(world: Ranks, flat: Sequence[Array], totals: Sequence[Array]) -> None:
    """Sum the hosted ranks here, and the processes by MPI_Allreduce."""
    carrier, add = carrier_of(world, flat[0]), backend_of(flat[0]).add
    if len(flat) == 1:
        return carrier.sum_by_mpi(totals[0], flat[0])
    add(flat[0], flat[1], totals[0])
    for x in flat[2:]:
        add(totals[0], x, totals[0])
    carrier.sum_by_mpi(totals[0])
    for total in totals[1:]:
        total[:] = totals[0]


def _overlap(outs: Sequence[Array], xs: Sequence[Array]) -> bool:
    return any(np.may_share_memory(out, x) for out in outs for x in xs)
