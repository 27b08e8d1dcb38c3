"""A picture of filters where they lie on the image, and how training went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import Geometry
from .training import Step

Array = npt.NDArray[Any]
MOST = 10  # blocks along an axis that are shown; of more, evenly spaced ones


def draw(path: Path, weight: Array, geometry: Geometry, steps: list[Step]) -> None:
    """Write a picture of a layer's filters, block beside block, and its curves.

    weight: [blocks, blocks, maps, inputs]
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    shown = mosaic(weight, geometry)
    left.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    left.set_axis_off()
    layer = geometry.layer
    left.set_title(
        f"{layer.maps} filters of {layer.field} x {layer.field} in each block; "
        f"{min(MOST, weight.shape[0])} x {min(MOST, weight.shape[1])} "
        f"of {weight.shape[0]} x {weight.shape[1]} blocks"
    )
    number = [step.iteration for step in steps]
    right.plot(number, [step.error / step.energy for step in steps], label="error / energy")
    ends = max(steps[0].sparsity, 1e-300) if steps else 1.0
    right.plot(number, [step.sparsity / ends for step in steps], label="sparsity term / its first")
    right.set(xlabel="iteration", ylim=(0, None), title="reconstruction and sparsity")
    right.legend()
    figure.savefig(path, dpi=110)


def mosaic(weight: Array, geometry: Geometry) -> Array:
    """Return the filters side by side in 0..1, each with its own contrast, white lines between.

    [height, width], or [height, width, 3] where cells have three channels; of other numbers of
    channels the root of the squares is shown
    """
    size, channels = geometry.layer.field, geometry.channels
    rows, columns = (_some(n) for n in weight.shape[:2])
    side = int(np.ceil(np.sqrt(geometry.layer.maps)))
    colours = channels == 3
    cell = side * (size + 1) + 1
    shape = len(rows) * cell, len(columns) * cell
    picture = np.ones((*shape, 3) if colours else shape)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            for k, values in enumerate(weight[row, column]):
                field = values.reshape(size, size, channels)
                field = field if channels in (1, 3) else np.linalg.norm(field, axis=2)[..., None]
                top = i * cell + k // side * (size + 1)
                left = j * cell + k % side * (size + 1)
                peak = max(float(np.abs(field).max()), 1e-30)
                grey = 0.5 + field / (2 * peak)
                part = grey if colours else grey[..., 0]
                picture[top : top + size, left : left + size] = part
    return picture


def _some(n: int) -> list[int]:
    return np.linspace(0, n - 1, min(n, MOST)).round().astype(int).tolist()
