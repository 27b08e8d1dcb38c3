"""Data sets of job files, and augmentation of their images."""

from __future__ import annotations

import gzip
import importlib.util
import math
import zlib
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from ... import store
from ...config import Above0, ConfigError, NotNegative, Positive, Section, Whole
from ...randomness import random_key
from .samples import Array, DataError, Dataset, Samples, StreamedData, split_order

if TYPE_CHECKING:
    import torch


class Data(Section):
    """[data]: the source of samples, named in DATA."""

    @abstractmethod
    def load(self) -> Dataset | StreamedData:
        """Return the samples. Raises DataError, naming the file, if one is missing or unfit."""


STREAM = 5  # of random numbers


class Augment(Section):
    """[augment]: random changes of training images, drawn by seed, epoch and sample.

    crop: zeros added on each side before a random cut to the image's size; 0: none
    flip: left and right are exchanged in half of the images
    cutout: side of a square around a random pixel that becomes zero, cut at the borders; 0: none
    Zeros are those of the scaled inputs, which is the mean if they are normalised.
    Source: crop and flip as He et al.: Deep residual learning, CVPR 2016, section 4.2; DeVries,
    Taylor: Improved regularization with cutout, arXiv 1708.04552.
    """

    crop: Whole = 0
    flip: bool = False
    cutout: Whole = 0

    def of(self, samples: Samples) -> Samples:
        """Return the samples, with images that change when they are taken."""
        return _Augmented(samples, self) if self.crop or self.flip or self.cutout else samples

    def draws(self, index: Array, seed: int, height: int, width: int) -> Array:
        """Return int64[b, 5]: rows and columns of the shift, flipped, pixel of the cutout."""
        ends = np.array([2 * self.crop + 1, 2 * self.crop + 1, 2, height, width])
        words = [
            [word for part in range(3) for word in random_key(seed, STREAM, item, part)][:5]
            for item in index.tolist()
        ]
        return np.array(words, np.int64).reshape(-1, 5) % ends


class _Augmented:
    def __init__(self, samples: Samples, augment: Augment) -> None:
        self.samples, self.augment = samples, augment

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, index: Array, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples int64[b]. Raises ConfigError if they are not images."""
        import torch

        x, y = self.samples.take(index, seed)
        if x.ndim not in (3, 4) or not x.is_floating_point():
            came = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            raise ConfigError(
                f"augment: inputs {came}: must be floats [b, height, width] or "
                "[b, channels, height, width]"
            )
        height, width = x.shape[-2:]
        drawn = torch.from_numpy(self.augment.draws(index, seed, height, width))
        down, right, flipped, centre_y, centre_x = (each[:, None] for each in drawn.T)
        rows, columns = torch.arange(height), torch.arange(width)
        side, before = self.augment.cutout, self.augment.cutout // 2
        top, left = rows - centre_y + before, columns - centre_x + before
        if self.augment.flip:
            columns = torch.where(flipped == 1, width - 1 - columns, columns)
        padded = torch.nn.functional.pad(x, [self.augment.crop] * 4)
        where = (down + rows)[:, :, None], (right + columns)[:, None, :]
        images = padded.movedim(1, -1) if x.ndim == 4 else padded
        cut = images[torch.arange(len(x))[:, None, None], *where]  # [b, height, width(, channels)]
        changed = cut.movedim(-1, 1) if x.ndim == 4 else cut
        if side:
            inside = ((top >= 0) & (top < side))[:, :, None] & ((left >= 0) & (left < side))[
                :, None
            ]
            changed = changed.masked_fill(inside if x.ndim == 3 else inside[:, None], 0)
        return changed.contiguous(), y


@cache
def read_digits() -> tuple[Array, Array]:
    """Return float64[1797, 8, 8] pixels of 0..16 and int64[1797] labels, from scikit-learn's file.

    Read-only. Same as sklearn.datasets.load_digits, whose import takes longer than a small
    training. Raises ModuleNotFoundError without scikit-learn.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",")
    images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
    images.flags.writeable = labels.flags.writeable = False
    return images, labels


class Digits(Data):
    """[data] name = "digits": 1,797 handwritten digits of 8 x 8 pixels, from scikit-learn.

    test_share: share of all images for the test; split_seed: selects the test images
    Source: Alpaydin, Kaynak: Optical recognition of digits, UCI 1998.
    """

    name: Literal["digits"] = "digits"
    test_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    split_seed: Whole = 0

    def load(self) -> Dataset:
        """Return the images, split by split_seed into training and test samples."""
        images, y = read_digits()
        x = (images / 16).astype(np.float32)  # pixels are 0..16
        train, test = split_order(len(y), self.test_share, self.split_seed)
        return Dataset(x[train], y[train], x[test], y[test], classes=10)


UINT8 = 0x08  # the type byte of the magic number


class Idx(Data):
    """[data] name = "idx": four files in one directory, each also accepted with suffix .gz.

    dir: directory of the files
    train_images, train_labels, test_images, test_labels: names of the files
    train_samples, test_samples: number of samples to use, from the first on; by default all
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
        """Return the images and labels. Raises DataError, naming the file, if one is unfit."""
        train = self._pair(self.train_images, self.train_labels, self.train_samples)
        test = self._pair(self.test_images, self.test_labels, self.test_samples)
        if train[0].shape[1:] != test[0].shape[1:]:
            raise DataError(
                f"{self.dir}: training images are {train[0].shape[1:]}, "
                f"test images {test[0].shape[1:]} pixels"
            )
        return Dataset(*train, *test, classes=int(max(train[1].max(), test[1].max())) + 1)

    def _pair(self, images: str, labels: str, samples: int | None) -> tuple[Array, Array]:
        x = read_idx(find(Path(self.dir), images, "data.dir: "), dims=3)
        y = read_idx(find(Path(self.dir), labels, "data.dir: "), dims=1)
        if len(x) != len(y) or not len(x):
            raise DataError(f"{Path(self.dir) / images}: {len(x)} images, but {len(y)} labels")
        x, y = x[:samples], y[:samples]
        return (x / np.float32(255)).astype(np.float32), y.astype(np.int64)


def find(directory: Path, name: str, key: str = "") -> Path:
    """Return the path of a file, or of its compressed form. Raises DataError if neither exists.

    key: of the job file, which contains the path: the prefix of the message
    """
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{key}{directory / name}: there is no such file, nor one with .gz at its end")


def read_idx(path: Path, dims: int) -> Array:
    """Return uint8[...] of an IDX file with that number of dimensions.

    Raises DataError if the magic number, the dimensions or the length are wrong.
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


class Cifar10(Data):
    """[data] name = "cifar10": the binary version of CIFAR-10, colour images of 32 x 32 pixels.

    dir: directory of data_batch_1.bin to data_batch_5.bin and test_batch.bin, or these with .gz
    normalise: subtract each channel's mean over the training images, and divide by its deviation
    train_samples, test_samples: number of samples to use, from the first on; by default all
    Source: Krizhevsky: Learning multiple layers of features from tiny images, 2009; a record is a
    label and 3 x 32 x 32 bytes, channels first.
    """

    name: Literal["cifar10"] = "cifar10"
    dir: str
    normalise: bool = False
    train_samples: int | None = Field(None, ge=1)
    test_samples: int | None = Field(None, ge=1)

    def load(self) -> Dataset:
        """Return the images, in bytes. Raises DataError, naming the file, if one is unfit."""
        names = [f"data_batch_{number}.bin" for number in range(1, 6)]
        train_x, train_y = self._records(names, self.train_samples)
        test = self._records(["test_batch.bin"], self.test_samples)
        if not self.normalise:
            return Dataset(train_x, train_y, *test, classes=10)
        levels = np.arange(256) / 255
        counts = [np.bincount(train_x[:, c].ravel(), minlength=256) for c in range(3)]
        share = np.array(counts) / train_x[:, 0].size  # of each level of each channel
        mean = share @ levels
        deviation = np.sqrt((share * np.square(levels - mean[:, None])).sum(1))
        if not deviation.all():
            raise DataError(f"{self.dir}: normalise=true: a channel has one value everywhere")
        by = mean.astype(np.float32), deviation.astype(np.float32)
        return Dataset(train_x, train_y, *test, 10, *by)

    def _records(self, names: list[str], samples: int | None) -> tuple[Array, Array]:
        size, parts = 1 + 3 * 32 * 32, []
        for name in names:
            path = find(Path(self.dir), name, "data.dir: ")
            content = _bytes(path)
            if not content or len(content) % size:
                raise DataError(f"{path}: {len(content)} bytes, must be records of {size}")
            parts.append(np.frombuffer(content, np.uint8).reshape(-1, size))
            if (most := int(parts[-1][:, 0].max())) > 9:
                raise DataError(f"{path}: has label {most}, must be 0 to 9")
        records = np.concatenate(parts)[:samples]
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


class Synthetic(Data):
    """[data] name = "synthetic": random inputs of any shape, targets by a hidden linear teacher.

    shape: shape of an input; task: "classification": targets are the largest of the teacher's
        outputs; "regression": the outputs themselves
    classes: outputs of the teacher; train_samples, test_samples: numbers of samples
    noise: share of the labels that are drawn anew; for regression the size of added noise
    data_seed: seed of inputs, teacher and noise
    All are in memory. Inputs and teacher are multiples of 1/64, so labels are exact everywhere.
    """

    name: Literal["synthetic"] = "synthetic"
    shape: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] = (16,)
    task: Literal["classification", "regression"] = "classification"
    classes: Positive = 10
    train_samples: Positive = 1000
    test_samples: Positive = 200
    noise: NotNegative = 0.0
    data_seed: Whole = 0

    def load(self) -> Dataset:
        """Return the samples, the same on all machines."""
        n, values = self.train_samples + self.test_samples, math.prod(self.shape)
        x = self._sixty_fourths(INPUTS, (n, values))
        teacher = self._sixty_fourths(TEACHER, (self.classes, values))
        y = np.matmul(x, teacher.T) / math.sqrt(values)  # products are exact
        if self.task == "regression":
            noise = self.noise * self._sixty_fourths(NOISE, y.shape)
            y = (y + noise).astype(np.float32)
        else:
            y = y.argmax(1)
            draws = np.random.Philox(np.random.SeedSequence([self.data_seed, NOISE]))
            chance, label = draws.random_raw(2 * n).reshape(2, n) >> np.uint64(11)
            again = chance * 2.0**-53 < self.noise
            y[again] = (label % np.uint64(self.classes))[again]
        x = x.astype(np.float32).reshape(n, *self.shape)
        (train_x, test_x), (train_y, test_y) = (
            np.split(each, [self.train_samples]) for each in (x, y)
        )
        return Dataset(train_x, train_y, test_x, test_y, classes=self.classes)

    def _sixty_fourths(self, stream: int, shape: tuple[int, ...]) -> Array:
        """Return float64, multiples of 1/64 from -2 to below 2, uniformly drawn."""
        size = math.prod(shape)
        draws = np.random.Philox(np.random.SeedSequence([self.data_seed, stream]))
        raw = draws.random_raw(-(-size // 8)).astype("<u8").view(np.int8)
        return (raw[:size] / 64).reshape(shape)


INPUTS, TEACHER, NOISE = 1, 2, 3  # streams of random numbers


class Text(Data):
    """[data] name = "text": the characters of text files, each to be predicted from earlier ones.

    files: text files in UTF-8, which are joined; length: characters of a sample
    test_share: share of the text for the test, from its end
    Inputs are int64[length], indices into the sorted characters of all files; targets are the same,
    one character later. classes is the number of different characters.
    """

    name: Literal["text"] = "text"
    files: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    length: Positive = 64
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def load(self) -> StreamedData:
        """Return the samples. Raises DataError, naming the file, for one that is not text."""
        from .samples import Sequences

        text = np.concatenate([self._points(Path(name)) for name in self.files])
        known, tokens = np.unique(text, return_inverse=True)
        start = len(text) - round(len(text) * self.test_share)
        train, test = (Sequences(part, self.length) for part in (tokens[:start], tokens[start:]))
        for name, part, samples in (("train", start, train), ("test", len(text) - start, test)):
            if not len(samples):
                raise DataError(
                    f"{', '.join(self.files)}: {name} part of {part} characters: must be above "
                    f"length={self.length}"
                )
        return StreamedData(train, test, (self.length,), len(known))

    @staticmethod
    def _points(path: Path) -> Array:
        content = _bytes(path)
        try:
            return np.frombuffer(content.decode("utf-8").encode("utf-32-le"), "<u4")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: is not text in UTF-8: {error.reason} at byte {error.start}"
            ) from None


class Hdf5(Data):
    """[data] name = "hdf5": rows of datasets, of which each rank reads only those that it needs.

    train, test: paths of the files; x, y: names of the datasets of inputs and targets, rows first
    classes: number of classes of integer targets; by default found by reading them
    channels_last: inputs are [n, height, width, channels]; they are converted to channels first
    mean, deviation: mean and deviation of each channel, to normalise inputs
    uint8 inputs are divided by 255 first; floats are not. Integer targets are classes, floats are
    values.
    """

    name: Literal["hdf5"] = "hdf5"
    train: str
    test: str
    x: str = "x"
    y: str = "y"
    classes: Annotated[int | None, Field(ge=1)] = None
    channels_last: bool = False
    mean: Annotated[tuple[float, ...], Field(strict=False)] = ()
    deviation: Annotated[tuple[Above0, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _both_or_none(self) -> Hdf5:
        if len(self.mean) != len(self.deviation):
            raise ValueError("mean and deviation: must have a value for each channel, or none")
        return self

    def load(self) -> StreamedData:
        """Return the samples. Raises UserError, naming the file, if one is unfit."""
        from .samples import TableRows

        mean, deviation = np.array(self.mean, np.float32), np.array(self.deviation, np.float32)
        made = []
        for name in (self.train, self.test):
            tables = store.Tables(Path(name), (self.x, self.y))
            made.append(TableRows(tables, mean, deviation, self.channels_last))
        train, test = made
        if train.sample_shape != test.sample_shape or train.target != test.target:
            raise DataError(
                f"{self.test}: inputs {test.sample_shape} and targets {test.target}, in "
                f"{self.train} they are {train.sample_shape} and {train.target}"
            )
        return StreamedData(train, test, train.sample_shape, self.classes or train.classes())


DATA: dict[str, type[Data]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "hdf5": Hdf5,
    "idx": Idx,
    "synthetic": Synthetic,
    "text": Text,
}
