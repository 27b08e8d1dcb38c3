"""Training on many ranks; what a job file may say is known without torch, as login nodes need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layerwise import AdamP as AdamP
    from .layerwise import Lamb as Lamb
    from .layerwise import Larc as Larc
    from .layerwise import Lars as Lars
    from .layerwise import NovoGrad as NovoGrad
    from .reducer import GradientReducer as GradientReducer

__all__ = ["AdamP", "GradientReducer", "Lamb", "Larc", "Lars", "NovoGrad"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "reducer" if name == "GradientReducer" else "layerwise"
    try:
        return getattr(import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("cpdhpc.train: needs torch: pip install 'cpdhpc[train]'") from None
