"""Time collectives of torch.distributed over MPI by size, beside gloo; the cases take turns.

Times are those of whole calls of torch, from a barrier to the end of the slowest rank. One program
has both backends; each of its ranks has its own core if there are enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...world.cores import own_cores
from ...world.mpi import World
from ..kinds.harness import (
    add_repeats,
    check_options,
    comments,
    interleave_ranks,
    machine_line,
    parse_sizes,
    table,
)
from ..settings import options

BACKENDS = ("gloo", "cpdhpc")
CALLS_S = 0.002  # that a sample takes at least, of as many calls as fit
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
    )
    add_repeats(parser, 10, 2)


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure all calls, and print a line for each. Collective. Raises UserError everywhere."""
    check_options(arguments, 1, "repeats")
    check_options(arguments, 0, "warmup")
    sizes = world.agreed(lambda: parse_sizes(arguments.sizes))
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
            heading = comments(
                [
                    machine_line(world) + f", torch {torch.__version__}; {cores}",
                    f"medians of {arguments.repeats} samples of the slowest rank, the cases in "
                    f"turns; of as many calls as take {CALLS_S:g} s; lowest: the fastest sample",
                ]
            )
            rows = _rows(world, groups, sizes, arguments)
            for number, row in enumerate(rows):
                lines = table(FORMS, [row])
                if world.process == 0:
                    print("\n".join([*heading, *lines] if not number else lines[1:]), flush=True)
    finally:
        distributed.destroy_process_group()


def _rows(
    world: World, groups: dict[str, Any], sizes: list[int], arguments: argparse.Namespace
) -> Iterator[tuple[object, ...]]:
    """Yield a row for each size and call. Collective."""
    for size in sizes:
        for name, call in calls(size, world.size).items():
            cases = {}
            for backend in BACKENDS:
                case = partial(call, groups[backend])
                case()
                (once,) = interleave_ranks(world, {"": case}, 1, 1).values()
                cases[backend] = partial(_often, case, max(1, int(CALLS_S / once[-1].max())))
            found = interleave_ranks(world, cases, arguments.repeats, arguments.warmup)
            us = {}
            for backend, times_s in found.items():
                count = cases[backend].args[1]
                us[backend] = 1e6 / count * times_s[arguments.warmup :].max(axis=1)
            medians = [float(np.median(us[backend])) for backend in BACKENDS]
            fastest = [us[backend].min() for backend in BACKENDS]
            yield (
                size, name, medians[0], fastest[0], medians[1], fastest[1], medians[0] / medians[1],
            )  # fmt: skip


def _often(case: Callable[[], object], count: int) -> None:
    for _ in range(count):
        case()


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
