"""Time steps of each optimiser beside torch's fused ones, over the layers of a residual network.

Gradients exist before; nothing is sent. The optimisers take turns, each with its own weights and
states, so that caches hold little of the data of a step, as after a backward.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np

from ...config import validate
from ...world.ranks import Loopback
from ..kinds import flags, printing, timing
from ..provenance import cpu_clone, processor
from ..settings import options

BESIDE = "adam"  # the others are divided by its fused step
Shapes = list[tuple[int, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("--widths N,...", "channels of the stages", "64,128,256,448", type=flags.counts)
    add("--threads N", "threads of torch", 1, type=flags.at_least(1))
    flags.add_repeats(parser, 20, 3, "steps")


def run(arguments: argparse.Namespace) -> None:
    """Time each optimiser's step and print the table. Raises UserError."""
    shapes = layers(arguments.widths)
    with _threads(arguments.threads):
        times_s = measure(shapes, arguments.repeats, arguments.warmup)
    print("\n".join(_lines(shapes, times_s, arguments.threads)))


def layers(widths: list[int]) -> Shapes:
    """Return the shapes of a residual network's parameters, two blocks a stage, 1,000 classes."""

    def convolution(out: int, into: int, side: int) -> Shapes:
        return [(out, into, side, side), (out,), (out,)]  # and its batch norm

    before = widths[0]
    found = convolution(before, 3, 7)
    for width in widths:
        found += convolution(width, before, 3) + convolution(width, width, 3)
        found += convolution(width, before, 1) if width != before else []
        found += convolution(width, width, 3) + convolution(width, width, 3)
        before = width
    return [*found, (1000, before), (1000,)]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(shapes: Shapes, repeats: int, warmup: int) -> dict[str, timing.Times]:
    """Return the seconds of each optimiser's steps, float64[repeats], the optimisers in turns."""
    import torch

    from ..train.optimizers import OPTIMIZERS

    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=draw) * 0.01 for shape in shapes]

    def parameters() -> list[torch.nn.Parameter]:
        found = [torch.nn.Parameter(torch.randn(shape, generator=draw) * 0.1) for shape in shapes]
        for p, gradient in zip(found, gradients, strict=True):
            p.grad = gradient
        return found

    given = {name: validate(each, {}, name) for name, each in OPTIMIZERS.items()}
    built = {name: each.build(parameters(), 1e-3) for name, each in given.items()}
    loops = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    for name, plain in loops.items():
        momentum = {"momentum": 0.9} if name == "sgd" else {}
        built[f"{name}, not fused"] = plain(parameters(), lr=1e-3, fused=False, **momentum)
    steps = {name: each.step for name, each in built.items()}
    return timing.slowest(Loopback(), steps, repeats, warmup)


def _lines(shapes: Shapes, times_s: dict[str, timing.Times], threads: int) -> Iterator[str]:
    values = sum(map(prod, shapes))
    yield (f"# {processor()}, {os.cpu_count()} cores, kernels {cpu_clone()}, {threads} thread(s)")
    yield f"# {values:,} float32 values in {len(shapes)} layers; ms of a step, optimisers in turns"
    yield "# ns: of the median, for each value; / adam: the median over that of torch's fused Adam"
    forms = {
        "optimizer": f"<{max(map(len, times_s))}",
        **dict.fromkeys(("median", "fastest", "slowest"), "8.2f"),
        **dict.fromkeys(("ns", "/ adam"), "7.2f"),
    }
    beside = float(np.median(times_s[BESIDE]))
    rows = []
    for name, each in times_s.items():
        median = float(np.median(each))
        rows.append((name, *timing.ms(each), 1e9 * median / values, median / beside))
    yield from printing.table(forms, rows)
