"""The file of an autoencoder: every key, its type and its default, and the sizes that follow."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..config import ConfigError, Section, dump_toml, override, read_toml, validate
from ..darray.layout import balanced_grid
from ..world.cores import threads_of_rank
from ..world.ranks import Ranks
from .images import Source

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of glibc's mallopt, malloc.h
NEVER = 2**31 - 1  # bytes at the end of the heap, from which they would be given back


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, of any size; return whether it does, which takes glibc.

    Otherwise every tensor above 32 MiB is pages that the kernel clears anew: an iteration of the
    autoencoder with 11 million parameters and 32 images took 428 ms instead of 195 (one core).
    For the whole process and to its end; all threads.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, NEVER))


Count = Annotated[int, Field(ge=1)]
Above = Annotated[float, Field(gt=0)]


class Layer(Section):
    """[[layer]]: filters, L2 pooling and local contrast normalisation, one after the other.

    field, step: side of the receptive field, and from one block of filters to the next, in cells
    maps: filters of a block, which all see the block's receptive field
    pool, pool_step: side of a pool, and from one to the next, in blocks
    contrast: side of the neighbourhood of the normalisation, in pools; odd
    sparsity: weight of the pooled responses in the objective
    epsilon: added to the squares under the root of a pool; floor: the least divisor of contrast
    """

    field: Count
    step: Count = 1
    maps: Count
    pool: Count = 1
    pool_step: Count = 1
    contrast: Count = 1
    sparsity: Annotated[float, Field(ge=0)] = 0.1
    epsilon: Above = 1e-3
    floor: Above = 0.01

    @model_validator(mode="after")
    def _contrast_has_a_middle(self) -> Layer:
        if self.contrast % 2 == 0:
            raise ValueError(f"contrast={self.contrast}: should be odd")
        return self


@dataclass(frozen=True)
class Geometry:
    """A layer on images of a size. Raises ValueError where they are too small for it.

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
        """Pools along both axes: the size of what the layer gives, with maps channels."""
        return _slides(self.blocks, self.layer.pool, self.layer.pool_step)

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
        """The factor on the reconstruction: the least of 1 and (values of an image / filters).

        So the trace of scale W^T W, with rows of length 1, is the rank that it can have at most:
        a tight frame then gives the image back exactly. This choice is ours.
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


Pair = Annotated[tuple[Count, Count], Field(strict=False)]
MAY_DIFFER = (  # from the job of a checkpoint: the model is the same but for rounding
    "train.timeout_s",
    "train.checkpoint_every",
    "train.cell_procs",
    "train.block_procs",
    "train.threads",
    "train.keep_memory",
)


class Train(Section):
    """[train]: stochastic gradient descent with momentum, one layer after the other.

    iterations: of each layer; batch: images of an iteration, the same on all ranks
    learning_rate, momentum: of the steps; seed: of weights and images; dtype: of all values
    checkpoint_every: iterations; timeout_s: the longest wait for others
    cell_procs, block_procs: ranks along both axes that cells, and blocks and pools, are split over;
        not given: as square as can be
    threads: of torch, 0 for the cores that the rank owns
    keep_memory: freed memory stays with the process, see keep_freed_memory: iterations on
        large layers take half the time or less, and up to 1.6 times the memory
    """

    iterations: Count = 200
    batch: Count = 32
    learning_rate: Annotated[float, Field(gt=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    seed: Annotated[int, Field(ge=0)] = 0
    dtype: Literal["float32", "float64"] = "float32"
    cell_procs: Pair | None = None
    block_procs: Pair | None = None
    threads: Annotated[int, Field(ge=0)] = 0
    keep_memory: bool = True
    checkpoint_every: Count = 100
    timeout_s: Annotated[float, Field(gt=0)] = 600.0


class Autoencoder(Section):
    """A whole file; layers are trained in order, each on what those before it give.

    name: of its files; the job file's where it is not given
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
    data: Source
    layer: Annotated[tuple[Layer, ...], Field(strict=False, min_length=1)]
    train: Train = Train()

    def set_process(self, world: Ranks) -> None:
        """Set torch's threads, and what becomes of freed memory, for this process."""
        import torch

        torch.set_num_threads(self.train.threads or threads_of_rank(world))
        if self.train.keep_memory:
            keep_freed_memory()

    def toml(self) -> str:
        """Return the job as TOML text, every default filled in."""
        return dump_toml(self.model_dump(mode="python"))


def load(path: Path, settings: Iterable[str] = ()) -> Autoencoder:
    """Return the job of a file. Raises ConfigError for whatever is wrong in it."""
    raw = override(read_toml(path), settings)
    return validate(Autoencoder, {"name": path.stem} | raw, str(path))


def procs_of(given: tuple[int, int] | None, ranks: int, key: str) -> tuple[int, int]:
    """Return the grid of ranks. Raises ConfigError where a given one has another number."""
    if given is None:
        rows, columns = balanced_grid(ranks, 2)
        return rows, columns
    if given[0] * given[1] != ranks:
        raise ConfigError(f"train.{key}={list(given)}: {given[0] * given[1]} ranks, not {ranks}")
    return given
