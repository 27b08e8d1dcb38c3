"""Real users' models on one process: odd tensors, layers that come and go, accumulation, saving."""

import copy
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from every import every
from networks import MODELS, batch
from reducing import backward, gradients, model_of
from torch import nn
from training import ran

import cpdhpc
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import COMPRESSORS, Aggregator, Context, Dgc, Mean, TopK
from cpdhpc.compress.bucket import Bucket
from cpdhpc.formats import TableFormat
from cpdhpc.torch.buffers import BufferMode, Survey
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback


class Odd(nn.Module):
    """Parameters and buffers of every kind that may be given and reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.last = nn.Parameter(torch.zeros(0))
        for name, value in {
            "count": torch.tensor(7),
            "flag": torch.tensor(True),
            "mask": torch.ones(2, 3).triu().bool().t(),
            "nothing": torch.zeros(0, dtype=torch.int32),
            "wave": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "short": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        }.items():
            self.register_buffer(name, value)


@every("overlap", [False, True])
@every("aggregator", COMPRESSORS)
def test_odd_parameters_and_buffers(aggregator: str, overlap: bool) -> None:
    """One value of 15, one of zeros, six of 2: every method gives them their shapes back."""
    for mode in get_args(BufferMode):
        model = Odd()
        before = copy.deepcopy(model.state_dict())
        how: dict[str, Any] = {"bucket_mib": 1e-6, "overlap": overlap, "buffers": mode}
        with GradientReducer(model, Loopback(), aggregator, **how) as reducer:
            (model.scalar * model.turned.sum() + model.empty.sum() + model.last.sum()).backward()
            mean = reducer.reduce()
        assert [tuple(p.grad.shape) for p in model.parameters()] == [(), (0, 3), (3, 2), (0,)]
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        seen = reducer.aggregator.observe(reducer.flats[0], reducer.bucket, mean)
        assert all(counts.shape == (4,) for counts in seen.values())
        if aggregator in ("none", "lowbit"):  # of which e4m3 has both values
            assert float(model.scalar.grad) == 15
            assert torch.equal(model.turned.grad, torch.full((3, 2), 2.0))
            assert not any(counts.any() for counts in seen.values())


def reduced(reducer: GradientReducer, step: int = 0) -> None:
    backward(reducer.model, step)
    reducer.reduce()


@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_layers_stay_and_unfrozen_or_new_ones_are_refused(overlap: bool) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with GradientReducer(model, Loopback(), overlap=overlap) as reducer:
        reduced(reducer)
        optimizer.step()
        model[2].requires_grad_(False)
        reduced(reducer)
        kept = model[2].weight.clone(), model[0].weight.clone()
        optimizer.step()
        assert model[2].weight.grad is None and model[0].weight.grad is None
        assert torch.equal(model[2].weight, kept[0]) and torch.equal(model[0].weight, kept[1])
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"reduce: model: '0\.weight' on rank 0 requires a gr"):
            reduced(reducer)
        model[0].requires_grad_(False)
        model.append(nn.Linear(3, 3))
        with pytest.raises(ValueError, match=r"'4\.weight' on rank 0 requires a gradient and did"):
            reduced(reducer)
        del model[4]
        reduced(reducer)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_other_kinds_are_named(overlap: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with GradientReducer(model, Loopback(), overlap=overlap) as reducer:
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"'0\.weight' on rank 0 is torch\.sparse_coo of"):
            reducer.reduce()
        assert model[0].weight.grad.is_sparse
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = nn.Linear(2, 2)
        reducer = GradientReducer(model, Loopback())
        model.to(dtype)
        model.weight.grad = torch.ones_like(model.weight)
        with pytest.raises(ValueError, match=rf"gradient of 'weight' on rank 0 is {dtype} on cpu"):
            reducer.reduce()


@every(
    ("change", "says"),
    [
        (lambda model: model.to("meta"), "0.weight is torch.float32 on meta: should be dense"),
        (lambda model: model.append(nn.LazyLinear(2)), "8.weight is not initialised"),
        (lambda model: model[3].double(), "3.weight is torch.float64 on cpu"),
        (
            lambda model: model.register_buffer("b", torch.zeros(1).expand(3)),
            r"b has strides \(0,\)",
        ),
        (
            lambda model: model.register_buffer("b", torch.eye(2).to_sparse()),
            "b is torch.sparse_coo of torch.float32 on cpu: should be dense on cpu",
        ),
    ],
)
def test_tensors_that_cannot_be_given_are_named(change: Any, says: str) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    change(model)
    with pytest.raises(ValueError, match=says):
        GradientReducer(model, Loopback())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_accumulated_gradients_are_plain_torchs(name: str, overlap: bool) -> None:
    """On one rank the mean is the gradient: three backwards, the first two without any sending."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with GradientReducer(model, Loopback(), bucket_mib=0.001, overlap=overlap) as reducer:
        plain = copy.deepcopy(model)
        for step in range(2):
            for each in (model, plain):
                each.zero_grad()
            for part in range(3):
                x, y = batch(name, 10 * step + part)
                nn.functional.cross_entropy(plain(x), y).backward()
                if part < 2:
                    with reducer.no_sync():
                        nn.functional.cross_entropy(model(x), y).backward()
                else:
                    nn.functional.cross_entropy(model(x), y).backward()
            reducer.reduce()
            assert gradients(model) == gradients(plain)
            for a, b in zip(model.buffers(), plain.buffers(), strict=True):
                assert torch.equal(a, b)


def statistics_of(model: nn.Module, ranks: int, **how: Any) -> list[list[np.ndarray]]:  # type: ignore[type-arg]
    """The running mean, variance and count after each of two steps on virtual ranks."""
    reducer, found = GradientReducer(model, Loopback(ranks), **how), []
    for step in range(2):
        for hosted in range(ranks):
            reducer.begin(hosted)
            model.zero_grad()
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * step + hosted))
            model(x).sum().backward()
            reducer.stash(hosted)
        reducer.reduce()
        found.append([b.numpy().copy() for b in model.buffers()])
    return found


def test_buffers_of_virtual_ranks_are_the_first_ones_or_the_mean() -> None:
    """Beside each rank's own BatchNorm, which begins a step with what all had before."""
    mine = nn.BatchNorm1d(2)
    for mode in ("broadcast", "mean"):
        found = statistics_of(copy.deepcopy(mine), 3, buffers=mode)
        before = [b.clone() for b in mine.buffers()]
        for step in range(2):
            after = []
            for rank in range(3):
                own = copy.deepcopy(mine)
                for buffer, value in zip(own.buffers(), before, strict=True):
                    buffer.copy_(value)
                own(torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * step + rank)))
                after.append([b.clone() for b in own.buffers()])
            before = after[0]
            if mode == "mean":
                several = [torch.stack(each).double() for each in zip(*after, strict=True)]
                before = [s.mean(0).to(b.dtype) for s, b in zip(several, before, strict=True)]
            for got, expected in zip(found[step], before, strict=True):
                # float64 sums of three float32 in either order round to the same float32, but for
                # ties: 2**-24 relative
                np.testing.assert_allclose(got, expected.numpy(), rtol=2.0**-23 * (mode == "mean"))
    with pytest.raises(ValueError, match="buffers='none': virtual_ranks=2: should be 1"):
        GradientReducer(mine, Loopback(2), buffers="none")
    with pytest.raises(ValueError, match="buffers='all': known are 'broadcast', 'mean', 'none'"):
        GradientReducer(mine, Loopback(), buffers="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [TopK(density=0.1), Dgc()], ids=lambda method: method.aggregator)
def test_a_saved_method_goes_on_where_it_was(method: Aggregator, tmp_path: Path) -> None:
    """Through torch.save, at the same number of ranks and at another one, where the sum is kept."""

    def steps(reducer: GradientReducer, which: range) -> list[bytes]:
        found = []
        for step in which:
            for hosted in range(reducer.world.ranks):
                backward(reducer.model, 10 * step + hosted)
                reducer.stash(hosted)
            found.append(reducer.reduce().flat.tobytes())
        return found

    def made(ranks: int) -> GradientReducer:
        return GradientReducer(model_of(), Loopback(ranks), method)

    first = made(2)
    steps(first, range(2))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    undisturbed = steps(first, range(2, 4))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = made(2)
    again.load_state_dict(state)
    assert again.iteration == 2
    assert steps(again, range(2, 4)) == undisturbed
    fewer = made(1)
    fewer.load_state_dict(state)
    for key, entry in fewer.state:
        total = state["state"]["/".join(key)]["values"]
        if entry.redistribution is not None:
            total = total.double().sum(0, keepdim=True).float()
        assert np.array_equal(entry.array, total.numpy())
    half = {**state, "rank": 2, "ranks": 4}
    for bad in ((), (half,), (state, state), ({},)):
        with pytest.raises(ValueError, match=r"GradientReducer\.load_state_dict: "):
            made(1).load_state_dict(*bad)


@every("overlap", [False, True])
def test_defaults_of_torch_change_nothing(overlap: bool) -> None:
    """As float64 and another device for what a program makes without saying so."""
    model, plain = model_of(), model_of()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        with GradientReducer(model, Loopback(), "topk", overlap=overlap) as reducer:
            for each in (model, plain):
                each(torch.ones(1, 8, dtype=torch.float32, device="cpu")).sum().backward()
            reducer.reduce()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    reducer = GradientReducer(plain, Loopback(), "topk")
    reducer.reduce()
    assert gradients(model) == gradients(plain)


def frozen(names: str) -> nn.Sequential:
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name[0] not in names)
    return model


@every("name", COMPRESSORS)
def test_a_state_goes_on_where_other_layers_are_frozen(name: str) -> None:
    """Layers averaged in both go on as if nothing were; what waits of a frozen one is handed on."""

    def steps(reducer: GradientReducer, which: range) -> None:
        for step in which:
            reduced(reducer, step)

    before = GradientReducer(model_of(), Loopback(), name)
    steps(before, range(2))
    saved = copy.deepcopy(before.state_dict())
    during = GradientReducer(frozen("1"), Loopback(), name)
    during.load_state_dict(saved)
    again = copy.deepcopy(during.state_dict())
    assert again["state"].keys() == saved["state"].keys()
    steps(during, range(2, 3))
    assert during.iteration == 3
    later = GradientReducer(model_of(), Loopback(), name)
    later.load_state_dict(during.state_dict())
    for key, entry in saved["state"].items():
        if key.startswith("1."):  # held, unused, for as long as the layer was frozen
            kept = later.state_dict()["state"][key]["values"]
            assert torch.equal(kept, entry["values"]), key
    steps(later, range(3, 4))
    assert all(p.grad is not None for p in later.model.parameters())


def test_a_state_made_with_a_frozen_layer_goes_on_with_it() -> None:
    """The layer begins without memory; another model is refused by the layer's name."""
    made = GradientReducer(frozen("1"), Loopback(), "topk")
    reduced(made)
    saved = made.state_dict()
    for model in (frozen(""), frozen("2"), frozen("1")):
        reducer = GradientReducer(model, Loopback(), "topk")
        reducer.load_state_dict(saved)
        reduced(reducer)
        assert reducer.iteration == 2
    del saved["frozen"]  # as older versions saved it
    GradientReducer(frozen("1"), Loopback(), "topk").load_state_dict(saved)
    with pytest.raises(ValueError, match=r"layers of the state: '1\.weight': none: here of shape"):
        GradientReducer(frozen(""), Loopback(), "topk").load_state_dict(saved)
    other = frozen("")
    other.append(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'4\.weight': none: here of shape \[3, 3\]"):
        GradientReducer(other, Loopback(), "topk").load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="not a mapping"):
        GradientReducer(other, Loopback(), "topk").load_state_dict(saved | {"layers": 3})


@every("overlap", [False, True])
def test_what_waits_moves_no_frozen_layer(overlap: bool) -> None:
    model = model_of()
    with GradientReducer(model, Loopback(), "topk", density=0.1, overlap=overlap) as reducer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model[1].requires_grad_(step in (0, 3))
            reduced(reducer, step)
            before = model[1].weight.detach().clone()
            optimizer.step()
            assert torch.equal(model[1].weight, before) == (step in (1, 2))
            assert (model[1].weight.grad is None) == (step in (1, 2))


def test_allreduce_takes_tensors() -> None:
    xs = [torch.arange(4.0) + rank for rank in range(2)]
    world = Loopback(2)
    total = cpdhpc.allreduce(world, xs)
    assert isinstance(total, torch.Tensor) and total.tolist() == [1, 3, 5, 7]
    out = torch.zeros(4)
    assert cpdhpc.allreduce(world, xs, "e4m3", out=out) is out and out.tolist() == [1, 3, 5, 7]
    assert cpdhpc.allreduce(world, xs, op="mean", out=xs[0]) is xs[0]  # in place
    assert xs[0].tolist() == [0.5, 1.5, 2.5, 3.5] and xs[1].tolist() == [1, 2, 3, 4]
    whole = torch.ones(3, 4)
    for x, says in (
        (whole.t(), "allreduce: x has strides"),
        (whole.double(), "allreduce: x has dtype float64"),
        (whole.bfloat16(), "is a tensor of torch.bfloat16"),
        (whole.to("meta"), "on meta"),
        (whole.to_sparse(), "torch.sparse_coo"),
        (whole.clone().requires_grad_(), "that requires a gradient: must be .* .detach"),
    ):
        with pytest.raises(TypeError, match=says):
            cpdhpc.allreduce(Loopback(), x)


@every("name", ["lowbit", "topk", "randomk", "onebit", "powersgd", "strom"])
def test_what_waits_is_not_lost_in_a_step_without_the_layer(name: str) -> None:
    """Sent and kept are the gradient and what was kept, also where no rank used the layer."""
    options = {"lowbit": {"wire": "e3m0", "error_feedback": True}, "strom": {"tau": 0.5}}
    model = torch.nn.ModuleDict({x: torch.nn.Linear(9, 40, bias=False) for x in "ab"})
    reducer = GradientReducer(model, Loopback(), name, **options.get(name, {}))
    given = torch.from_numpy(np.random.default_rng(5).standard_normal((40, 9)).astype(np.float32))
    arrived = torch.zeros(40, 9, dtype=torch.float64)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        model["b"].weight.grad = given.clone()
        if not step:
            model["a"].weight.grad = given.clone()
        reducer.reduce()
        found = model["a"].weight.grad
        arrived += 0 if found is None else found.double()
    kept = {name: entry.array for (layer, name), entry in reducer.state if layer == "a.weight"}
    waiting = torch.from_numpy(kept["residual"].astype(np.float64)).reshape(40, 9)
    # four steps of an addition and a subtraction of numbers below 8
    assert (arrived + waiting - given).abs().max() <= 8 * 8 * 2.0**-24


@every(
    ("options", "says"),
    [
        ({"seed": None}, "seed=None: must be an integer"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": -1}, "seed=-1: must be 0 or more"),
        ({"overlap": "x"}, "overlap='x': must be True or False"),
        ({"bucket_mib": None}, "bucket_mib=None: must be a number"),
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(f"GradientReducer: {says}")):
        GradientReducer(torch.nn.Linear(2, 2), Loopback(), **options)


@every("aggregator", ["topk", "powersgd", "onebit"])
def test_nan_in_the_last_of_several_buckets_moves_no_memory(aggregator: str) -> None:
    """In a first step and in a later one; the run goes on as if the step had not been."""
    found = []
    for poisoned in ((), (0, 2)):
        model = model_of()
        reducer = GradientReducer(model, Loopback(2), aggregator, bucket_mib=1e-6)
        for step in range(4):
            if step in poisoned:
                for hosted in range(2):
                    backward(model, step)
                    model[0].weight.grad[0, 0] = torch.nan if hosted else 0.0
                    reducer.stash(hosted)
                with pytest.raises(NonFiniteGradient, match=r"'0\.weight' on rank 1"):
                    reducer.reduce()
            for hosted in range(2):
                backward(model, step)
                reducer.stash(hosted)
            reducer.reduce()
        found.append((gradients(model), [(k, e.array.tobytes()) for k, e in reducer.state]))
    assert found[0] == found[1] and found[0][1]


@dataclass(frozen=True)
class Keeping(Aggregator):
    """Returns what it keeps, or the very gradient that it was given."""

    keeps: bool

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        if not self.keeps:
            return Mean(gradients[0])
        (kept,) = context.state.own(bucket.names[0], "sum", (bucket.size,))
        kept += gradients[0]
        return Mean(kept)


@every("bucket_mib", [25.0, 1e-6])
@every("keeps", [False, True])
def test_changed_gradients_change_nothing_else(keeps: bool, bucket_mib: float) -> None:
    """As clipping does: not what is kept; the mean that was returned is p.grad's memory."""
    model = model_of()
    reducer = GradientReducer(model, Loopback(), Keeping(keeps), bucket_mib=bucket_mib)
    for step in range(1, 3):
        backward(model, 0)
        given = np.concatenate([p.grad.numpy().ravel().copy() for p in model.parameters()])
        mean = reducer.reduce()
        found = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
        expected = step * given if keeps else given  # twice a float32 is exact
        assert np.array_equal(found, expected) and np.array_equal(mean.flat, expected)
        for parameter in model.parameters():
            parameter.grad.fill_(torch.nan)
        assert np.isnan(mean.flat).all()


def memory(model: nn.Module) -> list[tuple[int, int]]:
    """Return which storage each gradient is in, and where."""
    found = [(p.grad.untyped_storage().data_ptr(), p.grad.data_ptr()) for p in model.parameters()]
    assert len({storage for storage, _ in found}) == 1
    return found


@every("to_none", [False, True])
@every("overlap", [False, True])
def test_gradients_live_where_they_are_sent_from(overlap: bool, to_none: bool) -> None:
    """From the first backward on, whichever way they are set to zero; the mean is in another."""
    model = model_of()
    with GradientReducer(model, Loopback(), overlap=overlap, bucket_mib=0.001) as reducer:
        places = []
        for step in range(4):
            model.zero_grad(set_to_none=to_none)
            for last in (False, True):
                with nullcontext() if last else reducer.no_sync():
                    model(torch.ones(2, 8)).square().sum().backward()
                places.append(memory(model))
            own = gradients(model)
            mean = reducer.reduce()
            assert gradients(model) == own  # of one rank
            assert mean.flat.ctypes.data == min(at for _, at in memory(model))
            assert b"".join(own) == mean.flat.tobytes() == reducer.flats[0].tobytes(), step
            places.append(memory(model))
    here, there = places[0], places[2]
    assert here != there
    assert places == [here, here, there, there, there, here] * 2


def test_gradients_may_be_given_changed_or_converted() -> None:
    """Whatever p.grad is when reduce() looks, that is averaged; the reducer has its own memory."""
    for change in (
        lambda p: setattr(p, "grad", p.grad * 2),
        lambda p: p.grad.mul_(2),
        lambda p: setattr(p.grad, "data", p.grad.data * 2),  # as model.to() does
        lambda p: setattr(p, "grad", (p.grad * 2).requires_grad_()),
        lambda p: setattr(p, "grad", (2 * p.grad.t().contiguous()).t()),
    ):
        model = model_of()
        reducer = GradientReducer(model, Loopback())
        for step in range(3):
            backward(model, step)
            expected = [
                2 * p.grad.numpy() if p.dim() == 2 else p.grad.numpy().copy()
                for p in model.parameters()
            ]
            for p in model.parameters():
                if p.dim() == 2:
                    change(p)
            reducer.reduce()
            assert gradients(model) == [each.tobytes() for each in expected]
            memory(model)


def test_gradients_may_lie_where_others_of_the_buffer_belong() -> None:
    """Two layers' p.grad are exchanged, and a square one is turned, all in the reducer's memory."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    a, b, c = model.parameters()
    reducer = GradientReducer(model, Loopback())
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        a.grad, b.grad, c.grad = b.grad, a.grad, c.grad.t()
        expected = [p.grad.clone() for p in (a, b, c)]
        reducer.reduce()
        assert all(map(torch.equal, [p.grad for p in (a, b, c)], expected)), step
        memory(model)


def test_a_graph_of_gradients_is_kept_until_reduce() -> None:
    model = nn.Linear(3, 1, bias=False)
    reducer = GradientReducer(model, Loopback())
    with pytest.warns(UserWarning, match="create_graph=True"):
        (model.weight**3).sum().backward(create_graph=True)
    assert model.weight.grad.requires_grad
    (second,) = torch.autograd.grad(model.weight.grad.sum(), model.weight)
    assert torch.equal(second, 6 * model.weight.detach())
    reducer.reduce()
    assert torch.equal(model.weight.grad, 3 * model.weight.detach() ** 2)


def test_a_frozen_gradient_leaves_the_buffer_as_it_was() -> None:
    model = model_of()
    reducer = GradientReducer(model, Loopback())
    reduced(reducer)
    model[1].requires_grad_(False)
    kept = model[1].weight.grad.clone()
    for step in range(3):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = None
        model(torch.full((2, 8), float(step))).sum().backward()
        flat = reducer.reduce().flat
        assert torch.equal(model[1].weight.grad, kept)
        assert not reducer.bucket.views(flat)[2].any()
        assert not reducer.bucket.views(reducer.flats[0])[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_few_bits_are_in_one_place_and_no_error_touches_them(dtype: torch.dtype) -> None:
    model = model_of()
    model[1].to(dtype)
    reducer = GradientReducer(model, Loopback(2))
    places, most = set(), torch.finfo(dtype).max
    reducer.loss_scale = 0.5
    for size in (0.25, most / 4, 0.25):
        for hosted in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, size if p.dtype is dtype else 0.25)
            reducer.stash(hosted)
        before = [2 * p.grad for p in model.parameters()]
        if size > 1:
            before = [p.grad.clone() for p in model.parameters()]
            reducer.flats[0][reducer.bucket.segments[2].start] = 0.753 * most
            # whose mean with the other one, over the scale, is 1.003 times the most
            with pytest.raises(NonFiniteGradient, match=rf"beyond {str(dtype)[6:]} in '1\.weight'"):
                reducer.reduce()
            assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
        else:
            reducer.reduce()
            assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
            places.add(model[1].weight.grad.data_ptr())
    assert len(places) == 1


def test_what_lies_between_layers_is_zero_for_formats_without_zero() -> None:
    """Their tile is shared: what one step leaves there would be added in the next one."""
    signs = TableFormat("signs", [0.5, -0.5, 1, -1])
    model = model_of()
    reducer = GradientReducer(model, Loopback(), "lowbit", wire=signs)
    for step in range(3):
        backward(model, step)
        fresh = GradientReducer(copy.deepcopy(model), Loopback(), "lowbit", wire=signs)
        for p, q in zip(model.parameters(), fresh.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        fresh.reduce()
        reducer.reduce()
        assert gradients(model) == gradients(fresh.model)


BEYOND_AN_ALL_REDUCE = 13  # modules of the package
UNNEEDED = {"pydantic", "rich", "h5py", "matplotlib", "scipy"}


@pytest.mark.parametrize(("aggregator", "wire"), [("none", "raw"), ("lowbit", "e4m3")])
def test_a_reduce_loads_its_own_method_only(aggregator: str, wire: str) -> None:
    program = (
        "import sys, numpy, torch, cpdhpc\n"
        "from cpdhpc.torch import GradientReducer\n"
        "aggregator, wire = sys.argv[1:]\n"
        "cpdhpc.allreduce(cpdhpc.World(), numpy.ones(9, numpy.float32), wire=wire)\n"
        "before = {*sys.modules}\n"
        "model = torch.nn.Linear(2, 2)\n"
        "reducer = GradientReducer(model, cpdhpc.World(), aggregator)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "reducer.reduce()\n"
        "print(*({*sys.modules} - before))\n"
    )
    command = [sys.executable, "-c", program, aggregator, wire]
    done = ran(command, check=True)
    loaded = done.stdout.split()
    ours = sorted(name for name in loaded if name.partition(".")[0] == "cpdhpc")
    assert f"cpdhpc.compress.{aggregator}" in ours
    assert len(ours) <= BEYOND_AN_ALL_REDUCE, ours
    assert not {*loaded} & UNNEEDED


CHANGES: dict[str, Any] = {
    "a frozen parameter": lambda m: m[0].weight.requires_grad_(False),
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a new parameter": lambda m: m.register_parameter("new", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda m: m[0].register_parameter("bias", None),
    "another buffer": lambda m: setattr(m[1], "running_mean", torch.ones(2)),
    "a new buffer": lambda m: m[0].register_buffer("new", torch.ones(1)),
    "a new module": lambda m: m.append(nn.Identity()),
    "another module": lambda m: m.__setitem__(2, nn.Tanh()),
    "a module less": lambda m: m.__delitem__(2),
    "modules in another order": lambda m: m._modules.update({"0": m._modules.pop("0")}),
    "another dict": lambda m: m[0].__dict__.update(_parameters={}),
}


@every("change", CHANGES)
def test_a_survey_notices_each_change(change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    survey = Survey(model)
    model.eval()
    model[0].weight.data.add_(1)
    assert survey.is_current()
    CHANGES[change](model)
    assert not survey.is_current()
