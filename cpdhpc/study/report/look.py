"""Colours, markers and lines that are told apart in grey too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle

# Neighbours differ in lightness; each is at least 2.1:1 in contrast with white.
COLOURS = (
    "#0b3c6f",  # dark blue
    "#ef9a1a",  # orange
    "#1f8a70",  # green
    "#8f1239",  # crimson
    "#63b8ee",  # sky
    "#5b2a86",  # violet
    "#8c6d1f",  # ochre
    "#e08fbd",  # pink
    "#2f2f2f",  # near black
    "#7f7f7f",  # grey
)
MARKERS = "os^Dv<>pPX*h"
DASHES: tuple[object, ...] = ("-", (0, (6, 2)), (0, (5, 2, 1, 2)), (0, (1.5, 1.5)), (0, (9, 3)))
BLACK, GREY = "#000000", "#6a6a6a"


@dataclass(frozen=True)
class Look:
    """How a series is drawn; dash: as matplotlib takes it; marker: "" for none."""

    color: str
    marker: str
    dash: object = "-"


BOUND = Look(BLACK, "", (0, (1, 1.2)))
IDEAL = Look(GREY, "", (0, (7, 3)))
LIBRARIES = (Look(GREY, "x"), Look(GREY, "+", (0, (6, 2))), Look(GREY, "1", (0, (2, 2))))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for each name; the three cycles have periods that share no factor by pairs."""
    cycles = zip(cycle(COLOURS), cycle(MARKERS[:11]), cycle(DASHES[:3]), strict=False)
    return {name: Look(*look) for name, look in zip(dict.fromkeys(names), cycles, strict=False)}
