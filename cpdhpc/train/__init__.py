"""Training on many ranks; what a job file may say is known without torch, as login nodes need."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
else:
    from ..lazy import lazily as _lazily

    __getattr__, __dir__ = _lazily(
        __name__,
        {
            "AdamP": "layerwise",
            "GradientReducer": "reducer",
            "Lamb": "layerwise",
            "Larc": "layerwise",
            "Lars": "layerwise",
            "LossScaler": "loss_scaling",
            "NovoGrad": "layerwise",
            "ddp_hook": "ddp",
            "fsdp_hook": "fsdp",
        },
    )

__all__ = [
    "AdamP",
    "GradientReducer",
    "Lamb",
    "Larc",
    "Lars",
    "LossScaler",
    "NovoGrad",
    "ddp_hook",
    "fsdp_hook",
]
