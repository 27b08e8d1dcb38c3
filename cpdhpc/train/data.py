"""Data sets as arrays, and which samples an iteration takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import UserError
from ..ops.reference import random31
from ..partition import split
from ..randomness import random_key

Array = npt.NDArray[Any]

_SPLIT, _EPOCH = 1, 2  # streams of random numbers


class DataError(UserError):
    """Data that is missing or damaged."""


@dataclass(frozen=True)
class Dataset:
    """Images in 0..1 and their labels.

    train_x, test_x: float32[n, height, width]; train_y, test_y: int64[n], 0..classes - 1
    """

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    classes: int

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return int(self.train_x.shape[1]), int(self.train_x.shape[2])


def permutation(n: int, seed: int, *path: int) -> Array:
    """Return int64[n], the order of 0..n-1 that (seed, *path) chooses, the same everywhere."""
    draws = random31(random_key(seed, *path), np.arange(n, dtype=np.uint64))
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
