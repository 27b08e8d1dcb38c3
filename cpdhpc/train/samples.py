"""Samples as training takes them: arrays in memory, or a map-style dataset of the user's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from ..config import ConfigError
from ..randomness import random_key

Array = npt.NDArray[Any]
Pair = tuple[torch.Tensor, torch.Tensor]


class InMemory:
    """Inputs and targets as tensors whose first axis is the sample."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Array, seed: int) -> Pair:
        """Return the samples int64[b]. See data.Samples."""
        at = torch.from_numpy(index)
        return self.x[at], self.y[at]


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
            with _seeded(random_key(seed, i)[0]):
                try:
                    items.append(self.dataset[i])
                except Exception as error:
                    said = " ".join(str(error).split())
                    raise ConfigError(
                        f"{self.where}: item {i}: {type(error).__name__}: {said}"
                    ) from error
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
