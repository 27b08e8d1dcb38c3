"""[stages] of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ...config import Section
from ...ops.payloads import parse_wire

Positive = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0)]


def _check_wire(wire: str) -> str:
    parse_wire(wire, "stages")
    return wire


class Stages(Section):
    """[stages]: the network cut into stages that train at the same time, on ranks of their own.

    count: of stages; 1: the network is not cut
    cut: blocks that the second and further stages begin with, from 0; by default stages are cut so
        that the largest has as few parameters as can be
    method: what holds stages together between corrections, "penalty" or "lagrangian" (penalty and
        multipliers)
    beta: factor of half the squared residual; z_rate: step of what enters a stage, in 1 / beta
    correction: share of the iterations that go through all stages in turn, as ordinary training
    refresh_every: iterations after which what enters the stages is computed anew
    local_steps: steps of all stages on each batch that is not a correction
    filter: of this many values, or pixels by pixels, only the mean is compared and sent
    wire: format of what travels between stages, raw or a packed one with a scale for each tile
    """

    count: Positive = 1
    cut: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    method: Literal["penalty", "lagrangian"] = "penalty"
    beta: Above0 = 1.0
    z_rate: Above0 = 1.0
    correction: Annotated[float, Field(ge=0, le=1)] = 0.5
    refresh_every: Positive = 16
    local_steps: Positive = 1
    filter: Positive = 1
    wire: Annotated[str, AfterValidator(_check_wire)] = "raw"

    @model_validator(mode="after")
    def _cut_once_a_stage(self) -> Stages:
        if self.cut and len(self.cut) != self.count - 1:
            raise ValueError(f"cut={list(self.cut)}: should be {self.count - 1}, one a cut")
        if list(self.cut) != sorted(set(self.cut)):
            raise ValueError(f"cut={list(self.cut)}: should ascend")
        return self

    def layout(self, processes: int) -> tuple[int, int]:
        """Return (processes of a copy of the network, copies) on so many processes.

        Raises ValueError unless stages and processes are multiples of one another.
        """
        if processes <= self.count and self.count % processes == 0:
            return processes, 1
        if processes % self.count == 0:
            return self.count, processes // self.count
        raise ValueError(
            f"stages.count={self.count} on {processes} processes: their number should divide it, "
            "or be a multiple of it"
        )

    def corrections(self, first: int, count: int) -> int:
        """Return how many of the iterations first .. first + count - 1 are corrections."""
        return int((first + count) * self.correction) - int(first * self.correction)
