"""Policies of papers and of processors by name, each with what it leaves out of its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Table = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """rules: the tables [[precision.rule]]; source: whose they are

    train: what the source has under [train], where the job file does not say otherwise
    leaves_out: what the source has, and this has not
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


FP16 = {"format": "fp16", "overflow": "inf"}  # an overflow has to show, so that a step is skipped
DELAYED = {"scaling": "delayed", "history": 16}
WANG_SUMS = {"accumulate": "e6m9", "chunk": 64, "overflow": "saturate"}
WANG_STEP = {"format": "e6m9", "rounding": "stochastic"}
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
        ({"layers": "*", **_all(f"{TENSORS} weight_gradients", FP16)},),
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
                **_all(OPERANDS, "e5m2"),
                **_all("forward input_gradient weight_gradient", WANG_SUMS),
                "states": WANG_STEP,
                "update": WANG_STEP | {"master": False},
            },
            {"layers": "<first>", "activations": "e6m9"},
            {"layers": "<last>", **_all(OPERANDS, "e6m9")},
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
