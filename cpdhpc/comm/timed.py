"""Wires that take time instead of doing anything, for predictions."""

from __future__ import annotations

from dataclasses import dataclass

from ..randomness import Key
from .machine import Machine
from .wire import Array, Packed, Raw, Wire


@dataclass
class Spent:
    """Seconds of a processor since somebody last looked."""

    seconds: float = 0.0

    def add(self, rate_s: float, n: int) -> None:
        """Add rate_s per byte of n float32 values."""
        self.seconds += rate_s * 4 * n


@dataclass(frozen=True)
class TimedRaw(Raw):
    """A raw wire that only takes time."""

    machine: Machine
    spent: Spent

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Take the time of a copy."""
        self.spent.add(self.machine.copy_s, x.size)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Take the time of a copy."""
        self.spent.add(self.machine.copy_s, out.size)
        return 0

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Take the time of an addition."""
        self.spent.add(self.machine.gamma_s, x.size)

    def add_encode(
        self,
        came: Array,
        came_shifts: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        """Take the time of an addition, and of a copy to out."""
        self.spent.add(self.machine.gamma_s, x.size)
        return 0 if out is None else self.decode(payload, shifts, out)


@dataclass(frozen=True)
class TimedPacked(Packed):
    """A packed wire that only takes time."""

    machine: Machine
    spent: Spent

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Take the time of encoding."""
        self.spent.add(self.machine.encode_s, x.size)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Take the time of decoding."""
        self.spent.add(self.machine.decode_s, out.size)
        return 0

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Take the time of decoding into a sum."""
        self.spent.add(self.machine.decode_add_s, x.size)

    def add_encode(
        self,
        came: Array,
        came_shifts: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        """Take the time of a hop, and of decoding to out."""
        self.spent.add(self.machine.hop_s, x.size)
        return 0 if out is None else self.decode(payload, shifts, out)


def timed(wire: Wire, machine: Machine, spent: Spent) -> Wire:
    """Return a wire that is like this one, but only adds to what is spent."""
    if isinstance(wire, Packed):
        return TimedPacked(wire.cast, wire.fit, machine, spent)
    return TimedRaw(machine, spent)
