"""Converts networks of torch, so that their layers obey a policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ...compress import Aggregator, LowBit, NoCompression
from ...compress.lowbit import LayerWire
from ...config import ConfigError, Raw, validate
from .arithmetic import IN_FLOAT32, Arithmetic
from .layers import Attention, Conv1d, Conv2d, Conv3d, Linear, Lstm, Obedient
from .policy import CHANGE, OTHERS, PRODUCTS, LayerPolicy, Policy

CONVERTED: dict[type[nn.Module], type[Obedient]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.MultiheadAttention: Attention,
    nn.LSTM: Lstm,
}
UNKNOWN = (  # layers whose products stay torch's, also in subclasses
    *(nn.RNN, nn.GRU, nn.RNNCellBase, nn.Bilinear),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
BY_TORCH = "products are torch's"  # the message for them
ENCODERS: dict[
    type[nn.Module], tuple[str, object]
] = {  # modules of torch that may bypass the forwards of their children -> what forbids it
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def convert(model: nn.Module, policy: Policy | Raw, seed: int = 0) -> nn.Module:
    """Change the model in place so that layers with rules in the policy obey them; return it.

    model: any network of torch. Layers keep their names, parameters and buffers, so that existing
        checkpoints load, and shared modules and tied weights stay shared. Linear, Conv1d, Conv2d,
        Conv3d, MultiheadAttention, LSTM and their subclasses have products; other layers with
        parameters, such as norms and embeddings, obey only the key outputs. Functions called
        directly in a forward are not converted. Layers that would stay float32 are not changed.
    policy: a Policy, or its tables as in a job file
    seed: of random numbers in evaluation
    bfloat16 and float16 layers compute in float32 and return their own dtype.
    Raises ConfigError, with the model unchanged, if the policy does not fit the model, for
    parameters of another dtype, and if a layer already obeys a policy.
    """
    if not isinstance(policy, Policy):
        policy = validate(Policy, policy, "convert")
    if policy.empty:
        return model
    layers = dict(model.named_modules())
    obeying = next((n for n, layer in layers.items() if isinstance(layer, Obedient)), None)
    if obeying is not None:
        raise ConfigError(f"convert: model: layer {obeying!r} obeys a policy already: convert once")
    found = obeyed(model, policy)
    _check_tensors(layers, found)
    for name, layer in layers.items():  # whose forward ignores out_proj's
        if isinstance(layer, nn.MultiheadAttention) and _joined(name, "out_proj") in found:
            found.setdefault(name, LayerPolicy())
    rows = {name: _row(layers[name]) for name in found}
    for name, row in rows.items():
        if row is None:
            _round_outputs(layers[name], found[name], name, seed)
        else:
            _obey(layers[name], row, found[name], name, seed)
    for layer in layers.values():
        for kind, (attribute, value) in ENCODERS.items():
            if isinstance(layer, kind) and any(isinstance(m, Obedient) for m in layer.modules()):
                setattr(layer, attribute, value)
    return model


def resolved(model: nn.Module, policy: Policy) -> dict[str, LayerPolicy]:
    """Return, by name, the policy of each layer for which it has rules.

    For layers with products, and for all with parameters, which ignore the keys of products.
    Raises ConfigError as convert does.
    """
    names: dict[int, list[str]] = {}
    layers: dict[str, nn.Module] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        names.setdefault(id(layer), []).append(name)
        if len(names[id(layer)]) == 1 and (_has_products(layer) or layer._parameters):
            layers[name] = layer
    with_products = [name for name, layer in layers.items() if _has_products(layer)]
    others = [name for name in layers if name not in with_products]
    more = {name: names[id(layer)][1:] for name, layer in layers.items()}
    found = policy.of_layers(with_products, others, more)
    for name, of in found.items():
        for other in more[name]:
            if policy.of(other, with_products) != of:
                raise ConfigError(
                    f"precision: {name} and {other} are one layer, but have different rules"
                )
    left = unconverted(model)
    if policy.is_complete and left:
        known = ", ".join(kind.__name__ for kind in CONVERTED)
        raise ConfigError(
            f"precision.complete=true: layer {left[0]} ({type(layers[left[0]]).__name__}) keeps "
            f"torch's products: rounded are those of {known}"
        )
    heard = {n: of if n in with_products else of.only(OTHERS) for n, of in found.items()}
    _check_tied(layers, heard)
    return {name: heard[name] for name in layers if heard[name].said()}


OF_PARAMETERS = ("update", "states", "wire")  # keys that a parameter of several layers has once


def _check_tied(layers: dict[str, nn.Module], found: dict[str, LayerPolicy]) -> None:
    """Raise ConfigError if layers that share a parameter would change it in different ways."""
    first: dict[torch.Tensor, str] = {}
    for name, layer in layers.items():
        for parameter in filter(lambda each: each is not None, layer._parameters.values()):
            other = first.setdefault(cast(torch.Tensor, parameter), name)
            for key in OF_PARAMETERS:
                ways = [getattr(found[each], key) for each in (other, name)]
                if None not in ways and ways[0] != ways[1]:
                    raise ConfigError(
                        f"precision: {other} and {name} share a parameter, but have different "
                        f"rules for its {key}"
                    )


def obeyed(model: nn.Module, policy: Policy) -> dict[str, LayerPolicy]:
    """Return, by name, the policy of each layer that convert would change; see resolved."""
    rows = resolved(model, policy).items()
    return {name: of.only(CHANGE) for name, of in rows if of.changes}


def unconverted(model: nn.Module) -> list[str]:
    """Return the names of the layers whose products stay torch's under any policy."""
    kinds: tuple[type[nn.Module], ...] = (*CONVERTED, *UNKNOWN)
    return [n for n, m in model.named_modules() if isinstance(m, kinds) and not _has_products(m)]


def unheard(model: nn.Module, policy: Policy) -> list[str]:
    """Return the names of those that rules for products match nevertheless."""
    return [name for name in unconverted(model) if policy.of(name).said().keys() & PRODUCTS]


def by_parameter(model: nn.Module, policy: Policy) -> dict[torch.Tensor, LayerPolicy]:
    """Return the policy of updates and states, by parameter; see resolved.

    model: converted or not; a parameter of several layers obeys the first one's rules
    """
    found: dict[torch.Tensor, LayerPolicy] = {}
    for name, of in resolved(model, policy).items():
        if of.update is not None or of.states is not None:
            for parameter in model.get_submodule(name).parameters(recurse=False):
                found.setdefault(parameter, of)
    return found


def aggregator_of(model: nn.Module, policy: Policy, given: Aggregator) -> Aggregator:
    """Return the aggregator for gradients: given, with the wires of the policy; see resolved.

    Raises ConfigError if there are some and given is neither "none" nor "lowbit".
    """
    rows = resolved(model, policy).items()
    layers = {name: LayerWire(of.wire) for name, of in rows if of.wire is not None}
    if not layers:
        return given
    if isinstance(given, NoCompression):
        return LowBit("lowbit", "raw", given.algorithm, machine=given.machine, layers=layers)
    if isinstance(given, LowBit):
        return replace(given, layers={**given.layers, **layers})
    raise ConfigError(
        f"precision: wire: goes with gradient.aggregator none or lowbit: came {given!r:.60}"
    )


def _has_products(layer: nn.Module) -> bool:
    return isinstance(layer, Obedient) or _row(layer) is not None


def _row(layer: nn.Module) -> type[Obedient] | None:
    """Return the class that a layer is converted to; None if its products are unknown here."""
    for kind, becomes in CONVERTED.items():
        if isinstance(layer, kind):
            own = type(layer).__mro__[: type(layer).__mro__.index(kind)]
            return becomes if all(map(_asks_torch, own)) else None
    return None


def _asks_torch(kind: type[Any]) -> bool:
    """Whether a class derived from a layer uses the layer's own products.

    It does if it has no forward of its own, or one that calls super().
    """
    own = (vars(kind).get(name) for name in ("forward", "_conv_forward"))
    return all(function is None or _calls_super(function) for function in own)


def _calls_super(function: Callable[..., Any]) -> bool:
    """Whether a method uses super(): then the compiler gives it a free variable __class__."""
    return "__class__" in inspect.unwrap(function).__code__.co_freevars


def _obey(layer: nn.Module, becomes: type[Obedient], of: LayerPolicy, name: str, seed: int) -> None:
    """Convert a layer in place: it stays the same object, as others may share it."""
    kind = type(layer)
    if not (kind in CONVERTED or kind.__module__.startswith("torch.")):
        becomes = type(kind.__name__, (kind, becomes), {})
    layer.__class__ = becomes
    assert isinstance(layer, Obedient), "its class is one"
    layer.obey(of, name, seed)


def _round_outputs(layer: nn.Module, of: LayerPolicy, name: str, seed: int) -> None:
    """Make a layer without products round its outputs."""
    arithmetic = Arithmetic(of, name, seed)
    if arithmetic.keeps:
        layer.add_module("precision", arithmetic)
    layer.register_forward_hook(arithmetic.round_output)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _check_tensors(layers: dict[str, nn.Module], found: dict[str, LayerPolicy]) -> None:
    """Raise ConfigError for parameters that do not exist yet, or that float32 cannot hold."""
    for name in found:
        if torch.nn.utils.parametrize.is_parametrized(layers[name]):
            raise ConfigError(
                f"convert: model: {name} is parametrized: convert before parametrizations are "
                "registered, or take them off"
            )
        for key, parameter in layers[name].named_parameters(recurse=False):
            where = f"convert: model: {_joined(name, key)}"
            if torch.nn.parameter.is_lazy(parameter):
                raise ConfigError(f"{where} is not initialised: run a batch through it first")
            if parameter.dtype not in IN_FLOAT32:
                raise ConfigError(
                    f"{where} is {parameter.dtype}: allowed are float32, bfloat16 and float16, "
                    "which float32 holds"
                )
