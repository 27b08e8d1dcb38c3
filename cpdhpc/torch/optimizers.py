"""Optimisers that adapt each layer's step to its weights: LARS, LARC, LAMB, NovoGrad, AdamP.

They are torch optimisers: `cpdhpc.torch.Lamb(model.parameters(), lr=0.01)`. A layer is a parameter
tensor. With averaged gradients all ranks take the same step without a message.

For dense float32 layers on the CPU, kernels take all steps in one call, with the bits of ops.steps
and torch's number of threads. For others `update` has the same equations in torch operations.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ..ops.cpu import square_sum, step_layers
from ..ops.steps import LayerArrays, Numbers
from ..ops.tensors import values_of

Tensor = torch.Tensor
Group = dict[str, Any]
State = dict[str, Tensor]
Parameters = Iterable[Tensor] | Iterable[Group]

EXCLUDES: dict[str, Callable[[Tensor], bool]] = {  # parameters without decay and adaptation
    "one_dimensional": lambda p: p.ndim <= 1,  # biases, and scales and shifts of norms
    "none": lambda p: False,
}
FINITE = (lambda x: 0 <= x < math.inf, "0 or more")
SHARE = (lambda x: 0 <= x < 1, "0 or more and below 1")
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {  # ranges, with words for errors
    **dict.fromkeys(("lr", "weight_decay", "eps", "delta", "clip_global_norm"), FINITE),
    "trust": (lambda x: 0 < x < math.inf, "above 0 and finite"),
    "momentum": SHARE,
    "decay_share": (lambda x: 0 <= x <= 1, "0 to 1"),
}


PLAIN = (Tensor, torch.nn.Parameter)  # other subclasses may hold their values elsewhere


def norm(x: Tensor) -> Tensor:
    """Return the 2-norm of all values, float64[], so that squares neither overflow nor vanish."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each of at least one tensor, float64[tensors]."""
    arrays = [memory_in_order([x]) for x in tensors]
    if any(each is None for each in arrays):
        return torch.stack([norm(x) for x in tensors])
    squares = [square_sum(x) for each in arrays if each for x in each]
    return torch.from_numpy(np.sqrt(squares))


def memory_in_order(tensors: Sequence[Tensor]) -> list[np.ndarray[Any, Any]] | None:
    """Return the memory of dense float32 tensors with the same order; None for others."""
    turned = not tensors[0].is_contiguous()
    found = []
    for x in tensors:
        if x.dtype != torch.float32 or not x.is_cpu or type(x) not in PLAIN or x.is_neg():
            return None
        if turned:  # channels last, which is contiguous as NHWC
            if x.ndim != 4:
                return None
            x = x.permute(0, 2, 3, 1)
        if not x.is_contiguous():
            return None
        found.append(x.detach().numpy())
    return found


class LayerWise(torch.optim.Optimizer):
    """An optimiser with a rule for one parameter at a time.

    rule: its name in ops.steps; kept: arrays of a parameter's state, in the order of LayerArrays
    Raises ValueError for numbers out of range and an unknown exclude. A step raises TypeError for
    complex parameters and sparse gradients.
    """

    rule: ClassVar[str]
    kept: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(self, params: Parameters, **defaults: Any) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(type(self).__name__, group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient; closure: computes gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(p, group) for group in self.param_groups for p in group["params"]]
        given = [(p, p.grad, group) for p, group in found if p.grad is not None and p.numel()]
        for p, gradient, _ in given:
            if p.is_complex() or gradient.layout != torch.strided:
                raise TypeError(
                    f"{type(self).__name__}.step: a parameter of {p.dtype} with a gradient of "
                    f"{gradient.layout}: must be real and dense"
                )
        scale = self.scale_of_gradients([gradient for _, gradient, _ in given])
        compiled = _Compiled()
        for p, gradient, group in given:
            state = self.state[p]
            self.begin(p, state)
            arrays = memory_in_order([p, gradient, *[state[name] for name in self.kept]])
            if arrays is None:
                g = gradient if scale is None else gradient * scale.to(gradient)
                self.update(p, g, state, group)
            else:
                compiled.add(p, arrays, state, group, bool(self.kept[1:]))
        if compiled.layers:
            self._step_compiled(compiled, 1.0 if scale is None else float(values_of(scale)))
        return loss

    def _step_compiled(self, compiled: _Compiled, scale: float) -> None:
        own = [
            list(map(float, self.numbers(group, adapts, time)._replace(scale=scale)))
            for (_, adapts, time), (_, group) in compiled.cases.items()
        ]
        table = np.array(own)[compiled.case_of]
        table[:, -1] = compiled.norms
        step_layers(self.rule, compiled.layers, table, torch.get_num_threads())
        for p, norm_of_layer in zip(compiled.parameters, table[:, -1].tolist(), strict=True):
            increment_version(p)  # so that autograd detects the change
            self.end(self.state[p], norm_of_layer)

    def begin(self, p: Tensor, state: State) -> None:
        """Begin a step of a parameter; its state is created, with zeros, if it is missing."""
        for name in self.kept:
            if name not in state:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def end(self, state: State, norm_of_layer: float) -> None:
        """End a step of the kernels, which return a norm."""

    @abstractmethod
    def numbers(self, group: Group, adapts: bool, time: float) -> Numbers:
        """Return the numbers of a group's layers for the kernels; others: see _Compiled.add."""

    def scale_of_gradients(self, gradients: list[Tensor]) -> Tensor | None:
        """Return the factor of all gradients, None for 1."""
        return None

    @abstractmethod
    def update(self, p: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter by torch operations, after begin."""


class _Compiled:
    """The layers of one step of the kernels, and the numbers of each."""

    def __init__(self) -> None:
        self.parameters, self.layers = list[Tensor](), list[LayerArrays]()
        self.norms, self.case_of = list[float](), list[int]()
        self.cases = dict[tuple[int, bool, float], tuple[int, Group]]()

    def add(
        self, p: Tensor, arrays: list[Any], state: State, group: Group, has_moments: bool
    ) -> None:
        """Add a layer. adapts: whether it is not excluded; time: steps so far, with this one."""
        m, v = arrays[2], arrays[3] if has_moments else None
        units = len(arrays[0]) if arrays[0].ndim > 1 else 0
        self.layers.append(LayerArrays(arrays[0], arrays[1], m, v, units))
        time = float(state["step"]) if has_moments else 0.0
        adapts = not _excluded(p, group)
        case = id(group), adapts, time
        self.case_of.append(self.cases.setdefault(case, (len(self.cases), group))[0])
        self.norms.append(float(state["norm"]) if "norm" in state else -1.0)
        self.parameters.append(p)


def _check(name: str, group: Group) -> None:
    for key, (allows, said) in ALLOWED.items():
        if key not in group:
            continue
        number = _is_number(group[key])
        if not (number and allows(group[key])):
            should = said if number else f"a number, {said}"
            raise ValueError(f"{name}: {key}={group[key]!r}: must be {should}")
    betas = group.get("betas", (0.0, 0.0))
    pair = isinstance(betas, tuple | list) and len(betas) == 2 and all(map(_is_number, betas))
    if not (pair and all(map(SHARE[0], betas))):
        raise ValueError(f"{name}: betas={betas!r}: must be two numbers, each {SHARE[1]}")
    if group.get("exclude", "none") not in EXCLUDES:
        known = ", ".join(EXCLUDES)
        raise ValueError(f"{name}: exclude={group['exclude']!r}: known are {known}")


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):  # torch's optimisers allow this for lr
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def _excluded(p: Tensor, group: Group) -> bool:
    return EXCLUDES[group["exclude"]](p)


def _of_group(group: Group, adapts: bool) -> Numbers:
    """Return the numbers that all rules have; excluded layers have no decay."""
    decay = group["weight_decay"] if adapts else 0.0
    return Numbers(rate=float(group["lr"]), decay=decay, adapts=float(adapts))


def _of_moments(group: Group, adapts: bool, time: float) -> Numbers:
    """Return the numbers of rules with Adam's moments; time: number of the step."""
    beta1, beta2 = group["betas"]
    return _of_group(group, adapts)._replace(
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        first=1 / (1 - beta1**time),
        second=1 / math.sqrt(1 - beta2**time),
    )


def _ratio(above: Tensor, below: Tensor, p: Tensor) -> Tensor:
    """Return above / below in p's dtype; 1 if one of them is 0."""
    return torch.where(above * below == 0, torch.ones_like(above), above / below).to(p.dtype)


def _adapting(p: Tensor, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return a rate as a fraction: trust |w|, and |g| + weight decay |w|, or 0 if |g| is 0."""
    weights, gradients = norm(p), norm(gradient)
    decayed = gradients + group["weight_decay"] * weights
    return group["trust"] * weights, torch.where(gradients > 0, decayed, gradients)


class Lars(LayerWise):
    """Layer-wise adaptive rate scaling: momentum whose rate follows |w| / |g|.

    trust: the paper's eta; the rate is inside the momentum, as in the paper
    Source: You, Gitman, Ginsburg: Large batch training of convolutional networks,
    arXiv 1708.03888, equation 6 and algorithm 1.
    """

    rule = "lars"

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        exclude: str = "one_dimensional",
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust=trust,
            exclude=exclude,
        )

    def numbers(self, group: Group, adapts: bool, time: float) -> Numbers:
        """See LayerWise.numbers."""
        return _of_group(group, adapts)._replace(beta1=group["momentum"], trust=group["trust"])

    def update(self, p: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """See LayerWise.update."""
        rate = torch.ones((), dtype=p.dtype, device=p.device)
        if not _excluded(p, group):
            rate = _ratio(*_adapting(p, gradient, group), p)
            gradient = gradient + group["weight_decay"] * p
        velocity = state["momentum"]
        velocity.mul_(group["momentum"]).add_(group["lr"] * rate * gradient)
        p.sub_(velocity)


class Larc(Lars):
    """LARS with the global rate as the upper bound of a layer's.

    Momentum is that of torch's SGD, which the rate multiplies afterwards.
    trust: times |w| / |g|, the rate of a layer
    Source: You, Gitman, Ginsburg, arXiv 1708.03888; the bound by the global rate is known as LARC
    from NVIDIA's apex.
    """

    rule = "larc"

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
        exclude: str = "one_dimensional",
    ) -> None:
        super().__init__(params, lr, momentum, weight_decay, trust, exclude)

    def update(self, p: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """See LayerWise.update."""
        if not _excluded(p, group):
            above, below = _adapting(p, gradient, group)
            bound = group["lr"] * torch.ones_like(above)
            local = torch.where((above > 0) & (below > 0), above / below, bound)
            share = (local / bound).clamp(max=1.0) if group["lr"] > 0 else local * 0
            gradient = (gradient + group["weight_decay"] * p) * share.to(p.dtype)
        velocity = state["momentum"]
        velocity.mul_(group["momentum"]).add_(gradient)
        p.sub_(group["lr"] * velocity)


class OfMoments(LayerWise):
    """An optimiser with Adam's moments and a count of steps."""

    kept = "exp_avg", "exp_avg_sq"

    def begin(self, p: Tensor, state: State) -> None:
        """See LayerWise.begin; the first step has the number 1."""
        super().begin(p, state)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1


class Lamb(OfMoments):
    """Adam with steps of a layer that are as long as its weights.

    clip_global_norm: upper bound of the 2-norm of all layers' gradients, by scaling; 0: none; the
        same for all groups, otherwise step raises ValueError
    trust_clip: bound |w| / |step| by 1 (LAMBC)
    Source: You et al.: Large batch optimization for deep learning: training BERT in 76 minutes,
    arXiv 1904.00962, algorithm 2, whose phi is the identity.
    """

    rule = "lamb"

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip_global_norm: float = 0.0,
        trust_clip: bool = False,
        exclude: str = "one_dimensional",
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            clip_global_norm=clip_global_norm,
            trust_clip=trust_clip,
            exclude=exclude,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state; in those of 0.2 the groups have no clip_global_norm."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("clip_global_norm", self.defaults.get("clip_global_norm", 0.0))

    def scale_of_gradients(self, gradients: list[Tensor]) -> Tensor | None:
        """Return the factor that reduces the norm of all gradients to clip_global_norm."""
        clips = {group["clip_global_norm"] for group in self.param_groups}
        if len(clips) > 1:
            raise ValueError(f"Lamb: clip_global_norm={sorted(clips)}: must be one for all groups")
        (clip,) = clips
        if not clip or not gradients:
            return None
        total = norm(norms(gradients))
        return (clip / total.clamp(min=clip)).to(gradients[0].dtype)

    def numbers(self, group: Group, adapts: bool, time: float) -> Numbers:
        """See LayerWise.numbers."""
        most = 1.0 if group["trust_clip"] else math.inf
        return _of_moments(group, adapts, time)._replace(most=most)

    def update(self, p: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """See LayerWise.update."""
        step = _adam(p, gradient, state, group)
        rate = torch.ones((), dtype=p.dtype, device=p.device)
        if not _excluded(p, group):
            step = step + group["weight_decay"] * p
            rate = _ratio(norm(p), norm(step), p)
            rate = rate.clamp(max=1.0) if group["trust_clip"] else rate
        p.sub_(group["lr"] * rate * step)


def _adam(p: Tensor, gradient: Tensor, state: State, group: Group) -> Tensor:
    """Return Adam's step with bias correction; 0 if second moment and eps are 0.

    Source: Kingma, Ba: Adam, arXiv 1412.6980, algorithm 1.
    """
    (beta1, beta2), time = group["betas"], float(state["step"])
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    below = (second / (1 - beta2**time)).sqrt() + group["eps"]
    return torch.where(below == 0, torch.zeros_like(p), first / (1 - beta1**time) / below)


class NovoGrad(LayerWise):
    """Momentum of gradients divided by a running norm of their layer, one number for each layer.

    As in the paper, without bias correction and without the factor 1 - beta1 of the gradient.
    Source: Ginsburg et al.: Stochastic gradient methods with layer-wise adaptive moments for
    training of deep networks, arXiv 1905.11286, algorithm 1.
    """

    rule = "novograd"

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        exclude: str = "one_dimensional",
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, exclude=exclude
        )

    def numbers(self, group: Group, adapts: bool, time: float) -> Numbers:
        """See LayerWise.numbers."""
        beta1, beta2 = group["betas"]
        return _of_group(group, adapts)._replace(beta1=beta1, beta2=beta2, eps=group["eps"])

    def end(self, state: State, norm_of_layer: float) -> None:
        """See LayerWise.end."""
        if "norm" in state:
            state["norm"].fill_(norm_of_layer)
        else:
            state["norm"] = torch.tensor(norm_of_layer, dtype=torch.float32)

    def update(self, p: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """See LayerWise.update. The state has the norm: its square may overflow float32."""
        (beta1, beta2), now = group["betas"], norm(gradient)
        if "norm" in state:
            before = state["norm"].double()
            now = (beta2 * before.square() + (1 - beta2) * now.square()).sqrt()
        state["norm"] = now.to(p.dtype)
        below = state["norm"] + group["eps"]
        unit = torch.where(below == 0, torch.zeros_like(gradient), gradient / below)
        if not _excluded(p, group):
            unit = unit + group["weight_decay"] * p
        p.sub_(group["lr"] * state["momentum"].mul_(beta1).add_(unit))


class AdamP(OfMoments):
    """Adam without the part of a step along weights whose scale does not change the output.

    delta: a layer, or each of its output units, counts as scale-invariant if the cosine of gradient
        and weights is below delta / sqrt(values); decay_share: of its weight decay then
    Source: Heo et al.: AdamP: slowing down the slowdown for momentum optimizers on scale-invariant
    weights, ICLR 2021, arXiv 2006.08217, algorithm 2.
    """

    rule = "adamp"

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        decay_share: float = 0.1,
        exclude: str = "one_dimensional",
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            delta=delta,
            decay_share=decay_share,
            exclude=exclude,
        )

    def numbers(self, group: Group, adapts: bool, time: float) -> Numbers:
        """See LayerWise.numbers."""
        return _of_moments(group, adapts, time)._replace(
            delta=group["delta"], share=group["decay_share"]
        )

    def update(self, p: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """See LayerWise.update."""
        step, decay = _adam(p, gradient, state, group), 0.0
        if not _excluded(p, group):
            step, share = _projected(p, gradient, step, group)
            decay = group["weight_decay"] * share
        p.mul_(1 - group["lr"] * decay).sub_(group["lr"] * step)


def _projected(p: Tensor, gradient: Tensor, step: Tensor, group: Group) -> tuple[Tensor, float]:
    """Return AdamP's step of a layer, and the share of its weight decay."""
    if p.ndim <= 1:
        return step, 1.0
    for rows in (len(p), 1):  # each output unit, then the whole layer
        w, g = (x.double().reshape(rows, -1) for x in (p, gradient))
        lengths = w.norm(dim=1) * g.norm(dim=1)
        cosines = (w * g).sum(dim=1).abs() / lengths.clamp(min=torch.finfo(w.dtype).tiny)
        if float(values_of(cosines.max())) < group["delta"] / math.sqrt(w.shape[1]):
            unit = w / w.norm(dim=1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
            flat = step.double().reshape(rows, -1)
            along = (unit * flat).sum(dim=1, keepdim=True)
            return (flat - unit * along).reshape(step.shape).to(p.dtype), group["decay_share"]
    return step, 1.0
