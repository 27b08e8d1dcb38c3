"""Squared norms of the ranks' gradients and of their mean, before any compression."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...collectives import sparse
from ...compress import NoCompression
from ...compress.base import Mean
from ...compress.bucket import Bucket
from ...ops import to_host
from ...ops.tensors import values_of
from ...partition import split
from ...randomness import random_key
from ...torch.controllers import Norms
from ...torch.reducer import GradientReducer
from .optimizers import Optimizer

Array = npt.NDArray[Any]

SIGNS = 6  # stream of random numbers: of sketches
BUCKETS = 4093  # of a sketch; prime, so that no stride of a layer meets the same ones
BLOCK = 256 * BUCKETS  # values that are looked at together


def squared(flat: Array, bucket: Bucket) -> float:
    """Return the sum of the squares of float32[bucket.size], in float64."""
    return fsum(float(np.square(v, dtype=np.float64).sum()) for v in bucket.views(flat))


def roots(
    reducer: GradientReducer, given: Optimizer, optimizer: torch.optim.Optimizer
) -> Array | None:
    """Return the roots of what the next step multiplies gradients by, float32[bucket.size].

    None where nothing is known, as before the first step. A parameter without a state has 0.
    For steps along P g the gradient in the coordinates w / sqrt(P), of which steps are plain, is
    sqrt(P) g, whose noise scale tr(P Sigma) / (G' P G) is that of the batch. Taken before the step:
    a P that has seen the step's own gradients would hide their noise.
    Source: McCandlish et al., arXiv 1812.06162, with a preconditioner.
    """
    found = np.zeros(reducer.bucket.size, np.float32)
    for parameter, view in zip(reducer.parameters, reducer.bucket.views(found), strict=True):
        state = optimizer.state.get(parameter)
        if state:
            view[...] = np.sqrt(values_of(torch.as_tensor(given.factors(state))))
    return found if found.any() else None


def squared_norms(
    reducer: GradientReducer, mean: Mean, loss_scale: float, by: Array | None = None
) -> Array:
    """Return float64[hosted + 1]: of each hosted rank's gradient, of the exact mean. Collective.

    After a reduce, whose gradients were those of a loss times loss_scale; mean: what it returned
    by: float32[bucket.size], what gradients are multiplied by before; None: nothing
    Float32 gradients have an exact mean already. The one of any other method is what its wire, its
    memory and its momentum made of it, whose norm says nothing of the noise, so the exact
    gradients are summed as sketches.
    """
    given, mean_flat = [to_host(flat) for flat in reducer.flats], to_host(mean.flat)
    flats = given if by is None else [flat * by for flat in given]
    own = [squared(flat, reducer.bucket) / loss_scale**2 for flat in flats]
    if isinstance(reducer.aggregator, NoCompression):
        exact = mean_flat if by is None else mean_flat * by
        return np.array([*own, squared(exact, reducer.bucket)])
    key = random_key(reducer.seed, SIGNS, reducer.iteration)
    total = sparse.sum(reducer.world, sketches(flats, key))
    return np.array([*own, float(np.square(total / (reducer.world.ranks * loss_scale)).sum())])


def of_samples(norms: Array | None, batch: int) -> Norms | None:
    """Return what controllers are told of the norms that all ranks shared; None: there are none.

    A rank's gradient was that of its samples' mean loss times their share of the batch and ranks,
    so that the mean over ranks is that over samples.
    """
    if norms is None:
        return None
    ranks = len(norms) - 1
    shares = (split(batch, ranks, rank) for rank in range(ranks))
    samples = np.array([stop - start for start, stop in shares])
    weights = np.maximum(samples, 1) * (ranks / batch)
    return Norms(norms[:-1] / weights**2, float(norms[-1]), samples)


def sketches(flats: Sequence[Array], key: tuple[int, int]) -> list[Array]:
    """Return float64[BUCKETS] of each of float32[n], with the same random signs for all.

    Value i is added, with its sign, to element i modulo BUCKETS. Over the signs the squared norm
    has the mean |flat|^2, and a variance of 2 |flat|^4 / BUCKETS where values are dealt evenly;
    up to n = BUCKETS it is |flat|^2 itself.
    Source: Charikar, Chen, Farach-Colton: Finding frequent items in data streams, ICALP 2002.
    """
    size, bits = flats[0].size, np.random.Philox(key=key[0] | key[1] << 32)
    found = [np.zeros(BUCKETS) for _ in flats]
    for start in range(0, size, BLOCK):
        here = slice(start, min(start + BLOCK, size))
        count = here.stop - start
        words = np.asarray(bits.random_raw(-(-count // 64)), "<u8")
        signs = np.unpackbits(words.view(np.uint8))[:count] * np.float32(2) - 1
        for total, flat in zip(found, flats, strict=True):
            rows = np.zeros(-(-count // BUCKETS) * BUCKETS)
            rows[:count] = flat[here] * signs
            total += rows.reshape(-1, BUCKETS).sum(axis=0)
    return found
