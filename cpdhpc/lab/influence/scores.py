"""Scores of training samples for test samples, and their inputs: runs, samples, memory."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import store
from ...collectives import sparse
from ...compress.base import Array
from ...config import IMPORT_FROM, ConfigError, UserError, told, validate
from ...partition import split
from ...world import files
from ...world.ranks import Ranks
from ..settings import check_file, override
from ..train import checkpoint
from ..train.job import Job, laid_over
from ..train.losses import LossFunction
from ..train.progress import Display
from ..train.samples import Samples
from ..train.setup import agreed, build_model, check_fit, samples_of
from . import check_images
from .rows import LastLayer, Layers, Projection, SampleGradients

Put = Callable[[str, tuple[int, ...], Array], None]

KIND = "influence"
MOST = 64  # samples that go through the model at once
CHUNK_BYTES = 64 * 2**20  # of their gradients
TEXTS = {  # dataset: its axes, dtype, description
    "epoch": (("epoch",), np.int64, "epoch, from 1, after which weights were kept"),
    "learning_rate": (("epoch",), np.float64, "learning rate of its last step"),
    "test": (("test",), np.int64, "number of the test sample"),
    "test_target": (("test",), np.int64, "class of the test sample"),
    "test_loss": (("test",), np.float32, "its loss after the last epoch"),
    "train": (("train",), np.int64, "number of the training sample"),
    "train_target": (("train",), np.int64, "class of the training sample, as it was trained on"),
    "train_loss": (("train",), np.float32, "its loss after the last epoch"),
    "scores": (
        ("test", "train"),
        np.float32,
        "sum over epochs: learning rate times inner product of both gradients; above 0: a "
        "proponent, training on it has lowered the loss of the test sample",
    ),
    "self_influence": (
        ("train",),
        np.float32,
        "sum over epochs: learning rate times squared length of its gradient",
    ),
}


@dataclass(frozen=True)
class KeptRun:
    """A run: its model, whose weights are overwritten, its samples, and the weights it kept."""

    model: torch.nn.Module
    train: Samples
    test: Samples
    kept: Sequence[tuple[Path, checkpoint.KeptWeights]]


@dataclass(frozen=True)
class Wanted:
    """The selected samples, by number; test: may be none.

    own: whether self-influence is computed; memory_bytes: of rows and scores of a process
    """

    test: Array
    train: Array
    own: bool
    memory_bytes: int = 2**30


class SampleRows(NamedTuple):
    """Of some samples: rows [n, width], losses [n], targets [n] if they are classes, else 0."""

    rows: torch.Tensor
    loss: Array
    target: Array


class Scores:
    """TracInCP: the sum over kept weights of rate times inner product (arXiv 2002.08484, 3.3).

    The chunk of samples that go through the model at once depends only on the gradients' length,
    and products are of two chunks: so the number of processes and the memory change no bit.
    Raises ConfigError if the model does not accept the samples.
    """

    def __init__(
        self,
        world: Ranks,
        run: KeptRun,
        gradients: SampleGradients,
        projection: Projection | None,
        wanted: Wanted,
    ) -> None:
        self.world, self.run, self.wanted = world, run, wanted
        self.gradients, self.projection = gradients, projection
        self.chunk = max(1, min(MOST, CHUNK_BYTES // (4 * gradients.values)))
        self.test, self.train = (
            [each[i : i + self.chunk] for i in range(0, len(each), self.chunk)]
            for each in (wanted.test, wanted.train)
        )
        row = self._projected(self._rows(run.train, wanted.train[:1]).rows).numpy()
        self.width, self.dtype = row.shape[1], row.dtype
        self.blocks = self._blocks()

    def _blocks(self) -> list[tuple[range, range]]:
        """Return which chunks of test samples go with which steps, the same on all processes.

        A step is a chunk of training samples of each process. Half of the memory is for rows of
        test samples, half for scores, of 12 bytes: a float64 sum and its float32 output.
        """
        steps = -(-len(self.train) // self.world.processes)
        half = self.wanted.memory_bytes // (2 * self.chunk)
        rows = max(1, min(half // (4 * self.width), len(self.test)))
        columns = max(1, half // (12 * rows * self.chunk))
        several = range(0, max(1, len(self.test)), rows), range(0, steps, columns)
        return [
            (range(i, min(i + rows, len(self.test))), range(j, min(j + columns, steps)))
            for j, i in product(*reversed(several))
        ]

    @property
    def samples(self) -> int:
        """How many samples go through the model, over all blocks and kept weights."""
        of_blocks = (len(test) + len(steps) * self.world.processes for test, steps in self.blocks)
        return self.chunk * len(self.run.kept) * sum(of_blocks)

    def save(self, path: Path, attributes: store.Attributes, display: Display) -> None:
        """Compute the scores and write them. Collective.

        Raises UserError on all processes if they are not finite, or cannot be written.
        """
        attributes = {"kind": KIND, **attributes}
        files.save(self.world, path, self._rooms(), attributes, partial(self._fill, display))

    def _rooms(self) -> dict[str, store.Room]:
        lengths = {
            "epoch": len(self.run.kept),
            "test": len(self.wanted.test),
            "train": len(self.wanted.train),
        }
        left_out = set() if self.wanted.own else {"self_influence"}
        target = self.run.train.take(self.wanted.train[:1], 0)[1]
        if target.ndim != 1 or target.is_floating_point():
            left_out |= {"test_target", "train_target"}
        return {
            name: store.Room(
                tuple(lengths[dim] for dim in dims), dtype, {"long_name": text, "units": "1"}, dims
            )
            for name, (dims, dtype, text) in TEXTS.items()
            if name not in left_out and all(lengths[dim] for dim in dims)
        }

    def _fill(self, display: Display, path: Path, offsets: files.Offsets) -> None:
        """Write everything. Collective; the same on all processes."""
        rooms = self._rooms()

        def put(name: str, start: tuple[int, ...], box: Array) -> None:
            if name in rooms:
                room, offset = rooms[name], offsets[name]
                assert offset is not None, "it has values"
                data = np.ascontiguousarray(box, room.dtype)
                self.world.write_box(path, offset, room.shape, start, data)

        kept = [each for _, each in self.run.kept]
        of_first = {
            "epoch": np.array([each.epoch for each in kept]),
            "learning_rate": np.array([each.learning_rate for each in kept]),
            "test": self.wanted.test,
            "train": self.wanted.train,
        }
        for name, values in of_first.items():
            put(name, (0,), values if self.world.process == 0 else values[:0])
        for test, steps in self.blocks:
            self._block(test, steps, put, display)

    def _block(self, test: range, steps: range, put: Put, display: Display) -> None:
        """Compute and write the scores of a block. Collective."""
        processes, process, chunk = self.world.processes, self.world.process, self.chunk
        first, stop = split(len(self.train), processes, process)
        own = self.train[first:stop][steps.start : steps.stop]
        sums = np.zeros((sum(len(self.test[i]) for i in test), sum(map(len, own))))
        of_train = _columns(sums.shape[1])
        for path, kept in self.run.kept:
            take_over(self.world, self.run.model, path)
            of_test = self._of_test(test, put)
            display.step(len(test) * chunk)
            for step in range(len(steps)):
                some = own[step : step + 1]
                at = step * chunk, kept.learning_rate
                agreed(self.world, partial(self._add, some, *at, of_test, sums, of_train))
                display.step(processes * chunk)
            all_sums = sums, of_train["self_influence"]
            agreed(self.world, partial(_check_finite, path, *all_sums))
        start = (first + steps.start) * chunk if own else 0
        put("scores", (test.start * chunk if own else 0, start), sums)
        if test.start == 0:
            for name, values in of_train.items():
                put(name if name in TEXTS else f"train_{name}", (start,), values)

    def _add(
        self,
        chunks: Sequence[Array],
        at: int,
        rate: float,
        of_test: Sequence[torch.Tensor],
        sums: Array,
        of_train: Mapping[str, Array],
    ) -> None:
        """Add the contribution of a chunk of training samples, if there is one, at some weights."""
        for samples in chunks:
            found, here = self._rows(self.run.train, samples), slice(at, at + len(samples))
            of_train["loss"][here], of_train["target"][here] = found.loss, found.target
            of_train["self_influence"][here] += rate * _double(self.gradients.squares(found.rows))
            rows, first = self._projected(found.rows), 0
            for each in of_test:
                inner = each @ rows.T if self.projection else self.gradients.products(each, rows)
                sums[first : first + len(each), here] += rate * _double(inner)
                first += len(each)

    def _of_test(self, test: range, put: Put) -> list[torch.Tensor]:
        """Return the rows of chunks of test samples; each process computes a part. Collective."""
        first, stop = split(len(test), self.world.processes, self.world.process)
        own = [self.test[i] for i in test[first:stop]]
        found = agreed(self.world, lambda: [self._rows(self.run.test, each) for each in own])
        start = test[first] * self.chunk if own else 0
        none = np.zeros(0)
        for name in ("loss", "target"):
            values = np.concatenate([none, *(getattr(each, name) for each in found)])
            put(f"test_{name}", (start,), values)
        flat = [self._projected(each.rows).numpy().ravel() for each in found]
        if not test:
            return []
        everyone = sparse.allgather(self.world, [np.concatenate([none.astype(self.dtype), *flat])])
        rows = torch.from_numpy(np.concatenate(everyone)).reshape(-1, self.width)
        return [
            each.clone() for each in torch.split(rows, self.chunk)
        ]  # with the same alignment: the same bits

    def _rows(self, samples: Samples, index: Array) -> SampleRows:
        """Return rows, losses and targets of samples. Raises ConfigError if the model fails."""
        inputs, targets = samples.take(index, 0)
        with told(f"influence: gradients of samples {index[0]} to {index[-1]}"):
            rows, losses = self.gradients.rows(inputs, targets)
        classes = targets.ndim == 1 and not targets.is_floating_point()
        return SampleRows(
            rows, losses.numpy(), targets.numpy() if classes else np.zeros(len(index))
        )

    def _projected(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.projection is None else self.projection(self.gradients.dense(rows))


def take_over(world: Ranks, model: torch.nn.Module, path: Path) -> None:
    """Set a model's parameters and buffers to those of a file. Collective.

    Raises UserError on all processes, naming the tensor, if the model has different ones.
    """

    def read() -> None:
        try:
            checkpoint.load_model({"model": checkpoint.load_weights(path)[0]}, model)
        except checkpoint.CheckpointError as error:
            raise checkpoint.CheckpointError(f"{path}: {error}") from None

    world.on_first(read, "weights")
    for tensor in model.state_dict().values():
        array = np.ascontiguousarray(tensor.numpy())
        world.broadcast(array, "weights")
        tensor.copy_(torch.from_numpy(array).reshape(tensor.shape))


def _columns(n: int) -> dict[str, Array]:
    return {"loss": np.zeros(n), "target": np.zeros(n, np.int64), "self_influence": np.zeros(n)}


def _check_finite(path: Path, *sums: Array) -> None:
    if not all(np.isfinite(each).all() for each in sums):
        raise UserError(f"{path}: the gradients of its weights are not finite, or too large")


def _double(values: torch.Tensor) -> Array:
    return values.double().numpy()


ALL, LAST = "all", "last"


@dataclass(frozen=True)
class Plan:
    """The checked options of the command line; status: of the run, from its record."""

    record: Path
    status: str
    job: Job
    run: KeptRun
    wanted: Wanted
    gradients: SampleGradients
    projection: Projection | None


def planned(arguments: argparse.Namespace) -> Plan:
    """Return the plan. Raises UserError for any error in the options."""
    for name, least in (("projection", 0), ("seed", 0), ("memory", 1), ("top", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: must be {least} or more")
    if not arguments.test and not arguments.own:
        raise ConfigError("influence: give --test with test samples, or --self, or both")
    for option, place in (("--out", arguments.out), ("--png", arguments.png)):
        if place is not None:
            check_file(place, option)
    record = record_of(arguments.run_of)
    job = _job(record, arguments.set)
    if not job.precision.empty:
        raise ConfigError(f"{record}: precision: gradients of single samples need float32")
    kept = _kept(record, job, arguments.epochs)
    data = job.data.load()
    train, test = samples_of(data)
    if checkpoint.data_digest(train, test) != kept[0][1].data:
        raise ConfigError(f"{record}: the data set differs from the run's")
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
    status = str(store.read_attributes(record).get("status", "unknown"))
    run = KeptRun(model, train, test, kept)
    return Plan(record, status, job, run, wanted, gradients, projection)


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
        what = f"has {len(records) or 'no records of'} runs" if path.is_dir() else "is no run"
        names = f": name one of {', '.join(each.name for each in records)}" if records else ""
        raise ConfigError(f"{path}: {what}{names}")
    return records[0]


def _job(record: Path, settings: list[str]) -> Job:
    movable = ("data.", f"model.{IMPORT_FROM}=")
    for setting in settings:
        if not setting.startswith(movable):
            raise ConfigError(f"--set {setting}: must be of data, for example data.dir=DIR")
    toml = str(store.read_attributes(record).get("toml", ""))
    return validate(Job, override(tomllib.loads(toml), settings, laid_over), str(record))


def _kept(record: Path, job: Job, epochs: str) -> list[tuple[Path, checkpoint.KeptWeights]]:
    """Return the files of weights of a run, by epoch. Raises UserError if there are none."""
    paths = record.parent.glob(
        checkpoint.Files.called(record.parent, record.stem).weights("*").name
    )
    kept = sorted(
        ((path, checkpoint.read_kept(path)) for path in paths), key=lambda each: each[1].epoch
    )
    if not kept:
        raise ConfigError(f"{record}: no weights were kept: train with train.keep_every")
    of_run = _job(record, []).toml()  # with the defaults of keys that its version did not have
    for path, each in kept:
        checkpoint.check_job(path, each.job, of_run)
    if not epochs:
        return kept
    known = {each.epoch: (path, each) for path, each in kept}
    wanted = epochs.split(",")
    if unknown := [each for each in wanted if each not in map(str, known)]:
        there = ", ".join(map(str, known))
        raise ConfigError(f"--epochs {epochs}: no weights of {unknown[0]}: kept are {there}")
    return [known[each] for each in sorted({int(each) for each in wanted})]


def numbers(option: str, text: str, count: int) -> Array:
    """Return int64[n] of numbers below count from a text of "3", "0:100", "0:100:2", ":", commas.

    None for no text. Raises ConfigError for other text, or numbers out of range.
    """
    found = list[int]()
    for part in text.split(",") if text else ():
        try:
            found += _range(part, count)
        except ValueError:
            raise ConfigError(f"{option} {text}: must be like 0:100 or 3,7,90:99") from None
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
