"""Verdicts of all ranks: an assert on one of them would leave the others waiting."""

from __future__ import annotations

from typing import Any

from cpdhpc.world.ranks import Ranks


def together(world: Ranks, *verdicts: Any) -> None:
    """Fail on all ranks if a verdict is false on one of them."""
    assert world.gather([bool(v) for v in verdicts]) == [[True] * len(verdicts)] * world.size
