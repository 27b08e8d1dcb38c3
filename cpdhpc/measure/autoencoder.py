"""The autoencoder in a job: iterations of one layer on noise, its plans checked before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..autoencoder.job import Autoencoder
from ..autoencoder.layer import MacroLayer
from ..autoencoder.training import Stack, Step
from ..config import validate
from ..study.cases import Case
from ..study.spec import Study
from ..train.setup import agreed
from .repeats import Call, Calls, Place

ENDLESS = 10**9  # iterations: more than are measured
RATE = 1e-9  # learning rate: noise is not to be learned, only the work is done


class _Autoencoder(Calls):
    """A case of the kind "autoencoder"."""

    @contextmanager
    def call(self, place: Place, check: bool) -> Iterator[Call]:
        """Make an iteration ready; see Calls.call."""
        world = place.world
        job = _job(self.case)
        job.set_process(world)
        stack = agreed(world, lambda: (job.data.load(),))
        trained = Stack(job, world, stack[0])
        layer = trained.layers[0]
        for plan in layer.plans.values() if check else ():
            plan.verify()
        steps: list[Step] = []
        x = trained.batch()
        call = Call(lambda: steps.append(trained.step(x)))
        yield call
        counted = steps[self.measure.warmup :] or steps
        call.outcomes |= {
            "payload_bytes": 4 * layer.geometry.parameters,
            "wire_bytes": float(np.mean([step.sent_bytes for step in counted])),
            "plan_bytes": float(plan_bytes(layer, job.train.batch)),
            "exchange_s": float(np.median([step.exchange_s for step in counted])),
            "flop": float(layer.geometry.flop(job.train.batch)),
        }
        for plan in layer.plans.values():
            plan.free()


def start(study: Study, case: Case, directory: Path) -> _Autoencoder:
    """Return a case of the kind "autoencoder", about to be measured."""
    return _Autoencoder(case, study.measure, directory)


def _job(case: Case) -> Autoencoder:
    of = case.factors
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
            "learning_rate": RATE,
            "batch": of["batch"],
            "dtype": of["dtype"],
            "threads": of["threads"],
        },
    }
    return validate(Autoencoder, raw, f"case {case.id}")


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
