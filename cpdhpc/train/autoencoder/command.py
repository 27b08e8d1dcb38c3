"""python -m cpdhpc autoencoder: the layers of a file, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ...comm import World
from ...comm.threads import threads_of_rank
from ...config import ConfigError
from ...signals import Caught, Interrupted, catching
from ..progress import Display
from ..setup import agreed
from . import files
from .job import load
from .picture import draw
from .training import Diverged, Stack, Step
from .whole import collect

SHOWN = 20  # lines of progress of a layer


class Options(NamedTuple):
    """What the command line gives. png: of the first layer's filters, or None."""

    path: Path
    settings: Iterable[str]
    directory: Path
    resume: bool
    png: Path | None


def train(world: World, options: Options) -> Path:
    """Train the layers of a file and return the path of the record. Collective.

    Raises UserError or Interrupted on all ranks alike.
    """
    job = agreed(world, lambda: load(options.path, options.settings))
    own = world.part(range(world.size), timeout_s=job.train.timeout_s)
    assert own is not None, "all processes are in it"
    record = options.directory / f"{job.name}.h5"
    checkpoint = options.directory / f"{job.name}.checkpoint.h5"
    agreed(world, lambda: _directory(record, checkpoint, world.rank == 0, options.resume))
    torch.set_num_threads(job.train.threads or threads_of_rank(own))
    images = agreed(world, job.data.load)
    try:
        stack = Stack(job, own, images)
    except ValueError as error:  # the same on all ranks
        raise ConfigError(f"{options.path}: {error}") from None
    display = Display(world.rank == 0, 1)
    steps = _resumed(stack, options.resume, record, checkpoint)
    _announce(stack, display)
    with catching() as caught:
        _run(stack, steps, caught, display, record, checkpoint)
    if options.png is not None:
        _picture(options.png, stack, steps)
    return record


def _directory(record: Path, checkpoint: Path, writes: bool, resume: bool) -> bool:
    if not writes:
        return True
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{record.parent}: cannot be made: {error.strerror}") from None
    for path in (record, checkpoint):
        if path.exists() and not resume:
            raise ConfigError(
                f"{path}: is there already: --resume goes on from it, "
                "--out DIR writes to another directory"
            )
    return True


def _resumed(stack: Stack, wanted: bool, record: Path, checkpoint: Path) -> list[Step]:
    """Return the iterations that are done. Collective."""
    if not wanted or not files.resume(checkpoint, stack):
        return []
    found = agreed(stack.world, lambda: files.read_steps(record) if stack.world.rank == 0 else [])
    done = stack.layer, stack.iteration
    return [step for step in found if (step.layer, step.iteration) < done]


def _announce(stack: Stack, display: Display) -> None:
    for number, layer in enumerate(stack.layers):
        of = layer.geometry
        display.line(
            f"layer {number}: {of.blocks[0]} x {of.blocks[1]} blocks of {of.layer.maps} filters on "
            f"{of.image[0]} x {of.image[1]} x {of.channels}: {of.parameters:,} parameters, "
            f"{of.flop(stack.job.train.batch) / 1e9:.3g} GFLOP an iteration"
        )


def _run(
    stack: Stack,
    steps: list[Step],
    caught: Caught,
    display: Display,
    record: Path,
    checkpoint: Path,
) -> None:
    """Train to the end, or to a signal, and write the files. Collective."""
    train = stack.job.train
    every = max(1, train.iterations // SHOWN)
    while not stack.done:
        try:
            step = stack.step(stack.batch())
        except Diverged:
            files.save_record(record, stack, steps, "failed")
            raise
        steps.append(step)
        last = step.iteration + 1 == train.iterations
        if step.iteration % every == 0 or last:
            display.line(_line(step))
        signal = max(stack.world.gather(caught.number, "signal"))
        if signal or last or stack.iteration % train.checkpoint_every == 0:
            files.save(checkpoint, stack)
            status = "complete" if stack.done else "interrupted" if signal else "running"
            files.save_record(record, stack, steps, status)
        if signal and not stack.done:
            raise Interrupted(signal)


def _line(step: Step) -> str:
    return (
        f"layer {step.layer}, iteration {step.iteration}: loss {step.loss:.6g}, error "
        f"{step.error / step.energy:.4f} of the input's energy, "
        f"{1e3 * step.time_s:.1f} ms, {1e3 * step.exchange_s:.1f} ms in exchanges"
    )


def _picture(path: Path, stack: Stack, steps: list[Step]) -> None:
    """Draw the first layer's filters. Collective."""
    layer = stack.layers[0]
    weight = collect(stack.world, layer, layer.weight)
    if weight is not None:
        draw(path, weight, layer.geometry, [step for step in steps if step.layer == 0])
