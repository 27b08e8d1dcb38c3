"""Averaging of gradients inside torch's FullyShardedDataParallel, by its communication hook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from ..collectives.checks import alike_on_all
from ..compress.base import Aggregator
from ..compress.bucket import Bucket
from ..ops.tensors import array_of, check_device, in_stream
from .averaging import clear
from .ddp import Hook

WRAPPED = "_fsdp_wrapped_module."  # is in names of parameters


@dataclass
class Unit:
    """A wrapped module, whose gradients are one flat tensor of FSDP.

    handle: FSDP's; place: index in the model; bucket: of its layers; starts: theirs in the tensor
    """

    handle: Any
    place: int
    bucket: Bucket
    starts: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of values in FSDP's unsharded tensor of gradients."""
        return sum(self.handle.flat_param._numels_with_padding)

    @property
    def is_called(self) -> bool:
        """Whether FSDP has reached its gradients in the current backward."""
        there = self.handle._training_state.name == "BACKWARD_POST"
        return there and bool(self.handle.flat_param.requires_grad)


class FsdpHook(Hook):
    """The state of the hook of FullyShardedDataParallel."""

    call = "fsdp_hook"

    def __init__(
        self, world: Any, aggregator: str | Aggregator, model: Any, seed: int, options: Any
    ) -> None:
        self._units: list[Unit] = []
        super().__init__(world, aggregator, model, seed, options)

    def _learn(self, model: torch.nn.Module) -> Any:
        if not isinstance(model, FullyShardedDataParallel):
            said = f"fsdp_hook: model is {type(model).__name__}: must be "
            raise TypeError(f"{said}FullyShardedDataParallel; fully_shard takes no such hook")
        self.parameters = list(model.parameters())
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
        return model.process_group

    def _begin(self) -> None:
        self._called: list[Unit] = []
        self._error: Exception | None = None

    def take(self, gradient: torch.Tensor, part: torch.Tensor | None) -> None:
        """Set a unit's gradient to the mean, and part to this rank's part of it. Collective.

        All ranks get the same errors. They then leave out the later units of the step, which keep
        this rank's own gradients, and backward raises the error at its end.
        """
        if not self._called and self._error is None:  # after the end that FSDP has queued
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        count = gradient.numel() if part is None else part.numel()
        first = 0 if part is None else self.world.rank * count
        own = gradient[first : first + count]
        try:
            if self._error is None:
                with in_stream(gradient.device):
                    self._average(gradient, own, first)
        except Exception as found:
            self._error = found
        if part is not None:
            part.copy_(own)

    def _average(self, gradient: torch.Tensor, own: torch.Tensor, first: int) -> None:
        """Set own, a part of FSDP's tensor of a unit's gradients, to the mean. Collective.

        first: its place in the tensor, whose other parts are not needed
        """
        with alike_on_all(self.world, "fsdp_hook: unit") as alike:
            alike |= {"iteration": self.iteration, "loss_scale": self.loss_scale}
            if self._wrong is not None:
                raise self._wrong
            unit = self._unit(gradient)
            alike["layers"] = unit.bucket.names
            self._check_gradient(unit.bucket.names[0], gradient)
        bucket, given = unit.bucket, gradient[: unit.bucket.size]
        if gradient.dtype != torch.float32 or unit.starts != [x.start for x in bucket.segments]:
            given = self._spare("given", bucket, gradient.device)
            bucket.clear_gaps(array_of(given))
            for (_, start, stop), there in zip(bucket.segments, unit.starts, strict=True):
                given[start:stop].copy_(gradient[there : there + stop - start])
        dtypes = [gradient.dtype] * len(unit.starts)
        mean = self._mean(unit.place, given, bucket, dtypes)
        for (_, start, stop), there in zip(bucket.segments, unit.starts, strict=True):
            begin, end = max(there, first), min(there + stop - start, first + own.numel())
            if begin < end:
                values = mean[start + begin - there : start + end - there]
                own[begin - first : end - first].copy_(values)

    def _unit(self, gradient: torch.Tensor) -> Unit:
        """Return the unit that FSDP has just reached; FSDP does not pass it to hooks."""
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
        """Count the step; or raise its error from backward."""
        error = self._error
        self._begin()
        if error is not None:
            raise error
        self._share_scales()
        self.iteration += 1


def average_unit(state: FsdpHook, gradient: torch.Tensor, part: torch.Tensor | None = None) -> None:
    """Average a unit's gradient over all ranks: FSDP's hook. Collective."""
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

    world: World, Loopback or an mpi4py communicator with the ranks of the model's process group.
        The world carries gradients, the group parameters
    aggregator, seed, options: see GradientReducer
    model: FullyShardedDataParallel, with any strategy that allows hooks: not the hybrid ones. A
        unit is one bucket. Each rank computes the whole mean and keeps its part. This all-reduce
        has twice the bytes of a reduce-scatter, and a method's state is not sharded. Scales of
        precision.convert that depend on former calls are shared after each backward
    Gradients are float32, bfloat16 or float16, according to reduce_dtype, on the CPU or on a GPU.
    For invalid gradients, such as NaN, backward() raises an error on all ranks. Gradients are
    undefined then: call zero_grad(), and the next step may follow.
    Raises the same error on all ranks: ValueError or TypeError for an unknown name, unknown
    options, other ranks than the model's, and options or models that differ between ranks.
    """
    return FsdpHook(world, aggregator, model, seed, options), average_unit
