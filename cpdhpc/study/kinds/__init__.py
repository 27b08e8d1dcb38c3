"""The kinds of measurement: a file here, one of that name in point, and a row."""

from __future__ import annotations

from ..factors import Kind
from .allreduce import ALLREDUCE
from .autoencoder import AUTOENCODER
from .codec import CODEC
from .halo import HALO
from .train import TRAIN

KINDS: dict[str, Kind] = {
    "allreduce": ALLREDUCE,
    "autoencoder": AUTOENCODER,
    "codec": CODEC,
    "halo": HALO,
    "train": TRAIN,
}
