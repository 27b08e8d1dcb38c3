"""Operations that progress while their process computes, and their torch Work objects."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as await_futures
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from ...ops.common import take_short_slices

F = TypeVar("F", bound=Callable[..., Any])
POLLS = 50  # before a wait yields the core for the first time
SPIN_S = 0.002  # during which a wait yields the core between polls; then it sleeps
PAUSE_S = 5e-5
LONG_S = 0.5  # of waiting, after which it sleeps longer
LONG_PAUSE_S = 1e-3
NO_TIMEOUT = timedelta(0)


class Broken(RuntimeError):
    """An error of MPI for a message, for example if a rank has died."""


class Step:
    """Requests that an operation waits for, and the rank at the other end of each."""

    __slots__ = ("ranks", "requests")

    def __init__(self, requests: list[Any], ranks: list[int]) -> None:
        self.requests, self.ranks = requests, ranks


class Until:
    """A request other than a message: complete once a function returns True.

    Test: the function, named as the method of MPI's requests
    """

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.Test = is_done


NOTHING = Step([], [])
Waits = Generator[Step, None, Any]


def pause(waited_s: float) -> None:
    """Yield the core or sleep, depending on how long a wait has taken so far."""
    if waited_s < SPIN_S:
        os.sched_yield()
    else:
        time.sleep(PAUSE_S if waited_s < LONG_S else LONG_PAUSE_S)


class Calls(threading.local):
    """The callback that a thread is in, as a path, and the number of calls made in it.

    Threads of different ranks run callbacks at different times, so calls in them are matched by
    path instead of order. The path is empty outside callbacks.
    begun: the number and state of a call of this thread that continues in its general form
    """

    path = ""
    made = 0
    begun: tuple[int, int] | None = None

    @contextmanager
    def within(self, path: str) -> Iterator[None]:
        """Run a block as the callback with that path."""
        before = self.path, self.made
        self.path, self.made = path, 0
        try:
            yield
        finally:
            self.path, self.made = before


CALLS = Calls()


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. Calls that its callbacks make are matched over the ranks."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path, self._callbacks = path, 0

    def _next(self) -> str:
        self._callbacks += 1
        return f"{self._path}>{self._callbacks}"

    def _attach(self, done: Callable[[Any], None]) -> None:
        if self.done():  # torch would call it here and now, and it may wait for other calls
            engine().elsewhere(done, self)
        else:
            super().add_done_callback(done)

    def then(self, callback: Callable[[Any], Any]) -> CallFuture:
        """Return the future of the result of a callback, which is called with this future."""
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

        self._attach(done)
        return result

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call a function once there is a result or an error."""
        path = self._next()

        def done(_: Any) -> None:
            with CALLS.within(path):
                callback(self)

        self._attach(done)


def untraced(function: F) -> F:
    """Exclude a function, and those that it calls, from tracing by torch.compile."""
    tracer = torch._C._dynamo.eval_frame
    skip = tracer._FrameAction.SKIP
    tracer.set_code_exec_strategy(function.__code__, tracer._FrameExecStrategy(skip, skip))
    return function


class Operation(Work):
    """The Work of a call: a program of messages and sums, and its outcome.

    channel: of its messages; program: yields steps to wait for; call: its text in errors
    path: see Calls; result: the tensors that its future returns
    timeout_s: its time-out; ends: called at its end, also after an error
    step: the one that the program waits for, if it has begun
    """

    def __init__(
        self,
        engine: Engine,
        channel: Any,
        program: Waits,
        call: str,
        path: str,
        result: Any,
        timeout_s: float,
        ends: list[Callable[[], None]],
        step: Step = NOTHING,
    ) -> None:
        super().__init__()
        self.channel, self.call, self._path = channel, call, path
        self.sources: list[int] = []  # of a receive: gets the rank of the sender
        self.finished = False
        self.error: BaseException | None = None
        self._ends = ends
        self._engine, self._program, self._test_all = engine, program, channel.test_all
        self._result = result
        self._begun_s = time.monotonic()
        self._timeout_s = timeout_s
        self._step = step
        self._lock = threading.Lock()  # held by the thread that advances it
        self._future: Any = None

    def move(self) -> bool:
        """Advance as far as messages allow; return whether the operation has finished.

        A KeyboardInterrupt ends the operation and is raised here, too.
        """
        if self.finished or not self._lock.acquire(blocking=False):
            return self.finished
        try:
            if torch.is_inference_mode_enabled():  # whose tensors other threads cannot write
                with torch.inference_mode(False):
                    self._go_on()
            else:
                self._go_on()
        except StopIteration:
            self._finish(None)
        except Broken as error:
            self._finish(RuntimeError(f"{self.call}: {error}{self._waiting(self._step.ranks)}"))
        except BaseException as error:
            self._finish(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._lock.release()
        return self.finished

    def _go_on(self) -> None:
        """Run the program as far as messages allow; raise StopIteration at its end."""
        while True:
            if self._step.requests and not self._test_all(self._step.requests):
                if time.monotonic() - self._begun_s > self._timeout_s:
                    raise self._late()
                return
            self._step = next(self._program)

    def end(self, error: BaseException) -> None:
        """Let the operation fail with an error, unless it has finished."""
        with self._lock:
            if not self.finished:
                self._finish(error)

    def _late(self) -> Exception:
        """Return the error of a time-out, with the ranks that are missing."""
        each = zip(self._step.requests, self._step.ranks, strict=True)
        absent = [rank for request, rank in each if not request.Test()]
        words = f"{self.call}: timeout after {self._timeout_s:.1f} s"
        return RuntimeError(words + self._waiting(absent))

    def _waiting(self, ranks: Iterable[int]) -> str:
        """Return the end of a message that names the ranks waited for."""
        who = ", ".join(map(str, sorted({rank for rank in ranks if rank >= 0})))
        return f" of waiting for rank {who or 'unknown'}"

    def _finish(self, error: BaseException | None) -> None:
        """Record the outcome of the operation.

        A failed program with incomplete messages is kept, as MPI may still write to its memory.
        """
        if error is not None and self._step.requests:
            self._engine.abandoned.append((self._step, self._program, self._result))
        self.error = error
        self._step = NOTHING
        try:
            for end in self._ends:
                end()
        finally:
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
        if self._future is not None:
            self._future.wait()  # another thread sets it
        return True

    def is_completed(self) -> bool:
        """Whether the operation has finished, with or without an error."""
        return self.move()

    def is_success(self) -> bool:
        """Whether the operation has finished without an error."""
        return self.move() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self.error

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> Any:
        """Return the tensors of the operation."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender of a received message; -1 for other operations."""
        return self.sources[0] if self.sources else -1

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Any:
        """Return a future of the tensors; its callbacks run in another thread."""
        with self._engine.futures:
            if self._future is not None:
                return self._future
            self._future = CallFuture(self._path)
            finished = self.finished
        if finished:
            self._set(self._future)
        else:
            self._engine.proceed(self)
        return self._future


class Threads:
    """A pool of threads that grows if all are busy, because some wait for others.

    They are daemons: the program may end while they are busy.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], Any]] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._busy: set[Future[Any]] = set()

    def end(self, limit_s: float) -> None:
        """Wait for calls under way: Python ends a thread within torch's code by an abort."""
        await_futures(list(self._busy), limit_s)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in a thread; return its future."""
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run, name="cpdhpc-torch-future", daemon=True).start()
        future: Future[Any] = Future()
        self._busy.add(future)
        self._calls.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while True:
            future, function, arguments = self._calls.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            self._busy.discard(future)
            del future, function, arguments
            self._idle.release()


class Engine:
    """All unfinished operations of this process, and the thread that advances them.

    Waits advance them, too. While no thread waits, this one polls at intervals.
    abandoned: memory that messages of failed operations may still read and write
    forked: whether this process is a fork of the one that started MPI
    """

    def __init__(self) -> None:
        self.futures = threading.Lock()
        self.under_way: dict[Operation, None] = {}
        self.abandoned: list[Any] = []
        self.forked = False
        self._threads = Threads()
        self.elsewhere = self._threads.call
        self._wake = threading.Condition()
        self._asleep = False
        self._driven: set[Operation] = set()
        self._ended = False
        self._thread: threading.Thread | None = None
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """Record that this process is a fork, without the thread and without MPI."""
        self.forked, self._thread = True, None

    def proceed(self, operation: Operation) -> None:
        """Let the thread advance an operation."""
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
        """Remove an operation that has finished."""
        self.under_way.pop(operation, None)

    def settle(self, channel: Any, limit_s: float) -> None:
        """Wait until a channel's operations end; those that take longer than limit_s fail."""
        begun_s = time.monotonic()
        for operation in [each for each in list(self.under_way) if each.channel is channel]:
            while not operation.move() and time.monotonic() - begun_s < limit_s:
                pause(time.monotonic() - begun_s)
            operation.end(RuntimeError(f"{operation.call}: the process group was destroyed"))

    def drive(self, operation: Operation, timeout_s: float) -> None:
        """Advance operations until this one has finished; raise RuntimeError after timeout_s.

        timeout_s: 0: only the operation's own time-out applies
        """
        for _ in range(POLLS):
            if operation.move():
                return
        begun_s = time.monotonic()
        self._driven.add(operation)
        try:
            while not operation.move():
                for other in list(self.under_way) if self.under_way else ():
                    other.move()
                waited_s = time.monotonic() - begun_s
                if 0 < timeout_s < waited_s:
                    raise RuntimeError(f"{operation.call}: wait: took {waited_s:.1f} s")
                pause(waited_s)
        finally:
            self._driven.discard(operation)

    def _run(self) -> None:
        """Advance operations, in the thread."""
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
            if self._driven:
                time.sleep(LONG_PAUSE_S)
            elif time.monotonic() - begun_s < LONG_S:
                time.sleep(PAUSE_S)
            else:
                time.sleep(LONG_PAUSE_S)

    def end(self) -> None:
        """End the thread, so that MPI can be finalized; operations stay unfinished."""
        if self.forked:  # the thread belongs to the parent, and may have held the lock
            return
        self._ended = True
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._threads.end(limit_s=1.0)
        self.under_way.clear()


@cache
def engine() -> Engine:
    """Return the engine of this process."""
    return Engine()
