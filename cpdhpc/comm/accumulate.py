"""How a rank that holds all contributions to a chunk sums them, in the order of ranks.

All start with the first contribution and return the sum before its last rounding, which is the
owner's: the same numbers as starting at zero, where 0 + g and Q(0 + g) are g already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..randomness import Key
from .wire import Array, Coder

Accumulate = Callable[[Sequence[Array], Coder, Coder, Iterator[Key], Array], Array]


def _float32(
    payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key], like: Array
) -> Array:
    """Sum in float32."""
    total = sent.values(payloads[0], like)
    for payload in payloads[1:]:
        sent.add(payload, total)
    return total


def _requantise(
    payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key], like: Array
) -> Array:
    """Round to the wire after every addition: s = Q(s + g)."""
    total = sent.values(payloads[0], like)
    for i, payload in enumerate(payloads[1:]):
        if i > 0:
            total = partial.rounded(total, next(keys))
        sent.add(payload, total)
    return total


def _kahan(
    payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key], like: Array
) -> Array:
    """Compensate: y = Q(g - c); t = Q(s + y); c = Q(Q(t - s) - y); s = t.

    Source: CPD, kahan_sum_gradients; Kahan: Further remarks on reducing truncation errors,
    CACM 8(1), 1965.
    """
    s = total = sent.values(payloads[0], like)
    y = c = np.zeros_like(s)
    for i, payload in enumerate(payloads[1:]):
        if i > 0:
            t = partial.rounded(total, next(keys))
            c = partial.rounded(partial.rounded(t - s, next(keys)) - y, next(keys))
            s = t
        y = partial.rounded(sent.values(payload, like) - c, next(keys))
        total = s + y
    return total


ACCUMULATES: dict[str, Accumulate] = {
    "float32": _float32,
    "requantise": _requantise,
    "kahan": _kahan,
}
