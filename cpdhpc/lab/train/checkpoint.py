"""The files of a run: their paths, its checkpoint, and the weights kept after epochs.

A checkpoint is one HDF5 file with everything that is needed to resume a run, and another one with
the per-rank state of methods.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import store
from ...compress.base import Array
from ...compress.bucket import Entry, State, redistributed
from ...config import IMPORT_FROM, ConfigError, UserError, difference, flatten, validate, value_of
from ...ops import to_host
from ...ops.tensors import bytes_of, values_of
from ...world import files
from ...world.ranks import Ranks
from ..claim import alone
from . import gradients
from .job import EPOCHS, MAY_DIFFER, Job
from .samples import Samples

Groups = dict[str, dict[str, Array]]
States = Mapping[str, State]
REDISTRIBUTION, SHARED = "redistribution", "shared"  # attribute of datasets of a state file
WEIGHTS = "weights"
LOOKED_AT = 128  # training and test samples that identify a data set
FEW = 8  # of them, if each run has to wait for them


@dataclass(frozen=True)
class Files:
    """The paths of a run's files."""

    record: Path
    checkpoint: Path

    @classmethod
    def of(cls, directory: Path, job: Job) -> Files:
        """Return the paths of a job's files in a directory."""
        return cls.called(directory, job.id)

    @classmethod
    def called(cls, directory: Path, run: str) -> Files:
        """Return the paths of the files of a run of that name in a directory."""
        return cls(directory / f"{run}.h5", directory / f"{run}.checkpoint.h5")

    def written(self, job: Job) -> list[Path]:
        """Return all files of a job's run, including kept gradients and weights."""
        several = [gradients.path_of(self.record, i) for i in job.train.record_gradients]
        kept = [self.weights(epoch) for epoch in job.train.kept_epochs]
        recordings = [self.recording(job)] if job.record.number else []
        return [self.checkpoint, self.record, *several, *kept, *recordings]

    def weights(self, epoch: int | str) -> Path:
        """Return the path of the weights after an epoch, counted from 1."""
        return self.record.with_name(f"{self.record.stem}.{WEIGHTS}-{epoch}.h5")

    def state(self, iteration: int | str) -> Path:
        """Return the path of the methods' state that belongs to an iteration's checkpoint."""
        return self.record.with_name(f"{self.checkpoint.stem}.state-{iteration}.h5")

    def recording(self, job: Job) -> Path:
        """Return the path of [record]'s file."""
        beside = self.record.with_name(f"{self.record.stem}.recording.h5")
        return Path(job.record.file) if job.record.file else beside


@contextmanager
def claimed(
    world: Ranks, directory: Path, runs: Mapping[str, Collection[Path]], resume: bool
) -> Iterator[None]:
    """Lock the files of some runs against other processes, until the end of the block. Collective.

    runs: files by the name of the run; process 0 holds .NAME.lock for each
    Raises UserError on all processes if the directory cannot be written, another process
    works on a run, or without resume a file exists already.
    """

    def claim() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from None
        for name, paths in runs.items():
            locks.enter_context(alone(directory / f".{name}.lock", f"run of {name}", print))
            present = next((path for path in paths if path.exists()), None)
            if present and not resume:
                raise ConfigError(
                    f"{present}: is there already: --resume goes on from it, "
                    "--out DIR writes to another directory"
                )

    with ExitStack() as locks:
        world.on_first(claim, "output")
        yield


class CheckpointError(UserError):
    """A checkpoint that does not belong to this job."""


def weights(model: torch.nn.Module) -> dict[str, Array]:
    """Return a model's parameters and buffers by name."""
    return {name: values_of(tensor) for name, tensor in model.state_dict().items()}


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Groups:
    """Return the state of model and optimizer as groups of arrays."""
    moments = optimizer.state_dict()["state"]
    return {
        "model": weights(model),
        "optimizer": {
            f"{index}.{name}": values_of(tensor)
            for index, state in moments.items()
            for name, tensor in state.items()
            if tensor is not None  # SGD has no buffer without momentum
        },
    }


def load_model(groups: Groups, model: torch.nn.Module) -> None:
    """Set a model's parameters and buffers to the result of tensors.

    Raises CheckpointError, naming the tensor, if the model has different ones.
    """
    own = model.state_dict()
    for name in sorted(own.keys() | groups["model"].keys()):
        here = tuple(own[name].shape) if name in own else None
        there = groups["model"][name].shape if name in groups["model"] else None
        if here != there:
            raise CheckpointError(f"tensor {name} is {there} there and {here} here")
    model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in groups["model"].items()})


def load_tensors(groups: Groups, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set model and optimizer to the result of tensors. Raises CheckpointError as load_model."""
    load_model(groups, model)
    state = optimizer.state_dict()
    for key, values in groups["optimizer"].items():
        index, _, name = key.partition(".")
        state["state"].setdefault(int(index), {})[name] = torch.from_numpy(values.copy())
    optimizer.load_state_dict(state)


@dataclass(frozen=True)
class Position:
    """The progress of a run: its next iteration, the samples seen, the ranks it had so far.

    state: checksum of the separate file with the methods' state; "" if there is none
    data: identifies its data set; "" if unknown
    """

    iteration: int
    samples_seen: int
    ranks: int
    state: str = ""
    data: str = ""


def save(path: Path, groups: Groups, position: Position, toml: str) -> None:
    """Write a checkpoint that replaces path when it is complete."""
    store.write(path, groups, {"kind": "checkpoint", **asdict(position), "toml": toml})


def check_job(path: Path, there: str, here: str) -> None:
    """Raise CheckpointError if a file's job differs from this one; both as TOML text.

    This one may have more epochs. Keys that an older version did not have count as their defaults.
    """
    with suppress(ConfigError):
        there = validate(Job, tomllib.loads(there), str(path)).toml()
    longer = value_of(here, EPOCHS) >= value_of(there, EPOCHS)
    moved = [key for key in flatten(tomllib.loads(here)) if key.endswith(f".{IMPORT_FROM}")]
    check_same(path, there, here, (*MAY_DIFFER, *moved, *[EPOCHS] * longer))


def check_same(path: Path, there: str, here: str, may_differ: Iterable[str]) -> None:
    """Raise CheckpointError for a key in which a file's TOML text differs from this one."""
    key = difference(here, there, may_differ)
    if key is not None:
        said = [
            "not given" if value is None else repr(value)
            for value in (value_of(there, key), value_of(here, key))
        ]
        more = ": it may be more here, but not less" if key == EPOCHS else ""
        raise CheckpointError(f"{path}: {key} is {said[0]} there and {said[1]} here{more}")


def read_checkpoint(path: Path) -> tuple[Groups, dict[str, Any]]:
    """Return a checkpoint's groups and attributes. Raises CheckpointError for any other file."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != "checkpoint":
        raise CheckpointError(f"{path}: is not a checkpoint of cpdhpc train")
    return groups, attributes


def load(
    world: Ranks, path: Path, toml: str, samples_seen: Callable[[int], int]
) -> tuple[Groups, Position] | None:
    """Return a checkpoint's groups and its run's position, None if there is no file. Collective.

    samples_seen: the samples of so many iterations, for files of versions that did not count them
    Raises on all processes CheckpointError, naming the difference, if it is another job's, and
    StoreError if it cannot be read.
    """
    groups: Groups = {}

    def read() -> tuple[dict[str, list[Any]], Position] | None:
        if not path.exists():
            return None
        found, of = read_checkpoint(path)
        check_job(path, of["toml"], toml)
        groups.update(found)
        seen = of.get("samples_seen", samples_seen(of["iteration"]))
        kept = (str(of.get(name, "")) for name in ("state", "data"))
        shapes = {g: [(n, a.shape, a.dtype) for n, a in each.items()] for g, each in found.items()}
        return shapes, Position(of["iteration"], seen, of["ranks"], *kept)

    there = world.on_first(read, "resume")
    if there is None:
        return None
    for name, arrays in there[0].items():  # may be empty: SGD without momentum keeps nothing
        group = groups.setdefault(name, {})
        for key, shape, dtype in arrays:
            array = group.setdefault(key, np.empty(shape, dtype))
            group[key] = np.ascontiguousarray(array).reshape(shape)
            world.broadcast(group[key], "resume")
    return groups, there[1]


def save_states(world: Ranks, path: Path, states: States) -> str:
    """Write the methods' state: every process its ranks' rows, all at once. Collective.

    states: by owner. Returns the checksum by which load_states recognises the file; if there is no
    state, "" and no file. The file replaces path when it is complete. Raises UserError on all
    processes if it cannot be written.
    """
    entries = {f"{who}/{a}/{b}": e for who, state in states.items() for (a, b), e in state}
    if not entries:
        return ""

    def fill(temporary: Path, offsets: files.Offsets) -> None:
        for name, entry in entries.items():
            _write_rows(world, temporary, offsets[name], entry)

    rooms = {name: _room(entry, world.ranks) for name, entry in entries.items()}
    return files.save(world, path, rooms, {"kind": "state"}, fill)


def _room(entry: Entry, ranks: int) -> store.Room:
    shared = entry.redistribution is None
    shape = entry.array.shape if shared else (ranks, *entry.array.shape[1:])
    return store.Room(
        shape, entry.array.dtype, {REDISTRIBUTION: SHARED if shared else entry.redistribution}
    )


def _write_rows(world: Ranks, path: Path, offset: int | None, entry: Entry) -> None:
    """Write an entry: per-rank ones row by row, shared ones from process 0. Collective."""
    if offset is None:  # it is empty
        return
    array, shape = np.ascontiguousarray(to_host(entry.array)), entry.array.shape
    if entry.redistribution is None:
        mine = array.reshape(-1)[: array.size if world.process == 0 else 0]
        world.write_box(path, offset, (array.size,), (0,), mine)
    else:
        start = (world.hosted.start,) + (0,) * (array.ndim - 1)
        world.write_box(path, offset, (world.ranks, *shape[1:]), start, array)


def load_states(world: Ranks, path: Path, checksum: str, states: States) -> int:
    """Restore the methods' state, redistributed if the number of ranks changed. Collective.

    checksum: the result of save_states. Returns the former number of ranks, or this run's if it is
    unknown. Raises UserError on all processes if the file is missing, damaged or of another
    checkpoint.
    """

    def take(file: BufferedReader) -> int:
        former = world.ranks
        try:
            for name, room in store.contents(file)[1].items():
                if room.attributes[REDISTRIBUTION] != SHARED:
                    former = room.shape[0]
                who, _, key = name.partition("/")
                layer, _, entry = key.rpartition("/")
                states[who].put((layer, entry), _read_rows(world, file, name, room))
        except (KeyError, IndexError) as found:
            raise CheckpointError(f"{path}: is not a state of a checkpoint: {found}") from None
        return former

    with files.opened(world, path) as (file, found):
        if found not in (checksum, ""):  # "": a version without checksums
            raise CheckpointError(f"{path}: is not the state that belongs to the checkpoint")
        return world.agreed(partial(take, file), "resume")


def _read_rows(world: Ranks, file: BufferedReader, name: str, room: store.Room) -> Entry:
    """Return an entry of the hosted ranks."""
    kind, rows = room.attributes[REDISTRIBUTION], room.shape[0]
    same = kind != SHARED and rows == world.ranks
    mine = slice(world.hosted.start, world.hosted.stop) if same else slice(0, rows)
    if kind == "drop" and not same:
        mine = slice(0, 0)  # it cannot be redistributed, for example one model per rank
    array = store.read_box(file, name, (mine,))
    if kind == SHARED:
        return Entry(array, None)
    return Entry(array if same else redistributed(array, kind, world.hosted, world.ranks), kind)


@dataclass(frozen=True)
class KeptWeights:
    """The position of a run whose weights were kept.

    learning_rate: of the last step before; data: see data_digest; job: as TOML text
    """

    epoch: int
    iteration: int
    learning_rate: float
    data: str
    job: str


def data_digest(train: Samples, test: Samples, looked_at: int = LOOKED_AT) -> str:
    """Return a digest that identifies data sets: from the number of samples, and some of them."""
    digest = hashlib.sha256()
    for samples in (train, test):
        some = np.unique(np.linspace(0, len(samples) - 1, looked_at).astype(np.int64))
        digest.update(f"{len(samples)} samples".encode())
        for tensor in samples.take(some, 0):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(bytes_of([tensor]).numpy().tobytes())
    return digest.hexdigest()


def few_digest(train: Samples, test: Samples) -> str:
    """Return data_digest of few samples; "" if one fails, as training will report the error."""
    try:
        return data_digest(train, test, FEW)
    except UserError:
        return ""


def size_bytes(model: torch.nn.Module) -> int:
    """Return the size in bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def save_weights(path: Path, model: torch.nn.Module, here: KeptWeights) -> None:
    """Write parameters and buffers to a file that replaces path when it is complete.

    Raises StoreError if it cannot be written.
    """
    store.write(path, {"model": weights(model)}, {"kind": WEIGHTS, **asdict(here)})


def read_kept(path: Path) -> KeptWeights:
    """Return the run's position. Raises StoreError for any other file."""
    return _kept(path, store.read_attributes(path))


def load_weights(path: Path) -> tuple[dict[str, Array], KeptWeights]:
    """Return parameters and buffers by name, and the run's position. Raises as read_kept."""
    groups, attributes = store.read(path)
    kept = _kept(path, attributes)
    return groups["model"], kept


def _kept(path: Path, attributes: Mapping[str, Any]) -> KeptWeights:
    if attributes.get("kind") != WEIGHTS:
        raise store.StoreError(f"{path}: has no weights of a run: train.keep_every keeps them")
    return KeptWeights(*(attributes[field.name] for field in fields(KeptWeights)))
