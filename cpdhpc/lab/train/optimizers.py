"""Optimisers: a section of a job file and a row in OPTIMIZERS each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...config import Above0, NotNegative, Section, Share
from ...lazy import Late

if TYPE_CHECKING:
    import torch
else:
    torch = Late("torch")


class Optimizer(Section):
    """[optimizer]: how an averaged gradient changes the parameters.

    has_noise_scale: whether its steps are along gradients times factors that are known before
    preconditions: whether those factors are other than 1
    adds_up: whether momentum m makes steps 1 / (1 - m) times as long; a mean does not
    """

    has_noise_scale: ClassVar[bool] = True
    preconditions: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    name: str

    def factors(self, state: Mapping[str, Any]) -> torch.Tensor | float:
        """Return the factors on gradients in the next step, for a parameter with this state."""
        return 1.0

    @property
    def has_momentum(self) -> bool:
        """Whether a step depends on the gradients of earlier steps."""
        return True

    @property
    @abstractmethod
    def kept_share(self) -> float:
        """The share of the last step, or of the first moment, that is in the next one."""

    @abstractmethod
    def with_share(self, share: float) -> dict[str, Any]:
        """Return the keys that set this share, with their values then."""

    @abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Return the optimiser; each step sets its learning rate anew."""


class ByMomentum(Optimizer):
    """An optimiser whose steps add up to a share of the last one.

    momentum: share of the last step that is added
    weight_decay: times the weights is added to gradients
    """

    momentum: Share = 0.9
    weight_decay: NotNegative = 0.0

    @property
    def kept_share(self) -> float:
        return self.momentum

    def with_share(self, share: float) -> dict[str, Any]:
        return {"momentum": share}


class ByMoments(Optimizer):
    """An optimiser that keeps a mean of gradients, and of what it divides by.

    betas: decay rates of the first and second moment; eps: added to the root of the second
    """

    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0

    @property
    def kept_share(self) -> float:
        """The share of the mean of gradients."""
        return self.betas[0]

    def with_share(self, share: float) -> dict[str, Any]:
        return {"betas": (share, self.betas[1])}


class BySecondMoment(ByMoments):
    """Adam's division by the root of the second moment."""

    preconditions: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False

    def factors(self, state: Mapping[str, Any]) -> torch.Tensor:
        """Return 1 / (sqrt(v) + eps) of the state before a step, with corrected bias."""
        from ...ops.tensors import values_of

        steps = float(values_of(state["step"]))
        unbiased = state["exp_avg_sq"] / (1 - self.betas[1] ** steps)
        factors: torch.Tensor = 1 / (unbiased.sqrt() + self.eps)
        return factors


Exclude = Literal["one_dimensional", "none"]  # the keys of torch.optimizers.EXCLUDES


def groups(
    parameters: Iterable[torch.nn.Parameter], exclude: Exclude, weight_decay: float
) -> list[dict[str, Any]]:
    """Return parameters for torch's optimisers, with the excluded ones without decay."""
    from ...torch.optimizers import EXCLUDES

    sides: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = [], []
    for p in parameters:
        sides[EXCLUDES[exclude](p)].append(p)
    decays = (weight_decay, 0.0)
    return [
        {"params": side, "weight_decay": decay}
        for side, decay in zip(sides, decays, strict=True)
        if side
    ]


FUSED = ("cpu", "cuda")  # types of devices for which torch has steps in one pass


def has_fused(given: Iterable[dict[str, Any]]) -> bool:
    """Whether torch's steps in one pass are correct for all parameters of groups.

    They ignore strides in memory, and gradients of the reducer are contiguous.
    """
    parameters = [p for group in given for p in group["params"]]
    return all(
        p.device.type in FUSED and p.is_floating_point() and p.is_contiguous() for p in parameters
    )


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give each parameter with a gradient its momentum, as fused steps need all of them or none.

    A layer that no rank has used yet has none. The first step does not change: 0 is added.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


class Sgd(ByMomentum):
    """[optimizer] name = "sgd": stochastic gradient descent, as torch.optim.SGD.

    nesterov: whether the momentum looks ahead
    exclude: "one_dimensional" leaves biases and norms without decay, "none" nothing
    """

    name: Literal["sgd"] = "sgd"
    nesterov: bool = False
    exclude: Exclude = "none"

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=true needs momentum above 0")
        return self

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    def with_share(self, share: float) -> dict[str, Any]:
        """Return the momentum, and whether it may look ahead then."""
        without = {"nesterov": False} if self.nesterov and not share else {}
        return {"momentum": share} | without

    def build(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        given = groups(parameters, self.exclude, self.weight_decay)
        fused = has_fused(given)
        made = torch.optim.SGD(given, rate, self.momentum, nesterov=self.nesterov, fused=fused)
        if fused and self.momentum:
            made.register_step_pre_hook(_begin_momentum)
        return made


class Adam(BySecondMoment):
    """[optimizer] name = "adam": as torch.optim.Adam, whose weight decay is part of the gradient.

    weight_decay: times the weights is added to gradients
    exclude: "one_dimensional" leaves biases and norms without decay, "none" nothing
    Source: Kingma, Ba: Adam, arXiv 1412.6980, algorithm 1.
    """

    name: Literal["adam"] = "adam"
    exclude: Exclude = "none"

    def build(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        given = groups(parameters, self.exclude, self.weight_decay)
        built: torch.optim.Optimizer = getattr(torch.optim, type(self).__name__)(
            given, lr=rate, betas=self.betas, eps=self.eps, fused=has_fused(given)
        )
        return built


class AdamW(Adam):
    """[optimizer] name = "adamw": as torch.optim.AdamW, with weight decay apart from moments.

    weight_decay: times the rate is the share of the weights that a step subtracts
    Source: Loshchilov, Hutter: Decoupled weight decay regularization, arXiv 1711.05101.
    """

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: NotNegative = 0.01


class LayerWiseOptions(Optimizer):
    """The arguments, by key, of an optimiser of torch/optimizers.py, whose name the class has.

    exclude: "one_dimensional" leaves biases and norms without adaptation and decay
    """

    def build(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        from ...torch import optimizers

        name = type(self).__name__.removesuffix("Options")
        built: torch.optim.Optimizer = getattr(optimizers, name)(
            parameters, lr=rate, **self.model_dump(exclude={"name"})
        )
        return built


class LarsOptions(LayerWiseOptions, ByMomentum):
    """[optimizer] name = "lars": momentum whose rate, layer by layer, follows |w| / |g|.

    trust: times |w| / |g| times the rate is a layer's rate
    Source: You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.
    """

    has_noise_scale: ClassVar[bool] = False

    name: Literal["lars"] = "lars"
    trust: Above0 = 0.001
    exclude: Exclude = "one_dimensional"


class LarcOptions(LarsOptions):
    """[optimizer] name = "larc": LARS with no layer's rate above the global one.

    trust: times |w| / |g| is a layer's rate
    Source: You, Gitman, Ginsburg, arXiv 1708.03888; the bound as in NVIDIA's apex.
    """

    name: Literal["larc"] = "larc"  # type: ignore[assignment]
    trust: Above0 = 0.02


class LambOptions(LayerWiseOptions, ByMoments):
    """[optimizer] name = "lamb": Adam whose step of a layer is as long as its weights.

    weight_decay: times the weights is added to a step; trust_clip: |w| / |step| is at most 1
    clip_global_norm: gradients of all layers together are scaled to at most this norm; 0: off
    Source: You et al., arXiv 1904.00962, algorithm 2.
    """

    has_noise_scale: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    name: Literal["lamb"] = "lamb"
    eps: NotNegative = 1e-6
    weight_decay: NotNegative = 0.01
    clip_global_norm: NotNegative = 0.0
    trust_clip: bool = False
    exclude: Exclude = "one_dimensional"


class NovoGradOptions(LayerWiseOptions, ByMoments):
    """[optimizer] name = "novograd": momentum of gradients divided by their layer's running norm.

    betas: decay rates of the momentum and of the squared norm; eps: added to the norm
    weight_decay: times the weights is added to the input of the momentum
    exclude: "one_dimensional" leaves biases and norms without decay
    Source: Ginsburg et al., arXiv 1905.11286, algorithm 1.
    """

    preconditions: ClassVar[bool] = True

    name: Literal["novograd"] = "novograd"
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.95, 0.98)
    exclude: Exclude = "one_dimensional"

    def factors(self, state: Mapping[str, Any]) -> float:
        """Return 1 / (norm + eps). See Optimizer.factors."""
        from ...ops.tensors import values_of

        return 1 / (float(values_of(torch.as_tensor(state["norm"]))) + self.eps)


class AdamPOptions(LayerWiseOptions, BySecondMoment):
    """[optimizer] name = "adamp": Adam without steps along weights whose scale has no effect.

    weight_decay: times the rate is the share of the weights that a step subtracts
    delta: weights are such if the cosine to their gradient is below delta / sqrt(values)
    decay_share: the share of weight decay for such weights
    exclude: "one_dimensional" leaves biases and norms without decay
    Source: Heo et al., arXiv 2006.08217, algorithm 2.
    """

    name: Literal["adamp"] = "adamp"
    delta: NotNegative = 0.1
    decay_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    exclude: Exclude = "one_dimensional"


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "lars": LarsOptions,
    "larc": LarcOptions,
    "lamb": LambOptions,
    "novograd": NovoGradOptions,
    "adamp": AdamPOptions,
}
