"""Controllers: the learning rate and the batch of every step, by a schedule or by measurements.

Each has a file, and a row in CONTROLLERS.
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
