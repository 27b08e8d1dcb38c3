"""Gradients travel in a small floating-point format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..collectives.allreduce import Allreduce, Reduced, configured
from ..collectives.method import AUTO, Machine, Segment, Shifts, shift_bytes
from ..collectives.rank_program import NO_KEY
from ..formats import (
    SHARED,
    SHIFT_BIAS,
    TILE,
    Cast,
    Overflow,
    Rounding,
    packed_bytes,
    shift_count,
    tiles,
)
from ..ops import backend_of, placed, to_host
from .base import (
    EITHER,
    LOSSES,
    Aggregator,
    Array,
    Column,
    Context,
    Mean,
    check_place,
    machine_of_auto,
    raise_unless_finite,
)
from .bucket import Bucket


@dataclass(frozen=True)
class LowBit(Aggregator):
    """The mean of gradients that are rounded to a format before they travel.

    The options are those of cpdhpc.allreduce; the file of a machine is read once. Raises ValueError
    where one is unknown or does not go with another.
    rounding: as formats.Cast; not given: "stochastic" for wire "ternary", of which "nearest" leaves
        the largest values of a layer alone, so that trainings diverge; else "nearest"
    error_feedback: what rounding a rank's own gradient loses is added to its next one; not what
        partial sums lose on their way (accumulate "float32" and "exact" round none). Rounding is
        to nearest then: a value rounded up by chance may leave more behind than there was, so
        that what is kept may grow without end
    Source: Han, Demmel, You: Auto-precision scaling, arXiv 1911.08907 (scaling "aps"); Karimireddy
    et al.: Error feedback fixes SignSGD and other gradient compression schemes, ICML 2019.
    """

    columns: ClassVar[Mapping[str, Column]] = LOSSES
    align: ClassVar[int] = TILE  # no tile holds values of two layers

    aggregator: Literal["lowbit"] = "lowbit"
    wire: str = "e4m3"
    algorithm: str = "ring"
    scaling: str | None = None
    accumulate: str | None = None
    rounding: Rounding | None = None
    overflow: Overflow = "saturate"
    random_bits: int = 0
    headroom: str = "n"
    machine: Machine | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        machine = machine_of_auto("LowBit", self.algorithm, self.machine)
        object.__setattr__(self, "machine", machine)
        if self.rounding is None:
            chance = self.wire == "ternary" and not self.error_feedback
            object.__setattr__(self, "rounding", "stochastic" if chance else "nearest")
        if self.wire == "raw":
            raise ValueError("LowBit: wire='raw': is the aggregator 'none'")
        if self.error_feedback and self.rounding != "nearest":
            raise ValueError(
                f"LowBit: rounding={self.rounding!r}: error_feedback=true needs 'nearest'"
            )
        self._allreduce(seed=0)

    def _allreduce(self, seed: int) -> Allreduce:
        return configured(
            wire=self.wire,
            algorithm=self.algorithm,
            scaling=self.scaling,
            accumulate=self.accumulate,
            op="mean",
            rounding=self.rounding,
            overflow=self.overflow,
            random_bits=self.random_bits,
            headroom=self.headroom,
            seed=seed,
            machine=self.machine,
        )

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        method = self._allreduce(context.seed)
        if self.error_feedback:
            reduced = self._run_with_memory(method, gradients, bucket, context)
        else:
            reduced = method.run(
                context.world, gradients, iteration=context.iteration, segments=bucket.segments
            )
        shifts = {"aps_shift": np.array(reduced.sent_shifts, np.float64)}
        return Mean(reduced.arrays[0], shifts if reduced.sent_shifts else {})

    def _run_with_memory(
        self, method: Allreduce, gradients: list[Array], bucket: Bucket, context: Context
    ) -> Reduced:
        """All-reduce what the gradients and what was lost before are rounded to. Collective.

        Rounded here, the contributions are numbers of the format, which travel as they are.
        """
        world, segments = context.world, bucket.segments
        check_place(self, world, gradients, allowed=EITHER)
        memory = [
            context.state.own(name, "residual", (stop - start,), like=gradients[0])
            for name, start, stop in segments
        ]
        wanted, kernels = [gradient.copy() for gradient in gradients], backend_of(gradients[0])
        for (_, start, stop), residuals in zip(segments, memory, strict=True):
            for x, residual in zip(wanted, residuals, strict=True):
                kernels.add(x[start:stop], residual, x[start:stop])
        raise_unless_finite(world, wanted, bucket)
        if method.algorithm == AUTO:
            method = method.chosen(world, wanted)
        shifts = method.shifts(world, wanted, segments)
        sent = [_rounded(x, method, shifts, segments) for x in wanted]
        known = shifts if shifts[0] else None
        reduced = method.run(
            world, sent, iteration=context.iteration, segments=segments, shifts=known
        )
        for (_, start, stop), residuals in zip(segments, memory, strict=True):
            for x, q, residual in zip(wanted, sent, residuals, strict=True):
                kernels.subtract(x[start:stop], q[start:stop], residual)
        return reduced

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Array]:
        """Count what encoding a rank's own gradient loses. See Aggregator.observe.

        Rounding is to nearest here whatever the wire's, so that the count has no chance in it.
        """
        return count_losses(gradient, bucket, self._allreduce(seed=0), mean)


def _rounded(x: Array, method: Allreduce, shifts: Shifts, segments: Sequence[Segment]) -> Array:
    """Return what a rank's contribution to an all-reduce is rounded to, float32[n]."""
    wire, out = method.payloads, np.empty_like(x)
    used = shift_bytes(shifts[0], segments, x.size, x) if shifts[0] else None
    payload = np.empty_like(x, shape=(wire.size_bytes(x.size),), dtype=np.uint8)
    wire.encode(x, used, NO_KEY, 0, payload)
    wire.decode(payload, used, out)
    return out


def count_losses(
    gradient: Array, bucket: Bucket, method: Allreduce, mean: Mean
) -> Mapping[str, Array]:
    """Return how many values of each layer saturate and underflow in a packed wire, int64[layers].

    mean: whose "aps_shift", if any, is the shift of each layer; else tiles have their own
    """
    assert method.fmt is not None, "wire 'raw' is refused"
    cast = Cast(method.fmt)
    shifts, flat = mean.layers.get("aps_shift"), gradient
    edges = np.array([*(start // TILE for _, start, _ in bucket.segments), tiles(flat.size)])
    shared = SHARED.get(method.parsed_scaling.kind, TILE)
    stored = np.empty(shift_count(flat.size, shared), np.uint8)
    if shifts is not None:
        stored[:] = np.repeat(shifts.astype(np.int64) + SHIFT_BIAS, np.diff(edges))
    # saturated, underflowed, not finite
    counts = placed(np.zeros((tiles(flat.size), 3), np.uint32), flat)
    words = np.empty_like(flat, shape=(packed_bytes(flat.size, cast.fmt.bits),), dtype=np.uint8)
    fit, encode_tiles = shifts is None, backend_of(flat).encode_tiles
    encode_tiles(flat, cast, words, placed(stored, flat), fit=fit, counts=counts)
    sums = np.zeros((tiles(flat.size) + 1, 2), np.int64)  # before each tile: a layer may be empty
    np.cumsum(to_host(counts)[:, :2], axis=0, out=sums[1:])
    saturated, underflowed = np.diff(sums[edges], axis=0).T
    return {"saturated_share": saturated, "underflow_share": underflowed}
