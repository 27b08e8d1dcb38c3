"""The geometry of a filter that slides over an image: output size and input window."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...darray import Box, receptive
from .grid import Shape


class Sliding(NamedTuple):
    """A filter of size cells, dilation apart, moved by step; two numbers, rows and columns.

    before, after: cells that the image is padded by; ceil: as torch's ceil_mode of pooling
    """

    size: Shape
    step: Shape
    before: Shape
    after: Shape
    dilation: Shape
    ceil: bool = False

    def outputs(self, shape: Shape) -> Shape:
        """Return the size of the output. Raises ValueError where nothing is left."""
        height, width = (self._extent(shape[axis], axis) for axis in (0, 1))
        if min(height, width) < 1:
            raise ValueError(f"its output is {height} x {width} for an input of {shape}")
        return height, width

    def _extent(self, extent: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.size[axis] - 1) + 1
        step, before = self.step[axis], self.before[axis]
        room = extent + before + self.after[axis] - reach
        if not self.ceil:
            return room // step + 1
        count = -(-room // step) + 1
        # The last window must begin inside the image or the padding before it, as torch has it.
        return count - ((count - 1) * step >= extent + before)

    def window(self, box: Box) -> Box:
        """Return the inputs that the outputs in a box need, padding included."""
        return receptive(box, self.size, self.step, self.before, self.dilation)


def pair(value: Any) -> Shape:
    """Return a size as torch's layers hold it, one number or two, as two."""
    rows, columns = (value, value) if isinstance(value, int) else value
    return int(rows), int(columns)
