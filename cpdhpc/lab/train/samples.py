"""Samples as training takes them: in memory, of files, or a map-style dataset of the user's."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from ...config import ConfigError, told
from ...randomness import random_key
from ...store import Tables
from .data import DataError

Array = npt.NDArray[Any]
Pair = tuple[torch.Tensor, torch.Tensor]


class Scaling:
    """Bytes become 0..1; then inputs are normalised by channel, where mean and deviation are given.

    mean, deviation: float32[channels], or empty
    """

    def __init__(self, mean: Array, deviation: Array) -> None:
        self.mean, self.deviation = (torch.from_numpy(each) for each in (mean, deviation))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x[b, ...] scaled; its channels are axis 1."""
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        if not len(self.mean):
            return x
        by = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.reshape(by)) / self.deviation.reshape(by)


NO_SCALING = Scaling(np.empty(0, np.float32), np.empty(0, np.float32))


class InMemory:
    """Inputs and targets as tensors whose first axis is the sample."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, scaling: Scaling = NO_SCALING) -> None:
        self.x, self.y, self.scaling = x, y, scaling

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b]. See data.Samples."""
        at = torch.from_numpy(index)
        return self.scaling(self.x[at]), self.y[at]


class Sequences:
    """Pieces of a text, and the same one token on. tokens: int64[n]; a piece begins every length"""

    def __init__(self, tokens: Array, length: int) -> None:
        few = np.uint8 if not len(tokens) or tokens.max() < 256 else np.uint32
        self.tokens, self.length = tokens.astype(few), length

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.length

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b] as int64[b, length] twice. See data.Samples."""
        at = index[:, None] * self.length + np.arange(self.length + 1)
        pieces = torch.from_numpy(self.tokens[at].astype(np.int64))
        return pieces[:, :-1], pieces[:, 1:]


class Rows:
    """Rows of two tables of an HDF5 file, which each process opens and reads on its own.

    tables: of inputs and targets
    Raises DataError where they are not numbers, empty, or not of one length.
    """

    def __init__(
        self, tables: Tables, mean: Array, deviation: Array, channels_last: bool = False
    ) -> None:
        self.tables, self.channels_last = tables, channels_last
        self.scaling = Scaling(mean, deviation)
        (x, y), (self.x, self.y) = tables.rooms, tables.names
        kinds = np.dtype(x.dtype), np.dtype(y.dtype)
        if kinds[0] != np.uint8 and kinds[0].kind != "f":
            problem = f"have dtypes {kinds[0]}, {kinds[1]}: inputs must be uint8 or floats"
        elif kinds[1].kind not in "iuf":
            problem = f"have dtypes {kinds[0]}, {kinds[1]}: targets must be integers or floats"
        elif len(x.shape) < 2 or not y.shape or x.shape[0] != y.shape[0] or not x.shape[0]:
            problem = f"have shapes {x.shape} and {y.shape}: must be [n, ...], n alike, 1 or more"
        elif len(mean) and len(mean) != self._shape(x.shape)[0]:
            problem = f"have shapes {x.shape} and {y.shape}: mean has {len(mean)} channels"
        else:
            self.sample_shape, self.target = self._shape(x.shape), tuple(y.shape[1:])
            self.values = kinds[1].kind == "f"
            return
        raise DataError(f"{tables.path}: {self.x} and {self.y} {problem}")

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[-1], *shape[1:-1]) if self.channels_last else tuple(shape[1:])

    def __len__(self) -> int:
        return int(self.tables.rooms[0].shape[0])

    def classes(self) -> int:
        """Return one more than the largest class, or the number of values of a target.

        Raises DataError for classes below 0.
        """
        if self.values:
            return math.prod(self.target)
        classes = self.tables.read(self.y, slice(None))
        if classes.min() < 0:
            raise DataError(f"{self.tables.path}: {self.y}: {classes.min()}: must be 0 or more")
        return int(classes.max()) + 1

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b]. See data.Samples. Raises StoreError for what is damaged."""
        x, y = (self.tables.take(name, index) for name in self.tables.names)
        inputs = torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32, copy=False))
        if self.channels_last:
            inputs = inputs.movedim(-1, 1).contiguous()
        targets = y.astype(np.float32 if self.values else np.int64, copy=False)
        return self.scaling(inputs), torch.from_numpy(targets)


class MapStyle:
    """A map-style torch dataset: anything with a length and items (input, target).

    where: what errors begin with
    classes: the length of the dataset's attribute of this name, as torchvision's have; else 0
    """

    def __init__(self, where: str, dataset: Any) -> None:
        self.where, self.dataset = where, dataset
        named: Any = getattr(dataset, "classes", 0)
        self.classes = len(named) if hasattr(named, "__len__") else int(named)
        self.sample_shape = tuple(self.take(np.zeros(1, np.int64), 0)[0].shape[1:])

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b], each with random numbers of its own. See data.Samples.

        Raises ConfigError where the dataset fails, or has other items than pairs.
        """
        items = []
        for i in index.tolist():
            with _seeded(random_key(seed, i)[0]), told(f"{self.where}: item {i}"):
                items.append(self.dataset[i])
        if not items:
            x, y = self.take(np.zeros(1, np.int64), seed)
            return x[:0], y[:0]
        try:
            x, y = default_collate(items)
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
                return x, y
            problem = f"({type(x).__name__}, {type(y).__name__})"
        except (TypeError, ValueError, RuntimeError) as error:
            problem = " ".join(str(error).split())
        raise ConfigError(f"{self.where}: items do not make a pair of tensors: {problem}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give random, numpy.random and torch numbers by the seed, until the end of the block."""
    # users' transforms call np.random.rand and its like
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
