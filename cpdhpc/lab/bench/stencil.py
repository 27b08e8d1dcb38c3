"""Time exchange and computation one after the other, and overlapped, with equal results.

The computation is a stencil: each cell becomes a weighted sum of itself and of the cells at the
ends of its halo, corners included, in parts that fit a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from ...config import UserError
from ...darray.layout import Box
from ...darray.plan import WindowPlan
from ...world.mpi import World
from ...world.ranks import Ranks
from ..kinds import flags, printing, timing
from ..kinds.halo_cases import Array, Run, Setting
from ..settings import options

PART_BYTES = 1 << 18  # of a part, so that a few of them fit into a core's second cache
GIGABIT = 1e9 / 8  # bytes
BLOCKING, OVERLAPPED, WITH_PROGRESS = "blocking", "overlapped", "overlapped, with progress"
ALONE = "exchange alone", "computation alone"
FORMS = {"case": "25", "time (ms)": "10.3f", "min": "9.3f", "max": "9.3f", "x blocking": "11.2f"}


def add_overlap(parser: argparse.ArgumentParser) -> None:
    """Add the options of overlap."""
    add = options(parser)
    add(
        "--overlap",
        "time a stencil with blocking and overlapped exchange instead; both have the same bits",
    )
    add("--passes N", "number of times that the stencil is computed", 1, type=flags.at_least(1))
    add(
        "--link GBIT",
        "rate of a link for the bound, 1e9 bit/s (default: the time of the exchange)",
        flags.above_0(),
    )


class Stencil:
    """The computation of a rank: out from window, both of floats, for some or all cells.

    cells: those with their whole stencil in the window; whole, interior, boundary: parts of all of
    them, of those that need no message, and of the others
    """

    def __init__(self, plan: WindowPlan, setting: Setting, window: Array, passes: int) -> None:
        self._plan, self._window, self._passes = plan, window, passes
        widths = setting.spec.widths

        def shrunk(box: Box) -> Box:  # to the cells with their stencil in the box
            start = tuple(a + low for a, (low, _) in zip(box.start, widths, strict=True))
            return Box(start, tuple(b - n for b, (_, n) in zip(box.stop, widths, strict=True)))

        self.cells = plan.owned.intersect(shrunk(plan.window))
        self.out = np.zeros((*plan.owned.shape, *setting.spec.trail), window.dtype)
        self._offsets = list(product(*(sorted({-a, 0, b}) for a, b in widths)))
        most = max(1, PART_BYTES // setting.cell_bytes)
        interior = self.cells.intersect(shrunk(plan.interior))
        self.whole = list(self.cells.parts(most))
        self.interior = list(interior.parts(most))
        self.boundary = [p for box in self.cells.without(interior) for p in box.parts(most)]
        self._temporary = np.empty(most * setting.cell_bytes // window.itemsize, window.dtype)

    def compute(self, parts: Sequence[Box]) -> None:
        """Write the sums of the cells of some parts; a sum does not depend on the part."""
        for part in parts:
            target = self.out[part.slices(self._plan.owned.start)]
            temporary = self._temporary[: target.size].reshape(target.shape)
            for i, offset in list(enumerate(self._offsets)) * self._passes:
                values = self._window[part.shift(offset).slices(self._plan.window.start)]
                if i:
                    np.multiply(values, 1 / (i + 2), out=temporary)
                    target += temporary
                else:
                    np.multiply(values, 0.5, out=target)


def measure_overlap(world: World, setting: Setting, arguments: argparse.Namespace) -> None:
    """Check and time a setting, and print a table. Collective."""
    spec = setting.spec
    if np.dtype(spec.dtype).kind != "f":
        raise UserError("--overlap: needs a dtype of floats")
    with setting.plan(world) as plan:
        if not all(world.gather(plan.window.contains(plan.owned), "bench halo")):
            raise UserError("--overlap: each window must contain its rank's cells")
        window = np.empty((*plan.window.shape, *spec.trail), spec.dtype)
        stencil = Stencil(plan, setting, window, arguments.passes)
        cases = _cases(plan, window, stencil)
        check(world, plan, window, stencil, cases)
        times_s = timing.slowest(world, cases, arguments.repeats, arguments.warmup)
        size_bytes = max(world.gather(setting.sent_bytes(plan), "bench halo"))
        if spec.wire != "raw":
            size_bytes = plan.describe(spec.dtype, spec.trail).most_bytes
    above = f"{setting}: {size_bytes} bytes a rank; {arguments.passes} pass(es); "
    above += "results equal in every bit"
    rows: list[list[object]] = [
        [name, *timing.ms(each), np.median(times_s[BLOCKING] / each)]
        for name, each in times_s.items()
    ]
    message_ms, computation_ms = (1e3 * float(np.median(times_s[each])) for each in ALONE)
    other = ALONE[0]
    if arguments.link:
        message_ms, other = 1e3 * size_bytes / (arguments.link * GIGABIT), "bytes / link"
    bound_ms = max(computation_ms, message_ms)
    lines = printing.table(FORMS, [*rows, ["bound", bound_ms, *[""] * 3]])
    lines[-1] += f"   the longer of computation and {other}"
    printing.say(world, ["#", *printing.comments([above]), *lines])


def _cases(plan: WindowPlan, window: Array, stencil: Stencil) -> dict[str, Run]:
    own = plan.inside(window)

    def blocking() -> None:
        plan.exchange(own, window)
        stencil.compute(stencil.whole)

    def overlapped() -> None:
        handle = plan.begin(own, window)
        stencil.compute(stencil.interior)
        handle.finish()
        stencil.compute(stencil.boundary)

    def with_progress() -> None:
        handle = plan.begin(own, window)
        for part in stencil.interior:
            stencil.compute([part])
            handle.progress()
        handle.finish()
        stencil.compute(stencil.boundary)

    return {
        ALONE[0]: lambda: plan.exchange(own, window),
        ALONE[1]: lambda: stencil.compute(stencil.whole),
        BLOCKING: blocking,
        OVERLAPPED: overlapped,
        WITH_PROGRESS: with_progress,
    }


def check(
    world: Ranks, plan: WindowPlan, window: Array, stencil: Stencil, cases: Mapping[str, Run]
) -> None:
    """Raise ArithmeticError on all ranks unless all cases give identical bits. Collective.

    The halo is NaN before each case, so that a missing exchange shows.
    """
    rng = np.random.default_rng(world.process)
    values = rng.standard_normal((*plan.owned.shape, *window.shape[plan.owned.ndim :]))
    results = set()
    for name in (BLOCKING, OVERLAPPED, WITH_PROGRESS):
        window[...] = np.nan
        plan.inside(window)[...] = values
        stencil.out[...] = np.nan
        world.barrier("bench halo")
        cases[name]()
        results.add(stencil.out.tobytes())
    part = stencil.out[stencil.cells.slices(plan.owned.start)]
    right = len(results) == 1 and bool(np.isfinite(part).all())
    if not all(world.gather(right, "bench halo")):
        raise ArithmeticError("bench halo: overlapped and blocking results differ, or hold NaN")
