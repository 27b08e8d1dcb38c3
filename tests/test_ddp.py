"""The hook of DistributedDataParallel on one process, and gradients of half precision."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from reducing import active, model_of
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import NoCompression
from cpdhpc.compress.base import Context, Mean
from cpdhpc.compress.bucket import Bucket
from cpdhpc.torch import GradientReducer, ddp_hook
from cpdhpc.world.ranks import Loopback


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


SMALL = {"find_unused_parameters": True, "bucket_cap_mb": 1e-4}  # a bucket for each layer


def hooked(model: nn.Module, aggregator: Any = "none", how: Any = SMALL, **options: Any) -> Any:
    ddp = DistributedDataParallel(model, **how)
    state, hook = ddp_hook(Loopback(), aggregator, model=ddp, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def backward(model: nn.Module, step: int, factor: float = 1.0) -> None:
    model.zero_grad()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
    (model(x).square().sum() * factor).backward()


def bits(model: nn.Module) -> list[bytes]:
    return [p.grad.numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_comes_out_of_backward_with_own_gradients_and_the_next_step_follows(
    overlap: bool,
) -> None:
    """The first layer, in the last bucket, is infinite: the other buckets are averaged by then."""
    model, plain = model_of(), model_of()
    ddp, state = hooked(model, Doubled(), overlap=overlap)
    for each in (model, plain):
        each[0].weight.register_hook(lambda g: g * (1 if state.iteration else torch.inf))
    backward(plain, 0)
    with pytest.raises(NonFiniteGradient, match=r"NaN or infinity in '0\.weight' on rank 0"):
        backward(ddp, 0)
    assert bits(model) == bits(plain)
    assert state.iteration == 0 and state.world.lent_by is None
    state.iteration = 1
    backward(ddp, 1)
    backward(plain, 1)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, 2 * b.grad)
    assert state.iteration == 2
    state.close()
    assert active() == 0


@dataclass(frozen=True)
class Doubled(NoCompression):
    """Twice the mean."""

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        mean = super().aggregate(gradients, bucket, context)
        return replace(mean, flat=mean.flat * np.float32(2))


def test_a_saved_hook_goes_on_where_it_was(tmp_path: Path) -> None:
    """DDP keeps its buckets where parameters may be unused; else it makes others in step two."""
    found = []
    for stop in (0, 2):
        ddp, state = hooked(model_of(), "powersgd", min_rate=1.0)
        for step in range(4):
            if stop and step == stop:
                torch.save(state.state_dict(), tmp_path / "state.pt")
                ddp, state = hooked(model_of(), "powersgd", min_rate=1.0)
                state.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            backward(ddp, step)
            last = bits(ddp)
        assert state.iteration == 4
        kept = {layer for (layer, name), _ in state.state if name == "residual"}
        assert kept == {"0.weight", "1.weight", "2.weight"}  # the last is too small
        found.append(last)
    assert found[0] == found[1]


def test_without_the_model_layers_are_numbers_in_the_order_of_buckets() -> None:
    """One bucket at first, which is the model's order; step two has others, and the same names."""
    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=1e-4)
    state, hook = ddp_hook(Loopback(), "powersgd", min_rate=1.0)
    ddp.register_comm_hook(state, hook)
    for step in range(3):
        backward(ddp, step)
    shapes = {str(i): list(p.shape) for i, p in enumerate(ddp.parameters())}
    assert state.layers == shapes
    assert len(state._layouts) > 1
    other, _ = ddp_hook(Loopback(), "powersgd", min_rate=1.0)
    other.load_state_dict(state.state_dict())
    assert other.iteration == 3


@every(
    ("world", "options", "says"),
    [
        (Loopback(), {"aggregator": "lowbit", "wyre": 1}, "ddp_hook: lowbit: unknown key wyre"),
        (Loopback(), {"aggregator": "lowbitt"}, "ddp_hook: aggregator='lowbitt'"),
        (Loopback(), {"aggregator": "terngrad", "exclude": ("w",)}, "no layer is called 'w'"),
        (Loopback(2), {}, "virtual_ranks=2: should be 1"),
        (Loopback(2), {"overlap": True}, "should be 1"),
    ],
)
def test_wrong_options_are_told(world: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ddp_hook(world, model=model_of(), **options)


@pytest.mark.parametrize(
    ("model", "x", "says"),
    [
        (
            nn.Embedding(5, 3, sparse=True),
            torch.tensor([1]),
            "'weight' on rank 0 is torch.sparse_coo of torch.float32 on cpu: should be dense",
        ),
        (
            nn.Linear(2, 2).double(),
            torch.ones(1, 2).double(),
            "'weight' on rank 0 is torch.float64",
        ),
    ],
)
def test_gradients_of_other_kinds_are_named(model: nn.Module, x: torch.Tensor, says: str) -> None:
    ddp, _ = hooked(model, how={})
    with pytest.raises(ValueError, match=says):
        ddp(x).sum().backward()


HALVES = {torch.bfloat16: 8, torch.float16: 11}  # significant bits


@pytest.mark.parametrize("dtype", HALVES)
def test_means_of_half_precision_are_the_nearest(dtype: torch.dtype) -> None:
    """Three ranks' gradients, beside float32 ones of another layer; the sum in float64.

    float32 adds three terms and divides: 3 roundings of 2**-24 of S, the mean of the |g|; then one
    to nearest, half a unit of the last of so many bits.
    """
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3).to(dtype))
    own = [[torch.randn(p.shape).to(p.dtype) for p in model.parameters()] for _ in range(3)]
    reducer = GradientReducer(model, Loopback(3))
    for rank, gradients in enumerate(own):
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        reducer.stash(rank)
    reducer.reduce()
    for p, *each in zip(model.parameters(), *own, strict=True):
        wide = torch.stack([g.double() for g in each])
        exact, size = wide.mean(0), wide.abs().mean(0)
        half = 2.0 ** -HALVES[p.dtype] if p.dtype in HALVES else 0.0
        assert p.grad.dtype is p.dtype
        assert bool(
            ((p.grad.double() - exact).abs() <= 4 * 2.0**-24 * size + half * exact.abs()).all()
        )


def test_means_beyond_float16_are_told_and_leave_gradients_alone() -> None:
    """65,519 rounds to 65,504, the largest float16; 65,520, a tie, to infinity."""
    model = nn.Linear(1, 2, bias=False).half()
    with GradientReducer(model, Loopback(), Doubled(), overlap=True) as reducer:
        for value, beyond in ((32752.0, False), (32768.0, True), (1.0, False)):
            model.zero_grad()
            (model(torch.ones(1, 1).half()) * torch.tensor([value, -1]).half()).sum().backward()
            if beyond:
                with pytest.raises(NonFiniteGradient, match="mean is beyond float16 in 'weight'"):
                    reducer.reduce()
                assert model.weight.grad.tolist() == [[value], [-1.0]]
            else:
                reducer.reduce()
                assert model.weight.grad.tolist() == [[2 * value], [-2.0]]
    assert reducer.iteration == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_the_hook_and_the_reducer_have_the_same_bits_in_half_precision(overlap: bool) -> None:
    base = model_of().bfloat16()
    models = [copy.deepcopy(base) for _ in range(2)]
    ddp, state = hooked(models[0], "qsgd", how={}, overlap=overlap)
    reducer = GradientReducer(models[1], Loopback(), "qsgd", overlap=overlap)
    for step in range(2):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        for each in (ddp, models[1]):
            each.zero_grad()
            each(x).square().sum().backward()
        reducer.reduce()
        a, b = (
            [p.grad.view(torch.uint8).numpy().tobytes() for p in m.parameters()] for m in models
        )
        assert a == b
    reducer.close()
    state.close()
