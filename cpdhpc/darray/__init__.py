"""Distributed arrays: what ranks own, the windows that they need, and the exchange between."""

from .array import DistArray
from .boundary import Constant
from .box import Box
from .describe import Description, describe
from .layout import Layout, receptive
from .plan import WindowPlan
from .redistribute import redistribute
from .verify import Verification
from .windows import Windows

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
