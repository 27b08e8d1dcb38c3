"""Compressors of the papers: their equations, what they promise, the bytes they send."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from every import every
from pydantic import Field, TypeAdapter
from training import small_job

from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import DEFAULT, configured
from cpdhpc.compress import (
    COMPRESSORS,
    AdaComp,
    Aggregator,
    Context,
    Dgc,
    Flexpoint,
    GradientFlow,
    LowBit,
    Mean,
    NoCompression,
    OkTopk,
    OneBit,
    PowerSgd,
    Qsgd,
    RandomK,
    ScaleCom,
    State,
    Strom,
    TernGrad,
    TopK,
    base,
    scalecom,
    terngrad,
)
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.terngrad import _deviation
from cpdhpc.ops import cpu, reference
from cpdhpc.torch import GradientReducer
from cpdhpc.world.ranks import Loopback

RANKS = 4
BUCKET = Bucket(("weight", "bias", "kernel", "none"), ((24, 60), (7,), (6, 3, 5, 5), (3, 0)))
SUM = 4 * 2**-21  # four float32 additions below 16, in whichever order


def gradients(bucket: Bucket, ranks: int = RANKS, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(bucket.size).astype(np.float32) for _ in range(ranks)]


def aggregate(
    method: Aggregator, flats: list[Any], bucket: Bucket, state: State | None = None, time: int = 0
) -> tuple[Any, Loopback]:
    world = Loopback(len(flats))
    state = State(world.hosted, world.ranks) if state is None else state
    mean = method.aggregate(flats, bucket, Context(world, state, seed=5, iteration=time))
    return mean.flat, world


def whole(n: int) -> Bucket:
    return Bucket(("x",), ((n,),))


@every("method", [TernGrad(clip=0), TernGrad(clip=0, share=False), Qsgd(), Qsgd(levels=1)])
def test_the_mean_of_many_draws_is_the_gradient(method: Aggregator) -> None:
    """20,000 draws of 8 values; the largest is one of them, so all have the same scaler."""
    draws, values = 20_000, np.array([1, -0.9, 0.5, -0.1, 0.03, 0.001, 0, -1], np.float32)
    bucket = whole(8 * draws)
    method = Qsgd(levels=method.levels, bucket_values=8) if isinstance(method, Qsgd) else method
    found, _ = aggregate(method, [np.tile(values, draws)] * 2, bucket)
    found = found.reshape(draws, 8).astype(np.float64)
    error = found.std(axis=0) / math.sqrt(draws)  # of two ranks, who draw apart
    assert np.all(np.abs(found.mean(axis=0) - values) <= 4 * error + 1e-7)
    single, _ = aggregate(method, [np.tile(values, draws)], bucket)
    spread = single.reshape(draws, 8)[:, 2].var() / found[:, 2].var()
    assert 1.9 < spread < 2.1  # 2; the standard error of a ratio of variances is 0.02


def test_terngrad_has_2n_plus_1_levels_of_the_largest_clipped_value() -> None:
    flats = gradients(whole(5000))
    found, _ = aggregate(TernGrad(clip=2.5), flats, whole(5000))
    limits = [2.5 * flat.std(dtype=np.float64) for flat in flats]
    scaler = np.float32(
        max(np.abs(np.clip(x, -m, m)).max() for x, m in zip(flats, limits, strict=True))
    )
    levels = np.round(found / scaler * RANKS)
    assert np.array_equal(np.unique(levels), np.arange(-RANKS, RANKS + 1))
    assert np.array_equal(found, (levels / np.float32(RANKS)).astype(np.float32) * scaler)


@pytest.mark.parametrize(
    "values",
    [[0.7], [-3.0] * 5, [0.1] * 70_001, [1.0, 1.001, 0.999], [2.0, 2.2], [2.0**-140], [0.0]],
    ids=lambda values: f"{len(values)}x{values[0]:g}",
)
@pytest.mark.parametrize("share", [True, False])
def test_terngrad_does_not_cut_a_layer_all_of_which_is_beyond_its_deviations(
    values: list[float], share: bool
) -> None:
    """Alike values have a deviation of 0 or next to it, and would never be trained."""
    x = np.array(values, np.float32)
    bucket = Bucket(("alike", "normal"), ((x.size,), (500,)))
    flats = [bucket.flatten([x, each]) for each in gradients(whole(500))]
    cut, _ = aggregate(TernGrad(clip=2.5, share=share), flats, bucket)
    uncut, _ = aggregate(TernGrad(clip=0, share=share), flats, bucket)
    assert cut[: x.size].tobytes() == uncut[: x.size].tobytes()
    assert cut[x.size :].tobytes() != uncut[x.size :].tobytes(), "the other layer has outliers"
    if x.size == 1:
        assert cut[0] == x[0]  # it is its own scaler: nothing is left to chance


def test_terngrad_cuts_all_but_the_zeros_of_a_layer() -> None:
    x = np.array([5.0] * 99 + [0.0], np.float32)  # deviation 0.4975
    found, _ = aggregate(TernGrad(clip=2.5), [x], whole(100))
    limit = np.float32(2.5 * x.std(dtype=np.float64))
    assert set(found.tolist()) == {0.0, limit}


def test_terngrad_leaves_excluded_layers_alone_and_knows_their_names() -> None:
    method = TernGrad(exclude=("bias", "kernel"), bucket_values=50)
    flats = gradients(BUCKET)
    found, _ = aggregate(method, flats, BUCKET)
    exact, _ = aggregate(COMPRESSORS["none"](), flats, BUCKET)
    weight, *others = BUCKET.views(found)
    for each, other in zip(others, BUCKET.views(exact)[1:], strict=True):
        assert np.abs(each - other).max(initial=0) < SUM
    levels = [np.unique(np.abs(part)).size for part in weight.reshape(-1)[:1400].reshape(-1, 50)]
    assert max(levels) <= RANKS + 1 < np.unique(np.abs(weight)).size
    method.check_layers(BUCKET.names)
    with pytest.raises(ValueError, match="no layer is called 'bia': did you mean bias"):
        TernGrad(exclude=("bia",)).check_layers(BUCKET.names)


@every("levels", [1, 3, 4, 7, 8, 100])
def test_qsgd_gives_levels_of_the_norm(levels: int) -> None:
    flats = gradients(whole(1300), 1)
    found, _ = aggregate(Qsgd(levels=levels), flats, whole(1300))
    for start in range(0, 1300, 512):
        part, own = found[start : start + 512], flats[0][start : start + 512]
        norm = np.float32(np.linalg.norm(own.astype(np.float64)))
        steps = part / (norm / np.float32(levels))
        whole_steps = np.round(steps)
        assert np.abs(steps - whole_steps).max() <= levels * 2**-22  # three roundings
        exact = np.abs(own.astype(np.float64)) / norm * levels
        assert np.abs(np.abs(whole_steps) - exact).max() < 1


def by_hand(x: Any) -> Any:
    """Seide's two values of each row, in float64."""
    out = np.empty_like(x)
    for row, into in zip(x, out, strict=True):
        for part in (row >= 0, row < 0):
            if part.any():
                into[part] = row[part].mean(dtype=np.float64)
    return out


def test_onebit_is_the_means_of_both_signs_by_row() -> None:
    flats = gradients(BUCKET)
    found, _ = aggregate(OneBit(), flats, BUCKET)
    for i, shape in enumerate(BUCKET.shapes[:3]):
        each = [BUCKET.views(flat)[i] for flat in flats]
        if len(shape) > 1:
            each = [by_hand(x.reshape(shape[0], -1)).reshape(shape) for x in each]
        # float32 sums of four terms below 4: 3 roundings of 2**-22 each, and one of the mean
        assert np.allclose(BUCKET.views(found)[i], np.mean(each, axis=0), rtol=0, atol=2**-20)


def test_powersgd_is_a_step_of_the_power_method() -> None:
    """The second call, in float64: the mean projected on the span of its product with Q."""
    flats, state = gradients(BUCKET), State(range(RANKS), RANKS)
    aggregate(PowerSgd(rank=3), flats, BUCKET, state)
    kept = {key: entry.array.astype(np.float64) for key, entry in state}
    found, _ = aggregate(PowerSgd(rank=3), flats, BUCKET, state, 1)
    own = [BUCKET.views(flat)[0] for flat in flats]
    mean = np.mean(own + kept["weight", "residual"].reshape(RANKS, 24, 60), axis=0)
    product = mean @ kept["weight", "second"].T
    basis, _ = np.linalg.qr(product)
    # Sums of 60 products in float32, whose error the inverse of the product's triangle enlarges.
    bound = 4 * 60 * 2**-24 * np.linalg.cond(product) * np.linalg.norm(mean)
    assert np.linalg.norm(BUCKET.views(found)[0] - basis @ (basis.T @ mean)) < bound < 0.01
    exact, _ = aggregate(COMPRESSORS["none"](), flats, BUCKET)
    assert np.abs(BUCKET.views(found)[1] - BUCKET.views(exact)[1]).max() < SUM  # one dimension
    # 202 values for 400 weights are more than half of them: they travel as they are.
    few = Bucket(("tall", "wide"), ((200, 2), (2, 200)))
    means = [aggregate(method, gradients(few), few)[0]
             for method in (PowerSgd(rank=1), COMPRESSORS["none"]())]  # fmt: skip
    assert np.abs(means[0] - means[1]).max() < SUM


def test_gradientflow_sends_the_chunks_of_the_largest_norms() -> None:
    bucket, ranks = Bucket(("a", "b"), ((95,), (40,))), 3
    flats = gradients(bucket, ranks)
    method = GradientFlow(density=0.3, chunk_values=10)
    found, _ = aggregate(method, flats, bucket)
    cuts = [135 * i // 14 for i in range(15)]  # 9 or 10 values each
    chunks = [slice(*each) for each in pairwise(cuts)]
    norms = [
        sum(np.abs(flat[chunk].astype(np.float64)).sum() for flat in flats) for chunk in chunks
    ]
    largest = sorted(range(14), key=lambda i: -norms[i])[:4]  # 0.3 of 14
    expected = np.zeros(bucket.size)
    for i in largest:
        expected[chunks[i]] = np.mean([flat[chunks[i]] for flat in flats], axis=0)
    assert np.abs(found - expected).max() < SUM
    assert np.array_equal(found != 0, expected != 0)
    dense = GradientFlow(density=0.3, dense_epochs=1.0)
    assert np.count_nonzero(aggregate(dense, flats, bucket)[0]) == bucket.size


@every("scale", [1.0, 1024.0])
def test_powersgd_has_the_momentum_of_its_paper(scale: float) -> None:
    """x -= rate (mean + m) with m as torch's SGD has it; what is lost and kept is as without."""
    ranks, states = 2, [State(range(2), 2) for _ in range(2)]
    x = torch.zeros(BUCKET.size, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.75)
    for time in range(4):
        flats = [flat * np.float32(scale) for flat in gradients(BUCKET, ranks, time)]
        how = {"seed": 5, "iteration": time, "loss_scale": scale}
        plain, pushed = (
            PowerSgd(momentum=each).aggregate(
                flats, BUCKET, Context(Loopback(ranks), state, **how)
            ).flat
            for each, state in zip((0.0, 0.75), states, strict=True)
        )  # fmt: skip
        x.grad = torch.from_numpy(plain) / scale
        optimizer.step()
        m = optimizer.state[x]["momentum_buffer"]
        assert torch.equal(torch.from_numpy(pushed) / scale, x.grad + m)
        kept, others = (dict(state) for state in states)
        assert {name for _, name in others.keys() - kept.keys()} == {"momentum"}
        assert all(np.array_equal(kept[key].array, others[key].array) for key in kept)


def test_a_mean_with_momentum_beyond_float32_is_refused_with_nothing_kept() -> None:
    """A method's own momentum may get beyond what the mean is below."""
    for method in (PowerSgd(momentum=0.9), Dgc(momentum=0.9, warmup=(1.0,))):
        state, flats = State(range(2), 2), gradients(BUCKET, 2)
        for flat in flats:
            BUCKET.views(flat)[1][3] = 1.2e38
        for time in range(20):
            before = {key: entry.array.copy() for key, entry in state}
            try:
                aggregate(method, flats, BUCKET, state, time)
            except NonFiniteGradient as error:
                assert error.segments == ("bias",) and not error.ranks and time > 0
                assert all(np.array_equal(entry.array, before[key]) for key, entry in state)
                break
        else:
            pytest.fail(f"{method} does not raise")


LENET = Bucket(
    tuple(f"{kind} {i}" for i in range(5) for kind in ("weight", "bias")),
    (
        *((6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,)),
        *((84, 120), (84,), (10, 84), (10,)),
    ),
)


@every("bucket", [LENET, Bucket(LENET.names[::-1], LENET.shapes[::-1])])
@every("random", [False, True])
def test_gradientflow_starves_no_layer(bucket: Bucket, random: bool) -> None:
    """Of gradients of one size each layer is sent as often as any other, be it ever so small.

    6 of 61 chunks are sent, so that a chunk's turn comes every 10 steps. Of random gradients a
    norm of 1,011 values with t steps in it is 1,011 sqrt(t) times a number with a deviation of a
    fortieth: that is a step in twenty.
    """
    steps, state, method = 120, State(range(2), 2), GradientFlow(density=0.1)
    shares = np.zeros(len(bucket.names))
    for time in range(steps):
        rng = np.random.default_rng(time)
        draw = rng.standard_normal if random else np.ones
        flats = [draw(bucket.size, np.float32) for _ in range(2)]
        found, _ = aggregate(method, flats, bucket, state, time)
        shares += [(layer != 0).mean() / steps for layer in bucket.views(found)]
    assert (shares > 0.07).all() and (shares < 0.13).all(), shares.round(3)


def mean_kept(state: State, bucket: Bucket) -> Any:
    """The residuals, as a mean over ranks, float64[bucket.size]."""
    kept = np.zeros(bucket.size)
    for (layer, name), entry in state:
        if name == "residual":
            segment = next(each for each in bucket.segments if each.name == layer)
            kept[segment.start : segment.stop] = entry.array.mean(axis=0, dtype=np.float64)
    return kept


@every(
    "method",
    [
        OneBit(),
        PowerSgd(),
        PowerSgd(wire="e4m3"),
        GradientFlow(chunk_values=50),
        AdaComp(),
        ScaleCom(beta=1),
    ],
)
def test_what_is_lost_is_kept(method: Aggregator) -> None:
    """Mean sent + mean kept afterwards = mean gradient + mean kept before."""
    state, kept = State(range(RANKS), RANKS), np.zeros(BUCKET.size)
    for time in range(3):
        flats = gradients(BUCKET, seed=time)
        sent, _ = aggregate(method, flats, BUCKET, state, time)
        before, kept = kept, mean_kept(state, BUCKET)
        given = np.mean(flats, axis=0, dtype=np.float64) + before
        coded = slice(None) if not isinstance(method, PowerSgd) else slice(0, 24 * 60)
        # Each value is rounded a few times, at a size below 16: 8 roundings of 2**-20
        assert np.abs(sent + kept - given)[coded].max() < 8 * 2**-20
    assert np.abs(kept).max() > 0.1


@every(
    "options",
    [
        {"wire": "e4m3", "algorithm": "gather", "accumulate": "float32"},
        {"wire": "e3m0", "algorithm": "direct", "scaling": "aps", "accumulate": "exact"},
        {"wire": "e2m1fn", "scaling": "static:2", "algorithm": "gather", "accumulate": "float32"},
        {"wire": "int4"},
        {"wire": "mxfp4", "algorithm": "gather", "accumulate": "float32"},
        {"wire": "ternary", "algorithm": "rhd"},
        {
            "wire": "e4m3",
            "algorithm": "auto",
            "machine": replace(DEFAULT, step_s=1.0, beta_s=0.0),
            "accumulate": "float32",
        },  # gather: the fewest steps
    ],
)
def test_lowbit_keeps_what_rounding_loses(options: dict[str, Any]) -> None:
    method = LowBit(**options, error_feedback=True)
    assert method.rounding == "nearest"
    bucket, kept = Bucket(BUCKET.names, BUCKET.shapes, method.align), 0.0
    state = State(range(RANKS), RANKS)
    for time in range(4):
        flats = [bucket.flatten(bucket.views(flat)) for flat in gradients(bucket, seed=time)]
        for flat in flats:
            flat *= np.float32(16.0**-time)
        sent, _ = aggregate(method, flats, bucket, state, time)
        given = np.mean(flats, axis=0, dtype=np.float64) + kept
        kept = mean_kept(state, bucket)
        # Contributions are added exactly, or in float32; their sums and what is kept are below 16:
        # a gradient's addition, three of terms, and the division round by 2**-21 at most
        assert np.abs(sent + kept - given).max() <= 5 * 2**-21
        assert np.any(kept)


def test_lowbit_with_memory_finds_what_its_codes_would_hide() -> None:
    method, bucket = LowBit(wire="e2m1fn", scaling="none", error_feedback=True), whole(9)
    state, flat = State(range(1), 1), np.ones(9, np.float32)
    aggregate(method, [flat * 9], bucket, state)
    before = state.own("x", "residual", (9,))[0].copy()
    flat[3] = np.nan
    with pytest.raises(NonFiniteGradient, match="in 'x' on rank 0"):
        aggregate(method, [flat], bucket, state, 1)
    assert np.array_equal(state.own("x", "residual", (9,))[0], before) and before.all()


def test_flexpoint_expects_what_the_last_means_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: two layers, seven iterations of which four are looked at; then a burst."""
    ranks, method = 3, Flexpoint(wire="int10", history=4)
    bucket = Bucket(("a", "none", "b"), ((50,), (0,), (9,)), method.align)
    state, pasts = State(range(ranks), ranks), [[], []]  # type: ignore[var-annotated]
    for time in range(12):
        flats = [bucket.flatten(bucket.views(x)) for x in gradients(bucket, ranks, time)]
        for flat in flats:
            flat *= np.float32(1000.0 if time == 7 else 3.0**-time)
        found, _ = aggregate(method, flats, bucket, state, time)
        saturated = 0
        for past, i in zip(pasts, (0, 2), strict=True):
            own = np.array([bucket.views(flat)[i] for flat in flats], np.float64)
            largest = np.abs(own).max()
            if past:
                largest = 2 * ranks * (np.mean(past[-4:]) + 3 * np.std(past[-4:]))
            unit = 2.0 ** np.ceil(np.log2(largest / 511))  # a sign and nine bits
            whole = np.round(own / unit)
            saturated += (np.abs(whole) > 511).sum()
            mean = (whole.clip(-511, 511).sum(axis=0) * unit).astype(np.float32) / np.float32(ranks)
            assert np.array_equal(bucket.views(found)[i], mean), time
            past.append(np.abs(mean).max())
        assert (saturated > 0) == (time == 7)
        monkeypatch.setattr("cpdhpc.collectives.allreduce.shared_amax", None)  # not a second time
    counted = method.observe(
        flats[0] * np.float32(1e9), bucket, Mean(found, {"aps_shift": np.zeros(3)})
    )
    assert counted["saturated_share"].tolist() == [50, 0, 9]


def test_flexpoint_holds_what_only_one_rank_has() -> None:
    """The mean's largest value is then that of the rank, divided by the ranks."""
    method, bucket, state = Flexpoint(), whole(100), State(range(16), 16)
    flats = [np.zeros(100, np.float32) for _ in range(16)]
    for time in range(6):
        flats[5][:] = np.arange(100)
        found, _ = aggregate(method, flats, bucket, state, time)
        assert np.array_equal(found, flats[5] / np.float32(16))


def test_known_shifts_are_checked() -> None:
    method = configured(Allreduce, wire="int8")
    one, within = "two lists of 1 integers", r"from -1\d\d to 1\d\d"
    for shifts, wanted in (((), one), ((1, 2), one), ((500,), within)):
        with pytest.raises(ValueError, match=rf"shifts=.*must be {wanted}"):
            method.run(Loopback(), [np.ones(9, np.float32)], shifts=((0,), shifts))
    with pytest.raises(NonFiniteGradient):
        method.run(Loopback(), [np.full(9, np.inf, np.float32)], shifts=((0,), (0,)))


def test_lowbit_with_memory_makes_up_for_few_bits() -> None:
    """30 steps of one gradient; the smallest values are below half of the smallest number."""
    flats, steps = gradients(whole(3000)), 30
    exact, lost = np.mean(flats, axis=0, dtype=np.float64), []
    for feedback in (True, False):
        method = LowBit(wire="int3", error_feedback=feedback)
        state, total = State(range(RANKS), RANKS), np.zeros(3000)
        for time in range(steps):
            total += aggregate(method, flats, whole(3000), state, time)[0]
        lost.append(np.abs(total / steps - exact).max())
    # Each rank keeps half a step of int3 at most: largest value / 3 * 2, of shifts by powers of 2.
    assert lost[0] <= max(np.abs(flat).max() for flat in flats) * 4 / 3 / steps
    assert 5 * lost[0] < lost[1]


def test_without_error_feedback_the_losses_add_up() -> None:
    flats, steps = gradients(BUCKET), 30
    exact = np.mean(flats, axis=0, dtype=np.float64)
    for method in (OneBit, PowerSgd):
        lost = []
        for feedback in (True, False):
            state, total = State(range(RANKS), RANKS), np.zeros(BUCKET.size)
            for time in range(steps):
                total += aggregate(
                    method(error_feedback=feedback),
                    flats,
                    BUCKET,
                    state,
                    time,  # type: ignore[call-arg]
                )[0]
            lost.append(np.linalg.norm(total / steps - exact))
        assert 3 * lost[0] < lost[1]


BITS = {  # a value up, at 8 ranks, everything counted; a ring sends 2 * 7 / 8 values of each
    TernGrad(algorithm="gather"): 1.7,
    Qsgd(): 4.2,
    OneBit(): 1.15,
    PowerSgd(): 2.5,
}


@pytest.mark.parametrize("method", BITS, ids=str)
def test_bits_of_a_value(method: Aggregator) -> None:
    bucket = Bucket(("w", "v"), ((256, 1024), (1024, 512)))
    flats = gradients(bucket, 8)
    _, world = aggregate(method, flats, bucket)
    copies = 1.75 if isinstance(method, PowerSgd) else 7  # to all others
    assert (world.bytes_sent * 8 / copies / bucket.size).max() <= BITS[method]


@dataclass(frozen=True)
class Yours(NoCompression):
    half: Annotated[float, Field(ge=0, le=0.5)] = 0.5


@dataclass(frozen=True)
class Unknown(NoCompression):
    values: np.ndarray[Any, Any] | None = None  # of a type that pydantic does not know


GOOD = [Yours(half=0.25), Unknown(values=np.ones(2)), TopK(density=1), Qsgd(levels=np.int64(3))]
GOOD += [LowBit(wire="e4m3", layers={"weight": "raw"}, algorithm="auto"), TopK(exclude=["weight"])]  # type: ignore[list-item, arg-type]


@pytest.mark.parametrize("method", [*(each() for each in COMPRESSORS.values()), *GOOD], ids=str)
def test_objects_with_allowed_options_are_taken_as_they_are(method: Aggregator) -> None:
    reducer = GradientReducer(torch.nn.Linear(2, 2), Loopback(), method)
    assert reducer.aggregator is method


WRONG = [
    ("lowbit", {"rounding": "stochastic", "error_feedback": True}, "rounding='stochastic': error_"),
    ("flexpoint", {"wire": "e4m3"}, "wire='e4m3': known are int2 .. int16"),
    ("flexpoint", {"history": 0}, "history=0: should be greater than or equal to 1"),
    ("terngrad", {"clip": -1.0}, "clip=-1.0: should be greater than or equal to 0"),
    ("terngrad", {"algorithm": "mpi"}, "algorithm='mpi': wire='ternary': must be 'raw'"),
    ("qsgd", {"levels": 0}, "levels=0: should be greater than or equal to 1"),
    ("qsgd", {"levels": 10**6}, "levels=1000000: should be less than 32768"),
    ("qsgd", {"levels": "4"}, "levels='4': should be a valid integer"),
    ("qsgd", {"bucket_values": 0.5}, "bucket_values=0.5: should be a valid integer"),
    ("powersgd", {"rank": 0}, "rank=0: should be greater than or equal to 1"),
    ("powersgd", {"rank": True}, "rank=true: should be a valid integer"),
    ("powersgd", {"wire": "e4m9x"}, "wire='e4m9x': known are eXmY"),
    ("powersgd", {"rnak": 2}, "unknown key rnak: did you mean rank"),
    ("onebit", {"algorithm": "x"}, "algorithm='x': known are"),
    ("onebit", {"error_feedback": 1}, "error_feedback=1: should be a valid boolean"),
    ("onebit", {"wire": "raw"}, "unknown key wire: known are"),
    ("gradientflow", {"density": 1.5}, "density=1.5: should be less than or equal to 1"),
    ("strom", {"tau": 0.0}, "tau=0.0: should be greater"),
    ("strom", {"tau": math.inf}, "tau=inf: should be a finite number"),
    ("strom", {"wire": "raw"}, "unknown key wire: known are"),
    ("adacomp", {"scale": 0.5}, "scale=0.5: should be greater than or equal to 1"),
    ("scalecom", {"rates": {"w": 0}}, "rates.w=0: should be greater than or equal to 1"),
    ("topk", {"density": 0.0}, "density=0.0: should be greater than 0"),
    ("topk", {"density": 2}, "density=2: should be less than or equal to 1"),
    ("topk", {"density": "0.1"}, "density='0.1': should be a valid number"),
    ("topk", {"density": math.nan}, "density=nan: should be a finite number"),
    ("topk", {"wire": "e9m1"}, "wire='e9m1': exp=9, man=1: exp is 1..8"),
    ("topk", {"within": "world"}, "within='world': should be 'layer' or 'bucket'"),
    ("dgc", {"warmup": [0.1, 2.0]}, "warmup.1=2.0: should be less than or equal to 1"),
    ("dgc", {"clip_norm": -1.0}, "clip_norm=-1.0: should be greater than or equal to 0"),
    ("randomk", {"algorithm": "rign"}, "algorithm='rign': did you mean ring"),
]


@pytest.mark.parametrize(("name", "options", "says"), WRONG, ids=str)
def test_wrong_options(name: str, options: dict[str, Any], says: str) -> None:
    """The same error from a reducer, a job file of one line, and an object when it is made."""
    kind: Any = COMPRESSORS[name]
    of_job = f"gradient.{says}" if "=" in says else says.replace("key ", "key gradient.")
    ways = [
        (lambda: GradientReducer(torch.nn.Linear(3, 2), Loopback(), name, **options),
         f"GradientReducer: {name}: {says}"),
        (lambda: small_job(gradient={"aggregator": name, **options}), f"test: {of_job}"),
    ]  # fmt: skip
    if "=" in says:  # else Python refuses the argument
        start = f"{kind.__name__}: {says}"
        ways += [(lambda: kind(**options), start), (lambda: replace(kind(), **options), start)]
    for make, start in ways:
        with pytest.raises(ValueError) as caught:
            make()
        text = str(caught.value)
        assert text.replace("allreduce", kind.__name__).startswith(start) and "\n" not in text
    with pytest.raises(ValueError, match=next(iter(options))):
        TypeAdapter(kind).validate_python(options)


@every(("half", "says"), [(1.0, "1.0: should be less"), ("0.1", "'0.1': should be a valid number")])
def test_objects_of_your_classes_are_judged(half: Any, says: str) -> None:
    for make in (lambda: Yours(half=half), lambda: replace(Yours(), half=half)):
        with pytest.raises(ValueError, match=f"^Yours: half={says}"):
            make()


def test_states_of_other_methods_and_models_are_refused() -> None:
    reducer = GradientReducer(torch.nn.Linear(3, 2), Loopback(), "powersgd")
    for other, says in (
        (GradientReducer(torch.nn.Linear(3, 4), Loopback(), "powersgd"), "layers of the state"),
        (GradientReducer(torch.nn.Linear(3, 2), Loopback(), "onebit"), "aggregator of the state"),
    ):
        with pytest.raises(ValueError, match=says):
            reducer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="should be what state_dict returned"):
        reducer.load_state_dict({})
    reducer.load_state_dict(reducer.state_dict())
    nested = pytest.raises(RuntimeError, match="should not be nested")
    with reducer.join(lambda: None), nested, reducer.join(lambda: None):
        pass


def test_a_reducer_refuses_layers_that_its_model_has_not() -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(
        ValueError, match=r"TernGrad.exclude: no layer is called 'weigt': did you mean weight"
    ):
        GradientReducer(model, Loopback(), "terngrad", exclude=("weigt",))


LONG = Bucket(("w", "bias", "v", "u"), ((3, 2011), (7,), (300, 11), (5, 3, 25, 25)))
METHODS = [
    TernGrad(),
    TernGrad(bucket_values=70, share=False, exclude=("v",)),
    Qsgd(bucket_values=77),
    OneBit(),
    TopK(),
    TopK(error_feedback=False, within="bucket"),
    Dgc(warmup=()),
    Dgc(momentum=0.0, warmup=()),
    Strom(tau=0.5),
    Strom(),
    AdaComp(bin_values=37),
    ScaleCom(rate=50),
    ScaleCom(rate=50, beta=0.5),
    RandomK(),
    OkTopk(),
    GradientFlow(),
    PowerSgd(rank=2),
    LowBit(error_feedback=True),
]
CUT = TernGrad(clip=0.5), TernGrad(clip=0.5, share=False)
IN_BLOCKS = (*CUT, ScaleCom(rate=50, per_chunk=2), ScaleCom(rate=50, beta=0.5))


def steps_of(method: Aggregator) -> tuple[list[bytes], list[bytes]]:
    """The means of three steps, and what is kept after them; gradients stay as they are."""
    state, bits, bucket = State(range(2), 2), [], replace(LONG, align=method.align)
    for time in range(3):
        flats = gradients(bucket, 2, time)
        for flat in flats:
            bucket.clear_gaps(flat)
        flats[0][2011:4022] = -0.0  # an output unit that sees nothing
        _, start, _ = bucket.segments[2]
        flats[0][start : start + 1200] = 8  # beyond half of the layer's deviation, and no others
        flats[0][start + 1200 :] *= np.float32(0.1)
        given = [flat.copy() for flat in flats]
        mean, _ = aggregate(method, flats, bucket, state, time)
        assert [x.tobytes() for x in flats] == [x.tobytes() for x in given]
        assert not any(np.shares_memory(mean, entry.array) for _, entry in state)
        bits.append(mean.tobytes())
    return bits, [entry.array.tobytes() for _, entry in state]


@every("method", IN_BLOCKS)
def test_blocks_change_no_bit(method: Aggregator, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, counts, found = base.blocks, list[int](), []

    def counted(x: Any, multiple: int = 1) -> list[slice]:
        parts = list(usual(x, multiple))
        counts.append(len(parts))
        return parts

    for module in (terngrad, scalecom):
        monkeypatch.setattr(module, "blocks", counted)
    for block_values in (1 << 30, 1000):  # whole arrays at once, and many blocks of each layer
        monkeypatch.setattr(base, "BLOCK_VALUES", block_values)
        counts.clear()
        found.append(steps_of(method))
        assert (max(counts) > 1) == (block_values == 1000)
    assert found[0] == found[1]


@every("method", METHODS)
def test_kernels_change_no_bit(method: Aggregator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method has the same bits where its passes are those of the specification."""
    names, called, found = list(vars(reference)), set[str](), steps_of(method)

    def noted(name: str) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            called.add(name)
            return getattr(reference, name)(*given, **named)

        return run

    for name in names[names.index("accumulate") :]:
        if not name.startswith("_") and name in vars(cpu):
            monkeypatch.setattr(cpu, name, noted(name))
    assert steps_of(method) == found
    assert called


def test_runs_are_spread_as_repeat_spreads_them() -> None:
    ends, each = np.array([3, 3, 4, 70, 71, 90]), np.arange(6, dtype=np.float32)
    wanted = np.repeat(each, np.diff(ends, prepend=0))
    for start in range(90):
        for stop in range(start + 1, 91):
            given, lie = np.ones(stop - start, np.float32), np.clip(ends, start, stop) - start
            cpu.multiply_runs(given, each, lie, given)
            assert given.tolist() == wanted[start:stop].tolist()


@every("n", [1, 7, 129, 70_001, 131_072, 300_007])
def test_terngrads_deviation_has_the_bits_of_numpys(n: int) -> None:
    x = gradients(whole(n), 1, seed=n)[0] * np.float32(3) + np.float32(1)
    total = cpu.run_maxima(x, np.array([n]))[1]
    assert _deviation(x, total) == x.std(dtype=np.float64)


def test_onebit_of_rows_longer_than_a_block() -> None:
    bucket = Bucket(("w",), ((3, 40_000),))
    (x,) = gradients(bucket, 1)
    x = x.reshape(3, -1)
    wanted = np.empty_like(x)
    for row, out in zip(x, wanted, strict=True):  # the paper's, with indices in place of bits
        for side in (row >= 0, row < 0):
            out[side] = row[side].mean(dtype=np.float64)
    found, _ = aggregate(OneBit(), [x.ravel()], bucket)
    # A sum in another order: 40,000 additions in float64, then one rounding to float32.
    np.testing.assert_allclose(found.reshape(3, -1), wanted, rtol=2**-23)


def test_what_a_method_gives_becomes_the_entry() -> None:
    for ranks in (1, 2):
        state = State(range(ranks), ranks)
        state.own("w", "residual", (5,))
        rows = [np.arange(5, dtype=np.float32) + rank for rank in range(ranks)]
        state.give("w", "residual", rows)
        kept = state.own("w", "residual", (5,))
        assert [x.tolist() for x in kept] == [x.tolist() for x in rows]
        assert np.shares_memory(kept[0], rows[0]) == (ranks == 1)
        with pytest.raises(ValueError, match="asked for"):
            state.own("w", "residual", (6,))


@pytest.mark.parametrize("clip", [0.0, 2.5])
def test_ternary_values_are_those_of_what_is_cut_without_bias(clip: float) -> None:
    """The paper's equation 4; clip is a bias by its section 3.3: what is beyond is lost.

    10^6 draws of each value, 1,000 copies of 40 values in each of 1,000 iterations.
    A draw of x in [-s, s] is -s, 0 or s, so its variance is s |x| - x^2 <= s^2 / 4: means differ by
    more than 6 s / 2 / 10^3 once in 10^7 tests of 40 values at most (normal; P(|z| > 6) = 2e-9).
    """
    copies, keys = 1000, 1000
    values = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    values[0] = 8.0
    limit = clip * float(np.tile(values, copies).std(dtype=np.float64)) if clip else np.inf
    cut = np.clip(values.astype(np.float64), -limit, limit)
    bucket, total = whole(values.size * copies), np.zeros(values.size)
    gradient, method = np.tile(values, copies), TernGrad(clip=clip)
    for key in range(keys):
        found, _ = aggregate(method, [gradient], bucket, State(range(1), 1), key)
        total += found.reshape(copies, -1).sum(axis=0, dtype=np.float64)
    s, means = np.abs(cut).max(), total / (copies * keys)
    bound = 6 * s / 2 / np.sqrt(copies * keys)
    # The limit and quotients are float32: an error of a few 2**-24 s, far below the bound.
    assert np.abs(means - cut).max() <= bound
    assert (np.abs(means - values).max() > bound) == bool(clip)
