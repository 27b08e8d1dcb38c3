"""ops.gpu for tests that give and take NumPy arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class OnGpu:
    """ops.gpu for NumPy arrays: moves the arguments over, and what was written back."""

    def __init__(self, ops: ModuleType, cupy: ModuleType) -> None:
        self._ops, self._cupy = ops, cupy

    def __getattr__(self, name: str) -> Any:
        function, cupy = getattr(self._ops, name), self._cupy

        def call(*args: Any, **kwargs: Any) -> Any:
            moved: dict[int, Any] = {}

            def move(value: Any) -> Any:
                if not isinstance(value, np.ndarray):
                    return value
                return moved.setdefault(id(value), cupy.asarray(value))

            result = function(*map(move, args), **{k: move(v) for k, v in kwargs.items()})
            for value in (*args, *kwargs.values()):
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    value[...] = cupy.asnumpy(moved[id(value)])
            return cupy.asnumpy(result) if isinstance(result, cupy.ndarray) else result

        return call
