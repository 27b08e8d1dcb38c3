"""Programs of a rank that holds a stage; the engine carries their messages.

Stage k maps z_k to y_k; x is z_0. With K stages and a multiplier l_k of each cut (0 if there are
none), training minimises the batch's mean of

    cross entropy of y_K-1 + sum over cuts of beta / 2 |P (z_k - y_k-1)|^2 + <l_k, P (z_k - y_k-1)>

P takes means of neighbouring values, scaled so that P P^T = 1; without filter it is 1. From a cut,
the gradient of that mean with respect to P y_k-1, times -1, is sent to the stage before.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from ...collectives.engine import Exchange, Program
from ...ops.payloads import Raw, packed_wire
from .losses import LossFunction
from .stages import Stages
from .step import naming_items


@dataclass(frozen=True)
class Stage:
    """Some blocks of a network, one after the other.

    index, count: number of the stage, and number of stages
    blocks: with the names of parameters and buffers that they have in the network
    shape: of a sample of its output
    """

    index: int
    count: int
    blocks: torch.nn.Module
    shape: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """Whether it returns the network's outputs."""
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
        for block in self._in_turn:
            x = block(x)
        return x


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the names and modules whose composition a network is.

    A torch.nn.Sequential consists of its members, nested ones of theirs; another network lists
    its modules in an attribute "blocks". Raises ValueError for others, and if parameters belong
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

    begins: first blocks of the stages after the first; empty: balanced by parameters
    factor: of a filter, which must suit each cut
    sample: two inputs, with which the blocks are tried; no parameter or buffer changes
    Raises ValueError if the network cannot be cut so.
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
    """Return a block's output. Raises ValueError unless it is float32[count, ...]."""
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
    """Return the begins of nonempty parts, so that the largest part is as small as possible.

    sizes: of blocks; those of size 0 belong to the block before
    Raises ValueError if there are fewer blocks with a size than parts.
    """
    firsts = [i for i, size in enumerate(sizes) if size]
    if len(firsts) < count:
        raise ValueError(f"stages.count={count}: the network has {len(firsts)} blocks to train")
    firsts[0] = 0
    weights = [sum(sizes[a:b]) for a, b in pairwise([*firsts, len(sizes)])]
    # ways[n]: for the first n + 1 weights the largest part, and the begins of parts; n >= parts - 1
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


class StageWire:
    """The encoding of values on their way: float32[batch, ...] as bytes."""

    def __init__(self, name: str) -> None:
        packed = packed_wire(name, "stages")
        self._raw, self._payloads = packed is None, packed or Raw()

    def size_bytes(self, count: int) -> int:
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

    factor: in maps [channels, height, width] squares of factor x factor pixels become one value,
        in other samples so many values of the last axis
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
        if self.factor == 1:
            return x
        width = x.shape[-1] // self.factor
        x = x.reshape(*x.shape[:-1], width, self.factor).sum(-1)
        if self.axes == 2:
            x = x.reshape(*x.shape[:-2], -1, self.factor, width).sum(-2)
        return x * self._scale

    def spread(self, p: torch.Tensor) -> torch.Tensor:
        if self.factor == 1:
            return p
        for axis in range(-self.axes, 0):
            p = p.repeat_interleave(self.factor, axis)
        return p * self._scale


@dataclass
class StageInput:
    """A stage's data on the samples of a batch: its input, and the multipliers."""

    z: torch.Tensor
    multiplier: torch.Tensor


@dataclass
class Done:
    """The results of a program.

    loss: of the share, by the last stage; busy_ns: processor time of the thread, without waits
    violation: sum of the squares of P (z - y) over values, of the cut before the stage
    """

    loss: float = 0.0
    busy_ns: int = 0
    error: Exception | None = None
    violation: float = 0.0
    values: int = 0


@dataclass(frozen=True)
class Work:
    """A share of a batch, as input of a stage.

    number: of the batch, by which stages keep their inputs; size: all its samples
    items: int64[b], the samples of this share
    inputs, targets: for the first and the last stage; key: of the network's random numbers
    """

    number: int
    items: npt.NDArray[np.int64]
    shares: int
    size: int
    inputs: torch.Tensor | None
    targets: torch.Tensor | None
    key: int

    @property
    def count(self) -> int:
        """Samples of the share."""
        return len(self.items)

    @property
    def weight(self) -> float:
        """Of a sample, so that the mean over shares of their sums is the mean over the batch."""
        return self.shares / self.size


class StageShare:
    """A stage that works on one share of the batches.

    below, above: ranks of the stages before and after, None if there is none
    below_shape: of a sample of the input; loss: of outputs and targets
    kept: by number of the batch
    """

    def __init__(
        self,
        stage: Stage,
        given: Stages,
        below: int | None,
        above: int | None,
        below_shape: tuple[int, ...],
        loss: LossFunction,
    ) -> None:
        self.stage, self.given, self.below, self.above = stage, given, below, above
        self.below_shape, self.loss, self.wire = below_shape, loss, StageWire(given.wire)
        self.filter_below = Filter(1 if below is None else given.filter, below_shape)
        self.filter_above = Filter(1 if above is None else given.filter, stage.shape)
        self.kept: dict[int, StageInput] = {}

    def serial(self, work: Work, train: bool) -> Program[Done]:
        """Forward and backward through all stages in turn.

        train: leave gradients of parameters; otherwise the inputs of stages are computed anew and
            kept, with their gradients, as a step of z or as multipliers
        """
        done, z = Done(), work.inputs
        if not work.count:
            return done
        if self.below is not None:
            z = yield from self._receive(self.below, work.count, self.below_shape)
        assert z is not None, "the first stage has inputs"
        needed = train or self.below is not None  # a gradient of anything here
        with torch.set_grad_enabled(needed), _busy(done):
            z, y = self._forward(z, work, done)
        direction = None
        if self.above is not None:
            yield from self._send(self.above, y)
            if needed:
                direction = yield from self._receive(self.above, work.count, self.stage.shape)
        with _busy(done):
            gradient = self._backward(z, y, direction, train, done) if needed else None
        if self.below is not None:
            assert gradient is not None, "it was requested"
            if train or self.stage.index > 1:  # the first stage has nothing else to compute
                yield from self._send(self.below, gradient)
            if not train:
                with _busy(done):
                    self._keep(z.detach(), gradient, work)
        return done

    def _keep(self, y: torch.Tensor, gradient: torch.Tensor, work: Work) -> None:
        """Keep the output of the stage below, and use its gradient as the method does.

        The multipliers begin so that z, which is y, would stay if z_rate is 1.
        """
        below, given = self.filter_below, self.given
        step = given.z_rate / work.weight * gradient
        if given.method == "lagrangian":
            self.kept[work.number] = StageInput(y, -below.means(step))
        else:
            zeros = torch.zeros(work.count, *below.shape)
            self.kept[work.number] = StageInput(y - step / given.beta, zeros)

    def local(self, work: Work, last: bool) -> Program[Done]:
        """Forward and backward of this stage alone, from the kept data of a batch.

        last: no step of the batch follows, and its data is dropped
        """
        done = Done()
        if not work.count:
            return done
        kept = None if self.below is None else self.kept[work.number]
        z = work.inputs if kept is None else kept.z
        assert z is not None, "the first stage has inputs"
        with _busy(done):
            z, y = self._forward(z, work, done)
        if self.above is not None:
            with _busy(done):
                means = self.filter_above.means(y.detach())
            yield from self._send(self.above, means)
        pull = came = None
        if self.below is not None and kept is not None:
            came = yield from self._receive(self.below, work.count, self.filter_below.shape)
            with _busy(done):
                residual = self.filter_below.means(z.detach()) - came
                pull = work.weight * (kept.multiplier + self.given.beta * residual)
                done.violation, done.values = float(residual.double().square().sum()), came.numel()
            yield from self._send(self.below, pull)
        direction = None
        if self.above is not None:
            direction = yield from self._receive(self.above, work.count, self.filter_above.shape)
        with _busy(done):
            if direction is not None:
                direction = -self.filter_above.spread(direction)
            gradient = self._backward(z, y, direction, True, done)
            if kept is not None and last:
                del self.kept[work.number]
            elif kept is not None and came is not None and pull is not None:
                assert gradient is not None, "kept data requires one"
                self._move(kept, gradient + self.filter_below.spread(pull), came, work.weight)
        return done

    def _move(
        self, kept: StageInput, gradient: torch.Tensor, came: torch.Tensor, weight: float
    ) -> None:
        """Step along the negative gradient, and update the multipliers by the residual."""
        given = self.given
        kept.z = kept.z - given.z_rate / (given.beta * weight) * gradient
        if given.method == "lagrangian":
            residual = self.filter_below.means(kept.z) - came
            kept.multiplier = kept.multiplier + given.beta * residual

    def _forward(
        self, z: torch.Tensor, work: Work, done: Done
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input, with requires_grad, and the outputs; for the last stage the loss.

        If the blocks fail, these are NaN and done has the error, as other ranks wait for them.
        """
        if self.below is not None:
            z = z.detach().requires_grad_(torch.is_grad_enabled())
        torch.default_generator.manual_seed(work.key)
        try:
            y = self.stage.blocks(z)
            if y.shape != (work.count, *self.stage.shape):
                raise ValueError(
                    f"stage {self.stage.index} gives {list(y.shape)} for {work.count} samples: "
                    f"should be {[work.count, *self.stage.shape]}"
                )
            if self.above is None:
                assert work.targets is not None, "the last stage has targets"
                with naming_items(work.items):
                    y = self.loss(y, work.targets)
                y = y * (work.count * work.shares / work.size)
                done.loss = float(y.detach())
        except Exception as error:
            done.error = error
            y = torch.full((work.count, *self.stage.shape), torch.nan)
        return z, y

    def _backward(
        self,
        z: torch.Tensor,
        y: torch.Tensor,
        direction: torch.Tensor | None,
        train: bool,
        done: Done,
    ) -> torch.Tensor | None:
        """Return the gradient of the input, None for the first stage.

        direction: the gradient of y; None: 1. train: leave that of parameters in p.grad
        """
        try:
            if done.error is None and train:
                y.backward(torch.ones_like(y) if direction is None else direction)  # type: ignore[no-untyped-call]
            elif done.error is None:
                z.grad = torch.autograd.grad(y, z, direction)[0]
        except Exception as error:
            done.error = error
        if self.below is None:
            return None
        return torch.full_like(z, torch.nan) if done.error or z.grad is None else z.grad

    def _send(self, to: int, x: torch.Tensor) -> Generator[Exchange, npt.NDArray[np.uint8], None]:
        yield Exchange(to, self.wire.encode(x), None, 0, 0, [], [self.stage.index])

    def _receive(
        self, source: int, count: int, shape: tuple[int, ...]
    ) -> Generator[Exchange, npt.NDArray[np.uint8], torch.Tensor]:
        whole = (count, *shape)
        place = np.empty(self.wire.size_bytes(int(np.prod(whole))), np.uint8)
        came = yield Exchange(None, None, source, place.size, 0, [self.stage.index], [], place)
        return self.wire.decode(came, whole)


@contextmanager
def _busy(done: Done) -> Iterator[None]:
    """Add the processor time of a block of statements."""
    began = time.thread_time_ns()
    yield
    done.busy_ns += time.thread_time_ns() - began
