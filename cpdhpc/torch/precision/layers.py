"""Layers of torch whose tensors and products are rounded under a policy.

They are torch's own, with the same arguments, parameters and parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import sqrt
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config import validate
from .arithmetic import Arithmetic, parameters, products
from .operations import BatchedProduct, Convolution, Product
from .policy import LayerPolicy

Given = LayerPolicy | Mapping[str, Any] | None
Device = torch.device | str | int | None
Sizes = int | tuple[int, ...]  # one for all axes, or one for each
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Obedient(nn.Module):
    """A layer that obeys a policy; policy: LayerPolicy, or a table with its keys.

    parts: names of the sublayers that have products of their own
    """

    precision: nn.ModuleDict
    policy: LayerPolicy

    def __init__(self, *arguments: Any, policy: Given = None) -> None:
        super().__init__(*arguments)
        self.obey(policy)

    @property
    def parts(self) -> Sequence[str]:
        """The names of the sublayers that have products of their own."""
        return ("product",)

    def policy_of(self, part: str) -> LayerPolicy:
        """Return the policy of a part."""
        return self.policy

    def obey(self, policy: Given, name: str = "", seed: int = 0) -> None:
        """Set the policy. name: of the layer, in errors; with seed it selects random bits.

        Raises ConfigError if policy is not a policy.
        """
        given = policy if isinstance(policy, LayerPolicy) else dict(policy or {})
        where = name or type(self).__name__
        self.policy = validate(LayerPolicy, cast(Any, given), where)
        found = {
            part: Arithmetic(self.policy_of(part), f"{where}.{part}", seed) for part in self.parts
        }
        if any(each.keeps for each in found.values()):
            self.precision = nn.ModuleDict(found)
        else:  # so that a layer without state has no submodules, like torch's own
            self.__dict__["precision"] = nn.ModuleDict(found)

    def part(self, name: str) -> Arithmetic:
        """Return the roundings of a part."""
        found = cast(Arithmetic, self.precision[name])
        return found if found.training is self.training else found.train(self.training)

    def extra_repr(self) -> str:
        """Return the text for printing a model."""
        return ", ".join(filter(None, [super().extra_repr(), self.policy.told()]))


class Linear(Obedient, nn.Linear):
    """torch.nn.Linear whose tensors and products are rounded; policy: see LayerPolicy."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Given = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, policy=policy)

    def forward(self, x: Tensor) -> Tensor:
        """Return float[..., outputs] of float[..., inputs]."""
        of = self.part("product")
        return products(Product(), of, x, *parameters(of, self.weight, self.bias))


class _Conv(Obedient):
    """Common base of convolutions of all numbers of axes."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | Literal["valid", "same"] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Given = None,
    ) -> None:
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        super().__init__(*sizes, bias, padding_mode, device, dtype, policy=policy)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer = cast(nn.Conv2d, self)
        around, axes = layer._reversed_padding_repeated_twice, len(layer.stride)
        batched = x.dim() == axes + 2
        x = x if batched else x[None]
        padding: Sequence[int] = around[::-2]
        if layer.padding_mode != "zeros":
            x, padding = functional.pad(x, around, layer.padding_mode), [0] * axes
        elif around[::2] != around[1::2]:  # padding="same" and a kernel of even size
            x, padding = functional.pad(x, around), [0] * axes
        of = self.part("product")
        how = Convolution(layer.stride, padding, layer.dilation, layer.groups)
        output = products(how, of, x, *parameters(of, weight, bias))
        return output if batched else output[0]


class Conv1d(_Conv, nn.Conv1d):
    """torch.nn.Conv1d whose tensors and products are rounded; policy: see LayerPolicy."""


class Conv2d(_Conv, nn.Conv2d):
    """torch.nn.Conv2d whose tensors and products are rounded; policy: see LayerPolicy."""


class Conv3d(_Conv, nn.Conv3d):
    """torch.nn.Conv3d whose tensors and products are rounded; policy: see LayerPolicy."""


def _of_activations(policy: LayerPolicy) -> LayerPolicy:
    """Return the policy of products without parameters: both operands are activations."""
    return policy.model_copy(
        update={
            "weights": policy.activations,
            "weight_gradients": None,
            "weight_gradient": policy.input_gradient,
        }
    )


class BatchMatmul(Obedient):
    """torch.matmul of two activations; both gradients are summed like input_gradient."""

    def __init__(self, *, policy: Given = None) -> None:
        super().__init__(policy=policy)

    def policy_of(self, part: str) -> LayerPolicy:
        """See Obedient.policy_of."""
        return _of_activations(self.policy)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return float[..., m, n] of float[..., m, k] and float[..., k, n], broadcast as torch."""
        return _batch_matmul(self.part("product"), a, b)


def _batch_matmul(of: Arithmetic, a: Tensor, b: Tensor) -> Tensor:
    front = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    x, y = (each.expand(*front, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (a, b))
    weight, _ = parameters(of, y, None)
    return products(BatchedProduct(), of, x, weight).reshape(*front, a.shape[-2], b.shape[-1])


class Attention(Obedient, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention whose products are rounded; policy: see LayerPolicy.

    These are the products of query, key and value with their weights, of query with key, and of
    attention weights with values. The softmax is torch's. out_proj is a Linear.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Given = None,
    ) -> None:
        options = bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        super().__init__(embed_dim, num_heads, dropout, *options, policy=policy)
        out_proj: nn.Module = self.out_proj
        out_proj.__class__ = Linear
        cast(Linear, out_proj).obey(self.policy, "Attention.out_proj")

    @property
    def parts(self) -> Sequence[str]:
        """See Obedient.parts."""
        return ("query", "key", "value", "scores", "mixture")

    def policy_of(self, part: str) -> LayerPolicy:
        """See Obedient.policy_of."""
        return _of_activations(self.policy) if part in ("scores", "mixture") else self.policy

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the results of torch.nn.MultiheadAttention. Raises ValueError as it does."""
        if is_causal and attn_mask is None:
            raise ValueError("Attention: is_causal=True: needs attn_mask, like torch's")
        if not self.policy.changes:
            masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return self._by_torch(query, key, value, *masks)
        batched = query.dim() == 3
        given = [x if batched else x[None] for x in (query, key, value)]
        if batched and not self.batch_first:
            given = [x.transpose(0, 1) for x in given]
        q, k, v = self._projected(given)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, more.expand(len(x), 1, -1)], 1)
                for x, more in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        scores = _batch_matmul(self.part("scores"), q / sqrt(q.shape[-1]), k.mT)
        scores = self._masked(scores, attn_mask, key_padding_mask, batched)
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        mixture = _batch_matmul(self.part("mixture"), weights, v).transpose(1, 2).flatten(2)
        output: Tensor = self.out_proj(mixture)
        if not batched:
            output, weights = output[0], weights[0]
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights:
            return output, None
        return output, weights.mean(-3) if average_attn_weights else weights

    def _by_torch(self, query: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
        """Run forward if only out_proj is rounded: everything before it has torch's bits.

        torch applies out_proj's weights itself: it gets weights that change nothing.
        """
        bare, same = copy(self), nn.Module()
        same.weight = torch.eye(self.embed_dim, dtype=query.dtype, device=query.device)
        same.register_parameter("bias", None)
        bare._modules = {"out_proj": same}
        mixture, weights = nn.MultiheadAttention.forward(bare, query, *given)
        return self.out_proj(mixture), weights

    def _projected(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return float[batch, time, embedding], of query, key and value, with their weights."""
        packed: Tensor | None = self.in_proj_weight
        own = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = own if packed is None else packed.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        found = []
        for name, x, weight, bias in zip(self.parts, given, weights, biases, strict=False):
            of = self.part(name)
            found.append(products(Product(), of, x, *parameters(of, weight, bias)))
        return found

    def _masked(
        self, scores: Tensor, mask: Tensor | None, padding: Tensor | None, batched: bool
    ) -> Tensor:
        """Return float[batch, heads, time, keys], the sum of all masks; true: minus infinity."""
        if mask is not None:
            mask = mask if mask.dim() == 2 else mask.reshape(-1, self.num_heads, *mask.shape[1:])
            scores = scores + _added(mask, scores)
        if padding is not None:
            padding = padding if batched else padding[None]
            scores = scores + _added(padding, scores)[:, None, None]
        return scores


def _added(mask: Tensor, scores: Tensor) -> Tensor:
    """Return a mask to be added to scores; keys of bias_k and add_zero_attn are not masked."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))
    return functional.pad(mask, (0, scores.shape[-1] - mask.shape[-1]))


class Lstm(Obedient, nn.LSTM):
    """torch.nn.LSTM whose products are rounded; policy: see LayerPolicy.

    The inputs of all times are one product, the hidden values before each time one each. Gradients
    are summed over times in float32.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Given = None,
    ) -> None:
        options = bias, batch_first, dropout, bidirectional, proj_size, device, dtype
        super().__init__(input_size, hidden_size, num_layers, *options, policy=policy)

    @property
    def parts(self) -> Sequence[str]:
        """See Obedient.parts."""
        return [n.removeprefix("weight_") for n, _ in self.named_parameters() if "weight_" in n]

    def forward(  # type: ignore[override]
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the results of torch.nn.LSTM. Raises TypeError for packed sequences."""
        if not isinstance(x, Tensor):
            raise TypeError(f"Lstm: x is {type(x).__name__}: must be a tensor")
        if not self.policy.changes:
            return super().forward(x, hx)
        batched = x.dim() == 3
        x = x if batched else x[:, None]
        x = x.transpose(0, 1) if batched and self.batch_first else x
        hidden, cells = self._begun(x, hx, batched)
        ends: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.num_layers):
            if layer:
                x = functional.dropout(x, self.dropout, self.training)
            outputs = []
            for suffix in (f"l{layer}", f"l{layer}_reverse")[: 1 + self.bidirectional]:
                begun = hidden[len(ends)], cells[len(ends)]
                output, end = self._run(x, suffix, *begun)
                outputs.append(output)
                ends.append(end)
            x = torch.cat(outputs, -1)
        last = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        if not batched:
            return x[:, 0], (last[0][:, 0], last[1][:, 0])
        return x.transpose(0, 1) if self.batch_first else x, (last[0], last[1])

    def _begun(
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None, batched: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the values before the first time: float[layers * directions, batch, values]."""
        if hx is not None:
            return hx if batched else (hx[0][:, None], hx[1][:, None])
        count = self.num_layers * (1 + self.bidirectional), x.shape[1]
        hidden = x.new_zeros(*count, self.proj_size or self.hidden_size)
        return hidden, x.new_zeros(*count, self.hidden_size)

    def _run(
        self, x: Tensor, suffix: str, hidden: Tensor, cells: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return one layer's values in one direction: of all times, and of the last one."""
        entering = self._parameters_of("ih", suffix)
        recurrent = self._parameters_of("hh", suffix)
        projection = self._parameters_of("hr", suffix) if self.proj_size else None
        gates = products(Product(), self.part(f"ih_{suffix}"), x, *entering)
        backwards, found = suffix.endswith("_reverse"), []
        for time in gates.flip(0) if backwards else gates:
            added = products(Product(), self.part(f"hh_{suffix}"), hidden, *recurrent)
            i, f, g, o = (time + added).chunk(4, -1)
            cells = f.sigmoid() * cells + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cells.tanh()
            if projection is not None:
                hidden = products(Product(), self.part(f"hr_{suffix}"), hidden, *projection)
            found.append(hidden)
        values = torch.stack(found[::-1] if backwards else found)
        return values, (hidden, cells)

    def _parameters_of(self, kind: str, suffix: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = (getattr(self, f"{of}_{kind}_{suffix}", None) for of in ("weight", "bias"))
        assert weight is not None, "torch makes them"
        return parameters(self.part(f"{kind}_{suffix}"), weight, bias)
