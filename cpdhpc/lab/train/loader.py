"""Samples read ahead by workers: threads, or processes where the user's Python makes the items."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from ...config import ConfigError, Positive, Section, Whole, told
from .data import Array, Samples

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

Share = tuple[Array, int]  # what Samples.take is given
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # of a rank, which tells its workers


class Loader(Section):
    """[loader]: who reads samples, which changes no bit.

    workers: of each rank, that read ahead of it: threads, or processes for data by import; 0: the
        rank reads itself
    prefetch: batches that each worker reads ahead
    """

    workers: Whole = 0
    prefetch: Positive = 2


class Workers:
    """What a process reads samples with, from entering to leaving a with block.

    sources: Samples that are read; directory: where their modules are looked for first; None where
        they may be read by threads
    wait_s: the longest wait for a batch
    Raises ConfigError where processes cannot have the sources.
    """

    def __init__(
        self, loader: Loader, sources: Sequence[Samples], directory: str | None, wait_s: float
    ) -> None:
        self.sources, self.directory, self.wait_s = sources, directory, wait_s
        self.count, self.ahead = loader.workers, loader.workers * loader.prefetch
        self._executor: Executor | None = None
        self._lifeline: Connection | None = None
        self._content = b""
        if loader.workers and directory is not None:
            where = f"loader.workers={loader.workers}: the datasets cannot be given to a process"
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

    def submit(self, source: int, share: Share) -> Future[Any]:
        """Have a share of a source read; the future has whatever goes wrong."""
        try:
            return self._submit(source, share)
        except Exception as error:  # other ranks must not wait: it is told where it is taken
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _submit(self, source: int, share: Share) -> Future[Any]:
        if self.directory is None:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.count, "cpdhpc-loader")
            return self._executor.submit(self.sources[source].take, *share)
        with _signals_blocked():  # so that no worker, nor what starts them, ever gets them
            if self._executor is None:
                self._executor = self._processes(self.directory)
            return self._executor.submit(_take, source, *share)

    def _processes(self, directory: str) -> Executor:
        """Return processes that no process with MPI was copied to."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch.utils.data"])
        end, self._lifeline = context.Pipe(duplex=False)
        return ProcessPoolExecutor(self.count, context, _begin, (end, directory, self._content))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """What a worker process has. sources: as bytes, until the first share is asked for."""

    sources: Any = b""


def _begin(lifeline: Connection, directory: str, content: bytes) -> None:
    import torch

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
    with told(f"loader: {_named(index)}"):  # another error may not be one that the rank could read
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
        self._read: dict[tuple[bytes, int], Future[Any]] = {}

    def __len__(self) -> int:
        return len(self.workers.sources[self.source])

    def plan(self, shares: Iterable[Share]) -> None:
        """Say what will be taken next, in this order, in place of what was said before."""
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

    def take(self, index: Array, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples int64[b]; what was not planned is read here. See data.Samples.

        Raises ConfigError where a worker died, or took longer than it may.
        """
        import torch

        future = self._read.pop(_key(index, seed), None)
        if future is None:
            return self.workers.sources[self.source].take(index, seed)
        where = f"loader.workers={self.workers.count}: {_named(index)}"
        try:
            x, y = future.result(self.workers.wait_s)
        except BrokenExecutor:
            raise ConfigError(f"{where}: a worker died: killed, or out of memory") from None
        except TimeoutError:
            raise ConfigError(f"{where}: were not read in {self.workers.wait_s:g} s") from None
        self._fill()
        return torch.as_tensor(x), torch.as_tensor(y)


def _key(index: Array, seed: int) -> tuple[bytes, int]:
    return index.tobytes(), seed
