"""Gradient aggregation: one file per method, one row each in COMPRESSORS."""

from __future__ import annotations

from .base import Aggregator, Column, Context, Mean
from .lowbit import LowBit
from .none import NoCompression
from .state import State

COMPRESSORS: dict[str, type[Aggregator]] = {"none": NoCompression, "lowbit": LowBit}

__all__ = [
    "COMPRESSORS",
    "Aggregator",
    "Column",
    "Context",
    "LowBit",
    "Mean",
    "NoCompression",
    "State",
]
