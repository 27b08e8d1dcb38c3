"""Which training samples lowered or raised the loss of test samples: TracIn, arXiv 2002.08484.

RUN is a run of `cpdhpc train` whose weights were kept (train.keep_every): its record, or a
directory with one. For each kept epoch the gradients of single samples are found, and their inner
products times the epoch's learning rate are summed: a training sample with a score above 0 is a
proponent of the test sample, below 0 an opponent. --self finds how much each training sample
lowered its own loss: mislabelled ones come first. Samples are dealt to the ranks of mpirun; neither
their number nor the memory changes a bit.
"""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import store
from ..config import IMPORT_FROM, ConfigError, override, validate
from ..ops import set_kernel_threads
from ..train import weights
from ..train.checkpoint import check_job
from ..train.job import Job
from ..train.losses import LossFunction
from ..train.progress import Display
from ..train.setup import agreed, build_model, check_fit, samples_of
from ..world.cores import threads_of_rank
from ..world.ranks import Ranks
from .rows import LastLayer, Layers, Projection, SampleGradients
from .scores import KIND, Run, Scores, Wanted
from .show import check_images, draw, tables

Array = npt.NDArray[Any]
ALL, LAST = "all", "last"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_of", type=Path, metavar="RUN", help="a run's record, or its directory")
    parser.add_argument("--test", metavar="A:B", default="",
                        help="numbers of test samples, as 0:100 or 3,7,90:99")  # fmt: skip
    parser.add_argument("--train", metavar="A:B", default=":",
                        help="numbers of training samples (default: all)")  # fmt: skip
    parser.add_argument("--self", dest="own", action="store_true",
                        help="find the influence of training samples on themselves")  # fmt: skip
    parser.add_argument("--layers", nargs="+", default=[LAST], metavar="NAME",
                        help="whose gradients: last (default), the linear layer that runs last; "
                        "all; or names of layers")  # fmt: skip
    parser.add_argument("--projection", type=int, metavar="D", default=0,
                        help="compare D random sums of gradients, right on average")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the projection")
    parser.add_argument("--epochs", metavar="N,...", default="",
                        help="which kept epochs (default: all)")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="data.KEY=VALUE",
                        help="where the data is now; must be that of the run")  # fmt: skip
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB",
                        help="of a rank for gradients and scores (default 1024)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="scores (default: RUN's name with .influence.h5)")  # fmt: skip
    parser.add_argument("--png", type=Path, metavar="FILE",
                        help="draw test images with their proponents and opponents")  # fmt: skip
    parser.add_argument("--top", type=int, default=5, metavar="N",
                        help="of these that are shown (default 5)")  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What the command line asks for, checked."""

    record: Path
    job: Job
    run: Run
    wanted: Wanted
    gradients: SampleGradients
    projection: Projection | None


def run(arguments: argparse.Namespace, world: Ranks) -> int:
    """Find the scores, write and show them. Collective. Raises UserError on all ranks alike."""
    plan = agreed(world, lambda: planned(arguments))
    threads = plan.job.train.threads or threads_of_rank(world)
    torch.set_num_threads(threads)
    set_kernel_threads(threads)
    wanted = plan.wanted
    scores = agreed(world, lambda: Scores(world, plan.run, plan.gradients, plan.projection, wanted))
    out = arguments.out or plan.record.with_suffix(f".{KIND}.h5")
    display = Display(world.process == 0, 1)
    epochs = ", ".join(str(kept.epoch) for _, kept in plan.run.kept)
    display.line(
        f"{plan.job.id}: weights after epoch {epochs}; {len(wanted.test)} test samples, "
        f"{len(wanted.train)} training samples on {world.processes} processes; gradients of "
        f"{plan.gradients.values:,} values; passes over them: {len(scores.blocks)}"
    )
    display.start("influence", scores.samples, 0)
    attributes = {
        "run": plan.job.id,
        "layers": " ".join(arguments.layers),
        "projection": arguments.projection,
        "projection_seed": arguments.seed,
        "toml": plan.job.toml(),
    }
    try:
        scores.save(out, attributes, display)
    finally:
        display.bar.stop()

    def show() -> None:
        for line in tables(out, arguments.top):
            display.line(line)
        if arguments.png is not None:
            draw(arguments.png, out, plan.run.train, plan.run.test, arguments.top)
        display.line(f"scores: {out}")

    world.on_first(show, "show")
    return 0


def planned(arguments: argparse.Namespace) -> Plan:
    """Return what is to be done. Raises UserError for whatever is wrong with it."""
    for name, least in (("projection", 0), ("seed", 0), ("memory", 1), ("top", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: must be {least} or more")
    if not arguments.test and not arguments.own:
        raise ConfigError("influence: give --test, the test samples it is on, or --self, or both")
    for place in (arguments.out, arguments.png):
        if place is not None and not place.parent.is_dir():
            raise ConfigError(f"{place}: cannot be written: there is no such directory")
    record = record_of(arguments.run_of)
    job = _job(record, arguments.set)
    kept = _kept(record, job, arguments.epochs)
    data = job.data.load()
    train, test = samples_of(data)
    if weights.data_digest(train, test) != kept[0][1].data:
        raise ConfigError(f"{record}: the data set is another one than the run's")
    wanted = Wanted(
        numbers("--test", arguments.test, len(test)),
        numbers("--train", arguments.train, len(train)),
        arguments.own,
        arguments.memory * 2**20,
    )
    if arguments.png is not None:
        check_images(train)
    model, loss = build_model(job, data), job.loss.build()
    check_fit(job, model, loss, train, data.classes)
    gradients = _gradients(arguments.layers, model, loss, train)
    width = arguments.projection
    projection = Projection(gradients.sizes, width, arguments.seed) if width else None
    return Plan(record, job, Run(model, train, test, kept), wanted, gradients, projection)


def _gradients(
    layers: list[str], model: torch.nn.Module, loss: LossFunction, train: Any
) -> SampleGradients:
    if len(layers) > 1 and {ALL, LAST} & {*layers}:
        raise ConfigError(f"--layers {' '.join(layers)}: must be last, all, or names")
    if layers == [LAST]:
        return LastLayer(model, loss, train.take(np.zeros(1, np.int64), 0)[0])
    return Layers(model, loss, [] if layers == [ALL] else layers)


def record_of(path: Path) -> Path:
    """Return the record of a run: the file, or the only one in a directory. Raises ConfigError."""
    files = sorted(path.glob("*.h5")) if path.is_dir() else [path]
    records = [file for file in files if store.read_attributes(file).get("kind") == "run"]
    if len(records) != 1:
        what = f"{len(records)} runs" if path.is_dir() else "is no run"
        names = f": name one of {', '.join(each.name for each in records)}" if records else ""
        raise ConfigError(f"{path}: {what}{names}")
    return records[0]


def _job(record: Path, settings: list[str]) -> Job:
    movable = ("data.", f"model.{IMPORT_FROM}=")
    for setting in settings:
        if not setting.startswith(movable):
            raise ConfigError(f"--set {setting}: must be of data, as data.dir=DIR")
    toml = str(store.read_attributes(record).get("toml", ""))
    return validate(Job, override(tomllib.loads(toml), settings), str(record))


def _kept(record: Path, job: Job, epochs: str) -> list[tuple[Path, weights.Kept]]:
    """Return the files of weights of a run, by epoch. Raises UserError where there are none."""
    paths = record.parent.glob(weights.path_of(record, "*").name)
    kept = sorted(((path, weights.read(path)) for path in paths), key=lambda each: each[1].epoch)
    if not kept:
        raise ConfigError(f"{record}: no weights were kept: train with train.keep_every")
    of_run = str(store.read_attributes(record)["toml"])
    for path, each in kept:
        check_job(path, each.job, of_run)
    if not epochs:
        return kept
    known = {each.epoch: (path, each) for path, each in kept}
    wanted = epochs.split(",")
    if unknown := [each for each in wanted if each not in map(str, known)]:
        there = ", ".join(map(str, known))
        raise ConfigError(f"--epochs {epochs}: no weights of {unknown[0]}: kept are {there}")
    return [known[each] for each in sorted({int(each) for each in wanted})]


def numbers(option: str, text: str, count: int) -> Array:
    """Return int64[n] of numbers below count as "3", "0:100", "0:100:2", ":" and commas say.

    None for no text. Raises ConfigError for other text, or numbers that are not there.
    """
    found = list[int]()
    for part in text.split(",") if text else ():
        try:
            found += _range(part, count)
        except ValueError:
            raise ConfigError(f"{option} {text}: must be as 0:100 or 3,7,90:99") from None
    outside = [each for each in found if not 0 <= each < count]
    if outside or (text and not found) or len({*found}) < len(found):
        what = f"{outside[0]} is not there" if outside else "nothing, or some twice"
        raise ConfigError(f"{option} {text}: {what}: must be of 0..{count - 1}, each once")
    return np.array(found, np.int64)


def _range(text: str, count: int) -> range:
    """Return the numbers of "3", "0:100", ":" or "0:100:2". Raises ValueError for other text."""
    if ":" not in text:
        return range(int(text), int(text) + 1)
    start, stop, *step = (int(each) if each.strip() else None for each in text.split(":"))
    return range(
        start or 0, count if stop is None else stop, *(1 if each is None else each for each in step)
    )
