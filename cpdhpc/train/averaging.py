"""An aggregator at work in a training loop: its options, where it stands, what it keeps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..collectives import sparse
from ..collectives.checks import NonFiniteGradient, check_alike
from ..compress.base import Aggregator, Context, Mean
from ..compress.bucket import Bucket, Entry, State, redistributed
from ..compress.flexpoint import NEVER
from ..methods import check_bool, check_whole
from ..ops import on_gpu, to_host
from ..ops.tensors import (
    CPU,
    PLACES,
    as_bytes,
    bytes_of,
    check_device,
    in_stream,
    of_bytes,
    tensor_of,
    values_of,
)
from ..precision.arithmetic import STATE, newest
from ..precision.policy import LayerPolicy
from ..randomness import random_key
from ..world.mpi import as_world
from ..world.ranks import Ranks

Array = npt.NDArray[Any]
Stated = dict[str, Any]  # what state_dict returns
STATED = {"iteration", "epoch", "rank", "ranks", "aggregator", "layers", "state"}


def check_options(name: str, model: object, seed: object, overlap: object) -> None:
    """Raise TypeError or ValueError unless these are a module, an integer of 63 bits and a bool."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: model is {type(model).__name__}: must be a torch.nn.Module")
    check_whole(f"{name}: seed", seed, 0)
    check_bool(f"{name}: overlap", overlap)


class Averaging:
    """What all ways of averaging a model's gradients have, whoever lays them into buckets.

    iteration, epoch: of the next step; the epoch is the caller's to set, for methods that ask
    loss_scale: what losses are multiplied by, the caller's to set between steps: means are divided
        by it, and what the aggregator keeps follows it
    state: what the aggregator keeps; layers: the shape of each, by name; {} while unknown
    parameters: those whose gradients are averaged, as far as they are known
    device: where they are
    """

    aggregator: Aggregator
    layers: dict[str, list[int]]
    parameters: list[torch.nn.Parameter]
    device = CPU

    def __init__(self, world: Any, seed: int) -> None:
        self.world: Ranks = as_world(world, self._name)
        self.seed, self.iteration, self.epoch, self._loss_scale = seed, 0, 0.0, 1.0
        self._scale_error: Exception | None = None  # told by the next step, to all ranks
        self.state = State(self.world.hosted, self.world.ranks)

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, 1.0 at first; see the class."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        is_number = isinstance(scale, int | float | np.number) and not isinstance(scale, bool)
        self._scale_error = None
        if not (is_number and 0 < scale < np.inf):
            said = f"{self._name}: loss_scale={scale!r}: must be a number above 0"
            self._scale_error = ValueError(said)
        elif scale != self._loss_scale:
            with in_stream(self.device):
                self.state.scale(scale / self._loss_scale)
            self._loss_scale = scale

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _aggregate(self, index: int, gradients: list[Array], bucket: Bucket) -> Mean:
        """Return the mean of a bucket of a step, new. Collective. A random stream is a bucket's."""
        seed = part_seed(self.seed, index)
        context = Context(self.world, self.state, seed, self.iteration, self.epoch, self.loss_scale)
        mean = self.aggregator.aggregate(gradients, bucket, context)
        kept = [*gradients, *(entry.array for _, entry in self.state)]
        near = [each for each in kept if on_gpu(each) == on_gpu(mean.flat)]
        is_new = not any(np.may_share_memory(mean.flat, each) for each in near)
        return mean if is_new else replace(mean, flat=mean.flat.copy())

    def _refuse_momentum(self) -> None:
        """Let steps of optimisers with momentum raise ValueError where means have some already."""
        if self.aggregator.has_momentum:
            check = partial(_check_momentum, weakref.ref(self))
            weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def state_dict(self) -> Stated:
        """Return what is needed to go on, of this process: numbers, strings and tensors.

        A method that keeps arrays of each rank needs the dict of every process; else any will do.
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
            "state": kept,
        }

    def load_state_dict(self, *states: Stated) -> None:
        """Go on from what state_dict returned. Collective.

        states: this process's own, where there are as many ranks now; else those of all processes
            in their order, from which arrays are redistributed as their method says
        Raises ValueError on all ranks alike for others.
        """
        error: Exception | None = None
        at = 0, 0.0, 1.0
        try:
            self._check_states(states)
            entries = _entries(states, self.world)
            scale = float(states[0].get("loss_scale", 1.0))
            at = int(states[0]["iteration"]), float(states[0]["epoch"]), scale
        except (IndexError, KeyError, TypeError, ValueError) as found:
            error = ValueError(f"{self._name}.load_state_dict: {found}")
        alike = {"iteration": at[0], "epoch": at[1], "loss_scale": at[2]}
        check_alike(self.world, error, alike, [0], f"{self._name}.load_state_dict")
        self.iteration, self.epoch, self._loss_scale = at
        self.state = State(self.world.hosted, self.world.ranks)
        for key, entry in entries.items():
            self.state.put(key, entry)

    def _check_states(self, states: Sequence[Stated]) -> None:
        """Raise ValueError unless these are of this method and model."""
        here: Stated = {"aggregator": type(self.aggregator).__name__}
        here |= {"layers": self.layers} if self.layers else {}
        if not states:
            raise ValueError("no state: should be what state_dict returned")
        for each in states:
            if not isinstance(each, dict) or not each.keys() >= STATED:
                raise ValueError(f"{each!r:.60}: should be what state_dict returned")
            for key, value in here.items():
                if each[key] != value:
                    raise ValueError(f"{key} of the state: {each[key]!r:.200}: here {value!r:.200}")


def _check_momentum(
    averaging: weakref.ref[Averaging], optimizer: torch.optim.Optimizer, *_: object
) -> None:
    """Raise ValueError where an optimiser has momentum and steps with means that have some."""
    found = averaging()
    known = set(map(id, found.parameters)) if found else set()
    for group in optimizer.param_groups:
        has_momentum = group.get("momentum") or "betas" in group
        if found and has_momentum and not known.isdisjoint(map(id, group["params"])):
            raise ValueError(
                f"{type(optimizer).__name__}.step: has momentum, and so have the means of "
                f"{type(found.aggregator).__name__}: should be SGD with momentum=0"
            )


def part_seed(seed: int, index: int) -> int:
    """Return the seed of a part: seed itself for the first one, others for the others."""
    if index == 0:
        return seed
    low, high = random_key(seed, index)
    return low | high << 32


def rounded(
    names: Sequence[str], views: Sequence[Array], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Return float32 means, that nobody else uses, in the layers' dtypes, rounded to nearest.

    Raises NonFiniteGradient, alike where the means are, for layers whose dtype ends before them.
    """
    found = [tensor_of(v).to(t) for v, t in zip(views, dtypes, strict=True)]
    beyond = [
        i
        for i, each in enumerate(found)
        if each.dtype is not torch.float32 and not values_of(torch.isfinite(each).all())
    ]
    if beyond:
        kind = str(dtypes[beyond[0]]).removeprefix("torch.")
        raise NonFiniteGradient([names[i] for i in beyond], [], kind)
    return found


def _entries(states: Sequence[Stated], world: Ranks) -> dict[tuple[str, str], Entry]:
    """Return what a method keeps on the hosted ranks, from dicts of state_dict.

    Raises ValueError unless they are this process's, or those of all in their order.
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


BufferMode = Literal["broadcast", "mean", "none"]
Tensors = list[torch.Tensor]
Named = list[tuple[str, torch.Tensor]]


FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of gradients
PLAIN = "dense float32, bfloat16 or float16 on cpu or cuda"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie in memory of the host or of a GPU."""
    return tensor.layout is torch.strided and tensor.device.type in PLACES


def kind(tensor: torch.Tensor) -> str:
    """Return layout, dtype and device of a tensor, for messages."""
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} of "
    return f"{layout}{tensor.dtype} on {tensor.device}"


def tensors_of(model: torch.nn.Module) -> Named:
    """Return all parameters and buffers of a model, which process 0 gives to the others.

    Raises ValueError for one that cannot be reduced or given.
    """
    tensors: Named = [*model.named_parameters(), *model.named_buffers()]
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
    """Return the device of a model's tensors. Raises ValueError where there are several."""
    (first, tensor), *others = tensors
    for name, other in others:
        if other.device != tensor.device:
            raise ValueError(
                f"GradientReducer: model: {first} is on {tensor.device}, {name} on "
                f"{other.device}: should be on one device"
            )
    check_device(f"GradientReducer: model: {first}", tensor.device)
    return tensor.device


def survey(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], Named]:
    """Return the parameters that require a gradient now, and the buffers, in one quick walk.

    Names are those within a module. It is done in each step: model.parameters() and
    model.buffers() take several times as long.
    """
    parameters: list[torch.nn.Parameter | None] = []
    buffers: list[tuple[str, torch.Tensor | None]] = []
    modules, seen = [model], {id(model)}
    for module in modules:  # which grows
        if module._parameters:
            parameters += module._parameters.values()
        if module._buffers:
            buffers += module._buffers.items()
        for each in module._modules.values():
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                modules.append(each)
    trained = [p for p in parameters if p is not None and p.requires_grad]
    return trained, [(name, b) for name, b in buffers if b is not None]


def scales_of(buffers: Named) -> Named:
    """Return the states of scales of precision.convert."""
    return [(name, buffer) for name, buffer in buffers if name == STATE]


def policies_of(model: torch.nn.Module) -> dict[str, LayerPolicy]:
    """Return what the layers of a model obey that precision.convert has changed, by name."""
    found = ((name, getattr(layer, "policy", None)) for name, layer in model.named_modules())
    return {name: policy for name, policy in found if isinstance(policy, LayerPolicy)}


def description(name: str, tensor: torch.Tensor) -> str:
    """Return what must be the same of a parameter or buffer on all ranks."""
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{name} of {tensor.dtype}{list(tensor.shape)}{grad}"


def broadcast(world: Ranks, tensor: torch.Tensor) -> None:
    """Give all processes the tensor of process 0, in place."""
    values = torch.from_numpy(values_of(as_bytes(tensor)))
    world.broadcast(values.numpy())
    if not tensor.is_cpu or values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.dtype).reshape(tensor.shape))


class Buffers:
    """The buffers of a model, which each hosted rank's forward may change.

    mode: whose all ranks go on with after a step: "broadcast" those of rank 0, "mean" the mean
        over ranks of floating-point and complex ones, formed in float64, and rank 0's others,
        "none" each its own. Of the state of a scale (Quantizer) that of the ranks that have learnt
        most counts, the largest values of all of them; their calls are alike then
    Raises ValueError for another mode, or "none" with virtual ranks.
    """

    def __init__(self, model: torch.nn.Module, world: Ranks, mode: str) -> None:
        if mode not in get_args(BufferMode):
            known = ", ".join(map(repr, get_args(BufferMode)))
            raise ValueError(f"GradientReducer: buffers={mode!r}: known are {known}")
        if mode == "none" and world.virtual_ranks > 1:
            raise ValueError(
                f"GradientReducer: buffers='none': virtual_ranks={world.virtual_ranks}: should be "
                "1: a process has one model, whose buffers are those of one rank"
            )
        self.model, self.world, self.mode = model, world, mode
        self._first: Tensors = []
        self._kept: list[Tensors] = [[] for _ in world.hosted]

    def size_bytes(self, live: Named) -> int:
        """Return the bytes that ranks exchange; to be the same on all of them."""
        return 0 if self.mode == "none" else sum(b.nbytes for _, b in live)

    def begin(self, hosted: int) -> None:
        """Give a hosted rank the buffers that the first one began its step with."""
        if len(self._kept) > 1:
            if hosted == 0:
                self._first = self._copies()
            else:
                _put([b for _, b in survey(self.model)[1]], self._first)

    def keep(self, hosted: int) -> None:
        """Take the model's buffers as a hosted rank's."""
        if len(self._kept) > 1:
            self._kept[hosted] = self._copies()

    def _copies(self) -> Tensors:
        return [buffer.detach().clone() for _, buffer in survey(self.model)[1]]

    def share(self, named: Named, active: Sequence[bool]) -> None:
        """Give all ranks the same buffers, unless mode is "none". Collective.

        named: the model's, as survey finds them
        active: by process; the ranks of others do not count, and the first active one is "rank 0"
        """
        if self.mode == "none" or not named:
            return
        live = [buffer for _, buffer in named]
        ranks = self._kept if len(self._kept) > 1 else [live]
        shared = {id(buffer) for _, buffer in scales_of(named)}
        scales = {i for i, buffer in enumerate(live) if id(buffer) in shared}
        means = {i for i, b in enumerate(ranks[0]) if self.mode == "mean" and _has_mean(b)} - scales
        first = set(range(len(live))) - scales - means
        new: dict[int, torch.Tensor] = {}
        for chosen, combined in (
            (first, self._of_first),
            (means, self._means),
            (scales, self._newest),
        ):
            which = sorted(chosen)
            own = [[each[i] for i in which] for each in ranks]
            new |= zip(which, combined(own, active) if which else [], strict=True)
        _put(live, [new[i] for i in range(len(live))])

    def _of_first(self, own: list[Tensors], active: Sequence[bool]) -> Tensors:
        """Return the tensors of the first active rank. Collective."""
        root_rank = list(active).index(True) * self.world.virtual_ranks
        data = values_of(bytes_of(own[0]))
        given = [data if rank == root_rank else None for rank in self.world.hosted]
        return of_bytes(sparse.broadcast(self.world, given, root_rank), own[0])

    def _newest(self, own: list[Tensors], active: Sequence[bool]) -> Tensors:
        """Return of the states of each scale the newest of the active ranks. Collective.

        The largest of words (calls, value) is both: NEVER, which is below 0, counts as nothing.
        """
        words = np.zeros(sum(state.numel() for state in own[0]), np.int64)
        if active[self.world.process]:
            best = [newest(list(of_ranks)) for of_ranks in zip(*own, strict=True)]
            values = [values_of(state) for state in best]
            bits = [np.where(v < 0, 0, v.view(np.int32).astype(np.int64) + 1) for v in values]
            words = np.concatenate(
                [(int(v[0]) << 32) + b for v, b in zip(values, bits, strict=True)]
            )
        found = self.world.max(words, "buffers") & 0xFFFFFFFF
        largest = np.where(found, (found - 1).astype(np.int32).view(np.float32), np.float32(NEVER))
        return list(torch.split(torch.from_numpy(largest), [state.numel() for state in own[0]]))

    def _means(self, own: list[Tensors], active: Sequence[bool]) -> Tensors:
        """Return the means over the active ranks of the tensors of each hosted rank. Collective."""
        here = active[self.world.process]
        rows = [torch.cat([_wide(tensor) for tensor in each]) for each in own]
        given = [values_of(row if here else torch.zeros_like(row)) for row in rows]
        total = torch.from_numpy(sparse.sum(self.world, given))
        total /= sum(active) * self.world.virtual_ranks
        parts = torch.split(total, [_wide(tensor).numel() for tensor in own[0]])
        return [
            (torch.view_as_complex(part.reshape(-1, 2)) if tensor.is_complex() else part).reshape(
                tensor.shape
            )
            for part, tensor in zip(parts, own[0], strict=True)
        ]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as float64[n], of complex ones both parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj()).reshape(-1)
    return tensor.detach().double().reshape(-1)


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def _put(buffers: Tensors, tensors: Tensors) -> None:
    """Set buffers to tensors; those that have the values already are not touched.

    What autograd keeps of a buffer for another backward may then still be used.
    """
    for buffer, tensor in zip(buffers, tensors, strict=True):
        values = tensor.to(buffer.device, buffer.dtype)
        if not torch.equal(as_bytes(buffer), as_bytes(values)):
            buffer.copy_(values)
