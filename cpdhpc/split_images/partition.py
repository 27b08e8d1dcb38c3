"""Turns an ordinary network into one whose images are split over ranks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from torch import nn

from .grid import ImageGrid, Shape
from .layers import AvgPool2d, BatchNorm2d, Conv2d, Gather, MaxPool2d, Unflatten, Windowed

SPLIT: dict[type[nn.Module], Any] = {  # layer -> what does it on parts of images
    nn.Conv2d: Conv2d,
    nn.MaxPool2d: MaxPool2d,
    nn.AvgPool2d: AvgPool2d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.Unflatten: Unflatten,
    nn.AdaptiveAvgPool2d: Gather,
    nn.AdaptiveMaxPool2d: Gather,
    nn.Flatten: Gather,
}
EACH_VALUE = {  # layers that treat every value by itself, and so go anywhere
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
}
WHOLE = {nn.Flatten, nn.Linear, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d}  # after the gather
WHY = {
    nn.Dropout: "each rank would draw another mask",
    nn.Dropout2d: "each rank would draw another mask",
    nn.BatchNorm1d: "each rank would have statistics of its own images alone",
    nn.Linear: "before the maps are gathered by Flatten or an adaptive pooling",
}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


Named = tuple[tuple[str, "Part"], ...]


class Part(NamedTuple):
    """A layer of the serial network: its path, and the size of its input, None after the gather.

    split: what does it on parts of images, None for the layer itself; parts: of a Sequential
    """

    path: str
    layer: nn.Module
    shape: Shape | None
    split: Any = None
    parts: Named | None = None


class Partitioned(nn.Sequential):
    """A network on parts of images, with the parameters of the serial one and their names.

    grid: how images are split; shape: of the whole output where it is split, None where every
    rank of a group has the output of whole images
    """

    def __init__(
        self, layers: OrderedDict[str, nn.Module], grid: ImageGrid, shape: Shape | None
    ) -> None:
        super().__init__(layers)
        self.grid, self.shape = grid, shape


def partition(model: nn.Module, shape: Shape, grid: ImageGrid) -> Partitioned:
    """Return a network that computes what model does, on the grid's parts of images. Collective.

    model: an nn.Sequential, the same on all ranks; parameters and buffers are shared
    shape: height and width of whole images; the input is float[batch, (channels,) rows, columns],
        what grid.cut(images) returns, the same images on all ranks of a group
    Gradients: with the group's loss on each of its ranks, the mean of p.grad over all ranks of the
    world is the gradient of the mean loss over the groups; GradientReducer computes that mean.
    Raises TypeError or ValueError on all ranks alike, naming the layer that cannot be split.
    """
    error: Exception | None = None
    parts, after = Named(), None
    try:
        parts, after = _parts(model, shape, "")
        if not any(part.split and issubclass(part.split, Windowed) for part in _flat(parts)):
            raise ValueError("partition: model: has no convolution or pooling to split")
    except (TypeError, ValueError) as problem:
        error = problem
    grid.world.agree(error, "partition")
    _compare(grid, parts)
    return Partitioned(_build(parts, grid), grid, after)


def _parts(model: nn.Module, shape: Shape | None, prefix: str) -> tuple[Named, Shape | None]:
    """Return the named layers and the size of the output; checks everything, sends nothing."""
    if type(model) is not nn.Sequential:
        raise TypeError(f"partition: {prefix or 'model'} is {type(model).__name__}: {KNOWN}")
    parts: list[tuple[str, Part]] = []
    for name, layer in model._modules.items():  # a layer may come twice
        path = prefix + name
        if type(layer) is nn.Sequential:
            inner, after = _parts(layer, shape, path + ".")
            parts.append((name, Part(path, layer, shape, parts=inner)))
        else:
            part, after = _part(path, layer, shape)
            parts.append((name, part))
        shape = after
    return tuple(parts), shape


_TYPES: tuple[type[nn.Module], ...] = (nn.Sequential, nn.Linear, *SPLIT, *EACH_VALUE)
KNOWN = "known are " + ", ".join(sorted(each.__name__ for each in _TYPES))


def _part(path: str, layer: nn.Module, shape: Shape | None) -> tuple[Part, Shape | None]:
    kind: type[nn.Module] = type(layer)
    where = f"partition: layer {path}, {layer}"
    if any(getattr(layer, hooks) for hooks in HOOKS):
        raise ValueError(f"{where}: has hooks, which would not see whole images")
    if kind in EACH_VALUE or (shape is None and kind in WHOLE):
        return Part(path, layer, shape), shape
    if shape is None or kind not in SPLIT:
        why = "it comes after the gather" if kind in SPLIT else WHY.get(kind, KNOWN)
        raise TypeError(f"{where}: cannot be split: {why}")
    split = SPLIT[kind]
    try:
        return Part(path, layer, shape, split), split.shape_after(layer, shape)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _flat(parts: Named) -> list[Part]:
    found = []
    for _, part in parts:
        found += [part] if part.parts is None else _flat(part.parts)
    return found


def _compare(grid: ImageGrid, parts: Named) -> None:
    """Raise ValueError on all ranks alike where their models differ. Collective."""
    mine = [f"{part.path}: {part.layer} on {part.shape}" for part in _flat(parts)]
    everywhere = grid.world.gather(mine, "partition")
    for rank, lines in enumerate(everywhere):
        if lines != everywhere[0]:
            pairs = zip([*everywhere[0], "nothing"], [*lines, "nothing"], strict=False)
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"partition: models differ: rank 0 has {first}, rank {rank} has {other}"
            )


def _build(parts: Named, grid: ImageGrid) -> OrderedDict[str, nn.Module]:
    """Return the layers of the network. Collective."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in parts:
        if part.parts is not None:
            layers[name] = nn.Sequential(_build(part.parts, grid))
        elif part.split is None:
            layers[name] = part.layer
        else:
            label = f"{part.path} ({type(part.layer).__name__})"
            layers[name] = part.split(part.layer, grid, part.shape, label)
            layers[name].train(part.layer.training)
    return layers
