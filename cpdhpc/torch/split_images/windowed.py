"""Images split over ranks, and the layers that fetch windows of them.

ImageGrid assigns images to groups of ranks, and parts of every feature map to the ranks of a group.
The layers are convolutions, poolings, paddings and resampling.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import torch
from torch.nn import functional

from ...darray.layout import Box, Layout, receptive, whole
from ...darray.plan import WindowPlan
from ...darray.windows import Boundary, Constant
from ...errors import ArgumentError
from ...world.mpi import as_world
from ...world.ranks import Ranks
from ..autograd import exchange

Shape = tuple[int, int]  # height and width in pixels of a whole image or feature map


class ImageGrid:
    """Assigns images to groups of ranks, and splits each over rows x columns of ranks. Collective.

    world: a World, Loopback or an mpi4py communicator: all ranks, which hold the same weights
    procs: (rows, columns) of ranks that an image is split over; consecutive ranks are a group
    group: the world of the ranks that share this rank's images
    groups, index: the number of groups, and which of them this rank is in
    Raises TypeError or ValueError on all processes unless rows x columns divides the ranks.
    """

    def __init__(self, world: Any, procs: Sequence[int]) -> None:
        self.world: Ranks = as_world(world, "ImageGrid")
        if self.world.virtual_ranks != 1:
            raise ValueError("ImageGrid: world has virtual ranks: needs one rank per process")
        given = self.world.gather_from(lambda: _pair(procs, self.world.size), "ImageGrid")
        self.procs = given[0]
        if given != given[:1] * self.world.size:
            raise ValueError(f"ImageGrid: procs differ between ranks: {given}")
        self.groups, self.index = self.world.size // self.sharing, self.world.rank // self.sharing
        self.group = self.world if self.groups == 1 else self.world.split(self.index)

    @property
    def sharing(self) -> int:
        """The number of ranks that share an image."""
        return prod(self.procs)

    def layout(self, shape: Shape) -> Layout:
        """Return the layout of a map of this size; ranks beyond its cells own nothing."""
        return Layout.grid(shape, self.procs)

    def owned(self, shape: Shape) -> Box:
        """Return the box of this rank."""
        return self.layout(shape).owner(self.group.rank)

    def cut(self, images: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of whole images [..., height, width]."""
        height, width = images.shape[-2:]
        rows, columns = self.owned((height, width)).slices((0, 0))
        return images[..., rows, columns]

    def free(self) -> None:
        """Free the world of the group; the grid cannot be used any more. Collective."""
        if self.group is not self.world:
            self.group.free()


def _pair(procs: Sequence[int], ranks: int) -> Shape:
    """Return rows and columns. Raises ValueError unless their product divides the ranks."""
    pair = tuple(procs) if isinstance(procs, Sequence) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 1 for n in pair):
        allowed = "must be rows and columns, 1 or more each"
        raise ArgumentError("ImageGrid", "procs", procs, allowed)
    if ranks % prod(pair):
        allowed = f"the number of ranks, {ranks}, must be a multiple of {prod(pair)}"
        raise ArgumentError("ImageGrid", "procs", pair, allowed, f"{pair[0]} x {pair[1]}")
    return pair[0], pair[1]


class SplitLayer(torch.nn.Module):
    """A layer on the parts of maps that ranks own; all ranks of the grid make and call it.

    Arguments: layer, the serial one, whose parameters it shares under the same names; grid; shape
    and after, height and width of the whole input and output; name, of the layer in messages.
    Takes and returns float[batch, channels, rows, columns] of the owned cells, maybe none. The
    gradients of parameters are this rank's part: their sum over a group is that of its loss.
    gathers: whether the output is whole; same: whether it has the shape of the input
    on_whole: whether the layer is replaced after a gather, too: then shape and after are None
    """

    gathers = same = on_whole = False

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError if the layer cannot be split; needs no grid."""


def pair(value: Any) -> Shape:
    """Return a size of torch's layers, which is one number or two, as two."""
    rows, columns = (value, value) if isinstance(value, int) else value
    return int(rows), int(columns)


class Windowed(SplitLayer):
    """A layer whose outputs in the owned box are computed from a window of its input. Collective.

    inputs, outputs: layouts of the whole maps; reach: returns the window of a box of outputs
    box: of this rank's outputs, which may be empty; plan: fetches the input window
    stride: of windows, with which torch leaves out the remainder at the end of a part
    at_home: whether all ranks own their windows, so that nothing is sent or copied
    constants: tensors that depend on this box, and are moved together with the parameters. They are
        not buffers, as buffers are copied from one rank to all
    """

    def __init__(
        self,
        grid: ImageGrid,
        shape: Shape,
        after: Shape,
        reach: Callable[[Box], Box],
        boundary: Boundary,
        name: str,
        stride: Shape = (1, 1),
    ) -> None:
        super().__init__()
        self.constants: list[torch.Tensor] = []
        self.inputs, self.outputs = grid.layout(shape), grid.layout(after)
        self.box = self.outputs.owner(grid.group.rank)
        self.plan = WindowPlan(grid.group, self.inputs, reach(self.box), boundary, name=name)
        self.stride = stride
        pairs = zip(self.inputs.owners, self.plan.windows.boxes, strict=True)
        self.at_home = all(
            own.start == window.start
            and all(0 <= a - b < s for a, b, s in zip(own.stop, window.stop, stride, strict=True))
            for own, window in pairs
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Change all tensors, as Module.to does."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.constants = [fn(constant) for constant in self.constants]
        return self

    @abstractmethod
    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs of a window, if there are any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective."""
        window = self.window(x)
        return self.nothing(window) if self.box.empty else self.computed(window)

    def window(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input window [batch, channels, rows, columns] of the outputs. Collective.

        x: the owned part of the input. Raises ValueError for another shape.
        """
        if not self.at_home:
            return fetch(x, self.plan)
        check_part(x, self.plan.owned, self.plan)
        return x

    def channels(self, given: int) -> int:
        """Return the channels of the output."""
        return given

    def nothing(self, window: torch.Tensor) -> torch.Tensor:
        """Return the output of a rank that owns none.

        It depends on the window and the parameters: so backward runs on this rank too, which may
        own cells that others read, and gives its parameters a gradient of zero.
        """
        total = sum((p.sum() for p in self.parameters()), window.sum())
        return total.expand(window.shape[0], self.channels(window.shape[1]), *self.box.shape)


def fetch(x: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
    """Return a plan's window of a map [batch, channels, rows, columns]. Collective."""
    check_part(x, plan.owned, plan)
    return exchange(x.permute(2, 3, 0, 1), plan).permute(2, 3, 0, 1)


def check_part(x: torch.Tensor, owned: Box, plan: WindowPlan) -> None:
    """Raise ValueError on all ranks unless x is a map's owned part, for the layer of a plan."""
    if x.ndim != 4 or tuple(x.shape[2:]) != owned.shape:
        rows, columns = owned.shape
        error = ValueError(
            f"layer {plan.name}: input has shape {tuple(x.shape)}: "
            f"must be [batch, channels, {rows}, {columns}], this rank's part"
        )
        raise plan.world.refuse(error)[0]


class ConvTranspose2d(Windowed):
    """torch.nn.ConvTranspose2d. Collective.

    Output o is the sum over kernel cells k of input i with o = i step - padding + k dilation.
    """

    def __init__(
        self,
        layer: torch.nn.ConvTranspose2d,
        grid: ImageGrid,
        shape: Shape,
        after: Shape,
        name: str,
    ) -> None:
        size, step, dilation = map(pair, (layer.kernel_size, layer.stride, layer.dilation))
        spread = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
        padding = pair(layer.padding)

        def reach(box: Box) -> Box:
            if box.empty:
                return Box(box.start, box.start)
            axes = list(zip(box.start, box.stop, padding, spread, step, strict=True))
            first = tuple(-((n - lo - p) // s) for lo, _, p, n, s in axes)
            last = tuple((hi - 1 + p) // s for _, hi, p, _, s in axes)
            # If no input reaches the outputs: a window whose part is cut off.
            return Box(first, tuple(max(a, b) + 1 for a, b in zip(first, last, strict=True)))

        super().__init__(grid, shape, after, reach, "zero", name)
        self.weight, self.bias = layer.weight, layer.bias
        self.stride, self.dilation, self.groups = step, dilation, layer.groups
        window = self.plan.window
        begin = [a * s - p for a, s, p in zip(window.start, step, padding, strict=True)]
        end = [
            (b - 1) * s - p + n + 1
            for b, s, p, n in zip(window.stop, step, padding, spread, strict=True)
        ]
        (top, left), (bottom, right) = self.box
        crop = begin[1] - left, right - end[1], begin[0] - top, bottom - end[0]
        self.crops: list[tuple[int, ...]] = [crop] if any(crop) else []
        if any(b <= lo or hi <= a for a, b, lo, hi in zip(begin, end, *self.box, strict=True)):
            # Torch cuts before it pads, and cannot cut more than there is.
            self.crops = [tuple(max(0, n) for n in crop), tuple(min(0, n) for n in crop)]

    def channels(self, given: int) -> int:
        """Return the channels of the output."""
        return self.weight.shape[1] * self.groups

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs."""
        fits = not self.crops
        sums = functional.conv_transpose2d(
            window, self.weight, self.bias if fits else None, self.stride, 0, 0, self.groups,
            self.dilation,
        )  # fmt: skip
        if fits:
            return sums
        for crop in self.crops:
            sums = functional.pad(sums, crop)  # negative padding cuts off
        return sums if self.bias is None else sums + self.bias[:, None, None]


class Pool2d(Windowed):
    """Common base of poolings. Collective."""

    boundary: Boundary = "zero"

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, after: Shape, name: str) -> None:
        size, step, before = map(pair, (layer.kernel_size, layer.stride, layer.padding))
        dilation = pair(getattr(layer, "dilation", 1))

        def reach(box: Box) -> Box:
            return receptive(box, size, step, before, dilation)

        super().__init__(grid, shape, after, reach, self.boundary, name, step)
        self.size, self.dilation, self.before = size, dilation, before

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for indices, which would refer to windows."""
        if getattr(layer, "return_indices", False):
            raise ValueError("return_indices=True: they would refer to windows, not to images")


class MaxPool2d(Pool2d):
    """torch.nn.MaxPool2d. Collective."""

    boundary = Constant(float("-inf"))

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the largest values."""
        return functional.max_pool2d(window, self.size, self.stride, dilation=self.dilation)


class AvgPool2d(Pool2d):
    """torch.nn.AvgPool2d. Collective."""

    def __init__(
        self, layer: torch.nn.AvgPool2d, grid: ImageGrid, shape: Shape, after: Shape, name: str
    ) -> None:
        super().__init__(layer, grid, shape, after, name)
        divisors = self._divisor(layer)
        values = set(divisors.flatten().tolist())
        self.alike = int(values.pop()) if len(values) == 1 else None  # divisor of all outputs
        self.constants = [] if self.alike else [divisors]

    def _divisor(self, layer: torch.nn.AvgPool2d) -> torch.Tensor:
        """Return float64[rows, columns], the divisor of each owned output's sum.

        Cells beyond the padding, which ceil_mode reaches, never count; the padding may.
        """
        if layer.divisor_override is not None:
            return torch.full(self.box.shape, float(layer.divisor_override), dtype=torch.float64)
        counts = []
        for axis, extent in enumerate(self.inputs.shape):
            padding = self.before[axis] if layer.count_include_pad else 0
            first = torch.arange(self.box.start[axis], self.box.stop[axis]) * self.stride[axis]
            first -= self.before[axis]
            last = (first + self.size[axis]).clamp(max=extent + padding)
            counts.append((last - first.clamp(min=-padding)).double())
        return counts[0][:, None] * counts[1]

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the means."""
        divisor = self.alike or 1
        means = functional.avg_pool2d(window, self.size, self.stride, divisor_override=divisor)
        return means if self.alike else means / self.constants[0].to(means.dtype)


class Pad2d(Windowed):
    """The padding layers of torch, which are only windows with a boundary. Collective."""

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, after: Shape, name: str) -> None:
        left, _, top, _ = layer.padding

        def reach(box: Box) -> Box:
            return box.shift((-top, -left))

        super().__init__(grid, shape, after, reach, self._boundary(layer), name)

    @staticmethod
    def _boundary(layer: Any) -> Boundary:
        if isinstance(layer, torch.nn.ConstantPad2d):
            return Constant(layer.value)
        kinds = {
            torch.nn.ReflectionPad2d: "reflect",
            torch.nn.ReplicationPad2d: "edge",
            torch.nn.CircularPad2d: "wrap",
        }
        return kinds[type(layer)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the window."""
        return self.window(x)


class Upsample(Windowed):
    """torch.nn.Upsample and its kin: sums of a few cells along each axis. Collective.

    Weights are computed in float64 and rounded once to the dtype of the input.
    """

    def __init__(
        self, layer: torch.nn.Upsample, grid: ImageGrid, shape: Shape, after: Shape, name: str
    ) -> None:
        own = grid.owned(after)
        given: Any = layer.scale_factor
        scales = given if isinstance(given, tuple) else (given, given)
        if layer.recompute_scale_factor:
            scales = (None, None)
        align = bool(layer.align_corners)
        taps = [
            _taps(layer.mode, shape[i], after[i], scales[i], align, own.start[i], own.stop[i])
            for i in (0, 1)
        ]

        def reach(box: Box) -> Box:
            if box.empty:
                return Box(box.start, box.start)
            ends = [(int(index.min()), int(index.max()) + 1) for index, _ in taps]
            return Box(*zip(*ends, strict=True))

        super().__init__(grid, shape, after, reach, "zero", name)
        for (index, weight), start in zip(taps, self.plan.window.start, strict=True):
            self.constants += [index - start, weight]

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for modes that are not for images."""
        if layer.mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            raise ValueError(f"mode={layer.mode!r}: must be nearest(-exact), bilinear or bicubic")

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs, by rows, then columns."""
        values = window
        for axis in (0, 1):
            index, weight = self.constants[2 * axis : 2 * axis + 2]
            near = [values.index_select(2 + axis, each) for each in index]
            if len(near) > 1:
                shape = (-1, 1) if axis == 0 else (-1,)
                weights = [each.to(values.dtype).reshape(shape) for each in weight]
                near = [sum(a * w for a, w in zip(near, weights, strict=True))]
            values = near[0]
        return values


CUBIC = -0.75  # the parameter of torch's cubic convolution


def _taps(
    mode: str, extent: int, after: int, scale: float | None, align: bool, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64[taps, cells], the inputs of the outputs start..stop, and their weights.

    scale: the layer's argument, None if it follows from the extents
    Source: the formulas of torch.nn.functional.interpolate, which itself finds nearest cells.
    """
    if mode.startswith("nearest"):
        cells = torch.arange(extent, dtype=torch.float64)[None, None]
        size, factor = (after, None) if scale is None else (None, scale)
        index = functional.interpolate(cells, size, factor, mode)[0, 0, start:stop]
        return index.long()[None], torch.ones(1, max(0, stop - start))
    out = torch.arange(start, max(start, stop), dtype=torch.float64)
    if align:
        at = out * ((extent - 1) / (after - 1) if after > 1 else 0.0)
    else:
        at = (out + 0.5) * (extent / after if scale is None else 1 / scale) - 0.5
    if mode == "bilinear":
        at = at.clamp(min=0)
    low = at.floor()
    t = at - low
    weights = {0: 1 - t, 1: t}
    if mode == "bicubic":
        weights = {-1: _far(t + 1), 0: _near(t), 1: _near(1 - t), 2: _far(2 - t)}
    index = torch.stack([(low + tap).clamp(0, extent - 1).long() for tap in weights])
    return index, torch.stack(list(weights.values()))


def _near(t: torch.Tensor) -> torch.Tensor:
    """Return the weight of cubic convolution at a distance up to 1."""
    return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1


def _far(t: torch.Tensor) -> torch.Tensor:
    """Return the weight of cubic convolution at a distance of 1 to 2."""
    return ((CUBIC * t - 5 * CUBIC) * t + 8 * CUBIC) * t - 4 * CUBIC


class PixelShuffle(Windowed):
    """torch.nn.PixelShuffle. Collective."""

    def __init__(
        self, layer: torch.nn.PixelShuffle, grid: ImageGrid, shape: Shape, after: Shape, name: str
    ) -> None:
        n = layer.upscale_factor

        def reach(box: Box) -> Box:
            if box.empty:
                return Box(box.start, box.start)
            return Box(tuple(a // n for a in box.start), tuple(-(-b // n) for b in box.stop))

        super().__init__(grid, shape, after, reach, "zero", name)
        self.factor = n

    def channels(self, given: int) -> int:
        """Return the channels of the output."""
        return given // self.factor**2

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs."""
        origin = tuple(a * self.factor for a in self.plan.window.start)
        rows, columns = self.box.slices(origin)
        return functional.pixel_shuffle(window, self.factor)[..., rows, columns]


class PixelUnshuffle(Windowed):
    """torch.nn.PixelUnshuffle. Collective."""

    def __init__(
        self, layer: torch.nn.PixelUnshuffle, grid: ImageGrid, shape: Shape, after: Shape, name: str
    ) -> None:
        n = layer.downscale_factor

        def reach(box: Box) -> Box:
            return Box(tuple(a * n for a in box.start), tuple(b * n for b in box.stop))

        super().__init__(grid, shape, after, reach, "zero", name)
        self.factor = n

    def channels(self, given: int) -> int:
        """Return the channels of the output."""
        return given * self.factor**2

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs."""
        return functional.pixel_unshuffle(window, self.factor)


class Gather(SplitLayer):
    """Gathers the whole maps on every rank of a group, then runs a layer. Collective.

    Later layers are computed identically by all ranks of the group. Backward adds up their
    gradients: the loss of a group counts as often as it has ranks.
    layer: one without parameters
    """

    gathers = True

    def __init__(
        self, layer: torch.nn.Module, grid: ImageGrid, shape: Shape, after: Any, name: str
    ) -> None:
        super().__init__()
        self.layer = layer
        self.plan = WindowPlan(grid.group, grid.layout(shape), whole(shape), name=name)

    @staticmethod
    def check(layer: torch.nn.Module, shape: Shape) -> None:
        """Raise ValueError for odd flattening."""
        if isinstance(layer, torch.nn.Flatten):
            axes = layer.start_dim, layer.end_dim
            if axes != (1, -1) and axes != (1, 3):
                raise ValueError("must flatten channels, rows and columns: Flatten(1, -1)")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for the whole maps of this rank's images. Collective."""
        return self.layer(fetch(x, self.plan))
