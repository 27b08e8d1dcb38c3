"""The averaging of gradients inside torch's DistributedDataParallel, as its communication hook."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
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
from .buffers import Buffers, scales_of, survey
from .overlap import check_overlap, pause_s, reducing_thread

Array = npt.NDArray[Any]
Future = torch.futures.Future[torch.Tensor]


class Layout(NamedTuple):
    """Layers of one of DDP's buckets in the model's order, and their gradients as float32.

    order: the place of each in DDP's bucket; flats: float32[bucket.size] where the gradients are,
    and where their means come; views, means: tensors of these, by layer
    """

    bucket: Bucket
    order: list[int]
    flats: tuple[Array, Array]
    views: list[torch.Tensor]
    means: list[torch.Tensor]


class DdpHook(Averaging):
    """The state of a communication hook: as GradientReducer has it, but DDP makes the buckets.

    iteration: of the next backward that DDP synchronises; its other attributes and state_dict,
    load_state_dict are those of GradientReducer. close() ends the thread of overlap.
    """

    def __init__(
        self,
        world: Any,
        aggregator: str | Aggregator,
        model: torch.nn.Module | None,
        seed: int,
        overlap: bool,
        options: dict[str, Any],
    ) -> None:
        super().__init__(as_world(world, "ddp_hook"), seed)
        self.layers, self.frozen = {}, {}
        self._names: dict[int, str] = {}  # of a parameter, by id, in the model's order
        self.parameters = []  # so that ids stay theirs
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._scales: Buffers | None = None
        self._executor = reducing_thread(self.world) if overlap else None
        self._stream = OwnStream(CPU)
        with alike_on_all(self.world, "ddp_hook: options") as settings:
            given = torch.nn.Identity() if model is None else model
            check_options("ddp_hook", given, seed, overlap)
            model = getattr(model, "_orig_mod", model)  # torch.compile(ddp) is it, wrapped
            self.aggregator = aggregator_of("ddp_hook", aggregator, options)
            if model is not None:
                self._learn(model)
            self.aggregator.check_layers(self.layers)
            group = model.process_group if isinstance(model, DistributedDataParallel) else None
            check_world("ddp_hook", self.world, group)
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
        if self.parameters:
            self._check_gpus("ddp_hook", self.parameters[0])
        self._watch_momentum()
        self._begin()

    def _learn(self, model: torch.nn.Module) -> None:
        """Note the names of a model's parameters."""
        check_whole_model("ddp_hook", model)
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        for name, parameter in named(bare, True):
            self._name_it(parameter, name)
        self.frozen = shapes_of(named(bare, False))
        if scales_of(survey(model)[1]):
            self._scales = Buffers(model, self.world, "broadcast")

    def _name_it(self, parameter: torch.nn.Parameter, name: str) -> None:
        self._names[id(parameter)] = name
        self.parameters.append(parameter)
        self.layers[name] = list(parameter.shape)

    def _begin(self) -> None:
        self._error: Exception | None = None
        self._done: list[tuple[Layout, Sequence[torch.nn.Parameter]]] = []

    def take(self, bucket: Any) -> Future:
        """Return the future of the mean of a bucket, torch's GradBucket. Collective."""
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
            self._executor.submit(self._behind, self._stream.mark(), *given, last, future)
        if last:
            _after_backward(lambda: self._end(future))
        return future

    def _behind(self, gathered: Any, *given: Any) -> None:
        """Average a bucket in the thread, behind what backward has put into it."""
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

        An error is every rank's, so the later buckets of the step are left out on all of them.
        """
        try:
            if self._error is None:
                self._reduce(index, parameters, gradients, buffer)
            if last and self._error is None and self._scales is not None:
                named = scales_of(survey(self._scales.model)[1])
                self._scales.share(named, [True] * self.world.processes)
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
            if buffer.dtype not in FLOATS or not is_plain(buffer):
                raise ValueError(
                    f"ddp_hook: the gradient of {layout.bucket.names[0]!r} on rank "
                    f"{self.world.rank} is {kind(buffer)}: should be {PLAIN}"
                )
            for i, view in zip(layout.order, layout.views, strict=True):
                view.copy_(gradients[i])
        given, out = layout.flats
        self._aggregate(index, [given], layout.bucket, out)
        multiplied(out, 1 / self.loss_scale, layout.bucket)
        check_range(layout.bucket, out, [gradients[i].dtype for i in layout.order])
        self._done.append((layout, parameters))
        for i, mean in zip(layout.order, layout.means, strict=True):
            gradients[i].copy_(mean)

    def _layout(self, parameters: Sequence[torch.nn.Parameter]) -> Layout:
        """Return how a bucket's layers lie in float32; DDP makes other buckets now and then."""
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
            flats = [torch.zeros(bucket.size, dtype=torch.float32, device=device) for _ in range(2)]
            views = [
                [
                    flat[start:stop].reshape(shape)
                    for (_, start, stop), shape in zip(bucket.segments, shapes, strict=True)
                ]
                for flat in flats
            ]
            if any(key[0] in other for other in self._layouts):
                self._layouts.clear()  # of the buckets before
            arrays = array_of(flats[0]), array_of(flats[1])
            self._layouts[key] = Layout(bucket, order, arrays, *views)
        return self._layouts[key]

    def _end(self, last: Future) -> None:
        """Count the step; or raise its error out of backward, with p.grad this rank's own."""
        if self.world.lent_to in (None, self):
            self.world.pause_s = 0.0  # nobody computes any more
        last.wait()
        if self._error is not None:
            for layout, parameters in self._done:
                for i, view in zip(layout.order, layout.views, strict=True):
                    if (gradient := parameters[i].grad) is not None:
                        gradient.copy_(view)
            raise self._error
        self.iteration += 1

    def close(self) -> None:
        """End the thread of overlap; call it between two steps."""
        if self._executor is not None:
            self._executor.shutdown()


def check_world(call: str, world: Ranks, group: distributed.ProcessGroup | None) -> None:
    """Raise ValueError unless a world has the ranks of a group, one a process.

    group: None: torch's default one, where there is one
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
    """Call end once DDP is done with the backward that goes on; now where none does.

    DDP queues its own end behind its last bucket's hook, so ours is queued from a callback. Without
    a backward, a rank that has run out of batches follows the others (Join).
    """
    if torch._C._current_graph_task_id() < 0:
        end()
    else:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(end))


def average_bucket(state, bucket, *more):  # type: ignore[no-untyped-def]  # torch refuses those of text
    """Return the future of a bucket's mean over all ranks, as DDP asks for it. Collective."""
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

    world: World, Loopback or an mpi4py communicator, whose ranks are those of DDP's process group;
        it alone carries gradients
    aggregator, seed, options: as of GradientReducer
    model: names the layers, for options, errors and the saved state; without it they are numbers,
        in the order in which DDP brings them. Scales of precision.convert that remember former
        calls need it: after each backward all ranks have those of all ranks
    overlap: average buckets in a thread while backward goes on, with the same bits; no other call
        of MPI until backward returns; MPI must give the thread level "serialized"
    Gradients are float32, bfloat16 or float16 on the CPU or on a GPU, where they stay, whatever
    DDP's own process group is made of. What is wrong with them, as NaN, is raised on all ranks
    alike by backward(), which leaves each its own gradients; the next step may follow.
    Raises on all ranks alike ValueError or TypeError for an unknown name, unknown options, another
    number of ranks than DDP's; ValueError where ranks have other options or models.
    """
    return DdpHook(world, aggregator, model, seed, overlap, options), average_bucket
