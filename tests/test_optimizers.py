"""Optimisers beside the papers' equations in NumPy, and schedules beside numbers by hand."""

import copy
import math
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from pydantic import ValidationError

import cpdhpc.lab.train
from cpdhpc.config import validate
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.optimizers import OPTIMIZERS, Exclude
from cpdhpc.ops.cpu import square_sum, step_layers
from cpdhpc.torch import AdamP, Lamb, Larc, Lars, NovoGrad, optimizers
from cpdhpc.torch.controllers import DECAYS, DEFAULT_RATE, BySchedule, Schedule, Scheduled, Settings
from cpdhpc.torch.controllers.adaptive import ByAdaptiveBatch, ByNoiseScale
from cpdhpc.torch.controllers.autowu import ByAutoWu
from cpdhpc.torch.optimizers import EXCLUDES

Array = np.ndarray[Any, np.dtype[np.float64]]
STEPS = 4
# Equations in float64 on both sides: a step has some 40 roundings, of numbers below 100.
CLOSE = STEPS * 40 * 100 * np.finfo(np.float64).eps


def layers(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    """Weights of two dimensions, of four, a bias; zeros, which have no norm; none at all."""
    rng = np.random.default_rng(3)
    shapes = [(5, 7), (4, 3, 2, 2), (6,), (0, 3)]
    found = [torch.from_numpy(rng.standard_normal(s)) for s in shapes]
    return [torch.nn.Parameter(x.to(dtype)) for x in (*found, torch.zeros(2, 2))]


def gradients(step: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(100 + step)
    return [torch.from_numpy(rng.standard_normal(tuple(p.shape))) for p in layers()]


def give(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Let parameters have the gradients of a step, in their dtype."""
    for p, g in zip(parameters, gradients(step), strict=True):
        p.grad = g.to(p.dtype, copy=True)


def trained(
    make: Any, scales: tuple[float, ...] = (1, 1, 1, 1, 1), dtype: torch.dtype = torch.float64
) -> list[Array]:
    """Weights after STEPS steps, with each layer's gradient times a scale."""
    parameters = layers(dtype)
    optimizer = make(parameters)
    for step in range(STEPS):
        for p, g, scale in zip(parameters, gradients(step), scales, strict=True):
            p.grad = (g * scale).to(dtype)
        optimizer.step()
    return [p.detach().numpy().copy() for p in parameters]


def by_hand(rule: Any) -> list[Array]:
    """The same with rule(w, g, state, step from 1, adapted) -> w, layer by layer."""
    weights, states = [p.detach().numpy().copy() for p in layers()], [{} for _ in layers()]
    for step in range(STEPS):
        for i, g in enumerate(gradients(step)):
            weights[i] = rule(weights[i], g.numpy(), states[i], step + 1, weights[i].ndim > 1)
    return weights


def size(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


def lars(w: Array, g: Array, state: dict[str, Array], t: int, adapted: bool) -> Array:
    rate, decay = 1.0, 0.0
    if adapted:
        decay = 0.1
        rate = 0.02 * size(w) / (size(g) + decay * size(w)) if size(w) and size(g) else 1.0
    state["v"] = 0.8 * state.get("v", np.zeros_like(w)) + 0.3 * rate * (g + decay * w)
    return w - state["v"]


def larc(w: Array, g: Array, state: dict[str, Array], t: int, adapted: bool) -> Array:
    if adapted:
        below = size(g) + 0.1 * size(w)
        local = 0.2 * size(w) / below if size(w) and below else 0.3
        g = (g + 0.1 * w) * min(local / 0.3, 1.0)
    state["v"] = 0.8 * state.get("v", np.zeros_like(w)) + g
    return w - 0.3 * state["v"]


def adam(w: Array, g: Array, state: dict[str, Array], t: int, eps: float) -> Array:
    state["m"] = 0.7 * state.get("m", np.zeros_like(w)) + 0.3 * g
    state["s"] = 0.9 * state.get("s", np.zeros_like(w)) + 0.1 * g * g
    return (state["m"] / (1 - 0.7**t)) / (np.sqrt(state["s"] / (1 - 0.9**t)) + eps)


def lamb(w: Array, g: Array, state: dict[str, Array], t: int, adapted: bool) -> Array:
    step, rate = adam(w, g, state, t, 1e-3), 1.0
    if adapted:
        step = step + 0.1 * w
        rate = size(w) / size(step) if size(w) and size(step) else 1.0
    return w - 0.3 * rate * step


def novograd(w: Array, g: Array, state: dict[str, Any], t: int, adapted: bool) -> Array:
    state["v"] = size(g) ** 2 if t == 1 else 0.9 * state["v"] + 0.1 * size(g) ** 2
    unit = g / (math.sqrt(state["v"]) + 1e-3) + (0.1 * w if adapted else 0)
    state["m"] = 0.7 * state.get("m", np.zeros_like(w)) + unit
    return w - 0.3 * state["m"]


def adamp(w: Array, g: Array, state: dict[str, Array], t: int, adapted: bool) -> Array:
    step, decay = adam(w, g, state, t, 1e-3), 0.1 if adapted else 0.0
    if not adapted or not w.size:
        return (1 - 0.3 * decay) * w - 0.3 * step
    for rows in (w.reshape(len(w), -1), w.reshape(1, -1)):
        parts = g.reshape(rows.shape), step.reshape(rows.shape)
        pairs = list(zip(rows, *parts, strict=True))
        cosines = [
            abs(row @ part) / (size(row) * size(part)) if size(row) else 0.0
            for row, part, _ in pairs
        ]
        if max(cosines) < 2.0 / math.sqrt(rows.shape[1]):
            units = [row / size(row) if size(row) else row for row, _, _ in pairs]
            moved = [m - u * (u @ m) for u, (_, _, m) in zip(units, pairs, strict=True)]
            return (1 - 0.3 * 0.1 * 0.25) * w - 0.3 * np.array(moved).reshape(w.shape)
    return (1 - 0.3 * 0.1) * w - 0.3 * step


MOMENTS = {"lr": 0.3, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.1}
EQUATIONS = {
    "lars": (lars, lambda p: Lars(p, 0.3, 0.8, 0.1, trust=0.02)),
    "larc": (larc, lambda p: Larc(p, 0.3, 0.8, 0.1, trust=0.2)),
    "lamb": (lamb, lambda p: Lamb(p, **MOMENTS)),
    "novograd": (novograd, lambda p: NovoGrad(p, **(MOMENTS | {"betas": (0.7, 0.9)}))),
    "adamp": (adamp, lambda p: AdamP(p, **MOMENTS, delta=2.0, decay_share=0.25)),
}


@every("name", EQUATIONS)
def test_steps_are_those_of_the_paper(name: str) -> None:
    rule, make = EQUATIONS[name]
    for got, wanted in zip(trained(make), by_hand(rule), strict=True):
        assert np.abs(got - wanted).max(initial=0) <= CLOSE
    assert set(EQUATIONS) == OPTIMIZERS.keys() - {"sgd", "adam", "adamw"}


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call gave to the kernels."""
    counts: list[int] = []

    def counted(rule: str, layers: Any, numbers: Any, threads: int) -> None:
        assert threads == torch.get_num_threads()
        counts.append(len(layers))
        step_layers(rule, layers, numbers, threads)

    monkeypatch.setattr(optimizers, "step_layers", counted)
    return counts


# The same roundings, of float32; inputs are rounded, too
CLOSE32 = STEPS * 41 * 100 * float(np.finfo(np.float32).eps)


@every("name", EQUATIONS)
def test_kernels_and_torch_take_the_steps_of_the_paper(
    name: str, by_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, make = EQUATIONS[name]
    by_kernels.clear()
    compiled = trained(make, dtype=torch.float32)
    assert by_kernels == [4] * STEPS
    monkeypatch.setattr(optimizers, "memory_in_order", lambda tensors: None)
    plain = trained(make, dtype=torch.float32)
    assert by_kernels == [4] * STEPS
    for got, other, wanted in zip(compiled, plain, by_hand(rule), strict=True):
        assert got.dtype == other.dtype == np.float32
        assert np.abs(got - wanted).max(initial=0) <= CLOSE32
        assert np.abs(got - other).max(initial=0) <= CLOSE32


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS: dict[str, tuple[Any, Any, bool]] = {  # of weights and of gradients; whether compiled
    "dense": (torch.clone, torch.clone, True),
    "channels last": (last, last, True),
    "channels last, not the gradient": (last, torch.clone, False),
    "the gradient alone": (torch.clone, last, False),
    "transposed": (turned, turned, False),
    "a part of rows": (lambda x: torch.cat([x, x], 3)[..., :2], torch.clone, False),
    "a part of a buffer": (lambda x: torch.cat([x, x])[4:], lambda x: torch.cat([x, x])[:4], True),
}


@every("name", EQUATIONS)
@every("layout", LAYOUTS)
def test_any_layout_of_weights_and_gradients(name: str, layout: str, by_kernels: list[int]) -> None:
    of_weights, of_gradients, compiled = LAYOUTS[layout]
    rng = np.random.default_rng(5)
    first = torch.from_numpy(rng.standard_normal((4, 3, 2, 2)).astype("f4"))
    slopes = [torch.from_numpy(rng.standard_normal((4, 3, 2, 2)).astype("f4")) for _ in range(3)]
    ours, plain = (torch.nn.Parameter(each) for each in (of_weights(first), first.clone()))
    by_kernels.clear()
    for p, change in ((ours, of_gradients), (plain, torch.clone)):
        optimizer = EQUATIONS[name][1]([p])
        for slope in slopes:
            p.grad = change(slope)
            optimizer.step()
    assert by_kernels == [1] * (6 if compiled else 3)
    assert (ours - plain).abs().max() <= CLOSE32
    if layout in ("dense", "a part of a buffer"):
        assert torch.equal(ours, plain)


@every("name", EQUATIONS)
def test_other_dtypes_subclasses_and_devices_are_torchs(name: str, by_kernels: list[int]) -> None:
    by_kernels.clear()

    class Own(torch.Tensor):
        pass

    kinds: dict[str, torch.nn.Parameter] = {
        "bfloat16": torch.nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16)),
        "float64": torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64)),
        "subclass": torch.nn.Parameter(torch.ones(3, 3).as_subclass(Own)),
        "meta": torch.nn.Parameter(torch.ones(3, 3, device="meta")),
    }
    for kind, p in kinds.items():
        if kind == "meta" and name == "adamp":
            continue  # it asks for values
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        EQUATIONS[name][1]([p]).step()
        assert kind == "meta" or not torch.equal(p.detach(), before)
    assert not by_kernels


@every("name", EQUATIONS)
def test_what_the_former_version_kept_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stepped by torch's operations, and wrote what they keep."""
    make, steps = EQUATIONS[name][1], range(2)
    runs = {}
    for former in (True, False):
        parameters = layers(torch.float32)
        optimizer = make(parameters)
        with monkeypatch.context() as patched:
            if former:
                patched.setattr(optimizers, "memory_in_order", lambda tensors: None)
            for step in steps:
                give(parameters, step)
                optimizer.step()
        runs[former] = parameters, optimizer.state_dict()
    (parameters, kept), (others, now) = runs[True], runs[False]
    for index, state in now["state"].items():
        assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
            k: (v.shape, v.dtype) for k, v in kept["state"][index].items()
        }
    resumed = make(parameters)
    resumed.load_state_dict(kept)
    going = make(others)
    going.load_state_dict(now)
    give(parameters, 2)
    give(others, 2)
    resumed.step()
    going.step()
    assert all(
        (p - q).abs().max() <= CLOSE32 for p, q in zip(parameters, others, strict=True) if p.numel()
    )
    assert resumed.state_dict()["state"].keys() == going.state_dict()["state"].keys()


@every("name", EQUATIONS)
def test_groups_step_as_optimisers_of_their_own(name: str, by_kernels: list[int]) -> None:
    make, (one, two) = EQUATIONS[name][1], (layers(torch.float32) for _ in range(2))
    together = make([{"params": one[:2], "lr": 0.05, "weight_decay": 0.5}, {"params": one[2:]}])
    apart = [make(two[2:]), make([{"params": two[:2], "lr": 0.05, "weight_decay": 0.5}])]
    by_kernels.clear()
    for step in range(3):
        give(one, step)
        give(two, step)
        if step == 1:
            one[1].grad = two[1].grad = None  # so that steps are not counted alike
        for each in (together, *apart):
            each.step()
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))
    assert by_kernels == [4, 2, 2, 3, 2, 1, 4, 2, 2]


def test_lamb_clips_float32_by_the_norms_of_the_kernels(
    by_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, summed = [], list[int]()

    def noted(x: Any) -> float:
        summed.append(x.size)
        return square_sum(x)

    monkeypatch.setattr(optimizers, "square_sum", noted)
    for clip in (0.0, 1.5):
        parameters = layers(torch.float32)
        optimizer = Lamb(parameters, clip_global_norm=clip)
        give(parameters, 0)
        by_kernels.clear()
        optimizer.step()
        moments.append(optimizer.state[parameters[0]]["exp_avg"])
    assert by_kernels == [4] and summed == [p.numel() for p in parameters if p.numel()]
    total = math.sqrt(sum(size(g.float().double().numpy()) ** 2 for g in gradients(0)))
    assert torch.allclose(moments[1], moments[0] * (1.5 / total), rtol=1e-6, atol=0)


@every("make", [Lars, Larc, partial(Lamb, clip_global_norm=0.5), NovoGrad, AdamP])
def test_copies_go_on_with_all_options(make: Any) -> None:
    parameters = layers(torch.float32)
    optimizer = make(parameters, lr=0.25)
    give(parameters, 0)
    optimizer.step()
    file = BytesIO()
    torch.save((parameters, optimizer), file)
    file.seek(0)
    restored = [p.detach().clone().requires_grad_() for p in parameters]
    other = optimizer.__class__(restored)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copies = [
        copy.deepcopy((parameters, optimizer)),
        torch.load(file, weights_only=False),
        (restored, other),
    ]
    give(parameters, 1)
    optimizer.step()
    for its, one in copies:
        give(its, 1)
        one.step()
        assert all(map(torch.equal, its, parameters))


def test_one_bound_of_all_gradients_together() -> None:
    parameters = layers(torch.float32)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "clip_global_norm": 2.0}]
    give(parameters, 0)
    optimizer = Lamb(groups)
    with pytest.raises(ValueError, match="one for all groups"):
        optimizer.step()
    former = optimizer.state_dict()  # like those of 0.2
    for group in former["param_groups"]:
        del group["clip_global_norm"]
    later = Lamb(parameters[:1], clip_global_norm=2.0)
    later.add_param_group({"params": parameters[1:]})
    later.load_state_dict(former)
    later.step()


@every("make", [Lars, Larc, Lamb, NovoGrad, AdamP])
def test_autograd_sees_that_weights_have_changed(make: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    squares = p.square().sum()
    make([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@every("name", ["sgd", "adam", "adamw"])
def test_jobs_use_torchs_fused_steps_where_it_has_some(name: str) -> None:
    """On meta devices it has none. Each step has 20 roundings at most in either way."""
    options = {"sgd": {"momentum": 0.5, "nesterov": True}}.get(name, {}) | {"weight_decay": 0.1}
    given = OPTIMIZERS[name](**options)
    runs = []
    for fused in (True, False):
        parameters = layers(torch.float32)
        optimizer = given.build(parameters, 0.1)
        assert all(group["fused"] is True for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["fused"] = fused
        for step in range(STEPS):
            give(parameters, step)
            optimizer.step()
        runs.append(parameters)
    bound = STEPS * 20 * 10 * float(np.finfo(np.float32).eps)
    assert all((p - q).abs().max() <= bound for p, q in zip(*runs, strict=True) if p.numel())
    turned = torch.arange(6.0).reshape(2, 3).t()  # fused steps do not look at strides
    for other in (torch.ones(2, device="meta"), turned):
        built = given.build([torch.nn.Parameter(other)], 0.1)
        assert built.param_groups[0]["fused"] is False


@every("nesterov", [False, True])
def test_fused_momentum_begins_when_a_layers_gradient_comes(nesterov: bool) -> None:
    """Torch's fused step takes momentum of all parameters or of none; ours begins at 0, as its own.

    Each step has 20 roundings at most in either way.
    """
    given, runs = OPTIMIZERS["sgd"](momentum=0.5, nesterov=nesterov), []
    for fused in (True, False):
        parameters = [torch.nn.Parameter(torch.arange(4.0)) for _ in range(2)]
        optimizer = given.build(parameters, 0.1)
        for group in optimizer.param_groups:
            group["fused"] = fused
        for step in range(4):
            for late, p in enumerate(parameters):
                p.grad = torch.full_like(p, step + 1.5) if step >= 2 * late else None
            optimizer.step()
        runs.append(parameters)
    assert not torch.equal(runs[0][1], torch.arange(4.0))
    bound = 4 * 20 * 10 * float(np.finfo(np.float32).eps)
    assert all((p - q).abs().max() <= bound for p, q in zip(*runs, strict=True))


def test_larc_and_adamp_meet_both_of_their_cases() -> None:
    """Else the test above would show less than it says."""
    bounded = trained(lambda p: Larc(p, 1e-9, 0.8, 0.1, trust=0.2))
    free = trained(lambda p: Larc(p, 1e-9, 0.8, 0.1, trust=1e9))
    assert all(np.array_equal(a, b) for a, b in zip(bounded[:4], free, strict=False))
    for got, first in zip(trained(EQUATIONS["larc"][1]), layers(), strict=True):
        assert not got.size or not np.array_equal(got, first.detach().numpy())
    apart = [trained(lambda p, d=d: AdamP(p, **MOMENTS, delta=d)) for d in (0.0, 2.0)]
    assert not np.array_equal(apart[0][0], apart[1][0])


@every(
    "make",
    [
        lambda p: Lars(p, lr=0.3),
        lambda p: Lamb(p, lr=0.3, eps=0.0, weight_decay=0.0),
        lambda p: NovoGrad(p, lr=0.3, eps=0.0),
    ],
)
def test_the_scale_of_a_layers_gradient_changes_no_step(make: Any) -> None:
    """1,024 is a power of two: nothing is rounded otherwise, so the bits are the same."""
    plain, scaled = trained(make), trained(make, (1024, 1 / 1024, 1, 1, 1))
    assert all(np.array_equal(a, b) for a, b in zip(plain, scaled, strict=True))
    thousand = trained(make, (1000, 1e-3, 1, 1, 1))
    for a, b in zip(plain, thousand, strict=True):
        assert np.abs(a - b).max(initial=0) <= CLOSE


def test_lamb_clips_all_gradients_together_and_its_ratio() -> None:
    parameters = layers()
    total = math.sqrt(sum(size(g.numpy()) ** 2 for g in gradients(0)))
    clipped = Lamb(parameters, clip_global_norm=total / 4, exclude="none")
    give(parameters, 0)
    clipped.step()
    for p, g in zip(parameters, gradients(0), strict=True):
        if p.numel():
            moment = clipped.state[p]["exp_avg"]  # a tenth of the gradient, of which a quarter
            assert torch.allclose(moment, g / 40, rtol=1e-12, atol=0)
            assert torch.equal(p.grad, g), "gradients stay"
    large = [torch.nn.Parameter(torch.full((2, 2), 100.0, dtype=torch.float64))]
    large[0].grad = torch.ones(2, 2, dtype=torch.float64)
    Lamb(large, lr=1.0, eps=0.0, weight_decay=0.0, trust_clip=True).step()
    assert torch.equal(large[0].detach(), torch.full((2, 2), 99.0, dtype=torch.float64))


@every("make", [Lars, Larc, Lamb, NovoGrad, AdamP])
def test_a_gradient_that_is_no_number_is_seen_in_the_weights(make: Any) -> None:
    """As with torch's optimisers; at the value itself at least, and in no other layer."""
    hurt, well = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = make([hurt, well], lr=0.1)
    hurt.grad, well.grad = torch.ones(3, 3), torch.ones(3, 3)
    hurt.grad[1, 2] = math.nan
    optimizer.step()
    assert hurt[1, 2].isnan() and well.isfinite().all()


def test_novograd_keeps_one_number_a_layer_and_others_know_groups_and_closures() -> None:
    parameters = layers()[:3]
    optimizer = NovoGrad(
        [{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:]}], lr=0.3
    )
    before = [p.detach().clone() for p in parameters]

    def closure() -> float:
        for p, g in zip(parameters, gradients(0), strict=False):
            p.grad = g
        parameters[2].grad = None
        return 2.5

    assert optimizer.step(closure) == 2.5
    stayed = [torch.equal(p, b) for p, b in zip(parameters, before, strict=True)]
    assert stayed == [True, False, True]
    kept = optimizer.state_dict()["state"]
    assert {k: v.numel() for k, v in kept[1].items()} == {"norm": 1, "momentum": 48}


@every(
    ("make", "message"),
    [
        (lambda p: Lars(p, lr=-1.0), "Lars: lr=-1.0: must be 0 or more"),
        (lambda p: Lars(p, momentum=2.0), "Lars: momentum=2.0: must be 0 or more and below 1"),
        (lambda p: Larc(p, lr="x"), "Larc: lr='x': must be a number, 0 or more"),
        (lambda p: Lamb(p, lr=True), "Lamb: lr=True: must be a number"),
        (lambda p: Lamb(p, clip_global_norm="1"), "clip_global_norm='1': must be a number"),
        (lambda p: AdamP(p, decay_share=2), "AdamP: decay_share=2: must be 0 to 1"),
        (lambda p: NovoGrad(p, betas=0.9), "NovoGrad: betas=0.9: must be two numbers"),
        (lambda p: Lamb(p, betas=(0.9, 1.0)), "betas=(0.9, 1.0): must be two numbers, each 0"),
        (lambda p: Larc(p, trust=math.inf), "Larc: trust=inf"),
        (lambda p: Larc(p, trust=0), "Larc: trust=0: must be above 0 and finite"),
        (lambda p: Lars(p, trust=0.0), "Lars: trust=0.0: must be above 0 and finite"),
        (lambda p: Lars(p, trust=math.nan), "Lars: trust=nan"),
        (lambda p: AdamP(p, exclude="norms"), "exclude='norms': known are one_dimensional, none"),
        (lambda p: Lamb(p, clip_global_norm=-1.0), "Lamb: clip_global_norm=-1.0"),
    ],
)
def test_numbers_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make(layers())
    assert message in str(caught.value)


def test_complex_parameters_and_sparse_gradients_are_refused() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match=r"Lars.step: .* must be real and dense"):
        Lars([p]).step()
    with pytest.raises(AttributeError):
        cpdhpc.lab.train.Lbfgs  # noqa: B018


def test_job_files_and_classes_have_the_same_defaults() -> None:
    assert set(EXCLUDES) == set(Exclude.__args__)
    for name in EQUATIONS:
        options = OPTIMIZERS[name]().model_dump(exclude={"name"})
        built = OPTIMIZERS[name]().build(layers(), 0.25)
        plain = type(built)(layers())  # type: ignore[call-arg]
        own, theirs = (each.param_groups[0] | {"params": 0} for each in (plain, built))
        assert own | {"lr": 0.25} == theirs
        assert options.keys() <= built.param_groups[0].keys()


def settings(batch: int, samples: int = 4096, **keys: Any) -> Settings:
    return Settings(Schedule(**keys), 0.125, batch, 8, samples)


def test_legw_keeps_the_iterations_of_the_warmup() -> None:
    """A batch k times as large: the rate times sqrt(k), the warm-up k times as many epochs."""
    for k in (1, 4, 16, 64):
        run = Scheduled(settings(16 * k, warmup_epochs=0.0625, base_batch=16, batch_scaling="legw"))
        rates = [run.next(16 * k * i)[0] for i in range(2 * 16)]
        peak = 0.125 * math.sqrt(k)
        assert rates == [peak * min((i + 1) / 16, 1) for i in range(32)]


@every(
    ("name", "factor", "warmup"),
    [("none", 1, 1), ("linear", 4, 1), ("linear_legw", 4, 4), ("sqrt", 2, 1), ("legw", 2, 4)],
)
def test_rate_and_warmup_follow_the_batch(name: str, factor: int, warmup: int) -> None:
    base = {} if name == "none" else {"base_batch": 16}
    assert Scheduled(settings(64, batch_scaling=name, **base)).next(0)[0] == 0.125 * factor
    schedule = Schedule(warmup_epochs=0.25, batch_scaling=name, **base)
    assert schedule.scaled(64)[1].warmup_epochs == 0.25 * warmup


@every(
    ("keys", "wanted"),
    [
        ({"decay": "polynomial", "power": 2.0}, [1.0, 0.5625, 0.25, 0.0625]),
        ({"decay": "polynomial"}, [1.0, 0.75, 0.5, 0.25]),
        ({"decay": "exponential", "gamma": 0.5}, [1.0, 0.25, 0.0625, 0.015625]),
        ({"decay": "polynomial", "warmup_epochs": 4.0}, [0.25, 0.75, 1.0, 0.5]),
        ({"decay": "exponential", "gamma": 0.5, "warmup_epochs": 4.0}, [0.25, 0.75, 1.0, 0.25]),
    ],
)
def test_decays(keys: dict[str, Any], wanted: list[float]) -> None:
    schedule = Schedule(**keys)
    assert [schedule.factor(epoch, 8, epoch + 1) for epoch in (0, 2, 4, 6)] == wanted


@every("decay", DECAYS)
@every("samples", [7, 64, 1000])
@every("warmup_epochs", [0.0, 0.01, 0.3, 1.0, 1.7])
def test_no_step_is_without_a_rate(decay: str, samples: int, warmup_epochs: float) -> None:
    """In a warm-up, of whole steps or not, they rise by one amount up to the whole rate at most."""
    keys = {"warmup_epochs": warmup_epochs, "decay": decay, "milestones": (1.0,)}
    control = BySchedule(), ByNoiseScale(), ByAdaptiveBatch(), ByAutoWu()
    for each in control:
        own = {} if isinstance(each, ByAutoWu) else keys
        of = Settings(Schedule(**own), 0.1 if own else DEFAULT_RATE, 16, 3, samples)
        controller = each.build(of)
        steps = [e * samples + s for e in range(3) for s in range(0, samples, 16)]
        rates = [controller.next(seen)[0] for seen in steps]
        assert min(rates) > 0
        if own and warmup_epochs * samples >= 16:
            per_epoch = -(-samples // 16)
            whole = int(warmup_epochs * per_epoch)
            rising = np.array(rates[:whole]) / 0.1
            by = np.diff(rising, prepend=0)  # less where a batch is, as the last one of an epoch
            assert by.min() > 0 and by.max() < 1.0001 * by[0] and rising[-1] > 0.9999 - by[0]


@every(
    ("tables", "message"),
    [
        (
            {"schedule": {"warmup_epochs": 1.0, "base_batch": 8, "batch_scaling": "legw"}},
            "schedule.warmup_epochs=1.0, scaled to 3: should be below train.epochs=3",
        ),
        ({"schedule": {"batch_scaling": "legw"}}, "batch_scaling='legw', base_batch=0: give both"),
        ({"schedule": {"base_batch": 8}}, "give both or neither"),
        ({"schedule": {"batch_scaling": "legs"}}, "legw"),
        ({"optimizer": {"name": "lams"}}, "lamb"),
        ({"optimizer": {"name": "lars", "trust": 0.0}}, "trust"),
        ({"optimizer": {"name": "lamb", "betas": [0.9, 1.0]}}, "betas"),
    ],
)
def test_bad_tables(tables: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ValidationError)) as caught:
        validate(Job, {"name": "x", "train": {"epochs": 3, "batch": 24}} | tables, "x")
    assert message in str(caught.value)
