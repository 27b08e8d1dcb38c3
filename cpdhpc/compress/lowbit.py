"""Gradients travel in a small floating-point format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..collectives.allreduce import Allreduce, configured
from ..collectives.method import Machine
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
from ..ops import backend_of
from ..ops.payloads import parse_wire
from .base import LOSSES, Aggregator, Array, Column, Context, Mean, machine_of_auto
from .bucket import Bucket


@dataclass(frozen=True)
class LowBit(Aggregator):
    """The mean of gradients that are rounded to a format before they travel.

    The options are those of cpdhpc.allreduce; the file of a machine is read once. Raises ValueError
    where one is unknown or does not go with another.
    rounding: as formats.Cast; not given: "stochastic" for wire "ternary", of which "nearest" leaves
        the largest values of a layer alone, so that trainings diverge; else "nearest"
    Source: Han, Demmel, You: Auto-precision scaling, arXiv 1911.08907 (scaling "aps").
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
    headroom: str = "n"
    machine: Machine | None = None

    def __post_init__(self) -> None:
        machine = machine_of_auto("LowBit", self.algorithm, self.machine)
        object.__setattr__(self, "machine", machine)
        if self.rounding is None:
            usual = "stochastic" if self.wire == "ternary" else "nearest"
            object.__setattr__(self, "rounding", usual)
        if self.wire == "raw":
            raise ValueError("LowBit: wire='raw': is the aggregator 'none'")
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
            headroom=self.headroom,
            seed=seed,
            machine=self.machine,
        )

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        reduced = self._allreduce(context.seed).run(
            context.world, gradients, iteration=context.iteration, segments=bucket.segments
        )
        shifts = {"aps_shift": np.array(reduced.sent_shifts, np.float64)}
        return Mean(reduced.arrays[0], shifts if reduced.sent_shifts else {})

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Array]:
        """Count what encoding a rank's own gradient loses. See Aggregator.observe.

        Rounding is to nearest here whatever the wire's, so that the count has no chance in it.
        """
        fmt = parse_wire(self.wire)
        assert fmt is not None, "wire 'raw' is refused"
        cast = Cast(fmt)
        shifts, flat = mean.layers.get("aps_shift"), gradient
        edges = np.array([*(start // TILE for _, start, _ in bucket.segments), tiles(flat.size)])
        scaling = self._allreduce(seed=0).parsed_scaling.kind
        stored = np.empty(shift_count(flat.size, SHARED.get(scaling, TILE)), np.uint8)
        if shifts is not None:
            stored[:] = np.repeat(shifts.astype(np.int64) + SHIFT_BIAS, np.diff(edges))
        counts = np.zeros((tiles(flat.size), 3), np.uint32)  # saturated, underflowed, not finite
        words = np.empty(packed_bytes(flat.size, cast.fmt.bits), np.uint8)
        fit = shifts is None
        backend_of(flat).encode_tiles(flat, cast, words, stored, fit=fit, counts=counts)
        sums = np.zeros(
            (tiles(flat.size) + 1, 2), np.int64
        )  # before each tile: a layer may be empty
        np.cumsum(counts[:, :2], axis=0, out=sums[1:])
        saturated, underflowed = np.diff(sums[edges], axis=0).T
        return {"saturated_share": saturated, "underflow_share": underflowed}
