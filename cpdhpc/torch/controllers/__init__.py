"""Controllers: the learning rate and the batch of every step, by a schedule or by what they see.

A file for each way of deciding, and a row each in CONTROLLERS.
"""

from __future__ import annotations

from .adaptive import ByAdaptiveBatch, ByNoiseScale
from .autowu import ByAutoWu
from .base import (
    BATCH_SCALINGS,
    DECAYS,
    DEFAULT_RATE,
    BySchedule,
    Control,
    Controller,
    Norms,
    Schedule,
    Scheduled,
    Settings,
)

CONTROLLERS: dict[str, type[Control]] = {
    "schedule": BySchedule,
    "noise_scale": ByNoiseScale,
    "adaptive_batch": ByAdaptiveBatch,
    "autowu": ByAutoWu,
}

__all__ = [
    "BATCH_SCALINGS",
    "CONTROLLERS",
    "DECAYS",
    "DEFAULT_RATE",
    "BySchedule",
    "Control",
    "Controller",
    "Norms",
    "Schedule",
    "Scheduled",
    "Settings",
]
