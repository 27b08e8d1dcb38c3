"""Checks of identical bits: kernels, schedules, windows, a training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np

from ...collectives.allreduce import Allreduce, Prepared, simulate
from ...collectives.checks import NonFiniteGradient
from ...collectives.collective import Collective
from ...collectives.schedules import SCHEDULES
from ...darray.plan import WindowPlan
from ...formats import (
    INTEGERS,
    MICROSCALING,
    SHARED,
    TILE,
    Cast,
    FloatFormat,
    Format,
    Rounding,
    Special,
    overflow_shows,
    parse_format,
    wire_scaling,
)
from ...methods import COLLECTIVES
from ...ops import cpu, reference, to_host
from ...ops.products import Products
from ...ops.steps import PART, RULES, LayerArrays, Numbers
from ...world.gpu_messages import use_gpu
from ...world.ranks import Loopback
from ..darray_show import HaloSpec
from ..kinds.allreduce_cases import no_torch
from ..kinds.codec_cases import format_of
from ..kinds.halo_cases import ACCUMULATE, COPIED, EXCHANGE, OURS, Setting, open_cases
from ..kinds.timing import on_device
from .base import Array, Check, CheckPlace, CheckResult
from .outcomes import (
    KEY,
    OFFSET,
    NamedResults,
    OnGpu,
    differing,
    of_codes,
    of_passes,
    of_products,
    of_selection,
    of_sums,
    of_tiles,
    of_two_scales,
    values,
)

TABLES = ("posit8", "posit8es1", "posit6", "takum8", "lns4m3")  # of 8 bits at most
N = 2500  # values: two tiles and a part of one


def _ops(place: CheckPlace) -> Any:
    """Return the operations of the device, for NumPy arrays."""
    if place.device == "cpu":
        return cpu
    from ...ops import gpu

    return OnGpu(gpu)


def _there(place: CheckPlace) -> tuple[Any, Callable[[Array], Any], Callable[[Any], Array]]:
    """Return the operations of the device, a function that copies arrays there, and one back."""
    if place.device == "cpu":
        return cpu, np.copy, np.asarray
    from ...ops import gpu

    return gpu, gpu.asarray, to_host


def small_formats() -> Iterator[Format]:
    """Yield the formats of 8 bits at most: IEEE's, those without infinity or NaN, and tables."""
    for exp, man in product(range(1, 8), range(7)):
        for special in get_args(Special):
            try:
                fmt = FloatFormat(exp, man, special)
            except ValueError:  # zero is its only number
                continue
            if fmt.bits <= 8:
                yield fmt
    yield from map(parse_format, TABLES)


def edges(fmt: Format) -> Array:
    """Return numbers that are hard to round: those of a format, midpoints, float32 beside them."""
    codes = np.arange(min(1 << fmt.bits, 1 << 8), dtype=np.uint32)
    codes = codes if fmt.bits <= 8 else codes * np.uint32(0x01010101) & np.uint32(2**fmt.bits - 1)
    numbers = reference.decode(codes, fmt).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middle = (numbers[1:] + numbers[:-1]) / 2
    beyond = numbers[[0, -1]] * [[1 + 2.0**-12], [1.25], [1.5], [2.0], [4.0]]
    x = np.concatenate([numbers, middle, beyond.ravel()]).astype(np.float32)
    beside = [np.nextafter(x, np.float32(end)) for end in (np.inf, -np.inf)]
    odd = np.array([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
    return np.concatenate([x, *beside, odd])


def casts(fmt: Format, roundings: Any) -> Iterator[Cast]:
    """Yield the ways to round to a format."""
    for rounding in roundings:
        yield Cast(fmt, rounding, "saturate")
        if overflow_shows(fmt):
            yield Cast(fmt, rounding, "inf")


def words(cast: Cast) -> str:
    return f"{cast.fmt.name}, {cast.rounding}, {cast.overflow}"


def same(a: Array, b: Array) -> bool:
    """Return whether two arrays have identical bits; all NaN are equal."""
    return not differing([np.asarray(a)], [np.asarray(b)], any_nan=True)


def _compare(
    found: CheckResult, what: str, count: int, outcome: Callable[[Any], list[Array]], ops: Any
) -> None:
    """Compare the outcome of operations with that of the specification."""
    found.compare(what, not differing(outcome(ops), outcome(reference), any_nan=True), count)


def _shifts(fmt: Format, *shifts: int) -> list[int]:
    """Return the shifts that a format has."""
    return [shift for shift in shifts if fmt.shift_min <= shift <= fmt.shift_max]


def formats(place: CheckPlace) -> CheckResult:
    """Decode all codes of all formats of 8 bits; encode numbers, midpoints and their neighbours."""
    found, ops = CheckResult(), _ops(place)
    for fmt in small_formats():
        codes, x = np.arange(1 << fmt.bits, dtype=np.uint32), edges(fmt)
        for shift in _shifts(fmt, 0, 3, -5):
            wanted, got = (o.decode(codes, fmt, shift) for o in (reference, ops))
            found.compare(f"decode {fmt.name}, shift {shift}", same(got, wanted), codes.size)
        for cast in casts(fmt, get_args(Rounding)):
            for shift in _shifts(fmt, *place.of((0,), (0, 7, -7))):
                how = (cast, shift, KEY, OFFSET)
                wanted, got = (o.encode(x, *how) for o in (reference, ops))
                found.compare(f"encode {words(cast)}, shift {shift}", same(got, wanted), x.size)
    return found


LARGE_FORMATS = ("fp16", "bf16", "fp32", "e5m6", "e6m9", "e8m3", "posit16", "takum16")
TILED = ("e4m3", "e5m2", "e2m1fn", "e3m0", "e4m3fn", "e1m1", "e3m2", *MICROSCALING)


def large_formats(place: CheckPlace) -> CheckResult:
    """Encode and decode samples and edges of wider formats, and pack them."""
    found, ops = CheckResult(), _ops(place)
    for name in LARGE_FORMATS:
        fmt = parse_format(name)
        x = np.concatenate([edges(fmt), values(N, 1)])
        for cast in casts(fmt, get_args(Rounding)):
            outcome = partial(of_codes, x=x, cast=cast, shift=min(2, fmt.shift_max))
            _compare(found, words(cast), x.size, outcome, ops)
    for bits in range(1, 33):
        codes = (np.arange(N, dtype=np.uint64) * 2654435761 >> (32 - bits)).astype(np.uint32)
        codes &= np.uint32(2**bits - 1)
        packed = ops.pack(codes, bits)
        back = ops.unpack(packed, bits, N)
        right = same(packed, reference.pack(codes, bits)) and same(back, codes)
        found.compare(f"pack {bits} bits", right, N)
    return found


def tiled(place: CheckPlace) -> CheckResult:
    """Encode, decode, add and hop tiles, with all scalings, with fixed and chosen shifts.

    On a GPU the compiler takes seconds for each cast, so a quick check has few.
    """
    found, ops = CheckResult(), _ops(place)
    few = place.quick and place.device == "gpu"
    names = ("e4m3", "mxfp4") if few else place.of(TILED[:-4], (*TILED, *LARGE_FORMATS))
    roundings: Any = place.of(("nearest", "stochastic")[: 1 if few else 2], get_args(Rounding))
    x = values(N, 1) * np.ldexp(np.float32(1), (np.arange(N) // TILE * 30) - 20).astype(np.float32)
    bad = x.copy()
    bad[[5, TILE + 3]] = np.nan, np.inf
    for name in names:
        fmt = format_of(name)
        sizes = (32,) if name in MICROSCALING else SHARED.values()
        ways = [Cast(fmt)] if few else casts(fmt, roundings)
        for cast, shared in product(ways, sizes):
            for data, fit in ((x, True), (x, False), (bad, True)):
                outcome = partial(
                    of_tiles, x=data, y=values(N, 2), cast=cast, shared=shared, fit=fit
                )
                what = f"{words(cast)}, {shared} share a shift, fit={fit}"
                _compare(found, what, N, outcome, ops)
    return found


def two_scales(place: CheckPlace) -> CheckResult:
    """Encode blocks of NVFP4, decode them, and add them."""
    found, ops = CheckResult(), _ops(place)
    for n, rounding in product((1, 17, N, 40_000), ("nearest", "stochastic")):
        x, y = values(n, 5), values(n, 6)
        bad = x.copy()
        bad[n // 2] = np.nan
        for data in (x, bad, x * np.float32(1e-40), np.zeros_like(x)):
            outcome = partial(of_two_scales, x=data, y=y, rounding=rounding)
            _compare(found, f"{n} values, {rounding}", n, outcome, ops)
    return found


def sums(place: CheckPlace) -> CheckResult:
    """Add integers of growing width, and pack ternary codes."""
    found, ops = CheckResult(), _ops(place)
    for name in ("int2", "int4", "int8", "int16", "ternary", "e4m3", "e3m0"):
        fmt = Cast(INTEGERS.get(name) or parse_format(name)).float_format
        for rounding in ("nearest", "stochastic"):
            outcome = partial(of_sums, x=values(N, 3), fmt=fmt, rounding=rounding)
            _compare(found, f"{name}, {rounding}", N, outcome, ops)
    return found


def passes(place: CheckPlace) -> CheckResult:
    """Accumulate, scale, find the largest, take signs, and run the other passes of compressors."""
    found, (ops, there, here) = CheckResult(), _there(place)
    for n in place.of((1, 33, 9001), (1, 7, 33, 1025, 9001, 60_000)):
        wanted = of_passes(reference, n, np.copy, np.asarray)
        _compare_all(found, n, of_passes(ops, n, there, here), wanted)
    return found


def _compare_all(found: CheckResult, n: int, got: NamedResults, wanted: NamedResults) -> None:
    for mine, its in zip(got, wanted, strict=True):
        found.compare(f"{mine[0]} of {n} values", mine == its, n)


def selection(place: CheckPlace) -> CheckResult:
    """Select, gather, scatter, clear, and pack streams of bits."""
    found, (ops, there, here) = CheckResult(), _there(place)
    for n, seed in product((1, 33, 5000, 70_001), range(place.of(1, 4))):
        x = values(n, seed)
        x = np.round(x) if seed % 2 else x  # with ties
        wanted = of_selection(reference, x, np.copy, np.asarray)
        _compare_all(found, n, of_selection(ops, x, there, here), wanted)
    return found


def products(place: CheckPlace) -> CheckResult:
    """Multiply matrices with chosen roundings of products, partial sums and chunks."""
    found, ops = CheckResult(), _ops(place)
    names = place.of(("e4m3", "bf16"), ("e4m3", "bf16", "e5m2", "e2m1fn", "fp16", "fp32"))
    for name, rounding in product(names, get_args(Rounding)):
        cast = Cast(parse_format(name), rounding)
        for how in (
            Products(cast),
            Products(cast, cast, "pairwise"),
            Products(cast, None, chunk=4, between=cast, kahan=True),
        ):
            outcome = partial(of_products, how=how, m=5, k=13, n=9)
            what = f"{name}, {rounding}, {how.order}, chunk {how.chunk}"
            _compare(found, what, 2 * 5 * 9, outcome, ops)
    return found


def steps(place: CheckPlace) -> CheckResult:
    """Take a step of each optimiser that adapts to layers."""
    found = CheckResult()
    numbers = Numbers(0.1, 0.01, 0.9, 0.99, 1e-6, 1.0, 0.02, 1.25, 1.5, 0.75, 10.0, 5.0, 0.1)
    shapes = [(1, 1), (3, 5), (7, 147), (2, PART + 17)]
    for rule in RULES:
        momentum, results = rule in ("lars", "larc", "novograd"), []
        for ops in (reference, cpu):
            layers, of = [], np.array([numbers] * len(shapes), np.float64)
            for seed, (rows, row) in enumerate(shapes):
                w, g, m, v = (values(rows * row, 4 * seed + i) for i in range(4))
                kept = (m, None if momentum else np.abs(v)) if rule != "norms" else (None, None)
                layers.append(LayerArrays(w, g, kept[0], kept[1], rows))
            ops.step_layers(rule, layers, of)
            results.append([x for layer in layers for x in layer[:4] if x is not None] + [of])
        found.compare(rule, not differing(*results), sum(a * b for a, b in shapes))
    return found


def on_host(place: CheckPlace) -> CheckResult:
    """Pack, mark, look up and merge places of sparse arrays, as compressors do."""
    found = CheckResult()
    for n, bin_values in product((1, 900, 9001), (1, 50, 500)):
        x = values(n, n)
        indices = np.flatnonzero(np.random.default_rng(n).random(n) < 0.1).astype(np.uint32)
        args = (bin_values, indices, x[indices])
        codes, got = reference.pack_bins(*args), cpu.pack_bins(*args)
        found.compare(f"pack_bins of {bin_values}", same(got, codes), n)
        wanted, back = (o.unpack_bins(bin_values, codes, 0.25, 7) for o in (reference, cpu))
        found.compare(f"unpack_bins of {bin_values}", not differing([*back], [*wanted]), n)
        key = np.random.default_rng(n).integers(0, 2**64, 2, np.uint64)
        marks = [o.mark_drawn(key, n // 2, n) for o in (reference, cpu)]
        found.compare(f"mark_drawn of {n}", same(*marks), n)
        wanted, there = (o.pairs_at(marks[0], indices, x[indices]) for o in (reference, cpu))
        found.compare(f"pairs_at of {n}", not differing([*there], [*wanted]), n)
        every = [np.arange(n, dtype=np.uint32), indices], [x, -x[indices]]
        wanted, merged = (o.merge_places(*every, n) for o in (reference, cpu))
        found.compare(f"merge_places of {n}", not differing([*merged], [*wanted]), n)
    return found


def digest(result: Any) -> str:
    """Return a hash of an array's bits, or the text of an error.

    All NaN are equal: a GPU's arithmetic makes each of them 0x7fffffff, a CPU's keeps its bits.
    """
    if isinstance(result, str):
        return result
    if result is None:
        return "none"
    array = to_host(result)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return hashlib.blake2b(array.tobytes()).hexdigest()


def _twice(run: Callable[[int], Any]) -> list[str]:
    """Return the digests of two calls of run, whose argument is their number."""
    outcomes = []
    for number in range(2):
        try:
            outcomes.append(digest(run(number)))
        except (NonFiniteGradient, ValueError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


class SumCase(NamedTuple):
    """An all-reduce: its method, its values, and a name."""

    method: Allreduce
    n: int
    poisoned: bool

    @property
    def name(self) -> str:
        m = self.method
        options = m.algorithm, m.wire, m.scaling, m.accumulate, m.op, m.rounding
        words = [str(each) for each in options if each is not None]
        return f"{' '.join(words)} {self.n} values" + " one of them NaN" * self.poisoned


WIRES = ("raw", "e4m3", "e2m1fn", "e3m0", "int8", "mxfp4", "nvfp4", "ternary", "posit8", "bf16")


def all_reduces(quick: bool) -> Iterator[SumCase]:
    """Yield every schedule times wire, with the other options that fit."""
    scalings = (None, "aps") if quick else (None, "aps", "none", "block32")
    wires = WIRES if not quick else WIRES[:7]
    for algorithm, wire, scaling in product(SCHEDULES, wires, scalings):
        ways = (None, "exact") if quick else (None, "exact", *SCHEDULES[algorithm].accumulates)
        others: Any = (("sum", "nearest"), ("mean", "stochastic"))
        for accumulate, (op, rounding) in product(dict.fromkeys(ways), others):
            if quick and accumulate and op == "mean":
                continue
            try:
                method = Allreduce(
                    wire, algorithm, scaling, accumulate, op, rounding=rounding, seed=3
                )
            except ValueError:  # these do not go together
                continue
            for n in (3000,) if quick else (1, 1025, 3000, 20_000):
                yield SumCase(method, n, poisoned=False)
            if scaling is None and accumulate is None:
                yield SumCase(method, 1100, poisoned=True)


def contribution(rank: int, n: int, poisoned: bool = False) -> Array:
    """Return the values of a rank: over many binades, some of them zero."""
    rng = np.random.default_rng((rank, n))
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-12, 4, n))).astype(np.float32)
    x[::17] = 0
    if poisoned and not rank:
        x[n // 2] = np.nan
    return x


def _summed(method: Allreduce, world: Any, xs: list[Any], iteration: int) -> Any:
    return method.run(world, xs, iteration=iteration).arrays[0]


def _prepared(prepared: Prepared, iteration: int) -> Any:
    return prepared.run(iteration=iteration).arrays[0]


def schedules(place: CheckPlace) -> CheckResult:
    """All-reduce on these ranks, called once, again, and prepared; and simulate it."""
    world, cases = place.world, list(all_reduces(place.quick))
    if place.device == "gpu":
        cases = [case for case in cases if case.n in (1100, 3000)]
    got, wanted = list[list[str]](), dict[int, list[str]]()
    for number, (method, n, poisoned) in enumerate(cases):
        x = on_device(contribution(world.rank, n, poisoned), place.device)
        outcomes = _twice(partial(_summed, method, world, [x]))
        if ":" not in outcomes[0]:  # else it is an error, which prepare words in another way
            with method.prepare(world, [x]) as prepared:
                outcomes += _twice(partial(_prepared, prepared))
        got.append(outcomes)
        if number % world.ranks == world.rank:
            xs = [contribution(rank, n, poisoned) for rank in range(world.ranks)]
            simulated = Loopback(world.ranks, nodes=world.nodes)
            wanted[number] = _twice(partial(_summed, method, simulated, xs))
    return _judged(place, [case.name for case in cases], got, wanted)


def _judged(
    place: CheckPlace, names: list[str], got: list[list[str]], wanted: dict[int, list[str]]
) -> CheckResult:
    """Compare the results of this rank with simulated ones, of all ranks. Collective."""
    found, everything = CheckResult(), dict[int, list[str]]()
    for part in place.world.gather(wanted, "verify"):
        everything |= part
    calls = ("first call", "second call", "prepared", "prepared, again")
    for number, (name, mine) in enumerate(zip(names, got, strict=True)):
        its = everything[number] * 2
        for call, a, b in zip(calls, mine, its, strict=False):
            said = f": {a} in place of {b}" if ":" in a + b else ""
            found.compare(f"{name}, {call}{said}", a == b)
    return found


def _moved(method: Collective, world: Any, x: Any, outs: Any, iteration: int) -> Any:
    return method.run(world, [x], outs, iteration=iteration)[0]


def collectives(place: CheckPlace) -> CheckResult:
    """Scatter, gather, broadcast and the others on these ranks, and simulate them."""
    found, world, n = CheckResult(), place.world, 2 * TILE * place.world.ranks
    wires = place.of(("raw", "e4m3"), WIRES)
    for (name, algorithms), wire in product(COLLECTIVES.items(), wires):
        xs: list[Any] = [contribution(rank, n) for rank in range(world.ranks)]
        outs = None
        if name == "scatter":
            xs[1:] = [None] * (world.ranks - 1)
            outs = [on_device(np.empty(n // world.ranks, np.float32), place.device)]
        x = None if xs[world.rank] is None else on_device(xs[world.rank], place.device)
        for algorithm in algorithms:
            try:
                method = Collective(wire, algorithm, wire_scaling(wire), collective=name, seed=3)
            except ValueError:  # these do not go together
                continue
            got = _twice(partial(_moved, method, world, x, outs))
            results = method.run(Loopback(world.ranks, nodes=world.nodes), xs)
            wanted = digest(results[world.rank if len(results) > 1 else 0])
            for call, mine in zip(("first call", "second call"), got, strict=True):
                said = f": {mine}" if ":" in mine else ""
                found.compare(f"{name} {algorithm} {wire}, {call}{said}", mine == wanted)
    return found


def windows(place: CheckPlace) -> CheckResult:
    """Exchange and accumulate windows: the adjoint is exact, both agree with remainders."""
    found, world = CheckResult(), place.world
    for boundary, trail in product(("zero", "wrap", "reflect", "symmetric", "edge"), ((), (3,))):
        spec = HaloSpec(
            shape=[5 * world.ranks, 11], procs=[world.ranks, 1], halo=[[2, 1], [1, 2]],
            boundary=boundary, trail=list(trail),
        )  # fmt: skip
        setting = Setting(boundary, spec)
        with setting.plan(world) as plan:
            if place.device == "cpu":
                try:
                    found.counted += plan.verify().cells
                except ArithmeticError as error:
                    found.wrong.append(str(error))
            try:
                with open_cases(
                    world, setting, plan, (EXCHANGE, ACCUMULATE), (OURS, COPIED),
                    device=place.device,
                ) as cases:  # fmt: skip
                    found.counted += sum(case.out.size for case in cases)
            except ArithmeticError as error:
                found.wrong.append(f"{boundary}: {error}")
    found.compare(*_rounded_windows(place))
    return found


def _rounded_windows(place: CheckPlace) -> tuple[str, bool]:
    """Exchange float32 over a packed wire, on the device and on the CPU."""
    world = place.world
    shape = [6 * world.ranks, 50]
    spec = HaloSpec(shape=shape, procs=[world.ranks, 1], halo=2, boundary="reflect")
    layout, window = spec.geometry().layout, spec.geometry().boxes[world.process]
    x = contribution(world.rank, 300).reshape(6, 50)
    with WindowPlan(world, layout, window, "reflect", wire="e4m3") as plan:
        wanted = plan.exchange(x)
        got = to_host(plan.exchange(on_device(x, place.device)))
        back = to_host(plan.accumulate(on_device(wanted, place.device)))
        right = same(got, wanted) and same(back, plan.accumulate(wanted))
    return "windows over e4m3 are others than on the CPU", right


INPUTS, OUTPUTS, BATCH, RATE = 12, 5, 8, 2.0**-4
STEPS = 4  # at most, as long as all are exact
WAYS: dict[str, dict[str, Any]] = {  # aggregator of a training, and how its mean is simulated
    "none": {},
    "lowbit": {"wire": "e4m3"},
}


def training(place: CheckPlace) -> CheckResult:
    """Train a layer on whole numbers while no sum rounds, so that all devices have one result.

    The loss is half the sum of squares over the batch; targets and inputs are small integers, the
    rate a power of two. NumPy computes the expected weights, with means from the simulator. On a
    number of ranks that is no power of two means round, so that there is one step.
    """
    why = next(filter(None, place.world.gather(no_torch(), "verify")), "")
    if why:
        return CheckResult(not_run=why)
    import torch

    from ...ops.tensors import values_of
    from ...torch.reducer import GradientReducer

    found, world, device = CheckResult(), place.world, torch.device("cpu")
    if place.device == "gpu":
        if not torch.cuda.is_available():
            return CheckResult(not_run=f"torch {torch.__version__} finds no GPU")
        number = use_gpu(world, oversubscribe=place.oversubscribe)  # torch is loaded by now
        device = torch.device("cuda", number)

    for name, options in WAYS.items():
        model = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        model = model.to(device)
        reducer = GradientReducer(model, world, name, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        weights: Array = np.zeros((OUTPUTS, INPUTS), np.float32)
        for step in range(STEPS):
            wanted = _trained(weights, world.ranks, step, options)
            if wanted is None:
                break
            weights = wanted
            batch = _batch(world.rank, step)
            x, y = (torch.from_numpy(each).to(device) for each in batch)
            optimizer.zero_grad()
            (0.5 * (model(x) - y).square().sum()).backward()
            reducer.reduce()
            optimizer.step()
            got = values_of(model.weight)
            right = np.array_equal(got, weights)
            found.compare(f"{name}: weights after step {step + 1}", right, got.size)
        reducer.close()
    return found


def _batch(rank: int, step: int) -> tuple[Array, Array]:
    rng = np.random.default_rng((rank, step))
    x = rng.integers(-2, 3, (BATCH, INPUTS)).astype(np.float32)
    return x, rng.integers(-4, 5, (BATCH, OUTPUTS)).astype(np.float32)


def _trained(weights: Array, ranks: int, step: int, options: dict[str, Any]) -> Array | None:
    """Return the weights after a step of all ranks, float32; None if a sum may round.

    weights: float32. All terms of a sum are multiples of one power of two, and their magnitudes add
    up to less than 2**24 times it, so that each partial sum is a float32 in any order.
    """
    unit, gradients = _unit(weights), []
    for rank in range(ranks):
        x, y = (each.astype(np.float64) for each in _batch(rank, step))
        most = (np.abs(x) @ np.abs(weights).T + np.abs(y)).T @ np.abs(x)
        if most.max() * ranks >= 2.0**24 * unit:
            return None
        gradients.append(((x @ weights.T - y).T @ x).astype(np.float32).ravel())
    mean = simulate(gradients, op="mean", **options).reshape(weights.shape)
    # The rate is a power of two, so that only the difference rounds, in one way, fused or not.
    return np.asarray(weights - np.float32(RATE) * mean)


def _unit(numbers: Array) -> float:
    """Return the largest power of two, at most 1, that divides all numbers."""
    mantissa, exponent = np.frexp(numbers[numbers != 0])
    whole = (mantissa * 2.0**53).astype(np.int64)
    return float(np.ldexp((whole & -whole).astype(np.float64), exponent - 53).min(initial=1.0))


_exact = partial(Check, "exactness")
CHECKS: dict[str, Check] = {
    "formats of 8 bits": _exact(
        "all codes, and all edges in every rounding, as in ops.reference", formats
    ),
    "wider formats": _exact(
        "samples and edges of formats of 9 to 32 bits; all widths", large_formats
    ),
    "tiles": _exact("encode, decode, add and hop of tiles: formats, scalings, roundings", tiled),
    "NVFP4": _exact("blocks of 16 with two scales", two_scales),
    "sums of integers": _exact("sums that grow by bits, ternary codes", sums),
    "passes": _exact("the passes of compressors over gradients", passes),
    "selection": _exact("the largest values, indices, streams of bits", selection),
    "products": _exact("products of matrices with chosen roundings", products),
    "optimisers": _exact("steps of optimisers that adapt to layers", steps, devices=("cpu",)),
    "codes on the host": _exact(
        "codes of places in bins, draws without repeats, sums of sparse arrays",
        on_host,
        devices=("cpu",),
    ),
    "all-reduces": _exact("every schedule times wire on all ranks, as in the simulator", schedules),
    "other collectives": _exact(
        "reduce-scatter, all-gather and the others, as in the simulator", collectives
    ),
    "windows": _exact("windows of arrays, and their adjoints", windows),
    "training": _exact("a short training, as simulated by NumPy", training),
}
