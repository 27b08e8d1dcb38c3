"""The death of ranks, as those who are left see it."""

from __future__ import annotations

from collections.abc import Sequence


class RankFailure(RuntimeError):
    """Processes died during a call; World.shrink goes on without them.

    processes: those known to be dead here, maybe none where another process told of it
    call: what this process was doing. The arrays that were to be summed are as before, unless
    one was given as out.
    """

    def __init__(self, processes: Sequence[int], call: str) -> None:
        self.processes, self.call = tuple(processes), call
        super().__init__(self.processes, call)

    def __str__(self) -> str:
        who = ", ".join(map(str, self.processes)) or "unknown (another process saw it)"
        return f"{self.call}: process {who} died; World.shrink() goes on without"
