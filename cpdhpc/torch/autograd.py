"""Differentiable exchanges of torch tensors: each operation is the other's backward.

Every rank has its own graph. If a rank's loss does not use an exchanged tensor, it never runs the
exchange's backward, and the others wait for it: join the tensor to the loss. Calls carry numbers,
so that graphs that differ between ranks raise an error instead of mixing data: the n-th call of a
plan has the number n, and its backward BACKWARD + n. If a rank never comes, the world's time-out
ends the job. Both errors name rank, plan and operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..darray.plan import WindowPlan

BACKWARD = 1_000_000  # added to a call's number for its backward, subtracted for the next one

Tensor = torch.Tensor


_calls: WeakKeyDictionary[WindowPlan, count[int]] = WeakKeyDictionary()  # from 1


def exchange(x: Tensor, plan: WindowPlan) -> Tensor:
    """Return the tensor on the plan's window; its backward is accumulate. Collective.

    x: owned.shape + further axes; not changed. It requires a gradient on all ranks or on none
    The backward is collective, too, can be differentiated again, and takes any strides.
    Raises the errors of WindowPlan.exchange.
    """
    _check("exchange: x", x, plan)
    y: Tensor = _exchange(x, plan, next_number(plan), False)
    return y


def accumulate(y: Tensor, plan: WindowPlan) -> Tensor:
    """Return the sums at the owned cells; its backward is exchange, without fills. Collective.

    y: window.shape + further axes; otherwise see exchange
    """
    _check("accumulate: y", y, plan)
    x: Tensor = _accumulate(y, plan, next_number(plan))
    return x


def join(loss: Tensor, *tensors: Tensor) -> Tensor:
    """Return the loss with the tensors in its graph; they get gradients of zeros.

    For a rank whose loss does not use an exchanged tensor that other ranks use: their backward
    needs this rank's. The tensors' values, even NaN, do not matter.
    """
    joined: Tensor = _join(loss, *tensors)
    return joined


def _check(what: str, x: Any, plan: WindowPlan) -> None:
    """Raise TypeError on all ranks unless x is a tensor that can be exchanged."""
    problem = None
    if not isinstance(x, Tensor):
        problem = f"{what} is {type(x).__name__}: must be a torch tensor"
    elif x.layout != torch.strided:
        problem = f"{what} is {x.layout}: must be strided"
    if problem is not None:
        raise plan.world.refuse(TypeError(problem))[0]


def next_number(plan: WindowPlan) -> int:
    """Return the number of a plan's next forward call."""
    return next(_calls.setdefault(plan, count(1))) % BACKWARD


def backward_number(number: int) -> int:
    """Return the number of the backward of a call."""
    return number + (BACKWARD if number < BACKWARD else -BACKWARD)


def readable(tensor: Tensor) -> Tensor:
    """Return a tensor without graph; a copy if elements share memory or are lazy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    shared = any(s == 0 and n > 1 for s, n in zip(plain.stride(), plain.shape, strict=True))
    return plain.contiguous() if shared else plain


def twice(
    made: Callable[..., Tensor],
    slope: Tensor,
    given: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the wanted gradients of made(*given), with graphs, and None for the others.

    Gradients are of this use alone: one argument may depend on another, for example the input of a
    layer that is called twice on its weights.
    """
    own = [each if each is None else each.view_as(each) for each in given]
    pairs = list(zip(own, wanted, strict=True))
    inputs = [each for each, is_wanted in pairs if is_wanted and each is not None]
    found = iter(torch.autograd.grad(made(*own), inputs, slope, create_graph=True))
    return [next(found) if is_wanted else None for _, is_wanted in pairs]


class _Exchange(torch.autograd.Function):
    """linear: with zeros outside the domain, as in the transpose of accumulate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: WindowPlan, number: int, linear: bool) -> Tensor:
        ctx.plan, ctx.number = plan, number
        y: Tensor = plan.exchange(readable(x), number=number)
        for fill in plan.fills if linear else ():
            y[fill.target.slices(plan.window.start)] = 0
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        number = backward_number(ctx.number)
        return _accumulate(gradients[0], ctx.plan, number), None, None, None


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: WindowPlan, number: int) -> Tensor:
        ctx.plan, ctx.number = plan, number
        total: Tensor = plan.accumulate(readable(y), number=number)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        number = backward_number(ctx.number)
        return _exchange(gradients[0], ctx.plan, number, True), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(torch.zeros_like(each) for each in ctx.saved_tensors)


# torch declares apply without types
_exchange: Callable[..., Any] = _Exchange.apply
_accumulate: Callable[..., Any] = _Accumulate.apply
_join: Callable[..., Any] = _Join.apply
