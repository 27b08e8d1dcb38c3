"""Update rules: how the gradients of all ranks become the next parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...collectives import sparse
from ...compress.base import Array, Mean
from ...compress.bucket import Bucket, Entry, State
from ...config import Above0, Positive, Section, Share
from ...lazy import Late
from ...world.ranks import Ranks

if TYPE_CHECKING:
    import torch

    from ...torch.reducer import GradientReducer
else:
    torch = Late("torch")


class AnyUpdate:
    """The interface of updates for a training, by ranks (Update) or by stages (staged.py).

    state: per-rank data, such as parameters that differ; it is in checkpoints
    interval: steps from one averaging reduce to the next
    """

    interval = 1

    def __init__(self, optimizer: torch.optim.Optimizer, world: Ranks) -> None:
        self.optimizer, self.world = optimizer, world
        self.state = State(world.hosted, world.ranks)

    def batch(self, coming: Array, size: int) -> Array:
        """Return the next global batch; coming: int64[n], samples of the epoch not yet seen."""
        return coming[:size]

    @property
    def at_rest(self) -> bool:
        """Whether a checkpoint may be taken now."""
        return True

    @property
    def sent_bytes(self) -> Array | int:
        """int64[hosted], bytes sent through other worlds than the training's; or 0."""
        return 0

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Make the model the one to evaluate and save, the same on all ranks. Collective."""
        yield

    def note(self) -> None:
        """Update state before it is saved."""

    def resumed(self, former_ranks: int) -> str:
        """Continue from a checkpoint's model and state.

        former_ranks: number of ranks in the run that saved state. Returns a notice.
        """
        return ""


class Update(AnyUpdate, ABC):
    """One step after backward. All processes make the same calls, in this order:

        for each hosted rank:  begin(hosted); forward and backward; keep(hosted)
        reduce(); step()

    model: the only model of a process, used for its hosted ranks one after the other
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> None:
        super().__init__(optimizer, reducer.world)
        self.model, self.reducer = model, reducer

    def begin(self, hosted: int) -> None:
        """Make the model that of a hosted rank, before its forward."""

    @abstractmethod
    def keep(self, hosted: int) -> None:
        """Take p.grad as the gradient of a hosted rank."""

    @abstractmethod
    def reduce(self) -> Mean:
        """Exchange the data that ranks need from one another. Collective.

        Returns the mean of the gradients, for telemetry, or NOTHING if a step has none. Raises
        NonFiniteGradient on all ranks, with all parameters unchanged.
        """

    @abstractmethod
    def step(self) -> None:
        """Change the parameters of all hosted ranks."""


NOTHING = Mean(np.empty(0, np.float32))  # for a step without a mean


class UpdateRule(Section):
    """[update]: the rule, named in UPDATES.

    needs: the one value that other keys of a job may have, by table.key
    """

    needs: ClassVar[Mapping[str, object]] = {}

    name: str

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if this number of ranks, virtual ones included, is not possible."""

    @abstractmethod
    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> Update:
        """Return the rule's update. Collective if it distributes initial values to ranks."""


class AllreduceUpdate(Update):
    """The mean gradient, then the optimiser's step: all ranks hold the same parameters."""

    def keep(self, hosted: int) -> None:
        if self.world.virtual_ranks > 1:  # otherwise reduce takes p.grad itself
            self.reducer.stash(hosted)

    def reduce(self) -> Mean:
        return self.reducer.reduce()

    def step(self) -> None:
        self.optimizer.step()


class ByAllreduce(UpdateRule):
    """[update] name = "allreduce": the optimiser steps with the mean gradient."""

    name: Literal["allreduce"] = "allreduce"

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> Update:
        return AllreduceUpdate(model, optimizer, reducer)


MOMENTS = "optimizer."  # prefix of the optimiser's entries in state


class OwnModels(Update):
    """A model for each rank; a process's one model object is used for its hosted ranks in turn.

    Parameters lie in state as float32 buffers laid out by bucket. Buffers of the model, such as
    statistics of batch norm, stay with their rank, which has only seen its own samples; the
    average has the mean over ranks of floating-point ones, and rank 0's others.
    align: each layer starts on a multiple of it
    consensus_distance: root of the mean over ranks of |x_i - mean x|**2, of all parameters
        together, at the last entry of evaluated()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        align: int = 1,
    ) -> None:
        from ...torch.buffers import Buffers

        super().__init__(model, optimizer, reducer)
        self.bucket = Bucket(reducer.bucket.names, reducer.bucket.shapes, align)
        self.consensus_distance = 0.0
        self._buffers = Buffers(model, self.world, "mean")
        self._moments: list[Any] = []
        self._start()

    def _start(self) -> None:
        """Give all ranks the current model, and nothing else."""
        self._playing: int | None = None
        self._moments = [defaultdict(dict) for _ in self.world.hosted]
        for hosted in range(self.world.virtual_ranks):
            self._store(hosted)

    def _own(self, name: str) -> list[Array]:
        """Return float32[bucket.size] of each hosted rank."""
        return self.state.own("", name, (self.bucket.size,), "drop")

    @property
    def parameters(self) -> list[Array]:
        return self._own("parameters")

    def _buffer_bytes(self) -> list[Array]:
        """Return the buffers of each hosted rank, uint8[bytes]."""
        size_bytes = sum(each.nbytes for each in self.model.buffers())
        return self.state.own("", "buffers", (size_bytes,), "drop", np.uint8)

    def _store(self, hosted: int) -> None:
        """Keep the model as that of a hosted rank."""
        values = [p.detach().float().numpy() for p in self.reducer.parameters]
        self.bucket.flatten(values, self.parameters[hosted])
        self._store_buffers(hosted)

    def _store_buffers(self, hosted: int) -> None:
        from ...ops.tensors import bytes_of

        self._buffer_bytes()[hosted][...] = bytes_of([*self.model.buffers()]).numpy()

    def _load_parameters(self, flat: Array) -> None:
        for p, values in zip(self.reducer.parameters, self.bucket.views(flat), strict=True):
            p.data.copy_(torch.from_numpy(values))

    def _load_buffers(self, hosted: int) -> None:
        from ...ops.tensors import of_bytes

        buffers = [each.detach() for each in self.model.buffers()]
        for each, values in zip(
            buffers, of_bytes(self._buffer_bytes()[hosted], buffers), strict=True
        ):
            each.copy_(values)

    def begin(self, hosted: int) -> None:
        if self._playing != hosted:
            self._load_parameters(self.parameters[hosted])
            self._load_buffers(hosted)
            self._playing = hosted

    def keep(self, hosted: int) -> None:
        self.reducer.stash(hosted)
        self._store_buffers(hosted)

    def mean(self) -> Array:
        """Return the mean of all ranks' parameters, rounded once, float32[n]. Collective."""
        total = sparse.sum(self.world, [x.astype(np.float64) for x in self.parameters])
        return np.asarray(total / self.world.ranks, np.float32)

    def _distance(self, mean: Array) -> float:
        """Return the root of the mean square of distances to the mean. Collective."""
        own = [float(np.square(x - mean, dtype=np.float64).sum()) for x in self.parameters]
        everyone = [square for process in self.world.gather(own) for square in process]
        return sqrt(fsum(everyone) / self.world.ranks)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Make the model the average of all ranks'. Collective. See Update.evaluated.

        Meanwhile the optimiser has no state, as it would belong to no rank.
        """
        from ...torch.buffers import Survey

        if next(self.model.buffers(), None) is not None:
            for hosted in range(self.world.virtual_ranks):
                self._load_buffers(hosted)
                self._buffers.keep(hosted)
            self._buffers.share(Survey(self.model).buffers, [True] * self.world.processes)
        mean = self.mean()
        self.consensus_distance = self._distance(mean)
        self._load_parameters(mean)
        self._playing = None
        here, self.optimizer.state = self.optimizer.state, defaultdict(dict)
        try:
            yield
        finally:
            self.optimizer.state = here

    def note(self) -> None:
        names = dict(zip(self.reducer.parameters, self.bucket.names, strict=True))
        for parameter, first in self._moments[0].items():
            for name, tensor in first.items():
                if tensor is not None:  # SGD has no buffer without momentum
                    rows = [moments[parameter][name].numpy() for moments in self._moments]
                    key = names[parameter], MOMENTS + name
                    self.state.put(key, Entry(np.stack(rows), "drop"))

    def resumed(self, former_ranks: int) -> str:
        """Restore each rank's model and optimiser; with another number of ranks only the average.

        Data that is the same on all ranks stays. See Update.resumed.
        """
        if former_ranks != self.world.ranks:
            shared = [(k, e) for k, e in self.state if e.redistribution is None]
            self.state = State(self.world.hosted, self.world.ranks)
            for key, entry in shared:
                self.state.put(key, entry)
            self._start()
            return (
                f"{former_ranks} ranks before, {self.world.ranks} now: all begin with the average "
                "of their models, and with new momentum"
            )
        self._playing = None
        parameters = dict(zip(self.bucket.names, self.reducer.parameters, strict=True))
        for (layer, name), entry in self.state:
            if name.startswith(MOMENTS):
                for moments, row in zip(self._moments, entry.array, strict=True):
                    tensor = torch.from_numpy(np.array(row))
                    moments[parameters[layer]][name.removeprefix(MOMENTS)] = tensor
        return ""


class OwnModelsRule(UpdateRule):
    """A rule whose ranks have models of their own: gradients are local, and not averaged.

    evaluate_ranks: each epoch every rank's own model is evaluated on all test samples, besides the
        average of all models, which the ranks evaluate together
    """

    evaluate_ranks: bool = True

    needs: ClassVar[Mapping[str, object]] = {
        "train.overlap": False,
        "train.image_grid": (1, 1),
        "train.loss_scaling": "static",
        "train.loss_scale": None,
    }


class PeriodicUpdate(OwnModels):
    """Local steps of each rank's own optimiser, then one outer step, the same on all ranks.

    The outer gradient is the difference from each rank's current parameters to the common start,
    averaged by the reducer's aggregator; the outer step is SGD with Nesterov's momentum.
    interval: local steps; rate, momentum: of the outer step
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        interval: int,
        rate: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(model, optimizer, reducer, reducer.bucket.align)
        self.interval, self.rate, self.momentum = interval, np.float32(rate), np.float32(momentum)
        self._anchor()

    def _anchor(self) -> Array:
        """Return the common start of the local steps, float32[bucket.size]."""
        return self.state.shared("", "anchor", self.parameters[0].copy)

    def reduce(self) -> Mean:
        """Step on every rank; at the end of a period also the outer step. Collective.

        See Update.reduce. If outer gradients are not finite, ranks have already stepped.
        """
        used = self.reducer.collect()
        for hosted in range(self.world.virtual_ranks):
            self.begin(hosted)
            self._local_step(hosted, used)
        return NOTHING if self.reducer.iteration % self.interval else self._outer_step()

    def step(self) -> None:
        """Do nothing: reduce has stepped, as it exchanges the result of the steps."""

    def _local_step(self, hosted: int, used: Sequence[int]) -> None:
        """Let the optimiser of a hosted rank step; used: by layer, whether any has a gradient."""
        gradients = self.reducer.bucket.views(self.reducer.flats[hosted])
        for p, gradient, is_used in zip(self.reducer.parameters, gradients, used, strict=True):
            p.grad = torch.from_numpy(gradient).to(p.dtype) if is_used else None
        self.optimizer.state = self._moments[hosted]
        self.optimizer.step()
        self._store(hosted)

    def _outer_step(self) -> Mean:
        """Give all ranks one common model to continue from. Collective."""
        anchor = self._anchor()
        for flat, parameters in zip(self.reducer.flats, self.parameters, strict=True):
            np.subtract(anchor, parameters, out=flat)
        mean = self.reducer.average()
        direction = mean.flat
        if self.momentum:
            kept = self.state.shared("", "outer_momentum", lambda: np.zeros_like(anchor))
            kept *= self.momentum
            kept += mean.flat
            direction = mean.flat + self.momentum * kept
        anchor -= self.rate * direction
        for parameters in self.parameters:
            parameters[...] = anchor
        self._playing = None
        return mean


class LocalSgd(OwnModelsRule):
    """[update] name = "localsgd": ranks step alone, and then average their models.

    period: local steps from one mean to the next; the paper leaves this number open. [gradient]
        averages the changes of each rank's parameters since the last mean
    Source: Stich: Local SGD converges fast and communicates little, arXiv 1805.09767.
    """

    needs: ClassVar[Mapping[str, object]] = {**OwnModelsRule.needs, "gradient.has_momentum": False}

    name: Literal["localsgd"] = "localsgd"
    period: Positive = 8

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> PeriodicUpdate:
        return PeriodicUpdate(model, optimizer, reducer, self.period)


class DiLoCo(LocalSgd):
    """[update] name = "diloco": ranks step alone; then an outer step along their mean change.

    period: local steps, by the job's optimiser, from one outer step to the next. The paper uses
        500: 50 is a choice for runs of a few hundred steps, which would have none with 500
    outer_rate: of the outer step, along the mean change, which [gradient] computes: in any wire,
        with error feedback too
    outer_momentum: Nesterov's, of the outer step
    Source: Douillard et al.: DiLoCo, arXiv 2311.08105, algorithm 1.
    """

    name: Literal["diloco"] = "diloco"  # type: ignore[assignment]
    period: Positive = 50
    outer_rate: Above0 = 0.7
    outer_momentum: Share = 0.9

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> PeriodicUpdate:
        outer = self.outer_rate, self.outer_momentum
        return PeriodicUpdate(model, optimizer, reducer, self.period, *outer)
