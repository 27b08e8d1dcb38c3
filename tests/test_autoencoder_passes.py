"""The compiled passes over blocks of filters, and pools between, against formulas in float64."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc import _cpu

Array = np.ndarray[Any, np.dtype[Any]]
COUNTS, STEP = (3, 4), 2  # of blocks: fields of 3 and more cells overlap
BY = RATE, MOMENTUM, ALPHA = 0.1, 0.9, 0.3


def window(rng: np.random.Generator, field: int, channels: int, batch: int, dtype: Any) -> Array:
    """[rows, columns, channels, batch], in memory between other values."""
    rows, columns = ((count - 1) * STEP + field for count in COUNTS)
    memory = rng.standard_normal((rows, batch + 1, columns + 1, channels)).astype(dtype)
    return memory[:, :batch, 1:].transpose(0, 2, 3, 1)


def fields(of: Array, field: int) -> Array:
    """[rows of blocks, columns, field, field, channels, batch], a view."""
    strides = *(each * STEP for each in of.strides[:2]), *of.strides
    return np.lib.stride_tricks.as_strided(of, (*COUNTS, field, field, *of.shape[2:]), strides)


def turned(matrices: Array) -> Array:
    return matrices.swapaxes(1, 2)


class Case:
    """Random data, and the same in float64 as matrices of each block."""

    def __init__(self, field: int, channels: int, maps: int, batch: int, dtype: Any) -> None:
        rng = np.random.default_rng([field, channels, maps, batch])
        self.windows = [window(rng, field, channels, batch, dtype) for _ in range(2)]
        self.field, (self.x, self.again) = field, self.windows
        shape = 12, maps, field * field * channels
        self.weight, self.moving = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        self.weight /= np.linalg.norm(self.weight, axis=2, keepdims=True)
        between = rng.standard_normal((3, 4, maps + 1, batch + 1)).astype(dtype)
        self.responses = between[:, :, 1:, 1:]
        self.slopes = rng.standard_normal((3, 4, maps, batch)).astype(dtype)

    def matrices(self) -> list[Array]:
        """Return float64 of x and again [blocks, inputs, batch], of responses and of slopes."""
        cut = [fields(each, self.field).reshape(12, -1, self.x.shape[3]) for each in self.windows]
        own = [each.reshape(12, -1, self.x.shape[3]) for each in (self.responses, self.slopes)]
        return [each.astype(np.float64) for each in (*cut, *own)]

    def reconstruct(self, threads: int) -> None:
        x, again = (fields(each, self.field) for each in self.windows)
        _cpu.reconstruct_blocks(threads, self.weight, x, self.responses, again)

    def descend(self, threads: int) -> None:
        x, again = (fields(each, self.field) for each in self.windows)
        given = self.weight, self.moving, x, again, self.responses, self.slopes
        _cpu.descend_blocks(threads, BY, *given)


SIZES = [  # field, channels, filters, images: tails of registers and of tiles, and none
    (10, 3, 40, 8),
    (4, 4, 24, 16),
    (1, 1, 1, 1),
    (5, 3, 7, 13),
    (3, 2, 9, 31),
    (2, 1, 3, 3),
]


@every(("sizes", "dtype", "threads"), list(product(SIZES, (np.float32, np.float64), (1, 2))))
def test_compiled_passes_follow_the_formulas(
    clone: str, sizes: tuple[int, int, int, int], dtype: type, threads: int
) -> None:
    """A sum of n terms in any order is off by n roundings of the sum of their magnitudes."""
    of, unit = Case(*sizes, dtype), float(np.finfo(dtype).eps) / 2
    maps, batch, inputs = sizes[2], sizes[3], of.weight.shape[2]

    def check(got: Array, want: Array, terms: float, size: Array) -> None:
        excess = np.abs(got - want) - 1.01 * terms * unit * size  # 1.01: powers of roundings
        assert excess.max() <= 0

    w, before = of.weight.astype(np.float64), of.again.astype(np.float64)
    of.reconstruct(threads)
    x, g, r, p = of.matrices()
    check(r, w @ x, inputs, np.abs(w) @ np.abs(x))
    size = np.abs(before)
    outputs = fields(before, sizes[0]), fields(size, sizes[0])
    for i, j in np.ndindex(*COUNTS):
        block = w[4 * i + j].T, r[4 * i + j]
        outputs[0][i, j] += (block[0] @ block[1]).reshape(outputs[0].shape[2:])
        outputs[1][i, j] += (np.abs(block[0]) @ np.abs(block[1])).reshape(outputs[0].shape[2:])
    check(of.again, before, maps + 12, size)

    moving = of.moving.astype(np.float64)
    of.descend(threads)
    back = ALPHA * w @ g
    s, slope = back + p * r, ALPHA * np.abs(w) @ np.abs(g)
    along = (r * (s + back)).sum(2, keepdims=True)
    want = MOMENTUM * moving + ALPHA * r @ turned(g) + s @ turned(x) - along * w
    size = MOMENTUM * np.abs(moving) + ALPHA * np.abs(r) @ turned(np.abs(g))
    size += (slope + np.abs(p * r)) @ turned(np.abs(x))
    size += (np.abs(r) * (2 * slope + np.abs(p * r))).sum(2, keepdims=True) * np.abs(w)
    # s takes the roundings of W g and 4 more; a sum over images, along, the momentum 10 more.
    check(of.moving, want, inputs + 2 * batch + 14, size)
    moved = w - RATE * of.moving.astype(np.float64)  # from the momentum as it was rounded
    length = np.linalg.norm(moved, axis=2, keepdims=True)
    # A value has 3 roundings of its terms; the length's relative error is that of the values, half
    # of those of its sum, and those of root, division and product.
    error = 3 * (np.abs(w) + RATE * np.abs(of.moving))
    relative = np.linalg.norm(error, axis=2, keepdims=True) / length + inputs / 2 + 6
    check(of.weight, moved / length, 1, (error + relative * np.abs(moved)) / length)


def test_threads_and_parts_leave_the_bits() -> None:
    found = []
    for threads in (1, 2, 5):
        of = Case(10, 3, 40, 9, np.float32)
        of.reconstruct(threads)
        of.descend(threads)
        found.append([each.tobytes() for each in (of.again, of.responses, of.weight, of.moving)])
    assert found[0] == found[1] == found[2]


@every(
    ("name", "change", "message"),
    [
        ("weight", lambda a: a[:11], "weight: has another shape"),
        ("weight", lambda a: a.astype(np.int32), "weight, x: must be floats"),
        ("weight", lambda a: a[:, ::-1], "weight: must be contiguous"),
        ("moving", lambda a: a.astype(np.float64), "moving: has another shape or dtype"),
        ("moving", lambda a: a[:, :, ::-1], "moving: must be contiguous"),
        ("x", lambda a: a[..., :2], "again: has another shape"),
        ("x", lambda a: a[0], "weight, x: must be floats with 3 and 6 axes"),
        ("x", np.ascontiguousarray, "x: the strides do not fit"),
        ("again", lambda a: a[:, :, :, ::-1], "again: the strides do not fit"),
        ("responses", lambda a: a[:, :, :4], "responses: has another shape"),
        ("slopes", lambda a: a[:2], "slopes: has another shape"),
        ("responses", lambda a: a[..., ::-1], "responses: the strides do not fit"),
        ("slopes", lambda a: a[..., ::-1], "slopes: the strides do not fit"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, change: Any, message: str) -> None:
    of = Case(4, 3, 5, 3, np.float32)
    x, again = (fields(each, 4) for each in of.windows)
    given = {"weight": of.weight, "moving": of.moving, "x": x, "again": again}
    given |= {"responses": of.responses, "slopes": of.slopes}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        _cpu.descend_blocks(1, BY, *given.values())


POOLS = [  # size, step, rows and columns of pools, values of a cell: tails of strips, and none
    (3, 1, 5, 7, 320),
    (2, 2, 3, 4, 64),
    (1, 1, 1, 1, 1),
    (3, 2, 2, 1, 65),
    (2, 3, 1, 3, 31),
    (4, 1, 2, 2, 147),
    (3, 1, 2, 3, 0),
]


@every(
    ("case", "dtype", "threads", "write"),
    list(product(POOLS, (np.float32, np.float64), (1, 2), (False, True))),
)
def test_compiled_pools_follow_the_formulas(
    clone: str, case: tuple[int, ...], dtype: type, threads: int, write: bool
) -> None:
    """Sums of squares have no cancellation: their relative error is a rounding for each term."""
    size, step, rows, columns, n = case
    unit, rng = float(np.finfo(dtype).eps) / 2, np.random.default_rng(case)
    cells = (rows - 1) * step + size, (columns - 1) * step + size
    r = rng.standard_normal((cells[0], cells[1] + 2, n + 1)).astype(dtype)[:, 2:, 1:]
    shape = (rows, columns, n) if write else (*cells, n)
    memory = rng.standard_normal((shape[0], shape[1] + 1, n + 3)).astype(dtype)
    out, around, epsilon, by = memory[:, 1:, :n], memory.copy(), 0.01, 0.3
    total = _cpu.pool_responses(threads, size, step, epsilon, by, write, r, out)

    squares = r.astype(np.float64) ** 2
    pools, sums = np.full((rows, columns, n), epsilon), np.zeros((*cells, n))
    places = [(slice(i * step, i * step + size), slice(j * step, j * step + size))
              for i in range(rows) for j in range(columns)]  # fmt: skip
    for at, place in zip(np.ndindex(rows, columns), places, strict=True):
        pools[at] = np.sqrt(epsilon + squares[place].sum((0, 1)))
        sums[place] += by / pools[at]
    # epsilon's rounding, one a term, half of them after the root; root, by, quotient.
    relative = 1.01 * ((size**2 + 2) / 2 + 3) * unit
    assert abs(total - pools.sum()) <= (relative + 1.01 * (columns + 16) * unit) * pools.sum()
    before = around[:, 1:, :n].astype(np.float64)
    want = pools if write else before + sums
    terms = relative + 1.01 * (size**2 + size) * unit  # and those of the sum over its pools
    bound = relative * pools if write else terms * (np.abs(before) + sums)
    assert (np.abs(out - want) <= bound).all()
    around[:, 1:, :n] = out
    np.testing.assert_array_equal(memory, around)  # nothing beside is written


@every(
    ("shape", "dtype", "threads"),
    list(product([(9, 3, 600), (1, 1, 1), (2, 5, 17), (0, 2, 3), (3, 0, 3)],
                 (np.float32, np.float64), (1, 2))),
)  # fmt: skip
def test_compiled_differences_follow_the_formulas(
    clone: str, shape: tuple[int, int, int], dtype: type, threads: int
) -> None:
    unit, rng = float(np.finfo(dtype).eps) / 2, np.random.default_rng(shape)
    memory = rng.standard_normal((2, shape[0], shape[1] + 1, shape[2] + 2)).astype(dtype)
    x, again = memory[..., 1:, 1:-1]
    around, before, by = memory.copy(), again.astype(np.float64), 1.7
    sums = _cpu.subtract_cells(threads, by, x, again)
    given = x.astype(np.float64)
    # The factor's rounding, the product's and the difference's.
    assert (
        np.abs(again - (before - by * given)) <= 3.1 * unit * (np.abs(before) + by * np.abs(given))
    ).all()
    for got, values in zip(sums, (again.astype(np.float64), given), strict=True):
        want = (values**2).sum()
        assert abs(got - want) <= 1.01 * (shape[2] + 2) * unit * want
    around[1][:, 1:, 1:-1] = again
    np.testing.assert_array_equal(memory, around)


def test_pools_leave_the_bits_for_any_threads() -> None:
    """Also of sums; a value that is not finite stays in its pools."""
    found = []
    for threads in (1, 2, 5):
        rng = np.random.default_rng(1)
        r, slopes = (rng.standard_normal((12, 9, 1000)).astype(np.float32) for _ in range(2))
        total = _cpu.pool_responses(threads, 3, 1, 0.1, 0.3, False, r, slopes)
        sums = _cpu.subtract_cells(threads, 0.7, r, slopes)
        found.append((total, sums, slopes.tobytes()))
    assert found[0] == found[1] == found[2]
    r[5, 4, 7] = np.nan
    pooled = np.zeros((10, 7, 1000), np.float32)
    assert np.isnan(_cpu.pool_responses(1, 3, 1, 0.1, 0.3, True, r, pooled))
    where = np.zeros(pooled.shape, bool)
    where[3:6, 2:5, 7] = True
    np.testing.assert_array_equal(np.isnan(pooled), where)


@every(
    ("change", "message"),
    [
        ({"size": 0}, "responses: are not those of pools of 0 by 1"),
        ({"size": 6}, "responses: are not those"),
        ({"step": 2}, "responses: are not those of pools of 2 by 2"),
        ({"step": 0}, "responses: are not those"),
        ({"responses": np.zeros((5, 4, 3), np.int32)}, "responses: must be floats with 3 axes"),
        ({"responses": np.zeros((5, 4), np.float32)}, "responses: must be floats with 3 axes"),
        ({"responses": np.zeros((5, 4, 3), np.float32)[..., ::-1]}, "responses: the strides"),
        ({"out": np.zeros((5, 4, 3))}, "out: has another shape or dtype"),
        ({"out": np.zeros((4, 3, 3), np.float32)}, "out: has another shape"),
        ({"write": True}, "out: has another shape"),
        ({"out": np.zeros((5, 4, 6), np.float32)[..., ::2]}, "out: the strides do not fit"),
    ],
)
def test_pools_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"size": 2, "step": 1, "epsilon": 0.1, "by": 1.0, "write": False}
    given |= {name: np.zeros((5, 4, 3), np.float32) for name in ("responses", "out")} | change
    with pytest.raises(ValueError, match=message):
        _cpu.pool_responses(1, *given.values())


@every(
    ("x", "again", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3)), "x: must be floats with 3 axes"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 4), np.float32), "again: has another shape or dtype"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 5)), "again: has another shape"),
        (np.zeros((2, 3, 4))[..., ::-1], np.zeros((2, 3, 4)), "x: the strides do not fit"),
    ],
)
def test_cells_that_do_not_fit_are_refused(x: Array, again: Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _cpu.subtract_cells(1, 0.5, x, again)
