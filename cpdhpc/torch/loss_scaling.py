"""Loss scaling: gradients of a multiplied loss, which a format of few bits can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..collectives.checks import NonFiniteGradient, check_alike
from ..compress.base import Array, Mean

if TYPE_CHECKING:
    from .reducer import GradientReducer

LEAST, MOST = 2.0**-24, 2.0**100  # what is not finite with the least one is so for other reasons
FIRST = 2.0**16  # of a dynamic scaler; the first steps find a lower one
PATIENCE = 2000  # steps without overflow after which the scale is doubled


def check_scale(scale: float | None) -> float | None:
    """Return scale. Raises ValueError unless it is None or a power of two from LEAST to MOST."""
    if scale is not None and not (LEAST <= scale <= MOST and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"{scale:g}: should be a power of two, which rounds nothing, from 2**-24 to 2**100"
        )
    return scale


class LossScaler:
    """Multiplies losses, and lets steps be skipped whose gradients overflow. Alike on all ranks.

    Collective: constructing it compares options over the ranks.
    scale: a power of two from LEAST to MOST; None: 1, or FIRST where it is dynamic
    dynamic: halved where a gradient or sum of any rank is not finite, and doubled after PATIENCE
        steps in which all were. For that the memory of methods is copied in each step.
    Overflow is what makes reduce raise NonFiniteGradient: so a packed wire must not have
    overflow = "saturate", which makes the largest number of what is too large.
    Source: Micikevicius et al.: Mixed precision training, ICLR 2018, on loss scaling.
    Raises on all ranks alike ValueError for a scale that is none of these, or other options.

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
        """What losses are to be multiplied by."""
        return self.reducer.loss_scale

    def _begin(self, scale: float) -> None:
        self.reducer.loss_scale = scale
        self.note()

    def note(self) -> None:
        """Take the memory of methods as it is before the next step: where it was loaded, say."""
        if self.dynamic:
            self._before = self.reducer.state.copy()

    def reduce(self, reduce: Callable[[], Mean] | None = None) -> Mean | None:
        """Return what reduce returns, the reducer's own one by default. Collective.

        None, with gradients, parameters and memory as they were: the step is to be skipped. Buffers
        of the model, as statistics of batch norm, are those behind its forward, alike on all ranks.
        Raises NonFiniteGradient as reduce unless dynamic, and where no scale helps.
        """
        try:
            mean = (reduce or self.reducer.reduce)()
        except NonFiniteGradient:
            if not self.dynamic or self.scale <= LEAST:
                raise
            self.reducer.state, self.clean_steps = self._before, 0
            self.reducer.share_buffers()  # else virtual ranks would go on with the last one's
            self.reducer.iteration += 1  # the numbers of the loop and of the reducer stay alike
            self._begin(self.scale / 2)
            return None
        self.clean_steps += 1
        grown = self.clean_steps == PATIENCE and self.dynamic and self.scale < MOST
        self.clean_steps %= PATIENCE
        self._begin(self.scale * 2 if grown else self.scale)
        return mean

    def state(self) -> dict[str, Array]:
        """Return where a dynamic scale stands, as arrays; nothing of a static one."""
        here = {"scale": np.array([self.scale]), "clean_steps": np.array([self.clean_steps])}
        return here if self.dynamic else {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take over what state returned, before the memory that belongs to it; then note."""
        if self.dynamic and state:
            self.clean_steps = int(state["clean_steps"][0])
            self._begin(float(state["scale"][0]))
