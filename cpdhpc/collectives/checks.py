"""Checks of an all-reduce: arguments before the first message, NaN and infinity in its sums."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..formats import TILE, Format, sum_bits, tiles
from ..methods import MAX_SUM_BITS, SUMMING, check_bool, check_integer, said_by
from ..ops import backend_of, misread, on_gpu, to_host, type_name
from ..ops.common import NONFINITE_BITS
from ..randomness import check_key
from ..world.ranks import Ranks
from .blocks import ALLREDUCE
from .method import MPI_ALLREDUCE, Method, Segment, Shifts, aps_shift, integer_shift, tile_span

Array = npt.NDArray[Any]


def name_of_x(world: Ranks, rank: int) -> str:
    """Return the name of a rank's array in messages that already name the process."""
    return f"x of rank {rank}" if world.virtual_ranks > 1 else "x"


def of_prepare(error: Exception) -> Exception:
    """Return an error of an all-reduce worded for prepare, which takes xs and outs."""
    text = re.sub(r"^(allreduce: (x|out))(?= )", r"\1s", str(error))
    return said_by("Allreduce.prepare", error, text)


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
    except TypeError:
        takes = "a NumPy, CuPy or torch array"
        if type(x).__module__.startswith("torch"):
            takes = "a NumPy or CuPy array: only cpdhpc.allreduce takes tensors"
        raise TypeError(f"allreduce: {name} is {type_name(x)}: must be {takes}") from None
    if advice := misread(x):
        raise TypeError(f"allreduce: {name} is {type_name(x)}: {advice}")
    words, fits = DTYPES[takes_dtypes]
    if not fits(x.dtype):
        raise TypeError(f"allreduce: {name} has dtype {x.dtype}: {words}")
    if not x.flags.c_contiguous:
        raise TypeError(f"allreduce: {name} has strides {x.strides}: must be C-contiguous")
    if on_gpu(x):
        _check_device(name, x)


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
        raise TypeError(
            f"allreduce: {name} is a tensor of {kind}{x.dtype}, {x.layout}, on {x.device}{grad}: "
            "must be a torch.Tensor of float32, dense, on the CPU, without gradient: .detach(), or "
            "call within torch.no_grad(); of a DTensor .to_local()"
        ) from None


def note_written(x: Any) -> Any:
    """Return x; mark its memory as written for autograd, if it is a tensor.

    Then backward refuses to continue with saved values that were overwritten.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x.detach().view(-1)[:0].zero_()  # changes nothing, but torch counts a write
    return x


def _check_device(name: str, x: Any) -> None:
    from ..ops import gpu_runtime

    current = gpu_runtime.current_device()
    if x.device.id != current:
        raise ValueError(
            f"allreduce: {name} is on GPU {x.device.id}: must be on CuPy's current one, {current}"
        )


def check_place(name: str, x: Array, other: Array) -> None:
    if on_gpu(x) != on_gpu(other):
        here, there = ("GPU" if on_gpu(each) else "CPU" for each in (x, other))
        raise TypeError(f"allreduce: {name} is on the {here}: the first is on the {there}")


def check_count(world: Ranks, name: str, xs: object) -> None:
    """Raise TypeError or ValueError unless xs is a list with one entry for each hosted rank."""
    if not isinstance(xs, Sequence):
        raise TypeError(
            f"allreduce: {name} is {type(xs).__name__}: must be a list, one for each hosted rank"
        )
    if len(xs) != world.virtual_ranks:
        raise ValueError(
            f"allreduce: {name}: {len(xs)} arrays for {world.virtual_ranks} hosted ranks"
        )


def check_segments(segments: Sequence[Segment], n: int, on_tiles: bool) -> None:
    """Raise ValueError unless segments lie in order in n values, and on_tiles: cover all tiles.

    A tile belongs to one segment, so each starts on the tile after the last one of the previous.
    """
    end = 0
    for name, start, stop in segments:
        expected = f"{end} or more"
        if on_tiles:
            expected = f"{end}, after the tiles of {TILE} that the previous one has begun"
        if not (start == end if on_tiles else start >= end) or not start <= stop <= n:
            raise ValueError(
                f"allreduce: segment {name!r} is {start}..{stop} of {n} values: must start at "
                f"{expected}"
            )
        end = min(tiles(stop) * TILE, n) if on_tiles else stop
    if on_tiles and end != n:
        raise ValueError(f"allreduce: segments end at {end} of {n} values: must cover all")


def check_shifts(shifts: object, segments: Sequence[Segment], fmt: Format | None) -> None:
    """Raise TypeError or ValueError unless these are shifts of a format for each segment."""
    what = f"allreduce: shifts={shifts!r}: must be"
    if not (isinstance(shifts, tuple | list) and len(shifts) == 2):
        raise TypeError(f"{what} two lists of integers, of contributions and of sums")
    if fmt is None:
        raise ValueError(f"{what} None: wire 'raw' is not scaled")
    for each in shifts:
        if not isinstance(each, Sequence | np.ndarray) or len(each) != len(segments):
            raise ValueError(f"{what} two lists of {len(segments)} integers, one per segment")
        for k in each:
            check_integer("allreduce", "shifts: K", k)
            if not fmt.shift_min <= k <= fmt.shift_max:
                raise ValueError(f"{what} from {fmt.shift_min} to {fmt.shift_max}")


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
            raise ValueError(
                f"allreduce: x of rank {rank} has shape {x.shape}, of rank {world.hosted[0]} "
                f"{xs[0].shape}: must be the same"
            )
        if x is not xs[0]:
            check_place(f"x of rank {rank}", x, xs[0])
    if not segments:
        return (Segment("x", 0, xs[0].size),)
    try:
        parts = tuple(Segment(*each) for each in segments)
    except TypeError:
        raise TypeError(f"allreduce: segments={segments!r}: must be Segments") from None
    for part in parts:
        if not (isinstance(part.start, int) and isinstance(part.stop, int)):
            raise TypeError(f"allreduce: {part}: start and stop must be integers")
    check_segments(parts, xs[0].size, on_tiles)
    return parts


def check_simulated(xs: object) -> None:
    """Raise TypeError or ValueError unless xs is a list that is not empty."""
    if not isinstance(xs, Sequence):
        raise TypeError(f"simulate: xs is {type(xs).__name__}: must be a list, one for each rank")
    if not xs:
        raise ValueError("simulate: xs is empty: must have one array for each rank")


def check_run(every: object, error: object) -> None:
    """Raise TypeError unless these are a bool and an error, or none."""
    check_bool("allreduce", "every", every)
    if not isinstance(error, Exception | None):
        raise TypeError(f"allreduce: error={error!r}: must be an Exception or None")


def check_out(xs: Sequence[Array], outs: Sequence[Array] | None, count: int) -> None:
    """Raise TypeError or ValueError unless outs, if any, are count arrays like the xs."""
    if outs is None:
        return
    if not isinstance(outs, Sequence):
        raise TypeError(f"allreduce: outs is {type(outs).__name__}: must be a list of arrays")
    if len(outs) != count:
        raise ValueError(f"allreduce: outs: {len(outs)} arrays: must be {count}")
    for out in outs:
        check_array("out", out)
        if out.shape != xs[0].shape:
            raise ValueError(f"allreduce: out has shape {out.shape}: must be {xs[0].shape}")
        check_place("out", out, xs[0])
        if not getattr(out.flags, "writeable", True):
            raise ValueError("allreduce: out is read-only")


def check_world(method: Method, world: Ranks) -> None:
    """Raise ValueError unless a method suits a world: MPI, and the number of ranks."""
    if method.algorithm == MPI_ALLREDUCE and not world.has_mpi:
        raise ValueError(
            "allreduce: algorithm='mpi' has no schedule to simulate: it is MPI_Allreduce"
        )
    bits = sum_bits(method.fmt, world.ranks) if method.fmt and method.exact else 0
    if bits > MAX_SUM_BITS:
        raise ValueError(
            f"allreduce: accumulate='exact', wire={method.wire!r}: sums of {world.ranks} ranks "
            f"take {bits} bits: must be {MAX_SUM_BITS} or fewer"
        )


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
        given = [int(each) for each in numbers]
        said = 0 if error is not None else digest ^ hash(tuple(given)) >> 8
        if world.board.agrees(said, what):
            if world.account is not None:
                world.account(name, arguments, given)
            return given
    mine = np.zeros(max(NUMBERS, 3 + len(numbers)), np.int64)
    mine[: 3 + len(numbers)] = error is not None, digest, -digest, *numbers
    failed, largest, smallest, *most = world.max(mine, what).tolist()
    if failed:
        world.agree(error, what, of_call=True)
    if largest != -smallest:
        shown = dict(row for each in arguments.items() for row in _rows(*each))
        _raise_difference(world.gather((name, shown), what), world.virtual_ranks)
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
    except Exception as found:
        error = found
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
    rank = other * virtual_ranks
    if calls[other][0] != name:
        raise ValueError(
            f"{name}: calls differ: {name} on rank 0, {calls[other][0]} on rank {rank}"
        )
    there, nothing = calls[other][1], "nothing"
    differing = [k for k in {**arguments, **there} if arguments.get(k) != there.get(k)]
    both = arguments.keys() & there.keys()
    key = next(k for k in differing if k not in both or not _has_part(k, differing))
    one, two = arguments.get(key, nothing), there.get(key, nothing)
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    start = max(0, same - SHOWN // 2) if max(len(one), len(two)) > SHOWN else 0
    cut = ["..." * (start > 0) + each[start:][:SHOWN] for each in (one, two)]
    raise ValueError(
        f"{name}: arguments differ: {key}={cut[0]} on rank 0, {key}={cut[1]} on rank {rank}"
    )


def _has_part(name: str, others: Iterable[str]) -> bool:
    """Whether others name an option of an argument, or its type."""
    return any(each.startswith((f"{name}.", f"{name}[", f"type of {name}")) for each in others)


SHOWN = 120  # characters of a differing value


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
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


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
    return np.array(
        [int(amax[span].max()) if span.start < span.stop else 0 for span in spans], np.int64
    )


def raise_nonfinite(
    world: Ranks, inputs: Sequence[Array], segments: Sequence[Segment], total: Array | None
) -> NoReturn:
    """Raise NonFiniteGradient that names tensors and ranks. Collective.

    inputs: of the hosted ranks; total: the sum, the same on all ranks, if it is known
    """
    found = [
        (i, rank)
        for rank, x in zip(world.hosted, inputs, strict=True)
        for i in np.flatnonzero(amax_of_segments(x, segments) >= NONFINITE_BITS).tolist()
    ]
    places = [place for process in world.gather(found, "non-finite") for place in process]
    which = {i for i, _ in places}
    if not places and total is not None:
        which = set(np.flatnonzero(amax_of_segments(total, segments) >= NONFINITE_BITS).tolist())
    raise NonFiniteGradient(
        [segments[i].name for i in sorted(which)], sorted({rank for _, rank in places})
    )


def shared_amax(
    world: Ranks, inputs: Sequence[Array], segments: Sequence[Segment], what: str
) -> list[int]:
    """Return the float32 bits of max|x| of each segment over all ranks. Collective.

    Raises NonFiniteGradient.
    """
    own = np.max([amax_of_segments(x, segments) for x in inputs], axis=0)
    amax: list[int] = world.max(own, what).tolist()
    if max(amax, default=0) >= NONFINITE_BITS:
        raise_nonfinite(world, inputs, segments, None)
    return amax


def shared_shifts(
    method: Method, world: Ranks, flat: Sequence[Array], parts: Sequence[Segment]
) -> Shifts:
    """Return the shifts of Method.plan, from the data of all ranks. Collective.

    Raises NonFiniteGradient.
    """
    amax = shared_amax(world, flat, parts, f"allreduce {method.algorithm}: exponents")
    return shifts_of(method, amax, world.ranks)


def shifts_of(method: Method, amax: Sequence[int], ranks: int, *, sums: bool = True) -> Shifts:
    """Return the shifts of Method.plan for the float32 bits of max|x| of each segment.

    sums: whether contributions are added
    """
    assert method.fmt is not None, "otherwise none are shared"
    fmt, sent = method.fmt, "none" if method.sums_held else method.headroom
    if method.integers:
        grid = [integer_shift(bits, fmt) for bits in amax]
        return grid, grid
    if method.exact or not sums:  # exact sums become wider: they need no headroom
        grid = [aps_shift(bits, fmt, 1, "none") for bits in amax]
        return grid, grid
    return (
        [aps_shift(bits, fmt, ranks, sent) for bits in amax],
        [aps_shift(bits, fmt, ranks, method.headroom) for bits in amax],
    )
