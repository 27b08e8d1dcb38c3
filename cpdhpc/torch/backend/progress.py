"""Operations that proceed while their process computes, and torch's Work of each."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from ...ops.common import take_short_slices

F = TypeVar("F", bound=Callable[..., Any])
POLLS = 50  # before a wait gives up the core for the first time
SPIN_S = 0.002  # for which a wait only gives up the core between two looks; then it sleeps
PAUSE_S = 5e-5
LONG_S = 0.5  # of waiting, from which on it sleeps longer
LONG_PAUSE_S = 1e-3
CALLBACKS = 64  # threads at most that run callbacks of futures, some of which wait for others
NO_TIMEOUT = timedelta(0)


class Broken(RuntimeError):
    """MPI's error of a message: too_long, or another, as of a rank that has died."""

    def __init__(self, words: str, too_long: bool) -> None:
        self.too_long = too_long
        super().__init__(words)


class Step:
    """Requests that an operation waits for, and the rank at the other end of each."""

    __slots__ = ("ranks", "requests")

    def __init__(self, requests: list[Any], ranks: list[int]) -> None:
        self.requests, self.ranks = requests, ranks


NOTHING = Step([], [])
Program = Generator[Step, None, None]


def pause(waited_s: float) -> None:
    """Give up the core, for longer the longer a wait has taken."""
    if waited_s < SPIN_S:
        os.sched_yield()
    else:
        time.sleep(PAUSE_S if waited_s < LONG_S else LONG_PAUSE_S)


class Calls(threading.local):
    """In which callback of which call a thread is, and how many calls it has made there.

    Threads of different ranks run callbacks at different times, so that calls are told apart by
    this path and not by their order. The path of a call of the program itself is empty.
    """

    path = ""
    made = 0

    @contextmanager
    def within(self, path: str) -> Iterator[None]:
        """Run a block as the callback of that path."""
        before = self.path, self.made
        self.path, self.made = path, 0
        try:
            yield
        finally:
            self.path, self.made = before


CALLS = Calls()


class CallFuture(torch.futures.Future[Any]):
    """A future of a call, whose callbacks may make calls: these match on all ranks."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path, self._callbacks = path, 0

    def _next(self) -> str:
        self._callbacks += 1
        return f"{self._path}>{self._callbacks}"

    def then(self, callback: Callable[[Any], Any]) -> CallFuture:
        """Return the future of what a callback returns for this one."""
        path = self._next()
        result = CallFuture(path)

        def done(_: Any) -> None:
            try:
                with CALLS.within(path):
                    value = callback(self)
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        super().add_done_callback(done)
        return result

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call back once there is a result or an error."""
        path = self._next()

        def done(_: Any) -> None:
            with CALLS.within(path):
                callback(self)

        super().add_done_callback(done)


def untraced(function: F) -> F:
    """Keep torch.compile from tracing a function and what it calls; they run as they are."""
    tracer = torch._C._dynamo.eval_frame
    skip = tracer._FrameAction.SKIP
    tracer.set_code_exec_strategy(function.__code__, tracer._FrameExecStrategy(skip, skip))
    return function


class Operation(Work):
    """One call of a process group: a program of messages and sums, and how it ended.

    program: yields what it waits for; call: its words in errors; path: see Calls
    result: the tensors that are its future's value; timeout_s: the longest that it may take
    """

    def __init__(
        self,
        engine: Engine,
        program: Program,
        call: str,
        path: str,
        result: Any,
        timeout_s: float,
        test_all: Callable[[list[Any]], bool],
    ) -> None:
        super().__init__()
        self.call, self._path = call, path
        self.sources: list[int] = []  # of a receive: where the rank goes that sent
        self.finished = False
        self.error: BaseException | None = None
        self.at_end: Callable[[], None] | None = None
        self._engine, self._program, self._test_all = engine, program, test_all
        self._result = result
        self._begun_s = time.monotonic()
        self._timeout_s = timeout_s
        self._step = NOTHING
        self._lock = threading.Lock()  # of the thread that moves it on
        self._future: Any = None

    def move(self) -> bool:
        """Go on as far as messages allow; return whether the operation has finished."""
        if self.finished or not self._lock.acquire(blocking=False):
            return self.finished
        try:
            while not self.finished:
                if self._step.requests and not self._come():
                    if time.monotonic() - self._begun_s > self._timeout_s:
                        raise self._late()
                    return False
                self._step = next(self._program)
        except StopIteration:
            self._finish(None)
        except Broken as error:
            self._finish(RuntimeError(f"{self.call}: {error}{self._waiting(self._step.ranks)}"))
        except BaseException as error:
            self._finish(error)
        finally:
            self._lock.release()
        return self.finished

    def _come(self) -> bool:
        """Whether all that the program waits for has come; it may handle the errors of that."""
        try:
            return self._test_all(self._step.requests)
        except Exception as error:
            self._step = self._program.throw(error)
            return False

    def _late(self) -> Exception:
        """Return the error of a time-out, which names the ranks that have not come."""
        each = zip(self._step.requests, self._step.ranks, strict=True)
        absent = [rank for request, rank in each if not request.Test()]
        words = f"{self.call}: timeout after {self._timeout_s:.1f} s"
        return RuntimeError(words + self._waiting(absent))

    def _waiting(self, ranks: Iterable[int]) -> str:
        """Return what is said of waiting for ranks."""
        who = ", ".join(map(str, sorted({rank for rank in ranks if rank >= 0})))
        return f" of waiting for rank {who or 'unknown'}"

    def _finish(self, error: BaseException | None) -> None:
        if error is not None and self._step.requests:
            self._engine.abandon(self._step.requests, (self._program, self._result))
            self._program.close()
        self.error = error
        self._step = NOTHING
        if self.at_end is not None:
            self._engine.elsewhere(self.at_end).result()
        if self._engine.under_way:
            self._engine.forget(self)
        with self._engine.futures:
            self.finished = True
            future = self._future
        if future is not None:
            self._engine.elsewhere(self._set, future)

    def _set(self, future: Any) -> None:
        if self.error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self.error)

    @untraced
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True once the operation has finished; raise its error."""
        if not self.finished:
            self._engine.drive(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has finished, with or without an error."""
        return self.move()

    def is_success(self) -> bool:
        """Whether the operation has finished without an error."""
        return self.move() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation, None where there is none."""
        return self.error

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> Any:
        """Return the tensors of the operation."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank that sent what a receive has got; -1 for others."""
        return self.sources[0] if self.sources else -1

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Any:
        """Return a future of the tensors; its callbacks run in a thread of their own."""
        with self._engine.futures:
            if self._future is not None:
                return self._future
            self._future = CallFuture(self._path)
            finished = self.finished
        if finished:
            self._engine.elsewhere(self._set, self._future)
        else:
            self._engine.proceed(self)
        return self._future


class Engine:
    """All operations of this process that are under way, and the thread that moves them on.

    Who waits moves them, too; while nobody does, the thread looks now and then.
    """

    def __init__(self) -> None:
        self.futures = threading.Lock()
        self.under_way: dict[Operation, None] = {}
        self._abandoned: list[Any] = []
        self._wake = threading.Condition()
        self._asleep = False
        self._driving = 0
        self._ended = False
        self._thread: threading.Thread | None = None
        self._callbacks: ThreadPoolExecutor | None = None
        atexit.register(self.end)

    def proceed(self, operation: Operation) -> None:
        """Let an operation go on while nobody waits for it."""
        self.under_way[operation] = None
        if operation.finished:
            self.forget(operation)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cpdhpc-torch", daemon=True)
            self._thread.start()
        if self._asleep:
            with self._wake:
                self._wake.notify()

    def forget(self, operation: Operation) -> None:
        """Let go of an operation that has finished."""
        self.under_way.pop(operation, None)

    def abandon(self, requests: Sequence[Any], memory: Any) -> None:
        """Keep what messages that nobody waits for any more may still read and write."""
        self._abandoned.append((list(requests), memory))

    def elsewhere(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in another thread; return the future."""
        if self._callbacks is None:
            self._callbacks = ThreadPoolExecutor(CALLBACKS, "cpdhpc-torch-future")
        return self._callbacks.submit(function, *arguments)

    def drive(self, operation: Operation, timeout_s: float) -> None:
        """Move operations on until this one has finished; raise RuntimeError after timeout_s.

        timeout_s: 0: only the operation's own time-out ends it
        """
        for _ in range(POLLS):
            if operation.move():
                return
        begun_s = time.monotonic()
        self._driving += 1
        try:
            while not operation.move():
                for other in list(self.under_way) if self.under_way else ():
                    other.move()
                waited_s = time.monotonic() - begun_s
                if 0 < timeout_s < waited_s:
                    raise RuntimeError(f"{operation.call}: wait: took {waited_s:.1f} s")
                pause(waited_s)
        finally:
            self._driving -= 1

    def _run(self) -> None:
        """Move operations on, in the thread."""
        take_short_slices()
        begun_s = time.monotonic()
        while not self._ended:
            if not self.under_way:
                with self._wake:
                    self._asleep = True
                    while not self.under_way and not self._ended:
                        self._wake.wait()
                    self._asleep = False
                begun_s = time.monotonic()
            for operation in list(self.under_way):
                if operation.move():
                    begun_s = time.monotonic()
            if self._driving:
                time.sleep(LONG_PAUSE_S)
            elif time.monotonic() - begun_s < LONG_S:
                time.sleep(PAUSE_S)
            else:
                time.sleep(LONG_PAUSE_S)

    def end(self) -> None:
        """End the thread, so that MPI may end; what is under way stays as it is."""
        self._ended = True
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.under_way.clear()


@cache
def engine() -> Engine:
    """Return the engine of this process."""
    return Engine()
