"""What a model of a job file is, and the images that those for images take."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...config import Section

if TYPE_CHECKING:
    import torch

Positive = Annotated[int, Field(ge=1)]


class Model(Section):
    """[model]: a network, named in MODELS."""

    @abstractmethod
    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is [batch, *sample_shape].

        classes: 0 where the data does not say. Raises ValueError where it does not go with the
        samples.
        """


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Return channels, height and width of images [height, width] or [channels, height, width].

    model: what the error begins with
    Raises ValueError for other shapes, and for images of fewer rows or columns than least.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < least:
        raise ValueError(
            f"{model}: inputs of {' x '.join(map(str, shape))}: must be images of at least "
            f"{least} x {least} pixels, channels first"
        )
    return shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1]


def to_channels(shape: tuple[int, ...]) -> list[torch.nn.Module]:
    """Return the layer that gives images of two axes a third, of channels; none for others."""
    import torch

    return [torch.nn.Unflatten(1, (1, shape[0]))] if len(shape) == 2 else []
