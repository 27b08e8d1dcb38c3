"""Arithmetic in small formats: every rounding of tensors, products and sums is chosen."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_NEED_TORCH = {  # public name -> the module that has it, imported when first asked for
    "quantize": "arithmetic",
    "convert": "conversion",
    **dict.fromkeys(("Attention", "BatchMatmul", "Linear", "Lstm"), "layers"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), "layers"),
    "Recorder": "recorder",
}
__all__ = ["LayerPolicy", "Policy", "matmul", *_NEED_TORCH]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_NEED_TORCH[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NEED_TORCH])
