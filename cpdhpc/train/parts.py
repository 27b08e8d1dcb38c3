"""Which layers are reduced together, and in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..comm import Bucket

BYTES = 4  # of a float32
MIB = 1 << 20


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model that are reduced together: a bucket of a larger one.

    layers: their indices in the model's bucket; start, stop: where they lie in its buffer
    bucket: their own layout, that of buffer[start:stop]
    """

    layers: range
    bucket: Bucket
    start: int
    stop: int


def split_bucket(whole: Bucket, bucket_mib: float) -> list[Part]:
    """Return parts of at most bucket_mib MiB of values, or one larger layer, the last ones first.

    Layers go into parts in reverse, about the order in which backward finishes them; within a part
    they keep the model's order, so that one part is laid out as the model itself.
    Raises ValueError unless bucket_mib is above zero.
    """
    if not bucket_mib > 0:
        raise ValueError(f"GradientReducer: bucket_mib={bucket_mib}: should be above 0")
    parts, stop, size_bytes = [], len(whole.names), 0
    for layer in reversed(range(len(whole.names))):
        layer_bytes = math.prod(whole.shapes[layer]) * BYTES
        if layer + 1 < stop and size_bytes + layer_bytes > bucket_mib * MIB:
            parts.append(_part(whole, range(layer + 1, stop)))
            stop, size_bytes = layer + 1, 0
        size_bytes += layer_bytes
    return [*parts, _part(whole, range(stop))]


def _part(whole: Bucket, layers: range) -> Part:
    span = slice(layers.start, layers.stop)
    bucket = Bucket(whole.names[span], whole.shapes[span], whole.align)
    segments = whole.segments[span]
    return Part(layers, bucket, segments[0].start, segments[-1].stop)
