"""The formats of each tensor and each sum of a network: rules by layer, and named policies."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from ...config import ConfigError, Raw, Section, Whole, dump_toml, validate
from ...formats import Overflow, Rounding, wire_format
from ...methods import suggest
from ...ops.products import Order
from ...options import Agreed
from .products import matmul
from .tensors import TensorFormat, UpdateFormat

Table = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """rules: the tables [[precision.rule]]; source: the paper or standard

    train: the source's settings of [train], used unless the job file has its own
    leaves_out: differences from the source
    """

    rules: tuple[Table, ...]
    source: str
    leaves_out: str
    train: Table = field(default_factory=dict)

    @property
    def policy(self) -> Table:
        """The section [precision]."""
        return {"rule": list(self.rules)} if self.rules else {}


def _all(keys: str, how: str | Table) -> Table:
    return dict.fromkeys(keys.split(), how)


SATURATED = {"overflow": "saturate"}
DELAYED = {"scaling": "delayed", "history": 16, **SATURATED}
WANG_SUMS = {"accumulate": "e6m9", "chunk": 64, "overflow": "saturate"}
WANG_STEP = {"format": "e6m9", "rounding": "stochastic", **SATURATED}
FLEX = {"format": "int16", "scaling": "flexpoint", "history": 16}
FIXED = {"scaling": "fixed", "history": 100, "overflow_rate": 1e-4, "warmup": 100}
OPERANDS, TENSORS = "weights activations errors", "weights activations outputs errors"

PRESETS: dict[str, Preset] = {
    "float32": Preset((), "IEEE 754-2019", "nothing"),
    "bf16": Preset(
        ({"layers": "*", **_all(f"{TENSORS} weight_gradients", "bf16")},),
        "Kalamkar et al., A study of BFLOAT16 for deep learning training, arXiv 1905.12322",
        "the order of sums in a processor's float32",
    ),
    "fp16": Preset(
        ({"layers": "*", **_all(f"{TENSORS} weight_gradients", "fp16")},),
        "Micikevicius et al., Mixed precision training, arXiv 1710.03740",
        "the order of sums in a processor's float32; norms and softmax alone in float32",
        {"loss_scaling": "dynamic"},
    ),
    "fp8-hybrid": Preset(
        (
            {
                "layers": "*",
                **_all("weights activations", {"format": "e4m3fn", **DELAYED}),
                "errors": {"format": "e5m2", **DELAYED},
            },
        ),
        "Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433; delayed scaling as "
        "in NVIDIA's Transformer Engine",
        "bf16 outside products; a history of 1,024; first scales of 1: here those of the tensors",
    ),
    "mxfp8": Preset(
        ({"layers": "*", **_all(OPERANDS, "mxfp8")},),
        "OCP Microscaling Formats v1.0; Rouhani et al., arXiv 2310.10537",
        "bf16 outside products",
    ),
    "mxfp4": Preset(
        ({"layers": "*", **_all(OPERANDS, "mxfp4")},),
        "OCP Microscaling Formats v1.0; Rouhani et al., arXiv 2310.10537",
        "bf16 outside products; more bits for some operands, as the paper has to train with 4",
    ),
    "e2m1-stochastic": Preset(
        (
            {
                "layers": "*",
                **_all("weights activations", {"format": "e2m1fn", "scaling": "block16"}),
                "errors": {"format": "e2m1fn", "scaling": "block16", "rounding": "stochastic"},
            },
        ),
        "Chmiel et al., Accurate neural training with 4-bit matrix multiplications at standard "
        "formats, arXiv 2112.10769; blocks of 16 as in NVIDIA's NVFP4",
        "scales in e4m3: here powers of two, so that the largest values may saturate; Hadamard "
        "transforms; two roundings of each error; layers in bf16",
    ),
    "flexpoint16": Preset(
        (
            {
                "layers": "*",
                **_all(f"{TENSORS} weight_gradients states", FLEX),
                "update": FLEX | {"master": False},
            },
        ),
        "Koester et al., Flexpoint: an adaptive numerical format for efficient training of deep "
        "neural networks, NIPS 2017",
        "the limits of 5 bits of exponent; sums are float32's and not 48-bit integers; Autoflex's "
        "term for mantissas of 1",
    ),
    "wang2018": Preset(
        (
            {
                "layers": "*",
                **_all(OPERANDS, {"format": "e5m2", **SATURATED}),
                **_all("forward input_gradient weight_gradient", WANG_SUMS),
                "states": WANG_STEP,
                "update": WANG_STEP | {"master": False},
            },
            {"layers": "<first>", "activations": {"format": "e6m9", **SATURATED}},
            {"layers": "<last>", **_all(OPERANDS, {"format": "e6m9", **SATURATED})},
        ),
        "Wang et al., Training deep neural networks with 8-bit floating point numbers, arXiv "
        "1812.08011",
        "a scale of 1,000, here 1,024; roundings between the three sums of a step: states and "
        "weights are rounded once",
        {"loss_scale": 1024.0},
    ),
    "courbariaux": Preset(
        (
            {
                "layers": "*",
                **_all(f"{TENSORS} weight_gradients", {"format": "int10", **FIXED}),
                "update": {"format": "int12", **FIXED, "master": False},
            },
        ),
        "Courbariaux et al., Training deep neural networks with low precision multiplications, "
        "arXiv 1412.7024: dynamic fixed point, 10 bits and 12 for updates, overflow of 0.01 %",
        "scales of a whole run in more bits, after which it begins anew: here of 100 calls in "
        "float32, which go on; an interval of 10,000 samples: here 100 "
        "iterations; maxout and dropout",
    ),
}


TORCH = "torch"  # instead of a format of sums
FIRST, LAST = "<first>", "<last>"  # patterns: the first and last layer with products
SHOWN = 12  # names in an error


class Sums(Section):
    """forward, input_gradient, weight_gradient: how products are summed, see precision.matmul.

    accumulate: format of each partial sum; "torch": torch's own float32 product, with its bits
    products, order, rounding, random_bits, overflow, chunk, between, kahan: see precision.matmul
    """

    accumulate: str = "fp32"
    products: str | None = None
    order: Order = "ascending"
    rounding: Rounding = "nearest"
    random_bits: Annotated[int, Field(ge=0, le=31)] = 0
    overflow: Overflow | None = None
    chunk: Whole = 0
    between: str | None = None
    kahan: bool = False

    @property
    def by_torch(self) -> bool:
        """Whether torch computes it."""
        return self.accumulate == TORCH

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of precision.matmul."""
        return self.model_dump()

    @model_validator(mode="after")
    def _goes_together(self) -> Sums:
        if self.by_torch and self != Sums.model_construct(accumulate=TORCH):
            raise ValueError(f"accumulate={TORCH!r}: allows no other key")
        if not self.by_torch:
            matmul(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), **self.arguments)
        return self


def _named(key: str) -> tuple[BeforeValidator, PlainSerializer]:
    """Let a string stand for a table with this one key, for reading and writing."""

    def short(table: Section | None) -> Any:
        said = {} if table is None else table.model_dump(exclude_defaults=True)
        return said[key] if said.keys() == {key} else table and said

    return (
        BeforeValidator(lambda raw: {key: raw} if isinstance(raw, str) else raw),
        PlainSerializer(short),
    )


Tensor = Annotated[TensorFormat | None, *_named("format")]
Summed = Annotated[Sums | None, *_named("accumulate")]
Updated = Annotated[UpdateFormat | None, *_named("format")]


class LayerPolicy(Section, Agreed):
    """The rules of a layer; None: no rule, so float32.

    weights, activations: the operands of its products; activations are the layer's input
    errors: gradients of its output; weight_gradients: those of its parameters
    outputs: its output; the only key for norms, embeddings and other layers without products
    forward, input_gradient, weight_gradient: the summation of its three products; a format alone
        is accumulate
    states: of the optimizer; update: the rounding of updated weights; wire: of the layer's
        gradients
    """

    weights: Tensor = None
    activations: Tensor = None
    errors: Tensor = None
    weight_gradients: Tensor = None
    outputs: Tensor = None
    forward: Summed = None
    input_gradient: Summed = None
    weight_gradient: Summed = None
    states: Tensor = None
    update: Updated = None
    wire: str | None = None

    @field_validator("wire")
    @classmethod
    def _is_known(cls, wire: str | None) -> str | None:
        if wire is not None:
            wire_format(wire)
        return wire

    def said(self) -> dict[str, Any]:
        """Return the keys that are set, and their values."""
        each = ((key, getattr(self, key)) for key in LayerPolicy.model_fields)
        return {key: value for key, value in each if value is not None}

    def only(self, keys: Collection[str]) -> LayerPolicy:
        """Return the policy with only some keys."""
        return LayerPolicy(**{key: value for key, value in self.said().items() if key in keys})

    @property
    def changes(self) -> bool:
        """Whether a layer computes anything other than torch's layer would."""
        found = self.only(CHANGE).said().values()
        return any(not each.by_torch if isinstance(each, Sums) else each.rounds for each in found)

    def told(self) -> str:
        """Return the keys that are set as readable text, in one line."""
        return ", ".join(
            f"{key}={_word(value)}"
            for key, value in self.model_dump().items()
            if value is not None and key in LayerPolicy.model_fields
        )


PRODUCTS = {  # keys that need a layer with products
    *("weights", "activations", "errors", "weight_gradients"),
    *("forward", "input_gradient", "weight_gradient"),
}
OTHERS = {*LayerPolicy.model_fields} - PRODUCTS
CHANGE = {*PRODUCTS, "outputs"}  # keys that change what a layer computes


class Rule(LayerPolicy):
    """[[precision.rule]]: rules for the layers of a pattern; for each key the last match wins.

    layers: pattern of module names, such as "conv*" or "layer?.*.fc[12]"; "<first>" and "<last>"
        are the first and last layer that has products
    """

    layers: Annotated[str, Field(min_length=1)]

    @field_validator("layers")
    @classmethod
    def _is_pattern(cls, pattern: str) -> str:
        if "[" in re.sub(r"\[!?.[^]]*]", "", pattern):  # a remaining [ is not closed
            raise ValueError("a [ without its ]: sets of characters are [ab] or [!ab], [ is [[]")
        return pattern

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if not self.said():
            known = ", ".join(LayerPolicy.model_fields)
            raise ValueError(f"layers={self.layers!r}: has no rule: allowed keys are {known}")
        return self

    def matches(self, name: str, products: Sequence[str] = ()) -> bool:
        """Return whether it matches a layer; products: the names of the layers with products."""
        ends = {FIRST: products[:1], LAST: products[-1:]}
        return name in ends.get(self.layers, ()) or fnmatchcase(name, self.layers)


class Policy(Section):
    """[precision]: formats of tensors and of sums in forward and backward, by layer.

    preset: policy to which the rules are added, see `cpdhpc precision presets`; "": none
    complete: true: a layer with products but without a rule is an error
    rule: [[precision.rule]], in their order
    """

    preset: str = ""
    complete: bool = False
    rule: Annotated[tuple[Rule, ...], Field(strict=False)] = ()

    @field_validator("preset")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name and name not in PRESETS:
            raise ValueError(suggest(name, PRESETS))
        return name

    @property
    def empty(self) -> bool:
        """Whether it has no rules, so that networks stay unchanged."""
        return not self.rules

    @property
    def is_complete(self) -> bool:
        """Whether it or its preset requires a rule for each layer with products."""
        return self.complete or self._of_preset.complete

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The preset's rules and its own."""
        return (*self._of_preset.rule, *self.rule)

    @property
    def warmup(self) -> int:
        """The largest number of calls before a tensor with scaling "fixed" is rounded."""
        said = (each for rule in self.rules for each in vars(rule).values())
        return max((getattr(each, "warmup", 0) for each in said), default=0)

    @property
    def _of_preset(self) -> Policy:
        if not self.preset:
            return NOTHING
        return validate(Policy, PRESETS[self.preset].policy, f"preset {self.preset}")

    def of(self, name: str, products: Sequence[str] = ()) -> LayerPolicy:
        """Return the rules of the module of a name.

        products: the names of all layers with products, among which "<first>" and "<last>" are
        """
        said: dict[str, Any] = {}
        for rule in self.rules:
            if rule.matches(name, products):
                said |= rule.said()
        return LayerPolicy(**said)

    def of_layers(
        self,
        products: Sequence[str],
        others: Sequence[str],
        more: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> dict[str, LayerPolicy]:
        """Return the rules of each layer of a network, by name.

        products: names of the layers with products, in their order; others: with parameters
        more: further names of layers that have several
        Raises ConfigError for a rule that matches no layer, for rules of products if no layer has
        any, and, if the policy is complete, for a layer with products but without a rule.
        """
        for index, rule in enumerate(self.rule):
            obeys = rule.said().keys()
            known = [*products, *others] if obeys - PRODUCTS else [*products]
            known += [also for name in known for also in more.get(name, ())]
            if not any(rule.matches(name, products) for name in known):
                what = "layer" if obeys - PRODUCTS else "layer with products"
                raise ConfigError(
                    f"precision.rule.{index}.layers={rule.layers!r}: matches no {what}: "
                    f"{_shown(rule.layers, known)}"
                )
        found = {name: self.of(name, products) for name in (*products, *others)}
        if not products and any(rule.said().keys() & PRODUCTS for rule in self.rules):
            raise ConfigError("precision: the model has no layer with products that is converted")
        heard = [rule for rule in self.rules if rule.said().keys() & CHANGE]
        free = [n for n in products if not any(rule.matches(n, products) for rule in heard)]
        if free and self.is_complete:
            raise ConfigError(
                f"precision.complete=true: no rule for {', '.join(free[:SHOWN])}: each layer "
                "with products needs one for its tensors or sums"
            )
        return found

    def toml(self) -> str:
        """Return it as TOML text, without unset keys."""
        raw: Raw = self.model_dump(exclude_defaults=True)
        rules = [{"layers": each.pop("layers"), **each} for each in raw.pop("rule", [])]
        return dump_toml({"precision": raw | ({"rule": rules} if rules else {})})


def _word(value: str | Raw) -> str:
    """Return a word, or a table in one line."""
    if isinstance(value, str):
        return value
    return "{" + ", ".join(f"{k} = {v}" for k, v in value.items()) + "}"


def _shown(pattern: str, names: Sequence[str]) -> str:
    if len(names) <= SHOWN:
        return suggest(pattern, names) if names else "there is none"
    return suggest(pattern, [*names[: SHOWN - 1], f"and {len(names) - SHOWN + 1} others"])


NOTHING = Policy()
