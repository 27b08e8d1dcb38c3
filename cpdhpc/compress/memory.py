"""Memory that methods use again in each iteration, so that no page is taken anew."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..ops import backend_of, on_gpu
from .base import Array, Context, zeros
from .bucket import Bucket


def clear_mean(context: Context, bucket: Bucket, like: Array) -> Array:
    """Return float32[bucket.size] of zeros for the mean, where like lies: context.out if given."""
    if context.out is None:
        return zeros(bucket.size, like)
    backend_of(context.out).clear_all(context.out)
    return context.out


def empty_mean(context: Context, bucket: Bucket, like: Array) -> Array:
    """Return float32[bucket.size] for the mean, zeros between the layers alone."""
    if context.out is None:
        return zeros(bucket.size, like)
    bucket.clear_gaps(context.out)
    return context.out


def take_spare(context: Context, name: str, n: int, gradients: Sequence[Array]) -> list[Array]:
    """Return float32[n] of each hosted rank, of any content: what give_spare has had, or new.

    On a GPU they are new: CuPy has a pool of its own.
    """
    found = context.state.spares.pop(name, [])
    is_there = not on_gpu(gradients[0]) and [x.size for x in found] == [n] * len(gradients)
    return found if is_there else [np.empty_like(x, shape=(n,)) for x in gradients]


def give_spare(context: Context, name: str, xs: Sequence[Array]) -> None:
    """Keep arrays that nobody uses any more for take_spare."""
    if not on_gpu(xs[0]):
        context.state.spares[name] = list(xs)


def keep(
    context: Context,
    layout: Bucket,
    name: str,
    xs: Sequence[Array],
    layers: Collection[str] | None = None,
) -> None:
    """Make float32[layout.size] of each hosted rank, that nobody uses any more, its memory.

    layers: those that have one; None: all of them
    The layers' memories, an entry each, become parts of it; what they were parts of, if all were of
    one array that keep has made theirs, is spare.
    """
    former = [
        context.state.give(layer, name, [x[start:stop] for x in xs])
        for layer, start, stop in layout.segments
        if layers is None or layer in layers
    ]
    if len(xs) > 1:  # which have been copied
        give_spare(context, name, xs)
    if len(xs) > 1 or not former or on_gpu(former[0]):
        return
    base = former[0].base
    if base is None or base is xs[0] or any(each.base is not base for each in former):
        return
    if isinstance(base, np.ndarray) and base.shape == xs[0].shape and base.flags.owndata:
        give_spare(context, name, [base])
