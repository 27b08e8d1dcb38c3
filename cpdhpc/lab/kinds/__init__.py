"""The kinds of study: a file and a row each."""

from __future__ import annotations

from .allreduce import ALLREDUCE
from .autoencoder import AUTOENCODER
from .base import Kind
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
