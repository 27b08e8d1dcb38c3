"""Steps of layer-wise optimisers: the kernels' bits beside the specification's in NumPy."""

import math
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.ops import cpu, reference
from cpdhpc.ops.common import kernel_threads, set_kernel_threads
from cpdhpc.ops.steps import PART, RULES, LayerArrays, Numbers, dot

Array = np.ndarray[Any, np.dtype[Any]]
# rows, values of a row: less than a group of sums, parts of rows, rows and parts of a thread each
SHAPES = [(1, 1), (3, 5), (1, 16), (7, 147), (2, PART + 17), (1, 3 * PART), (300, 1100), (0, 40)]
NUMBERS = Numbers(0.1, 0.01, 0.9, 0.99, 1e-6, 1.0, 0.02, 1.25, 1.5, 0.75, 10.0, 5.0, 0.1)


def layers(rule: str, seed: int = 0, scale: float = 1.0) -> list[LayerArrays]:
    rng = np.random.default_rng(seed)
    found = []
    for rows, row in SHAPES:
        w, g, m, v = (rng.standard_normal(max(rows, 1) * row).astype(np.float32) for _ in range(4))
        with np.errstate(over="ignore"):
            w, g, m, v = scale * w, scale * g, scale * m, np.square(scale * v, dtype=np.float32)
        momentum = rule in ("lars", "larc", "novograd")
        found.append(LayerArrays(w, g, m, None if momentum else v, rows))
    return found


def numbers(rule: str, **keys: Any) -> Array:
    """The layers' in turn adapted and not; of NovoGrad's norms some are the first."""
    rows = [NUMBERS._replace(**keys) for _ in SHAPES]
    if "adapts" not in keys:
        rows[1] = rows[1]._replace(adapts=0.0, decay=0.0)
    rows[2::2] = [row._replace(norm=0.5) for row in rows[2::2]]
    return np.array(rows, np.float64)


def bits(found: list[LayerArrays], of: Array) -> list[bytes]:
    arrays = [x.tobytes() for layer in found for x in layer[:4] if x is not None]
    return [*arrays, of.tobytes()]


def stepped(rule: str, found: list[LayerArrays], of: Array) -> tuple[list[LayerArrays], Array]:
    """Have the kernels step layers; return what the specification makes of copies."""
    copies = [
        LayerArrays(*(x if x is None or isinstance(x, int) else x.copy() for x in layer))
        for layer in found
    ]
    same = of.copy()
    cpu.step_layers(rule, found, of)
    reference.step_layers(rule, copies, same)
    return copies, same


def both(rule: str, found: list[LayerArrays], of: Array) -> tuple[list[bytes], list[bytes]]:
    """What the kernels make of layers, and what the specification does."""
    copies, same = stepped(rule, found, of)
    return bits(found, of), bits(copies, same)


@every("rule", RULES)
@every("clone", cpu.clones())
@every("threads", [1, 3])
def test_kernels_have_the_bits_of_the_specification(rule: str, clone: str, threads: int) -> None:
    before, usual = kernel_threads(), cpu.clone()
    found, of = layers(rule), numbers(rule)
    first = bits(found, of)
    try:
        set_kernel_threads(threads)
        cpu.use_clone(clone)
        got, wanted = both(rule, found, of)
    finally:
        set_kernel_threads(before)
        cpu.use_clone(usual)
    assert got == wanted
    assert sum(a != b for a, b in zip(got, first, strict=True)) >= len(SHAPES)


@every("rule", RULES)
@every("scale", [1e-42, 1e-25, 1e25])
@every("keys", [{"eps": 0.0}, {"rate": 0.0}, {"delta": 0.0}, {"most": 1.0}])
def test_extreme_values_too(rule: str, scale: float, keys: dict[str, float]) -> None:
    got, wanted = both(rule, layers(rule, 1, scale), numbers(rule, **keys))
    assert got == wanted


@every("rule", RULES)
@every("value", [0.0, math.inf, math.nan])
def test_zeros_infinities_and_nan_too(rule: str, value: float) -> None:
    found, of = layers(rule, 2), numbers(rule)
    found[3].g[:] = value
    found[4].w[7] = value
    if not value:
        found[6].w[:] = 0
    copies, same = stepped(rule, found, of)
    for a, b in zip(found, copies, strict=True):
        for x, y in zip(a[:4], b[:4], strict=True):
            assert (x is None and y is None) or np.array_equal(x, y, equal_nan=True)
    assert np.array_equal(of, same, equal_nan=True)


@every("which", range(len(SHAPES)))
def test_sums_are_those_of_math_fsum(which: int) -> None:
    """PART / SUMS additions in each sum, 4 of sums, one of each part: as many roundings at most."""
    a, b = layers("lars")[which][:2]
    assert a is not None and b is not None
    products = a.astype(np.float64) * b.astype(np.float64)
    roundings = PART // 16 + 4 + -(-a.size // PART)
    bound = roundings * 2.0**-53 * math.fsum(np.abs(products))
    assert abs(dot(a, b) - math.fsum(products)) <= bound


def test_each_case_of_adamp_is_met() -> None:
    """Rows are free, or only the whole layer is, or neither: three results."""
    found = set()
    for delta in (0.0, 3.0, 1e9):
        one, of = layers("adamp"), numbers("adamp", delta=delta, adapts=1.0)
        # A row of which the gradient lies along the weights, among many of which it does not
        assert one[6].w.size == 300 * 1100
        one[6].g[:1100] = one[6].w[:1100]
        got, wanted = both("adamp", one, of)
        assert got == wanted
        found.add(one[6].w.tobytes())
    assert len(found) == 3


@every(
    ("change", "message"),
    [
        ({"rule": "sgd"}, "rule='sgd': known are lars"),
        ({"numbers": np.zeros((1, 3))}, "one row a layer"),
        ({"rows": 2}, "layer 0: arrays or rows do not fit"),
        ({"rows": -1}, "layer 0: arrays or rows do not fit"),
        ({"m": np.zeros(2, np.float32)}, "layer 0: arrays or rows do not fit"),
        ({"v": None}, "layer 0: arrays or rows do not fit"),
        ({"w": np.zeros(3, np.float64)}, "format d given, float32 needed"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    w, g, m, v = np.zeros((4, 3), np.float32)
    layer = {"w": w, "g": g, "m": m, "v": v, "rows": 1}
    given = {"rule": "adamp", "numbers": np.array([NUMBERS])} | change
    one = LayerArrays(**{key: given.pop(key, value) for key, value in layer.items()})  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=message):
        cpu.step_layers(layers=[one], **given)  # type: ignore[arg-type]
