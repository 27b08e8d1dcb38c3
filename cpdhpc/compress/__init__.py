"""Gradient aggregation: one file per method, one row each in COMPRESSORS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

from ..lazy import lazily
from .base import Aggregator, Column, Context, Mean
from .bucket import State

if TYPE_CHECKING:
    from .adacomp import AdaComp as AdaComp
    from .dgc import Dgc as Dgc
    from .flexpoint import Flexpoint as Flexpoint
    from .gradientflow import GradientFlow as GradientFlow
    from .lgc import Lgc as Lgc
    from .lowbit import LowBit as LowBit
    from .none import NoCompression as NoCompression
    from .oktopk import OkTopk as OkTopk
    from .onebit import OneBit as OneBit
    from .powersgd import PowerSgd as PowerSgd
    from .qsgd import Qsgd as Qsgd
    from .randomk import RandomK as RandomK
    from .scalecom import ScaleCom as ScaleCom
    from .strom import Strom as Strom
    from .terngrad import TernGrad as TernGrad
    from .topk import TopK as TopK


class Rows(MutableMapping[str, type[Aggregator]]):
    """Name -> class of a method.

    rows: name -> name of the class in the module of that name, which is imported when the row is
        first asked for
    modules: name of a class -> its module
    """

    def __init__(self, rows: Mapping[str, str]) -> None:
        self._rows: dict[str, str | type[Aggregator]] = dict(rows)
        self.modules = {row: name for name, row in rows.items()}

    def __getitem__(self, name: str) -> type[Aggregator]:
        row = self._rows[name]
        if isinstance(row, str):
            found: type[Aggregator] = getattr(import_module(f"{__name__}.{name}"), row)
            self._rows[name] = row = found
        return row

    def __setitem__(self, name: str, row: type[Aggregator]) -> None:
        self._rows[name] = row

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows  # which imports nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


COMPRESSORS = Rows(
    {
        "none": "NoCompression",
        "lowbit": "LowBit",
        "terngrad": "TernGrad",
        "qsgd": "Qsgd",
        "onebit": "OneBit",
        "powersgd": "PowerSgd",
        "gradientflow": "GradientFlow",
        "flexpoint": "Flexpoint",
        "lgc": "Lgc",
        "topk": "TopK",
        "randomk": "RandomK",
        "dgc": "Dgc",
        "strom": "Strom",
        "adacomp": "AdaComp",
        "scalecom": "ScaleCom",
        "oktopk": "OkTopk",
    }
)
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazily(__name__, COMPRESSORS.modules)

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
