"""Exchange and computation one after the other, and one behind the other, with equal results.

The computation is a stencil: each cell becomes a weighted sum of itself and of the cells at the
ends of its halo, corners included, in parts that fit a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from ..config import UserError
from ..darray.layout import Box
from ..darray.plan import WindowPlan
from ..world.mpi import World
from ..world.ranks import Ranks
from .halo_cases import Array, Run, Setting
from .harness import Times, interleave_ranks

PART_BYTES = 1 << 18  # of a part: a few of them fit into a core's second cache
GIGABIT = 1e9 / 8  # bytes
BLOCKING, OVERLAPPED, WITH_PROGRESS = "blocking", "overlapped", "overlapped, with progress"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of overlap."""
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="instead: a stencil with blocking and with overlapped exchange, equal in every bit",
    )
    parser.add_argument(
        "--passes", type=int, default=1, help="how often the stencil is computed (default 1)"
    )
    parser.add_argument(
        "--link", type=float, metavar="GBIT", help="rate of a link, for the bound, 1e9 bit/s"
    )


class Stencil:
    """The computation of a rank: out from window, both of floats, for some or all cells.

    cells: that have their whole stencil in the window; whole, interior, boundary: parts of all of
    them, of those that need no message, and of the others
    """

    def __init__(self, plan: WindowPlan, setting: Setting, window: Array, passes: int) -> None:
        self._plan, self._window, self._passes = plan, window, passes
        widths = setting.spec.widths

        def shrunk(box: Box) -> Box:  # to the cells that have their stencil in the box
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
        """Write the sums of the cells of some parts; each is the same whatever the part."""
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


def measure(world: World, setting: Setting, arguments: argparse.Namespace) -> None:
    """Check and time a setting, and print a table. Collective."""
    spec = setting.spec
    if np.dtype(spec.dtype).kind != "f" or arguments.passes < 1:
        raise UserError("--overlap: needs a dtype of floats, and passes of 1 or more")
    if arguments.link is not None and not 0 < arguments.link < np.inf:
        raise UserError(f"--link {arguments.link:g}: must be above 0")
    with setting.plan(world) as plan:
        if not all(world.gather(plan.window.contains(plan.owned), "bench halo")):
            raise UserError("--overlap: each window must contain its rank's cells")
        window = np.empty((*plan.window.shape, *spec.trail), spec.dtype)
        stencil = Stencil(plan, setting, window, arguments.passes)
        cases = _cases(plan, window, stencil)
        check(world, plan, window, stencil, cases)
        times = interleave_ranks(world, cases, arguments.repeats, arguments.warmup)
        size_bytes = max(world.gather(setting.sent_bytes(plan), "bench halo"))
        if spec.wire != "raw":
            size_bytes = plan.describe(spec.dtype, spec.trail).most_bytes
    if world.process == 0:
        slowest = {name: each[arguments.warmup :].max(axis=1) for name, each in times.items()}
        print("\n".join(_table(setting, size_bytes, slowest, arguments)), flush=True)


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
        "exchange alone": lambda: plan.exchange(own, window),
        "computation alone": lambda: stencil.compute(stencil.whole),
        BLOCKING: blocking,
        OVERLAPPED: overlapped,
        WITH_PROGRESS: with_progress,
    }


def check(
    world: Ranks, plan: WindowPlan, window: Array, stencil: Stencil, cases: Mapping[str, Run]
) -> None:
    """Raise ArithmeticError on all ranks unless all cases give the same bits. Collective.

    Before each the halo holds NaN, which would show.
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


def _table(
    setting: Setting, size_bytes: int, times_s: Mapping[str, Times], arguments: argparse.Namespace
) -> list[str]:
    """times_s: of the slowest rank."""
    medians_s = {name: float(np.median(each)) for name, each in times_s.items()}
    lines = [
        "#",
        f"# {setting}: {size_bytes} bytes a rank; {arguments.passes} pass(es); "
        "results equal in every bit",
        f"# {'':>25} {'time (ms)':>10} {'min':>9} {'max':>9} {'x blocking':>11}",
    ]
    for name, each in times_s.items():
        lines.append(
            f"  {name:>25} {1e3 * medians_s[name]:>10.3f} {1e3 * each.min():>9.3f} "
            f"{1e3 * each.max():>9.3f} {np.median(times_s[BLOCKING] / each):>11.2f}"
        )
    message_s, what = medians_s["exchange alone"], "exchange alone"
    if arguments.link:
        message_s, what = size_bytes / (arguments.link * GIGABIT), "bytes / link"
    bound_s = max(medians_s["computation alone"], message_s)
    lines.append(f"  {'bound':>25} {1e3 * bound_s:>10.3f}   the longer of computation and {what}")
    return lines
