"""Window plans, built once by all ranks together, and the exchanges over them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any, NoReturn, Self
from weakref import finalize, ref

import numpy as np

from ..collectives.engine import carrier_of, give_up
from ..errors import ArgumentError, ArgumentTypeError
from ..formats import Format
from ..ops import type_name
from ..ops.moves import run_moves
from ..ops.payloads import Packed
from ..world.gpu_messages import Carrier, Direct
from ..world.mpi import as_world
from ..world.ranks import RankFailure, Ranks
from .channel import Call, Kept, PlanChannel, drop
from .compiled import POLLS, Program
from .copies import (
    ACCUMULATE,
    EXCHANGE,
    Addresses,
    Array,
    ArrayBackend,
    Transfer,
    array_backend,
    wrong_dtype,
    wrong_shape,
)
from .describe import Description, Verification, describe, packed_wire, verify
from .device import SUMS
from .layout import Box, Layout, as_box, check_layout
from .mailbox import SLOTS, Purpose, greet
from .windows import Boundary, RankPieces, Windows, fill_value, parse_boundary

MOST_NUMBER = 0xFFFFFFFF  # largest number of a call


class Handle:
    """An exchange or accumulation in progress, between begin and finish.

    out: the array that finish returns. Until then only plan.interior of it may be read, and of an
    accumulation nothing. The input may be changed as soon as begin returns.
    """

    def __init__(self, plan: WindowPlan, channel: PlanChannel, call: Call) -> None:
        self._plan, self._channel, self._call = plan, channel, call
        self._done = False

    @property
    def out(self) -> Array:
        """The array that finish returns."""
        return self._call.out

    def progress(self) -> bool:
        """Return whether all messages have come; until then give MPI time to move them.

        MPI moves long messages only while it is called. A computation that hides an exchange
        should call this between its parts, every millisecond or more often (each call takes a few
        microseconds). Raises the errors of finish.
        """
        if self._done:
            return True
        try:
            return self._channel.progress(self._call)
        except Exception as error:
            _give_up(self._plan, self._channel.operation, error)

    def finish(self) -> Array:
        """Wait for the messages and return the array. Collective, once after begin.

        Raises RuntimeError if it was called before; RankFailure as an all-reduce does.
        """
        if self._done:
            raise RuntimeError(f"{self._channel.what}: is finished")
        self._done = True
        try:
            self._channel.finish(self._call)
        except Exception as error:
            _give_up(self._plan, self._channel.operation, error)
        return self._call.out

    def remember(self) -> None:
        """Let the next call with the same layout go straight to its program."""
        call = self._call
        program = self._channel.program(call)
        if program is not None and call.plain is not None and call.plain[0] is call.x:
            self._plan.last[self._channel.operation.name] = Repeated(
                self._channel, program, call.out
            )


class Repeated:
    """The last call of an operation on NumPy arrays, kept for the next call with the same layout.

    Its fields are quick to reach: calls of a few cells take a microsecond.
    """

    __slots__ = ("_messages", "_program", "_shape", "_world", "channel", "dtype")

    def __init__(self, channel: PlanChannel, program: Program, out: Array) -> None:
        self.channel, self._program, self._world = channel, program, channel.world
        self.dtype, self._shape, self._messages = out.dtype, out.shape, len(channel.sending)

    def again(self, x: Array, out: Array | None, number: int) -> Array | None:
        """Repeat the call on other arrays and return out; None if their layout differs.

        Raises ValueError, with nothing done, if they overlap.
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
        serial, number = channel.serial + 1, channel.number_prefix | number & MOST_NUMBER
        first, stop, last = program.ends[serial % SLOTS]
        row = run_moves(program.compiled, first, stop, serial, number, POLLS, x, out)
        if row is None:
            return None
        channel.serial = serial
        channel.bytes_counter[0] += channel.sent_bytes
        channel.messages_counter[0] += self._messages
        if row != last:
            program.rest(row, serial, number, x, out)
        return out


def run(plan: WindowPlan, operation: Transfer, x: Array, out: Array | None, number: int) -> Array:
    """Do an operation of a plan. Collective. Raises the errors of WindowPlan.exchange."""
    last = plan.last.get(operation.name)
    adds_to_nothing = out is None and plan.halo_only
    if last is not None and type(x) is np.ndarray and x.dtype is last.dtype and not adds_to_nothing:
        serial = last.channel.serial
        try:
            result = last.again(x, out, number)
        except Exception as error:
            if last.channel.serial == serial:  # nothing was done
                _refuse(plan, error)
            _give_up(plan, operation, error)
        if result is not None:
            return result
    handle = begin(plan, operation, x, out, number)
    result = handle.finish()
    handle.remember()
    return result


def begin(
    plan: WindowPlan, operation: Transfer, x: Array, out: Array | None, number: int
) -> Handle:
    """Start an operation of a plan. Collective. Raises the errors of WindowPlan.exchange."""
    plan.world.check_thread()
    try:
        _check_usable(plan, operation)
        call = check(plan, operation, x, out)
    except Exception as error:
        _refuse(plan, error)
    if call.addresses:
        try:
            if plan.world.gpu_aware is None:  # then carrier_of is collective
                _greet(plan, operation)
            with call.backend.in_stream(x):
                carrier = carrier_of(plan.world, x)
        except Exception as error:
            _give_up(plan, operation, error)
        assert isinstance(carrier, Carrier), "arrays are on a GPU"
        call.carrier = carrier
    try:
        channel = _channel(plan, operation, call, number)
        channel.prepare(call)
    except Exception as error:
        _refuse(plan, error)
    try:
        channel.begin(call)
    except Exception as error:
        _give_up(plan, operation, error)
    return Handle(plan, channel, call)


def _check_usable(plan: WindowPlan, operation: Transfer) -> None:
    """Raise RuntimeError if a plan is freed, or if an earlier error ended it, with that error."""
    what = f"{operation.name}: plan {plan.name!r}"
    if plan.kept.broken:
        raise RuntimeError(
            f"{what} was ended by an earlier error, make a new one: {plan.kept.broken}"
        )
    if plan.freed:
        raise RuntimeError(f"{what} is freed")


def _greet(plan: WindowPlan, operation: Transfer) -> None:
    """Announce to the ranks of messages that arrays are on a GPU."""
    what, key = f"{operation.name} of plan {plan.name!r}", f"{operation.name} of GPU arrays"
    sent, received = operation.sent(plan), operation.received(plan)
    greet(plan.world, sent, received, Purpose(plan.stream, what, key))


def _refuse(plan: WindowPlan, error: Exception) -> NoReturn:
    """Raise an error on all ranks, including those that have begun the call and wait."""
    agreed, by_all = plan.world.refuse(error)
    if not by_all:
        _break(plan, agreed)
    raise agreed from None


def _break(plan: WindowPlan, error: Exception) -> None:
    plan.kept.broken = plan.kept.broken or str(error) or type(error).__name__
    plan.kept.freed = True
    plan.last.clear()


def _give_up(plan: WindowPlan, operation: Transfer, error: Exception) -> NoReturn:
    _break(plan, error)
    if isinstance(error, RankFailure) or error is plan.world.refusal:
        raise error
    give_up(plan.world, error, f"{operation.name} of plan {plan.name!r}")


def check(plan: WindowPlan, operation: Transfer, x: Array, out: Array | None) -> Call:
    """Return the call with these arrays; raise TypeError or ValueError if they do not fit."""
    adds = operation is ACCUMULATE
    what = f"{operation.name}: {'y' if adds else 'x'}"
    backend = array_backend(what, x)
    backend.check(what, x)
    expected, result = (plan.shape, plan.owned.shape) if adds else (plan.owned.shape, plan.shape)
    ndim, dtype = len(expected), backend.dtype(x)
    if tuple(x.shape[:ndim]) != expected:
        place = f"cells around {plan.owned}" if plan.halo_only else f"window {plan.window}"
        place = place if adds else f"owned box {plan.owned}"
        allowed = f"must begin with {expected}, the shape of the {place} of rank {plan.rank}"
        raise wrong_shape(what, x, allowed)
    if adds and dtype == "bool":
        raise wrong_dtype(what, "bool", "truth values cannot be summed")
    if plan.packed is not None and dtype != "float32":
        raise wrong_dtype(what, dtype, f"wire {plan.wire} takes float32")
    shape = result + tuple(x.shape[ndim:])
    if out is None:
        if adds and plan.halo_only:
            allowed = "is of halos only: received sums are added to the content of out"
            allowed = f"plan {plan.name!r} {allowed}"
            raise ArgumentTypeError.of("accumulate: out", None, allowed, " is None")
        out = backend.empty(x, shape)
    else:
        _check_out(f"{operation.name}: out", backend, x, out, shape)
    plain_x, plain_out = backend.plain(x), backend.plain(out)
    if plain_x is not None and plain_out is not None:
        return Call(backend, x, out, (plain_x, plain_out))
    return Call(backend, x, out, None, _on_gpu(what, backend, x, out, adds))


def _on_gpu(
    what: str, backend: ArrayBackend, x: Array, out: Array, adds: bool
) -> tuple[Addresses, Addresses]:
    """Return the places of arrays on a GPU. Raises TypeError or ValueError if no kernel takes them.

    Numbers to be added must be aligned to their size; copied elements need no alignment.
    """
    dtype, devices = backend.dtype(x), (backend.device(x), backend.device(out))
    if dtype != "bool" and dtype not in SUMS:
        raise wrong_dtype(what, dtype, f"on a GPU known are bool, {', '.join(SUMS)}")
    if devices[0] != devices[1]:
        raise ValueError(f"{what} is on GPU {devices[0]}, out on GPU {devices[1]}")
    places = backend.addresses(x), backend.addresses(out)
    for name, each in zip((what, "accumulate: out"), places, strict=True):
        if adds and gcd(each.ctypes.data, *each.strides) % SUMS[dtype][1] and each.size:
            place = each.ctypes.data, each.strides
            state = f" begins at {place[0]} and has strides {place[1]}"
            allowed = f"sums of {dtype} need multiples of {SUMS[dtype][1]} bytes"
            raise ArgumentError.of(name, place, allowed, state)
    return places[0], places[1]


def _check_out(
    what: str, backend: ArrayBackend, x: Array, out: Array, shape: tuple[int, ...]
) -> None:
    """Raise TypeError or ValueError unless out has x's backend and dtype, and this shape."""
    if array_backend(what, out) is not backend or out.dtype != x.dtype:
        kind = f"{type_name(out)} of {getattr(out, 'dtype', '?')}"
        allowed = f"must be {type_name(x)} of {x.dtype}, like the input"
        raise ArgumentTypeError.of(what, kind, allowed, f" is {kind}")
    backend.check(what, out)
    if tuple(out.shape) != shape:
        raise wrong_shape(what, out, f"must be {shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ArgumentError.of(what, False, "must be writeable", " is read-only")
    strides = out.stride() if hasattr(out, "stride") else out.strides
    # Empty arrays have strides of 0, and no cells to share.
    if prod(shape) and any(n > 1 and step == 0 for n, step in zip(shape, strides, strict=True)):
        state = f" has strides {tuple(strides)}"
        raise ArgumentError.of(what, tuple(strides), "its cells share memory", state)


def _channel(plan: WindowPlan, operation: Transfer, call: Call, number: int) -> PlanChannel:
    """Return the channel for arrays like these, made on the first call; number the call."""
    if not isinstance(number, int):
        raise ArgumentTypeError(operation.name, "number", number, "must be an integer")
    trail = tuple(call.x.shape[len(plan.shape if operation is ACCUMULATE else plan.owned.shape) :])
    direct = isinstance(call.carrier, Direct)
    key = operation.name, call.backend.dtype(call.x), trail, direct
    if key not in plan.channels:
        _check_values(plan, operation, call)
        plan.channels[key] = PlanChannel(
            plan.world, plan.pieces, plan.stream, plan.name, str(plan.wire), operation,
            call.backend, call.x, trail, plan.packed, direct,
        )  # fmt: skip
    channel = plan.channels[key]
    call.number = channel.number_prefix | number & MOST_NUMBER
    return channel


def _check_values(plan: WindowPlan, operation: Transfer, call: Call) -> None:
    """Raise TypeError or ValueError, on all ranks, if a dtype does not suit the operation.

    An exchange needs a dtype that can hold the fill values, an accumulation one that can be added.
    """
    dtype = call.backend.dtype(call.x)
    if operation is ACCUMULATE:
        plain = call.x.dtype if isinstance(call.x, np.ndarray) else np.dtype(np.float64)
        try:
            adds = np.add.resolve_dtypes((plain, plain, None))[-1] == plain
        except TypeError:
            adds = False
        if not adds:
            raise wrong_dtype("accumulate: y", dtype, "cannot be summed in its own dtype")
        return
    for value in filter(None, map(fill_value, plan.windows.modes)):
        try:
            call.backend.element(call.x, value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"exchange: plan {plan.name!r} fills with {value}, x is of {dtype}: {error}"
            ) from None


class WindowPlan(RankPieces):
    """The plan that fills each rank's window (any box) from the boxes that ranks own. Collective.

    world: a World, or an mpi4py intra-communicator; without virtual ranks
    layout: the box that each rank owns, the same on all ranks
    window: this rank's input window: any box; may reach beyond neighbours and the domain, or be
        empty
    boundary: the cells beyond the domain: a mode for all axes, or one for each: "zero",
        Constant(value), "wrap", "reflect", "symmetric", "edge", with the meaning of numpy.pad;
        in corners, the mode of the last axis applies
    wire: "raw", or a format's name: float32 cells that travel are rounded to it, tile by tile
    halo_only: leave the owned cells out: instead of the window, arrays hold only the cells next to
        the owned box along one axis, those of each box of parts one after the other. accumulate
        then adds to the content of out
    name: of the plan in messages
    An exchange is the linear map E with E[cell of the window, cell that it shows] = 1, plus a
    constant; accumulate is its transpose. Arrays have the shape of the box, followed by any
    further axes, which are never split. A rank without messages makes no MPI call.
    All ranks begin a plan's operations in the same order, with the same dtypes and further axes.
    A plan keeps requests and memory until it is freed, at the latest with its world. Those of a
    dropped plan are freed when a later plan is made, once the other ranks have read all messages.
    Raises TypeError or ValueError on all ranks.
    """

    def __init__(
        self,
        world: Any,
        layout: Layout,
        window: Box,
        boundary: Boundary = "zero",
        *,
        wire: str | Format = "raw",
        halo_only: bool = False,
        name: str = "windows",
    ) -> None:
        self.world, self.wire, self.name = as_world(world, "WindowPlan"), wire, name
        agreed = _agree(self.world, layout, window, boundary, wire, halo_only, name)
        boxes, modes, self.packed = agreed
        super().__init__(Windows(layout, boxes, modes, halo_only), self.world.rank)
        self.pieces = self.bare()  # for channels, which outlive a dropped plan
        self.stream, self.kept = self.world.open_stream(), Kept(self.world, name)
        self.channels, self.last = self.kept.channels, self.kept.last
        self.world.shared()  # collective on the first call
        self.world.cache.free_dropped()
        if self.sends or self.recvs:
            self.world.cache.hold(self.kept)
            finalize(self, drop, ref(self.kept)).atexit = False

    @property
    def freed(self) -> bool:
        """Whether calls raise an error, after free or a failure."""
        return self.kept.freed

    def exchange(self, x: Array, out: Array = None, *, number: int = 0) -> Array:
        """Return the array on the window, from the array on the owned box. Collective.

        x: owned.shape + any further axes, the same on all ranks; not changed; any dtype; an array
            of NumPy or CuPy, or a torch tensor
        out: window.shape + the further axes, of x's kind and dtype, overwritten; None for a new
            one. x may be the part of out that this rank owns (inside); otherwise they must not
            overlap
        number: of this call, 0..2**32 - 1, if calls could get out of order: if ranks send
            different numbers, the job ends and both are named
        Raises TypeError or ValueError on all ranks if x or out does not fit on one: ranks that
        are waiting for its messages, in any call of its world, raise the error too.
        """
        return run(self, EXCHANGE, x, out, number)

    def accumulate(self, y: Array, out: Array = None, *, number: int = 0) -> Array:
        """Return, for each owned cell, the sum of all window cells that show it. Collective.

        The transpose of exchange. A sum begins with the cell in this rank's window, then adds
        other cells of that window that show it, then those of the other ranks in order; each
        addition is rounded to the dtype. So the same call always gives the same bits.
        y: window.shape + any further axes, not changed; not bool
        out: owned.shape + the further axes, overwritten; may be the owned part of y (inside)
        number and errors: see exchange
        """
        return run(self, ACCUMULATE, y, out, number)

    def begin(self, x: Array, out: Array = None, *, number: int = 0) -> Handle:
        """Start an exchange; the handle's finish returns its result. Collective.

        Raises RuntimeError if two of this plan, dtype and further axes are already in progress.
        """
        return begin(self, EXCHANGE, x, out, number)

    def begin_accumulate(self, y: Array, out: Array = None, *, number: int = 0) -> Handle:
        """Start an accumulation; see begin. Collective."""
        return begin(self, ACCUMULATE, y, out, number)

    def describe(self, dtype: str = "float32", trail: Sequence[int] = ()) -> Description:
        """Return the costs of an exchange of such cells for every rank, as a table.

        dtype: a NumPy dtype's name; trail: the further axes. Not collective.
        """
        return describe(self.windows, dtype, trail, self.packed, self.name)

    def verify(self) -> Verification:
        """Check exchange and accumulate on these ranks with integers, exactly. Collective.

        Returns the figures. Raises ArithmeticError on all ranks if a check fails, and
        ValueError if the wire rounds or the plan is of halos only.
        """
        if self.halo_only:
            raise ValueError(
                f"verify: plan {self.name!r} is of halos only: verify one with halo_only=False"
            )
        if self.packed is not None:
            raise ValueError(
                f"verify: plan {self.name!r} rounds messages to {self.wire}: verify one with "
                'wire="raw"'
            )
        figures = verify(self, self.world, self.exchange, self.accumulate)
        if not figures.passed:
            raise ArithmeticError(f"verify: plan {self.name!r}: {figures}")
        return figures

    def free(self) -> None:
        """Free requests and memory once the other ranks have read all messages.

        Every rank that used the plan must call it, or continue to use the plan.
        Raises RuntimeError if a call is in progress, as other ranks wait for it.
        """
        self.kept.free()

    def __enter__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same plan: copies of a network take turns to exchange through it."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.free()


def _agree(
    world: Ranks,
    layout: Layout,
    window: Box,
    boundary: Boundary,
    wire: str | Format,
    halo_only: bool,
    name: str,
) -> tuple[list[Box], tuple[Any, ...], Packed | None]:
    """Return all ranks' windows, modes and wire; raise one rank's error on all. Collective."""

    def mine() -> tuple[Box, tuple[Any, ...], Packed | None, dict[str, str]]:
        box, modes, packed = _checked(world, layout, window, boundary, wire)
        compared = {"name": name, "wire": wire, "halo_only": halo_only, "boundary": modes,
                    "domain": layout.shape}  # fmt: skip
        texts = {key: repr(value) for key, value in compared.items()}  # text: NaN != NaN
        return box, modes, packed, texts | {"layout": f"one of digest {layout.digest[:12]}"}

    entries = world.gather_from(mine, "WindowPlan")
    first = entries[0][-1]
    for rank, (*_, theirs) in enumerate(entries):
        for key in (key for key in first if theirs[key] != first[key]):
            raise ValueError(
                f"WindowPlan: arguments differ: {key}={first[key]} on rank 0, "
                f"{key}={theirs[key]} on rank {rank}"
            )
    return [box for box, *_ in entries], *entries[world.rank][1:3]


def _checked(
    world: Ranks, layout: Layout, window: Box, boundary: Boundary, wire: str | Format
) -> tuple[Box, tuple[Any, ...], Packed | None]:
    """Return this rank's window, modes and wire, checked."""
    if world.virtual_ranks != 1:
        raise ValueError("WindowPlan: world has virtual ranks: needs one rank per process")
    check_layout("WindowPlan", "layout", layout, world.size)
    box = as_box("WindowPlan", "window", window, len(layout.shape))
    modes = parse_boundary(boundary, len(layout.shape))
    return box, modes, packed_wire(wire)
