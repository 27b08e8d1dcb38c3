"""Turns an ordinary network into one whose images are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import ArgumentError, ArgumentTypeError
from ...ops.tensors import CPU
from .layers import INSTEAD, KNOWN, LAYERS, EachPixel, Unflatten
from .windowed import Gather, ImageGrid, Shape

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
POINTWISE = {  # functions whose result at a pixel depends only on that pixel, for any arguments
    "abs", "add", "addcdiv", "addcmul", "atan", "ceil", "clamp", "clip", "clone", "contiguous",
    "cos", "detach", "div", "divide", "double", "elu", "eq", "erf", "exp", "expm1", "float",
    "floor", "ge", "gelu", "gt", "half", "bfloat16", "hardsigmoid", "hardswish", "hardtanh", "le",
    "leaky_relu", "lerp", "log", "log1p", "logsigmoid", "lt", "masked_fill", "maximum", "minimum",
    "mish", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "ones_like", "pow", "prelu",
    "reciprocal", "relu", "relu6", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu",
    "sin", "softplus", "softsign", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to",
    "true_divide", "truediv", "type", "type_as", "where", "zeros_like", "celu", "requires_grad",
}  # fmt: skip
JOINED = {"cat", "concat", "concatenate", "chunk", "split", "tensor_split", "unbind"}


def partition(model: nn.Module, shape: Sequence[int], grid: ImageGrid) -> nn.Module:
    """Return a network that computes the same as model, on the grid's parts of images. Collective.

    model: any module, the same on all ranks; it is not changed. The network shares its parameters
        and buffers, has its class, its forward and its names; only layers are replaced
    shape: of a whole image, (rows, columns) or (channels, rows, columns); by default the channels
        are those of the first layer. The input is float[batch, (channels,) rows, columns], the
        result of grid.cut(images), for the same images on all ranks of a group
    The network has two more attributes. split_shape is the height and width of the whole output if
    that is split, None if every rank of a group has the output of whole images; for several outputs
    a sequence. split_grid is the grid. A model that is itself a layer becomes the split layer.
    model's forward is run once, on tensors without values. Its operations between layers must treat
    each pixel by itself, as sums and concatenations of maps do, or follow a gather.
    Gradients: with the group's loss on each of its ranks, the mean of p.grad over all ranks of the
    world is the gradient of the mean loss over the groups; GradientReducer computes that mean.
    Raises TypeError or ValueError on all ranks, naming the layer that cannot be split.
    """
    trace = _Trace()

    def lines() -> list[str]:
        trace.run(model, shape)
        return [f"{path}: {_words(use)} on {use.shape}" for path, use in trace.uses.items()]

    everywhere = grid.world.gather_from(lines, "partition")
    _compare(everywhere)
    net = deepcopy(model, {id(each): each for each in _tensors_of(model)})
    split: dict[int, nn.Module] = {}
    layers = dict(net.named_modules())
    for path, use in trace.uses.items():
        if use.split is not EachPixel:
            label = f"{path or 'model'} ({type(use.layer).__name__})"
            layer = layers[path]
            made = use.split(layer, grid, use.shape, use.after, label).to(_device(model))
            split[id(layer)] = made
            split[id(layer)].train(layer.training)
    net = _replaced(net, split)
    for path in trace.unused:
        layers[path].register_forward_pre_hook(partial(_refuse, path))
    net.split_grid, net.split_shape = grid, trace.output  # type: ignore[assignment]
    return net


def _replaced(net: nn.Module, split: dict[int, nn.Module]) -> nn.Module:
    """Return the network with replaced layers; one layer may occur in several places."""
    for module in list(net.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in split:
                module._modules[name] = split[id(child)]
    return split.get(id(net), net)


def _refuse(path: str, *_: Any) -> None:
    raise RuntimeError(f"layer {path}: was not used when the network was partitioned")


def _compare(everywhere: list[list[str]]) -> None:
    """Raise ValueError on all ranks if their models differ."""
    for rank, lines in enumerate(everywhere):
        if lines != everywhere[0]:
            pairs = zip([*everywhere[0], "nothing"], [*lines, "nothing"], strict=False)
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"partition: models differ: rank 0 has {first}, rank {rank} has {other}"
            )


def _words(use: _Use) -> str:
    dtypes = sorted({str(tensor.dtype) for tensor in _tensors_of(use.layer)})
    return " of ".join([str(use.layer), *dtypes])


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


class _Use(NamedTuple):
    """How forward uses a layer: the whole input's size, None after a gather, and the output's."""

    layer: nn.Module
    split: Any
    shape: Shape | None
    after: Shape | None


class _Trace(TorchFunctionMode):
    """A run of a model on tensors without values, which are parts of maps or whole.

    uses: by path, in order, how forward uses the layers that are to be split
    unused: paths of layers that it does not use; output: the sizes of outputs, None for whole ones
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[str, _Use] = {}
        self.unused: list[str] = []
        self.output: Any = None
        self._within = [""]  # paths of the modules whose forward is running
        self._in_layer = False

    def run(self, model: nn.Module, shape: Sequence[int]) -> None:
        """Run the model. Raises TypeError or ValueError if it cannot be split."""
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError("partition", "model", model, "must be an nn.Module")
        x = _mark(torch.empty(_input_shape(model, shape), device="meta", dtype=_dtype(model)))
        layers = self._prepared(model)
        try:
            with self, torch.no_grad(), torch.random.fork_rng(devices=[]):
                result = layers[""](x)
        except _Unfit as error:
            raise error.args[0] from None
        except Exception as error:
            raise ValueError(
                f"partition: {self._where()}: forward fails on images of {tuple(x.shape[1:])}, "
                f"on tensors without values: {type(error).__name__}: {error}"
            ) from None
        self.output = _mapped(
            result, lambda each: tuple(each.shape[-2:]) if _is_part(each) else None
        )
        if all(use.split in (Gather, Unflatten, EachPixel) for use in self.uses.values()):
            raise ValueError("partition: model: has no convolution or pooling to split")
        seen = self._whole | set(self.uses)
        self.unused = [p for p, each in layers.items() if type(each) in LAYERS and p not in seen]

    def _prepared(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of a copy without values, whose layers record their calls."""
        if any(nn.parameter.is_lazy(each) for each in _tensors_of(model)):
            raise ValueError("partition: model: has lazy layers: run it once before")
        for path, module in model.named_modules():
            if any(getattr(module, hooks) for hooks in HOOKS):
                raise ValueError(
                    f"partition: layer {path}, {_line(module)}: has hooks, which would not see "
                    "whole images"
                )
        empty = {id(each): _without_values(each) for each in _tensors_of(model)}
        copy, inside = deepcopy(model, empty), set[int]()
        layers = dict(copy.named_modules())
        self._whole: set[str] = set()
        for path, module in layers.items():
            if id(module) in inside:
                continue
            if _is_layer(module):
                inside |= {id(each) for each in module.modules()}
                module.forward = partial(self._layer, path, module, module.forward)
            else:
                module.forward = partial(self._module, path, module.forward)
        return layers

    def _where(self) -> str:
        return f"layer {self._within[-1]}" if self._within[-1] else "model"

    def _module(self, path: str, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._within.append(path)
        result = forward(*given, **named)
        self._within.pop()
        return result

    def _layer(
        self, path: str, layer: nn.Module, forward: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        """Run a layer, and record its input's shape."""
        kind, parts = type(layer), [each for each in _tensors((given, named)) if _is_part(each)]
        split = LAYERS[kind][0] if kind in LAYERS else None
        where = f"partition: layer {path}, {_line(layer)}"
        if not parts:
            self._whole.add(path)
            if split is None or not split.on_whole:
                with self._inside():
                    return self._module(path, forward, *given, **named)
            self._note(where, path, _Use(layer, split, None, None))
            with self._inside():
                return torch.empty_like(given[0])
        if split is None:
            raise _Unfit(TypeError(f"{where}: cannot be split: {INSTEAD.get(kind, KNOWN)}"))
        if len(given) != 1 or named or parts[0].ndim != (3 if split is Unflatten else 4):
            given_shapes = [tuple(each.shape) for each in parts]
            raise _Unfit(
                TypeError(f"{where}: gets {given_shapes}: must be one map [batch, channels, "
                          "rows, columns]")
            )  # fmt: skip
        shape = _size(given[0])
        try:
            split.check(layer, shape)
            with self._inside():
                result = torch.empty_like(given[0]) if split.same else forward(given[0])
        except (ValueError, RuntimeError) as error:
            raise _Unfit(ValueError(f"{where}, on {shape}: {error}")) from None
        after = None if split.gathers else _size(result)
        self._note(where, path, _Use(layer, split, shape, after))
        return result if split.gathers else _mark(result)

    def _note(self, where: str, path: str, use: _Use) -> None:
        other = self.uses.setdefault(path, use)
        if other[1:] != use[1:] and use.split is not EachPixel:
            raise _Unfit(
                ValueError(f"{where}: is used on {other.shape} and on {use.shape} (None: after a "
                           "gather): use a separate layer for each")
            )  # fmt: skip

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Allow all functions, as they are called within a layer."""
        before, self._in_layer = self._in_layer, True
        yield
        self._in_layer = before

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function between layers; refuse one that would need other pixels."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        parts = [each for each in given if _is_part(each)]
        made = list(_tensors(result))
        if self._in_layer or not parts or not made:
            return result
        name = func.__name__.strip("_")
        if not _keeps_pixels(func, name, args, kwargs, given, made):
            shapes = ", ".join(str(tuple(each.shape)) for each in given)
            instead = INSTEAD.get(func.__name__, INSTEAD.get(name, f"use layers: {KNOWN}"))
            raise _Unfit(
                TypeError(
                    f"partition: {self._where()}: forward calls {func.__name__} on {shapes}, which "
                    f"may need pixels of other ranks: {instead}"
                )
            )
        for each in made:
            _mark(each)
        return result


class _Unfit(Exception):
    """Carries an error out of a forward that may catch other exceptions."""


def _keeps_pixels(
    func: Any, name: str, args: Any, kwargs: dict[str, Any], given: Any, made: Any
) -> bool:
    """Whether a function of parts of maps treats each pixel by itself."""
    size = _size(next(each for each in given if _is_part(each)))
    if any(_size(each) != size for each in made):
        return False
    # A whole tensor combined with a part must be the same for all pixels.
    if any(not _is_part(each) and each.ndim > 1 and _size(each) != (1, 1) for each in given):
        return False
    if any(not _is_part(each) and each.ndim == 1 and each.numel() > 1 for each in given):
        return False
    if name == "get":
        return str(func.__self__.__name__) in ("data", "requires_grad")
    ndim = made[0].ndim
    if name in JOINED:
        dim = kwargs.get("dim", kwargs.get("axis"))
        if dim is None:
            dim = args[-1] if len(args) > 1 and isinstance(args[-1], int) else 0
            if name in ("chunk", "split", "tensor_split") and len(args) < 3:
                dim = 0
        return dim % ndim < ndim - 2
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        plain = all(isinstance(each, int | slice) for each in index)
        return plain and len(index) <= args[0].ndim - 2
    if name == "unsqueeze":
        return args[0].ndim == 3 and (*args[1:], *kwargs.values()) == (1,)
    plain_name = name.lstrip("ir") if name not in POINTWISE else name
    return name in POINTWISE or plain_name in POINTWISE


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer of torch, or a user's layer without children."""
    if isinstance(module, (*LAYERS, *(each for each in INSTEAD if isinstance(each, type)))):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)


def _line(module: nn.Module) -> str:
    return str(module).partition("\n")[0]


def _size(x: torch.Tensor) -> Shape:
    rows, columns = x.shape[-2:] if x.ndim > 1 else (-1, -1)
    return rows, columns


def _mark(x: torch.Tensor) -> torch.Tensor:
    x.is_part = True  # type: ignore[attr-defined]
    return x


def _is_part(x: torch.Tensor) -> bool:
    return getattr(x, "is_part", False)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested sequences and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested sequences and dictionaries with tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_mapped(each, change) for each in value)
    return None


def _without_values(x: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(x, device="meta")
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in _tensors_of(model) if p.is_floating_point()), torch.float32)


def _device(model: nn.Module) -> torch.device:
    return next((each.device for each in _tensors_of(model)), CPU)


def _input_shape(model: nn.Module, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a batch of two images."""
    size = tuple(shape)
    if len(size) not in (2, 3) or not all(isinstance(n, int) and n > 0 for n in size):
        allowed = "must be (rows, columns) or (channels, rows, columns)"
        raise ArgumentError("partition", "shape", shape, allowed)
    if len(size) == 3:
        return (2, *size)
    for module in model.modules():
        if isinstance(module, nn.Unflatten):
            return (2, *size)
        for name in ("in_channels", "num_features", "num_channels"):
            if hasattr(module, name):
                return (2, int(getattr(module, name)), *size)
    return (2, 1, *size)
