"""Training on many ranks; what a job file may say is known without torch, as login nodes need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reducer import GradientReducer as GradientReducer

__all__ = ["GradientReducer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .reducer import GradientReducer
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("cpdhpc.train: needs torch: pip install 'cpdhpc[train]'") from None
    return GradientReducer
