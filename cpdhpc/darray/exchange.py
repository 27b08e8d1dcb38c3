"""Exchanges over a plan and their transpose: arguments checked, channels found, errors told."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ..comm.engine import give_up
from ..comm.failure import RankFailure
from ..ops.moves import run_moves
from .boundary import fill_value
from .channel import Call, Channel
from .kinds import Array, Kind, kind_of
from .lane import SLOTS
from .operation import ACCUMULATE, Operation
from .program import LOOKS, Program

if TYPE_CHECKING:
    from .plan import WindowPlan

MOST_NUMBER = 0xFFFFFFFF  # of calls


class Handle:
    """An exchange or accumulation under way, from begin to finish.

    out: the array that finish returns. Until then only plan.interior of it may be read (of an
    accumulation nothing); what was given may be changed again.
    """

    def __init__(
        self, plan: WindowPlan, operation: Operation, call: Call, channel: Channel
    ) -> None:
        self._plan, self._operation, self._call, self._channel = plan, operation, call, channel
        self._done = False

    @property
    def out(self) -> Array:
        """The array that finish returns."""
        return self._call.out

    def progress(self) -> bool:
        """Return whether all messages have come; until then give MPI the time to move them.

        MPI moves long messages only while it is called: between parts of a computation that hides
        an exchange call this, best every millisecond or more often (a few microseconds each).
        Raises as finish.
        """
        if self._done:
            return True
        try:
            return self._channel.progress(self._call)
        except Exception as error:
            _give_up(self._plan, self._operation, error)

    def finish(self) -> Array:
        """Wait for the messages and return the array. Collective: once, where begin was.

        Raises RuntimeError where it was called before; RankFailure as an all-reduce does.
        """
        if self._done:
            raise RuntimeError(f"{self._operation.name} of plan {self._plan.name!r}: is finished")
        self._done = True
        try:
            self._channel.finish(self._call)
        except Exception as error:
            _give_up(self._plan, self._operation, error)
        return self._call.out

    def remember(self) -> None:
        """Let the next call like this one go straight to its program."""
        call = self._call
        program = self._channel.program(call)
        if program is not None and call.plain is not None and call.plain[0] is call.x:
            last = Last(self._plan, self._channel, program, call.out)
            self._plan.last[self._operation.name] = last


class Last:
    """The last call of an operation on NumPy arrays, for a next one like it.

    What it needs lies near, as calls of a few cells take a microsecond.
    """

    __slots__ = ("_counts", "_program", "_shape", "_world", "channel", "dtype")

    def __init__(self, plan: WindowPlan, channel: Channel, program: Program, out: Array) -> None:
        self.channel, self._program, self._world = channel, program, plan.world
        self.dtype, self._shape = out.dtype, out.shape
        world = plan.world
        self._counts = world.bytes_sent.data, world.messages_sent.data  # faster than the arrays

    def again(self, x: Array, out: Array | None, number: int) -> Array | None:
        """Do the call again, on other arrays, and return out; None where they lie otherwise.

        Raises ValueError, having done nothing, where they overlap.
        """
        dtype, channel, program = self.dtype, self.channel, self._program
        if out is None:
            out = np.empty(self._shape, dtype)
        elif type(out) is not np.ndarray or out.dtype is not dtype:
            return None
        if channel.open:
            return None
        if self._world.lent_by is not None:
            self._world.check_thread()
        serial, number = channel.serial + 1, channel.mark | number & MOST_NUMBER
        first, stop, last = program.ends[serial % SLOTS]
        row = run_moves(program.compiled, first, stop, serial, number, LOOKS, x, out)
        if row is None:
            return None
        channel.serial = serial
        bytes_sent, messages_sent = self._counts
        bytes_sent[0] += channel.sent_bytes
        messages_sent[0] += channel.sent
        if row != last:
            program.rest(row, serial, number, x, out)
        return out


def run(plan: WindowPlan, operation: Operation, x: Array, out: Array | None, number: int) -> Array:
    """Do an operation of a plan. Collective. Raises as WindowPlan.exchange."""
    last = plan.last.get(operation.name)
    if last is not None and type(x) is np.ndarray and x.dtype is last.dtype:
        serial = last.channel.serial
        try:
            result = last.again(x, out, number)
        except Exception as error:
            if last.channel.serial == serial:  # nothing was done
                raise
            _give_up(plan, operation, error)
        if result is not None:
            return result
    handle = begin(plan, operation, x, out, number)
    result = handle.finish()
    handle.remember()
    return result


def begin(
    plan: WindowPlan, operation: Operation, x: Array, out: Array | None, number: int
) -> Handle:
    """Start an operation of a plan. Collective. Raises as WindowPlan.exchange."""
    if plan.freed:
        raise RuntimeError(f"{operation.name}: plan {plan.name!r} is freed")
    plan.world.check_thread()
    call = check(plan, operation, x, out)
    channel = _channel(plan, operation, call)
    call.number = channel.mark | number & MOST_NUMBER
    channel.prepare(call)
    try:
        channel.begin(call)
    except Exception as error:
        _give_up(plan, operation, error)
    return Handle(plan, operation, call, channel)


def _give_up(plan: WindowPlan, operation: Operation, error: Exception) -> NoReturn:
    plan.broken = plan.freed = True
    plan.last.clear()
    if isinstance(error, RankFailure):
        raise error
    give_up(plan.world, error, f"{operation.name} of plan {plan.name!r}")


def check(plan: WindowPlan, operation: Operation, x: Array, out: Array | None) -> Call:
    """Return the call with these arrays; raise TypeError or ValueError where they do not fit."""
    what = f"{operation.name}: {'y' if operation is ACCUMULATE else 'x'}"
    kind = kind_of(what, x)
    kind.check(what, x)
    boxes = (plan.owned, plan.window)
    given, wanted = boxes[::-1] if operation is ACCUMULATE else boxes
    ndim = given.ndim
    if tuple(x.shape[:ndim]) != given.shape:
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}: must begin with {given.shape}, the shape of the "
            f"{'window' if operation is ACCUMULATE else 'owned box'} {given} of rank {plan.rank}"
        )
    if operation is ACCUMULATE and kind.dtype(x) == "bool":
        raise TypeError(f"{what} is of bool: there are no sums of truth values")
    if plan.packed is not None and kind.dtype(x) != "float32":
        raise TypeError(f"{what} is of {kind.dtype(x)}: wire {plan.wire} takes float32")
    shape = wanted.shape + tuple(x.shape[ndim:])
    out = kind.empty(x, shape) if out is None else _checked_out(operation, kind, x, out, shape)
    given_plain, out_plain = kind.plain(x), kind.plain(out)
    if given_plain is None or out_plain is None:
        return Call(kind, x, out, None)
    return Call(kind, x, out, (given_plain, out_plain))


def _checked_out(
    operation: Operation, kind: Kind, x: Array, out: Array, shape: tuple[int, ...]
) -> Array:
    """Return out if it is of x's kind and dtype and of a shape."""
    what = f"{operation.name}: out"
    if kind_of(what, out) is not kind or out.dtype != x.dtype:
        raise TypeError(
            f"{what} is {type(out).__name__} of {getattr(out, 'dtype', '?')}: must be "
            f"{type(x).__name__} of {x.dtype}, as what is given"
        )
    kind.check(what, out)
    if tuple(out.shape) != shape:
        raise ValueError(f"{what} has shape {tuple(out.shape)}: must be {shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{what} is read-only")
    strides = out.stride() if hasattr(out, "stride") else out.strides
    if any(n > 1 and step == 0 for n, step in zip(shape, strides, strict=True)):
        raise ValueError(f"{what} has strides {tuple(strides)}: its cells share memory")
    return out


def _channel(plan: WindowPlan, operation: Operation, call: Call) -> Channel:
    """Return the channel for arrays like these, made when they are first met."""
    trail = tuple(call.x.shape[plan.owned.ndim :])
    key = operation.name, call.kind.dtype(call.x), trail
    if key not in plan.channels:
        _check_values(plan, operation, call)
        plan.channels[key] = Channel(plan, operation, call.kind, call.x, trail, plan.packed)
    return plan.channels[key]


def _check_values(plan: WindowPlan, operation: Operation, call: Call) -> None:
    """Raise TypeError or ValueError, on all ranks, where a dtype is not what the operation needs.

    An exchange fills with values that the dtype must take, an accumulation adds.
    """
    dtype = call.kind.dtype(call.x)
    if operation is ACCUMULATE:
        plain = call.x.dtype if isinstance(call.x, np.ndarray) else np.dtype(np.float64)
        try:
            adds = np.add.resolve_dtypes((plain, plain, None))[-1] == plain
        except TypeError:
            adds = False
        if not adds:
            raise TypeError(f"accumulate: y is of {dtype}: has no sums of its own dtype")
        return
    for value in filter(None, map(fill_value, plan.windows.modes)):
        try:
            call.kind.element(call.x, value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"exchange: plan {plan.name!r} fills with {value}, x is of {dtype}: {error}"
            ) from None
