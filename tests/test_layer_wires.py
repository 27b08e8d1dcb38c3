"""Wires of layers: bits of the specification for each group, whatever else is in the bucket."""

import re
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from allreduce_oracle import expected
from every import every
from reducing import backward, gradients, model_of
from training import model_bytes, prepared, run_job, small_job, stop

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.lowbit import LayerWire, LowBit
from cpdhpc.config import ConfigError
from cpdhpc.lab.train.job import load
from cpdhpc.randomness import random_key
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

RANKS = 3
LAYERS: dict[str, Any] = {
    "conv*": "e5m2",
    "fc": LayerWire("e3m0", scaling="aps"),
    "*.bias": "raw",
    "last.weight": "e4m3",  # as the others: travels with them
}
BUCKET = Bucket(
    ("first.weight", "conv1.weight", "conv1.bias", "conv2.weight", "fc.weight", "last.weight"),
    ((40, 50), (30, 7), (30,), (1500,), (9, 9), (5,)),
    1024,
)
GROUPS = [  # layers of the bucket, wire, scaling
    ((0, 5), "e4m3", "tile"),
    ((1, 3), "e5m2", "tile"),
    ((2,), "raw", None),
    ((4,), "e3m0", "aps"),
]


def flats(seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    draw = [[rng.normal(size=s).astype(np.float32) * 1e-3 for s in BUCKET.shapes] for _ in "123"]
    return [BUCKET.flatten(each) for each in draw]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_each_group_has_the_bits_of_the_specification(rounding: Any) -> None:
    method = LowBit(rounding=rounding, layers=LAYERS)
    world, xs = Loopback(RANKS), flats()
    state = State(world.hosted, world.ranks)
    mean = method.aggregate(xs, BUCKET, Context(world, state, seed=7, iteration=5))
    for layers, wire, scaling in GROUPS:
        part = Bucket(
            tuple(BUCKET.names[i] for i in layers), tuple(BUCKET.shapes[i] for i in layers), 1024
        )
        given = [part.flatten([BUCKET.views(x)[i] for i in layers]) for x in xs]
        way = 0 if wire == "e4m3" else 1 + ["e5m2", "e3m0"].index(wire) if wire != "raw" else 0
        low, high = random_key(7, crc32(b"layers"), way) if way else (7, 0)
        algorithm, accumulate = ("ring", "requantise") if wire == "raw" else ("rhd", "grow")
        total = expected(
            given, wire, algorithm, scaling, accumulate,
            segments=part.segments, seed=low | high << 32, iteration=5, rounding=rounding,
        )  # fmt: skip
        for i, found in zip(layers, part.views(total / np.float32(RANKS)), strict=True):
            assert BUCKET.views(mean.flat)[i].tobytes() == found.tobytes(), BUCKET.names[i]
    assert np.isfinite(mean.layers["aps_shift"]).tolist() == [False] * 4 + [True, False]


def test_what_is_lost_is_counted_by_the_wire_of_each_layer() -> None:
    method, world, xs = LowBit(layers=LAYERS), Loopback(RANKS), flats()
    mean = method.aggregate(xs, BUCKET, Context(world, State(world.hosted, world.ranks)))
    found = method.observe(xs[0], BUCKET, mean)
    for layers, wire, scaling in GROUPS:
        if wire == "raw":
            assert found["underflow_share"][list(layers)] == 0
            continue
        alone = LowBit(wire=wire, scaling=scaling)
        part = Bucket(tuple(map(str, layers)), tuple(BUCKET.shapes[i] for i in layers), 1024)
        given = [part.flatten([BUCKET.views(x)[i] for i in layers]) for x in xs]
        of = alone.aggregate(given, part, Context(world, State(world.hosted, world.ranks)))
        for name, counts in alone.observe(given[0], part, of).items():
            assert found[name][list(layers)].tolist() == counts.tolist()
    assert found["underflow_share"][4] > found["underflow_share"][0]


def trained(bucket_mib: float, **how: Any) -> tuple[list[list[bytes]], int]:
    """Gradients after each of three steps of two ranks, and the bytes that these sent."""
    model, world = model_of(), Loopback(2)
    reducer, found = GradientReducer(model, world, "lowbit", bucket_mib=bucket_mib, **how), []
    for step in range(3):
        for hosted in range(2):
            backward(model, 10 * step + hosted)
            reducer.stash(hosted)
        reducer.reduce()
        found.append(gradients(model))
    return found, int(world.bytes_sent.sum())


def test_a_reducer_has_the_same_bits_in_any_buckets_and_counts_its_bytes() -> None:
    layers = {"1": "e5m2", "2.weight": {"wire": "e3m0"}, "*.bias": "raw"}
    by_tile = {"wire": "e4m3", "layers": layers, "algorithm": "direct"}
    found = [trained(mib, **by_tile) for mib in (25.0, 0.005, 1e-6)]
    assert found[0][0] == found[1][0] == found[2][0]
    whole, coarse = (trained(25.0, wire=wire)[1] for wire in ("e4m3", "e3m0"))
    narrow = trained(25.0, wire="e4m3", layers={"*": "e3m0"})
    assert narrow[1] == coarse < whole
    assert narrow[0] == trained(25.0, wire="e3m0")[0]


@pytest.mark.parametrize("bucket_mib", [25.0, 1e-6])
def test_nan_in_one_wire_moves_no_memory_of_the_others(bucket_mib: float) -> None:
    how: dict[str, Any] = {
        "wire": "e4m3", "layers": {"0": "e3m0", "3": "e5m2"}, "error_feedback": True,
    }  # fmt: skip
    model, world = model_of(), Loopback(2)
    reducer = GradientReducer(model, world, "lowbit", bucket_mib=bucket_mib, **how)
    for step, poison in ((0, False), (1, True)):
        for hosted in range(2):
            backward(model, step + hosted)
            if poison and hosted:
                model[3].weight.grad[0, 0] = torch.nan
            reducer.stash(hosted)
        before = [(key, entry.array.tobytes()) for key, entry in reducer.state]
        if not poison:
            reducer.reduce()
            continue
        with pytest.raises(NonFiniteGradient, match=r"'3\.weight' on rank 1"):
            reducer.reduce()
        assert before == [(key, entry.array.tobytes()) for key, entry in reducer.state]
        assert any(any(kept) for _, kept in before)


def test_a_job_with_wires_of_layers_stops_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """From TOML and back, on two virtual ranks, with what error feedback keeps."""
    path = tmp_path / "job.toml"
    gradient = {
        "aggregator": "lowbit",
        "error_feedback": True,
        "layers": {"1": "e3m0", "*.bias": {"wire": "e5m2", "scaling": "aps"}},
    }
    job = small_job(gradient=gradient, train={"virtual_ranks": 2})
    path.write_text(job.toml())
    assert load(path) == [job]
    (tmp_path / "whole").mkdir()
    whole = run_job(job, Loopback(2), tmp_path / "whole")
    stop(prepared(job, Loopback(2), tmp_path), 3)
    parts = run_job(job, Loopback(2), tmp_path, resume=True)
    assert model_bytes(parts.files.checkpoint) == model_bytes(whole.files.checkpoint)
    columns = parts.record.arrays()["layers"]
    assert np.isnan(columns["aps_shift"][0]).tolist() == [True, False, True, False]


@every(
    ("options", "says"),
    [
        ({"layers": {"fc*": "e3m0"}}, "LowBit: layers: no layer matches 'fc*': known are 0, 1"),
        ({"layers": {"0": "e4x"}}, "layers.0: wire='e4x'"),
        ({"layers": {"0": {"wire": "e4m3", "scaling": "til"}}}, "layers.0: scaling='til'"),
        ({"layers": {"0": {"wire": "e4m3", "scale": "aps"}}}, "layers.0.scale: did you mean"),
        ({"layers": {"0": {"scaling": "aps"}}}, "layers.0.wire: is missing"),
        (
            {"layers": {"0": "ternary"}, "rounding": "stochastic", "error_feedback": True},
            "error_feedback=true needs 'nearest'",
        ),
        ({"wire": "raw"}, "wire='raw': is the aggregator 'none'"),
    ],
)
def test_what_is_no_wire_of_a_layer_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=re.escape(says)):
        GradientReducer(model_of(), Loopback(2), "lowbit", **options)


def test_wires_of_a_policy_are_those_of_layers(tmp_path: Path) -> None:
    """Over lowbit and over float32; the weights have the same bits."""
    rules = [{"layers": "*", "wire": "e5m2"}, {"layers": "3", "wire": "e3m0"}]
    found = []
    for number, (gradient, precision) in enumerate(
        [
            ({"aggregator": "lowbit", "layers": {"1": "e5m2", "3": "e3m0"}}, {}),
            ({"aggregator": "lowbit"}, {"rule": rules}),
            ({"aggregator": "none"}, {"rule": rules}),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        job = small_job(gradient=gradient, precision=precision, train={"epochs": 1})
        training = run_job(job, Loopback(2), directory)
        found.append((model_bytes(training.files.checkpoint), training.sent_bytes.tolist()))
    assert found[0] == found[1] == found[2]
    job = small_job(gradient={"aggregator": "topk"}, precision={"rule": rules})
    with pytest.raises(ConfigError, match="wire: goes with gradient"):
        run_job(job, Loopback(2), tmp_path)


def test_stages_refuse_what_names_layers_of_others() -> None:
    gradient = {"aggregator": "lowbit", "layers": {"*": "e3m0"}}
    with pytest.raises(ConfigError, match=r"does not allow this gradient\.layers"):
        small_job(stages={"count": 2}, gradient=gradient)
