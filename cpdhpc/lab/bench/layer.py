"""Count the bytes, memory and FLOP of a layer of the autoencoder on each of many ranks.

Nothing runs: plans are geometry, and every number follows from the sizes of the options.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from ...config import ConfigError, validate
from ...darray.layout import Layout, receptive
from ...darray.windows import Windows
from ..kinds import flags
from ..settings import options

if TYPE_CHECKING:
    from ..autoencoder.job import Geometry

FLOAT_BYTES = 4
COPIES = 2  # of the weights between iterations: themselves and the momentum


class IterationCost(NamedTuple):
    """The cost of an iteration for a rank. exchanges: name -> (messages, bytes) that leave it.

    state_bytes: weights and momentum; peak_bytes: the most that all tensors take at one time
    """

    parameters: int
    state_bytes: int
    peak_bytes: int
    flop: int
    exchanges: dict[str, tuple[int, int]]

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the rank."""
        return sum(size for _, size in self.exchanges.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    for name, default, text in (
        ("ranks", 64, "number of ranks, in a grid that is square if possible"),
        ("image", 200, "side of the images"),
        ("channels", 3, "values of each pixel"),
        ("field", 10, "side of a receptive field"),
        ("step", 1, "distance from one block of filters to the next"),
        ("maps", 1024, "filters of each block"),
        ("pool", 3, "side of a pool, in blocks"),
        ("batch", 96, "images of each iteration"),
    ):
        add(f"--{name} N", text, default, type=flags.at_least(1))


def run(arguments: argparse.Namespace) -> None:
    """Print the largest cost of any rank, and the assumptions."""
    from ..autoencoder.job import Geometry, Layer, procs_of

    of = {name: getattr(arguments, name) for name in ("field", "step", "maps", "pool")}
    layer = validate(Layer, of, "bench layer")
    try:
        geometry = Geometry(layer, (arguments.image, arguments.image), arguments.channels)
    except ValueError as error:
        raise ConfigError(f"bench {error}") from None
    procs = procs_of(None, arguments.ranks, "ranks")
    costs = layer_costs(geometry, procs, arguments.batch)
    print("\n".join(_lines(geometry, procs, arguments.batch, costs)))


def layer_costs(geometry: Geometry, procs: tuple[int, int], batch: int) -> list[IterationCost]:
    """Return the cost of an iteration of training for each rank, in float32.

    Exchanges: cells to fields; fields' reconstructions back and, in backward, their gradient;
    responses to pools and their gradient back. The gradient of the cells is not needed.
    """
    layer, grid = geometry.layer, Layout.grid
    cells, blocks, pools = (
        grid(shape, procs) for shape in (geometry.image, geometry.blocks, geometry.pools)
    )
    fields = [geometry.cells_of(box) for box in blocks.owners]
    pool_windows = [receptive(box, layer.pool, layer.pool_step) for box in pools.owners]
    cell_bytes = geometry.channels * batch * FLOAT_BYTES
    block_bytes = layer.maps * batch * FLOAT_BYTES
    of_cells = Windows(cells, fields, ("zero", "zero"))
    of_blocks = Windows(blocks, pool_windows, ("zero", "zero"))
    found = []
    for rank, block in enumerate(blocks.owners):
        out, back = _both_ways(of_cells, rank, cell_bytes)
        there, here = _both_ways(of_blocks, rank, block_bytes)
        parameters = block.size * layer.maps * geometry.inputs
        # A batch; its window and that of its reconstruction; those of responses and slopes.
        image = (cells.owner(rank).size + 2 * fields[rank].size) * geometry.channels * batch
        responses = 2 * pool_windows[rank].size * layer.maps * batch
        exchanges = {
            "cells to fields": out,
            "reconstruction back": back,
            "its gradient": out,
            "responses to pools": there,
            "their gradient": here,
        }
        found.append(
            IterationCost(
                parameters,
                COPIES * FLOAT_BYTES * parameters,
                FLOAT_BYTES * (COPIES * parameters + image + responses),
                10 * parameters * batch,
                exchanges,
            )
        )
    return found


def _both_ways(windows: Windows, rank: int, cell_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return (messages, bytes) that leave a rank in an exchange, and in its transpose."""

    def counted(pairs: list[tuple[int, int]]) -> tuple[int, int]:
        cells = [sum(p.source.size for p in windows.pieces(*pair)) for pair in pairs]
        return len(pairs), sum(cells) * cell_bytes

    readers = [(rank, other) for other in windows.readers(rank) if other != rank]
    owners = [(other, rank) for other in windows.owners(rank) if other != rank]
    return counted(readers), counted(owners)


def _lines(
    geometry: Geometry, procs: tuple[int, int], batch: int, costs: list[IterationCost]
) -> list[str]:
    layer, (high, wide), (rows, columns) = geometry.layer, geometry.image, geometry.blocks
    mebi, giga = 2**20, 1e9
    quantities = {
        "million parameters": (max(c.parameters for c in costs) / 1e6, ""),
        "weights and momentum": (max(c.state_bytes for c in costs) / mebi, "MiB"),
        "all tensors at the peak": (max(c.peak_bytes for c in costs) / mebi, "MiB"),
        "arithmetic of an iteration": (max(c.flop for c in costs) / giga, "GFLOP"),
        "the same, mean over ranks": (sum(c.flop for c in costs) / len(costs) / giga, "GFLOP"),
    }
    for name in costs[0].exchanges:
        most = max(c.exchanges[name][1] for c in costs)
        messages = max(c.exchanges[name][0] for c in costs)
        quantities[f"sends {name}"] = most / mebi, f"MiB in {messages} messages"
    quantities["sends in all"] = max(c.sent_bytes for c in costs) / mebi, "MiB"
    lines = (f"{name:<28} {value:>13,.1f} {unit}" for name, (value, unit) in quantities.items())
    return [
        f"# {high} x {wide} x {geometry.channels}, fields of {layer.field} x {layer.field} every "
        f"{layer.step}, {rows} x {columns} blocks of {layer.maps} filters, pools of {layer.pool}",
        f"# {geometry.parameters:,} parameters, batch {batch}, float32, {procs[0]} x {procs[1]} "
        "ranks; of the rank with most:",
        *(line.rstrip() for line in lines),
        "# Assumed: sizes of boxes and windows (exact, the geometry that plans are made",
        "# of); 10 FLOP a parameter and image in matrix products; the peak is weights, momentum,",
        "# and the arrays of an iteration, without those of a few blocks, buffers of messages and",
        "# a library's work space; a test compares it with allocated memory, to 10 %. Times are",
        "# not predicted: they need the rates of a machine.",
    ]
