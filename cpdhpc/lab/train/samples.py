"""Training samples: where they are stored, which of them an iteration takes, how they are read."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from ...config import ConfigError, Positive, Section, UserError, Whole, told
from ...lazy import Late
from ...partition import split
from ...randomness import random_key
from ...store import Tables

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
else:
    torch = Late("torch")

Array = npt.NDArray[Any]
Pair = tuple["torch.Tensor", "torch.Tensor"]

_SPLIT, _EPOCH = 1, 2  # streams of random numbers


class DataError(UserError):
    """Data that is missing or damaged."""


@dataclass(frozen=True)
class Dataset:
    """Inputs, for example images in 0..1, and their labels or other targets, in memory.

    train_x, test_x: float32[n, ...], or uint8[n, ...] that are divided by 255 when they are
        taken, which needs a quarter of the memory
    train_y, test_y: int64[n], 0..classes - 1; or float32[n, classes], values to be predicted
    mean, deviation: float32[channels], for normalising inputs; empty: they are not normalised
    """

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    classes: int
    mean: Array = field(default_factory=lambda: np.empty(0, np.float32))
    deviation: Array = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def image_shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.train_x.shape[1:]))


class Samples(Protocol):
    """Pairs (input, target) by number."""

    def __len__(self) -> int: ...

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b] as two tensors whose first axis is the sample.

        seed: of random changes, with a sample's number: so they do not depend on the ranks
        """
        ...


@dataclass(frozen=True)
class StreamedData:
    """Samples that are not in arrays.

    image_shape: of an input; classes: 0 if they are unknown
    directory: searched for the user's modules that make the items; None: there are none
    """

    train: Samples
    test: Samples
    image_shape: tuple[int, ...]
    classes: int
    directory: str | None = None


def permutation(n: int, seed: int, *path: int) -> Array:
    """Return int64[n], the order of 0..n-1 for (seed, *path), the same everywhere.

    Made from the raw stream of a bit generator, which NumPy promises not to change.
    """
    draws = np.random.Philox(np.random.SeedSequence([seed, *path])).random_raw(n)
    return np.argsort(draws, kind="stable")


def split_order(n: int, test_share: float, seed: int) -> tuple[Array, Array]:
    """Return the indices of the training samples and those of the test samples."""
    order = permutation(n, seed, _SPLIT)
    test = min(max(round(n * test_share), 1), n - 1)
    return order[test:], order[:test]


def epoch_order(n: int, seed: int, epoch: int) -> Array:
    """Return the order of n samples in an epoch, the same on all ranks."""
    return permutation(n, seed, _EPOCH, epoch)


def shard(batch: Array, ranks: int, rank: int) -> Array:
    """Return one rank's part of a global batch; it may be empty."""
    start, stop = split(batch.size, ranks, rank)
    return batch[start:stop]


class InputScaling:
    """Bytes become 0..1; then inputs are normalised by channel, if mean and deviation are set.

    mean, deviation: float32[channels], or empty
    """

    def __init__(self, mean: Array, deviation: Array) -> None:
        self.mean, self.deviation = (torch.from_numpy(each) for each in (mean, deviation))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x[b, ...] scaled; its channels are axis 1."""
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        if not len(self.mean):
            return x
        by = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.reshape(by)) / self.deviation.reshape(by)


class InMemory:
    """Inputs and targets as tensors whose first axis is the sample; scaling: of inputs."""

    def __init__(
        self, x: torch.Tensor, y: torch.Tensor, scaling: InputScaling | None = None
    ) -> None:
        none = np.empty(0, np.float32)
        self.x, self.y, self.scaling = x, y, scaling or InputScaling(none, none)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array, seed: int) -> Pair:
        at = torch.from_numpy(index)
        return self.scaling(self.x[at]), self.y[at]


class Sequences:
    """Pieces of a text, and the same one token on. tokens: int64[n]; a piece begins every length"""

    def __init__(self, tokens: Array, length: int) -> None:
        few = np.uint8 if not len(tokens) or tokens.max() < 256 else np.uint32
        self.tokens, self.length = tokens.astype(few), length

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.length

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b] as int64[b, length] twice. See Samples.take."""
        at = index[:, None] * self.length + np.arange(self.length + 1)
        pieces = torch.from_numpy(self.tokens[at].astype(np.int64))
        return pieces[:, :-1], pieces[:, 1:]


class TableRows:
    """Rows of two tables of an HDF5 file, which each process opens and reads on its own.

    tables: of inputs and targets
    Raises DataError if they are not numbers, empty, or of different lengths.
    """

    def __init__(
        self, tables: Tables, mean: Array, deviation: Array, channels_last: bool = False
    ) -> None:
        self.tables, self.channels_last = tables, channels_last
        self.scaling = InputScaling(mean, deviation)
        (x, y), (self.x, self.y) = tables.rooms, tables.names
        kinds = np.dtype(x.dtype), np.dtype(y.dtype)
        if kinds[0] != np.uint8 and kinds[0].kind != "f":
            problem = f"have dtypes {kinds[0]}, {kinds[1]}: inputs must be uint8 or floats"
        elif kinds[1].kind not in "iuf":
            problem = f"have dtypes {kinds[0]}, {kinds[1]}: targets must be integers or floats"
        elif len(x.shape) < 2 or not y.shape or x.shape[0] != y.shape[0] or not x.shape[0]:
            problem = f"have shapes {x.shape} and {y.shape}: must be [n, ...] with the same n > 0"
        elif len(mean) and len(mean) != self._shape(x.shape)[0]:
            problem = f"have shapes {x.shape} and {y.shape}: mean has {len(mean)} channels"
        else:
            self.sample_shape, self.target = self._shape(x.shape), tuple(y.shape[1:])
            self.values = kinds[1].kind == "f"
            return
        raise DataError(f"{tables.path}: {self.x} and {self.y} {problem}")

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[-1], *shape[1:-1]) if self.channels_last else tuple(shape[1:])

    def __len__(self) -> int:
        return int(self.tables.rooms[0].shape[0])

    def classes(self) -> int:
        """Return one more than the largest class, or the number of values of a target.

        Raises DataError for classes below 0.
        """
        if self.values:
            return math.prod(self.target)
        classes = self.tables.read(self.y, slice(None))
        if classes.min() < 0:
            raise DataError(f"{self.tables.path}: {self.y}: {classes.min()}: must be 0 or more")
        return int(classes.max()) + 1

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b]. See Samples.take. Raises StoreError for damaged data."""
        x, y = (self.tables.take(name, index) for name in self.tables.names)
        inputs = torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32, copy=False))
        if self.channels_last:
            inputs = inputs.movedim(-1, 1).contiguous()
        targets = y.astype(np.float32 if self.values else np.int64, copy=False)
        return self.scaling(inputs), torch.from_numpy(targets)


class MapStyle:
    """A map-style torch dataset: anything with a length and items (input, target).

    where: prefix of errors
    classes: the length of the dataset's attribute of this name, as in torchvision; else 0
    """

    def __init__(self, where: str, dataset: Any) -> None:
        self.where, self.dataset = where, dataset
        named: Any = getattr(dataset, "classes", 0)
        self.classes = len(named) if hasattr(named, "__len__") else int(named)
        self.sample_shape = tuple(self.take(np.zeros(1, np.int64), 0)[0].shape[1:])

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b], each with random numbers of its own. See Samples.take.

        Raises ConfigError if the dataset fails, or its items are not pairs.
        """
        from torch.utils.data import default_collate

        items = []
        for i in index.tolist():
            with _seeded(random_key(seed, i)[0]), told(f"{self.where}: item {i}"):
                items.append(self.dataset[i])
        if not items:
            x, y = self.take(np.zeros(1, np.int64), seed)
            return x[:0], y[:0]
        try:
            x, y = default_collate(items)
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                return x, y
            problem = f"({type(x).__name__}, {type(y).__name__})"
        except (TypeError, ValueError, RuntimeError) as error:
            problem = " ".join(str(error).split())
        raise ConfigError(f"{self.where}: items do not make a pair of tensors: {problem}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed random, numpy.random and torch, until the end of the block."""
    # users' transforms call np.random.rand and similar functions
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def device_of(model: torch.nn.Module) -> torch.device:
    from ...ops.tensors import CPU

    return next((p.device for p in model.parameters()), CPU)


def taken(samples: Samples, index: Array, seed: int, device: torch.device) -> Pair:
    """Return the samples int64[b] on a device. See Samples.take."""
    from ...ops.tensors import await_device

    inputs, targets = samples.take(index, seed)
    await_device(device)  # with a time-out, unlike copies from pageable memory
    return inputs.to(device), targets.to(device)


Share = tuple[Array, int]  # the arguments of Samples.take
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # of a rank, which ends its workers


class Loader(Section):
    """[loader]: how samples are read, which changes no bit.

    workers: workers of each rank that read ahead: threads, or processes for data by import; 0: the
        rank reads by itself
    prefetch: batches that each worker reads ahead
    """

    workers: Whole = 0
    prefetch: Positive = 2


class Workers:
    """A process's readers of samples, from entering to leaving a with block.

    sources: Samples that are read; directory: searched for their modules first; None if
        threads may read them
    wait_s: the longest wait for a batch
    Raises ConfigError if the sources cannot be sent to processes.
    """

    def __init__(
        self, loader: Loader, sources: Sequence[Samples], directory: str | None, wait_s: float
    ) -> None:
        self.sources, self.directory, self.wait_s = sources, directory, wait_s
        self.count, self.ahead = loader.workers, loader.workers * loader.prefetch
        self._executor: futures.Executor | None = None
        self._lifeline: Connection | None = None
        self._content = b""
        if loader.workers and directory is not None:
            where = f"loader.workers={loader.workers}: the datasets cannot be sent to a process"
            with told(where):
                self._content = pickle.dumps(self.sources)

    def __enter__(self) -> Self:
        """Be ready; workers start with the first batch."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, whatever they do."""
        if self._lifeline is not None:
            self._lifeline.close()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = self._lifeline = None

    def submit(self, source: int, share: Share) -> futures.Future[Any]:
        """Submit a share of a source for reading; the future holds any error."""
        try:
            return self._submit(source, share)
        except Exception as error:  # other ranks must not wait: it is raised when taken
            failed: futures.Future[Any] = futures.Future()
            failed.set_exception(error)
            return failed

    def _submit(self, source: int, share: Share) -> futures.Future[Any]:
        if self.directory is None:
            if self._executor is None:
                self._executor = futures.ThreadPoolExecutor(self.count, "cpdhpc-loader")
            return self._executor.submit(self.sources[source].take, *share)
        with _signals_blocked():  # so that neither workers nor their helpers get signals
            if self._executor is None:
                self._executor = self._processes(self.directory)
            return self._executor.submit(_take, source, *share)

    def _processes(self, directory: str) -> futures.Executor:
        """Return processes that are not forked from a process with MPI."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch.utils.data"])
        end, self._lifeline = context.Pipe(duplex=False)
        return futures.ProcessPoolExecutor(
            self.count, context, _begin, (end, directory, self._content)
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A worker process's data. sources: as bytes, until the first share is requested."""

    sources: Any = b""


def _begin(lifeline: Connection, directory: str, content: bytes) -> None:
    def end_with_the_rank() -> None:
        try:
            lifeline.recv()
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=end_with_the_rank, daemon=True).start()
    torch.set_num_threads(1)
    sys.path.insert(0, directory)
    _Worker.sources = content


def _take(source: int, index: Array, seed: int) -> tuple[Array, Array]:
    with told(f"loader: {_named(index)}"):  # the rank may be unable to unpickle other errors
        if isinstance(_Worker.sources, bytes):
            _Worker.sources = pickle.loads(_Worker.sources)
        x, y = _Worker.sources[source].take(index, seed)
    return x.numpy(), y.numpy()


def _named(index: Array) -> str:
    return f"items {', '.join(map(str, index[:3]))}{', ...' if len(index) > 3 else ''}"


class Prefetched:
    """One of the sources of workers, whose planned shares they read ahead."""

    def __init__(self, workers: Workers, source: int) -> None:
        self.workers, self.source = workers, source
        self._waiting: deque[Share] = deque()
        self._read: dict[tuple[bytes, int], futures.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self.workers.sources[self.source])

    def plan(self, shares: Iterable[Share]) -> None:
        """Set the shares that will be taken next, in this order, replacing earlier plans."""
        self._waiting = deque(shares)
        wanted = {_key(*share) for share in self._waiting}
        for key in [key for key in self._read if key not in wanted]:
            self._read.pop(key).cancel()
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._read) <= self.workers.ahead:
            share = self._waiting.popleft()
            if _key(*share) not in self._read:
                self._read[_key(*share)] = self.workers.submit(self.source, share)

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b]; unplanned ones are read here. See Samples.take.

        Raises ConfigError if a worker died, or exceeded the time limit.
        """
        future = self._read.pop(_key(index, seed), None)
        if future is None:
            return self.workers.sources[self.source].take(index, seed)
        where = f"loader.workers={self.workers.count}: {_named(index)}"
        try:
            x, y = future.result(self.workers.wait_s)
        except futures.BrokenExecutor:
            raise ConfigError(f"{where}: a worker died: killed, or out of memory") from None
        except TimeoutError:
            raise ConfigError(f"{where}: were not read in {self.workers.wait_s:g} s") from None
        self._fill()
        return torch.as_tensor(x), torch.as_tensor(y)


def _key(index: Array, seed: int) -> tuple[bytes, int]:
    return index.tobytes(), seed
