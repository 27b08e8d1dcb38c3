"""Models: one file each, one row each in MODELS (and in job.Model, which reads it from a file)."""

from __future__ import annotations

from typing import Any

from .lenet import LeNet
from .mlp import Mlp

MODELS: dict[str, Any] = {"mlp": Mlp, "lenet": LeNet}

__all__ = ["MODELS", "LeNet", "Mlp"]
