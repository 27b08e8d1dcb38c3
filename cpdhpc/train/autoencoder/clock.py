"""What exchanges take: plans whose calls are timed, and the bytes that they send."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...darray import Box, WindowPlan
from ...darray.windows import Fill


@dataclass
class Clock:
    """Seconds spent in exchanges, waits included, and bytes sent."""

    spent_s: float = 0.0
    sent_bytes: int = 0

    def take(self) -> tuple[float, int]:
        """Return both and begin anew."""
        taken = self.spent_s, self.sent_bytes
        self.spent_s, self.sent_bytes = 0.0, 0
        return taken


class Timed:
    """A plan that tells a clock of its calls; for darray.autograd it is one."""

    def __init__(self, plan: WindowPlan, clock: Clock) -> None:
        self.plan, self.clock = plan, clock

    @property
    def window(self) -> Box:
        """See WindowPlan."""
        return self.plan.window

    @property
    def fills(self) -> Sequence[Fill]:
        """See WindowPlan."""
        return self.plan.fills

    def exchange(self, x: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.exchange."""
        return self._timed(self.plan.exchange, x, out, number)

    def accumulate(self, y: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.accumulate."""
        return self._timed(self.plan.accumulate, y, out, number)

    def _timed(self, call: Any, given: Any, out: Any, number: int) -> Any:
        world = self.plan.world
        began_s, before = time.perf_counter(), int(world.bytes_sent[0])
        result = call(given, out, number=number)
        self.clock.spent_s += time.perf_counter() - began_s
        self.clock.sent_bytes += int(world.bytes_sent[0]) - before
        return result
