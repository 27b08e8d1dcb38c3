"""Arrays that methods reuse in each iteration, so that the system need not provide new pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..ops import backend_of, on_gpu
from .base import RESIDUAL, Aggregator, Array, Context, as_float, check_place, shared_largest, zeros
from .bucket import Bucket


def clear_mean(context: Context, bucket: Bucket, like: Array) -> Array:
    """Return zeros for the mean, float32[bucket.size] on the device of like, or context.out."""
    if context.out is None:
        return zeros(bucket.size, like)
    backend_of(context.out).clear_all(context.out)
    return context.out


def empty_mean(context: Context, bucket: Bucket, like: Array) -> Array:
    """Return float32[bucket.size] for the mean, with zeros only in the gaps between layers."""
    if context.out is None:
        return zeros(bucket.size, like)
    bucket.clear_gaps(context.out)
    return context.out


def take_spare(context: Context, name: str, n: int, gradients: Sequence[Array]) -> list[Array]:
    """Return float32[n] of each hosted rank, of any content: arrays of give_spare, or new ones.

    On a GPU they are new, as CuPy has a pool.
    """
    found = context.state.spares.pop((name, n), [])
    is_there = not on_gpu(gradients[0]) and len(found) == len(gradients)
    return found if is_there else [np.empty_like(x, shape=(n,)) for x in gradients]


def give_spare(context: Context, name: str, xs: Sequence[Array]) -> None:
    """Keep arrays of one size that are no longer used for take_spare."""
    if not on_gpu(xs[0]):
        context.state.spares[name, xs[0].size] = list(xs)


def with_residuals(
    method: Aggregator, gradients: Sequence[Array], bucket: Bucket, context: Context
) -> list[Array]:
    """Return gradients plus residuals, float32[bucket.size] of each hosted rank. Collective.

    The gaps between layers are zeros. The residuals are those of keep, 0 at first, unchanged here.
    Raises on all ranks TypeError as check_place, NonFiniteGradient if a gradient, or its sum with
    the residual, is not finite.
    """
    check_place(method, context.world, gradients)
    found = take_spare(context, RESIDUAL, bucket.size, gradients)
    most = 0
    for x in found:
        bucket.clear_gaps(x)
    for name, start, stop in bucket.segments:
        kept = context.state.own(name, RESIDUAL, (stop - start,), like=found[0])
        for x, gradient, residual in zip(found, gradients, kept, strict=True):
            accumulate = backend_of(x).accumulate
            most = max(most, accumulate(gradient[start:stop], residual, x[start:stop]))
    shared_largest(context.world, found, bucket, as_float(most))
    return found


def keep(
    context: Context,
    layout: Bucket,
    name: str,
    xs: Sequence[Array],
    layers: Collection[str] | None = None,
) -> None:
    """Keep float32[layout.size] of each hosted rank, which the caller no longer uses, in the state.

    layers: those that are kept; None: all of them
    Each layer has an entry of this name, a part of the array. The array of an earlier call becomes
    spare as soon as no entry is a part of it.
    """
    whole = xs[0] if len(xs) == 1 and not on_gpu(xs[0]) else None  # else entries are copies
    former = [
        context.state.give(layer, name, [x[start:stop] for x in xs], whole)
        for layer, start, stop in layout.segments
        if layers is None or layer in layers
    ]
    for x in {id(x): x for x in former if x is not None}.values():
        if not context.state.has_part(x):
            give_spare(context, name, [x])
    if len(xs) > 1:
        give_spare(context, name, xs)
