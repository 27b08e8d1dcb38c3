"""Benchmark of networks whose images are split over ranks, beside plain torch on a rank's part.

The plain network computes as many pixels as a rank owns, on all ranks at once. That is a rank's
time if borders and statistics cost nothing. "forward" is a call of the network, "both" with its
backward, down to the gradient of the images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from ...config import UserError, among
from ...torch.split_images import ImageGrid, partition
from ...world.mpi import World
from ...world.ranks import Ranks
from ..kinds import flags, printing, timing
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
FORMS = {"network": "<11", "image": "9"} | {
    f"{over}\n{head}": "8.2f" for over in (FORWARD, BOTH) for head in ("part", "split", "ratio")
}
OF_LINKS = {"MiB": "8.2f", "link": "8.2f", "bound": "8.2f", "hidden": "8.0%"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    known = ", ".join(NETWORKS)
    networks = flags.names(among(NETWORKS))
    add("--networks NAME,...", f"networks: {known}", ",".join(NETWORKS), type=networks)
    add("--sizes N,...", "sides of square images", "128,256", type=flags.counts)
    add("--grid ROWSxCOLUMNS", "grid of ranks (default: ranks x 1)")
    add("--width N", "channels", 24, type=flags.at_least(1))
    add("--images N", "images of a batch", 2, type=flags.at_least(1))
    add(
        "--link GBIT",
        "rate of each rank's link, 1e9 bit/s: adds the bytes that a rank sends, the bound and "
        "the share of the messages' time that computation hides",
        flags.above_0(),
    )
    flags.add_repeats(parser, 15, 2)


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure, and print a table. Raises UserError for options out of range. Collective."""
    torch.set_num_threads(1)
    procs = _procs(arguments.grid, world.size)
    for size in arguments.sizes:
        if any(size % (4 * n) for n in procs):
            raise UserError(f"--sizes {size}: parts must have a multiple of 4 pixels each way")
    grid, link = ImageGrid(world, procs), arguments.link
    above = [
        f"bench split: {printing.machine_line(world)}, torch {torch.__version__}, a thread a rank",
        f"{arguments.images} images of {arguments.width} channels over {grid.procs[0]} x "
        f"{grid.procs[1]} ranks; ms, medians of {arguments.repeats} of the slowest rank; "
        "part: plain torch on a part of that size on all ranks at once",
    ]
    if link is not None:
        above.append(
            f"both over links of {link:g} Gb/s: MiB that a rank sends at most, ms that "
            "they take, bound: the longer of part and link, share of the shorter that is hidden"
        )
    forms = FORMS | (OF_LINKS if link is not None else {})
    printing.show(world, above, forms, _rows(arguments, grid))


def _procs(text: str | None, ranks: int) -> tuple[int, int]:
    """Return rows and columns of ranks. Raises UserError unless they are all ranks."""
    if text is None:
        return ranks, 1
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()) or int(rows) * int(columns) != ranks:
        raise UserError(f"--grid {text}: must be ROWSxCOLUMNS, {ranks} in all")
    return int(rows), int(columns)


def _rows(arguments: argparse.Namespace, grid: ImageGrid) -> Iterator[list[object]]:
    """Yield the row of each network on images of each size. Collective."""
    width, images = arguments.width, arguments.images
    for name, size in product(arguments.networks, arguments.sizes):
        torch.manual_seed(0)
        plain = NETWORKS[name](width)
        split = partition(plain, (width, size, size), grid)
        x = grid.cut(torch.randn(images, width, size, size)).contiguous()
        calls: dict[Any, Callable[[], object]] = {}
        for label, net in (("part", plain), ("split", split)):
            calls |= {(label, FORWARD): partial(net, x), (label, BOTH): both(net, x)}
        times_s = timing.slowest(grid.world, calls, arguments.repeats, arguments.warmup)
        ms = {key: 1e3 * float(np.median(each)) for key, each in times_s.items()}
        row: list[object] = [name, f"{size} x {size}"]
        for each in (FORWARD, BOTH):
            part, ours = ms["part", each], ms["split", each]
            row += [part, ours, ours / part]
        if arguments.link is not None:
            sent = most_sent(grid.world, calls["split", BOTH])
            link = sent * 8e-6 / arguments.link
            hidden = (part + link - ours) / min(part, link) if link else 0.0  # if none sends
            row += [sent / 2**20, link, max(part, link), max(hidden, 0)]
        yield row


def most_sent(world: Ranks, call: Callable[[], object]) -> int:
    """Return the bytes that a call sends, of the process that sends most. Collective."""
    before = int(world.bytes_sent.sum())
    call()
    return int(max(world.gather(int(world.bytes_sent.sum()) - before, "bench")))


def both(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a call of a network, forward and backward, with the gradient of the images too."""
    x = x.clone().requires_grad_()
    slope = torch.cos(torch.arange(net(x).numel())).reshape(net(x).shape)

    def call() -> None:
        net.zero_grad()
        x.grad = None
        net(x).backward(slope)

    return call
