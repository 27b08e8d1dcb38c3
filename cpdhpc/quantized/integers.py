"""Inference in integers, by NumPy, and the files of such networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import store
from ..config import UserError
from .batchnorm import IntegerNorm

Array = npt.NDArray[Any]

TOGETHER = 250  # images that go through the layers at once
KIND = "integer network"


@dataclass(frozen=True)
class Input:
    """The codes of images of values 0..1, to nearest, 0..2^bits - 1; integers are codes already.

    Images without channels get one. Raises UserError for values outside.
    """

    bits: int

    def __call__(self, images: Array) -> Array:
        """Return int32[n, channels, height, width]."""
        codes = np.issubdtype(images.dtype, np.integer)
        top = 2**self.bits - 1
        low, high = images.min(initial=0), images.max(initial=0)
        if not 0 <= low <= high <= (top if codes else 1):
            raise UserError(
                f"Input: images: values {low:g}..{high:g}: must be 0..{top if codes else 1}"
            )
        x = images.astype(np.int32) if codes else np.rint(images * np.float32(top)).astype(np.int32)
        return x[:, None] if x.ndim == 3 else x


@dataclass(frozen=True)
class Convolution:
    """Sums of products; zeros around. weight: int8[outputs, inputs, rows, columns]."""

    weight: Array
    stride: int
    padding: int

    def __call__(self, x: Array) -> Array:
        """Return int32[n, outputs, height, width] of codes int32[n, inputs, height, width]."""
        around, kernel = (self.padding, self.padding), self.weight.shape[2:]
        padded = np.pad(x, ((0, 0), (0, 0), around, around))
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
        windows = windows[:, :, :: self.stride, :: self.stride]
        sums = np.tensordot(windows, self.weight.astype(np.int32), axes=((1, 4, 5), (1, 2, 3)))
        return np.moveaxis(sums, 3, 1)


@dataclass(frozen=True)
class Linear:
    """Sums of products and a bias. weight: int8[outputs, inputs], bias: int32[outputs]."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """Return int32[n, outputs] of codes int32[n, inputs]."""
        return x @ self.weight.T.astype(np.int32) + self.bias


@dataclass(frozen=True)
class MaxPool:
    """The largest code of each square of size x size; what is over at the border is left out."""

    size: int

    def __call__(self, x: Array) -> Array:
        """Return int32[n, channels, height // size, width // size]."""
        n, channels, rows, columns = *x.shape[:2], *(m // self.size for m in x.shape[2:])
        whole = x[:, :, : rows * self.size, : columns * self.size]
        return whole.reshape(n, channels, rows, self.size, columns, self.size).max(axis=(3, 5))


@dataclass(frozen=True)
class Flatten:
    """All axes but the first as one."""

    def __call__(self, x: Array) -> Array:
        """Return int32[n, values]."""
        return x.reshape(len(x), -1)


Layer = Input | Convolution | IntegerNorm | MaxPool | Flatten | Linear
LAYERS: dict[str, type[Any]] = {
    "input": Input,
    "convolution": Convolution,
    "norm": IntegerNorm,
    "maxpool": MaxPool,
    "flatten": Flatten,
    "linear": Linear,
}
_NAMES = {layer: name for name, layer in LAYERS.items()}


@dataclass(frozen=True)
class IntegerNetwork:
    """Layers of LAYERS, one after the other."""

    layers: Sequence[Layer]

    def __call__(self, images: Array) -> Array:
        """Return the scores int32[n, classes] of images float[n, height, width] in 0..1, or codes.

        Images may have channels, [n, channels, height, width]. Raises UserError for other values.
        """
        parts = [images[at : at + TOGETHER] for at in range(0, len(images), TOGETHER)] or [images]
        return np.concatenate([self._scores(part) for part in parts])

    def _scores(self, x: Array) -> Array:
        for layer in self.layers:
            x = layer(x)
        return x

    def classes(self, images: Array) -> Array:
        """Return int64[n], each image's class of the largest score, the first of equal ones."""
        return np.asarray(self(images).argmax(axis=1))

    def save(self, path: Path, about: store.Attributes) -> None:
        """Write all layers; about: attributes of the file. Raises StoreError where it cannot."""
        groups = {
            f"{number:03}.{_NAMES[type(layer)]}": {
                each.name: np.asarray(getattr(layer, each.name)) for each in fields(layer)
            }
            for number, layer in enumerate(self.layers)
        }
        store.write(path, groups, {"kind": KIND, **about})


def load(path: Path) -> IntegerNetwork:
    """Return the network of a file of save. Raises StoreError where it is none."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != KIND:
        raise store.StoreError(f"{path}: is no file of cpdhpc export")
    layers = []
    for name in sorted(groups):
        kind = name.partition(".")[2]
        if kind not in LAYERS:
            raise store.StoreError(f"{path}: layer {name}: is of a later version of cpdhpc")
        values = {key: a if a.ndim else int(a) for key, a in groups[name].items()}
        layers.append(LAYERS[kind](**values))
    return IntegerNetwork(layers)
