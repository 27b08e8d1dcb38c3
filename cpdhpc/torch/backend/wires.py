"""Collectives of few bits inside torch programs: what a process group sends as other formats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from ...collectives.allreduce import Allreduce
from ...collectives.checks import check_alike
from ...collectives.collective import Collective
from ...methods import check_whole, said_by
from ...world.mpi import World
from .channel import Link
from .group import MpiGroup
from .programs import Tensor, Waits
from .progress import Step

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ADDED = ("SUM", "AVG", "")  # and what is no reduction
FROM_BYTES = 1 << 16
Way = Allreduce | Collective
Choice = str | Mapping[str, Any] | None


class Awaited:
    """A request of what a thread does."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def Test(self) -> bool:
        """Whether it is done; raises its error."""
        return self._future.done() and self._future.result() is None


class Turn:
    """A request of the turn of a call: calls begin in the order in which they were issued."""

    def __init__(self, turns: deque[Turn]) -> None:
        self._turns = turns
        turns.append(self)

    def Test(self) -> bool:
        """Whether all calls before have begun, or failed."""
        return self._turns[0] is self

    def end(self) -> None:
        """Let the next one have its turn."""
        with suppress(ValueError):  # it has it already
            self._turns.remove(self)


class Wires:
    """The wires of a process group: the calls that travel in few bits, by a world of its own.

    methods: the name of a call -> how it travels; from_bytes: for tensors of so many bytes or more
    """

    def __init__(self, world: World, methods: Mapping[str, Way], from_bytes: int) -> None:
        self.world, self.methods, self.from_bytes = world, dict(methods), from_bytes
        self._turns: deque[Turn] = deque()
        self._thread = ThreadPoolExecutor(1, "cpdhpc-torch-wires")

    def takes(self, name: str, tensor: Tensor, op: str) -> bool:
        """Whether a call goes by a wire: with sums or means of many floating-point values."""
        return (
            name in self.methods
            and op in ADDED
            and tensor.dtype in FLOATS
            and tensor.nbytes >= self.from_bytes
        )

    def move(self, name: str, link: Link, call: str, x: Tensor, out: Tensor, op: str) -> Waits:
        """Do a call of one flat tensor x; out: where its result goes, x itself in an all-reduce."""
        method = self.methods[name]
        if op == "AVG":
            method = replace(method, op="mean")

        def run() -> None:
            given, result = (x, out) if x.dtype == torch.float32 else (x.float(), out.float())
            into = given if out is x else result
            method.run(self.world, [given.numpy()], [into.numpy()])
            if into is not out:
                out.copy_(into)

        turn = Turn(self._turns)
        link.ends.append(turn.end)
        return self._in_turn(link, f"{call} as {method.wire}", run, turn)

    def _in_turn(self, link: Link, call: str, run: Callable[[], None], turn: Turn) -> Waits:
        """Compare a call, and run it in the thread, after those that were issued before."""
        yield from link.agree(call)
        yield Step([turn], [-1])
        job = self._thread.submit(run)
        turn.end()
        yield Step([Awaited(job)], [-1])

    def free(self) -> None:
        """End the thread and free the world. Collective."""
        self._thread.shutdown()
        self.world.free()


def method_of(name: str, choice: Choice) -> Way:
    """Return how a call travels: a wire, or the arguments of the library's function by name."""
    options = {"wire": choice} if isinstance(choice, str) else dict(choice or {})
    try:
        if name == "all_reduce":
            return Allreduce(**options)
        return Collective(collective=name, **options)
    except (TypeError, ValueError) as error:
        raise said_by(f"set_wires: {name}", error) from None


def set_wires(
    group: distributed.ProcessGroup | None = None,
    *,
    all_reduce: Choice = None,
    reduce_scatter: Choice = None,
    all_gather: Choice = None,
    from_bytes: int = FROM_BYTES,
) -> None:
    """Let a process group's collectives travel in few bits from now on. Collective over it.

        cpdhpc.torch.set_wires(reduce_scatter="e4m3", all_gather="e4m3")  # as FSDP2 needs

    group: of the backend "cpdhpc"; None for the default one
    all_reduce, reduce_scatter, all_gather: a wire, or the arguments of cpdhpc.allreduce,
        cpdhpc.reduce_scatter or cpdhpc.all_gather as a mapping, for example {"wire": "e2m1fn",
        "accumulate": "exact"}; None: no rounding, what torch asks for. Of torch's calls with one
        tensor for all ranks, all_gather_into_tensor and reduce_scatter_tensor, which FSDP2 makes
    from_bytes: tensors of a rank with fewer bytes travel as they are
    Float32, bfloat16 and float16 tensors alone are rounded, and of reductions sums and means:
    never integers, and nothing small, as flags and norms are. All ranks get the same bits. NaN and
    infinity are NonFiniteGradient on all ranks, raised by wait.
    Raises on all ranks alike TypeError and ValueError for what is wrong on any, or differs.
    """
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, MpiGroup):
        raise TypeError(f"set_wires: group={found!r}: must be a process group of 'cpdhpc'")
    world = World(found.channel.comm, timeout_s=found.timeout_s)
    methods: dict[str, Way] = {}
    error: Exception | None = None
    choices = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
    try:
        check_whole("set_wires", "from_bytes", from_bytes, 0)
        methods = {n: method_of(n, choice) for n, choice in choices.items() if choice is not None}
    except (TypeError, ValueError) as wrong:
        error = wrong
    arguments = {name: methods.get(name) for name in choices} | {"from_bytes": from_bytes}
    try:
        check_alike(world, error, arguments, [0], "set_wires: arguments")
    except Exception:
        world.free()
        raise
    if found.wires is not None:
        found.wires.free()
    found.wires = Wires(world, methods, from_bytes) if methods else None
    if found.wires is None:
        world.free()
