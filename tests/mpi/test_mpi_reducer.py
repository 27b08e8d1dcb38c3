"""Models of torch users on real ranks, beside torch's DistributedDataParallel; and what differs."""

import math
import re
import resource
import warnings
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import MODELS, NETWORKS, batch, gradients, linear
from refusing import refused
from torch import nn
from verdicts import said, together

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import COMPRESSORS
from cpdhpc.lab.train import gradients as gradients_of
from cpdhpc.torch.loss_scaling import LossScaler
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World

U = 2.0**-24  # unit roundoff of float32
WIRES: dict[str, dict[str, Any]] = {
    "raw": {"aggregator": "none"},
    "e4m3": {"aggregator": "lowbit", "wire": "e4m3"},
    "e3m0": {"aggregator": "lowbit", "wire": "e3m0", "rounding": "stochastic"},
}


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


FRAMEWORKS = "import lightning", "import accelerate"


def page_blocks() -> list[str]:
    """The programs of docs/reference/torch.md, then those of torch_frameworks.md."""
    folder = Path(__file__).parents[2] / "docs" / "reference"
    pages = [(folder / name).read_text() for name in ("torch.md", "torch_frameworks.md")]
    return re.findall(r"```python\n(.*?)```", "\n".join(pages), re.DOTALL)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of FSDP itself
def test_the_page_for_torch_users(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages as one program, block by block; all ranks end with the same model.

    The first test here, as the pages open and close torch's process group themselves.
    """
    monkeypatch.chdir(world.gather(str(tmp_path))[0])
    here: dict[str, Any] = {}
    for block in page_blocks():
        if not block.startswith(FRAMEWORKS):
            exec(block, here)
    samples = here["targets"].numel()
    sum_of_right = 0 <= float(here["right"]) <= samples * world.size
    together(world, alike(world, bits(here["model"])), sum_of_right)
    here["world"].free()


@pytest.mark.two_ranks
@pytest.mark.parametrize("opening", FRAMEWORKS)
def test_the_page_for_users_of_frameworks(world: World, group: None, opening: str) -> None:
    """Which are no requirements; what they call is GradientReducer and ddp_hook, tested here."""
    name = opening.split()[1]
    if not all(world.gather(find_spec(name) is not None)):
        pytest.skip(f"{name} is not installed")
    first, *others = page_blocks()
    here: dict[str, Any] = {}
    exec(first, here)
    (block,) = (each for each in others if each.startswith(opening))
    exec(block, here)
    trained = [p.detach().numpy().tobytes() for p in here["network"].parameters()]
    here["reducer"].close()
    together(world, world.gather(trained) == [trained] * world.processes)
    here["world"].free()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_overflows_on_the_last_rank_is_skipped_on_all(
    world: World, overlap: bool, first: int
) -> None:
    """first: of every second step, which overflow"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    reducer = GradientReducer(
        model, world, "lowbit", wire="e5m2", scaling="none", overflow="inf",
        error_feedback=True, bucket_mib=1e-6, overlap=overlap,
    )  # fmt: skip
    found, memory, kept = [], [], {}
    with reducer:
        scaler = LossScaler(reducer, 2.0**4, dynamic=True)
        for step in range(4):
            last = step % 2 == first and world.rank == world.ranks - 1
            model.zero_grad()
            loss = model(torch.full((1, 4), world.rank + 1.0)).square().sum()
            (loss * (1e9 if last else 1.0) * scaler.scale).backward()
            kept = {key: entry.array.copy() for key, entry in scaler._before}
            found.append((scaler.reduce() is None, scaler.scale))
            now = {key: 2 * entry.array for key, entry in reducer.state}
            memory.append(all(np.array_equal(kept[key], now[key]) for key in kept))
    expected = [(False, 16.0), (True, 8.0), (False, 8.0), (True, 4.0)]
    if first == 0:
        expected = [(True, 8.0), (False, 8.0), (True, 4.0), (False, 4.0)]
    stayed = memory[first] and memory[first + 2]
    together(world, found == expected, stayed, any(e.any() for e in kept.values()))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
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
@pytest.mark.parametrize("name", NETWORKS)
def test_all_ranks_train_to_the_same_bits_with_and_without_overlap(
    world: World, group: None, name: str, wire: str
) -> None:
    plain, first, last = trained(world, name, **WIRES[wire])
    overlapped, *_ = trained(world, name, **WIRES[wire], overlap=True)
    alike = world.gather(plain) == [plain] * world.processes
    loss = [sum(each) for each in zip(*world.gather((first, last)), strict=True)]
    together(world, alike, plain == overlapped, loss[1] < loss[0])


DIFFERENCES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "more layers": (
        lambda: linear(4, 3, 4, 3),
        {},
        r"=nothing on rank 0, tensor 4 of model='2.weight of torch.float32\[3, 4\]",
    ),
    "shape": (lambda: linear(3, 4, 3), {}, r"model='0.weight of torch.float32\[3, 4\], requires"),
    "frozen": (lambda: linear(4, 3, 4)[:1].requires_grad_(False), {}, "no parameter requires"),
    "dtype": (lambda: linear(4, 3, 4).double(), {}, "weight is torch.float64 on cpu"),
    "overlap": (lambda: linear(4, 3, 4), {"overlap": True}, "overlap=True"),
    "buckets": (lambda: linear(4, 3, 4), {"bucket_mib": 1e-6}, "bucket_mib=1e-06"),
    "buffers": (lambda: linear(4, 3, 4), {"buffers": "mean"}, "buffers='mean'"),
    "wire": (
        lambda: linear(4, 3, 4),
        {"wire": "e5m2"},
        r"differ: aggregator\.wire='e4m3' on .*wire='e5m2'",
    ),
    "method": (
        lambda: linear(4, 3, 4),
        {"aggregator": "none"},
        "differ: type of aggregator=LowBit on rank 0, type of aggregator=NoCompression on",
    ),
    "wire of a layer": (
        lambda: linear(4, 3, 4),
        {"layers": {"0.*": "e5m2"}},
        r"differ: aggregator\.layers\['0\.\*'\]=nothing on rank 0, .*LayerWire\(wire='e5m2'",
    ),
    "unknown": (lambda: linear(4, 3, 4), {"wire": "e9m1"}, "exp is 1..8"),
    "module": (lambda: 3, {}, "TypeError: rank .* model is int: must be a torch.nn.Module"),
    "no parameters": (nn.ReLU, {}, "ValueError: rank .* model: no parameter requires a gradient"),
    "name": (lambda: linear(4, 3, 4), {"aggregator": None}, "aggregator=None: must be a name or"),
    "list": (lambda: linear(4, 3, 4), {"aggregator": []}, r"aggregator=\[\]: must be a name or"),
    "option": (lambda: linear(4, 3, 4), {"wyre": 1}, "unknown key wyre: did you mean wire"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_models_and_options_that_differ_are_told_on_all_ranks(world: World, name: str) -> None:
    model, options, says = DIFFERENCES[name]
    last = world.process == world.processes - 1
    how = {"aggregator": "lowbit", **(options if last else {})}
    error = said(lambda: GradientReducer(model() if last else linear(4, 3, 4), world, **how))
    together(world, re.search(says, error) is not None, len(set(world.gather(error))) == 1)


ATTRIBUTES: dict[str, tuple[str, Any, Any, str]] = {  # attribute, wrong and right value
    "word": ("loss_scale", "a", 1.0, "ValueError: rank .*loss_scale='a': must be a power of two"),
    "zero": ("loss_scale", 0, 1.0, "ValueError: rank .*loss_scale=0: must be a power of two"),
    "none": ("loss_scale", None, 1.0, "ValueError: rank .*loss_scale=None: must be a power"),
    "alike": ("alike", None, {}, "TypeError: rank .*alike is NoneType: must be a dict"),
    "below": ("loss_scale", -1, 1.0, "ValueError: rank .*loss_scale=-1: must be a power of two"),
    "three": ("loss_scale", 3.0, 1.0, "ValueError: rank .*loss_scale=3.0: must be a power of two"),
    "nan": ("loss_scale", math.nan, 1.0, "ValueError: rank .*loss_scale=nan: must be a power"),
    "epoch": ("epoch", "a", 0.0, "ValueError: rank .*epoch='a': must be a finite number, 0 or"),
    "before": ("epoch", -1, 0.0, "ValueError: rank .*epoch=-1: must be a finite number, 0 or more"),
    "later": ("epoch", 2.0, 0.0, "ValueError: .*arguments differ: epoch=0.0 .* epoch=2.0"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_one_rank_sets_wrong_is_told_by_the_next_step(world: World, name: str) -> None:
    """On all ranks, with gradients untouched; set right again the steps go on."""
    attribute, wrong, right, says = ATTRIBUTES[name]
    model = linear(4, 3)
    reducer = GradientReducer(model, world, "topk", density=0.5)
    for value in (right, wrong, right):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        setattr(reducer, attribute, value if world.process == world.processes - 1 else right)
        error = said(reducer.reduce)
        told = re.search(says, error) is not None if value is wrong else error == ""
        together(world, told, alike(world, error))


def widen(model: nn.Sequential) -> None:
    model[1].running_mean = torch.zeros(5)


CHANGED: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {  # buffers, after construction
    "wider": (widen, r"['1.running_mean']=12 on rank 0, {}['1.running_mean']=20 on rank "),
    "new": (
        lambda model: model[0].register_buffer("mask", torch.ones(2)),
        "['0.mask']=nothing on rank 0, {}['0.mask']=8 on rank ",
    ),
    "gone": (
        lambda model: model.pop(1),
        "['1.running_mean']=12 on rank 0, {}['1.running_mean']=nothing on rank ",
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", CHANGED)
def test_a_buffer_that_one_rank_has_changed_is_named_on_all(world: World, case: str) -> None:
    change, says = CHANGED[case]
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    reducer = GradientReducer(model, world)
    if world.process == world.processes - 1:
        change(model)
    error = said(reducer.reduce)
    told = f"bytes of buffers{says.format('bytes of buffers')}" in error
    together(world, told, alike(world, error))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_that_one_rank_has_deleted_is_named_on_all(world: World, overlap: bool) -> None:
    """Deleted on all ranks it counts as one that nobody uses; a frozen one may stay or go."""
    model, last = linear(4, 3, 3, 3), world.process == world.processes - 1
    reducer = GradientReducer(model, world, overlap=overlap)
    model[0].requires_grad_(False)
    errors = list[str]()
    for step in range(2):
        if last == (step == 0):
            del model[1]
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        errors.append(said(reducer.reduce))
    reducer.close()
    says = (
        "layers gone from the model=[] on rank 0, layers gone from the model=['1.weight', '1.bias']"
    )
    told = says in errors[0] or world.processes == 1
    together(world, told, alike(world, errors[0]), errors[1] == "")


def test_an_epoch_is_the_same_in_all_kinds_of_number(world: World) -> None:
    model = linear(4, 3)
    reducer = GradientReducer(model, world)
    kind: Any = int if world.process == 0 else np.float32
    reducer.epoch, reducer.loss_scale = kind(3), kind(4)
    together(world, said(reducer.reduce) == "")


@pytest.mark.mpi(min_size=2)
def test_a_reducer_that_one_rank_has_closed_is_told_on_all(world: World) -> None:
    last, reducer = world.process == world.processes - 1, GradientReducer(linear(4, 3), world)
    step: Any = 3 if last else reducer.reduce
    error = said(reducer.join(step).__enter__)
    told = "TypeError: rank" in error and "GradientReducer.join: step is int" in error
    together(world, told, alike(world, error))
    if last:
        reducer.close()
    error = said(reducer.reduce)
    together(world, "reduce: the reducer is closed" in error, alike(world, error))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", ["sparse", "unfrozen", "twice"])
def test_what_one_rank_finds_in_a_step_is_raised_on_all(
    world: World, fault: str, overlap: bool
) -> None:
    """And the next step goes well. A second backward adds up where nothing overlaps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=False), *linear(4, 3, 4))
    model[1].requires_grad_(False)
    last = world.process == world.processes - 1
    errors = []
    with GradientReducer(model, world, bucket_mib=1e-6, overlap=overlap) as reducer:
        for step in range(2):
            bad = last and step == 0
            model.zero_grad()
            model[0].sparse = bad and fault == "sparse"
            model[1].requires_grad_(bad and fault == "unfrozen")
            for _ in range(2 if bad and fault == "twice" else 1):
                model(torch.tensor([world.process % 5])).square().sum().backward()
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            errors.append(said(reducer.reduce))
            if step == 0 and errors[0]:
                kept = all(
                    a is p.grad or torch.equal(a.to_dense(), p.grad.to_dense())
                    for a, p in zip(before, model.parameters(), strict=True)
                )
    says = {
        "sparse": f"ValueError: .*gradient of '0.weight' on rank {world.size - 1} is torch.sparse",
        "unfrozen": f"ValueError: .*'1.weight' on rank {world.size - 1} requires a gradient and",
        "twice": f"RuntimeError: .* on rank {world.size - 1} has a second gradient before"
        * overlap,
    }[fault]
    told = re.search(says, errors[0]) is not None if says else errors[0] == ""
    together(world, told, errors[1] == "", not says or kept, alike(world, errors))


RESHAPED = {  # whether there is a gradient, of the new shape
    "both": True,
    "parameter": False,
    "unused": None,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", RESHAPED)
def test_a_layer_whose_shape_one_rank_has_changed_is_told_on_all(
    world: World, case: str, overlap: bool
) -> None:
    """And the next step goes well, once it has its shape again."""
    model, last = linear(4, 3), world.process == world.processes - 1
    reducer = GradientReducer(model, world, overlap=overlap)
    weight = model[0].weight
    values, errors = weight.data, []
    for step in range(2):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if last and step == 0:
            weight.data = torch.zeros(5, 5)
            if RESHAPED[case] is not False:
                weight.grad = torch.zeros(5, 5) if RESHAPED[case] else None
        errors.append(said(reducer.reduce))
        if last:
            weight.grad, weight.data = None, values
    reducer.close()
    who = f"on rank {world.size - 1} is torch.float32 on cpu of shape [5, 5]: should be dense"
    told = who in errors[0] and errors[0].startswith("ValueError: ") and "'0.weight'" in errors[0]
    together(world, told, errors[1] == "", alike(world, errors))


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("huge", ["all", "last"])
def test_values_near_the_largest_give_all_ranks_the_same_finite_mean_or_error(
    world: World, name: str, huge: str
) -> None:
    layer = nn.Linear(40, 40)
    reducer, verdicts = GradientReducer(layer, world, name), []
    is_huge = huge == "all" or world.process == world.processes - 1
    for _ in range(2):
        layer.weight.grad = torch.full((40, 40), 3e38 if is_huge else 1.0)
        layer.bias.grad = torch.ones(40)
        error = ""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                reducer.reduce()
            except NonFiniteGradient as found:
                error = str(found)
        finite = bool(torch.isfinite(layer.weight.grad).all())
        verdicts += [alike(world, error), finite, bool(error) or alike(world, bits(layer))]
    together(world, *verdicts)


def test_a_mean_that_the_loss_scale_takes_beyond_float32_is_told(world: World) -> None:
    layer = nn.Linear(4, 3)
    reducer = GradientReducer(layer, world)
    reducer.loss_scale = 2.0**-24
    layer.weight.grad, layer.bias.grad = torch.full((3, 4), 1e34), torch.ones(3)
    error = said(reducer.reduce)
    told = error == "NonFiniteGradient: allreduce: the mean is beyond float32 in 'weight'"
    together(world, told, bool((layer.weight.grad == 1e34).all()))


def alike(world: World, value: Any) -> bool:
    return world.gather(value) == [value] * world.processes


@pytest.mark.parametrize("overlap", [False, True])
def test_unused_layers_keep_none_on_all_ranks_or_get_the_mean_on_all(
    world: World, overlap: bool
) -> None:
    """Layer 1 is used by no rank, layer 2 by the first one alone, which counts as 1 of p."""
    torch.manual_seed(0)
    model = linear(3, 3, 3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    how: dict[str, Any] = {"bucket_mib": 1e-6, "overlap": overlap}
    verdicts = []
    with GradientReducer(model, world, **how) as reducer:
        for unused in ((), (1,)):
            optimizer.zero_grad()
            y = model[0](torch.ones(1, 3))
            y = y if unused else model[1](y)
            (model[2](y) if world.rank == 0 else y).sum().backward()
            own = (
                np.zeros((3, 3), np.float32) if world.rank else model[2].weight.grad.numpy().copy()
            )
            before = model[1].weight.detach().clone()
            reducer.reduce()
            mean = np.sum(world.gather(own), axis=0) / np.float32(world.size)
            verdicts.append(np.array_equal(model[2].weight.grad.numpy(), mean))
            verdicts.append((model[1].weight.grad is None) == bool(unused))
            optimizer.step()
            verdicts.append(torch.equal(model[1].weight.detach(), before) == bool(unused))
    together(world, *verdicts, alike(world, bits(model)))


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_run_out_of_batches_go_on_with_zeros(
    world: World, overlap: bool, by_all: bool
) -> None:
    """Rank r has r batches, beside a loop that sums the gradients in order and steps alike.

    Gradients of powers of two, so that every order and every division but by 3 has the same bits;
    a mean over 3 of 4 ranks is twice rounded: 2 u relative, which SGD adds to weights below 8.
    """
    model, plain = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0 + world.rank)
    plain.weight.data.fill_(1.0)
    statistics = nn.BatchNorm1d(2, momentum=1.0)
    model.add_module("statistics", statistics)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (model, plain)]
    how: dict[str, Any] = {"overlap": overlap, "bucket_mib": 1e-6}
    with GradientReducer(model, world, **how) as reducer:
        for _ in range(2):  # epochs
            with reducer.join(optimizers[0].step, divide_by_initial_world_size=by_all):
                for step in range(world.rank):
                    optimizers[0].zero_grad()
                    model(torch.full((1, 2), 2.0**step)).sum().backward()
                    with torch.no_grad():
                        statistics(torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + world.rank)
                    reducer.reduce()
                    optimizers[0].step()
            for step in range(world.size - 1):
                active = world.size - 1 - step
                size = 2.0**step * active / (world.size if by_all else active)
                plain.weight.grad = torch.full((1, 2), size)
                optimizers[1].step()
    far = float((model.weight - plain.weight).detach().abs().max())
    last = world.size - 1  # the only one in the last step: its statistics are all ranks'
    right = last == 0 or statistics.running_mean.tolist() == [1.0 + last, 2.0 + last]
    together(
        world,
        far <= 2 * world.size * 2.0**3 * U * (world.size > 2),
        right,
        reducer.iteration == 2 * (world.size - 1),
        alike(world, bits(model)),
    )


def test_a_rank_that_does_not_join_is_told(world: World) -> None:
    model = linear(2, 2)
    model[0].weight.grad, last = torch.ones(2, 2), world.process == world.processes - 1
    with GradientReducer(model, world) as reducer:

        def joining() -> None:
            with reducer.join(lambda: None):
                pass

        error = said(reducer.reduce if last and world.processes > 1 else joining)
    together(world, world.processes == 1 or ("calls differ: GradientReducer.join" in error))


def test_recorded_gradients_of_all_ranks_are_one_file(world: World, folder: Path) -> None:
    """And a directory that is not there is told on all ranks alike."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    with GradientReducer(model, world) as reducer:
        (model(torch.ones(1, 5)).sum() * (1 + world.rank)).backward()
        reducer.reduce()
        gradients_of.save(reducer, folder / "g.h5", 7)
        error = said(lambda: gradients_of.save(reducer, folder / "none" / "g.h5", 7))
    found = gradients_of.load(folder / "g.h5")
    own = np.arange(1.0, 1 + world.size)
    right = [
        found.layers[name].reshape(world.size, -1).T.tolist() == [own.tolist()] * p.numel()
        for name, p in model.named_parameters()
    ]
    told = "StoreError" in error and "none/g.h5: cannot be written" in error
    together(world, *right, told, alike(world, error))


def test_loss_scales_that_one_rank_has_or_none_may_have_are_told_on_all(world: World) -> None:
    reducer = GradientReducer(nn.Linear(2, 1), world)
    for scale, says in ((8.0, "LossScaler: arguments differ: scale=2.0"), (3.0, "power")):
        own = scale if world.rank == world.ranks - 1 else 2.0
        if world.ranks > 1 or own == 3.0:
            with pytest.raises(ValueError, match=says):
                LossScaler(reducer, own)


@pytest.mark.parametrize(
    ("aggregator", "kind"), [("lowbitt", ValueError), (3, TypeError)], ids=["name", "type"]
)
def test_an_aggregator_that_one_rank_refuses_is_refused_by_all(
    aggregator: Any, kind: type[Exception]
) -> None:
    world = World()
    given = aggregator if world.rank == world.size - 1 else "none"
    with refused("GradientReducer", "aggregator") as caught:
        GradientReducer(nn.Linear(2, 2), world, given)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_a_steady_step_takes_no_memory(world: World, wire: str, overlap: bool) -> None:
    """Not even pages that were given back: a buffer of the model would be 2,000 page faults."""
    if world.virtual_ranks > 1:
        pytest.skip("virtual ranks are copied")
    torch.manual_seed(0)
    model, faults = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), []
    how: dict[str, Any] = {"bucket_mib": 4.0, "overlap": overlap}
    with GradientReducer(model, world, **WIRES[wire], **how) as reducer:
        for step in range(8):
            model.zero_grad(set_to_none=False)
            x = torch.full((2, 1024), float(step))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            model(x).square().mean().backward()
            reducer.reduce()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    places = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    steady = faults[4:]
    together(world, len(places) == 1, min(steady) < (1400 if overlap else 300))


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_what_one_rank_finds_is_heard_though_the_call_is_known(world: World, wire: str) -> None:
    """From the third step on the first all-reduce compares what was found, too."""
    if world.virtual_ranks > 1 or world.ranks == 1:
        pytest.skip("for ranks of their own")
    model, odd = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), world.rank == 1
    reducer = GradientReducer(model, world, bucket_mib=1e-4, **WIRES[wire])

    def step(change: Callable[[], object] | None = None, unused: bool = False) -> str:
        model.zero_grad()
        x = torch.full((2, 8), 1.0 + world.rank)
        (model[1](x) if unused and odd else model(x)).sum().backward()
        if change is not None and odd:
            change()
        try:
            reducer.reduce()
        except (ArithmeticError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def differ() -> None:
        reducer.alike = {"batch": 3}

    def misfit() -> None:
        model[0].weight.grad = None
        model[0].weight.data = torch.zeros(3, 8)

    def resize() -> None:
        model[0].weight.data = torch.zeros(3, 8)

    def replace() -> None:
        model[0].weight.grad = model[0].weight.grad.clone()
        model[1].weight.grad.data = model[1].weight.grad.data.clone()

    def spoil() -> None:
        model[1].bias.grad[0] = torch.nan

    for _ in range(4):
        assert step() == ""
    means = [each.copy() for each in gradients(model)]
    verdicts = []
    for _ in range(2):
        verdicts += [step(unused=True) == "", model[0].weight.grad is not None]
        verdicts.append("alike" not in (said := step(differ)) and "batch" in said)
        reducer.alike = {}
        verdicts.append("NaN or infinity in '1.bias' on rank 1" in step(spoil))
        before = model[0].weight.data
        for change in (misfit, resize):
            verdicts += [step() == "", "'0.weight' on rank 1 is" in step(change)]
            model[0].weight.data = before
        verdicts += [step() == "", step(replace) == ""]
        verdicts.append(all(map(np.array_equal, gradients(model), means)))
    together(world, *verdicts)
