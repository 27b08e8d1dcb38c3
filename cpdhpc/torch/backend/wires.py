"""Collectives in few bits inside torch programs: the wire formats of a process group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import distributed

from ...collectives.allreduce import Allreduce
from ...collectives.checks import check_alike
from ...collectives.collective import Collective
from ...errors import ArgumentError, ArgumentTypeError
from ...methods import check_whole, said_by
from ...world.mpi import World
from .channel import Link
from .group import MpiGroup
from .programs import Tensor
from .progress import Step, Until, Waits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ADDED = ("SUM", "AVG", "")  # "": not a reduction
FROM_BYTES = 1 << 16
OPTIONS = {field.name for field in fields(Allreduce)} - {"op", "finite"}  # torch's calls have op
Way = Allreduce | Collective
Choice = str | Mapping[str, Any] | None


class Wires:
    """The calls of a process group that are sent in few bits, over a world of its own.

    methods: name of a call -> its all-reduce or collective; from_bytes: smallest size of tensors
    """

    def __init__(self, world: World, methods: Mapping[str, Way], from_bytes: int) -> None:
        self.world, self.methods, self.from_bytes = world, dict(methods), from_bytes
        self._turns: deque[object] = deque()  # calls that have not begun, in their order
        self._thread = ThreadPoolExecutor(1, "cpdhpc-torch-wires")

    def takes(self, name: str, tensor: Tensor, op: str) -> bool:
        """Whether a call is sent in few bits."""
        return (
            name in self.methods
            and op in ADDED
            and tensor.dtype in FLOATS
            and tensor.nbytes >= self.from_bytes
        )

    def move(self, name: str, link: Link, call: str, x: Tensor, out: Tensor, op: str) -> Waits:
        """Return the program of a call of a flat tensor x; out: its result, x for an all-reduce."""
        method = self.methods[name]
        if op == "AVG":
            method = replace(method, op="mean")

        def run() -> None:
            given, result = (x, out) if x.dtype == torch.float32 else (x.float(), out.float())
            into = given if out is x else result
            method.run(self.world, [given.numpy()], [into.numpy()])
            if into is not out:
                out.copy_(into)

        turn = object()
        self._turns.append(turn)
        link.ends.append(partial(self._end, turn))
        return self._in_turn(link, f"{call} as {method.wire}", run, turn)

    def _in_turn(self, link: Link, call: str, run: Callable[[], None], turn: object) -> Waits:
        """Compare a call, and run it in the thread after those that were issued before."""
        yield from link.agree(call)
        yield Step([Until(lambda: self._turns[0] is turn)], [-1])
        job = self._thread.submit(run)
        self._end(turn)
        yield Step([Until(lambda: job.done() and job.result() is None)], [-1])

    def _end(self, turn: object) -> None:
        """Let the next call begin."""
        with suppress(ValueError):  # ended already
            self._turns.remove(turn)

    def free(self) -> None:
        """End the thread and free the world. Collective."""
        self._thread.shutdown()
        self.world.free()


def method_of(name: str, choice: Choice) -> Way:
    """Return the method of a call, given a wire or the arguments of the library's function."""
    if not isinstance(choice, str | Mapping):
        raise ArgumentTypeError("set_wires", name, choice, "must be a wire or a mapping")
    options = {"wire": choice} if isinstance(choice, str) else dict(choice)
    for key in options.keys() - OPTIONS:
        known = ", ".join(sorted(OPTIONS))
        raise ArgumentError("set_wires", name, key, f"known are {known}", state=f"[{key!r}]")
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
    """Send a process group's collectives in few bits from now on. Collective over the group.

        cpdhpc.torch.set_wires(reduce_scatter="e4m3", all_gather="e4m3")  # for FSDP2

    group: of the backend "cpdhpc"; None for the default one
    all_reduce, reduce_scatter, all_gather: a wire, or the arguments of cpdhpc.allreduce,
        cpdhpc.reduce_scatter or cpdhpc.all_gather as a mapping, for example {"wire": "e2m1fn",
        "accumulate": "exact"}; None: no rounding. The last two concern torch's
        reduce_scatter_tensor and all_gather_into_tensor, the calls of FSDP2
    from_bytes: tensors of a rank with fewer bytes are not rounded
    Only float32, bfloat16 and float16 tensors are rounded, and only in sums, means and gathers.
    Integers never are, nor, by from_bytes, flags and norms. All ranks get the same bits. For NaN
    and infinity, wait raises NonFiniteGradient on all ranks.
    Raises TypeError and ValueError on all ranks if arguments are wrong on one, or differ;
    RuntimeError if a rank makes another call, or none before the group's time-out.
    """
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, MpiGroup):
        raise TypeError(f"set_wires: group={found!r}: must be a process group of 'cpdhpc'")
    found.meeting("set_wires").wait()  # else World ends the job if a rank does not come
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
