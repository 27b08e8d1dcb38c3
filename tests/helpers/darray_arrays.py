"""Arrays of every kind, dtype and stride for tests of distributed arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

POISON = 0xA5


class Laid(NamedTuple):
    """An array somewhere in a base: base[key] has its elements. The rest is poison."""

    array: Any
    base: np.ndarray
    key: tuple[slice, ...]

    @property
    def values(self) -> np.ndarray:
        """What the array holds, by NumPy."""
        return np.array(self.base[self.key])

    @property
    def rest_is_untouched(self) -> bool:
        """Whether nothing was written beside the array."""
        size = self.base.itemsize
        rest = self.base.copy(order="K").view(f"V{size}")
        rest[self.key] = np.frombuffer(bytes([POISON]) * size, rest.dtype)[0]
        return set(rest.tobytes()) <= {POISON}


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype, with that of ml_dtypes for bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def any_bits(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Elements of any bits, NaN with payloads included; truth values are 0 and 1."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    found = dtype_of(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * found.itemsize), found).reshape(shape)


def numbers(rng: np.random.Generator, shape: Sequence[int], dtype: str, most: int) -> np.ndarray:
    """Integers that can be added: of any bits, but in dtypes of floats up to most."""
    if "int" in dtype:
        return any_bits(rng, shape, dtype)
    real = rng.integers(-most, most + 1, shape)
    if dtype.startswith("complex"):
        return (real + 1j * rng.integers(-most, most + 1, shape)).astype(dtype)
    return real.astype(dtype_of(dtype))


def as_kind(array: np.ndarray, kind: str) -> Any:
    """The same memory as an array of a kind."""
    if kind == "numpy":
        return array
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def laid_out(rng: np.random.Generator, values: np.ndarray, kind: str) -> Laid:
    """The values in memory of some order, with gaps or backwards; torch has nothing backwards."""
    how = rng.choice(["plain", "fortran", "gaps", "backwards" if kind == "numpy" else "plain"])
    shape, key = list(values.shape), [slice(None)] * values.ndim
    for axis in range(values.ndim):
        if how == "gaps" and rng.random() < 0.7:
            shape[axis], key[axis] = 2 * shape[axis] + 1, slice(1, None, 2)
        elif how == "backwards" and rng.random() < 0.7:
            key[axis] = slice(None, None, -1)
    memory = bytearray([POISON]) * (int(np.prod(shape)) * values.itemsize)
    order = "F" if how == "fortran" else "C"
    base = np.frombuffer(memory, values.dtype).reshape(shape, order=order)
    base[tuple(key)] = values
    return Laid(as_kind(base[tuple(key)], kind), base, tuple(key))


def as_numpy(array: Any) -> np.ndarray:
    """An array of any kind as NumPy's, bfloat16 as ml_dtypes has it."""
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        plain = array.detach().cpu()
        if plain.dtype == torch.bfloat16:
            return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return plain.numpy()
    return array.get()


def same(got: Any, want: np.ndarray) -> bool:
    """Whether arrays are alike in shape, dtype and every bit."""
    found = as_numpy(got)
    alike = found.shape == want.shape and found.dtype == want.dtype
    return alike and found.tobytes() == want.tobytes()
