"""python -m cpdhpc autoencoder: the layers of a file, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..config import ConfigError
from ..signals import Caught, Interrupted, catching
from ..train.output import claimed
from ..train.progress import Display
from ..train.setup import agreed
from ..world.mpi import World
from . import files
from .files import check_place, draw, shown
from .job import load
from .training import Diverged, Stack, Step

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
    agreed(world, lambda: options.png is None or world.process > 0 or check_place(options.png))
    runs = {job.name: (record, checkpoint)}
    with claimed(world, options.directory, runs, options.resume), catching() as caught:
        job.set_process(own)
        images = agreed(world, job.data.load)
        try:
            stack = Stack(job, own, images)
        except ValueError as error:  # the same on all ranks
            raise ConfigError(f"{options.path}: {error}") from None
        display = Display(world.process == 0, 1)
        _announce(stack, display)
        steps = _resumed(stack, options.resume, record, checkpoint)
        if steps:
            display.line(f"resumed after {len(steps)} iterations, at {_place(stack)}")
        _run(stack, steps, caught, display, record, checkpoint)
        if options.png is not None:
            _picture(options.png, stack, steps)
    return record


def _resumed(stack: Stack, wanted: bool, record: Path, checkpoint: Path) -> list[Step]:
    """Return the iterations that are done. Collective."""
    if not wanted or not files.resume(checkpoint, stack):
        return []
    found = stack.world.on_first(lambda: files.read_steps(record), "resume")
    done = stack.layer, stack.iteration
    steps = [step for step in found if (step.layer, step.iteration) < done]
    if len(steps) != stack.layer * stack.job.train.iterations + stack.iteration:
        raise ConfigError(
            f"{record}: has {len(steps)} iterations before {_place(stack)}, "
            f"where {checkpoint.name} stands: it is not of the same run"
        )
    return steps


def _place(stack: Stack) -> str:
    return "the end" if stack.done else f"layer {stack.layer}, iteration {stack.iteration}"


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
    if not stack.done:
        display.start(f"layer {stack.layer}", train.iterations, stack.iteration)
    while not stack.done:
        try:
            step = stack.step(stack.batch())
        except Diverged:
            files.save_record(record, stack, steps, "failed")
            raise
        steps.append(step)
        last = step.iteration + 1 == train.iterations
        _show(step, last, stack, display)
        signal = max(stack.world.gather(caught.number, "signal"))
        if signal or last or stack.iteration % train.checkpoint_every == 0:
            status = "complete" if stack.done else "interrupted" if signal else "running"
            # The record first: after a kill in between it has more than is needed, not less.
            files.save_record(record, stack, steps, status)
            files.save(checkpoint, stack)
        if signal and not stack.done:
            display.end(f"stopped at {_place(stack)}: --resume goes on from {checkpoint}")
            raise Interrupted(signal)
        if last:
            display.end(summary(stack, [each for each in steps if each.layer == step.layer]))
            if not stack.done:
                display.start(f"layer {stack.layer}", train.iterations, 0)


def _show(step: Step, last: bool, stack: Stack, display: Display) -> None:
    every = max(1, stack.job.train.iterations // SHOWN)
    error = f"error {step.error / step.energy:.4f}"
    display.step(note=error)
    if not display.has_bar and (step.iteration % every == 0 or last):
        display.line(
            f"layer {step.layer}, iteration {step.iteration}: loss {step.loss:.6g}, "
            f"{error} of the input's energy, "
            f"{1e3 * step.time_s:.1f} ms, {1e3 * step.exchange_s:.1f} ms in exchanges"
        )


def summary(stack: Stack, steps: list[Step]) -> str:
    """Return in a line how the training of a layer went and what its iterations took."""
    number, first, last = steps[-1].layer, steps[0], steps[-1]
    time_s, exchange_s = (
        median(getattr(step, name) for step in steps) for name in ("time_s", "exchange_s")
    )
    ranks = stack.world.ranks
    flop = stack.layers[number].geometry.flop(stack.job.train.batch)
    return (
        f"layer {number} on {ranks} rank{'s' * (ranks > 1)}: error "
        f"{first.error / first.energy:.4f} -> {last.error / last.energy:.4f}; "
        f"median iteration {1e3 * time_s:.1f} ms, "
        f"{exchange_s / time_s:.0%} of it in exchanges, {flop / time_s / 1e9:.3g} GFLOP/s, "
        f"{last.sent_bytes / 1024:,.1f} KiB sent by the rank that sends most"
    )


def _picture(path: Path, stack: Stack, steps: list[Step]) -> None:
    """Draw the first layer's filters. Collective."""
    layer = stack.layers[0]
    weight = shown(layer)
    of_layer = [step for step in steps if step.layer == 0]
    stack.world.on_first(lambda: draw(path, weight, layer.geometry, of_layer), "picture")
