"""Gradients of single samples as rows of numbers, and their inner products."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from ...config import ConfigError
from ..train.losses import LossFunction

Rows = tuple[torch.Tensor, torch.Tensor]

_SIGNS = 1  # stream of random numbers
PART_VALUES = 1 << 22  # signs that are made at once
KEPT_VALUES = 1 << 26  # signs that are kept between calls


class SampleGradients(ABC):
    """The gradients of samples with respect to some parameters of a model in evaluation mode.

    A sample's loss is the mean over its targets. sizes: values of each parameter by its number in
    the model, in the order of a row.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self.model, self.loss, self.sizes = model.eval(), loss, dict[int, int]()

    @property
    def values(self) -> int:
        """Number of values of a gradient."""
        return sum(self.sizes.values())

    @abstractmethod
    def rows(self, inputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        """Return the input of products, [b, width], and the losses, [b]."""

    def products(self, some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the inner products [n, m] of the gradients of rows [n, width] and [m, width]."""
        return some @ others.T

    def squares(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the squared lengths [n] of the gradients of rows."""
        return (rows * rows).sum(1)

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the gradients [n, values] of rows, by parameter."""
        return rows

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(outputs, targets, reduction="none").reshape(len(targets), -1).mean(1)

    def _sizes(self, names: Sequence[str]) -> dict[int, int]:
        parameters = dict(self.model.named_parameters())
        numbers = {name: number for number, name in enumerate(parameters)}
        return {numbers[name]: parameters[name].numel() for name in names}


class LastLayer(SampleGradients):
    """Gradients of the linear layer that runs last, in closed form: no backward but the loss's.

    With the layer's input h and the loss's derivative e by its output the gradient is e h^T, for
    the bias e; so (e . e') (h . h' + 1) is the inner product of two. A row is e and h, and 1 if
    there is a bias; if the layer is used at several places of a sample, the gradient itself.
    Raises ConfigError if there is no such layer, or its weight is shared or not trained.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, inputs: torch.Tensor) -> None:
        super().__init__(model, loss)
        names = {each: name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        used = list[nn.Linear]()
        hooks = [each.register_forward_hook(lambda layer, *_: used.append(layer)) for each in names]
        with torch.no_grad():
            model(inputs)
        for hook in hooks:
            hook.remove()
        if not used:
            raise ConfigError("--layers last: the model has no linear layer: name layers")
        self.layer = used[-1]
        self.name = names[self.layer]
        own = list(self.layer.parameters())
        every = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
        if any(every.count(id(p)) > 1 for p in own):
            raise ConfigError(f"--layers last: {self.name} shares its weights: name layers")
        if not all(p.requires_grad for p in own):
            raise ConfigError(f"--layers last: {self.name} was not trained: name layers")
        prefix = f"{self.name}." if self.name else ""
        self.sizes = self._sizes([prefix + name for name, _ in self.layer.named_parameters()])
        self.factors = False

    def rows(self, inputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        passed = list[tuple[torch.Tensor, torch.Tensor]]()
        hook = self.layer.register_forward_hook(lambda _, x, y: passed.append((x[0], y)))
        try:
            losses = self._losses(self.model(inputs), targets)
        finally:
            hook.remove()
        errors = torch.autograd.grad(losses.sum(), [y for _, y in passed])
        b = len(targets)
        if any(len(x) != b for x, _ in passed):
            raise ConfigError(f"--layers last: samples are not the first axis of {self.name}")
        e = torch.cat([each.reshape(b, -1, self.layer.out_features) for each in errors], 1)
        h = torch.cat([x.detach().reshape(b, -1, self.layer.in_features) for x, _ in passed], 1)
        self.factors = e.shape[1] == 1
        if self.factors:
            one = [h.new_ones(b, 1)] if self.layer.bias is not None else []
            return torch.cat([e[:, 0], h[:, 0], *one], 1), losses.detach()
        return self._outer(e, h), losses.detach()

    def _outer(self, e: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Return e h^T, summed over places, and the gradient of the bias: [b, values]."""
        weight = torch.einsum("bpm,bpk->bmk", e, h).flatten(1)
        return weight if self.layer.bias is None else torch.cat([weight, e.sum(1)], 1)

    def products(self, some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        if not self.factors:
            return some @ others.T
        at = self.layer.out_features
        return (some[:, :at] @ others[:, :at].T) * (some[:, at:] @ others[:, at:].T)

    def squares(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.factors:
            return super().squares(rows)
        e, h = rows[:, : self.layer.out_features], rows[:, self.layer.out_features :]
        return (e * e).sum(1) * (h * h).sum(1)

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.factors:
            return rows
        m, k = self.layer.out_features, self.layer.in_features
        return self._outer(rows[:, None, :m], rows[:, None, m : m + k])


class Layers(SampleGradients):
    """Gradients of all trained parameters, or of those of some layers, by torch.func.

    A model with recurrent layers processes one sample after the other.
    names: of parameters, or of modules, which stand for all their parameters; none: all
    Raises ConfigError for a name that the model does not have, or without trained parameters.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, names: Sequence[str] = ()) -> None:
        super().__init__(model, loss)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        for name in names:
            if not _within(name, trained):
                known = ", ".join(
                    dict.fromkeys(each.rpartition(".")[0] or each for each in trained)
                )
                raise ConfigError(
                    f"--layers {name}: no such layer, or it was not trained: must be last, all or "
                    f"some of {known}"
                )
        self.names = (
            trained
            if not names
            else [p for p in trained if any(_within(name, [p]) for name in names)]
        )
        self.sizes = self._sizes(self.names)
        # The LSTM of torch changes its state in place, which vmap does not support for all dtypes.
        self.recurrent = any(isinstance(each, nn.RNNBase) for each in model.modules())

    def rows(self, inputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        if self.recurrent:
            each = [self._row(x[None], y[None]) for x, y in zip(inputs, targets, strict=True)]
            return torch.stack([row for row, _ in each]), torch.cat([loss for _, loss in each])
        rest = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        rest = {name: tensor.detach() for name, tensor in rest.items()}
        chosen = {name: rest.pop(name) for name in self.names}

        def loss_of(chosen: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
            outputs = functional_call(self.model, (chosen, rest), (x[None],))
            return self._losses(outputs, y[None])[0]

        all_of = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
        with warnings.catch_warnings():  # vmap of attention is a loop, which is fine here
            warnings.filterwarnings("ignore", "There is a performance drop")
            gradients, losses = all_of(chosen, inputs, targets)
        return torch.cat([gradients[name].flatten(1) for name in self.names], 1), losses

    def _row(self, inputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        """Return gradient and loss of one sample: [values], [1]."""
        parameters = dict(self.model.named_parameters())
        loss = self._losses(self.model(inputs), targets)
        chosen = [parameters[name] for name in self.names]
        found = torch.autograd.grad(loss, chosen, materialize_grads=True)
        return torch.cat([each.flatten() for each in found]), loss.detach()


def _within(name: str, parameters: Sequence[str]) -> list[str]:
    return [each for each in parameters if each == name or each.startswith(f"{name}.")]


class Projection:
    """Random projections of gradients, whose inner products are right on average over seeds.

    A gradient is multiplied by a matrix of random signs over sqrt(width); each parameter has its
    own signs, by (seed, its number in the model), the same on all ranks. The variance of an inner
    product of a and b is at most (|a|^2 |b|^2 + (a . b)^2) / width. Source: Achlioptas:
    Database-friendly random projections, JCSS 66(4), 2003.
    sizes: of parameters; see SampleGradients
    """

    def __init__(self, sizes: Mapping[int, int], width: int, seed: int = 0) -> None:
        self.sizes, self.width, self.seed = sizes, width, seed
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return [n, width] of gradients [n, values]."""
        result = gradients.new_zeros(len(gradients), self.width)
        start, length = 0, max(1, PART_VALUES // self.width)
        for number, size in self.sizes.items():
            for first in range(0, size, length):
                part = gradients[:, start + first : start + min(first + length, size)]
                result += part @ self._signs(number, first, part.shape[1]).to(gradients)
            start += size
        return result

    def _signs(self, number: int, first: int, count: int) -> torch.Tensor:
        """Return float32[count, width], the signs of some values of a parameter, scaled."""
        if (number, first) in self._kept:
            return self._kept[number, first]
        path = np.random.SeedSequence([self.seed, _SIGNS, number, first])
        draws = np.random.Philox(path).random_raw(-(-count * self.width // 64)).astype("<u8")
        bits = np.unpackbits(draws.view(np.uint8), count=count * self.width)
        signs = (2 * bits.astype(np.float32) - 1) / np.float32(self.width**0.5)
        made = torch.from_numpy(signs.reshape(count, self.width))
        if sum(self.sizes.values()) * self.width <= KEPT_VALUES:
            self._kept[number, first] = made
        return made
