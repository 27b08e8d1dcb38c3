"""Averaging of gradients inside torch's DistributedDataParallel, by its communication hook."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from ..collectives.checks import alike_on_all
from ..compress.base import Aggregator
from ..compress.bucket import Bucket
from ..ops.tensors import CPU, OwnStream, array_of, check_device, in_stream
from ..world.mpi import as_world
from ..world.ranks import Ranks
from .averaging import (
    FLOATS,
    PLAIN,
    Averaging,
    aggregator_of,
    check_options,
    check_range,
    check_whole_model,
    is_plain,
    kind,
    multiplied,
    named,
    policies_of,
    shapes_of,
)
from .buffers import Buffers, Survey, scales_of
from .overlap import check_overlap, pause_s, reducing_thread

Dtypes = Sequence[torch.dtype]
Future = torch.futures.Future[torch.Tensor]


class BucketLayout(NamedTuple):
    """Layers of one of DDP's buckets in the model's order, and their gradients as float32.

    order: of each, its index in DDP's bucket; flat: float32[bucket.size], this rank's gradients;
    views: the same by layer
    """

    bucket: Bucket
    order: list[int]
    flat: torch.Tensor
    views: list[torch.Tensor]


class Hook(Averaging):
    """Common base of the states of communication hooks: GradientReducer's, with torch's buckets.

    call: the function that returned it, for errors
    iteration: of the next backward that torch synchronises
    """

    call: ClassVar[str]

    def __init__(
        self,
        world: Any,
        aggregator: str | Aggregator,
        model: torch.nn.Module | None,
        seed: int,
        options: dict[str, Any],
        overlap: bool = False,
    ) -> None:
        super().__init__(as_world(world, self.call), seed)
        self.layers, self.frozen, self.parameters = {}, {}, []
        self._scales: Buffers | None = None
        self._spares: dict[str, torch.Tensor] = {}
        with alike_on_all(self.world, f"{self.call}: options") as settings:
            given = torch.nn.Identity() if model is None else model
            check_options(self.call, given, seed, overlap)
            model = getattr(model, "_orig_mod", model)  # the one that torch.compile has wrapped
            self.aggregator = aggregator_of(self.call, aggregator, options)
            group = None if model is None else self._learn(model)
            self.aggregator.check_layers(self.layers)
            check_world(self.call, self.world, group)
            if overlap:
                check_overlap(self.world)
            settings |= {
                "aggregator": self.aggregator,
                "seed": seed,
                "overlap": overlap,
                "layers": self.layers,
                "precision": "" if model is None else str(policies_of(model)),
                "device": self.parameters[0].device.type if self.parameters else "",
            }
        if model is not None and scales_of(Survey(model).buffers):
            self._scales = Buffers(model, self.world, "broadcast")
        if self.parameters:
            self._check_gpus(self.call, self.parameters[0])
        self._watch_momentum()
        self._begin()

    @abstractmethod
    def _learn(self, model: torch.nn.Module) -> distributed.ProcessGroup | None:
        """Record a model's layers; return its process group, None for the default one."""

    @abstractmethod
    def _begin(self) -> None:
        """Reset the state of a step."""

    def _check_gradient(self, layer: str, gradient: torch.Tensor) -> None:
        """Raise ValueError unless a gradient, of a layer and maybe others, can be averaged."""
        if gradient.dtype not in FLOATS or not is_plain(gradient):
            raise ValueError(
                f"{self.call}: the gradient of {layer!r} on rank {self.world.rank} is "
                f"{kind(gradient)}: should be {PLAIN}"
            )

    def _spare(self, name: str, bucket: Bucket, device: torch.device) -> torch.Tensor:
        """Return scratch memory for one bucket at a time, float32[bucket.size], of any content."""
        spare = self._spares.get(name)
        if spare is None or spare.numel() < bucket.size or spare.device != device:
            spare = torch.empty(bucket.size, dtype=torch.float32, device=device)
            self._spares[name] = spare
        return spare[: bucket.size]

    def _mean(
        self, index: int, given: torch.Tensor, bucket: Bucket, dtypes: Dtypes
    ) -> torch.Tensor:
        """Return the mean of a bucket, float32[bucket.size], valid until the next. Collective.

        given: this rank's gradients, float32[bucket.size]; dtypes: of the layers, which it suits
        """
        mean = self._spare("mean", bucket, given.device)
        out = array_of(mean)
        self._aggregate(index, [array_of(given)], bucket, out)
        multiplied(out, 1 / self.loss_scale, bucket)
        check_range(bucket, out, dtypes)
        return mean

    def _share_scales(self) -> None:
        """Give all ranks the scales of precision.convert that have seen most calls. Collective."""
        if self._scales is not None:
            named = scales_of(Survey(self._scales.model).buffers)
            self._scales.share(named, [True] * self.world.processes)


class DdpHook(Hook):
    """The state of the hook of DistributedDataParallel. close() ends the thread of overlap."""

    call = "ddp_hook"

    def __init__(
        self,
        world: Any,
        aggregator: str | Aggregator,
        model: torch.nn.Module | None,
        seed: int,
        overlap: bool,
        options: dict[str, Any],
    ) -> None:
        self._names: dict[int, str] = {}  # by id of a parameter, in the model's order
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self._stream = OwnStream(CPU)
        super().__init__(world, aggregator, model, seed, options, overlap)
        self._executor = reducing_thread(self.world) if overlap else None

    def _learn(self, model: torch.nn.Module) -> distributed.ProcessGroup | None:
        check_whole_model(self.call, model)
        bare, group = model, None
        if isinstance(model, DistributedDataParallel):
            bare, group = model.module, model.process_group
        for name, parameter in named(bare, True):
            self._name_it(parameter, name)
        self.frozen = shapes_of(named(bare, False))
        return group

    def _name_it(self, parameter: torch.nn.Parameter, name: str) -> None:
        self._names[id(parameter)] = name
        self.parameters.append(parameter)
        self.layers[name] = list(parameter.shape)

    def _begin(self) -> None:
        self._error: Exception | None = None
        self._done: list[tuple[BucketLayout, Sequence[torch.nn.Parameter]]] = []

    def take(self, bucket: Any) -> Future:
        """Return the future of a bucket's mean; bucket: torch's GradBucket. Collective."""
        if bucket.index() == 0:
            self._begin()
            if self.world.lent_to is not None:
                self._error = RuntimeError(
                    "ddp_hook: gradients of another model are on their way since its backward: "
                    "call reduce() of its GradientReducer first"
                )
            elif self._executor is not None:
                self.world.lent_to = self
        given = bucket.index(), bucket.parameters(), bucket.gradients(), bucket.buffer()
        last, device = bucket.is_last(), bucket.buffer().device
        future: Future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if self._executor is None:
            with in_stream(device):
                self._average(*given, last, future)
        else:
            if self._stream.device != device:
                self._stream = OwnStream(device)
            if self.world.lent_to is self:
                self.world.lent_by = threading.get_ident()
                self.world.pause_s = pause_s(self.world)
            self._executor.submit(self._average_after, self._stream.mark(), *given, last, future)
        if last:
            _after_backward(lambda: self._end(future))
        return future

    def _average_after(self, gathered: Any, *given: Any) -> None:
        """Average a bucket in the thread, once backward's stream has filled it."""
        with self._stream.after(gathered):
            self._average(*given)

    def _average(
        self,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        last: bool,
        future: Future,
    ) -> None:
        """Set a bucket's gradients to the mean. Collective.

        All ranks get the same errors, after which they leave out the later buckets of the step.
        """
        try:
            if self._error is None:
                self._reduce(index, parameters, gradients, buffer)
            if last and self._error is None:
                self._share_scales()
        except Exception as found:
            self._error = found
        if last and self.world.lent_to is self:
            self.world.lent_by = self.world.lent_to = None
        future.set_result(buffer)

    def _reduce(
        self,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
    ) -> None:
        with alike_on_all(self.world, "ddp_hook: bucket") as alike:
            alike |= {"iteration": self.iteration, "bucket": index, "loss_scale": self.loss_scale}
            if self._wrong is not None:
                raise self._wrong
            layout = self._layout(parameters)
            alike["layers"] = layout.bucket.names
            self._check_gradient(layout.bucket.names[0], buffer)
            for i, view in zip(layout.order, layout.views, strict=True):
                view.copy_(gradients[i])
        dtypes = [gradients[i].dtype for i in layout.order]
        mean = self._mean(index, layout.flat, layout.bucket, dtypes)
        self._done.append((layout, parameters))
        for i, (_, start, stop) in zip(layout.order, layout.bucket.segments, strict=True):
            gradients[i].copy_(mean[start:stop].view_as(gradients[i]))

    def _layout(self, parameters: Sequence[torch.nn.Parameter]) -> BucketLayout:
        """Return the layout of a bucket; DDP may rebuild its buckets after the first step."""
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            for parameter in parameters:
                if id(parameter) not in self._names:
                    self._name_it(parameter, str(len(self._names)))
            place = {name: i for i, name in enumerate(self.layers)}
            names = [self._names[each] for each in key]
            order = sorted(range(len(key)), key=lambda i: place[names[i]])
            shapes = tuple(tuple(parameters[i].shape) for i in order)
            bucket = Bucket(tuple(names[i] for i in order), shapes, self.aggregator.align)
            device = parameters[0].device
            check_device(f"ddp_hook: {bucket.names[0]!r}", device)
            flat = torch.zeros(bucket.size, dtype=torch.float32, device=device)
            views = [
                flat[start:stop].reshape(shape)
                for (_, start, stop), shape in zip(bucket.segments, shapes, strict=True)
            ]
            if any(key[0] in other for other in self._layouts):
                self._layouts.clear()  # of the former buckets
                self._spares.clear()
            self._layouts[key] = BucketLayout(bucket, order, flat, views)
        return self._layouts[key]

    def _end(self, last: Future) -> None:
        """Count the step; or raise its error from backward, with p.grad this rank's own."""
        if self.world.lent_to in (None, self):
            self.world.pause_s = 0.0  # backward is over
        last.wait()
        if self._error is not None:
            for layout, parameters in self._done:
                for i, view in zip(layout.order, layout.views, strict=True):
                    if (gradient := parameters[i].grad) is not None:
                        gradient.copy_(view)
            raise self._error
        self.iteration += 1

    def close(self) -> None:
        """End the thread of overlap; to be called between two steps."""
        if self._executor is not None:
            self._executor.shutdown()


def check_world(call: str, world: Ranks, group: distributed.ProcessGroup | None) -> None:
    """Raise ValueError unless a world has the ranks of a group, one for each process.

    group: None: torch's default one, if it exists
    """
    if world.virtual_ranks > 1:
        raise ValueError(
            f"{call}: world has virtual_ranks={world.virtual_ranks}: should be 1, as in torch"
        )
    if group is None and not distributed.is_initialized():
        return
    there = distributed.get_rank(group), distributed.get_world_size(group)
    if there != (world.rank, world.size):
        which = "the default process group" if group is None else "the process group of model"
        raise ValueError(
            f"{call}: world: rank {world.rank} of {world.size} is rank {there[0]} of {there[1]} "
            f"in {which}: should be the same"
        )


def _after_backward(end: Any) -> None:
    """Call a function once DDP has finished the current backward; now if there is none.

    DDP queues its own end after its last bucket's hook, so ours is queued from a callback. There is
    no backward on a rank that has run out of batches and follows the others (Join).
    """
    if torch._C._current_graph_task_id() < 0:
        end()
    else:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(end))


def average_bucket(state, bucket, *more):  # type: ignore[no-untyped-def]  # torch refuses string annotations
    """Return the future of a bucket's mean over all ranks: DDP's hook. Collective."""
    if isinstance(bucket, torch.Tensor):
        raise TypeError(
            "ddp_hook: the hook is called by FullyShardedDataParallel: should be called by "
            "DistributedDataParallel: register what cpdhpc.torch.fsdp_hook returns"
        )
    return state.take(bucket)


def ddp_hook(
    world: Any,
    aggregator: str | Aggregator = "none",
    *,
    model: torch.nn.Module | None = None,
    seed: int = 0,
    overlap: bool = False,
    **options: Any,
) -> tuple[DdpHook, Any]:
    """Return state and hook for DistributedDataParallel.register_comm_hook. Collective.

        ddp.register_comm_hook(*ddp_hook(World(), "lowbit", wire="e4m3", model=ddp))

    world: World, Loopback or an mpi4py communicator with the ranks of DDP's process group. Only
        the world carries gradients
    aggregator, seed, options: see GradientReducer
    model: its names of layers are used in options, errors and the saved state. Without it layers
        are numbered in the order of DDP's buckets. Scales of precision.convert that depend on
        former calls need it: they are shared after each backward
    overlap: average buckets in a thread while backward continues, with the same bits. MPI must not
        be called until backward returns, and must have the thread level "serialized"
    Gradients are float32, bfloat16 or float16, on the CPU or on a GPU, with any backend of DDP's
    own process group. For invalid gradients, such as NaN, backward() raises an error on all ranks
    and leaves each its own gradients; the next step may follow.
    Raises the same error on all ranks: ValueError or TypeError for an unknown name, unknown
    options, other ranks than DDP's, and options or models that differ between ranks.
    """
    return DdpHook(world, aggregator, model, seed, overlap, options), average_bucket
