"""python -m cpdhpc bench fit, predict: what predictions need of a machine, and predicted times."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import store
from ..collectives.allreduce import Allreduce
from ..collectives.method import AUTO, DEFAULT, UNITS, Machine, MachineFile, Method, read_machine
from ..collectives.predict import Prediction, predict
from ..collectives.recorded import PART_VALUES
from ..config import UserError, dump_toml
from ..formats import Cast, packed_bytes, parse_format, tiles
from ..ops import cpu
from ..provenance import attributes
from ..world.cores import own_cores
from ..world.ranks import Ranks
from .allreduce import add_choices, parse_methods
from .allreduce_cases import cases_of_size
from .harness import (
    Floats,
    add_repeats,
    check_options,
    check_out,
    interleave_ranks,
    line,
    machine_line,
    nonnegative,
    parse_names,
    parse_sizes,
    ping_pong,
)

MESSAGES = [8 << i for i in range(0, 20, 2)]  # bytes: 8 to 2 MiB
ALLREDUCES = ("gather", "tree", "ring", "rhd", "direct")
FITTED = ["call_s", "step_s", "near_s", "memory_s", "cache_bytes"]
FITTED_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 26)  # of the all-reduces that the fit sees
CHECKED_BYTES = (8, 1 << 14, 1 << 18, 1 << 24)  # of those it does not see
IN_CACHE = (1 << 12, 1 << 14, PART_VALUES)  # values
WIRES = ("raw", "e4m3")
SHORTENED = 5  # lengths of a step that the fit tries
NEARER = 0.999  # times the misfit: the fit ends where a step brings less


class Sample(NamedTuple):
    """A measured call: time_s of an all-reduce of n values on ranks of these nodes."""

    method: Method
    nodes: tuple[int, ...]
    n: int
    time_s: float


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--out", type=Path, required=True, metavar="MACHINE.toml", help="the file")
    parser.add_argument("--format", default="e4m3", metavar="NAME", help="of the codec's times")
    add_repeats(parser, 30, 3)
    parser.add_argument("--quick", action="store_true", help="small sizes only, for tests")


def run_fit(arguments: argparse.Namespace, world: Ranks) -> None:
    """Measure, fit, write the file, and print how near the predictions are. Collective."""
    check_options(arguments, 1, "repeats")
    check_options(arguments, 0, "warmup")
    world.agreed(lambda: check_out(arguments.out))
    if world.processes < 2:
        raise UserError("bench fit: a link takes 2 processes: run it under mpirun")
    with own_cores(world) as cores:
        sizes = MESSAGES[: 4 if arguments.quick else None]
        alpha_s, beta_s = ping_pong(world, sizes, arguments.repeats, arguments.warmup)
        rates = operations(world, arguments)
        samples = allreduces(world, arguments, FITTED_BYTES[: 2 if arguments.quick else None])
        checked = [] if arguments.quick else allreduces(world, arguments, CHECKED_BYTES)
    start = replace(DEFAULT, alpha_s=alpha_s, beta_s=beta_s, **rates)
    fields = FITTED + ["host_s"] * (len(set(world.nodes)) > 1)
    machine = fit(start, samples, fields)
    notes = attributes(world) | {"format": arguments.format, "cores": cores}
    where = machine_line(world)
    world.on_first(lambda: write(arguments.out, machine, notes))
    if world.process == 0:
        print(f"# {where}\n# {cores}")
        show(machine, fields, samples, checked)


def operations(world: Ranks, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the seconds per byte of float32 of the operations of an all-reduce. Collective.

    In the cache; all ranks at once; the slowest rank counts. What a call takes whatever its size is
    left out.
    """
    world.agreed(lambda: parse_names("--format", arguments.format, parse_format))
    cast = Cast(parse_format(arguments.format))
    found: dict[str, list[float]] = {}
    for n in IN_CACHE:
        times = interleave_ranks(world, _operations(n, cast), arguments.repeats, arguments.warmup)
        for name, each in times.items():
            median_s = float(np.median(each[arguments.warmup :].max(axis=1)))
            found.setdefault(name, []).append(median_s)
    return {name: line([4 * n for n in IN_CACHE], times)[1] for name, times in found.items()}


def _operations(n: int, cast: Cast) -> dict[str, Callable[[], object]]:
    """Return calls of the operations on n values."""
    x, total, out = (np.ones(n, np.float32) for _ in range(3))
    words, hop_words = (np.zeros(packed_bytes(n, cast.fmt.bits), np.uint8) for _ in range(2))
    shifts, hop_shifts = np.zeros(tiles(n), np.uint8), np.zeros(tiles(n), np.uint8)
    cpu.encode_tiles(x, cast, words, shifts, fit=True)
    return {
        "gamma_s": lambda: np.add(x, total, out=out),
        "copy_s": lambda: np.copyto(out, x),
        "encode_s": lambda: cpu.encode_tiles(x, cast, hop_words, hop_shifts, fit=True),
        "decode_s": lambda: cpu.decode_tiles(words, shifts, cast.fmt, out),
        "decode_add_s": lambda: cpu.decode_add_tiles(words, shifts, cast.fmt, out, out),
        "hop_s": lambda: cpu.decode_add_encode_tiles(
            words, shifts, cast, x, hop_words, hop_shifts, fit=True
        ),
    }


def allreduces(world: Ranks, arguments: argparse.Namespace, sizes: Sequence[int]) -> list[Sample]:
    """Return the median times of all-reduces of these sizes, in bytes. Collective."""
    methods = [Allreduce(wire, name) for name in ALLREDUCES for wire in WIRES]
    samples = []
    for size in sizes:
        cases = cases_of_size(world, size, methods, [])
        runs = {i: case.run for i, case in enumerate(cases)}
        times = interleave_ranks(world, runs, arguments.repeats, arguments.warmup)
        for i, method in enumerate(methods):
            time_s = float(np.median(times[i][arguments.warmup :].max(axis=1)))
            samples.append(Sample(method, world.nodes, size // 4, time_s))
    return samples


def fit(
    machine: Machine, samples: Sequence[Sample], fields: Sequence[str], rounds: int = 8
) -> Machine:
    """Return machine with such values of fields that the predictions come near to the samples.

    Least squares of the relative errors, none negative, by Gauss and Newton; a prediction is
    piecewise linear in every field, so a step that makes the errors larger is shortened.
    """
    measured = np.array([sample.time_s for sample in samples])

    def at(values: Floats) -> Machine:
        return replace(machine, **dict(zip(fields, values.tolist(), strict=True)))

    def relative(values: Floats) -> Floats:
        predicted = [predict(at(values), s.method, s.nodes, s.n).time_s for s in samples]
        return np.array(predicted) / measured

    def misfit(values: Floats) -> float:
        return float(((relative(values) - 1) ** 2).sum())

    values = np.array([getattr(machine, name) for name in fields])
    for _ in range(rounds):
        base, steps = relative(values), np.diag(np.maximum(values * 1e-3, 1e-12))
        slopes = [(relative(values + step) - base) / step.max() for step in steps]
        a = np.stack(slopes, axis=1)
        target = nonnegative(a, 1 - (base - a @ values))
        tries = [values + (target - values) / 2**halvings for halvings in range(SHORTENED)]
        before, values = values, min([values, *tries], key=misfit)
        if misfit(values) > NEARER * misfit(before):
            break
    return at(values)


def write(path: Path, machine: Machine, notes: dict[str, Any]) -> None:
    """Write the file that read_machine reads. Raises StoreError where it cannot be written."""
    file = MachineFile(machine=machine, units=UNITS, fit=notes)
    store.put(path, dump_toml(file.model_dump()))


def show(
    machine: Machine, fields: Sequence[str], fitted: Sequence[Sample], checked: Sequence[Sample]
) -> None:
    """Print the times, and predictions beside what was measured."""
    print(f"# times of the model; {', '.join(fields)} fitted, the others measured by themselves")
    for name, value in asdict(machine).items():
        print(f"  {name:>12} {value:>12.4g}  {UNITS[name]}")
    print("# median of measured calls; fitted: no: the fit has not seen it")
    print(
        f"# {'size(B)':>11} {'algorithm':>9} {'wire':>6} {'time(us)':>12} {'predicted(us)':>13} "
        f"{'ratio':>6} {'fitted':>6}"
    )
    for sample in [*fitted, *checked]:
        predicted_s = predict(machine, sample.method, sample.nodes, sample.n).time_s
        print(
            f"  {4 * sample.n:>11} {sample.method.algorithm:>9} {sample.method.wire!s:>6} "
            f"{1e6 * sample.time_s:>12.1f} {1e6 * predicted_s:>13.1f} "
            f"{predicted_s / sample.time_s:>6.2f} {'no' if sample in checked else 'yes':>6}"
        )


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("machine", type=Path, metavar="MACHINE.toml", help="written by bench fit")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="N", help="for the steps of hier"
    )
    add_choices(parser)


def run_predict(arguments: argparse.Namespace) -> None:
    """Print a table of predictions, and in words what they rest on."""
    check_options(arguments, 1, "ranks", "ranks_per_node")
    file = read_machine(arguments.machine)
    sizes = parse_sizes(arguments.sizes)
    methods, skipped = parse_methods(arguments, None)
    methods = [method for method in methods if method.algorithm != AUTO]
    if not methods:
        raise UserError("--algorithms auto: is the best of the others: name those")
    nodes = tuple(rank // arguments.ranks_per_node for rank in range(arguments.ranks))
    found = {
        (size, method): predict(file.machine, method, nodes, size // 4)
        for size in sizes
        for method in methods
    }
    print("\n".join(f"# {text}" for text in rests_on(file, arguments, list(found.values()))))
    for text in skipped:
        print(f"# left out: {text}")
    print(
        f"# {'size(B)':>11} {'algorithm':>9} {'wire':>6} {'scaling':>9} {'accumulate':>10} "
        f"{'time(us)':>12} {'algbw(GB/s)':>11} {'wire bytes':>13}  fastest"
    )
    for (size, method), prediction in found.items():
        packed = method.fmt is not None
        best = min(each.time_s for (at, _), each in found.items() if at == size)
        print(
            f"  {size:>11} {method.algorithm:>9} {method.wire!s:>6} "
            f"{method.scaling if packed else '-':>9} "
            f"{method.accumulating if packed else 'float32':>10} {1e6 * prediction.time_s:>12.1f} "
            f"{size / prediction.time_s / 1e9:>11.3f} {prediction.wire_bytes:>13} "
            f" {'*' if prediction.time_s == best else ''}".rstrip()
        )


def rests_on(
    file: MachineFile, arguments: argparse.Namespace, predictions: list[Prediction]
) -> list[str]:
    """Return what the predictions rest on."""
    fit = file.fit
    where = (
        f"fitted on {fit['ranks']} ranks of {fit['processor']} ({fit['hosts']}) on {fit['date']}"
        if {"ranks", "processor", "hosts", "date"} <= fit.keys()
        else "of a file that does not say where its times come from"
    )
    one = any(each.simulated == 1 for each in predictions) and arguments.ranks > 1
    return [
        f"predicted for {arguments.ranks} ranks, not measured; times {where}",
        "assumed: links alike, inside nodes and between; ranks alike, on cores of their own; no "
        "contention, no noise",
        "all ranks' steps are simulated"
        + ("; where all ranks do the same, those of one that stands for all" if one else ""),
    ]
