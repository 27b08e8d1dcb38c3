"""Limits for checks: ranks may leave a check, hang or die, and the others continue."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ...world.mpi import World
from ...world.ranks import is_agreed
from ..signals import STOPPING
from .base import CheckResult

GRACE_S = 5.0  # after a limit, before the others continue without a rank
LOOK_S = 0.1  # between two checks of the guard
END_S = 2.0  # for the rank that writes, before the others end too
PAUSE_S = 0.0005  # between two probes for a message
STDERR = 2  # sys.stderr may be no file, for example in a notebook


OWN = ("carry_out", "_ring", "look", "_look", "_end", "abort")  # functions that raise Left


class Left(BaseException):
    """A rank leaves a check, as its time is over, or as another rank has left it.

    It is no Exception, so that code that catches those, to raise them on all ranks, does not catch
    it.
    """


class Outcome(NamedTuple):
    """The outcome of a check on a rank.

    found: its results, None if it did not end; error: why; time_s: its duration
    left: whether others may be in calls that this rank has left, so that all need a new world
    waited: whether the rank waited for others when its time was over
    on_gpu: whether the GPU failed
    """

    found: CheckResult | None
    error: str = ""
    time_s: float = 0.0
    left: bool = False
    waited: bool = False
    on_gpu: bool = False


class Watched(World):
    """A world whose waits end when a rank leaves a check, and which ends no job."""

    def __init__(self, comm: Any, watch: Watch, **options: Any) -> None:
        self._watch = watch
        super().__init__(comm, **options)

    def _look(self) -> None:
        self._watch.look()
        super()._look()

    def _end(self) -> NoReturn:
        raise Left("waited for others")

    def abort(self, message: str) -> NoReturn:
        raise Left(message)


class Watch:
    """The processes that take part, and their messages outside of checks.

    alive: the processes that still take part, ascending; the first of them decides and writes
    dirty: whether MPI may have calls under way that never end; parting: whether all checks ended
    """

    def __init__(self, world: World, grace_s: float = GRACE_S) -> None:
        self._mpi, comm = world.plain_mpi()
        self.comm = comm.Dup()
        self.me, self.alive = world.process, list(range(world.processes))
        self.grace_s = grace_s
        self.number, self.deadline_s, self.limit_s = 0, 0.0, 0.0
        self.running = self.dirty = self.parting = False
        self._kept: list[Any] = []  # requests, and worlds and frames that have some

    @property
    def first(self) -> bool:
        return self.me == self.alive[0]

    @property
    def patience_s(self) -> float:
        """The time after a limit at which the other ranks have continued without a late rank."""
        return (2 * len(self.alive) + 2) * self.grace_s

    def late(self, grace_s: float) -> bool:
        """Return whether this process should have ended its check grace_s ago or earlier."""
        checks = self.deadline_s > 0 and not self.parting
        return checks and time.monotonic() > self.deadline_s + grace_s

    def _tag(self, kind: int) -> int:
        return 3 * self.number + kind

    def look(self) -> None:
        """Raise Left if another rank has left the check."""
        if self.running and self.comm.Iprobe(self._mpi.ANY_SOURCE, self._tag(ALARM)):
            raise Left("another rank left the check")

    def keep(self, thing: object) -> None:
        """Keep an object that has calls of MPI under way for as long as the process lives."""
        self._kept.append(thing)

    def world(self) -> Watched:
        """Return a world of the processes that still take part. Collective among them."""
        comm = self.comm
        if len(self.alive) < comm.Get_size():
            everyone = comm.Get_group()
            comm = comm.Create_group(everyone.Incl(self.alive), self.number)
        return Watched(comm, self)

    def carry_out(self, run: Callable[[], CheckResult], limit_s: float) -> Outcome:
        """Return the outcome of a check on this rank, within limit_s if Python runs."""
        self.number += 1
        self.limit_s, start_s = limit_s, time.monotonic()
        self.deadline_s = start_s + limit_s
        faulthandler.dump_traceback_later(limit_s + 2 * self.patience_s, exit=True, file=STDERR)
        before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)  # again, if a call has caught it
        outcome = Outcome(None, "was not begun")
        try:
            self.running = True
            with np.errstate(all="ignore"):  # some data is NaN or infinite
                outcome = Outcome(run())
            self.running = False
        except (Exception, Left) as error:
            self.running = False
            outcome = self._of(error)
        finally:
            self.running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        outcome = outcome._replace(time_s=time.monotonic() - start_s)
        if outcome.left:
            self._kept += [self._send(b"", each, ALARM) for each in self.alive if each != self.me]
        return outcome

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.running:
            raise Left(f"did not end within {self.limit_s:g} s")

    def _of(self, error: BaseException) -> Outcome:
        from ...ops import is_of_gpu

        self._kept.append(error)  # its frames have buffers that MPI may still use
        frames = list(traceback.extract_tb(error.__traceback__))
        frames = [each for each in frames if each.name not in OWN] or frames
        own = [each for each in frames if "cpdhpc" in each.filename] or frames
        waited = any(each.filename.endswith("world/ending.py") for each in frames)
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        on_gpu = isinstance(error, Exception) and is_of_gpu(error)
        said = (str(error).strip().splitlines() or [""])[0]  # others are of a traceback
        if not isinstance(error, Left):
            said = f"{type(error).__name__}: {said}"
        said += f", at {at}"
        agreed = isinstance(error, Exception) and is_agreed(error)
        return Outcome(None, said, left=not agreed, waited=waited, on_gpu=on_gpu)

    def _send(self, value: Any, process: int, kind: int) -> Any:
        request = self.comm.isend(value, process, self._tag(kind))
        self._kept.append(request)
        return request

    def _receive(self, process: int, kind: int, until_s: float) -> Any:
        """Return the message of a process, None if none has come in time."""
        tag = self._tag(kind)
        while not self.comm.Iprobe(process, tag):
            if time.monotonic() > until_s:
                return None
            time.sleep(PAUSE_S)
        return self.comm.recv(source=process, tag=tag)

    def meet(self, outcome: Outcome) -> dict[int, Outcome]:
        """Return the outcomes of the processes that still take part. Collective among them.

        The first process collects them and sends them to the others. A process that is late is
        excluded: this function does not return on it. If the first one is late, the next collects.
        """
        if len(self.alive) > 1 and self.late(self.grace_s / 2):
            self._idle()
        turn = 0
        while True:
            first, until_s = self.alive[0], self.deadline_s + (2 * turn + 1) * self.grace_s
            found: dict[int, Outcome] | None
            if first == self.me:
                found = self._collect(outcome, until_s)
            else:
                self._send(outcome, first, OUTCOME)
                found = self._receive(first, DECISION, until_s + self.grace_s)
            if found is not None:
                self.dirty |= len(found) < len(self.alive)
                self.alive = sorted(found)
                if self.me not in found:
                    self._idle()
                return found
            self.alive.remove(first)
            self.dirty, turn = True, turn + 1

    def _collect(self, outcome: Outcome, until_s: float) -> dict[int, Outcome]:
        found, others = {self.me: outcome}, [each for each in self.alive if each != self.me]
        for process in others:
            came = self._receive(process, OUTCOME, until_s)
            if came is not None:
                found[process] = came
        for process in others:
            self._send(found, process, DECISION)
        return found

    def _idle(self) -> NoReturn:
        """Wait until the job ends, which continues without this process, or its guard ends it."""
        faulthandler.cancel_dump_traceback_later()
        while True:
            time.sleep(1.0)

    def part(self, status: int | None, limit_s: float) -> int:
        """Return the exit status, an argument of the first process; others pass None. Collective.

        No process leaves before the first one has written all files.
        """
        self.number += 1
        self.parting = True
        faulthandler.cancel_dump_traceback_later()
        if self.first:
            sent = [self._send(status, each, DECISION) for each in self.alive if each != self.me]
            end_s = time.monotonic() + self.grace_s
            while not all([each.Test() for each in sent]) and time.monotonic() < end_s:
                time.sleep(PAUSE_S)
            assert status is not None, "an argument of the first process"
            return status
        found = self._receive(self.alive[0], DECISION, time.monotonic() + limit_s)
        return 1 if found is None else int(found)


ALARM, OUTCOME, DECISION = range(3)


class Guard:
    """A thread that ends the job if a process of it dies, a signal comes, or all ranks hang.

    save: writes the results and why the job ends, on the first process that still takes part
    overtaken: returns whether another process has written since this one did
    """

    def __init__(
        self,
        world: World,
        watch: Watch,
        save: Callable[[str], None],
        overtaken: Callable[[], bool],
    ) -> None:
        self._watch, self._save, self._overtaken = watch, save, overtaken
        mine = socket.gethostname(), os.getpid()
        everyone = world.gather((*mine, _born(mine[1])), "processes")
        here = {i: each[1:] for i, each in enumerate(everyone) if each[0] == mine[0]}
        self._here = {i: each for i, each in here.items() if _born(each[0]) == each[1]}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._guard, daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Guard the job until the end of the block."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, _ignore) for number in STOPPING}
        old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._signals = reader
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _guard(self) -> None:
        watch = self._watch
        while not self._ended.is_set():
            ready, _, _ = select.select([self._signals], [], [], LOOK_S)
            signals = os.read(self._signals, 100) if ready else b""
            asked = [signal.Signals(each).name for each in signals if each in STOPPING]
            dead = self._dead()
            if asked and not dead:
                time.sleep(2 * LOOK_S)  # a death may be the reason, and be seen by then
                dead = self._dead()
            if dead and not watch.parting:
                self._end(f"rank {', '.join(map(str, dead))} died", dead)
            if asked:
                self._end(f"the job was ended by {asked[0]}", dead)
            if watch.late(watch.patience_s) and watch.first and not self._overtaken():
                self._end("all ranks hang", [])

    def _dead(self) -> list[int]:
        """Return the processes of this machine that have died."""
        return [i for i, (pid, born) in self._here.items() if _born(pid) != born]

    def _end(self, why: str, dead: list[int]) -> None:
        """End this process, and with it the job, unless all checks have ended meanwhile."""
        watch = self._watch
        left = [each for each in watch.alive if each not in dead]
        is_late = watch.late(watch.grace_s) and self._overtaken()
        if left and left[0] == watch.me and not is_late:
            with suppress(Exception):
                self._save(why)
        elif self._ended.wait(END_S):
            return
        os._exit(1)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Leave a signal to the guard's thread."""


def _born(pid: int) -> str:
    """Return when a process of this machine began, "" if it has ended or is a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]
