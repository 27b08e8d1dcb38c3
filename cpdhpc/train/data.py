"""Data sets as arrays, where they come from, and which samples an iteration takes."""

from __future__ import annotations

import gzip
import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ..config import Section, UserError
from ..partition import split

if TYPE_CHECKING:
    import torch

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
    def image_shape(self) -> tuple[int, ...]:
        """Height and width in pixels."""
        return tuple(map(int, self.train_x.shape[1:]))


class Samples(Protocol):
    """Pairs (input, target) by number, as train/samples.py has them."""

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
    """

    train: Samples
    test: Samples
    image_shape: tuple[int, ...]
    classes: int


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


class Digits(Data):
    """[data] name = "digits": 1,797 handwritten digits of 8 x 8 pixels, which scikit-learn has.

    test_share: of all images; split_seed: by which they are chosen
    Source: Alpaydin, Kaynak: Optical recognition of digits, UCI 1998.
    """

    name: Literal["digits"] = "digits"
    test_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    split_seed: Annotated[int, Field(ge=0)] = 0

    def load(self) -> Dataset:
        """Return the images, split by split_seed into training and test samples."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = (images.reshape(-1, 8, 8) / 16).astype(np.float32)  # pixels are 0..16
        y = labels.astype(np.int64)
        train, test = split_order(len(y), self.test_share, self.split_seed)
        return Dataset(x[train], y[train], x[test], y[test], classes=10)


UINT8 = 0x08  # the type byte of the magic number


class Idx(Data):
    """[data] name = "idx": four files in one directory, each also found with .gz at its end.

    dir: the directory; train_images, train_labels, test_images, test_labels: names of the files
    train_samples, test_samples: the first ones that are taken; all where not given
    """

    name: Literal["idx"] = "idx"
    dir: str
    train_images: str = "train-images-idx3-ubyte"
    train_labels: str = "train-labels-idx1-ubyte"
    test_images: str = "t10k-images-idx3-ubyte"
    test_labels: str = "t10k-labels-idx1-ubyte"
    train_samples: int | None = Field(None, ge=1)
    test_samples: int | None = Field(None, ge=1)

    def load(self) -> Dataset:
        """Return the images and labels. Raises DataError, naming the file, where one is unfit."""
        train = self._pair(self.train_images, self.train_labels, self.train_samples)
        test = self._pair(self.test_images, self.test_labels, self.test_samples)
        if train[0].shape[1:] != test[0].shape[1:]:
            raise DataError(
                f"{self.dir}: training images are {train[0].shape[1:]}, "
                f"test images {test[0].shape[1:]} pixels"
            )
        return Dataset(*train, *test, classes=int(max(train[1].max(), test[1].max())) + 1)

    def _pair(self, images: str, labels: str, samples: int | None) -> tuple[Array, Array]:
        x = read_idx(find(Path(self.dir), images), dims=3)
        y = read_idx(find(Path(self.dir), labels), dims=1)
        if len(x) != len(y) or not len(x):
            raise DataError(f"{Path(self.dir) / images}: {len(x)} images, but {len(y)} labels")
        x, y = x[:samples], y[:samples]
        return (x / np.float32(255)).astype(np.float32), y.astype(np.int64)


def find(directory: Path, name: str) -> Path:
    """Return the path of a file, or of its compressed form. Raises DataError where neither is."""
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{directory / name}: there is no such file, nor one with .gz at its end")


def read_idx(path: Path, dims: int) -> Array:
    """Return uint8[...] of an IDX file with that number of dimensions.

    Raises DataError where the magic number, the dimensions or the length are not as they should be.
    Source: Y. LeCun, THE MNIST DATABASE, "file formats": big-endian, type and rank in the magic.
    """
    content = _bytes(path)
    header = 4 + 4 * dims
    if len(content) < header:
        raise DataError(f"{path}: {len(content)} bytes, the header alone has {header}")
    magic = int.from_bytes(content[:4], "big")
    if magic != UINT8 << 8 | dims:
        raise DataError(f"{path}: magic number {magic:#010x}, should be {UINT8 << 8 | dims:#010x}")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dims, offset=4))
    expected = header + math.prod(shape)
    if len(content) != expected:
        size = " x ".join(map(str, shape))
        raise DataError(f"{path}: {len(content)} bytes, {size} values need {expected}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except OSError as error:  # BadGzipFile is one too
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        size = path.stat().st_size
        raise DataError(f"{path}: {size} bytes, the gzip stream is damaged: {error}") from None


DATA: dict[str, type[Data]] = {"digits": Digits, "idx": Idx}
