"""The library for torch: gradients of few bits, optimisers, split images, rounded layers.

Gradients:
    GradientReducer     averages a model's gradients over the ranks, after backward or during it
    ddp_hook            the same in DistributedDataParallel; fsdp_hook in FullyShardedDataParallel
    LossScaler          multiplies losses, for gradients in few bits

A backend of torch.distributed over MPI: init_process_group("cpdhpc", init_method="mpi://").
    Importing this package registers it if torch is loaded, its only effect; so does torch.
    set_wires           sends the sums of a process group in few bits

Optimisers whose steps follow each layer's norm: Lars, Larc, Lamb, NovoGrad, AdamP

Modules, loaded on first use:
    cpdhpc.torch.controllers    learning rate and batch, by schedules and by the gradient noise
    cpdhpc.torch.precision      products, layers and networks in small formats; Recorder
    cpdhpc.torch.quantized      networks that compute with integers only
    cpdhpc.torch.split_images   networks with images that are split over ranks
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import controllers as controllers
    from . import precision as precision
    from . import quantized as quantized
    from . import split_images as split_images
    from .backend.wires import set_wires as set_wires
    from .ddp import ddp_hook as ddp_hook
    from .fsdp import fsdp_hook as fsdp_hook
    from .loss_scaling import LossScaler as LossScaler
    from .optimizers import AdamP as AdamP
    from .optimizers import Lamb as Lamb
    from .optimizers import Larc as Larc
    from .optimizers import Lars as Lars
    from .optimizers import NovoGrad as NovoGrad
    from .reducer import GradientReducer as GradientReducer
else:
    from ..lazy import lazily as _lazily
    from .backend.registration import register as _register

    __getattr__, __dir__ = _lazily(
        __name__,
        {
            **dict.fromkeys(("controllers", "precision", "quantized", "split_images"), ""),
            **dict.fromkeys(("AdamP", "Lamb", "Larc", "Lars", "NovoGrad"), "optimizers"),
            "GradientReducer": "reducer",
            "LossScaler": "loss_scaling",
            "ddp_hook": "ddp",
            "fsdp_hook": "fsdp",
            "set_wires": "backend.registration",
        },
    )
    if sys.modules.get("torch") is not None:
        _register()

__all__ = [
    "AdamP",
    "GradientReducer",
    "Lamb",
    "Larc",
    "Lars",
    "LossScaler",
    "NovoGrad",
    "controllers",
    "ddp_hook",
    "fsdp_hook",
    "precision",
    "quantized",
    "set_wires",
    "split_images",
]
