"""Distributed arrays: the cells that each rank owns, its window, and the exchange of halos."""

from __future__ import annotations

from .array import DistArray, redistribute
from .describe import Description, Verification, describe
from .layout import Box, Layout, receptive
from .plan import WindowPlan
from .windows import Constant, Windows

__all__ = [
    "Box",
    "Constant",
    "Description",
    "DistArray",
    "Layout",
    "Verification",
    "WindowPlan",
    "Windows",
    "describe",
    "receptive",
    "redistribute",
]
