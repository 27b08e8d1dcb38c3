"""No compression: gradients travel in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from ..collectives.allreduce import Allreduce
from ..collectives.method import Machine, configured
from ..methods import USUAL
from .base import LOSSES, Aggregator, Array, Column, Context, Mean, machine_of_auto
from .bucket import Bucket


@dataclass(frozen=True)
class NoCompression(Aggregator):
    """The mean in float32. algorithm: of the all-reduce; "mpi" is the library's own.

    machine: for "auto", as for cpdhpc.allreduce; a file is read once
    Raises ValueError for an unknown algorithm, or a machine with another algorithm than "auto".
    """

    columns: ClassVar[Mapping[str, Column]] = LOSSES  # of which there are none
    stateless: ClassVar[bool] = True

    aggregator: Literal["none"] = "none"
    algorithm: str = USUAL
    machine: Machine | None = None

    def __post_init__(self) -> None:
        machine = machine_of_auto("NoCompression", self.algorithm, self.machine)
        object.__setattr__(self, "machine", machine)
        assert self._allreduce  # raises for an unknown algorithm

    @cached_property
    def _allreduce(self) -> Allreduce:
        return configured(
            Allreduce,
            wire="raw",
            algorithm=self.algorithm,
            op="mean",
            machine=self.machine,
            finite=True,
        )

    @property
    def compares(self) -> bool:
        return type(self).aggregate is NoCompression.aggregate

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        reduced = self._allreduce.run(
            context.world,
            gradients,
            context.outs,
            iteration=context.iteration,
            segments=bucket.segments,
            agreed=context.agreed,
        )
        return Mean.finite(reduced.arrays[0])
