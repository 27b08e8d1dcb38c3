"""All-reduces of the same arrays time after time: checked once, with persistent requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from .arguments import check_alike
from .nonfinite import raise_nonfinite
from .ranks import Array, Ranks
from .scaling import Segment
from .tape import Call, Tape

if TYPE_CHECKING:  # allreduce.py imports this file
    from .allreduce import Allreduce, Reduced


class Prepared:
    """An all-reduce of arrays that stay where they are; made by Allreduce.prepare. Collective.

    is_fast: whether run is a list of kernels and persistent requests. It is where a call is the
        same operations every time and needs no other collective: one rank a process, NumPy arrays
        of one piece (up to 1 MiB for each of the schedule's chunks), wire "raw", or a format with
        scaling "tile", "none" or "static:K". Not fast are scaling "aps", exact sums, rounding
        "stochastic", accumulate "kahan", gather with accumulate "float32", formats without NaN and
        infinity but for "tile", and algorithm "mpi": they do what Allreduce.run does, without the
        comparison of the arguments.
    """

    def __init__(
        self,
        method: Allreduce,
        world: Ranks,
        xs: Sequence[Array],
        outs: Sequence[Array] | None,
        segments: Sequence[Segment] | None,
    ) -> None:
        self._method, self._world = method, world
        self._parts = method.check(world, xs, outs, None, segments)
        self._xs = list(xs)
        self._outs = list(outs) if outs is not None else [np.empty_like(xs[0])]
        self._tape: Tape | None = None
        self._freed = False
        self._random = method.fmt is not None and method.rounding == "stochastic"
        alone = method.repeats and not (method.shares_shifts or method.hides_nonfinite)
        if alone and world.virtual_ranks == 1 and isinstance(xs[0], np.ndarray):
            self._write_tape()

    @property
    def is_fast(self) -> bool:
        """Whether run is a list of kernels and persistent requests."""
        return self._tape is not None

    def _write_tape(self) -> None:
        """Write the tape, if the data goes in one piece."""
        method, world, x, out = self._method, self._world, self._xs[0], self._outs[0]
        flat, total = x.reshape(-1), np.empty_like(x) if np.may_share_memory(x, out) else out
        shifts = method.shifts(world, [flat], self._parts)
        plan = method.plan(world.nodes, flat, self._parts, shifts, 0)
        if len(plan.pieces(flat.size)) > 1:
            return
        self._tape = Tape(world, plan, flat, total.reshape(-1), f"allreduce {method.algorithm}")
        self._last: list[Call] = []
        if method.op == "mean":
            self._last.append(partial(np.divide, total, np.float32(world.ranks), total))
        if total is not out:  # what is found not finite must leave x alone
            self._last.append(partial(np.copyto, out, total))
        self._reduced = method.reduced(self._outs, shifts)

    @np.errstate(over="ignore", invalid="ignore")
    def run(self, *, iteration: int = 0) -> Reduced:
        """All-reduce what the arrays hold now; return what Allreduce.run returns. Collective.

        iteration: as in allreduce; compared over the ranks where rounding is "stochastic"
        The result lies in the same array every time.
        Raises NonFiniteGradient as allreduce, RankFailure, RuntimeError after free.
        """
        if self._freed:
            raise RuntimeError("Prepared.run: is freed")
        self._world.check_thread()
        if self._tape is None:
            return self._run_in_full(iteration)
        if self._tape.run():
            raise_nonfinite(self._world, [self._tape.x], self._parts, self._tape.out)
        for call in self._last:
            call()
        return self._reduced

    def _run_in_full(self, iteration: int) -> Reduced:
        """Run as Allreduce.run does after its check, but for what can be wrong with the values."""
        method, world = self._method, self._world
        if method.hides_nonfinite or self._random:
            flat = [x.reshape(-1) for x in self._xs]
            what = f"allreduce {method.algorithm}: iteration"
            if check_alike(world, None, ("iteration", iteration), method.suspects(flat), what):
                raise_nonfinite(world, flat, self._parts, None)
        return method.reduce(world, self._xs, self._outs, self._parts, iteration)

    def free(self) -> None:
        """Free the requests; after that only run is an error. Of this process: not collective."""
        self._freed = True
        if self._tape is not None:
            self._tape.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
