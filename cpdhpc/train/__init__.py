"""Training on many ranks; what a job file may say is known without torch, as login nodes need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ddp import ddp_hook as ddp_hook
    from .fsdp import fsdp_hook as fsdp_hook
    from .layerwise import AdamP as AdamP
    from .layerwise import Lamb as Lamb
    from .layerwise import Larc as Larc
    from .layerwise import Lars as Lars
    from .layerwise import NovoGrad as NovoGrad
    from .loss_scaling import LossScaler as LossScaler
    from .reducer import GradientReducer as GradientReducer

_EXPORTS = {  # public name -> the module that has it
    "AdamP": "layerwise",
    "GradientReducer": "reducer",
    "Lamb": "layerwise",
    "Larc": "layerwise",
    "Lars": "layerwise",
    "LossScaler": "loss_scaling",
    "NovoGrad": "layerwise",
    "ddp_hook": "ddp",
    "fsdp_hook": "fsdp",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("cpdhpc.train: needs torch: pip install 'cpdhpc[train]'") from None
