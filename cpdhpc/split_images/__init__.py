"""Networks whose images are split over ranks: convolution, pooling and batch norm on windows."""

from __future__ import annotations

from .grid import ImageGrid
from .partition import Partitioned, partition

__all__ = ["ImageGrid", "Partitioned", "partition"]
