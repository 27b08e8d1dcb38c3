"""The codec: float32 to packed codes and back, all ranks at once, beside memcpy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getdoc
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...compress.payload import decode_sparse, encode_sparse
from ...config import Raw, UserError, among
from ...formats import (
    MICROSCALING,
    SHARED,
    TILE,
    Cast,
    Format,
    Microscaling,
    packed_bytes,
    parse_format,
    shift_count,
    tiles,
)
from ...methods import CODEC_OPERATIONS, MEMCPY
from ...ops import backend_of, cpu, reference, set_kernel_threads, to_host
from ...world.ranks import Loopback
from ..provenance import processor
from ..settings import options
from ..study_data.factors import ABSENT, DEVICE, Factor, Factors, Value, device_used, float32_size
from .base import Call, Kind
from .harness import (
    Measured,
    Point,
    Times,
    add_device,
    add_samples,
    check_options,
    check_out,
    interleave,
    on_device,
    parse_counts,
    parse_names,
    take_device,
    whole,
)

if TYPE_CHECKING:
    from ...world.mpi import World
    from ..report.figures import Panel, Style
    from ..report.points import Estimate, Layout, SeedGroup
    from ..report.tables import Section, Table
    from ..study_data.factors import Case
    from ..study_data.study_file import StudyFile
    from .base import Asked
    from .place import Place

GUESS = 1e-9  # s per byte: a slow codec


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors; memcpy has no format. See Kind.used."""
    operation, name = str(given["operation"]), str(given["format"])
    found = {"size_bytes": given["size_bytes"], "operation": operation} | device_used(given)
    if operation == MEMCPY:
        return found
    if name == ABSENT:
        raise ValueError(f"operation {operation} needs a format")
    return found | {"format": name}


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    return repeats * (1e-4 + GUESS * float(used["size_bytes"]))


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    values = int(used["size_bytes"]) // 4
    return None if values >= ranks else f"{values} values are fewer than {ranks} ranks"


ANY_FORMAT = "e4m3"  # where the operation has none


@contextmanager
def _measure(study: Asked, case: Case, place: Place, check: bool) -> Iterator[Call]:
    """Make an operation on a rank's share of the data ready; see Kind.measure. Collective."""
    import numpy as np

    from ...partition import split
    from .harness import on_device

    factors, world = case.factors, place.world
    operation = str(factors["operation"])
    cast = Cast(parse_format(str(factors.get("format", ANY_FORMAT))))
    start, stop = split(int(factors["size_bytes"]) // 4, world.processes, world.process)
    values = np.random.default_rng(world.process).standard_normal(stop - start, np.float32)
    x = on_device(values, place.take_device(factors))
    call = Call(operations(x, cast)[operation])
    if check:
        world.agreed(lambda: check_against_reference(x, cast), told=ArithmeticError)
        call.outcomes["payload_bytes"] = 4 * x.size
        if operation != MEMCPY:
            shared = _shared(operation)
            shifts = shift_count(x.size, shared) if shared else 0
            call.outcomes["wire_bytes"] = packed_bytes(x.size, cast.fmt.bits) + shifts
            call.outcomes["error"] = _error(world, values, cast, operation)
    yield call


def _shared(operation: str) -> int | None:
    """Return how many values share a shift that is chosen on the way, if one is."""
    return SHARED.get(operation.rpartition(" ")[2])


def _error(world: World, x: Any, cast: Cast, operation: str) -> float:
    """Return the error of x encoded and decoded, over all ranks' values. Collective.

    As the operation rounds and scales; decode and hops are about the codes of plain encode.
    """
    import numpy as np

    from ...ops import cpu

    shared = _shared(operation)
    rounding = Cast(cast.fmt, "stochastic") if operation == "stochastic" else cast
    words = np.zeros(packed_bytes(x.size, cast.fmt.bits), np.uint8)
    shifts, out = np.full(shift_count(x.size, shared or TILE), 127, np.uint8), np.empty_like(x)
    cpu.encode_tiles(x, rounding, words, shifts, fit=shared is not None)
    cpu.decode_tiles(words, shifts, cast.fmt, out)
    wrong = float(np.sum((out.astype(np.float64) - x) ** 2))
    whole = float(np.sum(x.astype(np.float64) ** 2))
    sums = np.sum(world.gather((wrong, whole)), axis=0)
    return float(np.sqrt(sums[0] / sums[1]))


APART = 0.1  # of a row: operations below one another
CAPTION = (
    "Rate: float32 data of all ranks / median time of the slowest. Of memcpy's: of the same data "
    "on as many ranks in this study; in brackets the interval, which takes in both medians'."
)


def _sections(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> list[Section]:
    """Return rates by format and operation, beside memcpy."""
    from ..report.figures import Chart, styles
    from ..report.tables import Section

    places: dict[str, list[SeedGroup]] = {}
    for group in groups:
        places.setdefault(_place(group), []).append(group)
    drawn = styles(str(group.factors["operation"]) for group in groups if not _is_base(group))
    panels = [_panel(place, alike, drawn) for place, alike in places.items()]
    chart = Chart(
        "rate_by_format",
        f"{file.name}: rate of the codec",
        [f"float32 data of all ranks / median time of the slowest; bars: {file.percent} CI."],
        "Rate by format, with memcpy of the same data on as many ranks.",
        [panel for panel in panels if panel.y.names],
        columns=2,
    )
    return [
        Section(
            "Codec",
            tables=[_table(file, groups, layout.every or groups)],
            charts=[chart] if chart.panels else [],
        )
    ]


def _place(group: SeedGroup) -> str:
    from ..report.points import label

    return label(group.factors, ("size_bytes", "ranks", "device"))


def _format(group: SeedGroup) -> str:
    return str(group.factors.get("format", "no format"))


def _is_base(group: SeedGroup) -> bool:
    return group.factors["operation"] == MEMCPY


def _rate(group: SeedGroup) -> Estimate:
    """Return bytes of float32 of all ranks by the time, GB/s."""
    return group.time_s.inverse(float(group.factors["size_bytes"]) / 1e9)


def _panel(place: str, groups: Sequence[SeedGroup], drawn: Mapping[str, Style]) -> Panel:
    from ..report.figures import IDEAL, Axis, Panel, Series

    own = [group for group in groups if not _is_base(group)]
    rows = list(dict.fromkeys(_format(group) for group in own))
    series = []
    for index, (name, style) in enumerate(drawn.items()):
        aside = APART * (index - (len(drawn) - 1) / 2)
        alike = [group for group in own if group.factors["operation"] == name]
        rates = [_rate(group) for group in alike]
        at = [aside + rows.index(_format(group)) for group in alike]
        x, low, high = (list(column) for column in zip(*rates, strict=True)) if rates else ([],) * 3
        series.append(Series(name, style, x, at, join="none", x_low=low, x_high=high))
    for group in filter(_is_base, groups):
        rate = _rate(group).value
        series.append(Series(MEMCPY, IDEAL, [rate, rate], [-0.6, len(rows) - 0.4]))
    return Panel(place, Axis("rate / (GB/s)", limits=(0, None)), Axis("", names=rows), series)


def _table(file: StudyFile, groups: Sequence[SeedGroup], every: Sequence[SeedGroup]) -> Table:
    """Return the table of groups; every: of the study, among them what others are beside."""
    from ..report import units
    from ..report.points import of_factors, times_as_fast, timing
    from ..report.tables import Column, tabulate

    base = {_place(group): group for group in every if _is_base(group)}
    optional = ("threads", "device")
    further = [name for name in optional if any(name in group.factors for group in groups)]
    columns: list[Column[SeedGroup]] = [
        Column("ranks", lambda g: str(g.ranks)),
        *of_factors(("size_bytes", "operation", "format", *further), groups),
        *timing(file),
        Column("rate\nGB/s", lambda g: units.digits(_rate(g).value)),
        Column("of memcpy's", lambda g: times_as_fast(base.get(_place(g)), g)),
    ]
    return tabulate("Codec", columns, groups, CAPTION)


CODEC = Kind(
    factors={
        "size_bytes": float32_size("float32 data of all ranks together"),
        "operation": Factor(
            "operation of the codec",
            str,
            default="encode tile",
            check=among([MEMCPY, *CODEC_OPERATIONS]),
        ),
        "format": Factor("format of the codec", str, check=parse_format),
        "device": DEVICE,
    },
    work="size_bytes",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one operation on a rank's share of the data, all ranks at once; the slowest rank",
    measure=_measure,
    sections=_sections,
    panels=("operation",),
)


Array = Any  # NumPy's, or CuPy's
Way = tuple[str, int]  # which loops, on how many threads

DEFAULT_FORMATS = "e1m1,e3m0,e3m2,e4m3,e5m2,fp16"
DEFAULT_OPERATIONS = "encode,encode tile,stochastic,decode,decode_add,hop,hop tile"
WARMUP = 1
MOST_THREADS = 1024
MOST_MIB = 1 << 20  # of the host's memory


def add_codec(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.description = getdoc(run_codec)
    add_device(parser)
    add = options(parser)
    add("--mib MIB", "of float32", 64, type=float)
    add("--formats NAME,...", "formats", DEFAULT_FORMATS)
    add("--density SHARE", "selected", 0.01)
    add("--operations NAME,...", f"of {', '.join(CODEC_OPERATIONS)}", DEFAULT_OPERATIONS)
    add("--threads N,...", "of the CPU", "1")
    add(
        "--clones NAME,...",
        f"loops of the CPU, of {', '.join(cpu.clones())}; without: {cpu.clone()}",
    )
    add_samples(parser, 9, calls="calls of each case")


def format_of(name: str) -> Format:
    """Return the format of a name; those of Microscaling too. Raises ValueError for another."""
    return MICROSCALING.get(name) or parse_format(name)


def scalings_of(fmt: Format) -> dict[str, int]:
    """Return the scalings that a format goes with, of SHARED."""
    return {"block32": SHARED["block32"]} if isinstance(fmt, Microscaling) else SHARED


def check_against_reference(x: Array, cast: Cast) -> None:
    """Raise ArithmeticError unless the first tiles come out as the specification says.

    x: NumPy's, or CuPy's for the operations on GPUs
    """
    for scaling, shared in scalings_of(cast.fmt).items():
        results = []
        for ops, head in ((backend_of(x), x[:5000]), (reference, to_host(x[:5000]))):
            words = zeros(head, packed_bytes(head.size, cast.fmt.bits))
            shifts = zeros(head, shift_count(head.size, shared))
            hop, hop_shifts = np.zeros_like(words), np.zeros_like(shifts)
            ops.encode_tiles(head, cast, words, shifts, fit=True)
            ops.decode_add_encode_tiles(words, shifts, cast, head, hop, hop_shifts, fit=True)
            results.append(np.concatenate([*map(to_host, (words, shifts, hop, hop_shifts))]))
        if not np.array_equal(results[0], results[1]):
            name = cast.fmt.name
            raise ArithmeticError(f"bench codec: {name}, {scaling}: differs from ops.reference")


def zeros(like: Array, size: int) -> Array:
    """Return uint8[size] where an array is."""
    return np.zeros_like(like, shape=(size,), dtype=np.uint8)


def operations(x: Array, cast: Cast) -> dict[str, Callable[[], object]]:
    """Return the operations on x, as the all-reduce uses them, by name; memcpy beside them.

    decode_add goes into its accumulator.
    """
    out, total, hop_words = (
        np.zeros_like(x),
        np.zeros_like(x),
        zeros(x, packed_bytes(x.size, cast.fmt.bits)),
    )
    found: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(out, x)}
    if not isinstance(cast.fmt, Microscaling):
        found |= _given(x, cast, hop_words, out, total)
    for scaling, shared in scalings_of(cast.fmt).items():
        found |= _fitted(scaling, shared, x, cast, hop_words, total)
    return {name: whole(found[name], x) for name in (MEMCPY, *CODEC_OPERATIONS) if name in found}


def _given(
    x: Array, cast: Cast, hop_words: Array, out: Array, total: Array
) -> dict[str, Callable[[], object]]:
    """The operations with shifts that are given."""
    fmt, ops = cast.fmt, backend_of(x)
    words, shifts = zeros(x, packed_bytes(x.size, fmt.bits)), zeros(x, tiles(x.size))
    shifts[...] = 127
    fixed = shifts.copy()
    stochastic = Cast(fmt, "stochastic")
    ops.encode_tiles(x, cast, words, shifts)
    return {
        "encode": lambda: ops.encode_tiles(x, cast, words, fixed),
        "stochastic": lambda: ops.encode_tiles(x, stochastic, hop_words, fixed),
        "decode": lambda: ops.decode_tiles(words, shifts, fmt, out),
        "decode_add": lambda: ops.decode_add_tiles(words, shifts, fmt, total, total),
        "hop": lambda: ops.decode_add_encode_tiles(words, shifts, cast, x, hop_words, fixed),
    }


def _fitted(
    scaling: str, shared: int, x: Array, cast: Cast, hop_words: Array, total: Array
) -> dict[str, Callable[[], object]]:
    """The operations with shifts that are chosen on the way, as many values share one."""
    words, shifts = np.zeros_like(hop_words), zeros(x, shift_count(x.size, shared))
    hop_shifts, ops = np.zeros_like(shifts), backend_of(x)
    ops.encode_tiles(x, cast, words, shifts, fit=True)
    return {
        f"encode {scaling}": lambda: ops.encode_tiles(x, cast, words, shifts, fit=True),
        f"decode_add {scaling}": lambda: ops.decode_add_tiles(
            words, shifts, cast.fmt, total, total
        ),
        f"hop {scaling}": lambda: ops.decode_add_encode_tiles(
            words, shifts, cast, x, hop_words, hop_shifts, fit=True
        ),
    }


ONE_PASS = "one pass"  # each value is read once, and little done: no selection takes less


def sparse_operations(x: NDArray[np.float32], density: float) -> dict[str, Callable[[], object]]:
    """Return the operations of sparse methods on a share of x, by name; memcpy beside them.

    Raises ArithmeticError unless the first values are selected as the specification says.
    """
    n, k, head = x.size, max(1, round(density * x.size)), x[:5000]
    few = max(1, round(density * head.size))
    if not np.array_equal(cpu.select_magnitude(head, few), reference.select_magnitude(head, few)):
        raise ArithmeticError("bench codec: select_magnitude: differs from ops.reference")
    indices = cpu.select_magnitude(x, k)
    values = cpu.gather(x, indices)
    threshold, total = float(np.abs(values).min()), np.zeros_like(x)
    payload = encode_sparse(indices, values, n)
    return {
        MEMCPY: lambda: np.copyto(total, x),
        ONE_PASS: lambda: cpu.amax_tiles(x),
        "kth_magnitude": lambda: cpu.kth_magnitude(x, k),
        "select_magnitude": lambda: cpu.select_magnitude(x, k),
        "select_above": lambda: cpu.select_above(x, threshold),
        "gather": lambda: cpu.gather(x, indices),
        "scatter_add": lambda: cpu.scatter_add(total, indices, values),
        "clear": lambda: cpu.clear(total, indices),
        "encode_sparse": lambda: encode_sparse(indices, values, n),
        "decode_sparse": lambda: decode_sparse(payload, n),
    }


def run_codec(args: argparse.Namespace) -> Measured:
    """Benchmark of the codec: float32 to packed codes and back, beside memcpy on one core.

    And of what sparse methods do: to find the largest values, take them out, add them, pack them.
    Rates are in GB/s (1e9 byte/s) of float32: 4 n bytes over the median time, whatever the width
    and however few of the n values are touched, so that the columns compare with memcpy's of the
    same run (4 n bytes copied).
    """
    check_options(args, 1, "repeats")
    if not 0 < args.mib < MOST_MIB:
        raise UserError(f"--mib {args.mib:g}: must be above 0 and below {MOST_MIB}")
    if not 0 < args.density <= 1:
        raise UserError(f"--density {args.density:g}: must be above 0 and at most 1")
    check_out(args.out, Loopback())
    names = parse_names("--formats", args.formats, format_of)
    chosen = parse_names("--operations", args.operations, among(CODEC_OPERATIONS))
    for name in MICROSCALING.keys() & set(names):
        if strange := [each for each in chosen if not each.endswith(" block32")]:
            raise UserError(f"--operations {strange[0]}: {name} has those of block32")
    counts = parse_counts("--threads", args.threads)
    clones = parse_names("--clones", args.clones or cpu.clone(), among(cpu.clones()))
    if max(counts) > MOST_THREADS:
        raise UserError(f"--threads {args.threads}: must be up to {MOST_THREADS}")
    if args.device == "gpu" and counts != [1]:
        raise UserError(f"--threads {args.threads}: is of the CPU: must be 1 with --device gpu")
    if args.device == "gpu" and args.clones:
        raise UserError(f"--clones {args.clones}: is of the CPU: not with --device gpu")
    n = max(1, int(args.mib * 2**20 / 4))
    where = take_device(args, Loopback())
    if where:
        print(where)
    normal = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    x = on_device(normal, args.device)
    print(f"codec on {processor()}, {os.cpu_count()} cores")
    print(f"{args.mib:g} MiB of float32, median of {args.repeats}, GB/s of float32")
    ways, before = [(clone, count) for clone in clones for count in counts], cpu.clone()
    try:
        found = _codecs(x, names, chosen, ways, args.repeats)
        if args.device == "cpu":
            found |= _selections(x, args, ways)
    finally:
        cpu.use_clone(before)
    points = []
    for (name, operation, (clone, count)), times in found.items():
        factors: dict[str, int | str] = {"size_bytes": 4 * n, "operation": operation}
        factors["threads"] = count
        if args.clones:
            factors["clone"] = clone
        if name and operation != MEMCPY:
            factors["format"] = name
        if operation != MEMCPY or name == names[0]:  # it is measured beside each format
            points.append(Point(factors, {"payload_bytes": 4.0 * n}, times[:, None]))
    return Measured("codec", "codec", points, WARMUP)


def _codecs(
    x: Array, names: Sequence[str], chosen: Sequence[str], ways: Sequence[Way], repeats: int
) -> dict[tuple[str, str, Way], Times]:
    """Time the codec for each format and way, and print a row of each."""
    heads = f"{'format':>8} {'bits':>4} {'clone':>9} {'threads':>7} {'memcpy':>11} "
    print(heads + " ".join(f"{c:>{max(11, len(c))}}" for c in chosen))
    found: dict[tuple[str, str, Way], Times] = {}
    for name in names:
        cast = Cast(format_of(name))
        for clone, _ in ways:
            cpu.use_clone(clone)
            check_against_reference(x, cast)
        runs = operations(x, cast)
        samples = _samples({each: runs[each] for each in (MEMCPY, *chosen)}, ways, repeats)
        for way in ways:
            cells = " ".join(_cells(samples, [MEMCPY, *chosen], way, x.nbytes))
            print(f"{name:>8} {cast.fmt.bits:>4} {way[0]:>9} {way[1]:>7} {cells}")
        found |= {(name, *case): times for case, times in samples.items()}
    return found


def _selections(
    x: NDArray[np.float32], args: argparse.Namespace, ways: Sequence[Way]
) -> dict[tuple[str, str, Way], Times]:
    """Time the sparse operations for each way, and print a row of each operation."""
    cases = sparse_operations(x, args.density)
    samples = _samples(cases, ways, args.repeats)
    print(f"the largest values, a share of {args.density:g}: GB/s of all of them")
    print(f"{'clone':>16} " + " ".join(f"{clone:>11}" for clone, _ in ways))
    print(f"{'threads':>16} " + " ".join(f"{count:>11}" for _, count in ways))
    for name in cases:
        cells = (_cells(samples, [name], way, x.nbytes)[0].strip() for way in ways)
        print(f"{name:>16} " + " ".join(f"{cell:>11}" for cell in cells))
    return {("", *case): times for case, times in samples.items()}


def _samples(
    cases: dict[str, Callable[[], object]], ways: Sequence[Way], repeats: int
) -> dict[tuple[str, Way], Times]:
    """The times of each case in each way, all taking turns; memcpy, which has none, once."""
    runs = {
        (name, way): run_codec
        for way in ways
        for name, run_codec in cases.items()
        if name != MEMCPY or way == ways[0]
    }

    def prepare(case: tuple[str, Way]) -> None:
        clone, count = case[1]
        cpu.use_clone(clone)
        set_kernel_threads(count)

    return interleave(runs, repeats, WARMUP, prepare)


def _cells(
    samples: dict[tuple[str, Way], Times], names: Sequence[str], way: Way, size_bytes: int
) -> list[str]:
    """Return the rate of each operation in a way, with its ratio to memcpy's."""
    rates = {
        case: size_bytes / float(np.median(times[WARMUP:])) / 1e9
        for (case, taken), times in samples.items()
        if taken == way or case == MEMCPY
    }
    ratios = {c: "" if c == MEMCPY else f" {rates[c] / rates[MEMCPY]:.2f}x" for c in names}
    return [f"{f'{rates[c]:.1f}{ratios[c]}':>{max(11, len(c))}}" for c in names]
