"""A tensor's rounding as a module of torch, so that what its scale remembers is in checkpoints."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from ..randomness import random_key
from .tensors import TensorFormat

Tensor = torch.Tensor
STATE = "scale_state"  # name of the buffer: of ranks the one that has learnt most counts


class Quantizer(nn.Module):
    """Rounds tensors of one name as a TensorFormat says. It has no gradient of its own.

    In training it learns scales, and stochastic rounding draws from torch's generator, as dropout
    does: `train` sets that by seed, iteration and rank. In evaluation nothing is learnt, and the
    random bits are those of seed and name.
    how: format and scaling; name: of the tensor, for errors too
    """

    def __init__(self, how: TensorFormat, name: str, seed: int = 0) -> None:
        super().__init__()
        self.how, self.name = how, name
        self.key = random_key(seed, zlib.crc32(name.encode()))
        if how.learns:
            self.register_buffer(STATE, torch.from_numpy(how.state()))

    def extra_repr(self) -> str:
        """Return what printing a model shows."""
        return f"{self.how.format}, scaling={self.how.scaling}, rounding={self.how.rounding}"

    @torch.no_grad()
    def forward(self, x: Tensor, axis: int = -1) -> Tensor:
        """Return x rounded, x itself where nothing is; axis: along which blocks lie.

        x: float32 on the CPU, any shape and strides. Raises TypeError for anything else.
        """
        if not self.how.rounds:
            return x
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise TypeError(
                f"Quantizer: {self.name} is {x.dtype} on {x.device}: "
                "torch.float32 on cpu is allowed"
            )
        key = self.key
        if self.training and self.how.rounding == "stochastic":
            low, high = torch.randint(1 << 32, (2,)).tolist()
            key = low, high
        values, state = x.detach().contiguous().numpy(), self._buffers.get(STATE)
        known = None if state is None else state.numpy()
        return torch.from_numpy(self.how.round(values, key, axis, known, self.training))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state; where there is none, as in a file of float32, the scale learns anew."""
        state = self._buffers.get(STATE)
        if state is not None and prefix + STATE not in state_dict:
            state_dict[prefix + STATE] = torch.from_numpy(self.how.state())
        super()._load_from_state_dict(state_dict, prefix, *rest)


def newest(states: list[Tensor]) -> Tensor:
    """Return of states of one scale, of ranks, the element-wise largest of those of most calls."""
    calls = max(float(state[0]) for state in states)
    return torch.stack([state for state in states if float(state[0]) == calls]).amax(0)
