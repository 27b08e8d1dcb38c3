"""Steps of optimisers that adapt to layers: the specification of the kernels, in NumPy.

Each operation on values is one of float32 and is rounded once; sums of products of values are
float64, in an order that depends only on the layer's size. So all processes, with any number of
threads, give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

RULES = ("lars", "larc", "novograd", "lamb", "adamp")  # their places: as in steps.h
PART = 32768  # values of a row whose products are summed at a time
SUMS = 16  # value i of a part is added to sum i % SUMS
LARGEST = float(np.finfo(np.float32).max)


class Numbers(NamedTuple):
    """The numbers of a layer that a rule needs besides arrays; float64, in the order of steps.h.

    rate, decay: the learning rate and the weight decay; beta1: of the momentum or first moment
    beta2: of the second moment, or of NovoGrad's norm; eps: added to divisors
    adapts: 1 if the layer's step depends on its sums (AdamP: may be projected), else 0
    trust: Lars, Larc: factor of |w| / |g|; first, second: factors of Adam's m and sqrt(v)
    scale: factor of gradients; most: Lamb: the largest |w| / |step|
    delta, share: AdamP: see cpdhpc.torch.AdamP
    norm: NovoGrad: of the last step, below 0 for none; the new one is written there
    """

    rate: float = 0.0
    decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    adapts: float = 1.0
    trust: float = 1.0
    first: float = 1.0
    second: float = 1.0
    scale: float = 1.0
    most: float = math.inf
    delta: float = 0.0
    share: float = 0.0
    norm: float = -1.0


class LayerArrays(NamedTuple):
    """A layer's weights, gradients, first and second moments, float32 of any shape, C-contiguous.

    m, v: None for rules that do not need them
    rows: number of output units, which AdamP needs; 0: there are none, as of a bias
    """

    w: Array
    g: Array
    m: Array | None
    v: Array | None
    rows: int


def check_layers(rule: str, layers: Sequence[LayerArrays], numbers: Array) -> None:
    """Raise ValueError for an unknown rule, or numbers of another shape."""
    if rule not in RULES:
        raise ValueError(f"step_layers: rule={rule!r}: known are {', '.join(RULES)}")
    if numbers.dtype != np.float64 or numbers.shape != (len(layers), len(Numbers._fields)):
        raise ValueError(f"step_layers: numbers: {numbers.dtype}{numbers.shape}: one row a layer")


def dot(a: Array, b: Array) -> float:
    """Return the sum of products of float32[n]; each is exact in float64."""
    total = 0.0
    for first in range(0, a.size, PART):
        x, y = (np.asarray(each[first : first + PART], np.float64) for each in (a, b))
        groups = np.zeros((-(-x.size // SUMS), SUMS))
        groups.reshape(-1)[: x.size] = x * y
        sums = np.zeros(SUMS)
        for group in groups:
            sums = sums + group
        while sums.size > 1:
            half = sums.size // 2
            sums = sums[:half] + sums[half:]
        total = total + float(sums[0])
    return total


def step_layers(rule: str, layers: Sequence[LayerArrays], numbers: Array) -> None:
    """Take a step of each layer: w, m and v are changed, and the norm among its numbers.

    numbers: float64[layers, 14], Numbers of each.
    """
    check_layers(rule, layers, numbers)
    with np.errstate(all="ignore"):  # as the kernels: infinities and NaN go their way
        for given, row in zip(layers, numbers, strict=True):
            of = Numbers(*row.tolist())
            w, g, m, v = (None if x is None else x.reshape(-1) for x in given[:4])
            assert w is not None and g is not None
            layer = LayerArrays(w, g, m, v, given.rows)
            if rule == "novograd":
                row[-1] = _novograd(layer, of)
            else:
                {"lars": _lars, "larc": _larc, "lamb": _lamb, "adamp": _adamp}[rule](layer, of)


def _singles(*values: float) -> list[np.float32]:
    return [np.float32(value) for value in values]


def _momentum(layer: LayerArrays, beta: float, a: float, b: float, c: float) -> None:
    """m = beta m + (a g + c w); w = w - b m."""
    w, g, m = layer.w, layer.g, layer.m
    assert m is not None
    beta32, a32, b32, c32 = _singles(beta, a, b, c)
    m[:] = beta32 * m + (a32 * g + c32 * w)
    w[:] = w - b32 * m


def _over(a: float, b: float) -> float:
    return float(np.float64(a) / np.float64(b))


def _adapting(layer: LayerArrays, of: Numbers) -> tuple[float, float]:
    """Return trust |w|, and |g| + decay |w|, or |g| if that is not above 0."""
    weights, gradients = (math.sqrt(dot(x, x)) for x in (layer.w, layer.g))
    return of.trust * weights, gradients + of.decay * weights if gradients > 0 else gradients


def _lars(layer: LayerArrays, of: Numbers) -> None:
    ratio = 1.0
    if of.adapts:
        above, below = _adapting(layer, of)
        ratio = above / below if above * below != 0 else 1.0
    rate = of.rate * ratio
    _momentum(layer, of.beta1, rate, 1.0, rate * of.decay)


def _larc(layer: LayerArrays, of: Numbers) -> None:
    share = 1.0
    if of.adapts:
        above, below = _adapting(layer, of)
        local = above / below if above > 0 and below > 0 else of.rate
        share = min(_over(local, of.rate), 1.0) if of.rate > 0 else 0.0
    _momentum(layer, of.beta1, share, of.rate, share * of.decay)


def _novograd(layer: LayerArrays, of: Numbers) -> float:
    """Return the norm that is kept, a float32."""
    square = dot(layer.g, layer.g)
    now = math.sqrt(square)
    if of.norm >= 0:
        now = math.sqrt(of.beta2 * (of.norm * of.norm) + (1 - of.beta2) * square)
    norm = float(np.float32(now))
    below = norm + of.eps
    a = 0.0 if below == 0 else _over(1, below)
    _momentum(layer, of.beta1, LARGEST if a > LARGEST else a, of.rate, of.decay)
    return norm


def _moments(layer: LayerArrays, of: Numbers) -> Array:
    """Update the moments by a gradient, and return Adam's step; 0 instead of a division by 0."""
    m, v = layer.m, layer.v
    assert m is not None and v is not None
    beta1, gain1, beta2, gain2 = _singles(of.beta1, 1 - of.beta1, of.beta2, 1 - of.beta2)
    first, second, eps, scale = _singles(of.first, of.second, of.eps, of.scale)
    g = scale * layer.g
    m[:] = beta1 * m + gain1 * g
    v[:] = beta2 * v + (gain2 * g) * g
    below = np.sqrt(v) * second + eps
    return np.where(below == 0, np.float32(0), (m * first) / below)


def _lamb(layer: LayerArrays, of: Numbers) -> None:
    step = _moments(layer, of) + np.float32(of.decay) * layer.w
    ratio = 1.0
    if of.adapts:
        weights, steps = (math.sqrt(dot(x, x)) for x in (layer.w, step))
        ratio = weights / steps if weights * steps != 0 else 1.0
        ratio = of.most if ratio > of.most else ratio
    layer.w[:] = layer.w - np.float32(of.rate * ratio) * step


class _Row(NamedTuple):
    """Sums over a row: of w and w, g and g, w and g, w and the step."""

    weights: float
    gradients: float
    both: float
    steps: float

    def is_free(self, of: Numbers, n: int) -> bool:
        lengths = math.sqrt(self.weights) * math.sqrt(self.gradients)
        lengths = np.finfo(np.float64).tiny if lengths < np.finfo(np.float64).tiny else lengths
        return bool(abs(self.both) / lengths < of.delta / math.sqrt(n))

    @property
    def along(self) -> float:
        """The share of the weights in the step."""
        share = _over(self.steps, self.weights) if self.weights else 0.0
        return max(-LARGEST, min(share, LARGEST)) if not math.isnan(share) else share


def _adamp(layer: LayerArrays, of: Numbers) -> None:
    step = _moments(layer, of)
    w, g, s = (x.reshape(layer.rows or 1, -1) for x in (layer.w, layer.g, step))
    along, decay = np.zeros(len(w)), of.decay
    if of.adapts and layer.rows:
        each = [
            _Row(dot(a, a), dot(b, b), dot(a, b), dot(a, c))
            for a, b, c in zip(w, g, s, strict=True)
        ]
        whole = _Row(0.0, 0.0, 0.0, 0.0)
        for row in each:
            whole = _Row(*(a + b for a, b in zip(whole, row, strict=True)))
        if all(row.is_free(of, w.shape[1]) for row in each):
            along, decay = np.array([row.along for row in each]), of.decay * of.share
        elif whole.is_free(of, w.size):
            along, decay = np.full(len(w), whole.along), of.decay * of.share
    keep, rate = _singles(1 - of.rate * decay, of.rate)
    step = s + (-along).astype(np.float32)[:, None] * w
    w[:] = keep * w - rate * step
