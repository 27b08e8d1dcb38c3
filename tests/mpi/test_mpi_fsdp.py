"""The hook of FullyShardedDataParallel on real ranks, and models that are cut up otherwise."""

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from networks import linear
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from verdicts import said, together

from cpdhpc.compress import COMPRESSORS
from cpdhpc.torch import GradientReducer, ddp_hook, fsdp_hook
from cpdhpc.torch.precision import Policy, convert
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

pytestmark = pytest.mark.filterwarnings(  # of FSDP itself
    "ignore::FutureWarning", "ignore::UserWarning"
)

STRATEGIES = [Strategy.NO_SHARD, Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP]


def sharded(model: nn.Module, strategy: Strategy, **how: Any) -> FullyShardedDataParallel:
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, sharding_strategy=strategy, device_id=device, **how)


def backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(5, 7, generator=generator)).square().sum().backward()


def weights(model: FullyShardedDataParallel) -> list[torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in pairs)


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", COMPRESSORS)
def test_one_unit_has_the_bits_of_the_reducer(world: World, group: None, name: str) -> None:
    """In a network trained for three steps: what is kept, the seeds and the means are the same."""
    for strategy in STRATEGIES:
        plain = linear(7, 9, 4)
        model = sharded(deepcopy(plain), strategy, use_orig_params=True)
        state, hook = fsdp_hook(world, name, model=model, seed=3)
        model.register_comm_hook(state, hook)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
        with GradientReducer(plain, world, name, seed=3) as reducer:
            for step in range(3):
                state.epoch = reducer.epoch = float(step)
                for each, optimizer in zip((plain, model), optimizers, strict=True):
                    optimizer.zero_grad()
                    backward(each, step, world.rank)
                    if each is plain:
                        reducer.reduce()
                    optimizer.step()
            here, there = state.state_dict(), reducer.state_dict()
            verdicts = [same(weights(model), list(plain.parameters()))]
            verdicts += [here["layers"] == there["layers"], state.iteration == 3]
            verdicts.append(here["state"].keys() == there["state"].keys())
            verdicts += [
                torch.equal(here["state"][k]["values"], row["values"])
                for k, row in there["state"].items()
            ]
            state.load_state_dict(there)
        together(world, *verdicts)


@pytest.mark.two_ranks
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_units_have_the_means_of_fsdp_itself(
    world: World, group: None, strategy: Strategy, original: bool
) -> None:
    """Units of equal and odd sizes, accumulation, a frozen layer; whole numbers: sums are exact."""
    how: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    models = []
    for hooked in (False, True):
        plain = linear(3, 3, 3, 5, 3)
        for p in plain.parameters():
            p.data.copy_((p.data * 4).round())
        if original:
            plain[1].bias.requires_grad_(False)
        model = sharded(plain, strategy, use_orig_params=original, **how)
        if hooked:
            state, hook = fsdp_hook(world, model=model)
            model.register_comm_hook(state, hook)
        models.append(model)
    found, bits = [], []
    for model in models:
        for step in range(2):
            model.zero_grad()
            x = torch.full((2, 3), float(step + world.rank + 1))
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for p in model.parameters():
            p.data -= 0 if p.grad is None else p.grad
        bits.append(weights(model))
    half = len(found) // 2
    verdicts = [same(a, b) for a, b in zip(found[:half], found[half:], strict=True)]
    verdicts += [same(*bits), state.iteration == 2]
    verdicts.append(set(state.layers) >= {"0.weight", "1.weight", "3.bias"})
    together(world, *verdicts)


@pytest.mark.two_ranks
def test_gradients_of_half_precision_and_a_scaled_loss(world: World, group: None) -> None:
    for strategy in STRATEGIES:
        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        found = []
        for hooked in (False, True):
            model = sharded(linear(7, 3), strategy, mixed_precision=mixed)
            if hooked:
                state, hook = fsdp_hook(world, model=model)
                model.register_comm_hook(state, hook)
                state.loss_scale = 8.0
            model(torch.ones(1, 7) * (world.rank + 1)).sum().mul(8.0 if hooked else 1.0).backward()
            found.append([p.grad for p in model.parameters()])
        together(world, same(*found))


@pytest.mark.two_ranks
def test_scales_of_converted_models_are_those_of_all_ranks(world: World, group: None) -> None:
    """Compiled around, too: the bits of the reducer, and largest values of the last rank's."""
    rule = {"layers": "*", "activations": {"format": "e4m3", "scaling": "delayed", "history": 2}}
    policy = Policy.model_validate({"rule": [rule]})
    plain, cut = (convert(linear(7, 4), policy) for _ in range(2))
    model = sharded(cut, Strategy.FULL_SHARD, use_orig_params=True)
    compiled: Any = torch.compile(model, backend="eager")
    state, hook = fsdp_hook(world, model=compiled)
    model.register_comm_hook(state, hook)
    reducer = GradientReducer(plain, world)
    for step in range(2):
        for each in (plain, model):
            x = torch.ones(1, 7) * (step + world.rank + 1)
            each(x).sum().backward()
        reducer.reduce()
    found = [list(each.buffers()) for each in (plain, model)]
    together(world, same(*found), len(found[0]) == 1, float(found[0][0].max()) == world.size + 1)


@pytest.mark.two_ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_one_rank_finds_is_raised_by_backward_on_all(
    world: World, group: None, strategy: Strategy
) -> None:
    """NaN on the last rank, in the first unit of backward; the next step follows."""
    how: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    model = sharded(linear(7, 7, 7), strategy, **how)
    state, hook = fsdp_hook(world, model=model, seed=1)
    model.register_comm_hook(state, hook)
    last = world.rank == world.size - 1
    nan = said(lambda: (model(torch.ones(1, 7)) * (torch.nan if last else 1)).sum().backward())
    model.zero_grad()
    after = said(lambda: backward(model, 0, world.rank))
    finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    says = f"NonFiniteGradient: .*NaN or infinity in '1.weight', .* on rank {world.size - 1}$"
    state.loss_scale = 3.0
    wrong = said(lambda: backward(model, 0, world.rank))
    verdicts = [re.search(says, nan) is not None, after == "", finite, state.iteration == 1]
    together(world, *verdicts, "FsdpHook: loss_scale=3.0: must be a power of two" in wrong)


@pytest.mark.two_ranks
def test_models_that_are_cut_up_are_refused_on_all_ranks(world: World, group: None) -> None:
    """Before any message; the one rank that has such a model is named where others have not."""
    cut = fully_shard(linear(7, 4), mesh=init_device_mesh("cpu", (world.size,)))
    fsdp = sharded(linear(7, 4), Strategy.FULL_SHARD)
    told = [
        said(lambda: GradientReducer(cut, world)),
        said(lambda: ddp_hook(world, model=cut)),
        said(lambda: GradientReducer(cut if world.rank else linear(7, 4), world)),
        said(lambda: GradientReducer(fsdp, world)),
        said(lambda: ddp_hook(world, model=fsdp)),
        said(lambda: fsdp_hook(world, model=cut)),
        said(lambda: fsdp_hook(world, "lowbit", wyre=1, model=fsdp)),
        said(lambda: fsdp_hook(Loopback(), model=fsdp)),
    ]
    fsdp.register_comm_hook(*ddp_hook(world))
    told.append(said(lambda: backward(fsdp, 0, world.rank)))
    expected = [
        "TypeError: GradientReducer: model: 0.weight is DTensor: should be a torch.Tensor that",
        "TypeError: ddp_hook: model: 0.weight is DTensor: should be a torch.Tensor that",
        "TypeError: rank 1 | GradientReducer: model: 0.weight is DTensor",
        "TypeError: GradientReducer: model is FullyShardedDataParallel, which gives each rank",
        "TypeError: ddp_hook: model is FullyShardedDataParallel, which gives each rank",
        "TypeError: fsdp_hook: model is FSDPSequential: must be FullyShardedDataParallel",
        "ConfigError: fsdp_hook: lowbit: unknown key wyre",
        "ValueError: fsdp_hook: world: rank 0 of 1 is rank ",
        "TypeError: ddp_hook: the hook is called by FullyShardedDataParallel: should be",
    ]
    starts = (text.startswith(each) for text, each in zip(told, expected, strict=True))
    together(world, *starts)
