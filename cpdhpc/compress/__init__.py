"""Gradient aggregation: one file per method, one row each in COMPRESSORS."""

from __future__ import annotations

from .base import Aggregator, Column, Context, Mean
from .flexpoint import Flexpoint
from .gradientflow import GradientFlow
from .lowbit import LowBit
from .none import NoCompression
from .onebit import OneBit
from .powersgd import PowerSgd
from .qsgd import Qsgd
from .state import State
from .terngrad import TernGrad

COMPRESSORS: dict[str, type[Aggregator]] = {
    "none": NoCompression,
    "lowbit": LowBit,
    "terngrad": TernGrad,
    "qsgd": Qsgd,
    "onebit": OneBit,
    "powersgd": PowerSgd,
    "gradientflow": GradientFlow,
    "flexpoint": Flexpoint,
}

__all__ = [
    "COMPRESSORS",
    "Aggregator",
    "Column",
    "Context",
    "Flexpoint",
    "GradientFlow",
    "LowBit",
    "Mean",
    "NoCompression",
    "OneBit",
    "PowerSgd",
    "Qsgd",
    "State",
    "TernGrad",
]
