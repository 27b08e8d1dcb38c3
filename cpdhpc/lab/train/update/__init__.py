"""Update rules: how the gradients of all ranks become the next parameters."""

from __future__ import annotations

from .base import AllreduceUpdate, ByAllreduce, Update, UpdateRule
from .gossip import DecentLaM, DmSgd, DSgd
from .own_models import DiLoCo, LocalSgd

UPDATES: dict[str, type[UpdateRule]] = {
    "allreduce": ByAllreduce,
    "decentlam": DecentLaM,
    "dmsgd": DmSgd,
    "dsgd": DSgd,
    "localsgd": LocalSgd,
    "diloco": DiLoCo,
}

__all__ = [
    "UPDATES",
    "AllreduceUpdate",
    "ByAllreduce",
    "DSgd",
    "DecentLaM",
    "DiLoCo",
    "DmSgd",
    "LocalSgd",
    "Update",
    "UpdateRule",
]
