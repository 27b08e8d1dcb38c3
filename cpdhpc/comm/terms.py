"""How many contributions are in what travels."""

from __future__ import annotations

from .schedule import SCHEDULES, Schedule, Step


def recv_terms(schedule: Schedule, step: Step, number: int, rank: int, ranks: int) -> int:
    """Return of how many contributions the message that comes in with a step is the sum."""
    if step.kind != "reduce" or step.recv_from is None:
        return ranks if step.kind == "copy" else 1
    if schedule is SCHEDULES["ring"]:
        return number + 1
    return min(step.recv_from - rank, ranks - step.recv_from)  # of a binomial tree's branch
