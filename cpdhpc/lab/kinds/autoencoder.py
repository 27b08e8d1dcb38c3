"""The autoencoder split over ranks: iterations of training by image, filters and ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import getdoc
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config import ConfigError, Raw, UserError, among, validate
from ...darray import layout
from ...darray.layout import Box, receptive
from ...darray.windows import Windows
from ..settings import options
from ..study_data.factors import DEVICE, Factor, Factors, Value, at_least, device_used, positive
from .base import Call, Kind
from .harness import check_options

if TYPE_CHECKING:
    from ..autoencoder.job import Autoencoder, Geometry
    from ..autoencoder.layer import MacroLayer
    from ..report.points import Estimate, Layout, SeedGroup
    from ..report.tables import Section
    from ..study_data.factors import Case
    from ..study_data.study_file import StudyFile
    from .base import Asked
    from .place import Place

RATE = 1e9  # FLOP/s of a rank: a slow one


def _blocks(of: Factors) -> int:
    return (int(of["image"]) - int(of["field"])) // int(of["step"]) + 1


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors. Raises ValueError where the image is too small. See Kind.used."""
    if int(given["field"]) > int(given["image"]):
        raise ValueError(f"field={given['field']}: more than image={given['image']}")
    if int(given["pool"]) > _blocks(given):
        raise ValueError(f"pool={given['pool']}: more than the {_blocks(given)} blocks there are")
    return {name: given[name] for name in given if name != "device"} | device_used(given)


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    blocks = _blocks(used) ** 2
    if ranks > blocks:
        return f"{blocks} blocks of filters are fewer than {ranks} ranks"
    try:
        _job(used)
    except UserError as error:
        return str(error)
    return None


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    inputs = int(used["field"]) ** 2 * int(used["channels"])
    parameters = _blocks(used) ** 2 * int(used["maps"]) * inputs
    return repeats * (1e-2 + 10 * parameters * int(used["batch"]) / RATE / ranks)


ENDLESS = 10**9  # iterations: more than are measured
LEARNING_RATE = 1e-9  # noise is not to be learned, only the work is done


@contextmanager
def _measure(study: Asked, case: Case, place: Place, check: bool) -> Iterator[Call]:
    """Make an iteration on noise ready; see Kind.measure. Collective."""
    import numpy as np

    from ..autoencoder.training import Stack, Step
    from ..train.setup import agreed

    place.take_device(case.factors)
    world, job = place.world, _job(case.factors)
    job.set_process(world)
    trained = Stack(job, world, agreed(world, job.data.load))
    layer = trained.layers[0]
    for plan in layer.plans.values() if check else ():
        plan.verify()
    steps: list[Step] = []
    x = trained.batch()
    call = Call(lambda: steps.append(trained.step(x)))
    yield call
    counted = steps[study.measure.warmup :] or steps
    call.outcomes |= {
        "payload_bytes": 4 * layer.geometry.parameters,
        "wire_bytes": float(np.mean([step.sent_bytes for step in counted])),
        "plan_bytes": float(plan_bytes(layer, job.train.batch)),
        "exchange_s": float(np.median([step.exchange_s for step in counted])),
        "flop": float(layer.geometry.flop(job.train.batch)),
    }
    for plan in layer.plans.values():
        plan.free()


def _job(of: Factors) -> Autoencoder:
    """Return the job of a case. Raises ConfigError where it is none."""
    from ..autoencoder.job import Autoencoder

    layer = {name: of[name] for name in ("field", "step", "maps", "pool")}
    raw: dict[str, Any] = {
        "name": "case",
        "data": {
            "name": "synthetic",
            "size": of["image"],
            "channels": of["channels"],
            "prepare": "none",
        },
        "layer": [layer],
        "train": {
            "iterations": ENDLESS,
            "learning_rate": LEARNING_RATE,
            "batch": of["batch"],
            "dtype": of["dtype"],
            "threads": of["threads"],
            "device": of.get("device", "cpu"),
        },
    }
    return validate(Autoencoder, raw, "job")


def plan_bytes(layer: MacroLayer, batch: int) -> int:
    """Return what leaves the rank that sends most in an iteration, as the plans say beforehand.

    Cells go to the fields twice, forward and with the gradient of the reconstruction, which comes
    back once; responses go to the pools and their gradient comes back.
    """
    dtype = str(layer.weight.dtype).removeprefix("torch.")
    channels, maps = layer.geometry.channels, layer.geometry.layer.maps
    of_cells = layer.plans["fields"].describe(dtype, (channels, batch)).ranks
    of_blocks = layer.plans["pools"].describe(dtype, (maps, batch)).ranks
    return max(
        2 * cells.sent_bytes + cells.received_bytes + blocks.sent_bytes + blocks.received_bytes
        for cells, blocks in zip(of_cells, of_blocks, strict=True)
    )


CAPTION = (
    "Parameters: of all ranks. Rate: 10 FLOP a parameter and image, in matrix products, over the "
    "median time. In exchanges: median over iterations of the time of the rank with most, waits "
    "for slower ranks included, over the median time. Plan: bytes that leave the rank which sends "
    "most in an iteration, as its plans say beforehand. Sent: what was counted."
)


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> list[Section]:
    """Return rate of arithmetic, share of exchanges and bytes, besides the scaling."""
    from ..report import units
    from ..report.points import of_factors, timing
    from ..report.scaling import Quantity, charts, doublings, from_zero, panels_over
    from ..report.tables import Column, Section, tabulate

    columns: list[Column[SeedGroup]] = [
        Column("ranks", lambda g: str(g.ranks)),
        *of_factors([name for name in layout.panels if name != "maps"], groups),
        Column("maps", lambda g: str(g.factors["maps"])),
        Column("parameters", lambda g: units.fixed(g.mean("payload_bytes") / 4)),
        Column("batch", lambda g: str(g.factors["batch"])),
        *timing(file),
        Column("rate\nGFLOP/s", lambda g: units.digits(_rate(g).value)),
        Column("in ex-\nchanges %", lambda g: units.digits(_exchanges(g).value)),
        Column("plan", lambda g: units.size(g.mean("plan_bytes"))),
        Column("sent", lambda g: units.size(g.mean("wire_bytes"))),
    ]
    quantities = (
        Quantity("rate", "rate / (GFLOP/s)", _rate, _ideal_rate, doublings),
        Quantity(
            "exchanges",
            "in exchanges / %",
            _exchanges,
            lambda g: nan,
            from_zero,
            said="",
            note="Median over iterations of the time of the rank with most, over the median time",
        ),
    )
    panels = panels_over(file, groups, layout)
    drawn = [] if panels is None else charts(file, panels, quantities)
    table = tabulate("Autoencoder", columns, groups, CAPTION)
    return [Section("Autoencoder", tables=[table], charts=drawn)]


def _rate(group: SeedGroup) -> Estimate:
    """Return GFLOP/s of all ranks."""
    return group.time_s.inverse(group.mean("flop") / 1e9)


def _exchanges(group: SeedGroup) -> Estimate:
    """Return the share of exchanges in the time of an iteration, in %."""
    from ..report.points import quotient

    return group.exact("exchange_s").scaled(quotient(100, group.time_s.value))


def _ideal_rate(group: SeedGroup) -> float:
    """Return the rate with the base's rate a rank."""
    from ..report.points import quotient

    return quotient(_rate(group).value, group.efficiency.value)


AUTOENCODER = Kind(
    factors={
        "image": positive("side of the images, pixels", 200),
        "channels": positive("values of a pixel", 3),
        "field": positive("side of a receptive field, pixels", 10),
        "step": positive("from one block of filters to the next, pixels", 4),
        "maps": positive("filters of a block", None),
        "pool": positive("side of a pool, blocks", 3),
        "batch": positive("images of an iteration", 96),
        "threads": Factor(
            "threads of torch of a rank; 0: the cores it owns", int, default=0, check=at_least(0)
        ),
        "dtype": Factor("numbers", str, default="float32", check=among(("float32", "float64"))),
        "device": DEVICE,
    },
    work="maps",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="an iteration of training: forward, backward, update and the ranks' agreement on it",
    measure=_measure,
    sections=_sections,
    panels=("maps",),
)


FLOAT_BYTES = 4
COPIES = 2  # of the weights between iterations: themselves and the momentum


class Cost(NamedTuple):
    """Of one rank in one iteration. exchanges: name -> (messages, bytes) that leave it.

    state_bytes: weights and momentum; peak_bytes: the most that all tensors take at a time
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


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.description = getdoc(run_layer)
    sizes = {
        "ranks": (64, "number of ranks, a square grid or nearly"),
        "image": (200, "side of the images"),
        "channels": (3, "values of a pixel"),
        "field": (10, "side of a receptive field"),
        "step": (1, "from one block of filters to the next"),
        "maps": (1024, "filters of a block"),
        "pool": (3, "side of a pool, in blocks"),
        "batch": (96, "images of an iteration"),
    }
    add = options(parser)
    for name, (default, text) in sizes.items():
        add(f"--{name} N", text, default)


def run_layer(arguments: argparse.Namespace) -> None:
    """What a layer of the autoencoder costs each of many ranks: bytes, memory, FLOP; counted.

    Nothing is run: plans are geometry, and every number follows from the sizes that are given.
    """
    from ..autoencoder.job import Geometry, Layer, procs_of

    check_options(arguments, 1, "ranks", "batch", "image", "channels")
    of = {name: getattr(arguments, name) for name in ("field", "step", "maps", "pool")}
    layer = validate(Layer, of, "bench layer")
    try:
        geometry = Geometry(layer, (arguments.image, arguments.image), arguments.channels)
    except ValueError as error:
        raise ConfigError(f"bench {error}") from None
    procs = procs_of(None, arguments.ranks, "ranks")
    costs = layer_costs(geometry, procs, arguments.batch)
    print("\n".join(_layer_lines(geometry, procs, arguments.batch, costs)))


def layer_costs(geometry: Geometry, procs: tuple[int, int], batch: int) -> list[Cost]:
    """Return the cost of an iteration of training for each rank, in float32.

    Exchanges: cells to fields; fields' reconstructions back and, in backward, their gradient;
    responses to pools and their gradient back. The gradient of the cells is not needed.
    """
    layer, grid = geometry.layer, layout.Layout.grid
    cells, blocks, pools = (
        grid(shape, procs) for shape in (geometry.image, geometry.blocks, geometry.pools)
    )
    fields = [receptive(box, layer.field, layer.step) for box in blocks.owners]
    pool_windows = [receptive(box, layer.pool, layer.pool_step) for box in pools.owners]
    cell_bytes = geometry.channels * batch * FLOAT_BYTES
    block_bytes = layer.maps * batch * FLOAT_BYTES
    of_cells = Windows(cells, fields, ("zero", "zero"))
    of_blocks = Windows(blocks, pool_windows, ("zero", "zero"))
    found = []
    for rank, block in enumerate(blocks.owners):
        out, back = _both_ways(of_cells, rank, cell_bytes)
        there, here = _both_ways(of_blocks, rank, block_bytes)
        boxes = block, pool_windows[rank], pools.owner(rank)
        parameters = block.size * layer.maps * geometry.inputs
        image = 3 * (cells.owner(rank).size + fields[rank].size) * geometry.channels * batch
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
                FLOAT_BYTES * _peak(geometry, batch, boxes, image),
                10 * parameters * batch,
                exchanges,
            )
        )
    return found


def _peak(geometry: Geometry, batch: int, boxes: Sequence[Box], image: int) -> int:
    """Return the most values that tensors hold at a time: of four moments of backward.

    boxes: of the rank's blocks, its window of blocks for pools, and its pools
    image: values of tensors that are as large as cells or windows
    """
    maps, (block, pool_window, pool) = geometry.layer.maps, boxes
    weights = block.size * maps * geometry.inputs
    fields, responses = (block.size * batch * n for n in (geometry.inputs, maps))
    windows, pooled = (box.size * maps * batch for box in (pool_window, pool))
    moments = (
        # Weights, momentum and rows are always there; windows and pools each with two gradients.
        3 * weights + fields + 2 * responses + 3 * windows + 3 * pooled,
        # Through the reconstruction: a gradient of the rows; fields, and their gradient.
        4 * weights + 2 * fields + 3 * responses,
        # Through the responses: a second gradient of the rows; then their sum is made.
        5 * weights + fields + responses,
        6 * weights,
    )
    return max(moments) + image


def _both_ways(windows: Windows, rank: int, cell_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return (messages, bytes) that leave a rank in an exchange, and in its transpose."""

    def counted(pairs: list[tuple[int, int]]) -> tuple[int, int]:
        cells = [sum(p.source.size for p in windows.pieces(*pair)) for pair in pairs]
        return len(pairs), sum(cells) * cell_bytes

    readers = [(rank, other) for other in windows.readers(rank) if other != rank]
    owners = [(other, rank) for other in windows.owners(rank) if other != rank]
    return counted(readers), counted(owners)


def _layer_lines(
    geometry: Geometry, procs: tuple[int, int], batch: int, costs: list[Cost]
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
        "# This rests on: sizes of boxes and windows (exact, the geometry that plans are made",
        "# of); 10 FLOP a parameter and image in matrix products; the peak is counted from the",
        "# code of the layer, in backward, without buffers of messages and a library's work space;",
        "# a test holds it to 10 % of what is allocated. It says nothing of time: that needs the",
        "# rates of a machine.",
    ]
