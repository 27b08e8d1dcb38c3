"""Compressors side by side on recorded gradients, averaged again without training.

Bytes are those of all messages; the bytes of MPI's own collectives, by which ranks agree, are
counted separately, for each process. Times are those of one process, with a barrier before each
collective. If mpirun has started fewer processes than ranks, a process simulates several ranks:
they select and encode one after another, and messages stay in memory. Phases are shares of a
profile of processor time, by the names of functions: travel includes the engine and the waits,
decode the additions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from ... import store
from ...collectives import sparse
from ...collectives.allreduce import Allreduce
from ...collectives.checks import NonFiniteGradient
from ...collectives.sparse import allgather, broadcast, neighbours
from ...compress import COMPRESSORS
from ...compress.base import Aggregator, Array, Context, Mean
from ...compress.bucket import Bucket, State
from ...compress.momentum import SettingsOf, recommended
from ...config import ConfigError, UserError, validate
from ...ops import to_host
from ...store import Variable
from ...world.mpi import World
from ...world.ranks import Loopback, Ranks
from ..kinds import flags, printing
from ..kinds.timing import on_device, whole
from ..provenance import attributes
from ..report.figures import Axis, Chart, Panel, Series, image, spread, styles
from ..settings import options
from ..train.gradients import Gradients, load_all
from . import crossover
from .throughput import LATE

Result = TypeVar("Result")
SETTLED = 2  # iterations after which all set-up is done
COLLECTIVES = (allgather, broadcast, neighbours, sparse.sum, Allreduce.run)
REST = "rest"
PHASES = ("select", "encode", "travel", "decode", REST)
PACKAGE = Path(__file__).parents[2]
TRAVELS = tuple(str(PACKAGE / folder) for folder in ("collectives", "world"))
CODES = tuple(str(PACKAGE / folder) for folder in ("compress", "ops"))
BEGINNINGS = {  # phase: how names of its functions in CODES begin; their calls belong to it too
    "select": ("select", "kth", "chosen", "largest", "leaders", "positions"),
    "encode": ("encode", "pack", "codes"),
    "decode": ("decode", "unpack", "scatter"),
}


@dataclass(frozen=True)
class Replayed:
    """The figures of a method over some iterations.

    sent_bytes: float64[ranks], messages of an iteration, the mean over iterations
    shares: of the processor time, by phase
    The others: see OF_POINT. Times are medians of the slowest process, error and cosine medians
    over iterations; sum_error shows values that never arrive
    """

    sent_bytes: Array
    collective_bytes: float
    time_s: float
    travel_s: float
    local_s: float
    shares: dict[str, float]
    error: float
    cosine: float
    sum_error: float
    nonzero_share: float
    sent_share: float


def replay(
    world: Ranks, method: Aggregator, recorded: Sequence[Gradients], device: str = "cpu"
) -> Replayed:
    """Return the figures of a method for the gradients of the first world.ranks ranks. Collective.

    Nothing is kept from training: the memory is empty at first, and the epoch is late, so that no
    method warms up. The first gradients are averaged before with another memory, so that figures
    are without set-up. The last ones are averaged again with the profile. Raises the method's
    errors.
    device: of the gradients; times end when the GPU is done, processor times are the host's
    """
    names = tuple(recorded[0].layers)
    shapes = tuple(values.shape[1:] for values in recorded[0].layers.values())
    bucket = Bucket(names, shapes, method.align)
    method.check_layers(names)
    rows = [
        [
            on_device(bucket.flatten([v[rank] for v in each.layers.values()]), device)
            for rank in world.hosted
        ]
        for each in recorded
    ]
    exact = [_exact(each, bucket, world.ranks) for each in recorded]
    scale, profile, clock = recorded[0].loss_scale, Profile(), CallClock(world)
    out = rows[0][0].copy()  # for the mean, as the reducer has it

    def averages() -> Iterator[Callable[[], Mean]]:
        state = State(world.hosted, world.ranks)
        for number, hosted in enumerate([*rows, rows[-1]]):
            context = Context(world, state, 0, LATE + number, float(LATE), scale, out)
            yield whole(partial(method.aggregate, hosted, bucket, context), hosted[0])

    for average in islice(averages(), SETTLED):
        average()
    *calls, last = averages()
    with clock.watching():
        taken = [_taken(world, clock, average) for average in calls]
    with profile.running():
        last()
    return _figures(world, taken, profile, exact, [b - a for _, a, b in bucket.segments])


class Average(NamedTuple):
    """A mean, float64[bucket.size], and its cost; share: sent of each layer, None: not known."""

    spent: Spent
    sent_bytes: Array
    collective_bytes: int
    mean: Array
    share: Any


def _taken(world: Ranks, clock: CallClock, average: Callable[[], Mean]) -> Average:
    """Return a mean with its cost on this process. Collective."""
    world.barrier("bench")
    before, before_bytes = world.bytes_sent.copy(), world.collective_bytes
    mean, took = clock.run(average)
    sent = world.bytes_sent - before, world.collective_bytes - before_bytes
    flat = to_host(mean.flat).astype(np.float64)
    return Average(took, *sent, flat, mean.layers.get("sent_share"))


def _figures(
    world: Ranks,
    taken: Sequence[Average],
    profile: Profile,
    exact: Sequence[Array],
    sizes: Sequence[int],
) -> Replayed:
    """Return the figures of all processes; sizes: of layers. Collective."""
    spent, sent, collective, means, shares = zip(*taken, strict=True)
    everyone = world.gather((spent, sent, profile.time_s, collective), "bench")
    took_s = Spent(*np.median(np.max([each[0] for each in everyone], axis=0), axis=0).tolist())
    total_s = {phase: sum(each[2][phase] for each in everyone) for phase in PHASES}
    spent_s = sum(total_s.values())
    pairs = list(zip(means, exact, strict=True))
    return Replayed(
        np.concatenate([np.mean(each[1], axis=0) for each in everyone]),
        float(np.max([np.mean(each[3]) for each in everyone])),
        *took_s,
        {phase: each_s / spent_s for phase, each_s in total_s.items()},
        float(np.median([_error(*pair) for pair in pairs])),
        float(np.median([_cosine(*pair) for pair in pairs])),
        _error(np.sum(means, axis=0), np.sum(exact, axis=0)),
        float(np.mean([np.count_nonzero(mean) / sum(sizes) for mean in means])),
        float(np.mean([np.nan if x is None else np.average(x, weights=sizes) for x in shares])),
    )


def _exact(recorded: Gradients, bucket: Bucket, ranks: int) -> Array:
    """Return the mean of the gradients of the first ranks, float64[bucket.size]."""
    total = np.zeros(bucket.size)
    for rank in range(ranks):
        total += bucket.flatten([values[rank] for values in recorded.layers.values()])
    return total / ranks


def _error(found: Array, exact: Array) -> float:
    return _ratio(np.linalg.norm(found - exact), np.linalg.norm(exact))


def _cosine(found: Array, exact: Array) -> float:
    return _ratio(found @ exact, np.linalg.norm(found) * np.linalg.norm(exact))


def _ratio(a: Any, b: Any) -> float:
    return float(a / b) if b else float("nan")


class Spent(NamedTuple):
    """The time of a call on this process; travel_s, local_s: see Replayed."""

    time_s: float
    travel_s: float
    local_s: float


class CallClock:
    """The time of a call, that of its collectives, and the processor time of the rest.

    Each collective begins after a barrier, whose wait counts for the call alone. Ranks that share
    cores compute one after another, and the first one done would wait in its next collective. The
    time of an all-reduce includes its codes and sums, as they are made while messages travel.
    """

    def __init__(self, world: Ranks) -> None:
        self._world, self._depth = world, 0
        self._travel_s = self._local_s = self._since_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the collectives of calls in the block, by all names that modules have for them."""
        timed = {each: self._timed(each) for each in COLLECTIVES}
        found: list[tuple[Any, str, Any]] = [(Allreduce, "run", Allreduce.run)]
        for module in list(sys.modules.values()):
            names = list(getattr(module, "__dict__", {}).items())
            found += [(module, k, v) for k, v in names if type(v) is FunctionType and v in timed]
        own = {name: getattr(self._world, name) for name in ("max", "gather", "agree")}
        for owner, name, collective in found:
            setattr(owner, name, timed[collective])
        vars(self._world).update({name: self._timed(method) for name, method in own.items()})
        try:
            yield
        finally:
            for owner, name, collective in found:
                setattr(owner, name, collective)
            for name in own:
                del vars(self._world)[name]

    def run(self, call: Callable[[], Result]) -> tuple[Result, Spent]:
        """Return the result of a call, and its times. All processes call the same collectives."""
        self._depth, self._travel_s, self._local_s = 0, 0.0, 0.0
        start_s, self._since_s = time.perf_counter(), time.thread_time()
        result = call()
        local_s = self._local_s + time.thread_time() - self._since_s
        return result, Spent(time.perf_counter() - start_s, self._travel_s, local_s)

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return collective(*args, **kwargs)
            self._local_s += time.thread_time() - self._since_s
            self._world.barrier("bench")
            self._depth, start_s = 1, time.perf_counter()
            try:
                return collective(*args, **kwargs)
            finally:
                self._travel_s += time.perf_counter() - start_s
                self._depth, self._since_s = 0, time.thread_time()

        return run


class Profile:
    """The processor time of each phase in this thread, by the functions that run.

    The phase of a function follows from its name, see BEGINNINGS, or is "travel" in the folders of
    TRAVELS; otherwise it is that of its caller. The profile makes calls of Python functions slower.
    """

    def __init__(self) -> None:
        self.time_s = dict.fromkeys(PHASES, 0.0)
        self._known: dict[CodeType, str | None] = {}
        self._stack: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile the block."""
        self._stack, self._since_s = [REST], time.thread_time()
        sys.setprofile(self._follow)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._lap()

    def _lap(self) -> None:
        now_s = time.thread_time()
        self.time_s[self._stack[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self._known:
                self._known[code] = phase_of(code.co_filename, code.co_name)
            self._lap()
            self._stack.append(self._known[code] or self._stack[-1])
        elif event == "return" and len(self._stack) > 1:
            self._lap()
            self._stack.pop()


def phase_of(file: str, name: str) -> str | None:
    """Return the phase of a function; None for that of its caller."""
    if file.startswith(TRAVELS):
        return "travel"
    if not file.startswith(CODES):
        return None
    bare = name.lstrip("_")
    return next((phase for phase, begins in BEGINNINGS.items() if bare.startswith(begins)), None)


TRAINED, RECORDED, SAMPLES = 20, 4, 8  # steps before, steps that are recorded, samples of a rank


def of_digits(ranks: int) -> list[Gradients]:
    """Return gradients of a small LeNet for scikit-learn's digits, after some steps.

    Those of the first r ranks are those of a run on r ranks, but for the steps before.
    """
    from ..train.checkpoint import Files
    from ..train.job import Job
    from ..train.samples import epoch_order
    from ..train.setup import prepare

    train = {"batch": SAMPLES * ranks, "threads": 1, "learning_rate": 0.05}
    raw = {"name": "digits", "model": {"name": "lenet"}, "train": train}
    job = validate(Job, raw, "bench compress")
    training = prepare(job, Loopback(ranks), job.data.load(), Files(Path(), Path()))
    found, batch = [], job.train.batch
    for number in range(TRAINED + RECORDED):
        order = epoch_order(training.samples, job.seed, number)
        training.train_on(np.resize(order, batch), 0)
        if number >= TRAINED:
            bucket, flats = training.reducer.bucket, training.reducer.flats
            rows = zip(*(bucket.views(flat) for flat in flats), strict=True)
            layers = {name: np.stack(row) for name, row in zip(bucket.names, rows, strict=True)}
            found.append(Gradients(number, ranks, layers, "digits, LeNet"))
    return found


MOST_RANKS = 64
SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add(
        "--gradients FILE.h5",
        "files of precision record or train.record_gradients, of one run "
        "(default: of digits, recorded now)",
        Path,
        nargs="+",
    )
    add(
        "--values N",
        "use N normal random numbers per rank instead of gradients, as many as large models have",
        flags.at_least(1),
    )
    add(
        "--methods NAME[:OPTION=VALUE,...]",
        "compressors, separated by spaces or commas, for example lowbit:wire=e3m0 (default: all)",
        list(COMPRESSORS),
        nargs="+",
    )
    add(
        "--settings",
        "recommended: options of methods are those of train.settings (default: given)",
        "given",
        choices=get_args(SettingsOf),
    )
    flags.add_device(parser)
    ranks = "numbers of ranks (default: 2,4,... up to those recorded)"
    add("--ranks N,...", ranks, flags.counts)
    add(
        "--out DIR",
        "write compress.h5 and compress.png there; links.png if each process is one rank",
        Path,
    )


class MethodPoint(NamedTuple):
    """A method on so many ranks."""

    method: str
    ranks: int
    done: Replayed

    @property
    def most_bytes(self) -> float:
        """Bytes of the rank that sends most."""
        return float(self.done.sent_bytes.max())


def run(arguments: argparse.Namespace, world: World) -> None:
    """Average the gradients by each method on each number of ranks; print, write, draw."""
    of_gpus, recommends = flags.take_device(arguments, world), arguments.settings == "recommended"
    names = flags.methods(arguments.methods)
    methods = world.agreed(lambda: {text: method_of(text, arguments.settings) for text in names})
    recorded, ranks = world.agreed(lambda: _inputs(arguments, world.processes))
    world.agreed(lambda: _check_out(arguments.out))
    worlds = [
        World(virtual_ranks=count // world.processes, timeout_s=arguments.timeout or 600.0)
        for count in ranks
    ]
    points, left_out = _measured(methods, recorded, worlds, arguments.device)
    first, costs = recorded[0], costs_of(points, world.processes)
    size = sum(values[0].size for values in first.layers.values())
    machine = printing.machine_line(world)
    lines = [
        *(f"# {text}" for text in (machine, of_gpus) if text),
        f"# gradients: {first.source}, {size:,} values in {len(first.layers)} layers, "
        f"{len(recorded)} iterations from {first.iteration}",
        *[*table_of(points, size, world.processes), *growth(points), *left_out],
        *(crossover.lines(costs, size, crossover.copy_s(world, size)) if costs else []),
    ]
    for text, method in methods.items():
        if recommends and method.holds_back:
            lines.append(
                f"# {text}: holds values back: train with momentum up to "
                f"{method.most_momentum:g}, see docs/reference/compression.md"
            )
    printing.say(world, lines)
    if arguments.out is not None:
        notes = {"device": arguments.device, "settings": arguments.settings, **attributes(world)}
        world.on_first(lambda: _write(arguments.out, points, recorded, notes))
    for each in worlds:
        each.free()


def method_of(text: str, settings: SettingsOf = "given") -> Aggregator:
    """Return the method of "NAME" or "NAME:OPTION=VALUE,...". Raises UserError.

    settings: see compress.momentum.recommended
    """
    method = flags.row_of("--methods", text, COMPRESSORS)
    return recommended(method) if settings == "recommended" else method


def _inputs(arguments: argparse.Namespace, processes: int) -> tuple[list[Gradients], list[int]]:
    """Return the gradients of as many ranks as needed, and the numbers of ranks."""
    ranks = arguments.ranks or []
    for count in ranks:
        if count % processes:
            raise UserError(f"--ranks {count}: must be a multiple of the {processes} processes")
    if arguments.values is not None:
        if arguments.gradients is not None:
            raise UserError(f"--values {arguments.values}: must be without --gradients")
        most = max(ranks, default=processes)
        recorded = list(crossover.normal(arguments.values, most))
    elif arguments.gradients is None:
        most = max(ranks, default=max(MOST_RANKS // processes, 1) * processes)
        recorded = of_digits(most)
    else:
        found = [(path, each) for path in arguments.gradients for each in load_all(path)]
        recorded = [each for _, each in found]
        most = recorded[0].ranks
        for path, each in found:
            if _form(each) != _form(recorded[0]):
                raise UserError(
                    f"--gradients {path}: is of other layers, ranks or loss scale than the first"
                )
        recorded.sort(key=lambda each: each.iteration)
    if max(ranks, default=0) > most:
        raise UserError(f"--ranks {max(ranks)}: the gradients are those of {most} ranks")
    several = [processes << i for i in range(most.bit_length()) if 1 < processes << i <= most]
    return recorded, ranks or several or [most]


def _form(each: Gradients) -> tuple[float, list[tuple[str, tuple[int, ...]]]]:
    return each.loss_scale, [(name, values.shape) for name, values in each.layers.items()]


def _check_out(directory: Path | None) -> None:
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {directory}: cannot be made: {error.strerror}") from None


def _measured(
    methods: dict[str, Aggregator],
    recorded: Sequence[Gradients],
    worlds: Sequence[Ranks],
    device: str,
) -> tuple[list[MethodPoint], list[str]]:
    """Return all points, and the reasons why others are left out. Collective."""
    points, left_out = [], []
    for text, method in methods.items():
        for world in worlds:
            try:
                points.append(
                    MethodPoint(text, world.ranks, replay(world, method, recorded, device))
                )
            except (ValueError, NonFiniteGradient) as error:  # on all processes
                plural = "s" * (world.ranks > 1)
                left_out.append(f"# {text} on {world.ranks} rank{plural}: left out: {error}")
    if not points:
        raise ConfigError(f"bench compress: no method could be run: {left_out[0]}")
    return points, left_out


def costs_of(points: Sequence[MethodPoint], processes: int) -> dict[str, crossover.ExchangeCost]:
    """Return the cost of an exchange by method, from points with one rank for each process."""
    own = [p for p in points if p.ranks == processes]
    return {p.method: crossover.ExchangeCost(p.done.local_s, p.most_bytes) for p in own}


COLUMNS = {  # heading -> width and digits
    **{"bytes/rank": "11.0f", "of float32": "10.2%", "to MPI": "8.0f", "error": "9.3g"},
    **{"cosine": "7.4f", "sum error": "9.3g", "sent": "8.2%", "non-zero": "8.2%", "ms": "8.3g"},
    **{"ns/value": "8.3g", "travel ms": "9.3g", "local ms": "8.3g"},
    **{f"{phase} %": "8.0f" for phase in PHASES},
}
SHOWN_RANKS = 8


def table_of(points: Sequence[MethodPoint], values: int, processes: int) -> list[str]:
    """Return the table of methods on 8 ranks, or the next smaller number.

    values: of a gradient; the column "of float32" is relative to its float32 bytes
    """
    some = [p.ranks for p in points if p.ranks <= SHOWN_RANKS]
    ranks = max(some) if some else min(p.ranks for p in points)
    lines = [
        f"# {ranks} ranks, {ranks // processes} a process; bytes sent by the rank that sends most "
        "in an iteration, and relative to one float32 gradient; to MPI: bytes of a process in "
        "MPI's collectives",
        "# error of the mean, cosine to the exact one, error of the sum of all iterations; sent: "
        "share of its values that a rank sends; non-zero: share of the mean; ns a value and rank",
        "# ms: an iteration, after two that are not timed, with a barrier before each collective; "
        "of it travel: in collectives, each from its barrier on; local: processor time of all else",
    ]
    rows = [
        [
            *(p.method, p.most_bytes, p.most_bytes / (4 * values), p.done.collective_bytes),
            *(p.done.error, p.done.cosine, p.done.sum_error, p.done.sent_share),
            *(p.done.nonzero_share, 1e3 * p.done.time_s),
            1e9 * p.done.time_s / (values * ranks / processes),
            *(1e3 * p.done.travel_s, 1e3 * p.done.local_s),
            *(100 * p.done.shares[phase] for phase in PHASES),
        ]
        for p in points
        if p.ranks == ranks
    ]
    return lines + printing.table(_forms(points) | COLUMNS, rows)


def _forms(points: Sequence[MethodPoint]) -> dict[str, str]:
    return {"method": f"<{max(len(p.method) for p in points)}"}


def growth(points: Sequence[MethodPoint]) -> list[str]:
    """Return the bytes that a rank sends, and the share of the mean, by the number of ranks."""
    ranks = sorted({p.ranks for p in points})
    found = {(p.method, p.ranks): p for p in points}
    lines = ["# bytes sent by the rank that sends most, and share of the mean that is not zero"]

    def cell(p: MethodPoint | None) -> str:
        return "-" if p is None else f"{p.most_bytes:>9.0f} {p.done.nonzero_share:>7.1%}"

    methods = dict.fromkeys(p.method for p in points)
    rows = [(method, *(cell(found.get((method, n))) for n in ranks)) for method in methods]
    return lines + printing.table(_forms(points) | {f"{n} ranks": "17" for n in ranks}, rows)


def _write(
    directory: Path,
    points: Sequence[MethodPoint],
    recorded: Sequence[Gradients],
    notes: store.Attributes,
) -> None:
    """Write the file and the picture."""
    of_file = {
        "schema": SCHEMA,
        "benchmark": "compress",
        "gradients": recorded[0].source,
        "iterations": len(recorded),
        **notes,
    }
    store.write(directory / "compress.h5", {"points": variables(points)}, of_file)
    store.put(directory / "compress.png", image(chart(points), "png"))
    written = ["compress.h5", "compress.png"]
    processes = int(notes["processes"])
    if costs := costs_of(points, processes):
        links = image(crossover.chart(costs, processes), "png")
        store.put(directory / "links.png", links)
        written.append("links.png")
    print("wrote " + ", ".join(str(directory / name) for name in written))


OF_POINT = {  # array of a point: long name, units
    "collective_bytes": ("data of a process in MPI's own collectives in an iteration", "byte"),
    "time_s": ("time of an iteration, with a barrier before each collective, slowest process", "s"),
    "travel_s": ("part of time_s in collectives, each from its barrier on, slowest process", "s"),
    "local_s": ("processor time in time_s outside of collectives, slowest process", "s"),
    "error": ("relative error of the mean", "1"),
    "cosine": ("cosine between the mean and the exact one", "1"),
    "sum_error": ("relative error of the sum of the means of all iterations", "1"),
    "nonzero_share": ("share of the mean's values that are not zero", "1"),
    "sent_share": ("share of its values that a rank sends; NaN: the method reports none", "1"),
}


def variables(points: Sequence[MethodPoint]) -> dict[str, Variable]:
    """Return the points as labelled arrays; bytes of ranks that a point lacks are NaN."""
    done, by = [p.done for p in points], ("point",)
    sent = np.full((len(points), max(p.ranks for p in points)), np.nan)
    for row, each in zip(sent, done, strict=True):
        row[: each.sent_bytes.size] = each.sent_bytes
    shares = np.array([[d.shares[phase] for phase in PHASES] for d in done])
    return {
        "point": Variable(by, np.arange(len(points)), "a method on a number of ranks"),
        "rank": Variable(("rank",), np.arange(sent.shape[1]), "rank"),
        "phase": Variable(("phase",), np.array(PHASES), "phase of an iteration"),
        "method": Variable(by, np.array([p.method for p in points]), "compressor and options"),
        "ranks": Variable(by, np.array([p.ranks for p in points]), "number of ranks"),
        "sent_bytes": Variable(
            (*by, "rank"), sent, "messages that a rank sends in an iteration", "byte"
        ),
        "phase_share": Variable(
            (*by, "phase"), shares, "share of the processor time, by a profile"
        ),
    } | {
        name: Variable(by, np.array([getattr(d, name) for d in done]), *text)
        for name, text in OF_POINT.items()
    }


def chart(points: Sequence[MethodPoint]) -> Chart:
    """Return cosines against bytes on the most ranks; bytes, and shares of the mean, by ranks."""
    looks, ranks = styles(p.method for p in points), sorted({p.ranks for p in points})
    last = [p for p in points if p.ranks == ranks[-1]]
    cosines = [
        Series(p.method, looks[p.method], [p.most_bytes], [p.done.cosine], join="none")
        for p in last
    ]
    by_bytes = spread("bytes that a rank sends", [p.most_bytes for p in last])
    of_cosines = Axis("cosine to the exact mean", limits=(None, 1.03))
    panels = [Panel(f"cosine, {ranks[-1]} ranks", by_bytes, of_cosines, cosines)]
    figures: dict[str, tuple[str, Callable[[MethodPoint], float]]] = {
        "bytes by ranks": ("bytes that a rank sends", lambda p: p.most_bytes),
        "non-zero values by ranks": (
            "share of the mean that is not zero",
            lambda p: p.done.nonzero_share,
        ),
    }
    x = Axis("ranks", "log2", ticks=ranks)
    for title, (label, value) in figures.items() if len(ranks) > 1 else ():
        series = []
        for method, look in looks.items():
            mine = [p for p in points if p.method == method]
            y = [value(p) for p in mine]
            series.append(Series(method, look, [p.ranks for p in mine], y))
        panels.append(Panel(title, x, spread(label, [v for s in series for v in s.y]), series))
    note = "Bytes: of the rank that sends most."
    title = "Compressors on recorded gradients"
    return Chart("compress", title, [note], "", panels, shared=False)
