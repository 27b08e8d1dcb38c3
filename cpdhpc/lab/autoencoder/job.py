"""Job files of the autoencoder: its images, layers and training.

[data]: the source of images, and their preparation for training.

Every rank reads all images and takes the same random crops, of which it keeps its own cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from ...config import (
    Above0,
    ConfigError,
    Name,
    NotNegative,
    Positive,
    Section,
    Share,
    Whole,
    dump_toml,
    validate,
)
from ...darray.layout import Box, balanced_grid, receptive
from ...ordinary import open_ordinary
from ...whole_files import read_file_of
from ..settings import blaming, override
from ..train.data import find, read_digits, read_idx
from ..train.samples import DataError

Array = npt.NDArray[Any]
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
_CROP, _NOISE = 2, 3  # streams of random numbers
MARGIN = 8  # cells around a square that are whitened with it, so that edges have no effect
CUTOFF = 0.8  # of the whitening's low pass, of the highest frequency: 200 of 256 cycles there


class Source(Section):
    """[data]: images, float32[n, height, width, channels] in 0..1.

    name: digits: of scikit-learn, 8 x 8; idx: the file path, in the format of MNIST; array: a .npy
        file, path, [n, height, width] or with channels last, uint8 or floats in 0..1, read as
        needed; folder: image files in path, of one size or larger than size; synthetic: noise
    path: path of the file or folder, if name needs one
    tile: number of images side by side along both axes, each time in another order
    held_out: share of the images that training never sees, evenly spaced; for probe
    size: side of the random squares that are cut out; 0: nothing is cut
    channels: channels of synthetic images; for files 1 or 3: grey or colours
    prepare: none; contrast: each square to mean 0 and variance 1; whiten: the same after a filter
        f exp(-(f / f0)^4) that flattens the spectrum of natural images
    Source of whiten: Olshausen, Field: Emergence of simple-cell receptive field properties, Nature
    381, 1996.
    """

    name: Literal["digits", "idx", "array", "folder", "synthetic"]
    path: str = ""
    tile: Positive = 1
    size: Whole = 0
    held_out: Share = 0.0
    channels: Literal[1, 3] = 1
    prepare: Literal["none", "contrast", "whiten"] = "contrast"

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Source:
        if self.name in ("idx", "array", "folder") and not self.path:
            raise ValueError(f"name={self.name!r} needs path")
        if self.name in ("folder", "synthetic") and not self.size:
            raise ValueError(f"name={self.name!r} needs size")
        return self

    def load(self, held_out: bool = False) -> Images:
        """Return the images for training, or the held-out ones.

        Raises DataError, naming the file, if one is unfit or none is held out.
        """
        return Images(self, *LOADERS[self.name](self), held_out)


class Images:
    """Images to take batches from. Raises DataError if they are smaller than the squares.

    whole: [height, width, channels] each; white: their value for 1
    shape: height and width of a square; channels: of its cells
    """

    def __init__(
        self, source: Source, whole: Sequence[Array], white: int, held_out: bool = False
    ) -> None:
        self.source, self.whole, self.white = source, whole, white
        n = len(whole)
        held = np.linspace(0, max(0, n - 1), round(n * source.held_out)).round().astype(int)
        self.used = held if held_out else np.setdiff1d(np.arange(n), held)
        if n and not self.used.size:
            raise DataError(f"data.held_out={source.held_out}: leaves none of {n} images")
        alike = isinstance(whole, np.ndarray)
        shapes = {each.shape for each in (whole[:1] if alike else whole)}
        if not shapes:
            raise DataError(f"{source.path}: holds no images")
        if len(shapes) > 1 and (source.tile > 1 or not source.size):
            raise DataError(
                f"{source.path}: images differ in size: data.size must cut squares, without tile"
            )
        side = min(min(shape[:2]) for shape in shapes) * source.tile
        if source.size > side:
            raise DataError(f"data.size={source.size}: an image has {side} cells on a side")
        first, size = next(iter(shapes)), source.size
        self.shape = (size, size) if size else (first[0] * source.tile, first[1] * source.tile)
        self.channels = int(first[2])

    def batch(self, n: int, seed: int, number: int) -> Array:
        """Return float32[height, width, channels, n], batch number, the same on all ranks.

        Raises DataError if a value is not finite.
        """
        words = np.random.SeedSequence([seed, _CROP, number])
        draws = np.random.Philox(words).random_raw(n * (self.source.tile**2 + 2)).reshape(n, -1)
        squares = [self._square(draw) for draw in draws]
        return np.ascontiguousarray(np.stack(squares, axis=3), np.float32)

    def _square(self, draw: Array) -> Array:
        tile = self.source.tile
        chosen = [self.whole[self.used[int(i % len(self.used))]] for i in draw[:-2]]
        rows = [np.concatenate(chosen[k * tile : (k + 1) * tile], axis=1) for k in range(tile)]
        canvas = np.concatenate(rows, axis=0)
        room = [a - b + 1 for a, b in zip(canvas.shape, self.shape, strict=False)]
        top, left = (int(word % extent) for word, extent in zip(draw[-2:], room, strict=True))
        return self.prepared(canvas, top, left)

    def prepared(self, canvas: Array, top: int, left: int) -> Array:
        """Return float64 of a square of a canvas, prepared for layers.

        Raises DataError if a value is not finite.
        """
        (height, width), margin = self.shape, MARGIN if self.source.prepare == "whiten" else 0
        above, before = min(margin, top), min(margin, left)
        wide = canvas[top - above : top + height + margin, left - before : left + width + margin]
        if not np.isfinite(wide).all():
            raise DataError(f"{self.source.path}: an image holds NaN or infinity")
        inner = slice(above, above + height), slice(before, before + width)
        return PREPARE[self.source.prepare](np.asarray(wide, np.float64) / self.white, inner)


Inner = tuple[slice, slice]  # the square in an array that may have a margin


def _standard(wide: Array, inner: Inner) -> Array:
    """Return values of mean 0 and variance 1; a constant square becomes zeros."""
    square = wide[inner]
    centred = square - square.mean()
    deviation = centred.std()
    return centred / deviation if deviation > 1e-6 else np.zeros_like(centred)


def _whitened(wide: Array, inner: Inner) -> Array:
    """Return a filtered square. It is filtered with its margin, and mirrored: otherwise the jumps
    between opposite edges, which the periodic transform sees, would hold most of the energy.
    """
    mirrored = np.concatenate([wide, wide[::-1]])
    mirrored = np.concatenate([mirrored, mirrored[:, ::-1]], axis=1)
    frequencies = np.meshgrid(*(np.fft.fftfreq(n) for n in mirrored.shape[:2]), indexing="ij")
    f = np.hypot(*frequencies) / 0.5  # 1: the highest along an axis
    response = (f * np.exp(-((f / CUTOFF) ** 4)))[..., None]
    spectrum = np.fft.fft2(mirrored, axes=(0, 1)) * response
    return _standard(np.fft.ifft2(spectrum, axes=(0, 1)).real, inner)


PREPARE: dict[str, Callable[[Array, Inner], Array]] = {
    "none": lambda wide, inner: wide[inner],
    "contrast": _standard,
    "whiten": _whitened,
}


Loaded = tuple[Sequence[Array], int]


def _digits(source: Source) -> Loaded:
    return list(read_digits()[0][..., None]), 16


def _idx(source: Source) -> Loaded:
    path = Path(source.path)
    return list(read_idx(find(path.parent, path.name), dims=3)[..., None]), 255


def _array(source: Source) -> Loaded:
    try:
        values = np.load(source.path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{source.path}: cannot be read as .npy: {error}") from None
    if values.ndim not in (3, 4) or not values.size:
        raise DataError(f"{source.path}: shape {values.shape}: must be images, maybe with channels")
    if values.dtype != np.uint8 and values.dtype.kind != "f":
        raise DataError(f"{source.path}: is of {values.dtype}: must be uint8, or floats in 0..1")
    values = values[..., None] if values.ndim == 3 else values
    return values, 255 if values.dtype == np.uint8 else 1


def _folder(source: Source) -> Loaded:
    from PIL import Image, UnidentifiedImageError

    found = []
    for path in sorted(Path(source.path).rglob("*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        try:
            with open(path, "rb", opener=open_ordinary) as file, Image.open(file) as image:
                pixels = np.asarray(image.convert("L" if source.channels == 1 else "RGB"))
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        found.append(pixels.reshape(*pixels.shape[:2], source.channels))
    if not found:
        raise DataError(f"{source.path}: holds no image files ({', '.join(SUFFIXES)})")
    return found, 255


def _synthetic(source: Source) -> Loaded:
    shape = 4, source.size, source.size, source.channels
    return list(np.random.Generator(np.random.Philox(_NOISE)).random(shape)), 1


LOADERS = {
    "digits": _digits,
    "idx": _idx,
    "array": _array,
    "folder": _folder,
    "synthetic": _synthetic,
}


class Layer(Section):
    """[[layer]]: filters, L2 pooling and local contrast normalisation, one after the other.

    field, step: side of the receptive field, and distance of blocks of filters, in cells
    maps: filters of a block, which all see the block's receptive field
    pool, pool_step: side of a pool, and distance of pools, in blocks
    contrast: side of the neighbourhood of the normalisation, in pools; odd
    sparsity: weight of the pooled responses in the objective
    epsilon: added to the squares under the root of a pool; floor: least divisor of contrast
    """

    field: Positive
    step: Positive = 1
    maps: Positive
    pool: Positive = 1
    pool_step: Positive = 1
    contrast: Positive = 1
    sparsity: NotNegative = 0.1
    epsilon: Above0 = 1e-3
    floor: Above0 = 0.01

    @model_validator(mode="after")
    def _contrast_has_a_middle(self) -> Layer:
        if self.contrast % 2 == 0:
            raise ValueError(f"contrast={self.contrast}: should be odd")
        return self


@dataclass(frozen=True)
class Geometry:
    """A layer on images of a size. Raises ValueError if they are too small for it.

    image: cells along both axes; channels: values of a cell
    """

    layer: Layer
    image: tuple[int, int]
    channels: int

    def __post_init__(self) -> None:
        needed = {"field": (self.layer.field, self.image), "pool": (self.layer.pool, self.blocks)}
        for name, (size, extent) in needed.items():
            if size > min(extent):
                raise ValueError(f"{name}={size}: more than the {min(extent)} cells there are")

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of filters along both axes."""
        return _slides(self.image, self.layer.field, self.layer.step)

    @property
    def pools(self) -> tuple[int, int]:
        """Pools along both axes: the size of the layer's output, with maps channels."""
        return _slides(self.blocks, self.layer.pool, self.layer.pool_step)

    def cells_of(self, block: Box) -> Box:
        """Return the cells of some blocks' fields, to the image's end for the last block."""
        window = receptive(block, self.layer.field, self.layer.step)
        if block.empty:
            return window
        ends = zip(block.stop, window.stop, self.blocks, self.image, strict=True)
        return Box(window.start, tuple(n if last == m else end for last, end, m, n in ends))

    @property
    def inputs(self) -> int:
        """Values in a receptive field."""
        return self.layer.field**2 * self.channels

    @property
    def filters(self) -> int:
        """Filters of all blocks."""
        return self.blocks[0] * self.blocks[1] * self.layer.maps

    @property
    def parameters(self) -> int:
        """Weights of all filters."""
        return self.filters * self.inputs

    @property
    def scale(self) -> float:
        """The factor on the reconstruction: min(1, values of an image / filters).

        So the trace of scale W^T W, with rows of length 1, is its largest possible rank:
        a tight frame then reconstructs the image exactly. This choice is ours.
        """
        return min(1.0, self.image[0] * self.image[1] * self.channels / self.filters)

    def flop(self, batch: int) -> int:
        """Floating-point operations of an iteration in matrix products.

        Five products of 2 parameters batch each: responses, reconstruction, and the gradients of
        both with respect to the weights and of the reconstruction with respect to the responses.
        """
        return 10 * self.parameters * batch


def _slides(extent: tuple[int, int], size: int, step: int) -> tuple[int, int]:
    return (extent[0] - size) // step + 1, (extent[1] - size) // step + 1


def stack(layers: tuple[Layer, ...], image: tuple[int, int], channels: int) -> list[Geometry]:
    """Return the geometry of each layer of a stack. Raises ValueError, naming the layer."""
    found: list[Geometry] = []
    for number, layer in enumerate(layers):
        try:
            found.append(Geometry(layer, image, channels))
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from None
        image, channels = found[-1].pools, layer.maps
    return found


Pair = Annotated[tuple[Positive, Positive], Field(strict=False)]
MAY_DIFFER = (  # from the job of a checkpoint: the model is the same except for rounding
    "train.timeout_s",
    "train.checkpoint_every",
    "train.cell_procs",
    "train.block_procs",
    "train.threads",
    "train.keep_memory",
    "train.device",
    "train.oversubscribe_gpus",
)


class Train(Section):
    """[train]: stochastic gradient descent with momentum, one layer after the other.

    iterations: iterations of each layer; batch: images of an iteration, the same on all ranks
    learning_rate, momentum: rate and momentum of the steps; seed: seed of weights and images
    dtype: dtype of all values
    checkpoint_every: iterations between checkpoints; timeout_s: longest wait for other processes
    cell_procs, block_procs: ranks along both axes of cells, and of blocks and pools; default: as
        square as possible
    threads: threads of torch, 0 for the cores that the rank owns
    keep_memory: freed memory stays with the process, see keep_freed_memory: memory for batches and
        the outputs of lower layers is not cleared again
    device: device of the layers: cpu, gpu; oversubscribe_gpus: processes of a node may share GPUs
    """

    iterations: Positive = 200
    batch: Positive = 32
    learning_rate: Above0 = 0.01
    momentum: Share = 0.9
    seed: Whole = 0
    dtype: Literal["float32", "float64"] = "float32"
    cell_procs: Pair | None = None
    block_procs: Pair | None = None
    threads: Whole = 0
    keep_memory: bool = True
    device: Literal["cpu", "gpu"] = "cpu"
    oversubscribe_gpus: bool = False
    checkpoint_every: Positive = 100
    timeout_s: Above0 = 600.0


class Autoencoder(Section):
    """A whole file; layers are trained in order, each on the output of those before it.

    name: part of file names; default: the name of the job file
    """

    name: Name
    data: Source
    layer: Annotated[tuple[Layer, ...], Field(strict=False, min_length=1)]
    train: Train = Train()

    def toml(self) -> str:
        """Return the job as TOML text, every default filled in."""
        return dump_toml(self.model_dump(mode="python"))


def load(path: Path, settings: Iterable[str] = ()) -> Autoencoder:
    """Return the job of a file. Raises ConfigError for any error in it."""

    def read(some: Iterable[str]) -> Autoencoder:
        raw = override(read_file_of(path, "layer"), some)
        return validate(Autoencoder, {"name": path.stem} | raw, str(path))

    return blaming(read, settings, path)


def procs_of(given: tuple[int, int] | None, ranks: int, key: str) -> tuple[int, int]:
    """Return the grid of ranks. Raises ConfigError if a given one has another number of ranks."""
    if given is None:
        columns, rows = balanced_grid(ranks, 2)  # more along rows, whose cells are contiguous
        return rows, columns
    if given[0] * given[1] != ranks:
        raise ConfigError(f"train.{key}={list(given)}: {given[0] * given[1]} ranks, not {ranks}")
    return given
