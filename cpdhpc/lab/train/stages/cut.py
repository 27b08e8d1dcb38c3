"""Where a network is cut into stages, and what travels from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from ....ops.payloads import Raw, packed_wire


@dataclass(frozen=True)
class Stage:
    """Some blocks of a network, one after the other.

    index, count: which stage of how many
    blocks: with the names of parameters and buffers that they have in the network
    shape: of a sample of what it gives
    """

    index: int
    count: int
    blocks: torch.nn.Module
    shape: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """Whether it gives the network's outputs."""
        return self.index == self.count - 1


class _Blocks(torch.nn.Module):
    """Blocks by their names in the network, so that parameters keep theirs."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Module]]) -> None:
        super().__init__()
        self._in_turn = [block for _, block in named]
        for name, block in named:
            *above, last = name.split(".")
            place: torch.nn.Module = self
            for each in above:
                if each not in place._modules:
                    place.add_module(each, torch.nn.Module())
                place = place.get_submodule(each)
            place.add_module(last, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last block gives."""
        for block in self._in_turn:
            x = block(x)
        return x


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the names and modules whose composition a network is.

    A torch.nn.Sequential is its members, those within it are theirs in turn; another network says
    its modules by an attribute "blocks". Raises ValueError for others, and where parameters belong
    to no block.
    """
    if _is_sequential(model):
        return list(_members("", model))
    given = getattr(model, "blocks", None)
    names = {id(module): name for name, module in model.named_modules()}
    if given is None or not all(id(block) in names for block in given):
        raise ValueError(
            f"{type(model).__name__} cannot be cut: should be a torch.nn.Sequential, or have its "
            "modules, in turn, as .blocks"
        )
    blocks = [(names[id(block)], block) for block in given]
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            raise ValueError(f"{type(model).__name__} cannot be cut: {name} is in none of .blocks")
    return blocks


def _is_sequential(module: torch.nn.Module) -> bool:
    forward = type(module).forward
    return isinstance(module, torch.nn.Sequential) and forward is torch.nn.Sequential.forward


def _members(above: str, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    found = []
    for name, child in module.named_children():
        path = f"{above}{name}"
        found += _members(f"{path}.", child) if _is_sequential(child) else [(path, child)]
    return found


def cut(
    model: torch.nn.Module, count: int, begins: Sequence[int], factor: int, sample: torch.Tensor
) -> list[Stage]:
    """Return the stages of a network.

    begins: blocks that stages after the first begin with; empty: by parameters
    factor: of a filter, which must go with each cut
    sample: two inputs, with which the blocks are tried; no parameter or buffer changes
    Raises ValueError where the network cannot be cut so.
    """
    blocks = blocks_of(model)
    sizes = [sum(p.numel() for p in block.parameters() if p.requires_grad) for _, block in blocks]
    if begins and begins[-1] >= len(blocks):
        raise ValueError(f"stages.cut={list(begins)}: should be below {len(blocks)}, the blocks")
    starts = [0, *begins] if begins else balanced(sizes, count)
    stages = list[Stage]()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            x, whole = sample, model(sample)
            for index, (start, stop) in enumerate(pairwise([*starts, len(blocks)])):
                if not any(sizes[start:stop]):
                    raise ValueError(f"stages.cut: stage {index} has nothing to train")
                for name, block in blocks[start:stop]:
                    x = _tried(name, block, x, len(sample))
                shape = tuple(x.shape[1:])
                stages.append(Stage(index, count, _Blocks(blocks[start:stop]), shape))
                Filter(factor if index < count - 1 else 1, stages[-1].shape)
    finally:
        model.train(was_training)
    if not torch.equal(x, whole):
        raise ValueError(
            f"{type(model).__name__} cannot be cut: its blocks, one after the other, give others "
            "than the network"
        )
    held = set[int]()
    for stage in stages:
        stage.blocks.train(was_training)
        own = dict(stage.blocks.named_parameters())
        shared = [name for name, p in own.items() if id(p) in held]
        if shared:
            raise ValueError(f"stages.cut: {shared[0]} belongs to two stages")
        held |= set(map(id, own.values()))
    return stages


def _tried(name: str, block: torch.nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    """Return what a block gives. Raises ValueError unless float32[count, ...]."""
    y = block(x)
    if not isinstance(y, torch.Tensor):
        raise ValueError(f"block {name!r} gives {type(y).__name__}: should be a tensor")
    if y.dtype != torch.float32 or y.ndim < 2 or len(y) != count:
        raise ValueError(
            f"block {name!r} gives {y.dtype}{list(y.shape)} for {count} samples: should be float32 "
            "with the samples first"
        )
    return y


def balanced(sizes: Sequence[int], count: int) -> list[int]:
    """Return where parts begin, in each of which something lies, the largest as small as can be.

    sizes: of blocks; those of size 0 go with the block before
    Raises ValueError where there are fewer blocks of a size than parts.
    """
    firsts = [i for i, size in enumerate(sizes) if size]
    if len(firsts) < count:
        raise ValueError(f"stages.count={count}: the network has {len(firsts)} blocks to train")
    firsts[0] = 0
    weights = [sum(sizes[a:b]) for a, b in pairwise([*firsts, len(sizes)])]
    # ways[n]: of the first n + 1 weights the largest part, and where parts begin; n >= parts - 1
    ways: dict[int, tuple[int, list[int]]] = {
        n: (sum(weights[: n + 1]), [0]) for n in range(len(weights))
    }
    for parts in range(1, count):
        ways = {
            n: min(
                (max(ways[last - 1][0], sum(weights[last : n + 1])), [*ways[last - 1][1], last])
                for last in range(parts, n + 1)
            )
            for n in range(parts, len(weights))
        }
    return [firsts[i] for i in ways[len(weights) - 1][1]]


class Wire:
    """How values travel: float32[batch, ...] as bytes."""

    def __init__(self, name: str) -> None:
        packed = packed_wire(name, "stages")
        self._raw, self._payloads = packed is None, packed or Raw()

    def size_bytes(self, count: int) -> int:
        """Return the bytes of so many values."""
        return self._payloads.size_bytes(count)

    def encode(self, x: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Return the bytes of values; raw ones are the tensor's own."""
        values = x.detach().contiguous().numpy().reshape(-1)
        if self._raw:
            return values.view(np.uint8)
        payload = np.empty(self.size_bytes(values.size), np.uint8)
        self._payloads.encode(values, None, (0, 0), 0, payload)
        return payload

    def decode(self, payload: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values; raw ones are the payload's own memory, not to be changed."""
        if self._raw:
            return torch.from_numpy(payload.view(np.float32)).reshape(shape)
        values = np.empty(int(np.prod(shape)), np.float32)
        self._payloads.decode(payload, None, values)
        return torch.from_numpy(values).reshape(shape)


class Filter:
    """P, which takes means of neighbours, scaled so that P P^T = 1; and its transpose.

    factor: of maps [channels, height, width] squares of factor x factor pixels are one value, of
        other samples so many values of the last axis
    Raises ValueError for samples that the factor does not divide.
    """

    def __init__(self, factor: int, shape: tuple[int, ...]) -> None:
        axes = 2 if len(shape) == 3 else 1
        if any(n % factor for n in shape[-axes:]):
            raise ValueError(
                f"stages.filter={factor}: a cut has samples of {list(shape)}: should divide the "
                f"last {'two axes' if axes == 2 else 'axis'}"
            )
        self.factor, self.axes = factor, axes
        self.shape = (*shape[:-axes], *(n // factor for n in shape[-axes:]))
        self._scale = factor ** (-axes / 2)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """Return P x of samples [batch, ...]."""
        if self.factor == 1:
            return x
        width = x.shape[-1] // self.factor
        x = x.reshape(*x.shape[:-1], width, self.factor).sum(-1)
        if self.axes == 2:
            x = x.reshape(*x.shape[:-2], -1, self.factor, width).sum(-2)
        return x * self._scale

    def spread(self, p: torch.Tensor) -> torch.Tensor:
        """Return P^T p."""
        if self.factor == 1:
            return p
        for axis in range(-self.axes, 0):
            p = p.repeat_interleave(self.factor, axis)
        return p * self._scale
