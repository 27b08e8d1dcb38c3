"""The averaging of gradients inside torch's FullyShardedDataParallel, as its communication hook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from ..collectives.checks import alike_on_all
from ..compress.base import Aggregator
from ..compress.bucket import Bucket
from ..ops.tensors import array_of, check_device, in_stream
from ..world.mpi import as_world
from .averaging import (
    FLOATS,
    PLAIN,
    Averaging,
    aggregator_of,
    check_options,
    check_range,
    clear,
    is_plain,
    kind,
    multiplied,
    policies_of,
)
from .buffers import Buffers, scales_of, survey
from .ddp import check_world

WRAPPED = "_fsdp_wrapped_module."  # is in names of parameters


@dataclass
class Unit:
    """A wrapped module, whose gradients FSDP brings as one flat tensor.

    handle: FSDP's; place: in the model; bucket: of its layers; starts: of each in FSDP's tensor
    """

    handle: Any
    place: int
    bucket: Bucket
    starts: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of values in FSDP's tensor of gradients on a rank that has it whole."""
        return sum(self.handle.flat_param._numels_with_padding)

    @property
    def is_called(self) -> bool:
        """Whether FSDP has got to its gradients in the backward that goes on."""
        there = self.handle._training_state.name == "BACKWARD_POST"
        return there and bool(self.handle.flat_param.requires_grad)


class FsdpHook(Averaging):
    """The state of a communication hook: as GradientReducer has it, but FSDP makes the buckets.

    iteration: of the next backward that FSDP synchronises; its other attributes and state_dict,
    load_state_dict are those of GradientReducer.
    """

    def __init__(
        self, world: Any, aggregator: str | Aggregator, model: Any, seed: int, options: Any
    ) -> None:
        super().__init__(as_world(world, "fsdp_hook"), seed)
        self.layers, self.frozen, self.parameters = {}, {}, []
        self._units: list[Unit] = []
        self._scales: Buffers | None = None
        self._begin()
        with alike_on_all(self.world, "fsdp_hook: options") as settings:
            check_options("fsdp_hook", model, seed, False)
            self.aggregator = aggregator_of("fsdp_hook", aggregator, options)
            model = getattr(model, "_orig_mod", model)  # torch.compile(fsdp) is it, wrapped
            if not isinstance(model, FullyShardedDataParallel):
                said = f"fsdp_hook: model is {type(model).__name__}: must be "
                raise TypeError(f"{said}FullyShardedDataParallel; fully_shard takes no such hook")
            self._learn(model)
            self.aggregator.check_layers(self.layers)
            check_world("fsdp_hook", self.world, model.process_group)
            settings |= {
                "aggregator": self.aggregator,
                "seed": seed,
                "layers": self.layers,
                "precision": str(policies_of(model)),
                "device": self.parameters[0].device.type,
            }
        self._check_gpus("fsdp_hook", self.parameters[0])
        self._watch_momentum()

    def _learn(self, model: FullyShardedDataParallel) -> None:
        """Note the units of a model, and how their layers lie in FSDP's tensors."""
        self.parameters = list(model.parameters())
        if scales_of(survey(model)[1]):
            self._scales = Buffers(model, self.world, "broadcast")
        for prefix, module in model.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            flat = module._handle.flat_param
            check_device(f"fsdp_hook: model: {prefix or 'model'}", flat.device)
            before = f"{prefix}." if prefix else ""
            names = tuple(clear(before + name).replace(WRAPPED, "") for name in flat._fqns)
            shapes = tuple(map(tuple, flat._shapes))
            unit = Unit(
                module._handle, len(self._units), Bucket(names, shapes, self.aggregator.align)
            )
            end = 0
            for size, is_padding in zip(
                flat._numels_with_padding, flat._is_padding_mask, strict=True
            ):
                if not is_padding:
                    unit.starts.append(end)
                end += size
            self._units.append(unit)
            self.layers |= {n: list(shape) for n, shape in zip(names, shapes, strict=True)}

    def _begin(self) -> None:
        self._called: list[Unit] = []
        self._error: Exception | None = None

    def take(self, gradient: torch.Tensor, part: torch.Tensor | None) -> None:
        """Set a unit's gradient to the mean; or part, this rank's part, to that of it. Collective.

        An error is every rank's, so the later units of the step are left out on all of them: they
        keep this rank's own gradients, and backward raises it at its end.
        """
        if not self._called and self._error is None:  # behind the end that FSDP has queued
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        try:
            if self._error is None:
                with in_stream(gradient.device):
                    self._average(gradient)
        except Exception as found:
            self._error = found
        if part is not None:
            start = self.world.rank * part.numel()
            part.copy_(gradient[start : start + part.numel()])

    def _average(self, gradient: torch.Tensor) -> None:
        """Set FSDP's tensor of gradients to the mean over all ranks. Collective."""
        with alike_on_all(self.world, "fsdp_hook: unit") as alike:
            alike |= {"iteration": self.iteration, "loss_scale": self.loss_scale}
            if self._wrong is not None:
                raise self._wrong
            unit = self._unit(gradient)
            alike["layers"] = unit.bucket.names
            if gradient.dtype not in FLOATS or not is_plain(gradient):
                raise ValueError(
                    f"fsdp_hook: the gradient of {unit.bucket.names[0]!r} on rank "
                    f"{self.world.rank} is {kind(gradient)}: should be {PLAIN}"
                )
        bucket = unit.bucket
        flat = torch.zeros(bucket.size, dtype=torch.float32, device=gradient.device)
        spans = [
            (flat[start:stop], gradient[there : there + stop - start])
            for (_, start, stop), there in zip(bucket.segments, unit.starts, strict=True)
        ]
        for own, given in spans:
            own.copy_(given)
        mean = torch.empty_like(flat)
        out = array_of(mean)
        self._aggregate(unit.place, [array_of(flat)], bucket, out)
        multiplied(out, 1 / self.loss_scale, bucket)
        check_range(bucket, out, [gradient.dtype] * len(spans))
        for (_, start, stop), (_, given) in zip(bucket.segments, spans, strict=True):
            given.copy_(mean[start:stop])

    def _unit(self, gradient: torch.Tensor) -> Unit:
        """Return the unit that FSDP has just got to, which it does not say."""
        known = set(map(id, self._called))
        new = [unit for unit in self._units if unit.is_called and id(unit) not in known]
        self._called += new
        size, ranks = gradient.numel(), self.world.size
        found = [unit for unit in new if unit.size <= size < unit.size + ranks]
        if len(found) != 1:
            raise RuntimeError(
                f"fsdp_hook: rank {self.world.rank} has a gradient of {size} values of "
                f"{len(found)} units: should be of one, which is called once in a backward"
            )
        return found[0]

    def _end(self) -> None:
        """Count the step; or raise its error out of backward."""
        error = self._error
        self._begin()
        if error is not None:
            raise error
        if self._scales is not None:
            named = scales_of(survey(self._scales.model)[1])
            self._scales.share(named, [True] * self.world.processes)
        self.iteration += 1


def average_unit(state: FsdpHook, gradient: torch.Tensor, part: torch.Tensor | None = None) -> None:
    """Average a unit's gradient over all ranks, as FSDP asks for it. Collective."""
    state.take(gradient, part)


def fsdp_hook(
    world: Any,
    aggregator: str | Aggregator = "none",
    *,
    model: torch.nn.Module,
    seed: int = 0,
    **options: Any,
) -> tuple[FsdpHook, Any]:
    """Return state and hook for FullyShardedDataParallel.register_comm_hook. Collective.

        model.register_comm_hook(*fsdp_hook(World(), "lowbit", wire="e4m3", model=model))

    world: World, Loopback or an mpi4py communicator, whose ranks are those of the model's process
        group; it carries gradients, the group parameters
    aggregator, seed, options: as of GradientReducer
    model: FullyShardedDataParallel, of any strategy that takes a hook: not the hybrid ones. A unit
        is one bucket. The mean is formed whole on each rank, which keeps its part: an all-reduce,
        of twice the bytes of the reduce-scatter of the same wire; what methods keep is whole, too.
        Scales of precision.convert that remember former calls are those of all ranks
    Gradients are float32, bfloat16 or float16, as reduce_dtype says, on the CPU or on a GPU. What
    is wrong with them, as NaN, is raised on all ranks alike by backward(), whose gradients are of
    no use then: zero_grad(), and the next step may follow.
    Raises on all ranks alike ValueError or TypeError for an unknown name, unknown options, another
    number of ranks than the model's; ValueError where ranks have other options or models.
    """
    return FsdpHook(world, aggregator, model, seed, options), average_unit
