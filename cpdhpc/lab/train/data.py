"""Samples as training sees them, and which of them an iteration takes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ...config import Section, UserError
from ...partition import split

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

_SPLIT, _EPOCH = 1, 2  # streams of random numbers


class DataError(UserError):
    """Data that is missing or damaged."""


@dataclass(frozen=True)
class Dataset:
    """Inputs, as images in 0..1, and their labels or other targets, in memory.

    train_x, test_x: float32[n, ...], or uint8[n, ...] that are to be divided by 255 as they are
        taken, which needs a quarter of the memory
    train_y, test_y: int64[n], 0..classes - 1; or float32[n, classes], values to be found
    mean, deviation: float32[channels], by which inputs are normalised then; empty: they are not
    """

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    classes: int
    mean: Array = field(default_factory=lambda: np.empty(0, np.float32))
    deviation: Array = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an input."""
        return tuple(map(int, self.train_x.shape[1:]))


class Samples(Protocol):
    """Pairs (input, target) by number, as lab/train/samples.py has them."""

    def __len__(self) -> int: ...

    def take(self, index: Array, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples int64[b] as two tensors whose first axis is the sample.

        seed: of what a sample is to chance, with its number: so alike on any number of ranks
        """
        ...


@dataclass(frozen=True)
class Source:
    """Samples that are no arrays.

    image_shape: of an input; classes: 0 where they are unknown
    directory: where modules of the user's that make the items are looked for; None: there are none
    """

    train: Samples
    test: Samples
    image_shape: tuple[int, ...]
    classes: int
    directory: str | None = None


def permutation(n: int, seed: int, *path: int) -> Array:
    """Return int64[n], the order of 0..n-1 that (seed, *path) chooses, the same everywhere.

    It is made of the raw stream of a bit generator, which NumPy promises not to change.
    """
    draws = np.random.Philox(np.random.SeedSequence([seed, *path])).random_raw(n)
    return np.argsort(draws, kind="stable")


def split_order(n: int, test_share: float, seed: int) -> tuple[Array, Array]:
    """Return the indices of the training samples and those of the test samples."""
    order = permutation(n, seed, _SPLIT)
    test = min(max(round(n * test_share), 1), n - 1)
    return order[test:], order[:test]


def epoch_order(n: int, seed: int, epoch: int) -> Array:
    """Return the order in which an epoch goes through n samples, the same on all ranks."""
    return permutation(n, seed, _EPOCH, epoch)


def shard(batch: Array, ranks: int, rank: int) -> Array:
    """Return the part of a global batch that one rank computes on; it may be empty."""
    start, stop = split(batch.size, ranks, rank)
    return batch[start:stop]


class Data(Section):
    """[data]: where samples come from, named in DATA."""

    @abstractmethod
    def load(self) -> Dataset | Source:
        """Return the samples. Raises DataError, naming the file, where one is missing or unfit."""
