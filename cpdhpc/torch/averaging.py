"""Base of reducers and hooks: an aggregator in a training loop, its options and its state."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..collectives.checks import NonFiniteGradient, check_alike, is_finite
from ..compress import COMPRESSORS
from ..compress.base import Aggregator, Context, Mean, amax, as_table, averaged, nonfinite_layers
from ..compress.bucket import Bucket, Entry, State, redistributed
from ..compress.momentum import advice_for_loop
from ..errors import ArgumentError, ArgumentTypeError
from ..methods import check_bool, check_whole, suggest
from ..ops import backend_of, placed, to_host
from ..ops.tensors import CPU, PLACES, as_bytes, check_device, in_stream, values_of
from ..options import Agreed, made
from ..randomness import random_key
from ..world.gpu_messages import check_gpus
from ..world.mpi import as_world
from ..world.ranks import Ranks
from .buffers import Named

Array = npt.NDArray[Any]
Stated = dict[str, Any]  # what state_dict returns
STATED = {"iteration", "epoch", "rank", "ranks", "aggregator", "layers", "state"}


def check_options(name: str, model: object, seed: object, overlap: object) -> None:
    """Raise TypeError or ValueError unless these are a module, an integer 0 or more and a bool."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: model is {type(model).__name__}: must be a torch.nn.Module")
    check_whole(name, "seed", seed, 0)
    check_bool(name, "overlap", overlap)


def aggregator_of(function: str, given: str | Aggregator, options: dict[str, Any]) -> Aggregator:
    """Return the aggregator with a name and options, or the given one, which has no options.

    function: for errors
    Raises ValueError or TypeError for an unknown name, and for unknown or wrong options.
    """
    if isinstance(given, Aggregator):
        if options:
            raise ArgumentTypeError(function, "options", options, "the aggregator has its own")
        return given
    if not isinstance(given, str):
        raise ArgumentTypeError(function, "aggregator", given, "must be a name or an Aggregator")
    if given not in COMPRESSORS:
        raise ArgumentError(function, "aggregator", given, suggest(given, COMPRESSORS))
    return made(COMPRESSORS[given], as_table(options), f"{function}: {given}")


class Averaging:
    """Common base of GradientReducer and the hooks.

    iteration, epoch: of the next step. The caller sets the epoch, for methods that need it
    loss_scale: the factor of losses, set by the caller between steps. Means are divided by it, and
        the aggregator's arrays are rescaled when it changes
    state: arrays that the aggregator keeps; layers: their shapes, by name; {} while unknown
    frozen: the shapes of the model's other parameters, by name
    parameters: those with averaged gradients, as far as they are known
    device: of the parameters
    advised: whether the warning about momentum has been issued; True suppresses it
    """

    aggregator: Aggregator
    layers: dict[str, list[int]]
    frozen: dict[str, list[int]]
    parameters: list[torch.nn.Parameter]
    device = CPU
    advised = False

    def __init__(self, world: Any, seed: int) -> None:
        self.world: Ranks = as_world(world, self._name)
        self.seed, self.iteration, self._epoch, self._loss_scale = seed, 0, 0.0, 1.0
        self._errors: dict[str, Exception] = {}  # by attribute, raised by the next step
        self.state = State(self.world.hosted, self.world.ranks)

    @property
    def loss_scale(self) -> float:
        """The factor of losses, 1.0 at first; see the class."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        is_number = isinstance(scale, int | float | np.number) and not isinstance(scale, bool)
        self._errors.pop("loss_scale", None)
        if not (is_number and 0 < scale < np.inf and np.frexp(scale)[0] == 0.5):
            said = f"{self._name}: loss_scale={scale!r}: must be a power of two"
            self._errors["loss_scale"] = ValueError(said)
        elif scale != self._loss_scale:
            with in_stream(self.device):
                self.state.scale(scale / self._loss_scale)
            self._loss_scale = float(scale)

    @property
    def epoch(self) -> float:
        """The number of passes over the samples so far, 0.0 at first; see the class."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: float) -> None:
        is_number = isinstance(epoch, int | float | np.number) and not isinstance(epoch, bool)
        self._errors.pop("epoch", None)
        if is_number and 0 <= epoch < np.inf:
            self._epoch = float(epoch)
        else:
            said = f"{self._name}: epoch={epoch!r}: must be a finite number, 0 or more"
            self._errors["epoch"] = ValueError(said)

    @property
    def _wrong(self) -> Exception | None:
        """The error of an attribute that was set to a wrong value, or None."""
        return next(iter(self._errors.values()), None)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _aggregate(
        self, index: int, gradients: list[Array], bucket: Bucket, out: Array, agreed: int = 0
    ) -> Mean:
        """Return the mean of a bucket of a step; its flat is out, zeros between layers. Collective.

        Each bucket has its own stream of random numbers.
        """
        context = Context(
            self.world,
            self.state,
            part_seed(self.seed, index),
            self.iteration,
            self.epoch,
            self.loss_scale,
            out,
            agreed,
        )
        mean = averaged(self.aggregator, gradients, bucket, context)
        if mean.flat is not out:
            out[...] = placed(mean.flat, out)
            bucket.clear_gaps(out)
        return mean

    def _check_gpus(self, function: str, tensor: torch.Tensor) -> None:
        """Raise the UserError of world.gpu_messages.check_gpus on all ranks. Collective.

        function: for the error; tensor: of the model, on the same type of device on all ranks
        """
        if tensor.is_cuda:
            check_gpus(self.world, function, tensor.device.index, tensor.data_ptr())

    def _watch_momentum(self) -> None:
        """Let steps of optimisers with momentum raise ValueError if means have momentum, too.

        If the method sends values later, the first of these steps warns, on process 0.
        """
        if self.aggregator.has_momentum or self.aggregator.holds_back:
            check = partial(_check_momentum, weakref.ref(self))
            weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def state_dict(self) -> Stated:
        """Return the state of this process: numbers, strings and tensors.

        Methods with arrays of each rank need the dict of every process; for others any is enough.
        """
        with in_stream(self.device):
            kept = {
                f"{layer}/{name}": {
                    "values": torch.from_numpy(to_host(entry.array.copy())),
                    "redistribution": entry.redistribution,
                }
                for (layer, name), entry in self.state
            }
        return {
            "iteration": self.iteration,
            "epoch": self.epoch,
            "loss_scale": self.loss_scale,
            "rank": self.world.rank,
            "ranks": self.world.ranks,
            "aggregator": type(self.aggregator).__name__,
            "layers": dict(self.layers),
            "frozen": dict(self.frozen),
            "state": kept,
        }

    def load_state_dict(self, *states: Stated) -> None:
        """Restore results of state_dict. Collective.

        states: this process's own, if the number of ranks is the same; else those of all processes
            in their order. Arrays are then redistributed as their method says
        The set of frozen layers may differ. Arrays of a layer that is frozen now are kept unused
        and saved again; a layer that was frozen starts without arrays.
        Raises ValueError on all ranks for other states.
        """
        error: Exception | None = None
        at = 0, 0.0, 1.0
        try:
            self._check_states(states)
            entries = _entries(states, self.world)
            scale = float(states[0].get("loss_scale", 1.0))
            at = int(states[0]["iteration"]), float(states[0]["epoch"]), scale
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as found:
            error = ValueError(f"{self._name}.load_state_dict: {found}")
        alike = {"iteration": at[0], "epoch": at[1], "loss_scale": at[2]}
        check_alike(self.world, error, alike, [0], f"{self._name}.load_state_dict")
        self.iteration, self._epoch, self._loss_scale = at
        self._errors.clear()
        self.state = State(self.world.hosted, self.world.ranks)
        for key, entry in entries.items():
            self.state.put(key, entry)

    def _check_states(self, states: Sequence[Stated]) -> None:
        """Raise ValueError unless states are of this method and model."""
        here = type(self.aggregator).__name__
        if not states:
            raise ValueError("no state: should be what state_dict returned")
        for each in states:
            if not isinstance(each, dict) or not each.keys() >= STATED:
                raise ValueError(f"{each!r:.60}: should be what state_dict returned")
            if each["aggregator"] != here:
                raise ValueError(f"aggregator of the state: {each['aggregator']!r}: here {here!r}")
            if self.layers:
                self._check_layers(each["layers"], each.get("frozen", {}))

    def _check_layers(self, layers: Mapping[str, object], frozen: Mapping[str, object]) -> None:
        """Raise ValueError unless both models have the state's layers and those averaged here.

        frozen: further layers of the state's model
        """
        there, here = {**frozen, **layers}, {**self.frozen, **self.layers}
        for name in {**self.layers, **layers}:
            if there.get(name) != here.get(name):
                raise ValueError(
                    f"layers of the state: {name!r}: {_shape(there, name)}: here "
                    f"{_shape(here, name)}"
                )


def _shape(layers: Mapping[str, object], name: str) -> str:
    return f"of shape {layers[name]}" if name in layers else "none"


def _check_momentum(
    averaging: weakref.ref[Averaging], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    """Raise ValueError if both an optimiser and the means that it uses have momentum.

    Warn if it has momentum and the method sends values later.
    """
    found = averaging()
    if found is None or (found.advised and not found.aggregator.has_momentum):
        return
    known, name = set(map(id, found.parameters)), type(optimizer).__name__
    for group in optimizer.param_groups:
        if known.isdisjoint(map(id, group["params"])):
            continue
        if advice := advice_for_loop(found.aggregator, name, group):
            found.advised = True
            if found.world.process == 0:
                warnings.warn(f"{found._name}: {advice}", stacklevel=3)
            return
        if found.aggregator.has_momentum and (group.get("momentum") or "betas" in group):
            raise ValueError(
                f"{name}.step: has momentum, and so have the means of "
                f"{type(found.aggregator).__name__}: should be SGD with momentum=0"
            )


@lru_cache(maxsize=1024)  # called for each bucket in each step
def part_seed(seed: int, index: int) -> int:
    """Return the seed of a part: for the first one seed itself."""
    if index == 0:
        return seed
    low, high = random_key(seed, index)
    return low | high << 32


def multiplied(flat: Array, factor: float, bucket: Bucket) -> None:
    """Multiply a mean, float32[bucket.size], the same on all ranks, by a factor.

    Raises NonFiniteGradient, on all these ranks, for layers that exceed float32's range.
    """
    if factor == 1:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        backend_of(flat).multiply(flat, np.float32(factor), flat)
    if factor > 1 and not is_finite(flat):
        beyond = nonfinite_layers(flat, bucket)
        raise NonFiniteGradient([bucket.names[i] for i in beyond], [], "float32")


BEYOND = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 - 2.0**119}  # is rounded to infinity


def check_range(bucket: Bucket, flat: Array, dtypes: Sequence[torch.dtype]) -> None:
    """Raise NonFiniteGradient for layers whose means exceed the range of their dtype.

    flat: float32[bucket.size], the means, finite and the same on all ranks; dtypes: of the layers
    """
    beyond = [
        i
        for i, (dtype, (_, start, stop)) in enumerate(zip(dtypes, bucket.segments, strict=True))
        if dtype in BEYOND and amax([flat[start:stop]])[0] >= BEYOND[dtype]
    ]
    if beyond:
        kind = str(dtypes[beyond[0]]).removeprefix("torch.")
        raise NonFiniteGradient([bucket.names[i] for i in beyond], [], kind)


def _entries(states: Sequence[Stated], world: Ranks) -> dict[tuple[str, str], Entry]:
    """Return a method's arrays of the hosted ranks, from results of state_dict.

    Raises ValueError unless these are this process's, or those of all processes in their order.
    """
    entries = {}
    own = [(each["rank"], each["ranks"]) for each in states] == [(world.rank, world.ranks)]
    for key, first in states[0]["state"].items():
        layer, _, name = key.rpartition("/")
        kind, rows = (first["redistribution"], [each["state"][key]["values"] for each in states])
        array = rows[0].numpy().copy()
        if kind is not None and not (own and len(array) == world.virtual_ranks):
            starts = [0, *np.cumsum([len(row) for row in rows]).tolist()]
            if [each["rank"] for each in states] + [states[0]["ranks"]] != starts:
                raise ValueError(
                    f"dicts of ranks {[each['rank'] for each in states]} of {states[0]['ranks']}: "
                    f"should be that of rank {world.rank} of {world.ranks}, or those of all "
                    "processes in their order"
                )
            array = redistributed(np.concatenate(rows), kind, world.hosted, world.ranks)
        entries[layer, name] = Entry(array, kind)
    return entries


FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of gradients
PLAIN = "dense float32, bfloat16 or float16 on cpu or cuda"


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds all its values itself, unlike DTensor and other wrappers."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are dense in memory of the host or of a GPU."""
    strided = tensor.layout is torch.strided
    return strided and tensor.device.type in PLACES and _is_whole(tensor)


def kind(tensor: torch.Tensor) -> str:
    """Return layout, dtype and device of a tensor, for messages; and its type, if not torch's."""
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} of "
    of = "" if _is_whole(tensor) else f"{type(tensor).__name__} of "
    return f"{of}{layout}{tensor.dtype} on {tensor.device}"


def clear(name: str) -> str:
    """Return the name of a parameter without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")


def named(model: torch.nn.Module, trained: bool) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a model that require a gradient; or the others."""
    every = model.named_parameters()
    return [(clear(name), p) for name, p in every if p.requires_grad == trained]


def shapes_of(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> dict[str, list[int]]:
    """Return shapes by name."""
    return {name: list(p.shape) for name, p in parameters}


def check_whole_model(call: str, model: torch.nn.Module) -> None:
    """Raise TypeError, which begins with call, if a rank has only parts of a model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # loaded if such a model exists
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise TypeError(
            f"{call}: model is FullyShardedDataParallel, which gives each rank a part and averages "
            "in backward: call model.register_comm_hook(*cpdhpc.torch.fsdp_hook(world, "
            "model=model)) instead"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not _is_whole(tensor):
            raise TypeError(
                f"{call}: model: {name} is {type(tensor).__name__}: should be a torch.Tensor that "
                "each rank has whole: leave out what cuts models up, as fully_shard; of those "
                "FullyShardedDataParallel goes with cpdhpc.torch.fsdp_hook"
            )


def tensors_of(model: torch.nn.Module) -> Named:
    """Return all parameters and buffers of a model, which process 0 sends to the others.

    Raises TypeError or ValueError for one that cannot be reduced or sent.
    """
    check_whole_model("GradientReducer", model)
    every: Named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(clear(name), tensor) for name, tensor in every]
    for name, tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"GradientReducer: model: {name} is not initialised: run a batch through it first"
            )
        if (tensor.requires_grad and tensor.dtype not in FLOATS) or not is_plain(tensor):
            should = PLAIN if tensor.requires_grad else "dense on cpu or cuda"
            raise ValueError(
                f"GradientReducer: model: {name} is {kind(tensor)}: should be {should}"
            )
        if any(
            n > 1 and not stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ValueError(
                f"GradientReducer: model: {name} has strides {tensor.stride()}: several of its "
                "values are one in memory: should be a clone"
            )
    return tensors


def device_of(tensors: Named) -> torch.device:
    """Return the device of a model's tensors. Raises ValueError if there are several."""
    (first, tensor), *others = tensors
    for name, other in others:
        if other.device != tensor.device:
            raise ValueError(
                f"GradientReducer: model: {first} is on {tensor.device}, {name} on "
                f"{other.device}: should be on one device"
            )
    check_device(f"GradientReducer: model: {first}", tensor.device)
    return tensor.device


def policies_of(model: torch.nn.Module) -> dict[str, Agreed]:
    """Return the policies of layers that precision.convert has changed, by name."""
    found = ((name, getattr(layer, "policy", None)) for name, layer in model.named_modules())
    return {name: policy for name, policy in found if isinstance(policy, Agreed)}


def description(name: str, tensor: torch.Tensor) -> str:
    """Return the attributes of a parameter or buffer that must be the same on all ranks."""
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{name} of {tensor.dtype}{list(tensor.shape)}{grad}"


def broadcast(world: Ranks, tensor: torch.Tensor) -> None:
    """Send the tensor of process 0 to all processes, in place. Collective."""
    if not tensor.numel():  # NumPy may give it strides of 0, which torch's view refuses
        return
    values = torch.from_numpy(values_of(as_bytes(tensor)))
    world.broadcast(values.numpy())
    if not tensor.is_cpu or values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.dtype).reshape(tensor.shape))
