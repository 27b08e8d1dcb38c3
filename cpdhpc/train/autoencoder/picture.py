"""A picture of filters where they lie on the image, and how training went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...config import ConfigError, UserError
from .geometry import Geometry
from .macro import MacroLayer
from .training import Step

Array = npt.NDArray[Any]
MOST = 10  # blocks along an axis that are shown; of more, evenly spaced ones
MOST_MAPS = 64  # filters of a block that are shown: the first


def check_place(path: Path) -> bool:
    """Return True; raise ConfigError where a picture cannot be written, before hours of work."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not path.parent.is_dir():
        raise ConfigError(f"--png {path}: there is no such directory")
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--png {path}: must end in one of .{', .'.join(sorted(known))}")
    return True


def shown(layer: MacroLayer) -> Array:
    """Return the filters that a picture shows, on all ranks. Collective.

    [rows of blocks, columns, maps, inputs]; few, whatever the size of the layer
    """
    array = layer.over_blocks(layer.weight)
    (top, left), (bottom, right) = array.layout.owner(layer.world.rank)
    rows, columns = map(_some, layer.geometry.blocks)
    mine = {
        (i, j): array.local[i - top, j - left, :MOST_MAPS].copy()
        for i in rows
        for j in columns
        if top <= i < bottom and left <= j < right
    }
    everyone = layer.world.gather(mine, "filters of the picture")
    found = {place: block for part in everyone for place, block in part.items()}
    return np.stack([[found[i, j] for j in columns] for i in rows])


def draw(path: Path, weight: Array, geometry: Geometry, steps: list[Step]) -> None:
    """Write a picture of a layer's filters, block beside block, and its curves.

    weight: what shown returns
    Raises UserError where it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    picture = mosaic(weight, geometry)
    left.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    left.set_axis_off()
    left.set_title(_title(weight, geometry))
    number = [step.iteration for step in steps]
    right.plot(number, [step.error / step.energy for step in steps], label="error / energy")
    ends = max(steps[0].sparsity, 1e-300) if steps else 1.0
    right.plot(number, [step.sparsity / ends for step in steps], label="sparsity term / its first")
    right.set(xlabel="iteration", ylim=(0, None), title="reconstruction and sparsity")
    right.legend()
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"--png {path}: cannot be written: {error.strerror or error}") from None


def _title(weight: Array, geometry: Geometry) -> str:
    layer, (rows, columns, maps, _) = geometry.layer, weight.shape
    some = f"{maps} of {layer.maps}" if maps < layer.maps else str(maps)
    return (
        f"{some} filters of {layer.field} x {layer.field} in each block; "
        f"{rows} x {columns} of {geometry.blocks[0]} x {geometry.blocks[1]} blocks"
    )


def mosaic(weight: Array, geometry: Geometry) -> Array:
    """Return the filters side by side in 0..1, each with its own contrast, white lines between.

    [height, width], or [height, width, 3] where cells have three channels; of other numbers of
    channels the root of the squares is shown
    """
    size, channels = geometry.layer.field, geometry.channels
    rows, columns, maps, _ = weight.shape
    side = int(np.ceil(np.sqrt(maps)))
    high, wide = -(-maps // side) * (size + 1) + 1, side * (size + 1) + 1
    shape = rows * high, columns * wide
    picture = np.ones((*shape, 3) if channels == 3 else shape)
    for i, j, k in np.ndindex(rows, columns, maps):
        top = i * high + k // side * (size + 1)
        left = j * wide + k % side * (size + 1)
        grey = _grey(weight[i, j, k].reshape(size, size, channels))
        picture[top : top + size, left : left + size] = grey
    return picture


def _grey(field: Array) -> Array:
    """Return a filter with zero at 0.5 and its peak at 0 or 1."""
    if field.shape[2] != 3:
        field = field[..., 0] if field.shape[2] == 1 else np.linalg.norm(field, axis=2)
    peak = max(float(np.abs(field).max()), 1e-30)
    return np.asarray(0.5 + field / (2 * peak))


def _some(n: int) -> list[int]:
    return np.linspace(0, n - 1, min(n, MOST)).round().astype(int).tolist()
