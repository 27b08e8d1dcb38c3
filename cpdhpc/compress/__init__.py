"""Gradient aggregation: one file per method, one row each in COMPRESSORS."""

from __future__ import annotations

from .adacomp import AdaComp
from .base import Aggregator, Column, Context, Mean
from .bucket import State
from .dgc import Dgc
from .flexpoint import Flexpoint
from .gradientflow import GradientFlow
from .lgc import Lgc
from .lowbit import LowBit
from .none import NoCompression
from .oktopk import OkTopk
from .onebit import OneBit
from .powersgd import PowerSgd
from .qsgd import Qsgd
from .randomk import RandomK
from .scalecom import ScaleCom
from .strom import Strom
from .terngrad import TernGrad
from .topk import TopK

COMPRESSORS: dict[str, type[Aggregator]] = {
    "none": NoCompression,
    "lowbit": LowBit,
    "terngrad": TernGrad,
    "qsgd": Qsgd,
    "onebit": OneBit,
    "powersgd": PowerSgd,
    "gradientflow": GradientFlow,
    "flexpoint": Flexpoint,
    "lgc": Lgc,
    "topk": TopK,
    "randomk": RandomK,
    "dgc": Dgc,
    "strom": Strom,
    "adacomp": AdaComp,
    "scalecom": ScaleCom,
    "oktopk": OkTopk,
}

__all__ = [
    "COMPRESSORS",
    "AdaComp",
    "Aggregator",
    "Column",
    "Context",
    "Dgc",
    "Flexpoint",
    "GradientFlow",
    "Lgc",
    "LowBit",
    "Mean",
    "NoCompression",
    "OkTopk",
    "OneBit",
    "PowerSgd",
    "Qsgd",
    "RandomK",
    "ScaleCom",
    "State",
    "Strom",
    "TernGrad",
    "TopK",
]
