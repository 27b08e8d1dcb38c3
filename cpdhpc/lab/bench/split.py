"""Benchmark of networks whose images are split over ranks, beside plain torch on a rank's part.

The plain network computes as many pixels as a rank owns, on all ranks at once. That is a rank's
time if borders and statistics cost nothing. "forward" is a call of the network, "both" with its
backward, down to the gradient of the images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ...config import UserError
from ...torch.split_images import ImageGrid, partition
from ...world.mpi import World
from ...world.ranks import Ranks
from ..kinds.harness import (
    Times,
    add_repeats,
    check_options,
    comments,
    interleave_ranks,
    machine_line,
    parse_counts,
    parse_names,
)
from ..settings import options
from ..train.models import CifarResNet


def convolutions(width: int, size: int, *after: Callable[[], nn.Module]) -> nn.Sequential:
    """Return four convolutions of size x size, each with other layers after it."""
    made = [(nn.Conv2d(width, width, size, padding=size // 2), *(each() for each in after))
            for _ in range(4)]  # fmt: skip
    return nn.Sequential(*(layer for layers in made for layer in layers))


class UNet(nn.Module):
    """Two levels: poolings go down, transposed convolutions up; each has two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self._double(width << max(0, i - 1), width << i) for i in range(3)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(width << i + 1, width << i, 2, 2) for i in (1, 0)]
        )
        self.after = nn.ModuleList([self._double(width << i + 1, width << i) for i in (1, 0)])
        self.pools = nn.ModuleList([nn.MaxPool2d(2) for _ in self.up])

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for maps in (inputs, outputs):
            conv = nn.Conv2d(maps, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return maps of the size of x."""
        left = [self.down[0](x)]
        for pool, level in zip(self.pools, self.down[1:], strict=True):
            left.append(level(pool(left[-1])))
        x = left.pop()
        for up, after in zip(self.up, self.after, strict=True):
            x = after(torch.cat([left.pop(), up(x)], 1))
        return x


def resnet20(width: int) -> nn.Module:
    """Return a ResNet-20 whose stages have width, 2 width and 4 width channels."""
    return CifarResNet(name="resnet_cifar", n=3, width=width).build((width, 32, 32), 10)


NETWORKS: dict[str, Callable[[int], nn.Module]] = {  # of the number of channels
    "conv": lambda width: convolutions(width, 3),
    "relu": lambda width: convolutions(width, 3, nn.ReLU),
    "batchnorm": lambda width: convolutions(width, 3, partial(nn.BatchNorm2d, width)),
    "1x1": lambda width: convolutions(width, 1),
    "resnet20": resnet20,
    "unet": UNet,
}
FORWARD, BOTH = "forward", "both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("--networks NAME,...", f"networks: {', '.join(NETWORKS)}", ",".join(NETWORKS))
    add("--sizes N,...", "sides of square images", "128,256")
    add("--grid ROWSxCOLUMNS", "grid of ranks (default: ranks x 1)")
    add("--width N", "channels", 24)
    add("--images N", "images of a batch", 2)
    add(
        "--link GBIT",
        "rate of each rank's link, 1e9 bit/s: adds the bytes that a rank sends, the bound and "
        "the share of the messages' time that computation hides",
        float,
    )
    add_repeats(parser, 15, 2)


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure, and print a table. Raises UserError for options out of range. Collective."""
    check_options(arguments, 1, "width", "images", "repeats")
    check_options(arguments, 0, "warmup")
    if arguments.link is not None and not arguments.link > 0:
        raise UserError(f"--link {arguments.link:g}: must be above 0")
    names = parse_names("--networks", arguments.networks, _known)
    sizes = parse_counts("--sizes", arguments.sizes)
    torch.set_num_threads(1)
    procs = _procs(arguments.grid, world.size)
    for size in sizes:
        if any(size % (4 * n) for n in procs):
            raise UserError(f"--sizes {size}: parts must have a multiple of 4 pixels each way")
    grid = ImageGrid(world, procs)
    lines = [
        f"bench split: {machine_line(world)}, torch {torch.__version__}, a thread a rank",
        f"{arguments.images} images of {arguments.width} channels over {grid.procs[0]} x "
        f"{grid.procs[1]} ranks; ms, medians of {arguments.repeats} of the slowest rank; "
        "part: plain torch on a part of that size on all ranks at once",
    ]
    columns = f"{'':>10}{'':>18}{FORWARD:>9}{'':>18}{BOTH:>9}"
    header = f"{'network':<12}{'image':>8}" + f"{'part':>9}{'split':>9}{'ratio':>9}" * 2
    if arguments.link is not None:
        lines.append(
            f"both over links of {arguments.link:g} Gb/s: MiB that a rank sends at most, ms that "
            "they take, bound: the longer of part and link, share of the shorter that is hidden"
        )
        header += f"{'MiB':>9}{'link':>9}{'bound':>9}{'hidden':>9}"
    if world.process == 0:
        print("\n".join([*comments(lines), columns, header]), flush=True)
    for name in names:
        for size in sizes:
            line = f"{name:<12}{f'{size} x {size}':>8}{measured(arguments, grid, name, size)}"
            if world.process == 0:
                print(line, flush=True)


def _known(name: str) -> None:
    if name not in NETWORKS:
        raise ValueError(f"known are {', '.join(NETWORKS)}")


def _procs(text: str | None, ranks: int) -> tuple[int, int]:
    """Return rows and columns of ranks. Raises UserError unless they are all ranks."""
    if text is None:
        return ranks, 1
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()) or int(rows) * int(columns) != ranks:
        raise UserError(f"--grid {text}: must be ROWSxCOLUMNS, {ranks} in all")
    return int(rows), int(columns)


def measured(arguments: argparse.Namespace, grid: ImageGrid, name: str, size: int) -> str:
    """Return the figures of a network on images of size x size. Collective."""
    width, images = arguments.width, arguments.images
    torch.manual_seed(0)
    plain = NETWORKS[name](width)
    split = partition(plain, (width, size, size), grid)
    x = grid.cut(torch.randn(images, width, size, size)).contiguous()
    calls: dict[Any, Callable[[], object]] = {}
    for label, net in (("part", plain), ("split", split)):
        calls |= {(label, FORWARD): partial(net, x), (label, BOTH): both(net, x)}
    times = interleave_ranks(grid.world, calls, arguments.repeats, arguments.warmup)

    def ms(key: Any) -> float:
        slowest: Times = times[key][arguments.warmup :].max(axis=1)
        return float(np.median(slowest)) * 1e3

    figures = ""
    for each in (FORWARD, BOTH):
        part, ours = ms(("part", each)), ms(("split", each))
        figures += f"{part:9.2f}{ours:9.2f}{ours / part:9.2f}"
    if arguments.link is None:
        return figures
    sent = most_sent(grid.world, calls["split", BOTH])
    link = sent * 8e-6 / arguments.link
    hidden = (part + link - ours) / min(part, link) if link else 0.0  # one rank sends nothing
    return f"{figures}{sent / 2**20:9.2f}{link:9.2f}{max(part, link):9.2f}{max(hidden, 0):9.0%}"


def most_sent(world: Ranks, call: Callable[[], object]) -> int:
    """Return the bytes that a call sends, of the process that sends most. Collective."""
    before = int(world.bytes_sent.sum())
    call()
    sent = int(world.bytes_sent.sum()) - before
    return int(max(world.gather(sent, "bench")))


def both(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a call of a network, forward and backward, with the gradient of the images too."""
    x = x.clone().requires_grad_()
    slope = torch.cos(torch.arange(net(x).numel())).reshape(net(x).shape)

    def call() -> None:
        net.zero_grad()
        x.grad = None
        net(x).backward(slope)

    return call
