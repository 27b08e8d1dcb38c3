"""python -m cpdhpc bench fit and predict: the model of a machine, and the times it predicts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import store
from ...collectives.allreduce import Allreduce
from ...collectives.method import AUTO, DEFAULT, UNITS, Machine, MachineFile, Method, read_machine
from ...collectives.predict import Prediction, choose, fastest, predict
from ...collectives.recorded import FAR_NS, PART_VALUES, forget
from ...config import ConfigError, UserError, dump_toml
from ...formats import Cast, packed_bytes, parse_format, tiles
from ...ops import cpu
from ...whole_files import sealed
from ...world.cores import own_cores
from ...world.node_memory import round_trip_ns
from ...world.ranks import Ranks
from ..kinds import flags, printing
from ..kinds.timing import Floats, line, nonnegative, ping_pong
from ..provenance import attributes
from ..settings import options
from .allreduce import add_choices, parse_methods

MESSAGES = [8 << i for i in range(0, 20, 2)]  # bytes: 8 to 2 MiB
ALLREDUCES = ("gather", "tree", "ring", "rhd", "direct")
FITTED = ["call_s", "step_s", "near_s", "own_cache_bytes", "memory_s", "cache_bytes"]
# Sizes of the all-reduces that are fitted: not more calls than the KEPT recordings of a world
FITTED_BYTES = tuple(1 << i for i in (12, 16, 18, 20, 22, 26))
CHECKED_BYTES = (8, 1 << 14, 1 << 17, 1 << 19, 1 << 24)  # of those that only check the fit
JUDGED_BYTES = 1 << 12  # predictions of smaller ones are not judged: there the call decides
IN_CACHE = (1 << 12, 1 << 14, PART_VALUES)  # values
WIRES = ("raw", "e4m3")
CACHES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes: a fit starts from each of them, as each may
# end in another local minimum
OFF_CORE = 0.04  # share of a call: a process that waits for its core longer was disturbed
QUARTILE = 0.25  # of the times of calls: memory and caches that others use lengthen the later ones
MOST_TURNS = 8  # times the repeats, while cores are moved
MOST_TRIES = 50  # to record calls while cores stay as they are
LOOK_S, MOST_LOOKS = 0.05, 2000  # seconds between checks of moved cores, and most checks
SHORTENED = 5  # lengths of a step that the fit tries, each half of the last
NEARER = 0.999  # the fit ends if a step leaves more of the misfit


class Sample(NamedTuple):
    """A measured call: time_s of an all-reduce of n values on ranks of these nodes."""

    method: Method
    nodes: tuple[int, ...]
    n: int
    time_s: float


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("--out MACHINE.toml", "file of the model", Path, required=True)
    add("--format NAME", "format of the codec's times", "e4m3", type=flags.named(parse_format))
    flags.add_repeats(parser, 30, 1)
    add(
        "--beside MACHINE.toml",
        "also show the predictions of an earlier fit, for cores as far apart as then",
        Path,
    )
    add("--quick", "small sizes only, for tests")


def run_fit(arguments: argparse.Namespace, world: Ranks) -> None:
    """Measure, fit, write the file, and print the errors of the predictions. Collective."""
    world.agreed(lambda: flags.check_out(arguments.out))
    if world.processes < 2:
        raise UserError("bench fit: a link needs 2 processes: run it under mpirun")
    cast = Cast(parse_format(arguments.format))
    beside = arguments.beside and world.agreed(lambda: _earlier(arguments.beside))
    quick = arguments.quick
    with own_cores(world) as cores:
        alpha_s, beta_s = ping_pong(world, MESSAGES[: 4 if quick else None], arguments.repeats, 3)
        apart_ns = round_trip_ns(world)
        if beside:  # at the distance of the earlier fit, as its times hold for no other
            apart_ns = int(beside.fit.get("apart_ns", apart_ns))
        turns = Turns(world, apart_ns > FAR_NS, arguments.repeats, arguments.warmup)
        rates, samples = turns.take(cast, FITTED_BYTES[: 2 if quick else None])
        checked = [] if quick else turns.take(cast, CHECKED_BYTES)[1]
    model = replace(DEFAULT, alpha_s=alpha_s, beta_s=beta_s, **rates)
    fields = FITTED + ["host_s"] * (len(set(world.nodes)) > 1)
    starts = [replace(model, cache_bytes=float(size)) for size in CACHES]
    found = [fit(each, samples, fields) for each in starts]
    machine = min(found, key=lambda each: misfit(each, samples))
    notes = attributes(world) | {"format": arguments.format, "cores": cores, "apart_ns": apart_ns}
    about = printing.machine_line(world)
    world.on_first(lambda: write(arguments.out, machine, notes))
    if world.process == 0:
        print(f"# {about}\n# {cores}")
        show(machine, fields, samples, checked)
        if beside:
            print(f"# {arguments.beside}, cores {beside.fit.get('apart_ns', '?')} ns apart")
            print(f"# {judged(beside.machine, [*samples, *checked])}")


def _earlier(path: Path) -> MachineFile:
    try:
        return read_machine(path)
    except ConfigError as error:
        raise UserError(f"--beside {path}: {error}") from None


Calls = dict[Any, Callable[[], object]]


class Turns(NamedTuple):
    """Measures calls of all sizes in turns, so that a drift of the machine affects all of them.

    far: whether neighbours share no cache: calls are then recorded in another way and take other
        times. Virtual cores may be moved; times count only while the cores agree with far
    warmup: calls before each timed call
    """

    world: Ranks
    far: bool
    repeats: int
    warmup: int

    def take(self, cast: Cast, sizes: Sequence[int]) -> tuple[dict[str, float], list[Sample]]:
        """Return the times per byte of operations, and all-reduces of some sizes. Collective.

        Operations work in the cache, on all ranks at once. The slowest rank counts.
        Raises UserError if cores are moved too often.
        """
        groups: list[Calls] = [_operations(n, cast) for n in IN_CACHE]
        groups += [self.all_reduces(size) for size in sizes]
        times = self.measure(groups)
        in_bytes = [4 * n for n in IN_CACHE]
        rates = {
            name: line(in_bytes, [each[name] for each in times[: len(IN_CACHE)]])[1]
            for name in groups[0]
        }
        samples = [
            Sample(method, self.world.nodes, size // 4, time_s)
            for size, each in zip(sizes, times[len(IN_CACHE) :], strict=True)
            for method, time_s in each.items()
        ]
        return rates, samples

    def all_reduces(self, size_bytes: int) -> Calls:
        """Return all-reduces whose recordings are for cores that agree with far. Collective."""
        x = np.random.default_rng(self.world.process).standard_normal(size_bytes // 4, np.float32)
        out = np.empty_like(x)
        methods = [Allreduce(wire, name) for name in ALLREDUCES for wire in WIRES]
        calls: Calls = {each: partial(each.run, self.world, [x], [out]) for each in methods}
        for _ in range(MOST_TRIES):
            self.wait()
            for method in methods:
                forget(self.world, method, x.size)
            for call in [*calls.values()] * 2:  # the second call of each is recorded
                call()
            if self.is_as_said():
                return calls
        raise self._moved()

    def measure(self, groups: Sequence[Calls]) -> list[dict[Any, float]]:
        """Return the time of each call, in s. Collective."""
        found: list[list[Floats]] = [[] for _ in groups]
        for turn in range(MOST_TURNS * self.repeats):
            for calls, times in zip(groups, found, strict=True):
                if len(times) < self.repeats:
                    self.wait()
                    once = self._once(list(calls.values()), turn)
                    if self.is_as_said():
                        times.append(once)
        if not all(found):
            raise self._moved()
        return [
            dict(zip(calls, map(undisturbed, np.stack(times, axis=1)), strict=True))
            for calls, times in zip(groups, found, strict=True)
        ]

    def _once(self, calls: Sequence[Callable[[], object]], turn: int) -> Floats:
        """Return the time of each call and how long a process was off its core, [calls, 2], in s.

        The order changes from turn to turn, as the time of a call depends on the one before.
        """
        order = np.random.default_rng(turn).permutation(len(calls))
        times = np.empty((len(calls), 2))
        for _ in range(1 + self.warmup):
            for i in order:
                self.world.barrier("bench")
                busy_s, start_s = time.thread_time(), time.perf_counter()
                calls[i]()
                times[i, 0] = time.perf_counter() - start_s
                times[i, 1] = times[i, 0] - (time.thread_time() - busy_s)
        return np.max(self.world.gather(times, "bench"), axis=0)

    def wait(self) -> None:
        """Wait until cores agree with far. Collective. Raises UserError if they never do."""
        for _ in range(MOST_LOOKS):
            if self.is_as_said():
                return
            time.sleep(LOOK_S)
        raise self._moved()

    def is_as_said(self) -> bool:
        """Return whether cores agree with far now. Collective."""
        return (round_trip_ns(self.world) > FAR_NS) == self.far

    def _moved(self) -> UserError:
        return UserError("bench fit: the cores of this machine are moved too often: try it again")


def undisturbed(times: Floats) -> float:
    """Return the time in s of an undisturbed call; times: float64[calls, 2], as of a turn.

    The lower quartile of the calls during which no process waited for its core, or of all calls.
    """
    spent_s, off_s = times.T
    kept = off_s <= OFF_CORE * spent_s
    return float(np.quantile(spent_s[kept] if kept.any() else spent_s, QUARTILE))


def _operations(n: int, cast: Cast) -> Calls:
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


def ratios(machine: Machine, samples: Sequence[Sample]) -> Floats:
    """Return the predicted by the measured time of each sample."""
    predicted = [predict(machine, s.method, s.nodes, s.n).time_s for s in samples]
    return np.array(predicted) / [s.time_s for s in samples]


def misfit(machine: Machine, samples: Sequence[Sample]) -> float:
    """Return the sum of the squares of the relative errors."""
    return float(((ratios(machine, samples) - 1) ** 2).sum())


def fit(
    machine: Machine, samples: Sequence[Sample], fields: Sequence[str], rounds: int = 8
) -> Machine:
    """Return machine with values of fields for which predictions are near the samples.

    Minimises the squares of the relative errors by Gauss-Newton steps with values of 0 or more. A
    prediction is piecewise linear in every field, so a step that increases the error is shortened.
    """

    def at(values: Floats) -> Machine:
        return replace(machine, **dict(zip(fields, values.tolist(), strict=True)))

    def relative(values: Floats) -> Floats:
        return ratios(at(values), samples)

    def missed(values: Floats) -> float:
        return misfit(at(values), samples)

    values = np.array([getattr(machine, name) for name in fields])
    for _ in range(rounds):
        base, steps = relative(values), np.diag(np.maximum(values * 1e-3, 1e-12))
        slopes = [(relative(values + step) - base) / step.max() for step in steps]
        a = np.stack(slopes, axis=1)
        target = nonnegative(a, 1 - (base - a @ values))
        target = np.where(a.any(axis=0), target, values)  # fields without influence stay
        tries = [values + (target - values) / 2**halvings for halvings in range(SHORTENED)]
        before, values = values, min([values, *tries], key=missed)
        if missed(values) > NEARER * missed(before):
            break
    return at(values)


def write(path: Path, machine: Machine, notes: dict[str, Any]) -> None:
    """Write the file that read_machine reads. Raises StoreError if it cannot be written."""
    file = MachineFile(machine=machine, units=UNITS, fit=notes)
    store.put(path, sealed(dump_toml(asdict(file))))


SHOWN = {  # heading -> form
    **{"size(B)": "11", "algorithm": "9", "wire": "6", "time(us)": "12.1f"},
    **{"predicted(us)": "13.1f", "ratio": "6.2f", "fitted": "6"},
}


def show(
    machine: Machine, fields: Sequence[str], fitted: Sequence[Sample], checked: Sequence[Sample]
) -> None:
    """Print the times of the model, and predictions beside measured times."""
    print(f"# times of the model; {', '.join(fields)} fitted, the others measured directly")
    for name, value in asdict(machine).items():
        print(f"  {name:>12} {value:>12.4g}  {UNITS[name]}")
    print("# lower quartile of calls; fitted, no: only checks the fit")
    samples = [*fitted, *checked]
    rows = [
        (4 * s.n, s.method.algorithm, str(s.method.wire), 1e6 * s.time_s, 1e6 * s.time_s * ratio)
        + (ratio, "no" if s in checked else "yes")
        for s, ratio in zip(samples, ratios(machine, samples), strict=True)
    ]
    print("\n".join(printing.table(SHOWN, rows)))
    print("\n".join(f"# {text}" for text in [judged(machine, fitted), judged(machine, checked)]))


def judged(machine: Machine, samples: Sequence[Sample]) -> str:
    """Return the errors of predictions and the cost of auto, as a sentence."""
    judged = [sample for sample in samples if 4 * sample.n >= JUDGED_BYTES]
    if not judged:
        return "no sizes to judge by"
    found = ratios(machine, judged)
    within = int((abs(found - 1) <= 0.2).sum())
    costs: dict[tuple[int, str], float] = {}
    for sample in judged:
        same = {
            other.method.algorithm: (ratio * other.time_s, other.time_s)
            for other, ratio in zip(judged, found, strict=True)
            if (other.n, other.method.wire) == (sample.n, sample.method.wire)
        }
        chosen = fastest({name: float(predicted_s) for name, (predicted_s, _) in same.items()})
        least_s = min(time_s for _, time_s in same.values())
        costs[sample.n, str(sample.method.wire)] = same[chosen][1] / least_s
    few = sum(cost <= 1.1 for cost in costs.values())
    middle = float(np.median(found))  # shifted if the whole machine is slower or faster
    beside = int((abs(found / middle - 1) <= 0.2).sum())
    return (
        f"from {JUDGED_BYTES} B: {within} of {len(judged)} predictions within 20 % of what was "
        f"measured, {found.min():.2f} to {found.max():.2f} times it, median {middle:.2f}, {beside} "
        f"within 20 % of that; what auto would take: at most 1.1 times the fastest in {few} of "
        f"{len(costs)} cases, {max(costs.values()):.2f} in all"
    )


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("machine MACHINE.toml", "file of bench fit", Path)
    least = flags.at_least(1)
    add("--ranks N", "number of ranks", least, required=True)
    add("--ranks-per-node N", "ranks of each node, for the steps of hier", 1, type=least)
    add_choices(parser)


PREDICTED = {
    **{"size(B)": "11", "algorithm": "11", "wire": "6", "scaling": "9", "accumulate": "10"},
    **{"time(us)": "12.1f", "algbw(GB/s)": "11.3f", "wire bytes": "13", " fastest": "<8"},
}


def run_predict(arguments: argparse.Namespace) -> None:
    """Print the assumptions and a table of predictions."""
    file = read_machine(arguments.machine)
    methods, skipped = parse_methods(arguments, file.machine)
    nodes = tuple(rank // arguments.ranks_per_node for rank in range(arguments.ranks))
    found: dict[tuple[int, str, Method], Prediction] = {}
    for size, method in product(arguments.sizes, methods):
        chosen: Method = method
        if method.algorithm == AUTO:
            chosen = choose(method, nodes, size // 4)
        name = method.algorithm if chosen is method else f"{AUTO}={chosen.algorithm}"
        found[size, name, chosen] = predict(file.machine, chosen, nodes, size // 4)
    print("\n".join(f"# {text}" for text in rests_on(file, arguments, list(found.values()))))
    for text in skipped:
        print(f"# left out: {text}")
    rows = []
    for (size, name, taken), each in found.items():
        how = (taken.scaling, taken.accumulating) if taken.fmt is not None else ("-", "float32")
        best = min(other.time_s for (at, *_), other in found.items() if at == size)
        row = (size, name, str(taken.wire), *map(str, how), 1e6 * each.time_s)
        rate = size / each.time_s / 1e9
        rows.append((*row, rate, each.wire_bytes, " *" if each.time_s == best else ""))
    print("\n".join(printing.table(PREDICTED, rows)))


def rests_on(
    file: MachineFile, arguments: argparse.Namespace, predictions: list[Prediction]
) -> list[str]:
    """Return the assumptions of the predictions."""
    fit = file.fit
    origin = (
        f"fitted on {fit['ranks']} ranks of {fit['processor']} ({fit['hosts']}) on {fit['date']}"
        if {"ranks", "processor", "hosts", "date"} <= fit.keys()
        else "of a file without the origin of its times"
    )
    one = any(each.simulated == 1 for each in predictions) and arguments.ranks > 1
    return [
        f"predicted for {arguments.ranks} ranks, not measured; times {origin}",
        "assumed: the same links inside nodes and between; equal ranks on cores of their own; no "
        "contention, no noise",
        "all ranks' steps are simulated"
        + ("; if all ranks do the same, one stands for all" if one else ""),
    ]
