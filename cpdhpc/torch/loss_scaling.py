"""Loss scaling: multiplied losses, so that small gradients fit a format of few bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..collectives.checks import NonFiniteGradient, check_alike
from ..compress.base import Array, Mean

if TYPE_CHECKING:
    from .reducer import GradientReducer

LEAST, MOST = 2.0**-24, 2.0**100  # with the least one, overflow has other reasons
FIRST = 2.0**16  # initial dynamic scale; the first steps reduce it if necessary
PATIENCE = 2000  # steps without overflow after which the scale is doubled


def check_scale(scale: float | None) -> float | None:
    """Return scale. Raises ValueError unless it is None or a power of two from LEAST to MOST."""
    if scale is not None and not (LEAST <= scale <= MOST and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"{scale:g}: should be a power of two, which rounds nothing, from 2**-24 to 2**100"
        )
    return scale


class LossScaler:
    """Multiplies losses, and skips steps whose gradients overflow; the same on all ranks.

    Constructing it is collective: it compares options over the ranks.
    scale: a power of two from LEAST to MOST; None: 1, or FIRST if dynamic
    dynamic: halve the scale if a gradient or sum of any rank is not finite, and double it after
        PATIENCE finite steps. This copies the state of methods in each step
    Overflow means that reduce raises NonFiniteGradient. So a packed wire must not have
    overflow = "saturate", which rounds too large values to the largest number.
    Source: Micikevicius et al.: Mixed precision training, ICLR 2018, on loss scaling.
    Raises ValueError on all ranks for another scale, or options that differ.

        scaler = LossScaler(reducer, dynamic=True)
        for inputs, targets in batches:
            optimizer.zero_grad()
            (loss_function(model(inputs), targets) * scaler.scale).backward()
            if scaler.reduce():
                optimizer.step()
    """

    def __init__(
        self, reducer: GradientReducer, scale: float | None = None, *, dynamic: bool = False
    ) -> None:
        error = None
        try:
            check_scale(scale)
        except (TypeError, ValueError) as found:  # no other rank may wait
            error = type(found)(f"LossScaler: scale={found}")
        alike = {"scale": scale, "dynamic": dynamic}
        check_alike(reducer.world, error, alike, [0], "LossScaler: options")
        self.reducer, self.dynamic, self.clean_steps = reducer, dynamic, 0
        self._begin(scale or (FIRST if dynamic else 1.0))

    @property
    def scale(self) -> float:
        """The factor of losses."""
        return self.reducer.loss_scale

    def _begin(self, scale: float) -> None:
        self.reducer.loss_scale = scale
        self.note()

    def note(self) -> None:
        """Copy the state of methods before the next step, for example after loading it."""
        if self.dynamic:
            self._before = self.reducer.state.copy()

    def reduce(self, reduce: Callable[[], Mean] | None = None) -> Mean | None:
        """Return the mean of reduce, by default the reducer's. Collective.

        Returns None if the step is to be skipped; gradients, parameters and the state of methods
        are then unchanged. Buffers, such as statistics of batch norm, are those after the forward,
        the same on all ranks. Raises NonFiniteGradient if not dynamic, or if no scale helps.
        """
        try:
            mean = (reduce or self.reducer.reduce)()
        except NonFiniteGradient:
            if not self.dynamic or self.scale <= LEAST:
                raise
            self.reducer.state, self.clean_steps = self._before, 0
            self.reducer.share_buffers()  # else virtual ranks would continue with the last one's
            self.reducer.iteration += 1  # as the loop counts skipped steps
            self._begin(self.scale / 2)
            return None
        self.clean_steps += 1
        grown = self.clean_steps == PATIENCE and self.dynamic and self.scale < MOST
        self.clean_steps %= PATIENCE
        self._begin(self.scale * 2 if grown else self.scale)
        return mean

    def state(self) -> dict[str, Array]:
        """Return the state of a dynamic scale, as arrays; {} for a static one."""
        here = {"scale": np.array([self.scale]), "clean_steps": np.array([self.clean_steps])}
        return here if self.dynamic else {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore the result of state; then restore the methods' state, and call note."""
        if self.dynamic and state:
            self.clean_steps = int(state["clean_steps"][0])
            self._begin(float(state["scale"][0]))
