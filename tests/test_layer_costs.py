"""What bench layer counts, against other ways to count it, and against what is allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import pytest
from every import every

from cpdhpc.lab.autoencoder import blocks
from cpdhpc.lab.autoencoder.job import Autoencoder, Geometry, Layer
from cpdhpc.lab.autoencoder.training import Stack
from cpdhpc.lab.bench.layer import layer_costs
from cpdhpc.lab.cli import main
from cpdhpc.world.ranks import Loopback


def test_what_an_eleven_billion_layer_costs_by_hand() -> None:
    """8 x 8 ranks: 191 blocks in 8 parts are 24 at most, and so on; see the sizes in the text."""
    geometry = Geometry(Layer(field=10, maps=1024, pool=3), (200, 200), 3)
    assert geometry.blocks == (191, 191) and geometry.pools == (189, 189)
    assert geometry.parameters == 191 * 191 * 1024 * 300 == 11_206_963_200
    costs = layer_costs(geometry, (8, 8), batch=96)
    assert sum(cost.parameters for cost in costs) == geometry.parameters
    assert costs[0].parameters == 24 * 24 * 1024 * 300
    assert costs[0].state_bytes == 2 * 4 * costs[0].parameters
    assert costs[0].flop == 10 * 24**2 * 1024 * 300 * 96
    # Weights and momentum; 25 x 25 cells and twice the fields' 33 x 33; twice 26 x 26 blocks.
    image, responses = (25**2 + 2 * 33**2) * 3 * 96, 2 * 26**2 * 1024 * 96
    assert costs[0].peak_bytes == 4 * (2 * 24**2 * 1024 * 300 + image + responses)
    # Rank 0 owns pixels 0..25 along an axis; its fields reach to 33, the next rank's begin at
    # 24: 25 pixels go to the rank beside, 25 to that below, 1 to that across. Pools 0..24 reach to
    # block 26; ranks behind need none of its blocks.
    assert costs[0].exchanges["cells to fields"] == (3, (25 + 25 + 1) * 3 * 96 * 4)
    assert costs[0].exchanges["reconstruction back"] == (3, (33**2 - 25**2) * 3 * 96 * 4)
    assert costs[0].exchanges["their gradient"] == (3, (26**2 - 24**2) * 1024 * 96 * 4)
    assert main(["bench", "layer"]) == 0


@every("procs", [(1, 1), (2, 3), (8, 8)])
def test_bytes_of_a_layer_cell_by_cell(procs: tuple[int, int]) -> None:
    """Written without windows and plans: who owns each cell, and whose outputs need it."""
    layer = Layer(field=5, step=2, maps=3, pool=3, pool_step=2)
    geometry = Geometry(layer, (41, 37), 2)
    costs = layer_costs(geometry, procs, batch=7)
    names = ("cells to fields", "reconstruction back", "its gradient")
    counted = cell_by_cell(geometry.image, geometry.blocks, procs, 5, 2)
    for cost, (out, back) in zip(costs, counted, strict=True):
        assert [cost.exchanges[name][1] for name in names] == [
            n * 2 * 7 * 4 for n in (out, back, out)
        ]
    counted = cell_by_cell(geometry.blocks, geometry.pools, procs, 3, 2)
    for cost, (out, back) in zip(costs, counted, strict=True):
        assert cost.exchanges["responses to pools"][1] == out * 3 * 7 * 4
        assert cost.exchanges["their gradient"][1] == back * 3 * 7 * 4


def cell_by_cell(
    inputs: tuple[int, int], outputs: tuple[int, int], procs: tuple[int, int], size: int, step: int
) -> list[tuple[int, int]]:
    """Cells that each rank sends to others, and that it gets from others."""

    def owners(extent: int, parts: int) -> list[int]:  # larger parts first
        return [p for p in range(parts) for _ in range((extent + parts - 1 - p) // parts)]

    source = [owners(n, p) for n, p in zip(inputs, procs, strict=True)]
    reader = [owners(n, p) for n, p in zip(outputs, procs, strict=True)]
    needed = {
        (reader[0][i] * procs[1] + reader[1][j], i * step + a, j * step + b)
        for i, j, a, b in np.ndindex(*outputs, size, size)
    }
    sent = [(source[0][i] * procs[1] + source[1][j], rank) for rank, i, j in needed]
    moved = [(one, other) for one, other in sent if one != other]
    return [
        (sum(one == r for one, _ in moved), sum(other == r for _, other in moved))
        for r in range(procs[0] * procs[1])
    ]


@pytest.mark.parametrize(
    ("size", "maps", "step", "batch"), [(60, 2, 4, 32), (34, 64, 2, 8), (20, 96, 1, 32)]
)
def test_the_peak_of_memory_is_what_is_allocated(
    size: int, maps: int, step: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 10 %: mostly images, mostly weights, and mostly responses; a block at a time."""
    monkeypatch.setattr(blocks, "CPU_BYTES", 1)
    raw = {
        "name": "x",
        "data": {"name": "synthetic", "size": size, "channels": 3, "prepare": "none"},
        "layer": [{"field": 10, "step": step, "maps": maps, "pool": 3}],
        "train": {"batch": batch, "learning_rate": 1e-9, "keep_memory": False},
    }
    job = Autoencoder.model_validate(raw)
    with allocations() as of_all:
        stack = Stack(job, Loopback(), job.data.load())
        x = stack.batch()
        stack.step(x)
    (cost,) = layer_costs(stack.layers[0].geometry, (1, 1), batch)
    assert cost.peak_bytes == pytest.approx(max(of_all) + x.nbytes, rel=0.1)
    with allocations() as of_a_step:
        stack.step(x)
    assert max(of_a_step) < 0.02 * cost.peak_bytes  # all that is large is there already


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Fill a list with the bytes that torch has got more than at first, after each change."""
    from torch.profiler import ProfilerActivity, profile

    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    found.extend(accumulate(e.nbytes() for e in events if e.name() == "[memory]"))
