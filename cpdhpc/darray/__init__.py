"""Distributed arrays: what ranks own, the windows that they need, and the exchange between."""

from .boundary import Constant
from .box import Box
from .layout import Layout, receptive
from .plan import WindowPlan

__all__ = ["Box", "Constant", "Layout", "WindowPlan", "receptive"]
