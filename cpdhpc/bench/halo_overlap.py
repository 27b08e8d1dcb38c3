"""Exchange and computation one after the other, and one behind the other, with equal results.

The computation is a stencil: each cell becomes a weighted sum of itself and of the cells at the
ends of its halo, corners included, in parts that fit a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import UserError
from ..darray.layout import Box
from ..darray.plan import WindowPlan
from ..darray.show import Spec
from ..world.mpi import World
from ..world.ranks import Ranks
from .halo_cases import Setting, sent_bytes
from .harness import Times, interleave_ranks

Array = NDArray[Any]
PART_BYTES = 1 << 18  # of a part: a few of them fit into a core's second cache
GIGABIT = 1e9 / 8  # bytes


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
    """The computation of a rank: out from window, both of floats, for some or all cells."""

    def __init__(self, plan: WindowPlan, spec: Spec, window: Array, passes: int) -> None:
        widths = spec.widths
        self._plan, self._window, self._passes = plan, window, passes
        low, high = (tuple(w[i] for w in widths) for i in (0, 1))
        inner = Box(
            tuple(a + n for a, n in zip(plan.window.start, low, strict=True)),
            tuple(b - n for b, n in zip(plan.window.stop, high, strict=True)),
        )
        self.cells = plan.owned.intersect(inner)  # near the edge of the domain cells are missing
        ready = Box(
            tuple(a + n for a, n in zip(plan.interior.start, low, strict=True)),
            tuple(b - n for b, n in zip(plan.interior.stop, high, strict=True)),
        )
        self.out = np.zeros((*plan.owned.shape, *spec.trail), spec.dtype)
        self._offsets = list(product(*(sorted({-a, 0, b}) for a, b in widths)))
        cell_bytes = max(1, window.itemsize * int(np.prod(spec.trail, dtype=np.int64)))
        most = max(1, PART_BYTES // cell_bytes)
        interior = self.cells.intersect(ready)
        self.whole = list(self.cells.parts(most))
        self.interior = list(interior.parts(most))
        self.boundary = [p for box in self.cells.without(interior) for p in box.parts(most)]
        self._temporary = np.empty(most * cell_bytes // window.itemsize, window.dtype)

    def compute(self, part: Box) -> None:
        """Write the sums of some cells; each is the same whatever the part."""
        target = self.out[part.slices(self._plan.owned.start)]
        room = self._temporary[: target.size].reshape(target.shape)
        for _ in range(self._passes):
            for i, offset in enumerate(self._offsets):
                values = self._window[part.shift(offset).slices(self._plan.window.start)]
                if i:
                    np.multiply(values, 1 / (i + 2), out=room)
                    target += room
                else:
                    np.multiply(values, 0.5, out=target)

    def all(self, parts: Sequence[Box]) -> None:
        """Compute some parts."""
        for part in parts:
            self.compute(part)


def measure(world: World, setting: Setting, arguments: argparse.Namespace) -> None:
    """Check and time a setting, and print a table. Collective."""
    spec, passes = setting.spec, arguments.passes
    if np.dtype(spec.dtype).kind != "f" or passes < 1:
        raise UserError("--overlap: needs a dtype of floats, and passes of 1 or more")
    with setting.plan(world) as plan:
        if not all(world.gather(plan.window.contains(plan.owned), "bench halo")):
            raise UserError("--overlap: each window must contain its rank's cells")
        window = np.empty((*plan.window.shape, *spec.trail), spec.dtype)
        stencil = Stencil(plan, spec, window, passes)
        cases = _cases(plan, window, stencil)
        check(world, plan, window, stencil, cases)
        times = interleave_ranks(world, cases, arguments.repeats, arguments.warmup)
        size_bytes = max(world.gather(sent_bytes(plan, spec), "bench halo"))
        if spec.wire != "raw":
            size_bytes = plan.describe(spec.dtype, spec.trail).most_bytes
    if world.process == 0:
        print("\n".join(_table(setting, size_bytes, times, arguments)), flush=True)


BLOCKING = "blocking"
OVERLAPPED = "overlapped, with progress"


def _cases(plan: WindowPlan, window: Array, stencil: Stencil) -> dict[str, Callable[[], object]]:
    own = plan.inside(window)

    def blocking() -> None:
        plan.exchange(own, window)
        stencil.all(stencil.whole)

    def overlapped() -> None:
        handle = plan.begin(own, window)
        stencil.all(stencil.interior)
        handle.finish()
        stencil.all(stencil.boundary)

    def with_progress() -> None:
        handle = plan.begin(own, window)
        for part in stencil.interior:
            stencil.compute(part)
            handle.progress()
        handle.finish()
        stencil.all(stencil.boundary)

    return {
        "exchange alone": lambda: plan.exchange(own, window),
        "computation alone": lambda: stencil.all(stencil.whole),
        BLOCKING: blocking,
        "overlapped": overlapped,
        OVERLAPPED: with_progress,
    }


def check(
    world: Ranks,
    plan: WindowPlan,
    window: Array,
    stencil: Stencil,
    cases: dict[str, Callable[[], object]],
) -> None:
    """Raise ArithmeticError on all ranks unless all cases give the same bits. Collective.

    Before each the halo holds NaN, which would show.
    """
    rng = np.random.default_rng(world.process)
    values = rng.standard_normal((*plan.owned.shape, *window.shape[plan.owned.ndim :]))
    results = {}
    for name in (BLOCKING, "overlapped", OVERLAPPED):
        window[...] = np.nan
        plan.inside(window)[...] = values
        stencil.out[...] = np.nan
        world.barrier("bench halo")
        cases[name]()
        results[name] = stencil.out.tobytes()
    part = stencil.out[stencil.cells.slices(plan.owned.start)]
    mine = (len(set(results.values())) == 1, bool(np.isfinite(part).all()))
    found = world.gather(mine, "bench halo")
    if not all(same and finite for same, finite in found):
        raise ArithmeticError("bench halo: overlapped and blocking results differ, or hold NaN")


def _table(
    setting: Setting, size_bytes: int, times: dict[str, Times], arguments: argparse.Namespace
) -> list[str]:
    spec, warmup = setting.spec, arguments.warmup
    slowest = {name: each[warmup:].max(axis=1) for name, each in times.items()}
    medians_s = {name: float(np.median(each)) for name, each in slowest.items()}
    lines = [
        "#",
        f"# {setting.name}: {spec.shape} x {spec.trail} {spec.dtype} over {spec.procs}, halo "
        f"{spec.halo}, boundary {spec.boundary}, wire {spec.wire}: {size_bytes} bytes a rank; "
        f"{arguments.passes} pass(es); results equal in every bit",
        f"# {'':>25} {'time (ms)':>10} {'min':>9} {'max':>9} {'x blocking':>11}",
    ]
    for name, each in slowest.items():
        gain = np.median(slowest[BLOCKING] / each)
        lines.append(
            f"  {name:>25} {1e3 * medians_s[name]:>10.3f} {1e3 * each.min():>9.3f} "
            f"{1e3 * each.max():>9.3f} {gain:>11.2f}"
        )
    message_s = medians_s["exchange alone"]
    what = "exchange alone"
    if arguments.link:
        message_s, what = size_bytes / (arguments.link * GIGABIT), "bytes / link"
    bound_s = max(medians_s["computation alone"], message_s)
    lines.append(f"  {'bound':>25} {1e3 * bound_s:>10.3f}   the longer of computation and {what}")
    return lines
