"""[stages]: a network cut into stages that train at the same time, and the ranks that hold them.

Source: Sun et al.: Penalty and augmented Lagrangian methods for layer-parallel training of
residual networks, arXiv 2009.01462.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ...config import Above0, Positive, Section
from ...ops.payloads import packed_wire
from ...world.mpi import World
from ...world.ranks import Loopback, Ranks


def _check_wire(wire: str) -> str:
    packed_wire(wire, "stages")
    return wire


class Stages(Section):
    """[stages]: the network cut into stages that train at the same time, on ranks of their own.

    count: number of stages; 1: the network is not cut
    cut: first blocks of the second and further stages, from 0; by default stages are cut so
        that the largest has as few parameters as possible
    method: the coupling of stages between corrections, "penalty" or "lagrangian" (penalty and
        multipliers)
    beta: factor of half the squared residual; z_rate: step of a stage's input, in 1 / beta
    correction: share of the iterations that go through all stages in turn, as ordinary training
    refresh_every: iterations after which the inputs of stages are computed anew
    local_steps: steps of all stages on each batch that is not a correction
    filter: only the mean of this many values, or pixels by pixels, is compared and sent
    wire: format of values between stages, raw or a packed one with a scale for each tile
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
            raise ValueError(f"cut={list(self.cut)}: should be {self.count - 1}, one per cut")
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


class Placement:
    """The rank of each stage of each share. Collective.

    A rank is a stage of a share. Each process holds the same number of a share's stages. The
    hosted ranks of a process are its stages in turn, and for each stage the shares.

    given: [stages]; world: of the training, whose virtual ranks are shares
    world: of all ranks; group: of the ranks that hold the same stages here
    shares: of each batch; here: those of this process; stages: that it holds
    Raises ValueError on all processes if stages do not suit the number of processes.
    """

    def __init__(self, given: Stages, world: Ranks) -> None:
        across, copies = given.layout(world.processes)
        each, place = world.virtual_ranks, world.process % across
        stages = given.count // across
        self.count, self.shares, self.across, self.each = given.count, copies * each, across, each
        self.stages = range(place * stages, (place + 1) * stages)
        first = world.process // across * each
        self.here = range(first, first + each)
        if isinstance(world, World) and world.processes > 1:
            every = range(world.processes)
            virtual, timeout_s = each * stages, world.timeout_s
            whole = world.part(every, virtual_ranks=virtual, timeout_s=timeout_s)
            assert whole is not None, "every process is in it"
            self.world: Ranks = whole
        else:
            self.world = Loopback(each * stages)
        self.group: Ranks | None = self.world.split(place) if copies > 1 else None

    def rank(self, stage: int, share: int) -> int:
        """Return the rank that holds a stage of a share."""
        copy, number = divmod(share, self.each)
        process = copy * self.across + stage // len(self.stages)
        local = stage % len(self.stages) * self.each + number
        return process * self.world.virtual_ranks + local

    def stage(self, rank: int) -> int:
        process, local = divmod(rank, self.world.virtual_ranks)
        return process % self.across * len(self.stages) + local // self.each

    def share(self, rank: int) -> int:
        process, local = divmod(rank, self.world.virtual_ranks)
        return process // self.across * self.each + local % self.each

    def group_of(self, stage: int) -> Ranks:
        """Return a world of a stage's shares: one of its own if a process holds them all."""
        return Loopback(self.each) if self.group is None else self.group

    def free(self) -> None:
        if self.group is not None:
            self.group.free()
        self.world.free()
