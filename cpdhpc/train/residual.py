"""A block with a way around it."""

from __future__ import annotations

import torch


class Residual(torch.nn.Module):
    """Adds what some layers give to what enters them.

    Source: He et al.: Deep residual learning for image recognition, CVPR 2016, equation 1.
    """

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + layers(x)."""
        y: torch.Tensor = x + self.layers(x)
        return y
