"""NaN and infinity in gradients: the error, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..ops import backend_of, to_host
from .ranks import Ranks
from .scaling import Segment, tile_span

Array = npt.NDArray[Any]
NONFINITE_BITS = 0x7F800000  # float32 bits of |x| from here on: infinity or NaN


class NonFiniteGradient(ArithmeticError):
    """NaN or infinity in what was to be summed, or in the sum; raised on all ranks alike.

    segments: names of the tensors; ranks: where they are, empty where only the sum is not finite
    """

    def __init__(self, segments: Iterable[str], ranks: Iterable[int]) -> None:
        self.segments, self.ranks = tuple(segments), tuple(ranks)
        super().__init__(self.segments, self.ranks)

    def __str__(self) -> str:
        tensors = ", ".join(map(repr, self.segments))
        if self.ranks:
            return f"allreduce: NaN or infinity in {tensors} on rank {_names(self.ranks)}"
        return f"allreduce: the sum of finite values is not finite in {tensors}"


def is_finite(x: Array) -> bool:
    """Whether all values of x, float32[n], are finite."""
    return x.size == 0 or int(backend_of(x).amax_tiles(x).max()) < NONFINITE_BITS


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def amax_of_segments(x: Array, segments: Sequence[Segment]) -> Array:
    """Return the float32 bits of max|x| of each segment's tiles, int64[segments]."""
    amax = to_host(backend_of(x).amax_tiles(x))
    spans = [tile_span(segment) for segment in segments]
    return np.array(
        [int(amax[span].max()) if span.start < span.stop else 0 for span in spans], np.int64
    )


def raise_nonfinite(
    world: Ranks, inputs: Sequence[Array], segments: Sequence[Segment], total: Array | None
) -> NoReturn:
    """Raise NonFiniteGradient that names tensors and ranks. Collective.

    inputs: of the hosted ranks; total: the sum, the same on all ranks, if it is known
    """
    found = [
        (i, rank)
        for rank, x in zip(world.hosted, inputs, strict=True)
        for i in np.flatnonzero(amax_of_segments(x, segments) >= NONFINITE_BITS).tolist()
    ]
    places = [place for process in world.gather(found, "non-finite") for place in process]
    which = {i for i, _ in places}
    if not places and total is not None:
        which = set(np.flatnonzero(amax_of_segments(total, segments) >= NONFINITE_BITS).tolist())
    raise NonFiniteGradient(
        [segments[i].name for i in sorted(which)], sorted({rank for _, rank in places})
    )


def shared_amax(
    world: Ranks, inputs: Sequence[Array], segments: Sequence[Segment], what: str
) -> list[int]:
    """Return the float32 bits of max|x| of each segment over all ranks. Collective.

    Raises NonFiniteGradient.
    """
    own = np.max([amax_of_segments(x, segments) for x in inputs], axis=0)
    amax: list[int] = world.max(own, what).tolist()
    if max(amax, default=0) >= NONFINITE_BITS:
        raise_nonfinite(world, inputs, segments, None)
    return amax
