"""The signatures of a process group's methods, of which torch allows several for each.

For example group.allreduce([x], options), group.allreduce(x), group.allreduce(x, op=ReduceOp.MAX).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch._C import _distributed_c10d as distributed_c10d

OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # argument -> field


class Form(NamedTuple):
    """The usual signature of a method: lists of tensors, then options.

    depths: nesting of the lists, by argument; options: their class; fields: those of the options
    that other signatures have as arguments, in order, before a time-out
    """

    depths: tuple[int, ...]
    options: Any
    fields: tuple[str, ...] = ()

    def is_usual(self, arguments: tuple[Any, ...]) -> bool:
        """Whether arguments have the usual form."""
        return type(arguments[-1]) is self.options and all(
            [type(each) is list for each in arguments[:-1]]
        )

    def usual(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return arguments, by position and by name, in the usual form."""
        every = [*arguments, *(value for name, value in named.items() if name not in OPTIONS)]
        count = len(self.depths)
        tensors = [nested(*each) for each in zip(every[:count], self.depths, strict=True)]
        rest = [each for each in every[count:] if each is not None]
        if rest and hasattr(rest[0], "asyncOp"):  # options, maybe of a similar method
            return (*tensors, rest[0])
        options = self.options()
        given = {OPTIONS[name]: value for name, value in named.items() if name in OPTIONS}
        if rest and isinstance(rest[-1], timedelta):
            given["timeout"] = rest.pop()
        for name, value in (given | dict(zip(self.fields, rest, strict=False))).items():
            setattr(options, name, value)
        return (*tensors, options)


def nested(given: Any, depth: int) -> Any:
    """Return a tensor, or lists of tensors, as lists nested to that depth."""
    first = given
    while not isinstance(first, torch.Tensor):
        if not first:
            return given
        first, depth = first[0], depth - 1
    for _ in range(depth):
        given = [given]
    return given


ALL_REDUCE = Form((1,), distributed.AllreduceOptions, ("reduceOp",))
BROADCAST = Form((1,), distributed.BroadcastOptions, ("rootRank",))
REDUCE = Form((1,), distributed.ReduceOptions, ("rootRank", "reduceOp"))
ALL_GATHER = Form((2, 1), distributed_c10d.AllgatherOptions)
GATHER = Form((2, 1), distributed.GatherOptions, ("rootRank",))
SCATTER = Form((1, 2), distributed.ScatterOptions, ("rootRank",))
REDUCE_SCATTER = Form((1, 2), distributed.ReduceScatterOptions, ("reduceOp",))
