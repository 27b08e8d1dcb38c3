"""Sharing of a model's buffers, which each rank's forward may change, after a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, Literal, get_args

import numpy as np
import torch

from ..collectives import sparse
from ..compress.bucket import NEVER
from ..ops.tensors import as_bytes, bytes_of, of_bytes, values_of
from ..world.ranks import Ranks

BufferMode = Literal["broadcast", "mean", "none"]
Tensors = list[torch.Tensor]
Named = list[tuple[str, torch.Tensor]]
REQUIRES_GRAD = attrgetter("requires_grad")
HELD = itemgetter("_parameters", "_buffers", "_modules")  # in the dict of a module
VALUES = methodcaller("values")
STATE = "scale_state"  # name of buffers of scales, for which the rank with most calls counts


class Survey:
    """A model's parameters that require a gradient now, and its buffers, by name in their module.

    Made in each step: it takes a fraction of the time of model.parameters() and model.buffers().
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parameters: list[torch.nn.Parameter | None] = []
        buffers: list[tuple[str, torch.Tensor | None]] = []
        modules, seen = [model], {id(model)}
        for module in modules:  # which grows
            parameters += module._parameters.values()
            buffers += module._buffers.items()
            for each in module._modules.values():
                if each is not None and id(each) not in seen:
                    seen.add(id(each))
                    modules.append(each)
        self._of_modules = [vars(module) for module in modules]
        self._held = held_by(self._of_modules)
        self._parameters = [p for p in parameters if p is not None]
        self._required = [p.requires_grad for p in self._parameters]
        self.trained = [p for p in self._parameters if p.requires_grad]
        self.buffers: Named = [(name, b) for name, b in buffers if b is not None]

    def is_current(self) -> bool:
        """Whether another survey would find the same, in less than half of its time."""
        held = held_by(self._of_modules)
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        return same and [*map(REQUIRES_GRAD, self._parameters)] == self._required


def held_by(of_modules: Sequence[dict[str, Any]]) -> list[object]:
    """Return all parameters, buffers and modules that modules hold themselves, in order.

    of_modules: their dicts. Called in each step, and so without a loop of the interpreter.
    """
    filled = filter(None, chain.from_iterable(map(HELD, of_modules)))
    return [*chain.from_iterable(map(VALUES, filled))]


def newest(states: Tensors) -> torch.Tensor:
    """Return the elementwise largest of a scale's states with the most calls."""
    calls = max(float(state[0]) for state in states)
    return torch.stack([state for state in states if float(state[0]) == calls]).amax(0)


def scales_of(buffers: Named) -> Named:
    """Return the states of scales of precision.convert."""
    return [(name, buffer) for name, buffer in buffers if name == STATE]


class Exchanged(Mapping[str, int]):
    """The bytes of each buffer of a model, by name; the repr is their sum.

    Names are looked up only for the message if ranks differ, which saves time in each step.
    """

    def __init__(self, model: torch.nn.Module | None, size_bytes: int) -> None:
        self.model, self.size_bytes = model, size_bytes

    def __repr__(self) -> str:
        return str(self.size_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter([] if self.model is None else [n for n, _ in self.model.named_buffers()])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> int:
        if self.model is None:
            raise KeyError(name)
        return self.model.get_buffer(name).nbytes


class Buffers:
    """The buffers of a model, which each hosted rank's forward may change.

    mode: the buffers of all ranks after a step: "broadcast" those of rank 0; "mean" the mean over
        ranks of floating-point and complex ones, computed in float64, and rank 0's others; "none"
        each rank its own. The state of a scale (Quantizer) becomes the elementwise largest of
        those of the ranks with the most calls
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

    def exchanged(self, live: Named) -> Exchanged:
        """Return the sizes of the buffers to be exchanged, which must agree over ranks."""
        return Exchanged(None if self.mode == "none" else self.model, self.size_bytes(live))

    def size_bytes(self, live: Named) -> int:
        """Return the bytes of the buffers to be exchanged."""
        return 0 if self.mode == "none" else sum([b.nbytes for _, b in live])

    def begin(self, hosted: int) -> None:
        """Reset the buffers to those at the beginning of the step, for another hosted rank."""
        if len(self._kept) > 1:
            if hosted == 0:
                self._first = self._copies()
            else:
                _put([b for _, b in Survey(self.model).buffers], self._first)

    def keep(self, hosted: int) -> None:
        """Keep the model's buffers as those of a hosted rank."""
        if len(self._kept) > 1:
            self._kept[hosted] = self._copies()

    def _copies(self) -> Tensors:
        return [buffer.detach().clone() for _, buffer in Survey(self.model).buffers]

    def share(self, named: Named, active: Sequence[bool]) -> None:
        """Set the same buffers on all ranks, unless mode is "none". Collective.

        named: the model's, by Survey
        active: by process; inactive ones do not count, and the first active one acts as rank 0
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
        """Return the newest state of each scale over the active ranks. Collective.

        A maximum of words (calls, value) finds it. NEVER, which is below 0, counts as no value.
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
    """Return values as float64[n]; complex ones as pairs."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj()).reshape(-1)
    return tensor.detach().double().reshape(-1)


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def _put(buffers: Tensors, tensors: Tensors) -> None:
    """Set buffers to tensors; buffers with these values already are not written.

    So a second backward can still use what autograd has saved of them.
    """
    for buffer, tensor in zip(buffers, tensors, strict=True):
        values = tensor.to(buffer.device, buffer.dtype)
        if not torch.equal(as_bytes(buffer), as_bytes(values)):
            buffer.copy_(values)
