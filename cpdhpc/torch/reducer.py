"""Replaces the gradients of a torch model by their mean over all ranks, in buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter, is_, methodcaller
from typing import Any, Self
from weakref import finalize, ref

import numpy as np
import numpy.typing as npt
import torch

from ..collectives.allreduce import Unagreed
from ..collectives.checks import alike_on_all, check_alike
from ..compress.base import Aggregator, Mean, raise_unless_finite
from ..compress.bucket import Bucket, split_bucket
from ..ops.tensors import OwnStream, array_of, in_stream
from .averaging import (
    Averaging,
    aggregator_of,
    broadcast,
    check_options,
    check_range,
    description,
    device_of,
    is_plain,
    kind,
    multiplied,
    named,
    policies_of,
    shapes_of,
    tensors_of,
)
from .buffers import REQUIRES_GRAD, BufferMode, Buffers, Named, Survey
from .overlap import Overlap, check_overlap, hides

Array = npt.NDArray[Any]

FROZEN, UNUSED, USED = 0, 1, 2  # the state of a layer on a rank in a step
GRAD, ADDRESS = attrgetter("grad"), methodcaller("data_ptr")


class GradientReducer(Averaging):
    """Averages the gradients of a model over the ranks between backward and step.

    Constructing it is collective: it compares models and options over the ranks, and copies the
    parameters and buffers of process 0 to all processes.

    world: World, Loopback or an mpi4py communicator
    model: on the CPU or on one GPU. Its gradients stay there, and are averaged in torch's current
        stream. Each process of a node must have its own GPU, unless use_gpu allowed sharing.
        Parameters that require a gradient must be float32, bfloat16 or float16. The set of these
        parameters is fixed here; one that is frozen later counts as one without gradient. A
        float32 p.grad is a view of one of two buffers, in turns, and a later backward overwrites
        it. Other dtypes are converted to float32 in the buffer, and their means rounded to nearest
    aggregator: a name in COMPRESSORS, with its options; or an Aggregator, without options
    bucket_mib: layers are reduced in buckets of at most so many MiB, or of one larger layer, the
        last layers first. Other buckets may give other bits
    overlap: reduce a bucket in a thread while backward continues, with the same bits. Each step
        then has one backward outside no_sync; until reduce(), p.grad must not be changed and MPI
        not be called. Impossible with virtual ranks; MPI must have the thread level "serialized".
        close() ends the thread. None: overlap if it is expected to be faster, which needs several
        buckets and several nodes
    buffers: the model's buffers after reduce(): "broadcast" those of rank 0; "mean" the mean over
        ranks of floating-point buffers, and rank 0's others; "none" each rank its own
    iteration, epoch: of the next reduce. The caller sets the epoch, for methods that need it
    state: arrays that the aggregator keeps, saved in checkpoints together with iteration
    alike: further values that must be the same on all ranks in the next reduce, by name
    loss_scale: the factor of losses, set between steps by the caller or a LossScaler. Means are
        divided by it, and the aggregator's arrays are rescaled when it changes
    Raises the same error on all ranks: ValueError or TypeError for an unknown name, unknown
    options, unfit parameters, or models and options that differ between ranks; UserError if
    processes share a GPU or the world does not allow overlap.

        reducer = GradientReducer(model, World(), "lowbit", wire="e4m3")
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            reducer.reduce()
            optimizer.step()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world: Any,
        aggregator: str | Aggregator = "none",
        *,
        seed: int = 0,
        bucket_mib: float = 25.0,
        overlap: bool | None = False,
        buffers: BufferMode = "broadcast",
        **options: Any,
    ) -> None:
        super().__init__(world, seed)
        self.model = model
        with alike_on_all(self.world, "GradientReducer: model and options") as settings:
            check_options(self._name, model, seed, False if overlap is None else overlap)
            self.aggregator = aggregator_of(self._name, aggregator, options)
            tensors = tensors_of(model)
            if not any(p.requires_grad for p in model.parameters()):
                raise ValueError("GradientReducer: model: no parameter requires a gradient")
            self.device = device_of(tensors)
            self._lay_out(bucket_mib)
            self.aggregator.check_layers(self.bucket.names)
            self._buffers = Buffers(model, self.world, buffers)
            if overlap is None:
                overlap = hides(self.world, self.parts)
            if overlap:
                check_overlap(self.world)
            settings |= {"bucket_mib": bucket_mib, "overlap": overlap, "buffers": buffers}
            settings |= self._settings(tensors)
        self._check_gpus(self._name, self.parameters[0])
        self._watch_momentum()
        for _, tensor in tensors:
            broadcast(self.world, tensor)
        self.alike: dict[str, object] = {}
        self.playing = 0  # the hosted rank whose forward and backward are under way
        self._active = [True] * self.world.processes
        self._joining = self._closed = False
        self._repeats = False  # whether the next step may be one of _repeat
        self._begin()
        calls = self._take, self._first_or_next, self._again, OwnStream(self.device)
        self._overlap = Overlap(self.world, self.parts, *calls) if overlap else None
        self._hooks = self._hooked() if self.world.virtual_ranks == 1 else []
        # Otherwise the model's hooks would keep the buffers and the thread alive.
        finalize(self, _remove, self._hooks).atexit = False

    def _settings(self, tensors: Named) -> dict[str, object]:
        """Return what must be the same on all ranks, besides options, by its name in errors."""
        return {
            "aggregator": self.aggregator,
            "seed": self.seed,
            "virtual_ranks": self.world.virtual_ranks,
            "device": self.device.type,
            "precision": policies_of(self.model),
            **{f"tensor {i} of model": description(*each) for i, each in enumerate(tensors)},
        }

    def _hooked(self) -> list[Any]:
        """Let backward call _has_come after each gradient; return the handles of the hooks."""
        return [
            parameter.register_post_accumulate_grad_hook(partial(_call, ref(self), layer))  # type: ignore[no-untyped-call]
            for layer, parameter in enumerate(self.parameters)
        ]

    def _lay_out(self, bucket_mib: float) -> None:
        """Assign the parameters that require a gradient places in a buffer, and divide it."""
        trained = named(self.model, True)
        self.parameters = [parameter for _, parameter in trained]
        self._known = set(map(id, self.parameters))
        self.layers, self.frozen = shapes_of(trained), shapes_of(named(self.model, False))
        shapes = tuple(map(tuple, self.layers.values()))
        self.bucket = Bucket(tuple(self.layers), shapes, self.aggregator.align)
        self.parts = split_bucket(self.bucket, bucket_mib)
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self._is_float = set(self._dtypes) == {torch.float32}
        how: Any = {"dtype": torch.float32, "device": self.device}  # not torch's defaults
        stashed = self.world.virtual_ranks if self.world.virtual_ranks > 1 else 0
        tensors = [torch.zeros(self.bucket.size, **how) for _ in range(2 + stashed)]
        with in_stream(self.device):
            self._arrays = [array_of(each) for each in tensors]
        self._cut = [[x[part.start : part.stop] for part in self.parts] for x in self._arrays]
        self._begins = [each.data_ptr() for each in tensors[:2]]
        self._places = [self._views(each) for each in tensors]
        self._homes = [self._views(x) for x in tensors[:2]]
        self._addresses = [[*map(ADDRESS, homes)] for homes in self._homes]
        self._low: dict[int, torch.Tensor] = {}  # means of layers that are not float32
        # Indices of _homes: of the buffer with p.grad, and of the one that was last stashed.
        self._side = self._taken = 0

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a buffer's layers as views."""
        pairs = zip(self.bucket.segments, self.bucket.shapes, strict=True)
        return [flat[start:stop].reshape(shape) for (_, start, stop), shape in pairs]

    @property
    def flats(self) -> list[Array]:
        """The last contribution of each hosted rank, float32[bucket.size]."""
        return self._arrays[2:] or [self._arrays[self._taken]]

    def _begin(self) -> None:
        """Reset the state of a step. _used: by layer, whether it has a gradient here."""
        self._used = [False] * len(self.parameters)
        self._error: Exception | None = None

    def begin(self, hosted: int) -> None:
        """Set the model's buffers for the forward of a hosted rank.

        Needed only for models with buffers on virtual ranks. hosted: 0 first, then the others
        """
        self.playing = hosted
        self._buffers.begin(hosted)

    def stash(self, hosted: int = 0) -> None:
        """Keep p.grad as the gradient of a hosted rank; a missing one counts as zero.

        hosted: 0..virtual_ranks - 1. With several, each must be stashed before reduce
        """
        self._taken = self._side
        if self._all_at_home() and all(map(REQUIRES_GRAD, self.parameters)):
            self._check_parameters()
            self._used = [True] * len(self._used)
        else:
            self._move_out()
            for layer in range(len(self.parameters)):
                self._take(layer, hosted)
        self._buffers.keep(hosted)

    def _move_out(self) -> None:
        """Copy each p.grad that is in the buffer at another layer's place, or transposed."""
        for layer, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None and self._is_astray(layer, gradient):
                parameter.grad = gradient.clone()

    def _is_astray(self, layer: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is in the buffer, but not at its layer's place."""
        home = self._home(self._side, layer)[0]
        if gradient is home or gradient.layout != torch.strided:
            return False
        beyond = gradient.data_ptr() - self._begins[self._side]
        if not 0 <= beyond < 4 * self.bucket.size:
            return False
        return (gradient.data_ptr(), gradient.stride()) != (home.data_ptr(), home.stride())

    def _all_at_home(self) -> bool:
        """Return whether each p.grad is at its place in the buffer.

        Usually it is; this check takes a few microseconds for many layers.
        """
        homes = self._homes[self._side]
        return (
            self.world.virtual_ranks == 1
            and all(map(is_, map(GRAD, self.parameters), homes))
            # no tensor was converted, for example by model.half()
            and [*map(ADDRESS, homes)] == self._addresses[self._side]
        )

    def fail(self, error: Exception) -> None:
        """Let the next reduce raise an error on all ranks. Only the first one is kept."""
        self._error = self._error or error

    def _take(self, layer: int, hosted: int = 0) -> None:
        """Copy p.grad to its place in the buffer, unless it is there; zeros if there is none.

        The gradient of a frozen parameter is copied out of the buffer.
        """
        self._taken = self._side
        parameter, (home, at) = self.parameters[layer], self._home(self._side, layer)
        place = self._places[2 + hosted if self.world.virtual_ranks > 1 else self._side][layer]
        gradient = parameter.grad
        if gradient is not None and not parameter.requires_grad:
            if gradient is home:
                parameter.grad = gradient.clone()
            gradient = None
        for tensor in (parameter,) if gradient is None else (gradient, parameter):
            if not self._fits(layer, tensor):
                self.fail(self._misfit(layer, hosted, tensor))
                return
        if gradient is None:
            place.zero_()
            return
        if gradient.data_ptr() != at or self.world.virtual_ranks > 1:
            place.copy_(gradient.detach())
        self._used[layer] = True

    def _home(self, side: int, layer: int) -> tuple[torch.Tensor, int]:
        """Return a layer's view of a buffer, used as its p.grad, and its address.

        The view is remade if for example model.half() has changed the tensor's memory.
        """
        home, at = self._homes[side][layer], self._addresses[side][layer]
        if home.data_ptr() != at:
            home = self._homes[side][layer] = self._places[side][layer].detach()
        return home, at

    def _has_come(self, layer: int) -> None:
        """Move p.grad, just changed by backward, to its place in the buffer.

        torch keeps dtype, shape and device of p.grad those of the parameter, and refuses home as
        p.grad if they are others than at construction.
        """
        parameter, home = self.parameters[layer], self._home(self._side, layer)[0]
        gradient = parameter.grad
        if (
            gradient is not None
            and gradient is not home
            and self._dtypes[layer] is gradient.dtype is torch.float32
            and not gradient.requires_grad
            and is_plain(gradient)
            and not self._is_astray(layer, gradient)
        ):
            with suppress(RuntimeError, TypeError):
                parameter.grad = home
                home.copy_(gradient)
        if self._overlap is not None:
            self._overlap.has_come(layer)

    def _fits(self, layer: int, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or gradient has the layer's shape, dtype and device."""
        return (
            tensor.dtype is self._dtypes[layer]
            and tensor.device == self.device
            and is_plain(tensor)
            and tensor.shape == self.bucket.shapes[layer]
        )

    def _check_parameters(self) -> None:
        """Let reduce raise on all ranks if a parameter does not fit its layer's mean."""
        for layer, parameter in enumerate(self.parameters):
            if not self._fits(layer, parameter):
                self.fail(self._misfit(layer, 0, parameter))

    def _misfit(self, layer: int, hosted: int, tensor: torch.Tensor) -> ValueError:
        name, shape = self.bucket.names[layer], list(self.bucket.shapes[layer])
        what = repr(name) if tensor is self.parameters[layer] else f"the gradient of {name!r}"
        found, right = kind(tensor), f"dense {self._dtypes[layer]} on {self.device}"
        if list(tensor.shape) != shape:
            found, right = f"{found} of shape {list(tensor.shape)}", f"{right} of shape {shape}"
        return ValueError(
            f"GradientReducer.reduce: {what} on rank {self.world.hosted[hosted]} is {found}: "
            f"should be {right}"
        )

    def _again(self, layer: int) -> None:
        self.fail(
            RuntimeError(
                f"GradientReducer.reduce: overlap=True: {self.bucket.names[layer]!r} on rank "
                f"{self.world.rank} has a second gradient before reduce(), and its first one may "
                "have been sent: all but the last backward belong in no_sync()"
            )
        )

    def reduce(self) -> Mean:
        """Set p.grad of every parameter to the mean over all ranks. Collective.

        If only some ranks have a gradient, it counts as zero on the others, and all get the mean.
        A parameter without gradient on all ranks is left as it is.
        Raises the same error on all ranks, with p.grad unchanged: NonFiniteGradient if a gradient
        has NaN or infinity, or a mean is outside float16's range; ValueError for a gradient that
        is not dense and of its parameter's dtype, and for a parameter that requires a gradient but
        did not at construction; RuntimeError for a second backward with overlap, or after close.
        """
        self._check_open("GradientReducer.reduce")
        try:
            with in_stream(self.device):
                mean = self._repeat() if self._repeats else None
                return self._reduce() if mean is None else mean
        finally:
            self._begin()

    def _reduce(self) -> Mean:
        """Do the work of reduce, in any case. Collective."""
        self._repeats = False
        if self._overlap is not None:
            means = self._overlap.means()
            self._check_parameters()  # which may have changed since backward
            return self._finish(means, self._agree())
        self._roll_call(True)
        if self.world.virtual_ranks == 1:
            self.stash()
        self._look()
        usual = self._error is None and self._wrong is None and all(self._used)
        means = self._guessed() if usual else []
        used = [USED] * len(self._used) if means else self._compared()
        mean = self._finish(self._aggregate_all(means), used)
        one = self.world.virtual_ranks == 1
        self._repeats = bool(means) and self._is_float and one and not self._gone
        return mean

    def _repeat(self) -> Mean | None:
        """Return the mean of a step like the last one; None if it is not on a rank. Collective.

        Checks only what a loop may have changed: all checks lengthen the reduce of a small
        model by a fifth. p.grad is set before the first message, as torch refuses it if a parameter
        has another dtype or shape now; and reset if there is no mean.
        """
        plain = self._error is None and not self._errors and isinstance(self.alike, dict)
        same = plain and not self._joining and self._survey.is_current() and self._all_at_home()
        if not same:
            return None
        mean, here, there = None, self._homes[self._side], self._homes[1 - self._side]
        self._taken = self._side
        try:
            means = self._guessed() if self._are_set(there) else []
            if means:
                mean = self._settled(self._aggregate_all(means))
                self._side = 1 - self._side
        finally:
            if mean is None:
                self._are_set(here)
        return mean

    def _are_set(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Set p.grad of parameters up to the first that it does not fit; return whether all fit."""
        try:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        except (RuntimeError, TypeError):
            return False
        return True

    def _guessed(self) -> list[Mean]:
        """Return the mean of the first part if its all-reduce finds all ranks in agreement.

        Collective. The first all-reduce compares _number together with its own arguments, which
        saves a message. If ranks differ, nothing has been reduced and the list is empty.
        """
        if not (self.aggregator.compares and type(self.iteration) is int and self.iteration):
            return []
        try:
            return [self._of_part(0, self._number())]
        except Unagreed:
            return []

    def _number(self) -> int:
        """Return a number, 56 bits, of the values that must be the same on all ranks.

        Python hashes numbers in the same way in all processes, but not text. A text of all values,
        and its digest, took 11 of 140 microseconds of a small reduce.
        """
        more = 0
        if self._gone or self.alike:
            digest = hashlib.blake2b(repr((self._gone, self.alike)).encode(), digest_size=8)
            more = int.from_bytes(digest.digest(), "little")
        size_bytes = self._buffers.size_bytes(self._survey.buffers)
        values = self.iteration, self._loss_scale, self._epoch, size_bytes, more
        return hash(values) & (1 << 56) - 1 | 1

    def _check_open(self, call: str) -> None:
        """Raise RuntimeError on all ranks if the reducer is closed on this one."""
        if self._closed:
            check_alike(self.world, RuntimeError(f"{call}: the reducer is closed"), {}, [0], call)

    def collect(self) -> Sequence[int]:
        """Return, by layer, whether any rank has a gradient; none is averaged. Collective.

        For update rules with own steps of each rank: flats has the stashed gradients.
        Raises the errors of reduce, on all ranks.
        """
        self._check_open("GradientReducer.collect")
        try:
            used = self._agree()
            with in_stream(self.device):
                raise_unless_finite(self.world, self.flats, self.bucket)
            self.iteration += 1
            return [each == USED for each in used]
        finally:
            self._begin()

    def average(self) -> Mean:
        """Return the aggregator's mean of flats over all ranks. Collective.

        To be called after stash and before reduce, which overwrites this mean. Gradients and
        buffers of the model stay as they are. Raises NonFiniteGradient, as reduce does.
        """
        with in_stream(self.device):
            return self._joined(self._aggregate_all())

    def share_buffers(self) -> None:
        """Share the buffers as reduce does, after it raised NonFiniteGradient. Collective.

        For steps that are skipped: changes of their forward stay.
        """
        self._buffers.share(Survey(self.model).buffers, self._active)

    def _agree(self) -> Sequence[int]:
        """Return, by layer, the largest of its states over ranks; raise errors. Collective."""
        self._look()
        return self._compared()

    def _look(self) -> None:
        """Survey the model, for _number and _compared."""
        self._survey = Survey(self.model)
        found = set(map(id, self._survey.trained))
        if not found <= self._known:
            self.fail(self._unknown())
        pairs = zip(self.bucket.names, self.parameters, strict=True)
        # The layers whose parameters are no longer in the model, except frozen ones
        self._gone = [name for name, p in pairs if p.requires_grad and id(p) not in found]
        given: object = self.alike
        if not isinstance(given, dict):
            said = f"GradientReducer.reduce: alike is {type(given).__name__}: must be a dict"
            self.fail(TypeError(said))

    def _compared(self) -> Sequence[int]:
        """Return the result of _agree, after _look. Collective."""
        error, call = self._error or self._wrong, "GradientReducer.reduce"
        buffers = self._buffers.exchanged(self._survey.buffers)
        text = repr((self.iteration, self.loss_scale, self.epoch, buffers, self._gone, self.alike))
        alike: dict[str, object] = {
            "iteration": self.iteration,
            "bytes of buffers": buffers,
            "loss_scale": self.loss_scale,
            "epoch": self.epoch,
            "layers gone from the model": self._gone,
        }
        alike |= self.alike if isinstance(self.alike, dict) else {}
        missing = [not all(self._used)]
        if not any(check_alike(self.world, error, alike, missing, call, text)):
            return [USED] * len(self._used)
        pairs = zip(self._used, self.parameters, strict=True)
        here = [USED if used else UNUSED if p.requires_grad else FROZEN for used, p in pairs]
        most: list[int] = self.world.max(np.array(here, np.int64), "unused layers").tolist()
        return most

    def _unknown(self) -> ValueError:
        new = [name for name, p in named(self.model, True) if id(p) not in self._known]
        return ValueError(
            f"GradientReducer.reduce: model: {new[0]!r} on rank {self.world.rank} requires a "
            "gradient and did not at construction: construct another GradientReducer"
        )

    def _aggregate_all(self, first: Sequence[Mean] = ()) -> list[Mean]:
        """Return the means of all parts; first: those that are known already. Collective.

        With several parts, NaN is looked for before the first of them changes a method's state.
        With overlap it is too late for that.
        """
        if (
            len(self.parts) > 1
            and self._overlap is None
            and (self.iteration == 0 or any(self.state))  # known after the first step
        ):
            raise_unless_finite(self.world, self.flats, self.bucket)
        return [*first, *map(self._of_part, range(len(first), len(self.parts)))]

    def _first_or_next(self, index: int) -> Mean:
        """Return the mean of a part, in the thread of overlap. Collective."""
        if index == 0:
            self._roll_call(True)
        return self._of_part(index)

    def _of_part(self, index: int, agreed: int = 0) -> Mean:
        """Return the mean of a part; agreed: of Context. Collective."""
        gradients = [each[index] for each in self._cut[2:] or [self._cut[self._taken]]]
        out = self._cut[1 - self._side][index]
        return self._aggregate(index, gradients, self.parts[index].bucket, out, agreed)

    def _joined(self, means: Sequence[Mean]) -> Mean:
        """Return the mean of the whole model, its layers in the model's order.

        Its flat is the buffer that p.grad does not use now.
        """
        layers = means[0].layers
        if len(means) > 1:
            names = set.intersection(*(set(each.layers) for each in means))
            layers = {n: np.concatenate([x.layers[n] for x in reversed(means)]) for n in names}
        return Mean(self._arrays[1 - self._side], layers)

    def _settled(self, means: Sequence[Mean]) -> Mean:
        """Return the mean of the whole model, and share the buffers. Collective."""
        mean = self._joined(means)
        multiplied(mean.flat, self._factor / self.loss_scale, self.bucket)
        if not self._is_float:
            check_range(self.bucket, mean.flat, self._dtypes)
        self._buffers.share(self._survey.buffers, self._active)
        self.iteration += 1
        return mean

    def _finish(self, means: Sequence[Mean], used: Sequence[int]) -> Mean:
        """Set gradients and buffers, and return the mean of the whole model. Collective."""
        mean, side = self._settled(means), 1 - self._side
        for layer, state in enumerate(used):
            # A method may send values of an earlier step in one in which no rank used the layer.
            # If all ranks have frozen the layer, they are dropped: it must not change.
            if state == USED or (state == UNUSED and self._places[side][layer].any()):
                home = self._home(side, layer)[0]
                is_float = self._dtypes[layer] is torch.float32
                self.parameters[layer].grad = home if is_float else self._rounded(layer, home)
        self._taken, self._side = self._side, side
        return mean

    def _rounded(self, layer: int, mean: torch.Tensor) -> torch.Tensor:
        """Return a mean rounded to its layer's dtype, in the same memory in each step."""
        kept = self._low.get(layer)
        if kept is None or kept.dtype is not self._dtypes[layer]:
            kept = self._low[layer] = torch.empty_like(mean, dtype=self._dtypes[layer])
        return kept.copy_(mean)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without sending them."""
        return nullcontext() if self._overlap is None else self._overlap.paused()

    @contextmanager
    def join(
        self, step: Callable[[], object], *, divide_by_initial_world_size: bool = True
    ) -> Iterator[None]:
        """Let ranks leave a loop at different times: they send zeros until all have left.

        step: called after each reduce() on ranks that have left, for example optimizer.step, so
            that all ranks end with the same parameters and optimizer
        divide_by_initial_world_size: divide sums by all ranks; False: by those still in the loop
        Collective; adds a message to each reduce(). An error in the block is raised at once.
        """
        nested = RuntimeError("GradientReducer.join: is under way already: should not be nested")
        error: Exception | None = nested if self._joining else None
        does: object = step
        if not callable(does):
            said = f"GradientReducer.join: step is {type(does).__name__}: must be a function"
            error = TypeError(said)
        alike = {"divide_by_initial_world_size": divide_by_initial_world_size}
        check_alike(self.world, error, alike, [0], "GradientReducer.join")
        self._joining, self._initial = True, divide_by_initial_world_size
        try:
            yield
            while self._roll_call(False):
                self._reduce_nothing()
                step()
        finally:
            self._joining, self._active = False, [True] * self.world.processes

    def _roll_call(self, here: bool) -> bool:
        """Exchange which processes are still in the loop of join, if any is. Collective."""
        if self._joining:
            active = np.zeros(self.world.processes, np.int64)
            active[self.world.process] = here
            self._active = [bool(each) for each in self.world.max(active, "GradientReducer.join")]
        return any(self._active)

    @property
    def _factor(self) -> float:
        """The factor of the mean over all ranks."""
        return (
            1.0 if not self._joining or self._initial else self.world.processes / sum(self._active)
        )

    def _reduce_nothing(self) -> None:
        """Take part in a reduce of the ranks that are still in the loop. Collective."""
        try:
            with in_stream(self.device):
                for parameter in self.parameters:
                    parameter.grad = None
                for hosted in range(self.world.virtual_ranks):
                    self.stash(hosted)
                self._check_parameters()
                if self._overlap is not None:
                    means = self._aggregate_all()
                    self._finish(means, self._agree())
                else:
                    used = self._agree()
                    self._finish(self._aggregate_all(), used)
        finally:
            self._begin()

    def close(self) -> None:
        """Remove the hooks and end the thread of overlap; to be called between two steps."""
        self._end(finish=True)

    def _end(self, *, finish: bool) -> None:
        _remove(self._hooks)
        if self._overlap is not None and not self._closed:
            self._overlap.close(finish=finish)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error, without a wait for other ranks."""
        self._end(finish=kind is None)


def _call(reducer: ref[GradientReducer], layer: int, _: torch.Tensor) -> None:
    found = reducer()
    if found is not None:
        found._has_come(layer)


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()
