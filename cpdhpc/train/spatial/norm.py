"""Batch normalisation over all images of all ranks."""

from __future__ import annotations

import torch

from ...darray import Layout, WindowPlan
from ...darray.autograd import exchange
from ...darray.box import whole
from .grid import ImageGrid, Shape

CELLS = (0, 2, 3)  # the axes of batch, rows and columns


class BatchNorm2d(torch.nn.Module):
    """torch.nn.BatchNorm2d with the statistics of the batches of all ranks. Collective.

    It shares the layer's parameters and buffers. In training all ranks of the world take part,
    also those without images or pixels, and get the same bits; with the running statistics there
    are no messages.
    """

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self, layer: torch.nn.BatchNorm2d, grid: ImageGrid, shape: Shape, name: str
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.momentum = layer.momentum
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(buffer, getattr(layer, buffer))
        ranks = grid.world.size
        layout = Layout.grid((ranks,), (ranks,))
        self.plan = WindowPlan(grid.world, layout, whole((ranks,)), name=name)

    @staticmethod
    def shape_after(layer: torch.nn.BatchNorm2d, shape: Shape) -> Shape:
        """Return the size of the layer's output, that of its input."""
        return shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective.

        Raises ValueError on all ranks alike where a channel has one value in all.
        """
        if self.training or self.running_mean is None or self.running_var is None:
            mean, variance = self._statistics(x)
        else:
            mean, variance = self.running_mean, self.running_var
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = 0 if self.bias is None else self.bias[:, None, None]
        return (x - mean[:, None, None]) * scale[:, None, None] + shift

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of the channels over all ranks, and update the running ones.

        Each rank tells its number n of values, their mean and their sum of squares about it; what
        differs between means is added to the sum of squares: Chan, Golub and LeVeque, Updating
        formulae and a pairwise algorithm for computing sample variances, 1979, equation 2.1.
        In float64 throughout: torch too adds up float32 so on the CPU.
        """
        values = x.double()
        n = values.new_full((x.shape[1],), x.numel() // max(1, x.shape[1]))
        own_mean = values.sum(CELLS) / n.clamp(min=1)
        squares = (values - own_mean[:, None, None]).square().sum(CELLS)
        everywhere = exchange(torch.stack([n, own_mean, squares])[None], self.plan)
        counts, means, spreads = everywhere.unbind(1)  # [ranks, channels] each
        count = counts[:, :1].sum()
        if self.training and count <= 1:
            raise ValueError(f"layer {self.plan.name}: needs more than one value a channel")
        mean = (counts * means).sum(0) / count
        variance = (spreads + counts * (means - mean).square()).sum(0) / count
        if self.training:
            self._track(mean.detach(), (variance * count / (count - 1)).detach())
        return mean.to(x.dtype), variance.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # the mean of all batches so far
            share = 1 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)
