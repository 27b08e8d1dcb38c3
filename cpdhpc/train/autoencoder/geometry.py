"""Sizes of a macro layer, and what it costs: numbers alone, without arrays and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from ...config import Section

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
                raise ValueError(f"layer: {name}={size}: more than the {extent} cells there are")

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
