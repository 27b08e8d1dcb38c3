"""Training on many ranks: the only part that imports torch."""

from __future__ import annotations

from .reducer import GradientReducer

__all__ = ["GradientReducer"]
