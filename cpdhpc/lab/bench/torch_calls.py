"""Time collectives of torch.distributed over MPI by size, beside gloo; the cases take turns.

Times are those of whole calls of torch, from a barrier to the end of the slowest rank. One program
has both backends; each of its ranks has its own core if there are enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed

from ...config import UserError
from ...torch.backend.registration import register
from ...whole_files import put
from ...world.cores import own_cores
from ...world.mpi import World
from ..kinds import flags, printing, timing
from ..report.figures import Axis, Chart, Series, image, panels_with, spread, styles
from ..settings import options
from .fsdp import add_backends, backends_of

BACKENDS = ("gloo", "cpdhpc")
CALLS_S = 0.002  # least duration of a sample, which is of several calls if these are short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add(
        "--sizes SIZE,...",
        "bytes of the larger tensor of a call: 1MiB,16MiB or first:last:xFACTOR",
        "64:64MiB:x8",
        type=flags.sizes,
    )
    add_backends(parser, [*BACKENDS])
    add(
        "--link GBIT",
        "rate of each rank's link, 1e9 bit/s: adds the time that the bytes take that a rank must "
        "send, and the measured time by it",
        type=flags.above_0(),
    )
    flags.add_repeats(parser, 10, 2)
    add("--png FILE.png", "draw times by size, medians with the fastest and slowest samples", Path)


class CallTimes(NamedTuple):
    """Microseconds of a call of one size, float64[repeats] by backend: of the slowest rank.

    bound_us: those that the link takes, by backend; empty if its rate is not known
    """

    size_bytes: int
    call: str
    us: dict[str, np.ndarray]
    bound_us: dict[str, float]

    @property
    def cells(self) -> list[object]:
        """The columns of forms."""
        cells: list[object] = [self.size_bytes, self.call]
        medians = {name: float(np.median(us)) for name, us in self.us.items()}
        for name, median in medians.items():
            cells += [median, self.us[name].min()]
            if self.bound_us:
                bound = self.bound_us[name]
                cells += [bound, median / bound if bound else np.nan]
        first, *others = medians.values()
        return cells + [first / each for each in others]


def labelled(text: str, number: int) -> str:
    """Return the name of a backend, with its number if it has options: headings are short."""
    name, colon, _ = text.partition(":")
    return f"{name} ({number})" if colon else name


def forms(backends: Sequence[str], has_link: bool) -> dict[str, str]:
    """Return the columns of the table; see printing.table."""
    columns = {"us": "10.1f", "lowest": "10.1f"}
    columns |= {"bound": "10.1f", "/ bound": "8.2f"} if has_link else {}
    found = {"size": "12.0f", "call": "<24"}
    found |= {f"{name}\n{head}": form for name in backends for head, form in columns.items()}
    return found | {f"{backends[0]} /\n{name}": "8.1f" for name in backends[1:]}


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure all calls, and print a line for each. Collective. Raises UserError everywhere."""
    backends = world.agreed(lambda: backends_of(arguments.backends))
    if not backends:
        raise UserError("--backends: must name one or more")
    register()
    distributed.init_process_group("cpdhpc", init_method="mpi://")
    try:
        with own_cores(world) as cores:
            torch.set_num_threads(1)
            groups = {text: backend.group() for text, backend in backends.items()}
            machine = printing.machine_line(world) + f", torch {torch.__version__}"
            above = [
                f"{machine}; {cores}",
                f"medians of {arguments.repeats} samples of the slowest rank, the cases in "
                f"turns; of as many calls as take {CALLS_S:g} s; lowest: the fastest sample",
            ]
            short = {text: labelled(text, number) for number, text in enumerate(groups, 1)}
            above += [f"{label}: {text}" for text, label in short.items() if label != text]
            if arguments.link is not None:
                above.append(
                    f"bound: us that the bytes take on a link of {arguments.link:g} Gb/s that each "
                    "rank must send, of a broadcast the root; / bound: the median by it"
                )
            rows: list[CallTimes] = []

            def cells() -> Iterator[list[object]]:
                for row in _rows(world, groups, arguments):
                    rows.append(row)
                    yield row.cells

            columns = forms([*short.values()], arguments.link is not None)
            printing.show(world, above, columns, cells())
            if (png := arguments.png) is not None:
                kind = png.suffix[1:].lower()
                world.on_first(lambda: put(png, image(chart(rows, machine), kind)))
    finally:
        distributed.destroy_process_group()


def _rows(
    world: World, groups: Mapping[str, Any], arguments: argparse.Namespace
) -> Iterator[CallTimes]:
    """Yield the times of each size and call. Collective."""
    for size in arguments.sizes:
        for name, call in calls(size, world.size).items():
            cases, counts, bounds = {}, {}, {}
            for text, group in groups.items():
                case = partial(call, group)
                case()
                (once,) = timing.slowest(world, {"": case}, 1, 1).values()
                counts[text] = max(1, int(CALLS_S / once[0]))
                cases[text] = timing.often(case, counts[text])
                if arguments.link is not None:
                    bounds[text] = 8e-3 * sent_bytes(group, name, size) / arguments.link
            found = timing.slowest(world, cases, arguments.repeats, arguments.warmup)
            yield CallTimes(
                size, name, {b: 1e6 / counts[b] * each for b, each in found.items()}, bounds
            )


def calls(size_bytes: int, ranks: int) -> dict[str, Callable[[Any], object]]:
    """Return the calls that are measured, by name; each takes a process group."""
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


def sent_bytes(group: Any, call: str, size_bytes: int) -> int:
    """Return the bytes that each rank must send for a call; for a broadcast, the root.

    A rank receives the sum of all values but its share, or all other shares, so that the ranks
    send as much. Source: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of
    workstations, JPDC 69(2), 2009, theorem 1.
    """
    ranks, values = group.size(), max(1, size_bytes // 4)
    if call == "broadcast":
        return 4 * values if ranks > 1 else 0
    share = max(1, values // ranks)
    name = call.removesuffix("_tensor").removesuffix("_into")
    tensor = torch.empty(values if name == "all_reduce" else share, device="meta")
    wires, size = getattr(group, "wires", None), 4 * share
    if wires is not None and wires.takes(name, tensor, "SUM"):
        size = wires.methods[name].payloads.size_bytes(share)
    return (1 + (call == "all_reduce")) * (ranks - 1) * size


def chart(rows: Sequence[CallTimes], machine: str) -> Chart:
    """Return the figure of --png: a panel for each call."""
    backends = [*rows[0].us]
    style = styles(backends)
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
            for backend in backends
        ]
    sizes = Axis("larger tensor", "size", ticks=sorted({row.size_bytes for row in rows}))
    panels = panels_with(series, sizes, lambda values: spread("µs", values))
    notes = [f"{machine}.", "Medians of the slowest rank; bars: fastest and slowest samples."]
    return Chart("torch", "Collectives of torch.distributed", notes, "", panels)
