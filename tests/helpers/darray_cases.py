"""Random cases of distributed arrays, what NumPy says that they give, and every way to do one.

Nothing of an oracle uses cpdhpc's geometry: boxes are cut and padded by NumPy alone.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import Constant

POISON = 0xA5


class Laid(NamedTuple):
    """An array somewhere in a base: base[key] has its elements. The rest is poison."""

    array: Any
    base: np.ndarray
    key: tuple[slice, ...]

    @property
    def values(self) -> np.ndarray:
        """What the array holds, by NumPy."""
        return np.array(self.base[self.key])

    @property
    def rest_is_untouched(self) -> bool:
        """Whether nothing was written beside the array."""
        size = self.base.itemsize
        rest = self.base.copy(order="K").view(f"V{size}")
        rest[self.key] = np.frombuffer(bytes([POISON]) * size, rest.dtype)[0]
        return set(rest.tobytes()) <= {POISON}


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype, with that of ml_dtypes for bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def any_bits(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Elements of any bits, NaN with payloads included; truth values are 0 and 1."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    found = dtype_of(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * found.itemsize), found).reshape(shape)


def numbers(rng: np.random.Generator, shape: Sequence[int], dtype: str, most: int) -> np.ndarray:
    """Integers that can be added: of any bits, but in dtypes of floats up to most."""
    if "int" in dtype:
        return any_bits(rng, shape, dtype)
    real = rng.integers(-most, most + 1, shape)
    if dtype.startswith("complex"):
        return (real + 1j * rng.integers(-most, most + 1, shape)).astype(dtype)
    return real.astype(dtype_of(dtype))


def as_kind(array: np.ndarray, kind: str) -> Any:
    """The same memory as an array of a kind."""
    if kind == "numpy":
        return array
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def laid_out(rng: np.random.Generator, values: np.ndarray, kind: str) -> Laid:
    """The values in memory of some order, with gaps or backwards; torch has nothing backwards."""
    how = rng.choice(["plain", "fortran", "gaps", "backwards" if kind == "numpy" else "plain"])
    shape, key = list(values.shape), [slice(None)] * values.ndim
    for axis in range(values.ndim):
        if how == "gaps" and rng.random() < 0.7:
            shape[axis], key[axis] = 2 * shape[axis] + 1, slice(1, None, 2)
        elif how == "backwards" and rng.random() < 0.7:
            key[axis] = slice(None, None, -1)
    memory = bytearray([POISON]) * (int(np.prod(shape)) * values.itemsize)
    order = "F" if how == "fortran" else "C"
    base = np.frombuffer(memory, values.dtype).reshape(shape, order=order)
    base[tuple(key)] = values
    return Laid(as_kind(base[tuple(key)], kind), base, tuple(key))


def as_numpy(array: Any) -> np.ndarray:
    """An array of any kind as NumPy's, bfloat16 as ml_dtypes has it."""
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        plain = array.detach().cpu()
        if plain.dtype == torch.bfloat16:
            return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return plain.numpy()
    return array.get()


def same(got: Any, want: np.ndarray) -> bool:
    """Whether arrays are alike in shape, dtype and every bit."""
    found = as_numpy(got)
    alike = found.shape == want.shape and found.dtype == want.dtype
    return alike and found.tobytes() == want.tobytes()


PADS = {"zero": "constant", "wrap": "wrap", "reflect": "reflect", "symmetric": "symmetric",
        "edge": "edge"}  # fmt: skip
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = {
    "numpy": ["bool", *INTEGERS, *FLOATS, "bfloat16"],
    "torch": ["bool", *INTEGERS, *FLOATS, "bfloat16", "bfloat16"],
}
EXTENTS = {1: 24, 2: 9, 3: 6, 4: 4}  # axes -> the largest extent
WINDOWS = {"halo": 0.4, "near": 0.3, "own": 0.05, "wide": 0.1, "far": 0.05, "empty": 0.1}
MOST_CELLS = 3000  # of a window
WHOLE_UP_TO = {"float16": 2048, "bfloat16": 256}  # integers are exact; elsewhere far beyond


class Case(NamedTuple):
    """A plan of some ranks, and the arrays that go through it.

    kind: numpy or torch; dtype: by name
    """

    seed: tuple[int, ...]
    layout: Layout
    windows: tuple[Box, ...]
    modes: tuple[Any, ...]
    kind: str
    dtype: str
    trail: tuple[int, ...]

    def rng(self, *more: int) -> np.random.Generator:
        """Random numbers of this case, alike on all ranks."""
        return np.random.default_rng((*self.seed, *more))


def empty_box(rng: np.random.Generator, shape: Sequence[int]) -> Box:
    """A box somewhere that has no cells along one axis or more."""
    start = [int(rng.integers(-2, n + 3)) for n in shape]
    stop = [a + int(rng.integers(0, 3)) for a in start]
    axis = int(rng.integers(len(shape)))
    stop[axis] = start[axis] - int(rng.integers(0, 2))
    return Box(tuple(start), tuple(stop))


def uneven_grid(rng: np.random.Generator, shape: Sequence[int], ranks: int) -> list[Box]:
    """A Cartesian grid with cuts anywhere, so with empty parts too; ranks along random axes."""
    procs, left = [1] * len(shape), ranks
    for prime in (2, 3, 5):
        while left % prime == 0:
            procs[rng.integers(len(shape))] *= prime
            left //= prime
    assert left == 1, "ranks with larger primes are not drawn"
    cuts = [
        [0, *sorted(rng.integers(0, n + 1, p - 1).tolist()), n]
        for n, p in zip(shape, procs, strict=True)
    ]
    places = np.ndindex(*procs)
    return [
        Box(tuple(c[i] for c, i in zip(cuts, place, strict=True)),
            tuple(c[i + 1] for c, i in zip(cuts, place, strict=True)))
        for place in places
    ]  # fmt: skip


def any_boxes(rng: np.random.Generator, shape: Sequence[int], ranks: int) -> list[Box]:
    """The domain cut in two again and again, dealt to ranks anyhow; some get nothing."""
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(int(rng.integers(0, ranks))):
        box = boxes.pop(int(rng.integers(len(boxes))))
        axis = int(rng.integers(len(shape)))
        cut = int(rng.integers(box.start[axis], box.stop[axis] + 1))
        low, high = list(box.stop), list(box.start)
        low[axis] = high[axis] = cut
        boxes += [Box(box.start, tuple(low)), Box(tuple(high), box.stop)]
    while len(boxes) < ranks:
        boxes.append(empty_box(rng, shape))
    return [boxes[i] for i in rng.permutation(ranks)]


def draw_layout(rng: np.random.Generator, shape: tuple[int, ...], ranks: int) -> Layout:
    """A layout of some kind."""
    make = uneven_grid if rng.random() < 0.4 else any_boxes
    return Layout.boxes(shape, make(rng, shape, ranks))


def draw_window(rng: np.random.Generator, shape: Sequence[int], owned: Box) -> Box:
    """A window of some kind: own cells and a halo, anything near, far outside, or nothing."""
    how = rng.choice([*WINDOWS], p=[*WINDOWS.values()])
    if how == "empty":
        return empty_box(rng, shape)
    if how == "own":
        return owned
    ends = []
    for n, a, b in zip(shape, *owned, strict=True):
        if how == "halo":
            ends.append((a - int(rng.integers(0, 3)), max(a, b) + int(rng.integers(0, 4))))
        elif how == "wide":
            ends.append((-int(rng.integers(0, 3 * n)), n + int(rng.integers(0, 3 * n))))
        else:
            start = int(rng.integers(-2 * n, 2 * n)) if how == "near" else int(rng.integers(5 * n))
            ends.append((start, start + int(rng.integers(0, 2 * n + 1))))
    starts, stops = zip(*ends, strict=True)
    return Box(starts, stops)


def draw_mode(rng: np.random.Generator, dtype: str) -> Any:
    """A boundary mode."""
    mode = rng.choice([*PADS, "constant"])
    if mode == "constant":
        values = [1, 2.5, 7] if dtype == "bool" or "int" in dtype else [2.5, -1, np.nan, -np.inf]
        return Constant([*values, 1 + 2j][rng.integers(len(values) + dtype.startswith("complex"))])
    return str(mode)


def draw(seed: Sequence[int], ranks: int) -> Case:
    """The case of a seed for so many ranks."""
    rng = np.random.default_rng((*seed, ranks))
    ndim = int(rng.choice([1, 2, 3, 4], p=[0.25, 0.4, 0.3, 0.05]))
    shape = tuple(rng.integers(1, EXTENTS[ndim] + 1, ndim).tolist())
    layout, windows = draw_layout(rng, shape, ranks), []
    for owned in layout.owners:
        window = draw_window(rng, shape, owned)
        while window.size > MOST_CELLS:
            window = draw_window(rng, shape, owned)
        windows.append(window)
    kind = str(rng.choice(["numpy", "torch"], p=[0.7, 0.3]))
    dtype = str(rng.choice(DTYPES[kind]))
    trail = tuple(rng.integers(0, 4, rng.choice([0, 0, 0, 1, 1, 2])).tolist())
    modes = tuple(draw_mode(rng, dtype) for n in shape)
    return Case((*seed, ranks), layout, tuple(windows), modes, kind, dtype, trail)


def shown(x: np.ndarray, window: Box, modes: Sequence[Any]) -> np.ndarray:
    """The window of a whole array: numpy.pad and indexing, axis after axis."""
    for axis, mode in enumerate(modes):
        start, stop, extent = window.start[axis], window.stop[axis], x.shape[axis]
        before, after = max(0, -start), max(0, stop - extent)
        widths = [(before, after) if i == axis else (0, 0) for i in range(x.ndim)]
        if isinstance(mode, Constant):
            x = np.pad(x, widths, "constant", constant_values=mode.value)
        else:
            x = np.pad(x, widths, PADS[mode])
        x = x.take(range(start + before, max(start, stop) + before), axis)
    return x


def cells_shown(case: Case, rank: int) -> np.ndarray:
    """The number of the domain's cell that each cell of a rank's window shows; -1 for none."""
    numbers = np.arange(np.prod(case.layout.shape)).reshape(case.layout.shape)
    fills = [isinstance(mode, Constant) or mode == "zero" for mode in case.modes]
    modes = [Constant(-1) if fill else m for fill, m in zip(fills, case.modes, strict=True)]
    return shown(numbers, case.windows[rank], modes)


def summed(case: Case, ys: Sequence[np.ndarray]) -> np.ndarray:
    """The transpose: what the windows of all ranks add up to on the whole domain."""
    total = np.zeros((int(np.prod(case.layout.shape)), *case.trail), ys[0].dtype)
    for rank, y in enumerate(ys):
        cells = cells_shown(case, rank)
        np.add.at(total, cells[cells >= 0], y[cells >= 0])
    return total.reshape(case.layout.shape + case.trail)


def own(case: Case, rank: int, whole: np.ndarray) -> np.ndarray:
    """What a rank owns of a whole array."""
    box = case.layout.owners[rank]
    return whole[tuple(map(slice, *box))]


CALLS = (0, 1, 1)  # which of two arrays: by slices, by a program for its strides, by that again


def wanted_sums(case: Case) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    """Two arrays for the window of every rank, and their sums on the whole domain."""
    most = 1000
    if case.dtype in WHOLE_UP_TO:
        ones = [np.ones(box.shape + case.trail, np.int64) for box in case.windows]
        readers = int(summed(case, ones).max(initial=1))
        most = min(most, WHOLE_UP_TO[case.dtype] // max(1, readers))
    yss = [
        [numbers(case.rng(2, i, rank), box.shape + case.trail, case.dtype, most)
         for rank, box in enumerate(case.windows)]
        for i in range(2)
    ]  # fmt: skip
    return yss, [summed(case, ys) for ys in yss]


class Checks:
    """The calls of one rank on one plan, all collective and in one order on all ranks."""

    def __init__(self, plan: WindowPlan, case: Case) -> None:
        self.plan, self.case, self.rank = plan, case, plan.rank
        self.rng = case.rng(9, plan.rank)  # of what only this rank does
        self.problems: list[str] = []

    def note(self, what: str, good: bool) -> None:
        if not good:
            self.problems.append(f"{self.case} rank {self.rank}: {what}")

    def out_like(self, want: np.ndarray) -> Laid:
        """An array of any strides to write to."""
        return laid_out(self.rng, np.zeros_like(want), self.case.kind)

    def operation(self, name: str, given: list[np.ndarray], wants: list[np.ndarray]) -> None:
        """Do an operation often, with and without out, and two at a time."""
        do, begin = getattr(self.plan, name), {"exchange": self.plan.begin}.get(
            name, self.plan.begin_accumulate
        )  # fmt: skip
        xs = [laid_out(self.rng, each, self.case.kind) for each in given]
        for call, i in enumerate(CALLS):
            self.note(f"{name} {call}", same(do(xs[i].array), wants[i]))
        out = self.out_like(wants[0])
        result = do(xs[0].array, out.array)
        self.note(f"{name} to out", result is out.array and same(out.values, wants[0]))
        self.note(f"{name} beside out", out.rest_is_untouched)
        handles = [begin(xs[0].array), begin(xs[1].array, self.out_like(wants[1]).array)]
        self.interior(name, handles[0].out, wants[0])
        for i in (0, 1) if self.rng.random() < 0.7 else (1, 0):
            self.note(f"{name} {i} of two", same(handles[i].finish(), wants[i]))
        for laid, each in zip(xs, given, strict=True):
            self.note(f"{name} changes what is given", same(laid.values, each))

    def interior(self, name: str, out: Any, want: np.ndarray) -> None:
        """The part of a window that may be read before finish."""
        if name == "exchange":
            place = self.plan.interior.slices(self.plan.window.start)
            self.note("interior", same(out[place], want[place]))

    def inside(self, name: str, given: np.ndarray, want: np.ndarray) -> None:
        """What a rank owns lies in the window's array; on ranks where it cannot, as always."""
        if not self.plan.window.contains(self.plan.owned):
            self.note(f"{name} apart", same(getattr(self.plan, name)(self.laid(given)), want))
        elif name == "exchange":
            window = self.out_like(want)
            self.plan.inside(window.array)[...] = self.laid(given)
            got = self.plan.exchange(self.plan.inside(window.array), window.array)
            self.note("exchange of what is inside", same(got, want) and window.rest_is_untouched)
        else:
            window = laid_out(self.rng, given, self.case.kind)
            got = self.plan.accumulate(window.array, self.plan.inside(window.array))
            self.note("accumulate to inside", same(got, want) and window.rest_is_untouched)

    def laid(self, values: np.ndarray) -> Any:
        return laid_out(self.rng, values, self.case.kind).array


def check_case(world: Any, case: Case, every: int = 8) -> list[str]:
    """Return what is wrong with a case on this rank. Collective.

    every: of so many cases one is verified and its bytes are counted
    """
    plan = WindowPlan(world, case.layout, case.windows[world.rank], case.modes, name=str(case.seed))
    checks, box = Checks(plan, case), case.windows[world.rank]
    shape = case.layout.shape + case.trail
    wholes = [any_bits(case.rng(1, i), shape, case.dtype) for i in range(2)]
    wants = [shown(whole, box, case.modes) for whole in wholes]
    xs = [own(case, world.rank, whole) for whole in wholes]
    checks.operation("exchange", xs, wants)
    checks.inside("exchange", xs[0], wants[0])
    if case.dtype != "bool":
        yss, totals = wanted_sums(case)
        ys, sums = [ys[world.rank] for ys in yss], [own(case, world.rank, t) for t in totals]
        checks.operation("accumulate", ys, sums)
        checks.inside("accumulate", ys[1], sums[1])
    if case.seed[1] % every == 0:
        checks.note("verify", plan.verify().passed)
        count_messages(world, plan, case, checks)
    plan.free()
    return checks.problems


def count_messages(world: Any, plan: WindowPlan, case: Case, checks: Checks) -> None:
    """What describe says is what the world counts in an exchange, and the other way round."""
    dtype = dtype_of(case.dtype)
    told = plan.describe(dtype.name if dtype.kind != "V" else "uint16", case.trail)
    mine = told.ranks[world.rank]
    for name, sent, to in (
        ("exchange", mine.sent_bytes, mine.sends_to),
        ("accumulate", mine.received_bytes, mine.recvs_from),
    ):
        box = plan.owned if name == "exchange" else plan.window
        before = int(world.bytes_sent[0]), int(world.messages_sent[0])
        if name == "accumulate" and case.dtype == "bool":
            continue
        getattr(plan, name)(checks.laid(np.zeros(box.shape + case.trail, dtype)))
        after = int(world.bytes_sent[0]), int(world.messages_sent[0])
        found = after[0] - before[0], after[1] - before[1]
        checks.note(f"bytes and messages of {name}", found == (sent, len(to)))
