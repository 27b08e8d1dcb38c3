"""Every aggregator: the mean on all ranks, nothing swallowed, counts that add up."""

import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every
from pydantic import TypeAdapter, ValidationError

from cpdhpc.collectives import sparse
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import DEFAULT
from cpdhpc.compress import COMPRESSORS, Aggregator, Context, Mean, State, base
from cpdhpc.compress.base import averaged, shared_largest
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.lowbit import LowBit
from cpdhpc.compress.none import NoCompression
from cpdhpc.config import dump_toml
from cpdhpc.formats import Cast, parse_format
from cpdhpc.ops import reference
from cpdhpc.world.ranks import Loopback

RANKS = 4
EVERY = every("name", COMPRESSORS)
EXACT = pytest.mark.parametrize("name", ["none", "lowbit"])  # of small integers


def context(world: Loopback) -> Context:
    return Context(world, State(world.hosted, world.ranks))


def bucket_of(aggregator: Any) -> Bucket:
    return Bucket(("weight", "bias"), ((40, 50), (7,)), aggregator.align)


def integers(bucket: Bucket, seed: int = 0) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Integers below 3 in size: sums of four, and their quarters, are exact in e4m3."""
    rng = np.random.default_rng(seed)
    shapes = bucket.shapes
    return [
        bucket.flatten([rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes])
        for _ in range(RANKS)
    ]


@EXACT
def test_the_mean_of_small_integers_is_exact(name: str) -> None:
    aggregator = COMPRESSORS[name]()
    bucket, world = bucket_of(aggregator), Loopback(virtual_ranks=RANKS)
    flats = integers(bucket)
    before = [flat.copy() for flat in flats]
    mean = aggregator.aggregate(flats, bucket, context(world))
    assert np.array_equal(mean.flat, np.mean(flats, axis=0))
    assert all(np.array_equal(*pair) for pair in zip(flats, before, strict=True))
    assert world.bytes_sent.sum() > 0


@every("name", [name for name in COMPRESSORS if COMPRESSORS[name].stateless])
def test_methods_that_say_so_keep_nothing(name: str) -> None:
    """Others are refused where a network is cut into stages."""
    aggregator, state = COMPRESSORS[name](), State(range(RANKS), RANKS)
    bucket, world = bucket_of(aggregator), Loopback(virtual_ranks=RANKS)
    for iteration in range(2):
        aggregator.aggregate(integers(bucket), bucket, Context(world, state, 0, iteration))
    assert not [*state]


@EVERY
@every("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named(name: str, value: float) -> None:
    aggregator = COMPRESSORS[name]()
    bucket = bucket_of(aggregator)
    flats = integers(bucket)
    bucket.views(flats[2])[1][3] = value
    with pytest.raises(NonFiniteGradient) as caught:
        aggregator.aggregate(flats, bucket, context(Loopback(RANKS)))
    assert caught.value.segments == ("bias",)
    assert caught.value.ranks == (2,)


LARGEST = np.finfo(np.float32).max
SIGNS = np.random.default_rng(1).choice([-1.0, 1.0], (40, 50))
SOME = np.random.default_rng(2).standard_normal((40, 50))
SPIKE = np.where(np.arange(2000).reshape(40, 50) == 57, 1.0, 0.0)
NEAR_THE_LARGEST = {  # the weights of the ranks
    "alike": [np.full((40, 50), 3e38)] * RANKS,
    "one rank": [LARGEST * SIGNS] + [SIGNS] * (RANKS - 1),
    "all ranks": [3e38 * SIGNS] * RANKS,
    "quarters": [LARGEST / RANKS * SIGNS] * RANKS,
    "a value": [LARGEST * SPIKE] + [0 * SPIKE] * (RANKS - 1),
    "opposed": [LARGEST * SIGNS, -LARGEST * SIGNS, LARGEST * SIGNS, -LARGEST * SIGNS],
    "uneven": [LARGEST * SIGNS, LARGEST * SIGNS, -LARGEST * SIGNS, 0 * SIGNS],
    "bias": [SOME] * RANKS,  # where the values are that are near the largest
    "bias with momentum": [SOME] * RANKS,
}
BIASES = {"bias": 3e38, "bias with momentum": LARGEST / RANKS / 1.1}


@EVERY
@every("case", [*NEAR_THE_LARGEST])
@every("kept", [True, False])
def test_finite_values_give_a_finite_mean_or_are_refused(name: str, case: str, kept: bool) -> None:
    """Whatever they add up to, without a warning, and what a method keeps stays finite."""
    options = {f.name for f in fields(COMPRESSORS[name])} & {"error_feedback", "share"}
    if not kept and not options:
        return  # there is no other way
    aggregator = COMPRESSORS[name](**{} if kept else dict.fromkeys(options, False))
    bucket, here = bucket_of(aggregator), context(Loopback(RANKS))
    flats = [
        bucket.flatten([x.astype(np.float32), np.full(7, BIASES.get(case, 1), np.float32)])
        for x in NEAR_THE_LARGEST[case]
    ]
    for iteration in range(3 + 4 * (case in BIASES)):
        before = dict(here.state.copy())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                mean = aggregator.aggregate(flats, bucket, replace(here, iteration=iteration)).flat
            except NonFiniteGradient as error:
                assert set(error.segments) == {"bias" if case in BIASES else "weight"}
                after = dict(here.state)
                for key in before.keys() - {("weight", "threshold"), ("weight", "edges")}:
                    assert np.array_equal(after[key].array, before[key].array), key
            else:
                assert np.isfinite(mean).all()
                assert np.abs(mean).max() <= LARGEST
        assert all(np.isfinite(entry.array).all() for _, entry in here.state)


@EVERY
def test_no_mean_is_looked_at_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method has looked, so averaged gives its mean on at once."""
    aggregator = COMPRESSORS[name]()
    bucket, world = bucket_of(aggregator), Loopback(RANKS)
    monkeypatch.setattr(base, "_problem", lambda *_: pytest.fail("looks once more"))
    mean = averaged(aggregator, integers(bucket), bucket, context(world))
    assert mean.is_finite and not replace(mean, flat=mean.flat).is_finite


@dataclass(frozen=True)
class Trusting(Aggregator):
    """An aggregator of somebody's own, which looks at nothing; returns: what it returns."""

    returns: str = "mean"

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        with np.errstate(over="ignore", invalid="ignore"):
            flat = sparse.sum(context.world, gradients) / np.float32(context.world.ranks)
        made: Any = {
            "mean": Mean(flat),
            "flat": flat,
            "double": Mean(flat.astype(np.float64)),
            "half": Mean(flat[::2]),
            "list": Mean(flat.tolist()),
            "copy": replace(Mean.finite(flat), flat=flat + 0),  # which nobody has looked at
        }[self.returns]
        return made  # type: ignore[no-any-return]


@every("returns", ["mean", "copy"])
def test_the_mean_of_somebodys_own_aggregator_is_looked_at(returns: str) -> None:
    bucket, world = Bucket(("a", "b", "c"), ((3,), (4,), (5,))), Loopback(2)
    flats = [np.ones(bucket.size, np.float32) for _ in range(2)]
    mean = averaged(Trusting(returns), flats, bucket, context(world))
    assert np.array_equal(mean.flat, flats[0])
    for flat in flats:
        flat[4] = flat[9] = 3e38
    with pytest.raises(NonFiniteGradient, match=r"sum of finite values .* in 'b', 'c'$") as caught:
        averaged(Trusting(returns), flats, bucket, context(world))
    assert caught.value.segments == ("b", "c") and caught.value.ranks == ()
    flats[1][0] = np.nan
    with pytest.raises(NonFiniteGradient, match=r"NaN or infinity in 'a' on rank 1$"):
        averaged(Trusting(returns), flats, bucket, context(world))


@every(
    ("returns", "error", "says"),
    [
        ("flat", TypeError, "returned ndarray: must be a Mean"),
        ("double", ValueError, r"mean: flat has shape \(12,\), dtype float64: must be contiguous"),
        ("half", ValueError, r"mean: flat has shape \(6,\), dtype float32: must be contiguous flo"),
        ("list", TypeError, "mean: builtins.list: must be numpy.ndarray or cupy.ndarray"),
    ],
)
def test_what_is_no_mean_is_refused(returns: str, error: type[Exception], says: str) -> None:
    bucket = Bucket(("a", "b", "c"), ((3,), (4,), (5,)))
    flats = [np.ones(bucket.size, np.float32) for _ in range(2)]
    with pytest.raises(error, match=f"^Trusting.aggregate: {says}"):
        averaged(Trusting(returns), flats, bucket, context(Loopback(2)))


def test_largest_values_take_one_call_where_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Loopback, "agree", lambda *_: pytest.fail("asks once more"))
    largest = np.float32([0, 3, np.finfo(np.float32).max])
    bucket = Bucket(("x",), ((1,),))
    found = shared_largest(Loopback(), [largest[:1]], bucket, largest)
    assert found.tolist() == largest.tolist()


@EXACT
def test_auto_follows_the_machine_it_is_given(name: str, tmp_path: Path) -> None:
    """With steps that cost a second and bytes that cost nothing, gather: the fewest steps."""
    slow_steps = replace(DEFAULT, step_s=1.0, beta_s=0.0)
    path = tmp_path / "machine.toml"
    path.write_text(dump_toml({"machine": asdict(slow_steps)}))
    aggregators = [
        COMPRESSORS[name](algorithm="auto", machine=machine)  # type: ignore[call-arg]
        for machine in (slow_steps, path, None)
    ]
    path.unlink()  # it has been read
    bucket = bucket_of(aggregators[0])
    flats = integers(bucket)[:2]
    sent = []
    for aggregator in aggregators:
        world = Loopback(virtual_ranks=2)
        mean = aggregator.aggregate(flats, bucket, context(world))
        assert np.array_equal(mean.flat, np.mean(flats, axis=0))
        sent.append(world.messages_sent.tolist())
    assert sent[0] == sent[1] == [1, 1]
    assert aggregators[0] == aggregators[1] != aggregators[2]


def test_a_float32_sum_that_overflows_is_named_without_ranks() -> None:
    aggregator = NoCompression()
    bucket = bucket_of(aggregator)
    flats = integers(bucket)
    for flat in flats:
        bucket.views(flat)[0][1, 1] = 3e38
    with pytest.raises(NonFiniteGradient, match="sum of finite values") as caught:
        aggregator.aggregate(flats, bucket, context(Loopback(RANKS)))
    assert caught.value.segments == ("weight",)
    assert caught.value.ranks == ()


@EVERY
def test_the_configuration_is_frozen_and_reads_back(name: str) -> None:
    aggregator = COMPRESSORS[name]()
    assert asdict(aggregator)["aggregator"] == name
    adapter: Any = TypeAdapter(COMPRESSORS[name])
    assert adapter.validate_python(asdict(aggregator)) == aggregator
    with pytest.raises(ValidationError):
        adapter.validate_python({"no_such_option": 1})
    with pytest.raises(AttributeError):
        aggregator.algorithm = "tree"  # type: ignore[attr-defined]


@every("scaling", ["none", "static:6", "aps", "tile"])
@every("wire", ["e4m3", "e3m0", "e2m1fn"])
def test_events_are_those_of_the_first_encoding(wire: str, scaling: str) -> None:
    """Counted against the specification, value by value, with the shifts that were in use."""
    aggregator = LowBit(wire=wire, scaling=scaling, headroom="none", overflow="saturate")
    bucket = bucket_of(aggregator)
    rng = np.random.default_rng(1)
    scale = np.exp2(rng.integers(-14, 6, bucket.size)).astype(np.float32)
    flats = [flat * scale for flat in integers(bucket)]
    mean = aggregator.aggregate(flats, bucket, context(Loopback(RANKS)))
    assert ("aps_shift" not in mean.layers) == (scaling == "tile")
    cast = Cast(parse_format(wire))
    for flat in flats:
        found = aggregator.observe(flat, bucket, mean)
        shifts = mean.layers.get("aps_shift")
        for layer, segment in enumerate(bucket.segments):
            part = flat[segment.start : segment.stop]
            wanted = expected_events(part, cast, shifts, layer)
            assert {name: counts[layer] for name, counts in found.items()} == wanted


def expected_events(part: Any, cast: Cast, shifts: Any, layer: int) -> dict[str, int]:
    saturated = underflowed = 0
    for start in range(0, part.size, 1024):
        tile = part[start : start + 1024]
        own = int(reference.fitting_shift(reference.amax_tiles(tile), cast.fmt)[0]) - 127
        shift = own if shifts is None else int(shifts[layer])
        codes = reference.encode(tile, cast, shift) & np.uint32((1 << (cast.fmt.bits - 1)) - 1)
        underflowed += int(((codes == 0) & (tile != 0)).sum())
        largest = np.ldexp(np.abs(tile).astype(np.float64), shift)
        # Saturation is what rounds above the largest number: half a spacing above it, or more.
        half = 2.0 ** (cast.fmt.emax - cast.fmt.man - 1)
        saturated += int((largest >= cast.fmt.max + half).sum())
    return {"saturated_share": saturated, "underflow_share": underflowed}


def test_ternary_is_rounded_by_chance_unless_it_is_told() -> None:
    assert LowBit(wire="ternary").rounding == "stochastic"
    assert LowBit(wire="ternary", rounding="nearest").rounding == "nearest"
    assert LowBit(wire="int2").rounding == LowBit().rounding == "nearest"


@pytest.mark.parametrize("wire", ["int8", "ternary"])
def test_integers_are_scaled_so_that_nothing_saturates(wire: str) -> None:
    aggregator = LowBit(wire=wire)
    bucket = bucket_of(aggregator)
    flats = integers(bucket)
    mean = aggregator.aggregate(flats, bucket, context(Loopback(RANKS)))
    assert "aps_shift" in mean.layers
    lost = {"int8": 0, "ternary": 1}[wire]  # of -2..2: half a step of 2 becomes zero
    for flat in flats:
        ones = [int((np.abs(part) == 1).sum()) * lost for part in bucket.views(flat)]
        found = aggregator.observe(flat, bucket, mean)
        assert found["saturated_share"].tolist() == [0, 0]
        assert found["underflow_share"].tolist() == ones
