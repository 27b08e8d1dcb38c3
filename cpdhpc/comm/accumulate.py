"""How a rank that holds all contributions to a chunk sums them, in the order of ranks.

All start with the first contribution, which is the same as starting at zero: 0 + g and Q(0 + g)
are g. The last addition is left open: whoever rounds the result does it in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..ops import backend_of
from ..randomness import Key
from .wire import Array, Coder


class Sum(NamedTuple):
    """total, float32, plus what last holds, if anything; coder: how last is encoded."""

    total: Array
    last: Array | None
    coder: Coder

    def value(self) -> Array:
        """Return the sum, not rounded."""
        if self.last is not None:
            self.coder.add(self.last, self.total)
        return self.total

    def encode(self, result: Coder, key: Key, place: Array | None = None) -> Array:
        """Return the payload of the sum, in place if given."""
        if self.last is None:
            return result.encode(self.total, key, place)
        return result.add_encode(self.last, self.coder, self.total, key, place)[0]


# (payloads in the order of ranks, how they and how partial sums are encoded, random streams of
# the roundings) -> sum
Accumulate = Callable[[Sequence[Array], Coder, Coder, Iterator[Key]], Sum]


def _float32(payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key]) -> Sum:
    """Sum in float32."""
    total = sent.values(payloads[0])
    for payload in payloads[1:-1]:
        sent.add(payload, total)
    return Sum(total, payloads[-1] if len(payloads) > 1 else None, sent)


def _requantise(payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key]) -> Sum:
    """Round to the wire after every addition: s = Q(s + g)."""
    sum_ = Sum(sent.values(payloads[0]), None, sent)
    for payload in payloads[1:]:
        if sum_.last is not None:
            rounded = sum_.encode(partial, next(keys))
            partial.decode(rounded, sum_.total)
        sum_ = Sum(sum_.total, payload, sent)
    return sum_


def _kahan(payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key]) -> Sum:
    """Compensate: y = Q(g - c); t = Q(s + y); c = Q(Q(t - s) - y); s = t.

    Source: CPD, kahan_sum_gradients; Kahan: Further remarks on reducing truncation errors,
    CACM 8(1), 1965.
    """
    sum_ = Sum(sent.values(payloads[0]), None, partial)
    subtract = backend_of(sum_.total).subtract
    c = np.zeros_like(sum_.total)
    for payload in payloads[1:]:
        if sum_.last is not None:
            t = partial.values(sum_.encode(partial, next(keys)))
            change = partial.rounded(subtract(t, sum_.total), next(keys))
            c = partial.rounded(subtract(change, partial.values(sum_.last)), next(keys))
            sum_ = Sum(t, None, partial)
        y = partial.encode(subtract(sent.values(payload), c), next(keys))
        sum_ = Sum(sum_.total, y, partial)
    return sum_


ACCUMULATES: dict[str, Accumulate] = {
    "float32": _float32,
    "requantise": _requantise,
    "kahan": _kahan,
}
