"""Checks of an all-reduce: arguments before the first message, NaN and infinity in its sums."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError
from ..formats import TILE, Format, sum_bits, tiles
from ..methods import MAX_SUM_BITS, SUMMING, check_bool, check_integer
from ..ops import backend_of, misread, on_gpu, to_host, type_name
from ..ops.common import NONFINITE_BITS
from ..randomness import check_key
from ..world.ranks import Ranks
from .blocks import ALLREDUCE
from .method import MPI_ALLREDUCE, Method, Segment, tile_span, wrong_type, wrong_value

Array = npt.NDArray[Any]


def name_of_x(world: Ranks, rank: int) -> str:
    """Return the name of a rank's array in messages that already name the process."""
    return f"x of rank {rank}" if world.virtual_ranks > 1 else "x"


def _not_list(name: str, value: object, of: str, function: str = "allreduce") -> Exception:
    kind = type(value).__name__
    return ArgumentTypeError(function, name, kind, f"must be a list{of}", state=f" is {kind}")


def check_count(world: Ranks, name: str, xs: object) -> None:
    """Raise TypeError or ValueError unless xs is a list with one entry for each hosted rank."""
    if not isinstance(xs, Sequence):
        raise _not_list(name, xs, ", one for each hosted rank")
    if len(xs) != world.virtual_ranks:
        allowed = f"{len(xs)} arrays for {world.virtual_ranks} hosted ranks"
        raise wrong_value(name, len(xs), allowed, state="")


DTYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # name -> text of the error, a test
    "float32": ("must be float32", lambda dtype: bool(dtype == np.float32)),
    "numbers": (
        "must be integers, floats or complex numbers",
        lambda dtype: dtype.kind in "iufc" and dtype.isnative,
    ),
    "floats": (
        "must be floats or complex numbers",
        lambda dtype: dtype.kind in "fc" and dtype.isnative,
    ),
    "any": ("must hold no Python objects", lambda dtype: not dtype.hasobject),
}


def check_array(name: str, x: Any, takes_dtypes: str = "float32") -> None:
    """Raise TypeError or ValueError unless x is an array that an all-reduce takes.

    takes_dtypes: of DTYPES
    """
    try:
        backend_of(x)
        advice = misread(x)
    except TypeError:
        advice = "must be a NumPy, CuPy or torch array"
        if type(x).__module__.startswith("torch"):
            advice = "must be a NumPy or CuPy array: only cpdhpc.allreduce takes tensors"
    if advice:
        raise wrong_type(name, type_name(x), advice, state=f" is {type_name(x)}")
    allowed, fits = DTYPES[takes_dtypes]
    if not fits(x.dtype):
        raise wrong_type(name, str(x.dtype), allowed, state=f" has dtype {x.dtype}")
    if not x.flags.c_contiguous:
        state = f" has strides {x.strides}"
        raise wrong_type(name, x.strides, "must be C-contiguous", state=state)
    if on_gpu(x):
        _check_device(name, x.device.id)


def _check_device(name: str, device: int) -> None:
    from ..ops import gpu_runtime

    current = gpu_runtime.current_device()
    if device != current:
        allowed = f"must be on CuPy's current one, {current}"
        raise wrong_value(name, device, allowed, state=f" is on GPU {device}")


def check_place(name: str, x: Array, first: Array) -> None:
    """Raise TypeError unless x is on the GPU if the first array is."""
    here, there = ("GPU" if on_gpu(each) else "CPU" for each in (x, first))
    if here != there:
        raise wrong_type(name, here, f"the first is on the {there}", state=f" is on the {here}")


def check_writable(out: Array) -> None:
    """Raise ValueError if out is a NumPy array that must not be written."""
    if not getattr(out.flags, "writeable", True):
        raise wrong_value("out", False, "must be writeable", state=" is read-only")


def of_tensor(name: str, x: Any) -> Any:
    """Return the memory of a torch tensor as a NumPy array; x itself if it is not a tensor.

    Raises TypeError if a gradient would be lost, or the tensor is of a subclass, sparse or not on
    the CPU.
    """
    torch = sys.modules.get("torch")  # if x is a tensor, torch is loaded
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    is_lost = x.requires_grad and torch.is_grad_enabled()
    try:
        return (x if is_lost else x.detach()).numpy()
    except (RuntimeError, TypeError):
        grad = " that requires a gradient" if is_lost else ""
        kind = "" if type(x) is torch.Tensor else f"{type(x).__name__}, "
        allowed = (
            "must be a torch.Tensor of float32, dense, on the CPU, without gradient: .detach(), or "
            "call within torch.no_grad(); of a DTensor .to_local()"
        )
        state = f" is a tensor of {kind}{x.dtype}, {x.layout}, on {x.device}{grad}"
        raise wrong_type(name, type_name(x), allowed, state=state) from None


def note_written(x: Any) -> Any:
    """Return x; mark its memory as written for autograd, if it is a tensor.

    Then backward refuses to continue with saved values that were overwritten.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x.detach().view(-1)[:0].zero_()  # changes nothing, but torch counts a write
    return x


def check_arrays(
    world: Ranks, xs: Sequence[Array], segments: Sequence[Segment] | None, on_tiles: bool
) -> tuple[Segment, ...]:
    """Return the segments; a single one if none are passed.

    Raises TypeError or ValueError unless xs are valid arrays for this process.
    """
    check_count(world, "xs", xs)
    for rank, x in zip(world.hosted, xs, strict=True):
        check_array(name_of_x(world, rank), x)
        if x.shape != xs[0].shape:
            state = f" has shape {x.shape}, of rank {world.hosted[0]} {xs[0].shape}"
            raise wrong_value(f"x of rank {rank}", x.shape, "must be the same", state=state)
        check_place(f"x of rank {rank}", x, xs[0])
    if not segments:
        return (Segment("x", 0, xs[0].size),)
    try:
        parts = tuple(Segment(*each) for each in segments)
    except TypeError:
        raise wrong_type("segments", segments, "must be Segments") from None
    for part in parts:
        if not (isinstance(part.start, int) and isinstance(part.stop, int)):
            raise wrong_type("segments", part, "start and stop must be integers")
    check_segments(parts, xs[0].size, on_tiles)
    return parts


def check_segments(segments: Sequence[Segment], n: int, on_tiles: bool) -> None:
    """Raise ValueError unless segments lie in order in n values, and on_tiles: cover all tiles.

    A tile belongs to one segment, so each starts on the tile after the last one of the previous.
    """
    end = 0
    for name, start, stop in segments:
        allowed = f"must start at {end} or more"
        if on_tiles:
            allowed = (
                f"must start at {end}, after the tiles of {TILE} that the previous one has begun"
            )
        if not (start == end if on_tiles else start >= end) or not start <= stop <= n:
            state = f" {name!r} is {start}..{stop} of {n} values"
            raise wrong_value("segment", name, allowed, state=state)
        end = min(tiles(stop) * TILE, n) if on_tiles else stop
    if on_tiles and end != n:
        raise wrong_value("segments", end, "must cover all", state=f" end at {end} of {n} values")


def check_out(xs: Sequence[Array], outs: Sequence[Array] | None, count: int) -> None:
    """Raise TypeError or ValueError unless outs, if any, are count arrays like the xs."""
    if outs is None:
        return
    if not isinstance(outs, Sequence):
        raise _not_list("outs", outs, " of arrays")
    if len(outs) != count:
        raise wrong_value("outs", len(outs), f"must be {count}", state=f": {len(outs)} arrays")
    for out in outs:
        check_array("out", out)
        if out.shape != xs[0].shape:
            state = f" has shape {out.shape}"
            raise wrong_value("out", out.shape, f"must be {xs[0].shape}", state=state)
        check_place("out", out, xs[0])
        check_writable(out)


def check_shifts(shifts: object, segments: Sequence[Segment], fmt: Format | None) -> None:
    """Raise TypeError or ValueError unless these are shifts of a format for each segment."""
    if not (isinstance(shifts, tuple | list) and len(shifts) == 2):
        allowed = "must be two lists of integers, of contributions and of sums"
        raise wrong_type("shifts", shifts, allowed)
    if fmt is None:
        raise wrong_value("shifts", shifts, "must be None: wire 'raw' is not scaled")
    for each in shifts:
        if not isinstance(each, Sequence | np.ndarray) or len(each) != len(segments):
            allowed = f"must be two lists of {len(segments)} integers, one per segment"
            raise wrong_value("shifts", shifts, allowed)
        for k in each:
            check_integer("allreduce", "shifts: K", k)
            if not fmt.shift_min <= k <= fmt.shift_max:
                allowed = f"must be from {fmt.shift_min} to {fmt.shift_max}"
                raise wrong_value("shifts", shifts, allowed)


def check_simulated(xs: object) -> None:
    """Raise TypeError or ValueError unless xs is a list that is not empty."""
    if not isinstance(xs, Sequence):
        raise _not_list("xs", xs, ", one for each rank", "simulate")
    if not xs:
        allowed = "must have one array for each rank"
        raise ArgumentError("simulate", "xs", 0, allowed, state=" is empty")


def check_run(every: object, error: object) -> None:
    """Raise TypeError unless these are a bool and an error, or none."""
    check_bool("allreduce", "every", every)
    if not isinstance(error, Exception | None):
        raise wrong_type("error", error, "must be an Exception or None")


def check_world(method: Method, world: Ranks) -> None:
    """Raise ValueError unless a method suits a world: MPI, and the number of ranks."""
    if method.algorithm == MPI_ALLREDUCE and not world.has_mpi:
        allowed = "it is MPI_Allreduce"
        raise wrong_value("algorithm", "mpi", allowed, state="='mpi' has no schedule to simulate")
    bits = sum_bits(method.fmt, world.ranks) if method.fmt and method.exact else 0
    if bits > MAX_SUM_BITS:
        state = f"='exact', wire={method.wire!r}: sums of {world.ranks} ranks take {bits} bits"
        allowed = f"must be {MAX_SUM_BITS} or fewer"
        raise wrong_value("accumulate", "exact", allowed, state=state)


def iteration_error(iteration: object, name: str = "allreduce") -> Exception | None:
    """Return the error of an iteration, or None; name: of the call."""
    try:
        check_key(name, "iteration", iteration)
    except (TypeError, ValueError) as error:
        return error
    return None


NUMBERS = 5  # compared at least, so that the messages of different calls have one length


def check_alike(
    world: Ranks,
    error: Exception | None,
    arguments: Mapping[str, object],
    numbers: Sequence[int],
    what: str,
    text: str = "",
) -> list[int]:
    """Raise error on all processes, or ValueError if calls or arguments differ. Collective.

    arguments: name -> a value that must be the same everywhere, with a distinctive repr
    numbers: int64, the same number of them everywhere
    what: the call, for messages; its first word is the name of the function
    text: describes all arguments, if it is already known
    Returns the maximum of each number over the processes.
    """
    name = what.split()[0].rstrip(":")
    text = f"{name} {text or arguments}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    if world.board is not None:
        own = [int(each) for each in numbers]
        if world.board.agrees(0 if error is not None else digest ^ hash(tuple(own)) >> 8, what):
            if world.account is not None:
                world.account(name, arguments, own)
            return own
    mine = np.zeros(max(NUMBERS, 3 + len(numbers)), np.int64)
    mine[: 3 + len(numbers)] = error is not None, digest, -digest, *numbers
    failed, largest, smallest, *most = world.max(mine, what).tolist()
    if failed:
        world.agree(error, what, of_call=True)
    if largest != -smallest:
        texts = dict(row for each in arguments.items() for row in _rows(*each))
        _raise_difference(world.gather((name, texts), what), world.virtual_ranks)
    if world.account is not None:
        world.account(name, arguments, most[: len(numbers)])
    return most[: len(numbers)]


@contextmanager
def alike_on_all(world: Ranks, what: str) -> Iterator[dict[str, object]]:
    """Run a block without messages on all processes; yield a dict for the arguments to compare.

    Collective at the end of the block. An error of any class that one process raises in it is
    raised on all, as none may wait for that process; ValueError if arguments differ.
    what: see check_alike
    """
    arguments: dict[str, object] = {}
    error: Exception | None = None
    try:
        yield arguments
    except Exception as wrong:
        error = wrong
    check_alike(world, error, arguments, [0], what)


def _rows(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield name and repr of an argument, and those of the options of a dataclass or mapping."""
    yield name, repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        yield f"type of {name}", type(value).__name__
        for each in fields(value):
            if each.repr:
                yield from _rows(f"{name}.{each.name}", getattr(value, each.name))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _rows(f"{name}[{key!r}]", each)


def _raise_difference(calls: Sequence[tuple[str, dict[str, str]]], virtual_ranks: int) -> NoReturn:
    """Raise ValueError that names the first difference; calls: name and arguments by process."""
    name, arguments = calls[0]
    other = next(i for i, call in enumerate(calls) if call != calls[0])
    name_there, there = calls[other]
    rank = other * virtual_ranks
    if name_there != name:
        raise ValueError(f"{name}: calls differ: {name} on rank 0, {name_there} on rank {rank}")
    differing = [k for k in {**arguments, **there} if arguments.get(k) != there.get(k)]
    both = arguments.keys() & there.keys()
    key = next(k for k in differing if k not in both or not _has_part(k, differing))
    values = [each.get(key, "nothing") for each in (arguments, there)]
    same = next((i for i, (a, b) in enumerate(zip(*values, strict=False)) if a != b), 0)
    start = max(0, same - LONGEST // 2) if max(map(len, values)) > LONGEST else 0
    one, two = ("..." * (start > 0) + each[start:][:LONGEST] for each in values)
    raise ValueError(f"{name}: arguments differ: {key}={one} on rank 0, {key}={two} on rank {rank}")


def _has_part(name: str, others: Iterable[str]) -> bool:
    """Whether others name an option of an argument, or its type."""
    return any(each.startswith((f"{name}.", f"{name}[", f"type of {name}")) for each in others)


LONGEST = 120  # characters of a differing value that are shown


SUMS = (ALLREDUCE, *SUMMING)


class NonFiniteGradient(ArithmeticError):
    """NaN or infinity in the input of a sum, or in the sum; raised on all ranks.

    segments: names of the tensors; ranks: that have them, empty if only the sum is not finite
    dtype: of the tensors, if their mean exceeds its range; call: the collective
    """

    def __init__(
        self,
        segments: Iterable[str],
        ranks: Iterable[int],
        dtype: str = "",
        call: str = "allreduce",
    ) -> None:
        self.segments, self.ranks, self.dtype = tuple(segments), tuple(ranks), dtype
        self.call = call
        super().__init__(self.segments, self.ranks, dtype, call)

    def __str__(self) -> str:
        tensors = ", ".join(map(repr, self.segments))
        if self.ranks:
            return f"{self.call}: NaN or infinity in {tensors} on rank {_names(self.ranks)}"
        if self.dtype:
            return f"{self.call}: the mean is beyond {self.dtype} in {tensors}"
        if self.call in SUMS:
            return f"{self.call}: the sum of finite values is not finite in {tensors}"
        return f"{self.call}: finite values are beyond the wire in {tensors}"


def is_finite(x: Array) -> bool:
    """Whether all values of x, float32[n], are finite."""
    return amax_of(x) < NONFINITE_BITS


def _names(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return first if len(ranks) <= 8 else f"{first} and {len(ranks) - 8} more"


def amax_of(x: Array) -> int:
    """Return the float32 bits of max|x| of x, float32[n]."""
    return int(to_host(backend_of(x).amax_tiles(x)).max()) if x.size else 0


def amax_of_segments(x: Array, segments: Sequence[Segment]) -> Array:
    """Return the float32 bits of max|x| of each segment, int64[segments].

    A segment that starts on a tile includes all of its last tile.
    """
    if any(start % TILE for _, start, _ in segments):
        parts = [x[start:stop] for _, start, stop in segments]
        return np.array([amax_of(p) for p in parts], np.int64)
    amax = to_host(backend_of(x).amax_tiles(x))
    spans = [tile_span(segment) for segment in segments]
    return np.array([int(amax[span].max(initial=0)) for span in spans], np.int64)


def raise_nonfinite(
    world: Ranks,
    inputs: Sequence[Array | None],
    segments: Sequence[Segment],
    total: Array | None,
    call: str = ALLREDUCE,
) -> NoReturn:
    """Raise NonFiniteGradient that names tensors and ranks. Collective.

    inputs: of the hosted ranks, None if not read; total: the sum, the same on all ranks, if it is
    known
    """
    own = [
        (i, rank)
        for rank, x in zip(world.hosted, inputs, strict=True)
        if x is not None
        for i in np.flatnonzero(amax_of_segments(x, segments) >= NONFINITE_BITS).tolist()
    ]
    places = [place for process in world.gather(own, "non-finite") for place in process]
    which = {i for i, _ in places}
    if not places and total is not None:
        which = set(np.flatnonzero(amax_of_segments(total, segments) >= NONFINITE_BITS).tolist())
    if not which and len(segments) == 1:
        which = {0}
    names = [segments[i].name for i in sorted(which)]
    raise NonFiniteGradient(names, sorted({rank for _, rank in places}), call=call)


def shared_amax(
    world: Ranks, inputs: Sequence[Array], segments: Sequence[Segment], what: str
) -> list[int]:
    """Return the float32 bits of max|x| of each segment over all ranks. Collective.

    what: the call, for messages; its first word is the name of the function
    Raises NonFiniteGradient.
    """
    own = np.max([amax_of_segments(x, segments) for x in inputs], axis=0)
    amax: list[int] = world.max(own, what).tolist()
    if max(amax, default=0) >= NONFINITE_BITS:
        raise_nonfinite(world, inputs, segments, None, what.split()[0])
    return amax
