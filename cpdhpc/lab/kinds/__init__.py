"""The kinds of study: a file and a row each."""

from __future__ import annotations

import importlib
import re

from ...config import ConfigError, suggest, told
from .allreduce import ALLREDUCE
from .autoencoder import AUTOENCODER
from .base import Kind
from .codec import CODEC
from .command import COMMAND
from .halo import HALO
from .train import TRAIN

KINDS: dict[str, Kind] = {
    "allreduce": ALLREDUCE,
    "autoencoder": AUTOENCODER,
    "codec": CODEC,
    "command": COMMAND,
    "halo": HALO,
    "train": TRAIN,
}


def kind_of(name: str) -> Kind:
    """Return a kind of KINDS, or "package.module:NAME", which is imported. Raises ConfigError."""
    if name in KINDS:
        return KINDS[name]
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise ConfigError(f'{suggest(name, KINDS)}, or "package.module:NAME" of a kind of your own')
    module, _, own = name.partition(":")
    with told(f"kind = {name!r}"):
        found = getattr(importlib.import_module(module), own, None)
    if not isinstance(found, Kind):
        raise ConfigError(f"module {module} has no kind {own}: should be a cpdhpc.lab.kinds.Kind")
    return found
