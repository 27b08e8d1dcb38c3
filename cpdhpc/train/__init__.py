"""Training on many ranks; what a job file may say is known without torch, as login nodes need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ddp import ddp_hook as ddp_hook
    from .reducer import GradientReducer as GradientReducer

_EXPORTS = {"GradientReducer": "reducer", "ddp_hook": "ddp"}  # public name -> its module
__all__ = ["GradientReducer", "ddp_hook"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("cpdhpc.train: needs torch: pip install 'cpdhpc[train]'") from None
