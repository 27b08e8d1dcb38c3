"""The end of jobs: time-outs, uncaught errors, and MPI after a process died."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .. import _cpu
from ..errors import ArgumentError, ArgumentTypeError
from ..methods import check_bool, check_whole
from .ranks import portable

POLLS = 50  # before a waiting process yields its core for the first time
GRACE_S = 1.0  # after a time-out: time for the others to report that they wait too
PAUSE_S = 0.001  # between two looks, in that time
ALARM_PERIOD_S = 0.1  # between two looks of a waiting process for the time-out of another

Lines = Callable[[float, list[int]], list[str]]  # (seconds waited, absent processes) -> message


def say(lines: Sequence[str]) -> None:
    """Write lines to stderr in one call, as other processes write there too."""
    sys.stderr.write("".join(line + "\n" for line in lines))
    sys.stderr.flush()


def world_error(
    virtual_ranks: int, most: int, timeout_s: object, gpu_direct: object, share_memory: object
) -> bytes | None:
    """Return the error in a World's arguments, pickled, or None; most: limit of virtual ranks."""
    try:
        check_whole("World", "virtual_ranks", virtual_ranks, 1)
        if virtual_ranks > most:
            raise ArgumentError("World", "virtual_ranks", virtual_ranks, "too many for MPI's tags")
        if not isinstance(timeout_s, int | float | np.number) or isinstance(timeout_s, bool):
            raise ArgumentTypeError("World", "timeout_s", timeout_s, "must be a number")
        if not timeout_s > 0:
            allowed = "must be more than 0"
            raise ArgumentError("World", "timeout_s", timeout_s, allowed, str(timeout_s))
        check_bool("World", "gpu_direct", gpu_direct)
        check_bool("World", "share_memory", share_memory)
    except (TypeError, ValueError) as error:
        return portable(error)
    return None


def await_all(comm: Any, timeout_s: float) -> None:
    """Wait until all processes of a communicator make a world of it; end the job if one is late.

    MPI itself would wait for ever in the calls that follow.
    """
    request, start_s = comm.Ibarrier(), time.monotonic()
    while not request.Test():
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            who = f"rank {comm.Get_rank()} of {comm.Get_size()}"
            abort_job(f"{who} | World: waited {waited_s:.1f} s for another rank to make it")
        time.sleep(PAUSE_S) if waited_s > PAUSE_S else os.sched_yield()


class Timeout:
    """The time-out of a communicator's processes, and the end of the job after it.

    mpi: the module mpi4py.MPI; alarm_tag: reserved for these messages; end: ends the job
    look: called now and then while a process waits; may raise
    pause_s: see Ranks; read before each sleep, as another thread may change it
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        alarm_tag: int,
        timeout_s: float,
        end: Callable[[], NoReturn],
        look: Callable[[], None],
        pause_s: Callable[[], float],
    ) -> None:
        self._mpi, self._comm, self._tag = mpi, comm, alarm_tag
        self._timeout_s, self._end, self._look = timeout_s, end, look
        self._pause_s = pause_s

    def wait(self, done: Callable[[], bool], lines: Lines, pause_s: float = 0.0) -> None:
        """Wait until done; give up after the time-out, here or at another process.

        pause_s: sleep between looks, at least as long as self.pause_s; 0: only yield the core
        """
        for _ in range(1 if self._pause_s() else POLLS):
            if done():
                return
        start_s = time.monotonic()
        look_s = start_s + min(ALARM_PERIOD_S, self._timeout_s)
        while not done():
            sleep_s = max(pause_s, self._pause_s())
            time.sleep(sleep_s) if sleep_s else os.sched_yield()
            now_s = time.monotonic()
            if now_s < look_s:
                continue
            look_s = now_s + ALARM_PERIOD_S
            self._look()
            alarm = self._comm.Iprobe(self._mpi.ANY_SOURCE, self._tag)
            if alarm or now_s - start_s > self._timeout_s:
                self.give_up(now_s - start_s, lines)

    def give_up(self, waited_s: float, lines: Lines) -> NoReturn:
        """Alert the others, so that they give up too; print who waits for whom; end the job."""
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        others = [process for process in range(size) if process != rank]
        nothing = [np.empty(0, np.uint8), self._mpi.BYTE]
        alarms = [self._comm.Isend(nothing, process, self._tag) for process in others]
        absent, start_s = set(others), time.monotonic()
        status = self._mpi.Status()
        while time.monotonic() - start_s < GRACE_S:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._tag, status):
                self._comm.Recv(nothing, status.Get_source(), self._tag)
                absent.discard(status.Get_source())
            time.sleep(PAUSE_S)
        say(lines(waited_s, sorted(absent)))
        time.sleep(GRACE_S)  # for the others' lines
        del alarms
        self._end()


class Freed:
    """Takes the place of a freed world's communicator."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("World: is freed: it cannot be used any more")


def abort_job(message: str, status: int = 1) -> NoReturn:
    """Print message to stderr and end the job: all of its processes if MPI is running."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    running = sys.modules.get("mpi4py.MPI")  # importing it here would start MPI
    if running is None or not running.Is_initialized() or running.Is_finalized():
        raise SystemExit(status)
    if running.COMM_WORLD.Get_size() > 1:  # libraries print much when they abort
        running.COMM_WORLD.Abort(status)
    raise SystemExit(status)


class EndsJob:
    """Replaces sys.excepthook: shows an error by the previous hook, then ends the job."""

    def __init__(self, show: Callable[..., object], who: str) -> None:
        self._show, self._who = show, who

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self._show(kind, error, trace)
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            sys.__stderr__.write(sys.stderr.getvalue())  # torch.distributed would show it later
            sys.stderr = sys.__stderr__
        abort_job(f"{self._who}ends the job: {kind.__name__}: {error}")


DEAD_S = 1.0  # wait for the number of a dead process, if another process reported the death first


def dead_of(mpi: Any, comm: Any) -> list[int]:
    """Return the dead processes of a communicator after a failure; [] if none is known.

    A process that leaves its wait because another revoked the communicator learns of the death
    a little later, and only while it calls MPI.
    """
    end_s = time.monotonic() + DEAD_S
    while not comm.Get_failed().Get_size() and time.monotonic() < end_s:
        mpi.COMM_SELF.Iprobe()
        time.sleep(PAUSE_S)
    dead = comm.Get_failed()
    return list(dead.Translate_ranks(list(range(dead.Get_size())), comm.Get_group()))


FINALISE_S = 10.0  # for MPI_Finalize after a death, which Open MPI 5 now and then does not end


def limit_finalise(limit_s: float = FINALISE_S) -> None:
    """When Python exits, limit the time of MPI_Finalize; then end this process without it.

    For use after a death. mpi4py calls MPI_Finalize after all of Python's own exit steps, so files
    and streams are flushed. If it is cut short, the exit status is 0, as the program's own is not
    known there. A timer of the operating system does this, because mpi4py holds Python's lock
    during the call. One call of this function is enough.
    """
    words = f"MPI_Finalize: takes more than {limit_s:g} s after a death: ended without it\n"
    _cpu.end_in_time(limit_s, words.encode())


REFUSAL_S = 30.0  # how long a process that refuses a call waits for the others to learn of it


class Begun(NamedTuple):
    """The last collective call that a process has begun: its number, MPI's name, size in bytes."""

    number: int = 0
    name: str = ""
    size_bytes: int = 0

    def next(self, start: Callable[[], Any]) -> Begun:
        """Return the record of a call started by start: a communicator's method, maybe partial."""
        sent = next(iter(getattr(start, "args", ())), np.empty(0, np.uint8))
        array = sent[0] if isinstance(sent, list) else sent
        return Begun(self.number + 1, getattr(start, "func", start).__name__, array.nbytes)

    def again(self, mpi: Any, comm: Any) -> Callable[[], Any]:
        """Return a function that begins the same call here, with values that nobody reads."""
        values = np.zeros(self.size_bytes // 8, np.int64)
        results = np.empty(values.size * comm.Get_size(), np.int64)
        arguments: dict[str, tuple[Any, ...]] = {
            "Ibcast": ([np.empty(self.size_bytes, np.uint8), mpi.BYTE], 0),
            "Iallgather": (values, results),
            "Iallreduce": (values, results[: values.size], mpi.MAX),
        }
        return partial(getattr(comm, self.name), *arguments.get(self.name, ()))


def meet(
    comm: Any, tag: int, mine: Exception | None, begun: Sequence[Begun], wait_s: float
) -> tuple[Exception, bool, Sequence[Begun]]:
    """Exchange errors with all processes; return the first one, and whether all have one.

    mine: the error of this process, None if it only waited; tag: reserved for these messages
    begun: this process's last calls; those of the process that is furthest are returned, too
    Collective. Raises TimeoutError, naming the processes, if some do not come in wait_s.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [process for process in range(size) if process != rank]
    data = portable(mine), begun
    sends = [comm.isend(data, process, tag) for process in others]
    received, missing = {rank: data}, others
    end_s = time.monotonic() + wait_s
    while missing or not all([send.test()[0] for send in sends]):
        received |= {p: comm.recv(source=p, tag=tag) for p in missing if comm.Iprobe(p, tag)}
        missing = [process for process in others if process not in received]
        os.sched_yield()
        if time.monotonic() > end_s:
            who = ", ".join(map(str, missing)) or "unknown"
            raise TimeoutError(f"rank {who} did not learn of it in {wait_s:.0f} s")
    states = [received[process] for process in range(size)]
    errors = [pickle.loads(each) for each, _ in states if each is not None]
    furthest = max((each for _, each in states), key=lambda calls: calls[-1])
    return errors[0], len(errors) == size, furthest
