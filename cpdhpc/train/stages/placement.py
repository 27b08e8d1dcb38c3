"""Which rank holds which stage of which share of the batches."""

from __future__ import annotations

from ...world.mpi import World
from ...world.ranks import Loopback, Ranks
from .section import Stages


class Placement:
    """Which rank holds which stage of which share. Collective.

    A rank is a stage of a share: of a share's stages each process holds as many as another. The
    hosted ranks of a process are its stages in turn, of each the shares.

    given: [stages]; world: of the training, whose virtual ranks are shares
    world: of all ranks; group: of the ranks that hold the same stages here
    shares: of each batch; here: those of this process; stages: that it holds
    Raises ValueError on all processes alike where stages do not go with processes.
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
        """Return the stage of a rank."""
        process, local = divmod(rank, self.world.virtual_ranks)
        return process % self.across * len(self.stages) + local // self.each

    def share(self, rank: int) -> int:
        """Return the share of a rank."""
        process, local = divmod(rank, self.world.virtual_ranks)
        return process // self.across * self.each + local % self.each

    def group_of(self, stage: int) -> Ranks:
        """Return a world of a stage's shares: one of its own where a process holds them all."""
        return Loopback(self.each) if self.group is None else self.group

    def free(self) -> None:
        """Free the worlds. Collective."""
        if self.group is not None:
            self.group.free()
        self.world.free()
