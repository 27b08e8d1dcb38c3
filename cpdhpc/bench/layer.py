"""What a layer of the autoencoder would cost each of many ranks: bytes, memory and FLOP, counted.

Nothing is run: plans are geometry, and every number follows from the sizes that are given.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from ..config import ConfigError, validate
from ..darray import Layout, receptive
from ..darray.windows import Windows

if TYPE_CHECKING:
    from ..train.autoencoder.geometry import Geometry

SUMMARY = "what a layer of the autoencoder costs each of many ranks, counted; needs no MPI"
FLOAT_BYTES = 4
COPIES = 3  # of the weights: themselves, their gradient, the momentum


class Cost(NamedTuple):
    """Of one rank in one iteration. exchanges: name -> (messages, bytes) that leave it."""

    parameters: int
    weight_bytes: int
    activation_bytes: int
    flop: int
    exchanges: dict[str, tuple[int, int]]

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the rank."""
        return sum(size for _, size in self.exchanges.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    options = {
        "ranks": (64, "number of ranks, a square grid or nearly"),
        "image": (200, "side of the images"),
        "channels": (3, "values of a pixel"),
        "field": (10, "side of a receptive field"),
        "step": (1, "from one block of filters to the next"),
        "maps": (1024, "filters of a block"),
        "pool": (3, "side of a pool, in blocks"),
        "batch": (96, "images of an iteration"),
    }
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")


def run(arguments: argparse.Namespace) -> None:
    """Print the costs of the rank that has most of each, and in words what they rest on."""
    from ..train.autoencoder.geometry import Geometry, Layer
    from ..train.autoencoder.job import procs_of

    for name in ("ranks", "batch", "image", "channels"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: must be 1 or more")
    of = {name: getattr(arguments, name) for name in ("field", "step", "maps", "pool")}
    layer = validate(Layer, of, "bench layer")
    try:
        geometry = Geometry(layer, (arguments.image, arguments.image), arguments.channels)
    except ValueError as error:
        raise ConfigError(f"bench {error}") from None
    procs = procs_of(None, arguments.ranks, "ranks")
    costs = layer_costs(geometry, procs, arguments.batch)
    print("\n".join(_lines(geometry, procs, arguments.batch, costs)))


def layer_costs(geometry: Geometry, procs: tuple[int, int], batch: int) -> list[Cost]:
    """Return the cost of an iteration of training for each rank, in float32.

    Exchanges: cells to fields; fields' reconstructions back and, in backward, their gradient;
    responses to pools and their gradient back. The gradient of the cells is not needed.
    """
    layer, grid = geometry.layer, Layout.grid
    cells, blocks, pools = (
        grid(shape, procs) for shape in (geometry.image, geometry.blocks, geometry.pools)
    )
    fields = [receptive(box, layer.field, layer.step) for box in blocks.owners]
    wells = [receptive(box, layer.pool, layer.pool_step) for box in pools.owners]
    cell_bytes = geometry.channels * batch * FLOAT_BYTES
    block_bytes = layer.maps * batch * FLOAT_BYTES
    of_cells = Windows(cells, fields, ("zero", "zero"))
    of_blocks = Windows(blocks, wells, ("zero", "zero"))
    found = []
    for rank, block in enumerate(blocks.owners):
        out, back = _both_ways(of_cells, rank, cell_bytes)
        there, here = _both_ways(of_blocks, rank, block_bytes)
        parameters = block.size * layer.maps * geometry.inputs
        # cut fields and their reconstruction, responses, pool windows and pooled, each with a
        # gradient; cells, window and reconstruction
        values = block.size * batch * (2 * geometry.inputs + 2 * layer.maps)
        values += (wells[rank].size + pools.owner(rank).size) * layer.maps * batch
        values += 2 * (cells.owner(rank).size + fields[rank].size) * geometry.channels * batch
        exchanges = {
            "cells to fields": out,
            "reconstruction back": back,
            "its gradient": out,
            "responses to pools": there,
            "their gradient": here,
        }
        found.append(
            Cost(
                parameters,
                COPIES * FLOAT_BYTES * parameters,
                2 * FLOAT_BYTES * values,
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


def _lines(geometry: Geometry, procs: tuple[int, int], batch: int, costs: list[Cost]) -> list[str]:
    layer, (high, wide), (rows, columns) = geometry.layer, geometry.image, geometry.blocks
    mebi, giga = 2**20, 1e9
    quantities = {
        "parameters": (max(c.parameters for c in costs), ""),
        "weights, gradient, momentum": (max(c.weight_bytes for c in costs) / mebi, "MiB"),
        "activations, their gradients": (max(c.activation_bytes for c in costs) / mebi, "MiB"),
        "arithmetic of an iteration": (max(c.flop for c in costs) / giga, "GFLOP"),
        "the same, mean over ranks": (sum(c.flop for c in costs) / len(costs) / giga, "GFLOP"),
    }
    for name in costs[0].exchanges:
        most = max(c.exchanges[name][1] for c in costs)
        messages = max(c.exchanges[name][0] for c in costs)
        quantities[f"sends {name}"] = most / mebi, f"MiB in {messages} messages"
    quantities["sends in all"] = max(c.sent_bytes for c in costs) / mebi, "MiB"
    return [
        f"# {high} x {wide} x {geometry.channels}, fields of {layer.field} x {layer.field} every "
        f"{layer.step}, {rows} x {columns} blocks of {layer.maps} filters, pools of {layer.pool}",
        f"# {geometry.parameters:,} parameters, batch {batch}, float32, {procs[0]} x {procs[1]} "
        "ranks; of the rank with most:",
        *(
            f"{name:<30} {value:>15,.1f} {unit}".rstrip()
            for name, (value, unit) in quantities.items()
        ),
        "# This rests on: sizes of boxes and windows (exact, the geometry that plans are made",
        "# of); 10 FLOP a parameter and image; one copy each of weights, gradient and momentum;",
        "# activations counted from the code of the layer, not measured, without a library's",
        "# work space. It says nothing of time: that needs the rates of a machine.",
    ]
