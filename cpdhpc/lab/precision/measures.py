"""Effects of rounding on arrays and recorded tensors: exponents, losses, errors of sums, products.

All are compared with float64, in NumPy, on one process. Formats, scalings and algorithms are those
of gradients in training, with the same kernels and simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...collectives.allreduce import Allreduce
from ...collectives.checks import NonFiniteGradient
from ...collectives.method import Segment, aps_shift
from ...collectives.schedules import SCHEDULES
from ...compress.base import Array
from ...compress.bucket import Bucket
from ...config import ConfigError
from ...formats import (
    SHARED,
    SHIFT_BIAS,
    TILE,
    Cast,
    FloatFormat,
    TableFormat,
    packed_bytes,
    parse_format,
    shift_count,
    tiles,
)
from ...methods import EXACT, suggest
from ...ops import cpu, type_name
from ...randomness import random_key
from ...store import Variable
from ...torch.precision.products import matmul
from ...torch.precision.recording import Recorded, Tensor
from ...world.ranks import Loopback

Floats = npt.NDArray[np.float32]

LOWEST, HIGHEST = -126, 127  # exponents of float32's normal numbers
SCALINGS = ("none", "aps", *SHARED)  # of one array, by name


@dataclass(frozen=True)
class Exponents:
    """Counts of values by exponent, and of values without one.

    counts: int64[254], of normal numbers by floor(log2|x|), from LOWEST to HIGHEST
    subnormals: of float32: non-zero, below 2**LOWEST
    """

    counts: npt.NDArray[np.int64]
    zeros: int
    subnormals: int
    infinities: int
    nans: int

    @property
    def values(self) -> int:
        apart = self.zeros + self.subnormals + self.infinities + self.nans
        return int(self.counts.sum()) + apart


def exponents(x: Floats) -> Exponents:
    """Return the histogram of exponents of float32 values, of any shape."""
    bits = _floats("exponents", x).view(np.uint32)
    counts = np.bincount(bits >> 23 & 0xFF, minlength=256)
    no_fraction = bits << 9 == 0
    zeros, infinities = (int((no_fraction & (bits >> 23 & 0xFF == e)).sum()) for e in (0, 255))
    others = int(counts[0]) - zeros, infinities, int(counts[255]) - infinities
    return Exponents(counts[1:255].astype(np.int64), zeros, *others)


class ErrorNorms(NamedTuple):
    """The distance of values from exact ones; all NaN if there is nothing to compare with.

    relative: ||found - exact|| / ||exact||; largest: max|found - exact| / max|exact|
    """

    relative: float
    largest: float

    @property
    def snr_db(self) -> float:
        """Power of the exact values over that of the differences, in dB; infinite if equal."""
        return -20 * math.log10(self.relative) if self.relative else math.inf


UNKNOWN = ErrorNorms(math.nan, math.nan)


def error(found: Array, exact: Array) -> ErrorNorms:
    """Return the error of values in float64, of any shape: UNKNOWN for zeros, NaN and infinity.

    found, exact: of one shape. Raises ValueError for others.
    """
    if found.shape != exact.shape:
        raise ValueError(f"error: found of {found.shape}, exact of {exact.shape}: must be the same")
    whole = exact.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        wrong = found.astype(np.float64).reshape(-1) - whole
    largest = float(np.abs(whole).max(initial=0.0))
    if not (0 < largest < math.inf) or not np.isfinite(wrong).all():
        return UNKNOWN
    wrong /= largest  # so that squares neither overflow nor underflow
    whole /= largest
    # By pairs, which is the same for any number of threads
    relative = math.sqrt(np.square(wrong).sum() / np.square(whole).sum())
    return ErrorNorms(relative, float(np.abs(wrong).max()))


@dataclass(frozen=True)
class Rounded:
    """Values of a format, and counts of the effects of rounding.

    values: float32, of the shape of the input
    nonzero: how many inputs were finite and not zero. Of these were:
    saturated: beyond the largest number after rounding; underflowed: zero after it
    subnormal: below the format's smallest normal number, and not zero
    nonfinite: inputs that were NaN or infinity
    """

    values: Floats
    nonzero: int
    saturated: int
    underflowed: int
    subnormal: int
    nonfinite: int

    def share(self, count: int) -> float:
        return count / self.nonzero if self.nonzero else math.nan


def rounded(x: Floats, cast: Cast, scaling: str | int = "none", seed: int = 0) -> Rounded:
    """Return x rounded to a format after scaling, and scaled back.

    x: float32, any shape, taken flat for tiles and blocks
    scaling: of SCALINGS: "aps": a power of two by the largest exponent; "tile", "block32",
        "block16": one for so many values, the largest that fits; or the k of 2**k for all values
    seed: selects the random bits of rounding "stochastic"
    Raises TypeError for other values, ValueError for another scaling or k.
    """
    flat, fmt = _floats("rounded", x), cast.fmt
    shared = SHARED.get(scaling) if isinstance(scaling, str) else None
    if shared is None:
        shifts = np.full(tiles(flat.size), _shift(flat, cast, scaling) + SHIFT_BIAS, np.uint8)
    else:
        shifts = np.empty(shift_count(flat.size, shared), np.uint8)
    words = np.empty(packed_bytes(flat.size, fmt.bits), np.uint8)
    counts = np.zeros((tiles(flat.size), 3), np.uint32)
    key = random_key(seed)
    cpu.encode_tiles(flat, cast, words, shifts, fit=shared is not None, key=key, counts=counts)
    values = np.empty(flat.size, np.float32)
    cpu.decode_tiles(words, shifts, fmt, values)
    magnitudes = cpu.unpack(words, fmt.bits, flat.size) & np.uint32((1 << (fmt.bits - 1)) - 1)
    least_normal = 0 if isinstance(fmt, TableFormat) else 1 << fmt.man  # tables have none
    subnormal = (magnitudes > 0) & (magnitudes < least_normal)
    saturated, underflowed, nonfinite = (int(each) for each in counts.sum(0, dtype=np.int64))
    return Rounded(
        values.reshape(x.shape),
        int(np.count_nonzero(flat)) - nonfinite,
        saturated,
        underflowed,
        int(subnormal.sum()),
        nonfinite,
    )


def _shift(flat: Floats, cast: Cast, scaling: str | int) -> int:
    """Return the k of all values."""
    fmt = cast.fmt
    if isinstance(scaling, int):
        if not fmt.shift_min <= scaling <= fmt.shift_max:
            raise ValueError(
                f"rounded: scaling={scaling}: {fmt.name} allows {fmt.shift_min}..{fmt.shift_max}"
            )
        return scaling
    if scaling not in SCALINGS:
        raise ValueError(f"rounded: scaling={scaling!r}: {suggest(scaling, SCALINGS)}")
    finite = flat[np.isfinite(flat)]
    largest = int(cpu.amax_tiles(finite).max(initial=0))
    return aps_shift(largest, fmt, 1, "none") if scaling == "aps" else 0


class SumWay(NamedTuple):
    """A way to sum over ranks: an algorithm of the all-reduce, and how partial sums are kept."""

    algorithm: str
    accumulate: str


ANY = "any"  # algorithm: exact sums are the same in all
WAYS = (
    *(SumWay(name, each) for name, row in SCHEDULES.items() for each in row.accumulates),
    SumWay(ANY, EXACT),
)


def sum_error(
    rows: Sequence[Floats],
    wire: str,
    way: SumWay,
    scaling: str,
    segments: Sequence[Segment] | None = None,
    **options: Any,
) -> ErrorNorms:
    """Return the error of the sum over ranks, as in a training on so many ranks.

    rows: float32, of one shape, a contribution for each rank
    wire, scaling, segments, options: see cpdhpc.allreduce
    UNKNOWN if a value is not finite, or overflows. Raises ValueError for combinations that do not
    fit, for example exact sums of too wide a range.
    """
    algorithm = "ring" if way.algorithm == ANY else way.algorithm
    method = Allreduce(wire, algorithm, scaling, way.accumulate, **options)
    if not all(np.isfinite(row).all() for row in rows):
        return UNKNOWN
    exact = np.asarray(np.sum(rows, axis=0, dtype=np.float64))
    try:
        done = method.run(Loopback(len(rows)), list(rows), segments=segments)
    except NonFiniteGradient:  # it is too large for the wire
        return UNKNOWN
    return error(done.arrays[0], exact)


def product_error(a: Floats, b: Floats, **how: Any) -> ErrorNorms:
    """Return the error of cpdhpc.torch.precision.matmul(a, b, **how) against a @ b in float64."""
    return error(matmul(a, b, **how), a.astype(np.float64) @ b.astype(np.float64))


def _floats(function: str, x: Array) -> Floats:
    """Return x flat. Raises TypeError unless it is a float32 array."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        came = f"{type_name(x)} of {getattr(x, 'dtype', None)}"
        raise TypeError(f"{function}: x is {came}: must be a NumPy array of float32")
    return np.ascontiguousarray(x).reshape(-1)


KIND = "replay"  # of the file of results
SUMMED = 64  # tiles of a rank's gradients that are summed at most, evenly spread
SEEN = 3  # iterations whose sums and products are computed, evenly spread
OUTPUTS = 16  # rows and columns of a product that are computed at most, evenly spread
ORDERS: dict[str, dict[str, Any]] = {  # of the sums of products -> arguments of matmul
    "ascending": {},
    "pairwise": {"order": "pairwise"},
    "chunks of 64": {"chunk": 64},
    "Kahan": {"kahan": True},
}
PADDINGS = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@dataclass(frozen=True)
class Question:
    """The options of a replay of a recording.

    formats, scalings: for rounding tensors and summing gradients
    ranks: over how many the gradients are summed; empty: 2, 4, ... up to those that were recorded
    accumulates: formats in which products are summed
    Raises ConfigError, with the option of the command, for an unknown name, an empty list of
    names, and a number of ranks below 1.
    """

    formats: tuple[str, ...] = ("e4m3", "e5m2")
    scalings: tuple[str, ...] = ("none", "aps", "tile")
    ranks: tuple[int, ...] = ()
    accumulates: tuple[str, ...] = ("e5m10", "e6m9", "bf16", "e5m5")

    def __post_init__(self) -> None:
        for option in ("formats", "scalings", "accumulates"):
            if not getattr(self, option):
                raise ConfigError(f"precision replay: --{option}: is empty: give one or more")
        for count in self.ranks:
            if count < 1:
                raise ConfigError(f"precision replay: --ranks {count}: must be 1 or more")
        try:
            found = {name: parse_format(name) for name in (*self.formats, *self.accumulates)}
        except ValueError as problem:
            raise ConfigError(f"precision replay: {problem}") from None
        for name in self.accumulates:
            if not isinstance(found[name], FloatFormat):
                raise ConfigError(f"precision replay: --accumulates {name}: should be like e5m10")
        for scaling in self.scalings:
            if scaling not in SCALINGS:
                known = ", ".join(SCALINGS)
                raise ConfigError(f"precision replay: --scalings {scaling}: known are {known}")


class Answers(NamedTuple):
    """Groups of labelled arrays for store.write, and the omitted results, with reasons."""

    groups: dict[str, dict[str, Variable]]
    left_out: list[str]


def replay(recorded: Recorded, question: Question) -> Answers:
    """Return the effects of formats, sums and products on the tensors of a recording.

    Raises ConfigError if the recording is empty.
    """
    if not recorded.tensors:
        raise ConfigError(f"{recorded.file}: holds no iteration yet")
    left_out = list[str]()
    groups = {"exponents": _histograms(recorded), "formats": _ranges(question)}
    groups["rounding"] = _rounding(recorded, question)
    if summed := _sums(recorded, question, left_out):
        groups["sums"] = summed
    if multiplied := _products(recorded, question, left_out):
        groups["products"] = multiplied
    return Answers(groups, list(dict.fromkeys(left_out)))


def _table(
    recorded: Recorded,
    further: tuple[tuple[str, Sequence[Any] | Array, str], ...],
    columns: dict[str, str],
    rows: Callable[[Array], dict[str, Any]],
    dtype: Any = np.float64,
) -> dict[str, Variable]:
    """Return columns by tensor, iteration and further labels, computed by rows from values.

    further: name, labels and long name of the axes after these; columns: long name by name
    """
    tensors = list(dict.fromkeys((t.kind, t.name) for t in recorded.tensors))
    iterations = recorded.iterations
    dims = ("tensor", "iteration", *(name for name, _, _ in further))
    shape = len(tensors), len(iterations), *(len(labels) for _, labels, _ in further)
    missing = -1 if dtype is np.int64 else math.nan
    found = {
        name: np.full(shape[:2] if name in WHOLE else shape, missing, dtype) for name in columns
    }
    for each in recorded.tensors:
        at = tensors.index((each.kind, each.name)), iterations.index(each.iteration)
        for name, value in rows(each.read()).items():
            found[name][at] = value
    labels = (
        ("tensor", [" ".join(each) for each in tensors], "tensor"),
        ("iteration", iterations, "iteration, from 0"),
        *further,
    )
    return {name: Variable((name,), values, text) for name, values, text in labels} | {
        name: Variable(dims[: values.ndim], values, columns[name])
        for name, values in found.items()
    }  # fmt: skip


WHOLE = ("zeros", "subnormals", "infinities", "nans")  # columns without an axis of exponents


def _histograms(recorded: Recorded) -> dict[str, Variable]:
    columns = {
        "count": "normal float32 values with floor(log2|x|) = exponent; -1: not recorded",
        "zeros": "values that are zero",
        "subnormals": "values that are subnormal in float32",
        "infinities": "values that are infinite",
        "nans": "values that are NaN",
    }

    def rows(x: Array) -> dict[str, Any]:
        of = exponents(x)
        return {"count": of.counts} | {name: getattr(of, name) for name in WHOLE}

    axis = ("exponent", np.arange(LOWEST, HIGHEST + 1), "exponent of a power of two")
    return _table(recorded, (axis,), columns, rows, np.int64)


def _ranges(question: Question) -> dict[str, Variable]:
    formats = [parse_format(name) for name in question.formats]
    by = ("format",)
    lowest = np.log2([fmt.smallest for fmt in formats])
    return {
        "format": Variable(by, question.formats, "number format"),
        "bits": Variable(by, [fmt.bits for fmt in formats], "bits of a value"),
        "lowest": Variable(by, lowest, "exponent of the smallest positive number"),
        "normal": Variable(by, [fmt.emin for fmt in formats], "of the smallest normal one"),
        "highest": Variable(by, [fmt.top for fmt in formats], "of the largest number"),
    }


def _rounding(recorded: Recorded, question: Question) -> dict[str, Variable]:
    columns = {
        "underflowed": "share of non-zero values that become zero",
        "saturated": "share of non-zero values beyond the largest number",
        "subnormal": "share of non-zero values that become subnormal",
        "relative_error": "||rounded - x|| / ||x||",
        "largest_error": "max|rounded - x| / max|x|",
        "snr_db": "power of x over that of the error, in dB",
    }
    casts = [Cast(parse_format(name)) for name in question.formats]

    def rows(x: Array) -> dict[str, Any]:
        found = {name: np.empty((len(casts), len(question.scalings))) for name in columns}
        for i, j in np.ndindex(len(casts), len(question.scalings)):
            done = rounded(x, casts[i], question.scalings[j])
            wrong = error(done.values, x)
            for name in ("underflowed", "saturated", "subnormal"):
                found[name][i, j] = done.share(getattr(done, name))
            found["relative_error"][i, j], found["largest_error"][i, j] = wrong
            found["snr_db"][i, j] = wrong.snr_db
        return found

    further = (
        ("format", question.formats, "number format"),
        ("scaling", question.scalings, "how values are brought into its range"),
    )
    return _table(recorded, further, columns, rows)


def _spread(count: int, most: int) -> Array:
    """Return at most so many of 0..count - 1, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _seen(recorded: Recorded) -> list[int]:
    iterations = recorded.iterations
    return [iterations[i] for i in _spread(len(iterations), SEEN)]


def _sums(
    recorded: Recorded, question: Question, left_out: list[str]
) -> dict[str, Variable] | None:
    """Return the errors of sums over ranks of all recorded gradients, as one bucket."""
    gradients = [each for each in recorded.tensors if each.kind == "gradients"]
    most = min((each.shape[0] for each in gradients), default=0)
    counts = question.ranks or tuple(1 << i for i in range(1, most.bit_length()) if 1 << i <= most)
    for count in counts:
        if count > most:
            left_out.append(f"sums over {count} ranks: gradients of {most} were recorded")
        elif count == 1:
            left_out.append("sums over 1 rank: nothing is added")
    counts = tuple(count for count in counts if 2 <= count <= most)
    ways = [way for way in WAYS if way.algorithm not in ("hier", "gather")]  # these equal direct
    if not counts:
        return None
    iterations = _seen(recorded)
    shape = len(iterations), len(question.formats), len(question.scalings), len(ways), len(counts)
    found = np.full(shape, np.nan)
    for i, iteration in enumerate(iterations):
        rows, segments = _bucket([each for each in gradients if each.iteration == iteration])
        for at in np.ndindex(shape[1:]):
            wire, scaling = question.formats[at[0]], question.scalings[at[1]]
            way, count = ways[at[2]], counts[at[3]]
            try:
                wrong = sum_error(rows[:count], wire, way, scaling, segments)
            except ValueError as problem:
                left_out.append(f"sums, {', '.join(way)}: {problem}")
                continue
            found[(i, *at)] = wrong.relative
    labels: dict[str, tuple[Sequence[Any], str]] = {
        "iteration": (iterations, "iteration, from 0"),
        "format": (question.formats, "format on the wire"),
        "scaling": (question.scalings, "how values are brought into its range"),
        "way": ([", ".join(way) for way in ways], "algorithm, how partial sums are kept"),
        "ranks": (counts, "number of ranks"),
    }
    variables = {name: Variable((name,), *each) for name, each in labels.items()}
    text = "||sum - exact|| / ||exact||, all layers together"
    return variables | {"relative_error": Variable(tuple(labels), found, text)}


def _bucket(gradients: Sequence[Tensor]) -> tuple[list[Array], tuple[Segment, ...]]:
    """Return the gradients of each rank as a bucket of whole tiles, at most SUMMED, with layers."""
    arrays = [each.read() for each in gradients]
    layers = [each.reshape(len(each), -1) for each in arrays]
    share = min(1.0, SUMMED / sum(tiles(each.shape[1]) for each in layers))
    parts = [each[:, _tiles_kept(each.shape[1], share)] for each in layers]
    names, shapes = (each.name for each in gradients), ((p.shape[1],) for p in parts)
    bucket, ranks = Bucket(tuple(names), tuple(shapes), TILE), min(map(len, parts))
    rows = [bucket.flatten([each[rank] for each in parts]) for rank in range(ranks)]
    return rows, bucket.segments


def _tiles_kept(values: int, share: float) -> Array:
    """Return the indices of the values in a share of the tiles, at least one, evenly spread."""
    some = _spread(tiles(values), max(1, int(share * tiles(values))))
    places = (some[:, None] * TILE + np.arange(TILE)).reshape(-1)
    return places[places < values]


class Operands(NamedTuple):
    """Operands of one of a layer's three products; a: at most OUTPUTS rows, b: columns."""

    a: Array
    b: Array


def _products(
    recorded: Recorded, question: Question, left_out: list[str]
) -> dict[str, Variable] | None:
    """Return the errors of the three products of layers that are linear or convolutions."""
    iterations, rows = _seen(recorded), list[tuple[str, Array, Array]]()
    for name, layer in recorded.layers.items():
        for product in PRODUCTS:
            errors = np.full((len(iterations), len(question.accumulates), len(ORDERS)), np.nan)
            terms = np.zeros(len(iterations), np.int64)
            for i, iteration in enumerate(iterations):
                of = _Layer(layer, partial(tensor_of, recorded, iteration, name))
                try:
                    operands = PRODUCTS[product](of)
                except Missing as why:
                    left_out.append(f"{product} of {name or '(model)'}: {why}")
                    break
                terms[i] = operands.a.shape[1]
                errors[i] = _errors(operands, question.accumulates)
            else:
                rows.append((f"{name or '(model)'}, {product}", terms, errors))
    if not rows:
        return None
    labels: dict[str, tuple[Sequence[Any], str]] = {
        "product": ([name for name, _, _ in rows], "layer, and which of its products"),
        "iteration": (iterations, "iteration, from 0"),
        "accumulate": (question.accumulates, "format of partial sums"),
        "order": ([*ORDERS], "order of the sums"),
    }
    text = "||product - exact|| / ||exact|| of at most 16 x 16 of its values"
    return {name: Variable((name,), *each) for name, each in labels.items()} | {
        "terms": Variable(("product", "iteration"), [n for _, n, _ in rows], "summed products"),
        "relative_error": Variable(tuple(labels), [each for _, _, each in rows], text),
    }


def _errors(operands: Operands, accumulates: Iterable[str]) -> list[list[float]]:
    finite = all(np.isfinite(each).all() for each in operands)
    return [
        [
            product_error(*operands, accumulate=name, **how).relative if finite else math.nan
            for how in ORDERS.values()
        ]
        for name in accumulates
    ]


class Missing(Exception):
    """A missing part of a product."""


def operands(layer: dict[str, Any], read: Callable[[str], Array]) -> dict[str, Operands]:
    """Return some rows and columns of a layer's products, by name in PRODUCTS.

    layer: its type and geometry; read: its tensor of a kind. Raises Missing if its products are
    unknown, or read does.
    """
    of = _Layer(layer, read)
    return {name: take(of) for name, take in PRODUCTS.items()}


def tensor_of(recorded: Recorded, iteration: int, layer: str, kind: str) -> Array:
    """Return a tensor of a layer for its products. Raises Missing if it is not there whole."""
    name = f"{layer}.weight".lstrip(".") if kind == "weights" else layer
    found = recorded.by_name.get((iteration, kind, name))
    if found is None:
        raise Missing(f"its {kind} were not recorded")
    if found.is_thinned and kind != "weights":
        raise Missing(f"rows of its {kind} were left out")
    return found.read()


@dataclass(frozen=True)
class _Layer:
    """A layer as products of matrices: convolutions by the patches of their inputs, first group.

    layer: type and geometry; read: the tensor of a kind. Raises Missing if there is none.
    """

    layer: dict[str, Any]
    read: Callable[[str], Array]

    @cached_property
    def spatial(self) -> int:
        """Number of spatial axes, 0 of a linear layer. Raises Missing for other layers."""
        kind = str(self.layer["type"])
        if "kernel_size" in self.layer and "Conv" in kind and "Transpose" not in kind:
            return len(self.layer["kernel_size"])
        if "kernel_size" not in self.layer and "groups" not in self.layer and "Linear" in kind:
            return 0
        raise Missing(f"a layer of type {kind} has no products that are known")

    @cached_property
    def groups(self) -> int:
        return int(self.layer.get("groups", 1))

    @cached_property
    def weights(self) -> Array:
        """float32[outputs, terms], of the first group."""
        self.spatial  # noqa: B018 - it refuses other layers
        whole = self.read("weights")
        return whole[: max(1, len(whole) // self.groups)].reshape(-1, math.prod(whole.shape[1:]))

    @cached_property
    def entered(self) -> Array:
        """float32[samples, terms]."""
        x = self.read("activations")
        if not self.spatial:
            return x.reshape(-1, x.shape[-1])
        return _patches(x[:, : x.shape[1] // self.groups], self.layer)

    @cached_property
    def left(self) -> Array:
        """float32[samples, outputs], gradients of the layer's output."""
        errors = self.read("errors")
        if not self.spatial:
            return errors.reshape(-1, errors.shape[-1])
        errors = errors[:, : errors.shape[1] // self.groups]
        return np.moveaxis(errors, 1, -1).reshape(-1, errors.shape[1])


def _patches(x: Array, layer: dict[str, Any]) -> Array:
    """Return the patch at each place of a convolution of float32[samples, channels, *space]."""
    size, stride, dilation = (layer[key] for key in ("kernel_size", "stride", "dilation"))
    padding = layer["padding"]
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        ends = [(each // 2, each - each // 2) for each in whole]
    else:
        ends = [(0, 0)] * len(size) if padding == "valid" else [(each, each) for each in padding]
    mode: Any = PADDINGS[layer["padding_mode"]]
    padded = np.pad(x, [(0, 0), (0, 0), *ends], mode)
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, size, strict=True))
    space = tuple(range(2, 2 + len(size)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, space)
    steps = (*(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation))
    windows = windows[(slice(None), slice(None), *steps)]
    places = np.moveaxis(windows, 1, 1 + len(size))  # channels after the places
    return np.ascontiguousarray(places).reshape(math.prod(places.shape[: 1 + len(size)]), -1)


def _operands(a: Array, b: Array) -> Operands:
    """Return some rows of a and columns of b. Raises Missing if their shapes do not fit."""
    if a.shape[1] != b.shape[0] or not a.size or not b.size:
        raise Missing(f"matrices of {a.shape} and {b.shape} do not fit each other")
    rows, columns = _spread(a.shape[0], OUTPUTS), _spread(b.shape[1], OUTPUTS)
    return Operands(np.ascontiguousarray(a[rows]), np.ascontiguousarray(b[:, columns]))


PRODUCTS: dict[str, Callable[[_Layer], Operands]] = {
    "forward": lambda of: _operands(of.entered, of.weights.T),
    "input gradient": lambda of: _operands(of.left, of.weights),
    "weight gradient": lambda of: _operands(of.left.T, of.entered),
}
