"""The hook of DistributedDataParallel on real ranks, beside DDP itself and GradientReducer."""

import re
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from networks import MODELS, NETWORKS, batch, gradients, linear
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from verdicts import said, together

from cpdhpc.compress import COMPRESSORS
from cpdhpc.torch import GradientReducer, ddp_hook
from cpdhpc.torch.precision import Policy, convert
from cpdhpc.torch.precision.conversion import by_parameter
from cpdhpc.torch.precision.updates import RoundedUpdates
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

U = 2.0**-24  # unit roundoff of float32


def bits(model: nn.Module) -> list[bytes]:
    return [b"" if g is None else g.tobytes() for g in gradients(model)]


def hooked(
    world: World,
    model: nn.Module,
    name: str = "none",
    how: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(model, **(how or {}))
    state, hook = ddp_hook(world, name, model=ddp, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_ddp(world: World, group: None, name: str, overlap: bool) -> None:
    """Two accumulated backwards, then a synchronised one; buckets that DDP makes anew in step two.

    Both add p numbers in some order and divide by p, one before and one after: each errs by at
    most p u S, u = 2**-24 and S the mean of the |g| over ranks, beyond first order with a little.
    """
    torch.manual_seed(0)
    how = {"find_unused_parameters": name == "transformer", "bucket_cap_mb": 0.002}
    model = MODELS[name]()
    own, plain = deepcopy(model), DistributedDataParallel(deepcopy(model), **how)
    ddp, state = hooked(world, model, how=how, seed=1, overlap=overlap)
    verdicts = []
    for step in range(3):
        for each in (own, plain, ddp):
            each.zero_grad()
            for part in range(2):
                x, y = batch(name, 100 * step + 10 * part + world.rank)
                with each.no_sync() if part == 0 and each is not own else nullcontext():
                    nn.functional.cross_entropy(each(x), y).backward()
        sizes = world.gather([None if g is None else np.abs(g) for g in gradients(own)])
        for a, b, *column in zip(gradients(ddp), gradients(plain), *sizes, strict=True):
            if a is None or b is None:
                verdicts.append(a is b)
            else:
                bound = 2.1 * world.size * U * np.mean(column, axis=0, dtype=np.float64)
                verdicts.append(bool((np.abs(a - b) <= bound).all()))
    verdicts.append(world.gather(bits(ddp)) == [bits(ddp)] * world.processes)
    verdicts.append(state.iteration == 3)
    state.close()
    together(world, *verdicts)


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressed_means_are_those_of_the_reducer(world: World, group: None, name: str) -> None:
    """One bucket: what is kept from step to step, the seeds and the bits are the same."""
    models = [linear(8, 16, 4) for _ in range(2)]
    ddp, state = hooked(world, models[0], name, seed=3, overlap=True)
    with GradientReducer(models[1], world, name, seed=3) as reducer:
        verdicts = []
        for step in range(3):
            state.epoch = reducer.epoch = float(step)
            for each in (ddp, models[1]):
                each.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + world.rank)
                each(torch.randn(5, 8, generator=generator)).square().sum().backward()
            reducer.reduce()
            verdicts.append(bits(models[0]) == bits(models[1]))
        here, there = state.state_dict()["state"], reducer.state_dict()["state"]
        verdicts.append(here.keys() == there.keys())
        verdicts += [torch.equal(here[k]["values"], there[k]["values"]) for k in here]
    state.close()
    together(world, *verdicts)


ROUNDED = Policy.model_validate(
    {  # scales that learn, and chance in each pass
        "rule": [
            {
                "layers": "*",
                "weights": "e4m3",
                "activations": {"format": "e4m3", "scaling": "delayed", "history": 2},
                "errors": {"format": "e5m2", "rounding": "stochastic"},
                "forward": "e6m9",
                "update": {"format": "bf16", "rounding": "stochastic", "master": False},
            }
        ]
    }
)


class Rounded:
    """A converted model on some ranks, trained by hand as scripts do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = convert(nn.Sequential(*map(nn.Linear, (8, 16), (16, 4))), ROUNDED)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        RoundedUpdates(optimizer, by_parameter(self.model, ROUNDED), seed=2)
        self.optimizer = optimizer

    def backward(self, step: int, rank: int, forward: Any = None) -> None:
        self.model.zero_grad()
        torch.manual_seed(100 * step + rank)  # of the errors' roundings too
        x = torch.randn(5, 8) * (rank + 1)
        (forward or self.model)(x).square().mean().backward()

    @property
    def bits(self) -> list[bytes]:
        return [v.numpy().tobytes() for v in self.model.state_dict().values()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["none", "lowbit"])
def test_converted_models_have_the_bits_of_virtual_ranks(
    world: World, group: None, name: str, overlap: bool
) -> None:
    """By the reducer and by the hook, in three steps; weights, momentum's effect and scales."""
    by_reducer, by_hook, alone = Rounded(), Rounded(), Rounded()
    ddp, state = hooked(world, by_hook.model, name, seed=1, overlap=overlap)
    reducer = GradientReducer(by_reducer.model, world, name, seed=1, overlap=overlap)
    virtual = GradientReducer(alone.model, Loopback(world.ranks), name, seed=1)
    verdicts = []
    for step in range(3):
        by_hook.backward(step, world.rank, ddp)
        by_reducer.backward(step, world.rank)
        reducer.reduce()
        for rank in range(world.ranks):
            virtual.begin(rank)
            alone.backward(step, rank)
            virtual.stash(rank)
        virtual.reduce()
        for each in (by_reducer, by_hook, alone):
            each.optimizer.step()
        verdicts += [by_reducer.bits == alone.bits, by_hook.bits == alone.bits]
    reducer.close()
    state.close()
    together(world, *verdicts)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_policies_are_told_by_the_hook(world: World, group: None) -> None:
    model, last = linear(4, 3), world.process == world.processes - 1
    convert(model, Policy.model_validate({"rule": [{"layers": "*", "forward": f"e5m{2 + last}"}]}))
    told = said(lambda: ddp_hook(world, model=model))
    together(world, re.search("ValueError: ddp_hook: arguments differ: .*e5m3", told) is not None)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_one_rank_finds_is_raised_by_backward_on_all(
    world: World, group: None, overlap: bool
) -> None:
    """NaN on the last rank in the last bucket; all have their own gradients, and go on."""
    model = linear(4, 3, 3, 2)
    last = world.process == world.processes - 1
    how = {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}
    ddp, state = hooked(world, model, how=how, overlap=overlap)
    errors, own = [], []
    model[0].weight.register_hook(lambda g: g * torch.nan if last and not errors else g)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: own.append(g.clone()))
    for step in range(2):
        ddp.zero_grad()
        y = ddp(torch.full((1, 4), 1.0 + step + world.rank)).square().sum()
        errors.append(said(y.backward))
        if step == 0:
            kept = {g.numpy().tobytes() for g in own} >= set(bits(model))
    says = f"NonFiniteGradient: .*NaN or infinity in '0.weight' on rank {world.size - 1}$"
    alike = world.gather(bits(model)) == [bits(model)] * world.processes
    state.close()
    told = re.search(says, errors[0]) is not None
    together(world, told, kept or last, errors[1] == "", alike, state.iteration == 1)


def test_ranks_that_run_out_of_batches_follow_with_zeros(world: World, group: None) -> None:
    """Rank r has r batches of powers of two: sums are exact, the mean is over all ranks."""
    from torch.distributed.algorithms.join import Join

    model = nn.Linear(2, 1, bias=False)
    ddp, state = hooked(world, model)
    found = []
    with Join([ddp]):
        for step in range(world.rank):
            ddp.zero_grad()
            ddp(torch.full((1, 2), 2.0**step)).sum().backward()
            found.append(float(model.weight.grad[0, 0]))
    expected = [
        float(np.float32(2.0**step * (world.size - 1 - step)) / np.float32(world.size))
        for step in range(world.rank)
    ]
    together(world, found == expected, state.iteration == world.size - 1)


@pytest.mark.mpi(min_size=2)
def test_options_and_worlds_that_differ_are_told_on_all_ranks(world: World, group: None) -> None:
    last = world.process == world.processes - 1
    model = linear(4, 3)
    differ = said(lambda: ddp_hook(world, "lowbit", wire="e5m2" if last else "e4m3"))
    unknown = said(lambda: ddp_hook(world, "lowbit", **({"wyre": 1} if last else {})))
    alone = said(lambda: ddp_hook(Loopback(), model=model))
    verdicts = [
        re.search("ValueError: ddp_hook: arguments differ: .*wire='e5m2'", differ) is not None,
        re.search(r"ConfigError: rank . \| ddp_hook: lowbit: unknown key w", unknown) is not None,
        f"rank 0 of 1 is rank {world.rank} of {world.size} in the default process group" in alone,
    ]
    together(world, *verdicts)


COMPILED = {"backend": "aot_eager"}  # autograd of the compiled graph, without a C++ compiler


@pytest.mark.two_ranks
@pytest.mark.parametrize("overlap", [False, True])
def test_compiled_models_have_the_means_and_names_of_plain_ones(
    world: World, group: None, overlap: bool
) -> None:
    """By the reducer and by the hook, around DDP and within; states go from one to the other."""
    models = [linear(8, 16, 4) for _ in range(4)]
    how: dict[str, Any] = {"overlap": overlap, "density": 0.1}
    compiled: Any = torch.compile(models[1], **COMPILED)
    plain = GradientReducer(models[0], world, "topk", bucket_mib=1e-4, **how)
    reducer = GradientReducer(compiled, world, "topk", bucket_mib=1e-4, **how)
    around = DistributedDataParallel(models[2])
    state, hook = ddp_hook(world, "topk", model=torch.compile(around, **COMPILED), **how)
    around.register_comm_hook(state, hook)
    within, other = hooked(world, torch.compile(models[3], **COMPILED), "topk", **how)
    verdicts = [plain.layers == reducer.layers == state.layers == other.layers]
    for step in range(3):
        if step == 1:
            reducer.load_state_dict(plain.state_dict())
            other.load_state_dict(state.state_dict())
        for each in (models[0], compiled, torch.compile(around, **COMPILED), within):
            each.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            each(torch.randn(5, 8, generator=generator)).square().sum().backward()
            if each is models[0]:
                plain.reduce()
            elif each is compiled:
                reducer.reduce()
        verdicts += [bits(models[0]) == bits(models[1]), bits(models[2]) == bits(models[3])]
    for each in (plain, reducer, state, other):
        each.close()
    together(world, *verdicts)


@pytest.mark.two_ranks
def test_optimizers_whose_ranks_share_the_work_end_with_the_bits_of_plain_ones(
    world: World, group: None
) -> None:
    """ZeroRedundancyOptimizer steps with a part of the parameters on each rank, and shares them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    models = [linear(8, 16, 4) for _ in range(2)]
    reducers = [GradientReducer(model, world, "lowbit", wire="e4m3") for model in models]
    optimizers = [
        torch.optim.Adam(models[0].parameters(), lr=0.1),
        ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.Adam, lr=0.1),
    ]
    for step in range(4):
        for model, reducer, optimizer in zip(models, reducers, optimizers, strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            model(torch.randn(5, 8, generator=generator)).square().sum().backward()
            reducer.reduce()
            optimizer.step()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    together(world, all(torch.equal(a, b) for a, b in pairs))


@pytest.mark.parametrize("name", ["none", "topk"])
def test_two_models_with_overlap_take_turns(world: World, group: None, name: str) -> None:
    """In one backward each and in one for both, by the bits of each alone; else an error on all."""
    first, second, *alone = (linear(8, 16, 8) for _ in range(4))
    overlapped, plain = (
        [GradientReducer(m, world, name, bucket_mib=1e-4, overlap=how) for m in pair]
        for pair, how in (((first, second), True), (alone, False))
    )
    ddp, state = hooked(world, linear(8, 4), overlap=True)
    verdicts, told = [], []
    for step in range(3):
        for one, other in ((first, second), alone):
            one.zero_grad()
            other.zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + world.rank))
            if step == 1:
                other(one(x)).square().sum().backward()
            else:
                other(x).square().sum().backward()
                one(x).square().sum().backward()
        told.append(said(overlapped[0].reduce))
        told.append(said(lambda: ddp(torch.ones(1, 8)).sum().backward()))
        for reducer in (*overlapped[::-1], *plain[::-1]):
            reducer.reduce()
        verdicts += [bits(first) == bits(alone[0]), bits(second) == bits(alone[1])]
    ddp.zero_grad()
    ddp(torch.ones(1, 8)).sum().backward()
    for reducer in overlapped:
        reducer.close()
    state.close()
    says = "reduce() of models in the order of their backward", "call reduce() of its Gradient"
    verdicts += [any(each in text for each in says) for text in told]
    together(world, *verdicts, world.lent_to is None, state.iteration == 1)
