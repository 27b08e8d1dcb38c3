"""Images changed by chance as they are taken, alike on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from ..config import ConfigError, Section
from ..randomness import random_key
from .data import Array, Samples

if TYPE_CHECKING:
    import torch

STREAM = 5  # of random numbers


class Augment(Section):
    """[augment]: what happens to training images by chance, drawn by seed, epoch and sample.

    crop: zeros added on each side, of which an image's size is cut out anywhere; 0: none
    flip: left and right are exchanged in half of the images
    cutout: side of a square around any pixel that becomes zero, cut at the borders; 0: none
    Zeros are those of the scaled inputs: the mean, where they are normalised.
    Source: crop and flip as He et al.: Deep residual learning, CVPR 2016, section 4.2; DeVries,
    Taylor: Improved regularization with cutout, arXiv 1708.04552.
    """

    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    cutout: Annotated[int, Field(ge=0)] = 0

    def of(self, samples: Samples) -> Samples:
        """Return the samples, whose images change as they are taken."""
        return _Augmented(samples, self) if self.crop or self.flip or self.cutout else samples

    def draws(self, index: Array, seed: int, height: int, width: int) -> Array:
        """Return int64[b, 5]: rows and columns down and right, flipped, pixel that is cut out."""
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
        """Return the samples int64[b]. Raises ConfigError where they are no images."""
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
