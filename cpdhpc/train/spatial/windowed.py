"""What layers over windows have in common: fetch the window, or have nothing to compute."""

from __future__ import annotations

import torch

from ...darray import WindowPlan
from ...darray.autograd import exchange
from ...darray.boundary import Boundary
from .grid import ImageGrid, Shape
from .sliding import Sliding


class Windowed(torch.nn.Module):
    """A layer whose outputs in the owned box are computed from a window of its input. Collective.

    shape: of the whole input; inputs, outputs: who owns what of the whole maps
    box: of the outputs that this rank owns, which may be empty; plan: fetches the input window
    """

    def __init__(
        self, grid: ImageGrid, shape: Shape, sliding: Sliding, boundary: Boundary, name: str
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = grid.layout(shape), grid.layout(sliding.outputs(shape))
        self.box = self.outputs.owner(grid.group.rank)
        self.plan = WindowPlan(
            grid.group, self.inputs, sliding.window(self.box), boundary, name=name
        )

    def window(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input window [batch, channels, rows, columns] of the outputs. Collective.

        x: the owned part of the input. Raises ValueError for another shape.
        """
        return fetch(x, self.plan)

    def nothing(
        self, window: torch.Tensor, channels: int, *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output of a rank that owns none.

        It hangs on the window and the parameters: backward goes through this rank too, which may
        own cells that others read, and gives its parameters the gradient zero.
        """
        total = sum((p.sum() for p in parameters if p is not None), window.sum())
        return total.expand(window.shape[0], channels, *self.box.shape)


def fetch(x: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
    """Return a plan's window of a map [batch, channels, rows, columns]. Collective."""
    if x.ndim != 4 or tuple(x.shape[2:]) != plan.owned.shape:
        rows, columns = plan.owned.shape
        raise ValueError(
            f"layer {plan.name}: input has shape {tuple(x.shape)}: "
            f"must be [batch, channels, {rows}, {columns}], this rank's part"
        )
    return exchange(x.permute(2, 3, 0, 1), plan).permute(2, 3, 0, 1)
