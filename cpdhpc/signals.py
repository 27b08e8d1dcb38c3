"""Signals that ask a run to stop are noted, and obeyed between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(Exception):
    """A run stopped at a signal, its checkpoint written; number is that of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


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
