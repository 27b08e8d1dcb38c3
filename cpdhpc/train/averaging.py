"""An aggregator at work in a training loop: its options, where it stands, what it keeps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..collectives.checks import NonFiniteGradient, check_alike
from ..compress import COMPRESSORS
from ..compress.base import Aggregator, Context, Mean
from ..compress.bucket import Bucket, Entry, State, redistributed
from ..config import validate
from ..formats import FloatFormat, TableFormat
from ..methods import suggest
from ..ops import on_gpu, to_host
from ..ops.tensors import CPU, in_stream, tensor_of, values_of
from ..randomness import random_key
from ..table_formats import spelled
from ..world.mpi import as_world
from ..world.ranks import Ranks

Array = npt.NDArray[Any]
Stated = dict[str, Any]  # what state_dict returns
STATED = {"iteration", "epoch", "rank", "ranks", "aggregator", "layers", "state"}


def check_options(name: str, seed: object, overlap: object) -> None:
    """Raise TypeError or ValueError unless these are a whole number of 63 bits and a bool."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"{name}: seed={seed!r}: must be a whole number")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"{name}: seed={seed}: must be 0 or more and below 2**63")
    if not isinstance(overlap, bool):
        raise TypeError(f"{name}: overlap={overlap!r}: must be True or False")


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
        self.world: Ranks = as_world(world)
        self.seed, self.iteration, self.epoch, self._loss_scale = seed, 0, 0.0, 1.0
        self.state = State(self.world.hosted, self.world.ranks)

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, 1.0 at first; see the class."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if scale != self._loss_scale:
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


def made(who: str, aggregator: str | Aggregator, options: dict[str, Any]) -> Aggregator:
    """Return the aggregator of a name with its options, or the very one without any.

    who: for errors. Raises ValueError or TypeError for an unknown name, unknown or wrong options.
    """
    if isinstance(aggregator, Aggregator):
        if options:
            raise TypeError(f"{who}: options={options}: the aggregator has its own")
        return aggregator
    if aggregator not in COMPRESSORS:
        raise ValueError(f"{who}: aggregator={aggregator!r}: {suggest(aggregator, COMPRESSORS)}")
    named = {
        k: v.name if isinstance(v, FloatFormat) else spelled(v) if isinstance(v, TableFormat) else v
        for k, v in options.items()
    }
    return validate(COMPRESSORS[aggregator], named, f"{who}: {aggregator}")


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
        kind, rows = (
            first["redistribution"],
            [each["state"][key]["values"] for each in states],
        )
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
