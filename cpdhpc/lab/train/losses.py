"""Losses, which training minimises, and metrics of the test samples: a row each.

[adversarial]: the loss includes copies of samples with a small change that increases it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import model_validator

from ...config import ConfigError, NotNegative, Section, Share, UserError, Whole

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


class LossFunction(Protocol):
    """Of outputs [b, ...] and targets [b, ...], like the losses of torch.nn.functional."""

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the mean over all targets; with reduction "none" a value for each.

        The values of our own losses are float64.
        """
        ...


MetricFunction = Callable[["Tensor", "Tensor"], "Tensor"]  # outputs, targets: a value for each


class Diverged(UserError):
    """A gradient or the loss is no longer finite."""


class TargetError(ConfigError):
    """A target that the loss does not accept; row: of the batch."""

    def __init__(self, row: int, said: str) -> None:
        super().__init__(said)
        self.row = row

    def __reduce__(self) -> tuple[type[TargetError], tuple[int, str]]:
        return type(self), (self.row, str(self))


class Loss(Section):
    """[loss]: the function that training minimises, named in LOSSES.

    long_name, units: of its values; metric: the default metric for it, one of METRICS
    """

    long_name: ClassVar[str]
    units: ClassVar[str] = "1"
    metric: ClassVar[str] = "loss"

    @property
    def label(self) -> str:
        """The name of its values in records."""
        return self.long_name

    @abstractmethod
    def build(self) -> LossFunction:
        """Return the function, which raises ConfigError if outputs and targets do not fit."""

    def check(self, outputs: Tensor, classes: int) -> None:
        """Raise ConfigError if outputs do not suit data of so many classes; 0: unknown."""

    def guessed(self, classes: int) -> float:
        """Return the loss of equal outputs for all classes; infinity if unknown."""
        return math.inf


class CrossEntropy(Loss):
    """[loss] name = "cross_entropy": of outputs [b, classes, ...] and integer targets [b, ...].

    label_smoothing: share of the target that is spread evenly over classes, in training and test
    Source: Szegedy et al.: Rethinking the inception architecture, CVPR 2016, section 7.
    """

    long_name = "cross entropy"
    units = "nat"
    metric = "accuracy"

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: Share = 0.0

    def build(self) -> LossFunction:
        def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
            return _cross_entropy(outputs, targets, reduction, self.label_smoothing)

        return loss

    def check(self, outputs: Tensor, classes: int) -> None:
        if outputs.shape[1] < classes:
            raise ConfigError(
                f"loss: cross_entropy: outputs {shown(outputs)}, data of {classes} classes: "
                "must be [b, classes, ...]"
            )

    def guessed(self, classes: int) -> float:
        return math.log(classes) if classes else math.inf


NO_CLASS = -(2**63)  # torch ignores targets of -100 unless another value is to be ignored


def _cross_entropy(
    outputs: Tensor, targets: Tensor, reduction: str, label_smoothing: float = 0.0
) -> Tensor:
    from torch.nn.functional import cross_entropy

    from ...ops.tensors import values_of

    classes = _check_classes("loss: cross_entropy", outputs, targets)
    try:
        if targets.is_cuda and values_of((targets < 0) | (targets >= classes)).any():
            raise IndexError  # the kernel would end the context
        return cross_entropy(
            outputs.double() if reduction == "none" else outputs,
            targets.long(),
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=NO_CLASS,
        )
    except IndexError:
        wrong = ((targets < 0) | (targets >= classes)).reshape(len(targets), -1)
        row, column = wrong.nonzero()[0].tolist()
        said = f"target {int(targets.reshape(len(targets), -1)[row, column])}"
        raise TargetError(row, f"{said}: must be a class, 0 to {classes - 1}") from None


def _check_classes(where: str, outputs: Tensor, targets: Tensor) -> int:
    """Return the number of classes. Raises ConfigError if targets are not classes."""
    whole = not (targets.is_floating_point() or targets.is_complex())
    if outputs.ndim < 2 or not whole or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise ConfigError(
            f"{where}: outputs {shown(outputs)}, targets {shown(targets)}: "
            "must be [b, classes, ...] and integers [b, ...]"
        )
    return outputs.shape[1]


def shown(tensor: Tensor) -> str:
    """Return dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class MeanSquares(Loss):
    """[loss] name = "mse": mean square of outputs less targets, both of one shape."""

    long_name = "mean square"

    name: Literal["mse"] = "mse"

    def build(self) -> LossFunction:
        from torch.nn.functional import mse_loss

        def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
            if outputs.shape != targets.shape:  # torch would broadcast
                raise ConfigError(
                    f"loss: mse: outputs {shown(outputs)}, targets {shown(targets)}: "
                    "must have one shape"
                )
            given = outputs.double() if reduction == "none" else outputs
            return mse_loss(given, targets.to(given.dtype), reduction=reduction)

        return loss


LOSSES: dict[str, type[Loss]] = {"cross_entropy": CrossEntropy, "mse": MeanSquares}


class Adversarial(Section):
    """[adversarial]: half of the loss is of copies, samples + epsilon sign(gradient of the loss).

    epsilon: largest change of an input value; 0: no copies
    tau: age in steps of the parameters that make the copies. 0: those of the step, so that its
        two gradients are computed one after the other; 1 or more: copies need not wait for the
        last step
    alternate: "turns": each rank computes both halves; "ranks": the first half of the ranks has the
        samples, the other the copies, which takes an even number of ranks
    trained: false: copies are only evaluated, with the parameters of that time, not trained on
    low, high: bounds for the values of copies; default: no bounds
    Batch norms have separate statistics for copies; evaluation uses those of samples.
    Source: Liu et al., Concurrent Adversarial Learning for Large-Batch Training, arXiv 2106.00221.
    """

    epsilon: NotNegative = 0.0
    tau: Whole = 1
    alternate: Literal["turns", "ranks"] = "turns"
    trained: bool = True
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Adversarial:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low={self.low}: should be below high={self.high}")
        return self

    @property
    def groups(self) -> int:
        """The number of groups of ranks: 2 if one has the samples and the other the copies."""
        return 2 if self.epsilon and self.trained and self.alternate == "ranks" else 1

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if this number of ranks, virtual ones included, is not possible."""
        if ranks % self.groups:
            raise ValueError(f"{ranks} ranks: must be even")


class Metric(Section):
    """[metric]: a score of the test samples beside their loss, named in METRICS.

    units: of the score; percent: whether it is shown in percent; lower: whether less is better
    """

    units: ClassVar[str] = "1"
    percent: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """Its name in records and reports."""

    @property
    def column(self) -> str:
        """Its column in records, which is followed by the loss."""
        return f"test_{self.label}"

    @property
    def long_name(self) -> str:
        return f"{self.label} of test samples"

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return True

    @abstractmethod
    def build(self) -> MetricFunction | None:
        """Return a function with a value for each target; None if the loss is the score."""

    def score(self, mean: float) -> float:
        """Return the score from the mean of the values over all targets of all samples."""
        return mean

    def told(self, score: float) -> str:
        return f"{self.label} {score:.2%}" if self.percent else f"{self.label} {score:.4g}"


class Accuracy(Metric):
    """[metric] name = "accuracy": share of the targets whose class has the largest output."""

    percent: ClassVar[bool] = True
    label: ClassVar[str] = "accuracy"
    long_name: ClassVar[str] = "share of test samples that are right"
    lower: ClassVar[bool] = False

    name: Literal["accuracy"] = "accuracy"

    def build(self) -> MetricFunction:
        def right(outputs: Tensor, targets: Tensor) -> Tensor:
            _check_classes("metric: accuracy", outputs, targets)
            return outputs.argmax(1) == targets

        return right


class Perplexity(Metric):
    """[metric] name = "perplexity": exp of the mean cross entropy, never smoothed."""

    label: ClassVar[str] = "perplexity"

    name: Literal["perplexity"] = "perplexity"

    def build(self) -> MetricFunction:
        return lambda outputs, targets: _cross_entropy(outputs, targets, "none")

    def score(self, mean: float) -> float:
        """Return exp(mean), infinity if that is too large."""
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf


class LossAlone(Metric):
    """[metric] name = "loss": no score beside the loss."""

    label: ClassVar[str] = "loss"

    name: Literal["loss"] = "loss"

    def build(self) -> None:
        """Return None. See Metric.build."""


METRICS: dict[str, type[Metric]] = {
    "accuracy": Accuracy,
    "loss": LossAlone,
    "perplexity": Perplexity,
}
