"""What the command line asks for, checked: a run, its kept weights, samples, gradients."""

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
from ..train import weights
from ..train.checkpoint import check_job
from ..train.fitting import build_model, check_fit, samples_of
from ..train.job import Job, laid_over
from ..train.losses import LossFunction
from .rows import LastLayer, Layers, Projection, SampleGradients
from .scores import Run, Wanted
from .show import check_images

Array = npt.NDArray[Any]
ALL, LAST = "all", "last"


@dataclass(frozen=True)
class Plan:
    """What the command line asks for, checked."""

    record: Path
    job: Job
    run: Run
    wanted: Wanted
    gradients: SampleGradients
    projection: Projection | None


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
    if not job.precision.empty:
        raise ConfigError(f"{record}: precision: gradients of single samples are float32's only")
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
    return validate(Job, override(tomllib.loads(toml), settings, laid_over), str(record))


def _kept(record: Path, job: Job, epochs: str) -> list[tuple[Path, weights.Kept]]:
    """Return the files of weights of a run, by epoch. Raises UserError where there are none."""
    paths = record.parent.glob(weights.path_of(record, "*").name)
    kept = sorted(((path, weights.read(path)) for path in paths), key=lambda each: each[1].epoch)
    if not kept:
        raise ConfigError(f"{record}: no weights were kept: train with train.keep_every")
    of_run = _job(record, []).toml()  # with the defaults of keys that its version did not have
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
