"""Adversarial copies made with earlier parameters, and the gradient of samples and copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ...collectives import sparse
from ...compress.base import Array
from ...compress.bucket import State
from ...config import ConfigError
from ...ops.tensors import bytes_of, of_bytes, values_of
from ...world.ranks import Ranks
from .losses import Adversarial, LossFunction
from .samples import Samples, device_of, taken

OF_COPIES = "adversarial_"  # prefix of the names of copies' statistics
BEFORE = "before"  # entry of the state: float32[tau, ...], parameters of the last steps


def add_statistics(model: torch.nn.Module) -> None:
    """Give each batch norm a second set of buffers, initially equal to the first."""
    for norm in _norms(model):
        for name, buffer in list(norm.named_buffers(recurse=False)):
            norm.register_buffer(OF_COPIES + name, buffer.clone())


def _norms(model: torch.nn.Module) -> list[_BatchNorm]:
    return [each for each in model.modules() if isinstance(each, _BatchNorm)]


class Adversary:
    """Makes the copies of a run, and keeps the state for it: parameters of tau steps.

    of: already checked against the ranks
    Raises ConfigError on all ranks if parameters are not float32.
    """

    def __init__(self, of: Adversarial, model: torch.nn.Module, world: Ranks) -> None:
        self.of, self.model, self.world = of, model, world
        for name, parameter in model.named_parameters():
            if parameter.dtype is not torch.float32:
                raise ConfigError(f"adversarial: {name} is {parameter.dtype}: must be float32")
        self.state = State(world.hosted, world.ranks)
        self._norms = _norms(model)
        self._statistics: list[torch.Tensor] = []

    def part(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's part of a batch, and the number of parts."""
        parts = self.world.ranks // self.of.groups
        return rank % parts, parts

    def loss_of(
        self,
        rank: int,
        iteration: int,
        loss: LossFunction,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of a rank's part: of samples, of copies, or the mean of both.

        One forward for both, so that hooks see each gradient once. Raises ConfigError for integers.
        """
        parts, losses = self.world.ranks // self.of.groups, []
        if self.of.groups == 1 or rank < parts:
            losses.append(loss(self.model(inputs), targets))
        if self.of.trained and (self.of.groups == 1 or rank >= parts):
            old = self._old(iteration)
            copies = self.copies(inputs, targets, loss, old)
            with self._of_copies():
                losses.append(loss(self.model(copies), targets))
        if self.of.groups > 1 and rank == parts:  # its statistics are shared with all ranks
            self._statistics = [each.clone() for each in self._buffers()]
        return torch.stack(losses).mean()

    def copies(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss: LossFunction,
        parameters: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return inputs, each value changed by epsilon so that the loss at parameters grows.

        Source: fast gradient sign method, Goodfellow et al., arXiv 1412.6572, section 4.
        """
        if not inputs.is_floating_point():
            raise ConfigError(f"adversarial: inputs are {inputs.dtype}: must be floating point")
        x = inputs.detach().clone().requires_grad_()
        buffers = {name: each.clone() for name, each in self.model.named_buffers()}
        with torch.enable_grad():
            outputs = torch.func.functional_call(self.model, parameters | buffers, (x,))
            (gradient,) = torch.autograd.grad(loss(outputs, targets), x)
        changed = x.detach() + self.of.epsilon * gradient.sign()
        if self.of.low is None and self.of.high is None:
            return changed
        return changed.clamp(self.of.low, self.of.high)

    def now(self) -> dict[str, torch.Tensor]:
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def _kept(self, name: str, parameter: torch.Tensor) -> Array:
        """Return float32[tau, ...] of a parameter; initially its current value in each row."""
        shape = (self.of.tau, *[1] * parameter.dim())
        return self.state.shared(name, BEFORE, lambda: values_of(parameter.repeat(shape)))

    def _old(self, iteration: int) -> dict[str, torch.Tensor]:
        """Return the parameters of tau steps ago; of the first step if there were fewer."""
        if not self.of.tau:
            return self.now()
        slot = iteration % self.of.tau
        kept = {name: self._kept(name, each) for name, each in self.now().items()}
        device = device_of(self.model)
        return {name: torch.from_numpy(each[slot]).to(device) for name, each in kept.items()}

    def remember(self, iteration: int) -> None:
        """Keep the parameters of a step, replacing those that are tau steps old."""
        if self.of.tau and self.of.trained:
            for name, parameter in self.now().items():
                self._kept(name, parameter)[iteration % self.of.tau] = values_of(parameter)

    @contextmanager
    def _of_copies(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for norm in self._norms:
            held = norm._buffers
            for name in [name for name in held if not name.startswith(OF_COPIES)]:
                held[name], held[OF_COPIES + name] = held[OF_COPIES + name], held[name]

    def _buffers(self) -> list[torch.Tensor]:
        named = self.model.named_buffers()
        return [each for name, each in named if name.rpartition(".")[2].startswith(OF_COPIES)]

    def share(self) -> None:
        """Copy the statistics of copies from the second group's first rank to all. Collective.

        If ranks compute both halves, the reducer has shared them with the other buffers.
        """
        buffers = self._buffers()
        if self.of.groups == 1 or not buffers:
            return
        root = self.world.ranks // 2
        data = values_of(bytes_of(self._statistics or buffers))
        given = [data if rank == root else None for rank in self.world.hosted]
        found = of_bytes(sparse.broadcast(self.world, given, root), buffers)
        for buffer, values in zip(buffers, found, strict=True):
            buffer.copy_(values)


class Attacked:
    """Samples with each input changed so that the loss of the current model grows."""

    def __init__(self, adversary: Adversary, samples: Samples, loss: LossFunction) -> None:
        self.adversary, self.samples, self.loss = adversary, samples, loss

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, index: Array, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = taken(self.samples, index, seed, device_of(self.adversary.model))
        now = self.adversary.now()
        return self.adversary.copies(inputs, targets, self.loss, now), targets
