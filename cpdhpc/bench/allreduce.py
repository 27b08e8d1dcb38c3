"""Benchmark of all-reduces beside MPI_Allreduce, gloo and NCCL, in the columns of nccl-tests.

algbw is size / time; busbw is algbw times 2 (p - 1) / p, which for the least traffic possible is
the rate of a rank's link; wirebw is the bytes that left the rank that sent most / time.
GB/s are 1e9 byte/s.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives.allreduce import Allreduce
from ..collectives.method import AUTO, Machine, parse_scaling, read_machine
from ..collectives.predict import predict
from ..collectives.rank_program import ACCUMULATES
from ..collectives.schedules import SCHEDULES
from ..config import UserError
from ..formats import MICROSCALING, wire_scaling
from ..methods import BASELINE_DEVICES, SCALINGS
from ..ops import on_gpu, to_host
from ..ops.payloads import parse_wire
from ..world.cores import own_cores
from ..world.gpu_messages import carrier_of
from ..world.ranks import Ranks
from .harness import (
    Measured,
    Point,
    Times,
    add_device,
    check_out,
    check_positive,
    check_whole,
    interleave_ranks,
    known,
    machine_line,
    on_device,
    parse_names,
    parse_sizes,
    take_device,
    together,
    whole,
)
from .libraries import group_of, library_of, missing, sum_float32, sum_half

Array = NDArray[np.float32]
LARGEST = 8  # of the integers: their sum is exact in float32 for 2**21 ranks
APART = 97  # places between the windows of two ranks in the common numbers


class Data(NamedTuple):
    """A rank's contribution, float32[n], and the sum of all ranks', float64[n], exact to 2**-53."""

    x: Array
    total: NDArray[np.float64]


def window_data(numbers: Array, n: int, world: Ranks) -> Data:
    """Return the data of this rank: a window of common numbers, at a place of its own."""
    total = np.zeros(n)
    for rank in range(world.ranks):
        total += numbers[rank * APART : rank * APART + n]
    start = world.hosted.start * APART
    return Data(numbers[start : start + n].copy(), total)


def integer_data(n: int, world: Ranks) -> Data:
    """Return small integers: every order of summation gives their exact sum."""
    rng = np.random.default_rng(0)
    size = n + world.ranks * APART
    return window_data(rng.integers(-LARGEST, LARGEST + 1, size).astype(np.float32), n, world)


def normal_data(n: int, world: Ranks) -> Data:
    """Return standard normal values."""
    rng = np.random.default_rng(0)
    return window_data(rng.standard_normal(n + world.ranks * APART, np.float32), n, world)


@dataclass
class TimedCase:
    """A call to time, and what is known of it.

    exact: whether the sum must be exact, and so the data integers
    prepare: done before each call, and not timed
    chosen: the algorithm that ran; wire_bytes: what left the rank that sent most, nan where only
        the library knows; error: of the sum, relative, in the Euclidean norm
    """

    algorithm: str
    wire: str
    scaling: str
    accumulate: str
    data: Data
    out: Array
    run: Callable[[], object]
    exact: bool = True
    prepare: Callable[[], object] = lambda: None
    method: Allreduce | None = None
    chosen: str = ""
    wire_bytes: float = np.nan
    error: float = np.nan

    @property
    def name(self) -> str:
        """The algorithm as shown: with what auto has chosen."""
        return f"{self.algorithm}({self.chosen})" if self.algorithm == AUTO else self.algorithm

    def check(self, world: Ranks) -> None:
        """Run once; set what is known afterwards. Collective.

        Raises ArithmeticError on all processes where ranks differ in a bit, or the sum of integers
        is not exact.
        """
        self.out[...] = np.nan
        sent = world.bytes_sent.copy()
        self.prepare()
        reduced: Any = self.run()
        sent_bytes = world.bytes_sent - sent
        out = to_host(self.out)
        exact = not self.exact or np.array_equal(out, self.data.total)
        digest = hashlib.blake2b(out.tobytes()).hexdigest()
        found = world.gather((exact, digest, int(sent_bytes.max())), "bench: results")
        what = f"bench: {self.algorithm} {self.wire} {self.scaling} {self.accumulate}"
        if len({digest for _, digest, _ in found}) > 1:
            raise ArithmeticError(f"{what}: the ranks' results differ")
        if not all(right for right, _, _ in found):
            raise ArithmeticError(f"{what}: the sum of integers is not exact")
        if self.method is not None:
            self.wire_bytes = max(size for _, _, size in found)
            self.chosen = reduced.algorithm
        norm = float(np.linalg.norm(self.data.total))
        self.error = float(np.linalg.norm(out - self.data.total)) / norm if norm else 0.0


def schedule_case(world: Ranks, method: Allreduce, data: Data, out: Array) -> TimedCase:
    """Return the case of an all-reduce of ours."""
    packed = method.fmt is not None
    is_ours = method.algorithm in SCHEDULES
    return TimedCase(
        algorithm=method.algorithm,
        wire=str(method.wire),
        scaling=(method.scaling or method.parsed_scaling.kind) if packed else "-",
        accumulate=(method.accumulating if is_ours else method.accumulate or "default")
        if packed
        else "float32",
        data=data,
        out=out,
        run=whole(lambda: method.run(world, [data.x], [out]), out),
        exact=not packed,
        method=method,
    )


Baseline = Callable[[Ranks, Data, Data, Array], TimedCase]


def _mpi(world: Ranks, ints: Data, normal: Data, out: Array) -> TimedCase:
    """MPI_Allreduce of float32, called without any of ours around it."""
    run = lambda: carrier_of(world, out).sum_by_mpi(out, ints.x)  # noqa: E731
    return TimedCase("mpi", "raw", "-", "float32", ints, out, run)


def _float32(library: str) -> Baseline:
    """A library of torch.distributed in float32, in place, as DDP does."""

    def case(world: Ranks, ints: Data, normal: Data, out: Array) -> TimedCase:
        run, fill = (
            whole(each, out) for each in (partial(sum_float32, out), partial(_fill, out, ints.x))
        )
        return TimedCase(library, "raw", "-", "float32", ints, out, run, prepare=fill)

    return case


def _fill(out: Array, x: Array) -> None:
    out[:] = x


def _half(library: str, wire: str, dtype: str) -> Baseline:
    """A library of torch.distributed in 16 bits, with the conversions, as DDP's hooks do."""

    def case(world: Ranks, ints: Data, normal: Data, out: Array) -> TimedCase:
        run = whole(lambda: sum_half(normal.x, out, dtype), out)
        return TimedCase(library, wire, "none", "requantise", normal, out, run, exact=False)

    return case


BASELINES: dict[str, Baseline] = {
    "mpi": _mpi,
    "gloo": _float32("gloo"),
    "gloo-bf16": _half("gloo", "bf16", "bfloat16"),
    "nccl": _float32("nccl"),
    "nccl-bf16": _half("nccl", "bf16", "bfloat16"),
    "nccl-fp16": _half("nccl", "fp16", "float16"),
}


def cases_of_size(
    world: Ranks,
    size_bytes: int,
    methods: Sequence[Allreduce],
    baselines: Sequence[str],
    device: str = "cpu",
) -> list[TimedCase]:
    """Return the checked cases of a size, baselines first. Collective."""
    n = size_bytes // 4
    made = integer_data(n, world), normal_data(n, world)
    ints, normal = (Data(on_device(each.x, device), each.total) for each in made)
    out = np.empty_like(ints.x)
    cases = [BASELINES[name](world, ints, normal, out) for name in baselines]
    cases += [
        schedule_case(world, method, normal if method.fmt else ints, out) for method in methods
    ]
    for case in cases:
        case.check(world)
    return cases


GIGA = 1e9


class Row(NamedTuple):
    """A case at a size: times_s float64[repeats, processes], predicted_s or nan."""

    size_bytes: int
    case: TimedCase
    times_s: Times
    predicted_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add_choices(parser)
    add_device(parser)
    parser.add_argument(
        "--baselines", help=f"of {','.join(BASELINES)} (default: those that can run)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed calls (default 9)")
    parser.add_argument("--warmup", type=int, default=2, help="calls before (default 2)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.h5", help="write every sample, for report"
    )
    parser.add_argument(
        "--predict", type=Path, metavar="MACHINE.toml", help="show predictions; used by auto"
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which all-reduces."""
    parser.add_argument(
        "--sizes",
        default="64KiB:16MiB:x16",
        help="bytes of float32: 1MiB,16MiB or first:last:xFACTOR (default 64KiB:16MiB:x16)",
    )
    parser.add_argument(
        "--algorithms",
        default="ring,tree,direct",
        help=f"of {','.join(SCHEDULES)},{AUTO} (default ring,tree,direct)",
    )
    parser.add_argument(
        "--wires", default="raw,e4m3", help="raw, formats, mxfp4 (default raw,e4m3)"
    )
    parser.add_argument(
        "--scalings", default="tile", help=f"of {','.join(SCALINGS)} (default tile)"
    )
    parser.add_argument(
        "--accumulate",
        default="default",
        help=f"of {','.join(ACCUMULATES)},default: the algorithm's own",
    )


def parse_methods(
    arguments: argparse.Namespace, machine: Machine | None
) -> tuple[list[Allreduce], list[str]]:
    """Return the methods that the options name, and what does not go together.

    Raises UserError for unknown names, or where nothing goes together.
    """
    algorithms = parse_names("--algorithms", arguments.algorithms, known((*SCHEDULES, AUTO)))
    wires = parse_names("--wires", arguments.wires, parse_wire)
    scalings = parse_names("--scalings", arguments.scalings, lambda s: parse_scaling(s, None))
    ways = parse_names("--accumulate", arguments.accumulate, known((*ACCUMULATES, "default")))
    methods, skipped = dict[Allreduce, None](), []
    for algorithm, wire, scaling, way in product(algorithms, wires, scalings, ways):
        raw = wire == "raw"  # which neither scaling nor rounding touches
        scaling = wire_scaling(wire) if raw or wire in MICROSCALING else scaling
        options = (scaling, None if raw or way == "default" else way)
        try:
            methods[Allreduce(wire, algorithm, *options, machine=machine)] = None
        except ValueError as error:
            skipped.append(str(error).removeprefix("allreduce: "))
    if not methods:
        raise UserError(f"bench: nothing to do: {'; '.join(skipped) or 'no names are given'}")
    return list(methods), skipped


def parse_baselines(
    world: Ranks, text: str | None, device: str
) -> tuple[list[str], dict[str, str]]:
    """Return the baselines to run, mpi first, and by library why others are left out. Collective.

    Raises UserError where text names one that cannot run.
    """
    asked = None if text is None else parse_names("--baselines", text, known(BASELINES))
    why = {}
    for library, devices in BASELINE_DEVICES.items():
        reason = missing(world, library) if device in devices else f"takes no {device} arrays"
        if reason:
            why[library] = reason
    for name in asked or ():
        if library_of(name) in why:
            raise UserError(f"--baselines {name}: {why[library_of(name)]}")
    wanted = BASELINES if asked is None else {"mpi", *asked}
    found = [name for name in BASELINES if name in wanted and library_of(name) not in why]
    return found, why if asked is None else {}


def run(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time every case at every size, and print a table. Collective."""
    check_positive(arguments, "repeats")
    check_whole(arguments, "warmup")
    sizes = parse_sizes(arguments.sizes)
    machine = None
    if arguments.predict is not None:
        machine = together(world, lambda: read_machine(arguments.predict)).machine
    methods, skipped = parse_methods(arguments, machine)
    where = take_device(arguments, world)
    baselines, why = parse_baselines(world, arguments.baselines, arguments.device)
    skipped += [f"{library}: {reason}" for library, reason in why.items()]
    together(world, lambda: check_out(arguments.out, world))
    with own_cores(world) as cores, group_of(world, baselines):
        header = heading(machine_line(world), cores, arguments, skipped, machine)
        header += [f"# {where}"] if where else []
        if world.process == 0:
            print("\n".join(header), flush=True)
        rows = measure(world, arguments, sizes, methods, baselines, machine)
    return Measured("allreduce", "allreduce", points(rows), arguments.warmup, cores)


def measure(
    world: Ranks,
    arguments: argparse.Namespace,
    sizes: Sequence[int],
    methods: Sequence[Allreduce],
    baselines: Sequence[str],
    machine: Machine | None,
) -> list[Row]:
    """Return the rows of all sizes; print each size's when they are there. Collective."""
    rows: list[Row] = []
    for size_bytes in sizes:
        cases = cases_of_size(world, size_bytes, methods, baselines, arguments.device)
        times = interleave_ranks(
            world,
            {i: case.run for i, case in enumerate(cases)},
            arguments.repeats,
            arguments.warmup,
            lambda i: cases[i].prepare(),  # noqa: B023
        )
        found = [
            Row(size_bytes, case, times[i], predicted_s(machine, case, world))
            for i, case in enumerate(cases)
        ]
        if world.process == 0:
            for row in found:
                print(line(row, found[0], world.ranks, arguments.warmup, machine), flush=True)
        rows += found
    return rows


def predicted_s(machine: Machine | None, case: TimedCase, world: Ranks) -> float:
    """Return the predicted time of a case, nan where there is no machine, or not our algorithm."""
    if machine is None or case.method is None:
        return np.nan
    method = Allreduce(case.method.wire, case.chosen, case.method.scaling, case.method.accumulate)
    return predict(machine, method, world.nodes, case.out.size).time_s


def heading(
    where: str,
    cores: str,
    arguments: argparse.Namespace,
    skipped: Sequence[str],
    machine: Machine | None,
) -> list[str]:
    """Return the lines above the table."""
    lines = [
        f"all-reduce of float32, sum, out of place: {where}",
        cores,
        f"time: the slowest rank from a barrier; {arguments.repeats} calls after "
        f"{arguments.warmup} warm-ups, cases in turns; GB/s: 1e9 byte/s",
        "busbw: 2 (p - 1) / p of size / time; wirebw: bytes that left a rank / time; "
        "error: relative, Euclidean norm",
        "x mpi: how many times as fast as MPI_Allreduce (mpi), median over calls",
        *(f"left out: {text}" for text in skipped),
        f"{'size':>11} {'':>11} {'':>13} {'':>6} {'':>9} {'':>10} {'time':>10} {'min':>10} "
        f"{'max':>10} {'algbw':>7} {'busbw':>7} {'wirebw':>7} {'':>8} {'':>6}"
        + (f" {'predicted':>10} {'predicted':>9}" if machine else ""),
        f"{'(B)':>11} {'count':>11} {'algorithm':>13} {'wire':>6} {'scaling':>9} "
        f"{'accumulate':>10} {'(us)':>10} {'(us)':>10} {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} "
        f"{'(GB/s)':>7} {'error':>8} {'x mpi':>6}"
        + (f" {'(us)':>10} {'/ time':>9}" if machine else ""),
    ]
    return [f"# {text}" for text in lines]


def line(row: Row, mpi: Row, ranks: int, warmup: int, machine: Machine | None) -> str:
    """Return a row of the table; time is the median."""
    case, size = row.case, row.size_bytes
    times_s, mpi_s = (each.times_s[warmup:].max(axis=1) for each in (row, mpi))
    time_s = float(np.median(times_s))
    bus_bytes = size * 2 * (ranks - 1) / ranks
    wire = f"{case.wire_bytes / time_s / GIGA:>7.2f}" if case.method else f"{'-':>7}"
    text = (
        f"  {size:>11} {size // 4:>11} {case.name:>13} {case.wire:>6} {case.scaling:>9} "
        f"{case.accumulate:>10} {1e6 * time_s:>10.1f} {1e6 * times_s.min():>10.1f} "
        f"{1e6 * times_s.max():>10.1f} {size / time_s / GIGA:>7.2f} "
        f"{bus_bytes / time_s / GIGA:>7.2f} {wire} {case.error:>8.1e} "
        f"{np.median(mpi_s / times_s):>6.2f}"
    )
    if machine is None:
        return text
    if np.isnan(row.predicted_s):
        return text + f" {'-':>10} {'-':>9}"
    return text + f" {1e6 * row.predicted_s:>10.1f} {row.predicted_s / time_s:>9.2f}"


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the points of a study of all-reduces."""
    return [Point(_factors(row), _outcomes(row), row.times_s) for row in rows]


def _factors(row: Row) -> dict[str, int | str]:
    case = row.case
    found: dict[str, int | str] = {
        "size_bytes": row.size_bytes,
        "algorithm": case.algorithm,
        "wire": case.wire,
    }
    if on_gpu(case.out):
        found["device"] = "gpu"
    if case.algorithm == AUTO:
        found["chosen"] = case.chosen
    if case.method is None or case.method.fmt is None:
        return found
    return found | {"value_scaling": case.scaling, "accumulate": case.accumulate}


def _outcomes(row: Row) -> dict[str, float]:
    found = {
        "error": row.case.error,
        "wire_bytes": row.case.wire_bytes,
        "payload_bytes": float(row.size_bytes),
    }
    return found if np.isnan(row.predicted_s) else found | {"predicted_s": row.predicted_s}
