"""Networks whose images are split over ranks: any network, its layers replaced."""

from __future__ import annotations

from .grid import ImageGrid
from .partition import partition

__all__ = ["ImageGrid", "partition"]
