"""IDX files, the format of MNIST and its relatives, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ..config import Section
from .data import DataError, Dataset

Array = npt.NDArray[Any]

UINT8 = 0x08  # the type byte of the magic number


class Idx(Section):
    """[data] name = "idx": four files in one directory, each also found with .gz at its end."""

    name: Literal["idx"] = "idx"
    dir: str
    train_images: str = "train-images-idx3-ubyte"
    train_labels: str = "train-labels-idx1-ubyte"
    test_images: str = "t10k-images-idx3-ubyte"
    test_labels: str = "t10k-labels-idx1-ubyte"
    train_samples: int | None = Field(None, ge=1)  # the first ones; all where it is not given
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
