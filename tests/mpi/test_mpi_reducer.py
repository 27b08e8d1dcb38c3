"""Models of torch users on real ranks, beside torch's DistributedDataParallel; and what differs."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch_models import MODELS, batch

from cpdhpc.train.reducer import GradientReducer
from cpdhpc.world.mpi import World

pytestmark = pytest.mark.mpi

U = 2.0**-24  # unit roundoff of float32
WIRES: dict[str, dict[str, Any]] = {
    "raw": {"aggregator": "none"},
    "e4m3": {"aggregator": "lowbit", "wire": "e4m3"},
    "e3m0": {"aggregator": "lowbit", "wire": "e3m0", "rounding": "stochastic"},
}


def together(world: World, *verdicts: bool) -> None:
    """Fail on all processes alike where a verdict is false on one of them."""
    assert world.gather(verdicts) == [(True,) * len(verdicts)] * world.processes


@pytest.fixture(scope="module")
def group(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch's own processes, over gloo, beside MPI's."""
    directory = world.gather(str(tmp_path_factory.mktemp("store")))[0]
    store = distributed.FileStore(str(Path(directory) / "store"), world.processes)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bits of backward in both
    yield
    torch.set_num_threads(threads)
    distributed.destroy_process_group()


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.detach().numpy() for p in model.parameters()]


def buffers(model: nn.Module) -> list[bytes]:
    return [b.numpy().tobytes() for b in model.buffers()]


def bits(model: nn.Module) -> list[bytes]:
    """Parameters, buffers and gradients."""
    kept = [t.detach().numpy().tobytes() for t in model.state_dict().values()]
    return kept + [b"" if g is None else g.tobytes() for g in gradients(model)]


def trained(world: World, name: str, **how: Any) -> tuple[list[list[bytes]], float, float]:
    """Bits after each step of a plain loop, and the first and the last loss on the same batch."""
    torch.manual_seed(world.rank)
    model, found, losses = MODELS[name](), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    x, y = batch(name, world.rank)
    with GradientReducer(model, world, bucket_mib=0.002, seed=1, **how) as reducer:
        for _ in range(8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            reducer.reduce()
            optimizer.step()
            found.append(bits(model))
            losses.append(float(loss.detach()))
    return found, losses[0], losses[-1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_buffers_are_those_of_ddp(
    world: World, group: None, name: str, overlap: bool
) -> None:
    """Three steps from the parameters of one another, so that only one mean lies between.

    Both add p numbers in some order and divide by p, one before and one after: each errs by at
    most p u S, u = 2**-24 and S the mean of the |g| over ranks, beyond first order with a little.
    """
    torch.manual_seed(world.rank)
    model = MODELS[name]()
    with GradientReducer(model, world, overlap=overlap, bucket_mib=0.002) as reducer:
        ddp = nn.parallel.DistributedDataParallel(deepcopy(model), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        verdicts = []
        for step in range(3):
            x, y = batch(name, 100 * step + world.rank)
            for mine, theirs in zip(model.parameters(), ddp.module.parameters(), strict=True):
                theirs.data.copy_(mine.data)
            for each in (model, ddp):
                each.zero_grad()
                nn.functional.cross_entropy(each(x), y).backward()
            verdicts.append(buffers(model) == buffers(ddp.module))  # as each forward left them
            sizes = [None if g is None else np.abs(g) for g in gradients(model)]
            reducer.reduce()
            means = [
                np.mean([g for g in column if g is not None], axis=0, dtype=np.float64)
                for column in zip(*world.gather(sizes), strict=True)
                if column[0] is not None
            ]
            both = zip(gradients(model), gradients(ddp.module), strict=True)
            pairs = [pair for pair in both if pair[0] is not None]
            verdicts.append(
                all(
                    bool((np.abs(a - b) <= 2.1 * world.size * U * mean).all())
                    for (a, b), mean in zip(pairs, means, strict=True)
                )
            )
            optimizer.step()
    together(world, *verdicts)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_train_to_the_same_bits_with_and_without_overlap(
    world: World, group: None, name: str, wire: str
) -> None:
    plain, first, last = trained(world, name, **WIRES[wire])
    overlapped, *_ = trained(world, name, **WIRES[wire], overlap=True)
    alike = world.gather(plain) == [plain] * world.processes
    loss = [sum(each) for each in zip(*world.gather((first, last)), strict=True)]
    together(world, alike, plain == overlapped, loss[1] < loss[0])
