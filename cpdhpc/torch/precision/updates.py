"""Optimisers whose weights and states have few bits: the results of every step are rounded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ...arrays import memory_of
from ...randomness import random_key
from .tensors import TensorFormat, UpdateFormat

Tensor = torch.Tensor
State = dict[str, Any]
OWN = "precision_"  # prefix of this module's entries in an optimiser's state
MASTER, RESIDUAL, STEPS, SCALE = (OWN + name for name in ("master", "residual", "steps", "scale"))
STREAM = 7  # of random numbers: for updates


class ParameterRules(Protocol):
    """The rules of a parameter, for example a LayerPolicy; None: it is float32."""

    @property
    def update(self) -> UpdateFormat | None: ...
    @property
    def states(self) -> TensorFormat | None: ...


class RoundedUpdates:
    """After each step of any torch optimiser, rounds its parameters and their states.

    rows: by parameter; others stay float32. The optimiser computes a step in float32. Then
        states of the parameter's shape are rounded by row.states (scalars are not), and
        weights by row.update. Its own data lies in the optimiser's state, so that its
        state_dict includes it.
    seed: of stochastic rounding, a function of (seed, step, place of the parameter, element)
    Parameters are rounded at once, so they must be initialised before. Raises TypeError if one is
    not float32 on the CPU. If all ranks do the same, they end with the same bits.
    Source: of updates without a master copy Zamirai et al.: Revisiting BFloat16 training, arXiv
    2010.06192; of stochastic ones Gupta et al., arXiv 1502.02551.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rows: Mapping[Tensor, ParameterRules], seed: int = 0
    ) -> None:
        each = [p for group in optimizer.param_groups for p in group["params"]]
        self.optimizer, self.seed = optimizer, seed
        self._rows = {p: (place, rows[p]) for place, p in enumerate(each) if p in rows}
        self._held = dict[Tensor, State]()
        for p, (_, row) in self._rows.items():
            if p.dtype != torch.float32 or p.device.type != "cpu":
                raise TypeError(
                    f"RoundedUpdates: a parameter is {p.dtype} on {p.device}: "
                    "torch.float32 on cpu is allowed"
                )
            if row.update is not None and row.update.rounds:
                own = optimizer.state[p]
                own[STEPS] = p.detach().new_zeros(())
                self._round_weights(p, row.update, own)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _before(self, *given: Any) -> None:
        """Show the optimiser only its own states, and master copies as weights."""
        for p, (_, row) in self._rows.items():
            if p.grad is None:
                continue
            state = self.optimizer.state[p]  # Adam initialises it if it is empty
            left = self._held.get(p, {})  # after a failed step
            own = {k: state.pop(k) for k in list(state) if k.startswith(OWN)}
            self._held[p] = own = left | own
            if MASTER in own:
                p.copy_(own[MASTER])
            elif row.update is not None and row.update.kahan:
                own["before"] = p.clone()

    @torch.no_grad()
    def _after(self, *given: Any) -> None:
        for p, own in self._held.items():
            row = self._rows[p][1]
            own[STEPS] = own.get(STEPS, p.detach().new_zeros(())) + 1
            state = self.optimizer.state[p]
            if row.states is not None:
                for name, kept in state.items():
                    if isinstance(kept, Tensor) and kept.shape == p.shape and kept.ndim:
                        kept.copy_(self._rounded(kept, row.states, name, p, own))
            if row.update is not None and row.update.rounds:
                self._round_weights(p, row.update, own)
            state.update(own)
        self._held.clear()

    @torch.no_grad()
    def _round_weights(self, p: Tensor, how: UpdateFormat, own: State) -> None:
        before = own.pop("before", None)
        if how.master:
            own[MASTER] = p.detach().clone()
        if before is None:
            p.copy_(self._rounded(p, how, "", p, own))
            return
        step = p - before + own.get(RESIDUAL, 0)
        p.copy_(self._rounded(before + step, how, "", p, own))
        nearest = how.model_copy(update={"rounding": "nearest", "random_bits": 0})
        own[RESIDUAL] = self._rounded(step - (p - before), nearest, RESIDUAL, p, own)

    def _rounded(self, x: Tensor, how: TensorFormat, name: str, p: Tensor, own: State) -> Tensor:
        """Return a tensor of a parameter rounded, by the scale's state of that name in own."""
        place, known = self._rows[p][0], None
        if how.learns:
            known = own.setdefault(SCALE + name, torch.from_numpy(how.state())).numpy()
        tells = STREAM, int(own[STEPS]), place, zlib.crc32(name.encode())
        values = np.asarray(memory_of("RoundedUpdates: a parameter", x.detach()), order="C")
        return torch.from_numpy(how.round(values, random_key(self.seed, *tells), -1, known, True))
