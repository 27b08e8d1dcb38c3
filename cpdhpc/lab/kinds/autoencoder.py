"""The autoencoder split over ranks: iterations of training by image, filters and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import nan
from typing import TYPE_CHECKING, Any

from ...config import Raw, UserError, among, validate
from ..report import units
from ..report.points import Estimate, Facets, SeedGroup, of_factors, quotient, timing
from ..report.scaling import Quantity, charts, doublings, from_zero, panels_over
from ..report.tables import Column, Section, tabulate
from ..study_data import DEVICE, Case, Factor, Factors, Value, at_least, device_used, positive
from ..study_data.study_file import StudyFile
from .base import Call, Kind, MeasuredStudy

if TYPE_CHECKING:
    from ..autoencoder.job import Autoencoder
    from ..autoencoder.layer import MacroLayer
    from .place import JobRanks

RATE = 1e9  # FLOP/s of a rank: a slow one


def _blocks(of: Factors) -> int:
    return (int(of["image"]) - int(of["field"])) // int(of["step"]) + 1


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors. Raises ValueError if the image is too small. See Kind.used."""
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
LEARNING_RATE = 1e-9  # nothing is to be learned from noise


@contextmanager
def _measure(study: MeasuredStudy, case: Case, place: JobRanks, check: bool) -> Iterator[Call]:
    """Prepare an iteration on noise; see Kind.measure. Collective."""
    import numpy as np

    from ..autoencoder.training import Stack, Step, set_process
    from ..train.setup import agreed

    place.take_device(case.factors)
    world, job = place.world, _job(case.factors)
    set_process(world, job.train)
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
    """Return the job of a case. Raises ConfigError if its factors are none of a job."""
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
    """Return the bytes that the rank that sends most sends in an iteration, by the plans.

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


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return rate of arithmetic, share of exchanges and bytes."""
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
    return group.exact("exchange_s").scaled(quotient(100, group.time_s.value))


def _ideal_rate(group: SeedGroup) -> float:
    """Return the rate if each rank had that of the base."""
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
