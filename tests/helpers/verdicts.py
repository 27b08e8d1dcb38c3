"""What tests on several ranks conclude together, so that none fails while others wait for it."""

from collections.abc import Callable
from typing import Any

from cpdhpc.world.ranks import Ranks


def together(world: Ranks, *verdicts: Any) -> None:
    """Fail on all processes if a verdict is false on one of them; each may have its own."""
    everyone = world.gather([bool(verdict) for verdict in verdicts])
    assert all(map(all, everyone)), everyone


def said(call: Callable[[], Any]) -> str:
    """The error that a call raises, with its type; "" for none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
