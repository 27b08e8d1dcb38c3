"""Arithmetic in small formats: you choose every rounding of tensors, products and sums."""

from typing import TYPE_CHECKING

from .policy import LayerPolicy as LayerPolicy
from .policy import Policy as Policy
from .products import matmul as matmul

if TYPE_CHECKING:
    from .arithmetic import quantize as quantize
    from .conversion import convert as convert
    from .layers import Attention as Attention
    from .layers import BatchMatmul as BatchMatmul
    from .layers import Conv1d as Conv1d
    from .layers import Conv2d as Conv2d
    from .layers import Conv3d as Conv3d
    from .layers import Linear as Linear
    from .layers import Lstm as Lstm
    from .recorder import Recorder as Recorder
else:  # needs torch
    from ...lazy import lazily as _lazily

    __getattr__, __dir__ = _lazily(
        __name__,
        {
            "Recorder": "recorder",
            "convert": "conversion",
            "quantize": "arithmetic",
            **dict.fromkeys(("Attention", "BatchMatmul", "Conv1d", "Conv2d", "Conv3d"), "layers"),
            **dict.fromkeys(("Linear", "Lstm"), "layers"),
        },
    )

__all__ = [
    "Attention",
    "BatchMatmul",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "LayerPolicy",
    "Linear",
    "Lstm",
    "Policy",
    "Recorder",
    "convert",
    "matmul",
    "quantize",
]
