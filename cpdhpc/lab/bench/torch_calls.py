"""Time collectives of torch.distributed over MPI by size, beside gloo; the cases take turns.

Times are those of whole calls of torch, from a barrier to the end of the slowest rank. One program
has both backends; each of its ranks has its own core if there are enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...whole_files import put
from ...world.cores import own_cores
from ...world.mpi import World
from ..kinds import flags, printing, timing
from ..report.figures import Axis, Chart, Series, image, panels_with, spread, styles
from ..settings import options

BACKENDS = ("gloo", "cpdhpc")
CALLS_S = 0.002  # least duration of a sample, which is of several calls if these are short
FORMS = {
    "size": "12.0f", "call": "<24", "gloo us": "10.1f", "lowest": "10.1f", "cpdhpc us": "10.1f",
    "lowest ": "10.1f", "gloo / cpdhpc": "8.1f",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add(
        "--sizes SIZE,...",
        "bytes of the larger tensor of a call: 1MiB,16MiB or first:last:xFACTOR",
        "64:64MiB:x8",
        type=flags.sizes,
    )
    flags.add_repeats(parser, 10, 2)
    add("--png FILE.png", "draw times by size, medians with the fastest and slowest samples", Path)


class Row(NamedTuple):
    """Microseconds of a call of one size, float64[repeats] by backend: of the slowest rank."""

    size_bytes: int
    call: str
    us: dict[str, np.ndarray]

    @property
    def cells(self) -> list[object]:
        """The columns of FORMS."""
        medians = {backend: float(np.median(us)) for backend, us in self.us.items()}
        both = [each for name in BACKENDS for each in (medians[name], self.us[name].min())]
        return [self.size_bytes, self.call, *both, medians["gloo"] / medians["cpdhpc"]]


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure all calls, and print a line for each. Collective. Raises UserError everywhere."""
    import torch
    from torch import distributed

    from ...torch.backend.registration import register

    register()
    distributed.init_process_group("cpdhpc", init_method="mpi://")
    try:
        with own_cores(world) as cores:
            torch.set_num_threads(1)
            groups = {
                "cpdhpc": distributed.group.WORLD,
                "gloo": distributed.new_group(backend="gloo"),
            }
            machine = printing.machine_line(world) + f", torch {torch.__version__}"
            above = [
                f"{machine}; {cores}",
                f"medians of {arguments.repeats} samples of the slowest rank, the cases in "
                f"turns; of as many calls as take {CALLS_S:g} s; lowest: the fastest sample",
            ]
            rows: list[Row] = []

            def cells() -> Iterator[list[object]]:
                for row in _rows(world, groups, arguments):
                    rows.append(row)
                    yield row.cells

            printing.show(world, above, FORMS, cells())
            if (png := arguments.png) is not None:
                kind = png.suffix[1:].lower()
                world.on_first(lambda: put(png, image(chart(rows, machine), kind)))
    finally:
        distributed.destroy_process_group()


def _rows(world: World, groups: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the times of each size and call. Collective."""
    for size in arguments.sizes:
        for name, call in calls(size, world.size).items():
            cases, counts = {}, {}
            for backend in BACKENDS:
                case = partial(call, groups[backend])
                case()
                (once,) = timing.slowest(world, {"": case}, 1, 1).values()
                counts[backend] = max(1, int(CALLS_S / once[0]))
                cases[backend] = timing.often(case, counts[backend])
            found = timing.slowest(world, cases, arguments.repeats, arguments.warmup)
            yield Row(size, name, {b: 1e6 / counts[b] * each for b, each in found.items()})


def calls(size_bytes: int, ranks: int) -> dict[str, Callable[[Any], object]]:
    """Return the calls that are measured, by name; each takes a process group."""
    import torch
    from torch import distributed

    share = torch.zeros(max(1, size_bytes // 4 // ranks))
    x, whole = torch.zeros(max(1, size_bytes // 4)), torch.zeros(len(share) * ranks)
    other = torch.zeros_like(whole)
    return {
        "all_reduce": lambda group: distributed.all_reduce(x, group=group),
        "all_gather_into_tensor": lambda group: distributed.all_gather_single(
            whole, share, group=group
        ),
        "reduce_scatter_tensor": lambda group: distributed.reduce_scatter_single(
            share, whole, group=group
        ),
        "broadcast": lambda group: distributed.broadcast(x, 0, group=group),
        "all_to_all_single": lambda group: distributed.all_to_all_single(other, whole, group=group),
    }


def chart(rows: Sequence[Row], machine: str) -> Chart:
    """Return the figure of --png: a panel for each call."""
    style = styles(BACKENDS)
    series: dict[str, list[Series]] = {}
    for name in dict.fromkeys(row.call for row in rows):
        those = [row for row in rows if row.call == name]
        x = [row.size_bytes for row in those]
        series[name] = [
            Series(
                backend,
                style[backend],
                x,
                [float(np.median(row.us[backend])) for row in those],
                [row.us[backend].min() for row in those],
                [row.us[backend].max() for row in those],
            )
            for backend in BACKENDS
        ]
    sizes = Axis("larger tensor", "size", ticks=sorted({row.size_bytes for row in rows}))
    panels = panels_with(series, sizes, lambda values: spread("µs", values))
    notes = [f"{machine}.", "Medians of the slowest rank; bars: fastest and slowest samples."]
    return Chart("torch", "Collectives of torch.distributed", notes, "", panels)
