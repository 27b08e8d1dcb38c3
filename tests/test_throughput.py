"""bench throughput: published sizes, and counted calls against the bytes of larger worlds."""

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from every import every

from cpdhpc.collectives import sparse
from cpdhpc.collectives.method import DEFAULT
from cpdhpc.compress import COMPRESSORS, Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.lab.bench import throughput as traffic
from cpdhpc.lab.bench.accuracy import contributions
from cpdhpc.lab.bench.throughput import (
    LATE,
    NETWORKS,
    ListedCall,
    Network,
    NetworkLayer,
    PerformanceModel,
    calls_of,
    count_calls,
    price,
)
from cpdhpc.lab.cli import main
from cpdhpc.world.ranks import Loopback

PUBLISHED = {  # parameters, multiplications of a forward pass, in 1e6, as papers and model zoos say
    "alexnet": (60.97, 724),
    "googlenet": (7.00, 1582),
    "vgg-a": (132.86, 7609),
    "resnet50": (25.56, 4089),
    "transformer": (65, None),
}
SMALL = Bucket(("conv", "bias", "fc", "fc.bias"), ((32, 16, 3, 3), (32,), (48, 288), (48,)))


@every("name", NETWORKS)
def test_networks_are_as_large_as_published(name: str) -> None:
    network, (parameters, multiplications) = NETWORKS[name](), PUBLISHED[name]
    # The Transformer's vocabulary of about 37,000 is rounded in the paper, as its size is.
    rounding = 0.03 if name == "transformer" else 0.005 / parameters
    assert network.parameters / 1e6 == pytest.approx(parameters, rel=rounding)
    if multiplications:
        assert network.flop / 6e6 == pytest.approx(multiplications, abs=0.7)


def sent_bytes(name: str, bucket: Bucket, ranks: int) -> float:
    """What leaves a rank in the second iteration, the mean, counted in the messages."""
    world, method = Loopback(ranks), COMPRESSORS[name]()
    bucket, state = replace(bucket, align=method.align), State(world.hosted, ranks)
    for time in range(2):
        world.bytes_sent[:] = 0
        context = Context(world, state, iteration=LATE + time, epoch=float(LATE))
        method.aggregate(contributions("spread", ranks, bucket.size, seed=time), bucket, context)
    return float(world.bytes_sent.mean())


@every("name", COMPRESSORS)
def test_calls_counted_once_give_the_bytes_at_any_number_of_ranks(name: str) -> None:
    """Sparse methods select about 190 of these values, give or take their square root: 7 %, and
    the two worlds differ by twice that at most."""
    method = COMPRESSORS[name]()
    calls = calls_of(method, SMALL, 25.0)
    for ranks in (3, 8):
        found = sum(price(DEFAULT, call, ranks, ["rhd"])[1] for call in calls)
        assert found == pytest.approx(sent_bytes(name, SMALL, ranks), rel=0.15)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_rows_that_are_left_out_are_counted(name: str) -> None:
    """Padding is half a tile more or less in each of two sizes, seven times their difference is
    added, and there are 152 tiles: 5 %. Whole chunks, of which 15 are sent, are as many again."""
    method = COMPRESSORS[name]()
    shapes = (128, 64, 3, 3), (128,), (512, 160)
    bucket = Bucket(("conv", "bias", "fc"), shapes, method.align)
    assert traffic._shrunk(bucket, 8, 2).shapes == ((32, 64, 3, 3), (128,), (128, 160))
    found, whole = calls_of(method, bucket, 25.0), count_calls(method, bucket)
    assert [call.name for call in found] == [call.name for call in whole]
    sizes = [sum(call.size_bytes for call in calls) for calls in (found, whole)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    assert sizes[0] > 1.2 * sum(
        c.size_bytes for c in count_calls(method, traffic._shrunk(bucket, 8, 2))
    )


def test_neighbours_are_counted_when_they_are_over() -> None:
    """Each rank keeps one of equal parts of its 840 bytes, and gives the others away."""
    four, seven = (traffic.CountedRanks(ranks) for ranks in (traffic.RANKS, 7))
    for world in (four, seven):
        part, ranks = np.zeros(840 // world.ranks, np.uint8), range(world.ranks)
        sparse.neighbours(world, [{} for _ in ranks])
        sparse.neighbours(world, [{to: part for to in ranks if to != r} for r in ranks])
        sparse.sum(world, [np.zeros(2)] * world.ranks)
        world.close()
    assert [call.name for call in four.calls if call.name != "agreement"] == [
        *("neighbours", "neighbours", "sum")
    ]
    nothing, exchanged, _ = (call for call in four.calls if call.name != "agreement")
    assert (nothing.size_bytes, exchanged.size_bytes) == (0, 630)
    sent = [price(DEFAULT, call, 7, [])[1] for call in four.calls]
    assert sum(sent) == pytest.approx(seven.bytes_sent.mean())


def test_a_step_is_computation_and_then_communication() -> None:
    """By hand: 2 of 4 ranks' chunks each way on a link of 1 Gb/s; a broadcast of two levels."""
    machine = replace(
        DEFAULT, **dict.fromkeys(["gamma_s", "copy_s", "memory_s", "step_s", "call_s"], 0.0)
    )
    machine = replace(machine, alpha_s=1e-5, beta_s=8e-9)
    n = 1 << 20
    bucket = Bucket(("x",), ((4, n // 4),))
    calls = {
        "none": count_calls(COMPRESSORS["none"](), bucket),
        "x": [ListedCall("broadcast", 1000.0)],
    }
    model = PerformanceModel(NETWORKS["alexnet"](), 10, 0.5, calls, ["ring"])
    ring_s = 2 * 3 / 4 * 4 * n * 8e-9
    agreed_s = 2 * 1e-5
    # Latencies: 6 steps of up to 8 pieces, most of them hidden
    assert model.step("none", 4, machine)[0] == pytest.approx(ring_s + agreed_s, abs=6 * 8 * 1e-5)
    assert model.rate("none", 4, machine) == pytest.approx(40 / (0.5 + ring_s), rel=1e-3)
    assert model.step("x", 4, machine) == pytest.approx((2 * (1e-5 + 8e-6), 750))
    assert model.rate("none", 1, machine) == 20


@pytest.mark.usefixtures("without_figures")
def test_the_command_shows_every_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layers = tuple(NetworkLayer(str(i), shape, 9) for i, shape in enumerate(SMALL.shapes))
    monkeypatch.setitem(NETWORKS, "tiny", lambda: Network(layers, "images"))
    png = tmp_path / "x.png"
    options = ["--network", "tiny", "--rate", "64", "--workers", "1,6", "--links", "1,40"]
    options += ["--methods", *list(COMPRESSORS)[:2], ",".join(list(COMPRESSORS)[2:])]
    assert main(["bench", "throughput", *options, "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    n = sum(map(prod, SMALL.shapes))
    assert f"tiny: {n:,} parameters in 4 layers, {54 * n / 1e9:.4g} GFLOP" in shown
    assert "computation: 500 ms for 32 images, 64 images/s of a worker, from --rate" in shown
    for name in COMPRESSORS:
        rows = [
            line.split() for line in shown.splitlines() if line.strip("# ").startswith(f"{name} ")
        ]
        assert len(rows) == 3, name  # what it sends, and the rates over two speeds of links
        assert rows[1][1] == rows[2][1] == "64"
        assert 64 < float(rows[1][2]) <= float(rows[2][2]) <= 6 * 64  # as rounded
    assert png.read_text().startswith("png: <Figure size")
