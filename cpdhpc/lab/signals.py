"""Signals that ask a run to stop are noted, and obeyed between two steps.

That nobody reads what a run prints any more stops no run.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
MORE_TO_DO = 85  # exit status after USR1, which schedulers send before time is over: start it again
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports Ctrl-C


def let_interrupt_end() -> None:
    """Let Ctrl-C end this process at once, where Python would raise KeyboardInterrupt.

    Amid imports that leaves half of a module, and amid the start of MPI a rank that waits for
    others when it ends.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def raising_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C until the end of the block, so that files are tidied up."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Unheard(io.TextIOWrapper):
    """A stream of text that goes nowhere once its reader has gone."""

    def write(self, text: str) -> int:
        """Write text, or nothing."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._go_on()
            return len(text)

    def flush(self) -> None:
        """Write what is kept, or forget it."""
        try:
            super().flush()
        except BrokenPipeError:
            self._go_on()

    def _go_on(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def outlive_readers() -> None:
    """Let this process go on where who reads what it prints wants no more, as head does.

    So no run ends, and no file is missing, because of that.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):  # None: closed from the start
            old.flush()
            how = {each: getattr(old, each) for each in ("encoding", "errors", "line_buffering")}
            new = Unheard(old.buffer, **how, write_through=old.write_through)
            setattr(sys, name, new)


class Interrupted(Exception):
    """A run stopped at a signal, its checkpoint written; number is that of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status: MORE_TO_DO, or for other signals as a shell reports a death by them."""
        return MORE_TO_DO if self.number == signal.SIGUSR1 else 128 + self.number


class Caught:
    """The last stopping signal that this process got; 0 where there was none."""

    number = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; a signal handler."""
        self.number = number


@contextmanager
def catching() -> Iterator[Caught]:
    """Note stopping signals rather than die of them, until the end of the block."""
    caught = Caught()
    previous = {number: signal.signal(number, caught.note) for number in STOPPING}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
