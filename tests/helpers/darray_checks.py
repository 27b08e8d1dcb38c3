"""One random case of a plan done in every way, beside its oracle: what was wrong is returned."""

from __future__ import annotations

from typing import Any

import numpy as np
from darray_arrays import Laid, any_bits, dtype_of, laid_out, numbers, same
from darray_cases import WHOLE_UP_TO, Case, own, shown, summed

from cpdhpc.darray.plan import WindowPlan

CALLS = (0, 1, 1)  # which of two arrays: by slices, by a program for its strides, by that again


def wanted_sums(case: Case) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    """Two arrays for the window of every rank, and their sums on the whole domain."""
    most = 1000
    if case.dtype in WHOLE_UP_TO:
        ones = [np.ones(box.shape + case.trail, np.int64) for box in case.windows]
        readers = int(summed(case, ones).max(initial=1))
        most = min(most, WHOLE_UP_TO[case.dtype] // max(1, readers))
    yss = [
        [numbers(case.rng(2, i, rank), box.shape + case.trail, case.dtype, most)
         for rank, box in enumerate(case.windows)]
        for i in range(2)
    ]  # fmt: skip
    return yss, [summed(case, ys) for ys in yss]


class Checks:
    """The calls of one rank on one plan, all collective and in one order on all ranks."""

    def __init__(self, plan: WindowPlan, case: Case) -> None:
        self.plan, self.case, self.rank = plan, case, plan.rank
        self.rng = case.rng(9, plan.rank)  # of what only this rank does
        self.problems: list[str] = []

    def note(self, what: str, good: bool) -> None:
        if not good:
            self.problems.append(f"{self.case} rank {self.rank}: {what}")

    def out_like(self, want: np.ndarray) -> Laid:
        """An array of any strides to write to."""
        return laid_out(self.rng, np.zeros_like(want), self.case.kind)

    def operation(self, name: str, given: list[np.ndarray], wants: list[np.ndarray]) -> None:
        """Do an operation often, with and without out, and two at a time."""
        do, begin = getattr(self.plan, name), {"exchange": self.plan.begin}.get(
            name, self.plan.begin_accumulate
        )  # fmt: skip
        xs = [laid_out(self.rng, each, self.case.kind) for each in given]
        for call, i in enumerate(CALLS):
            self.note(f"{name} {call}", same(do(xs[i].array), wants[i]))
        out = self.out_like(wants[0])
        result = do(xs[0].array, out.array)
        self.note(f"{name} to out", result is out.array and same(out.values, wants[0]))
        self.note(f"{name} beside out", out.rest_is_untouched)
        handles = [begin(xs[0].array), begin(xs[1].array, self.out_like(wants[1]).array)]
        self.interior(name, handles[0].out, wants[0])
        for i in (0, 1) if self.rng.random() < 0.7 else (1, 0):
            self.note(f"{name} {i} of two", same(handles[i].finish(), wants[i]))
        for laid, each in zip(xs, given, strict=True):
            self.note(f"{name} changes what is given", same(laid.values, each))

    def interior(self, name: str, out: Any, want: np.ndarray) -> None:
        """The part of a window that may be read before finish."""
        if name == "exchange":
            place = self.plan.interior.slices(self.plan.window.start)
            self.note("interior", same(out[place], want[place]))

    def inside(self, name: str, given: np.ndarray, want: np.ndarray) -> None:
        """What a rank owns lies in the window's array; on ranks where it cannot, as always."""
        if not self.plan.window.contains(self.plan.owned):
            self.note(f"{name} apart", same(getattr(self.plan, name)(self.laid(given)), want))
        elif name == "exchange":
            window = self.out_like(want)
            self.plan.inside(window.array)[...] = self.laid(given)
            got = self.plan.exchange(self.plan.inside(window.array), window.array)
            self.note("exchange of what is inside", same(got, want) and window.rest_is_untouched)
        else:
            window = laid_out(self.rng, given, self.case.kind)
            got = self.plan.accumulate(window.array, self.plan.inside(window.array))
            self.note("accumulate to inside", same(got, want) and window.rest_is_untouched)

    def laid(self, values: np.ndarray) -> Any:
        return laid_out(self.rng, values, self.case.kind).array


def check_case(world: Any, case: Case, every: int = 8) -> list[str]:
    """Return what is wrong with a case on this rank. Collective.

    every: of so many cases one is verified and its bytes are counted
    """
    plan = WindowPlan(world, case.layout, case.windows[world.rank], case.modes, name=str(case.seed))
    checks, box = Checks(plan, case), case.windows[world.rank]
    shape = case.layout.shape + case.trail
    wholes = [any_bits(case.rng(1, i), shape, case.dtype) for i in range(2)]
    wants = [shown(whole, box, case.modes) for whole in wholes]
    xs = [own(case, world.rank, whole) for whole in wholes]
    checks.operation("exchange", xs, wants)
    checks.inside("exchange", xs[0], wants[0])
    if case.dtype != "bool":
        yss, totals = wanted_sums(case)
        ys, sums = [ys[world.rank] for ys in yss], [own(case, world.rank, t) for t in totals]
        checks.operation("accumulate", ys, sums)
        checks.inside("accumulate", ys[1], sums[1])
    if case.seed[1] % every == 0:
        checks.note("verify", plan.verify().passed)
        count_messages(world, plan, case, checks)
    plan.free()
    return checks.problems


def count_messages(world: Any, plan: WindowPlan, case: Case, checks: Checks) -> None:
    """What describe says is what the world counts in an exchange, and the other way round."""
    dtype = dtype_of(case.dtype)
    told = plan.describe(dtype.name if dtype.kind != "V" else "uint16", case.trail)
    mine = told.ranks[world.rank]
    for name, sent, to in (
        ("exchange", mine.sent_bytes, mine.sends_to),
        ("accumulate", mine.received_bytes, mine.recvs_from),
    ):
        box = plan.owned if name == "exchange" else plan.window
        before = int(world.bytes_sent[0]), int(world.messages_sent[0])
        if name == "accumulate" and case.dtype == "bool":
            continue
        getattr(plan, name)(checks.laid(np.zeros(box.shape + case.trail, dtype)))
        after = int(world.bytes_sent[0]), int(world.messages_sent[0])
        found = after[0] - before[0], after[1] - before[1]
        checks.note(f"bytes and messages of {name}", found == (sent, len(to)))
