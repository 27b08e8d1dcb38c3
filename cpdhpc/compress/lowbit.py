"""LowBit: gradients are sent in a small number format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal
from zlib import crc32

import numpy as np

from ..collectives.allreduce import Allreduce
from ..collectives.method import CHOSEN, Machine, Reduced, Segment, Shifts, configured, shift_bytes
from ..collectives.rank_program import NO_KEY
from ..errors import reworded
from ..formats import (
    SHARED,
    SHIFT_BIAS,
    TILE,
    Cast,
    Overflow,
    Rounding,
    TableFormat,
    TwoScales,
    packed_bytes,
    shift_count,
    tiles,
)
from ..methods import USUAL, suggest
from ..ops import backend_of, placed, to_host
from ..options import Allowed
from ..randomness import random_key
from .base import (
    LOSSES,
    RESIDUAL,
    Aggregator,
    Array,
    Column,
    Context,
    Mean,
    machine_of_auto,
    raise_unless_finite,
)
from .bucket import Bucket
from .memory import keep, with_residuals


@dataclass(frozen=True)
class LayerWire:
    """How the gradients of some layers travel; None means as those of the other layers."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    wire: str
    scaling: str | None = None
    accumulate: str | None = None
    rounding: Rounding | None = None
    overflow: Overflow | None = None
    random_bits: int | None = None
    headroom: str | None = None

    @classmethod
    def of(cls, given: Any) -> Any:
        """Return the row for the name of a wire; return anything else unchanged."""
        return cls(given) if isinstance(given, str) else given


@dataclass(frozen=True)
class LowBit(Aggregator):
    """The mean of gradients that are rounded to a format before they travel.

    The options are those of cpdhpc.allreduce; the file of a machine is read once. Raises ValueError
    if one is unknown or two exclude each other.
    rounding: as formats.Cast; default: "stochastic" for wire "ternary", as "nearest" keeps only the
        largest values of a layer and trainings diverge; else "nearest"
    error_feedback: the rounding error of a rank's own gradient is added to its next one; errors of
        partial sums are not (accumulate "float32" and "exact" have none). The rounding must be
        "nearest": a stochastic error may be larger than the value, and residuals could grow
        without bound
    layers: another wire for some layers, by patterns as "conv*" of the names of parameters or of
        their modules: its name, or a table {wire, scaling, accumulate, rounding, overflow,
        random_bits, headroom}; if several patterns match, the last one counts. Layers of one
        wire travel together, with the bits that they would have without the others; "raw" is
        float32 here
    Source: Han, Demmel, You: Auto-precision scaling, arXiv 1911.08907 (scaling "aps"); Karimireddy
    et al.: Error feedback fixes SignSGD and other gradient compression schemes, ICML 2019.
    """

    columns: ClassVar[Mapping[str, Column]] = LOSSES
    align: ClassVar[int] = TILE  # no tile holds values of two layers
    stateless: ClassVar[bool] = True

    aggregator: Literal["lowbit"] = "lowbit"
    wire: str = "e4m3"
    algorithm: str = USUAL
    scaling: str | None = None
    accumulate: str | None = None
    rounding: Rounding | None = None
    overflow: Overflow | None = None
    random_bits: int = 0
    headroom: str = "n"
    machine: Machine | None = None
    error_feedback: bool = False
    layers: Mapping[str, Annotated[LayerWire, Allowed(before=LayerWire.of)]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        machine = machine_of_auto("LowBit", self.algorithm, self.machine)
        object.__setattr__(self, "machine", machine)
        rows = {pattern: LayerWire.of(given) for pattern, given in self.layers.items()}
        object.__setattr__(self, "layers", rows)
        if self.rounding is None:
            object.__setattr__(self, "rounding", self._usual_rounding(self.wire))
        if self.wire == "raw" and not self.layers:
            raise ValueError("LowBit: wire='raw': is the aggregator 'none'")
        for way, pattern in enumerate(("", *self.layers)):
            prefix = f"LowBit: layers[{pattern!r}]: " if way else ""
            try:
                rounding = self._allreduce(way, 0).rounding
            except (TypeError, ValueError) as error:
                raise reworded(error, f"{prefix}{error}") from None
            if self.error_feedback and rounding != "nearest":
                raise ValueError(
                    f"{prefix or 'LowBit: '}rounding={rounding!r}: error_feedback=true needs "
                    "'nearest'"
                )

    def _usual_rounding(self, wire: str) -> Rounding | None:
        """Return the default rounding of a wire."""
        chance = wire == "ternary" and not self.error_feedback
        return "stochastic" if chance else self.rounding or "nearest"

    @cached_property
    def _ways(self) -> list[dict[str, Any]]:
        """The options of the all-reduces: of layers that match no pattern, then of each pattern."""
        common = {"algorithm": self.algorithm, "op": "mean", "machine": self.machine}
        ways = []
        for number, own in enumerate((LayerWire(self.wire), *self.layers.values())):
            row = asdict(own)
            chosen = {name: getattr(self, name) for name in row}
            if number:
                chosen["rounding"] = self._usual_rounding(row["wire"])
            chosen |= {name: value for name, value in row.items() if value is not None}
            ways.append(
                common | ({"wire": "raw", "finite": True} if row["wire"] == "raw" else chosen)
            )
        return ways

    def _allreduce(self, way: int, seed: int) -> Allreduce:
        """Return the all-reduce of a way, a number in _ways."""
        key = way, seed  # of few seeds: one for each bucket
        if key not in self._made:
            self._made[key] = configured(Allreduce, seed=seed, **self._ways[way])
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[int, int], Allreduce]:
        """What _allreduce has returned."""
        return {}

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The first way with the same options as each way."""
        return tuple(self._ways.index(way) for way in self._ways)

    def _groups(self, bucket: Bucket) -> dict[int, list[int]]:
        """Return the indices of the layers of a bucket that travel together, by their way."""
        return _grouped(bucket.names, tuple(self.layers), self._firsts)

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError for a pattern that matches no layer. See Aggregator.check_layers."""
        modules = {name.rpartition(".")[0] for name in names}
        for pattern in self.layers:
            if not any(fnmatchcase(each, pattern) for each in (*names, *modules)):
                known = suggest(pattern, modules - {""} or names)
                raise ValueError(f"LowBit: layers: no layer matches {pattern!r}: {known}")

    @property
    def compares(self) -> bool:
        own = type(self).aggregate is LowBit.aggregate
        return own and not self.layers and not self.error_feedback

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        groups = self._groups(bucket) if self.layers else {0: []}
        if len(groups) == 1:
            return self._mean(next(iter(groups)), gradients, bucket, context, context.outs)
        if self.error_feedback:  # before the first group changes its residuals
            raise_unless_finite(context.world, gradients, bucket)
        flat = np.empty_like(gradients[0]) if context.out is None else context.out
        bucket.clear_gaps(flat)
        shifts = np.full(len(bucket.names), np.nan)
        for way, layers in groups.items():
            part = _part(bucket, layers)
            given = [part.flatten([bucket.views(x)[i] for i in layers]) for x in gradients]
            mean = self._mean(way, given, part, context, None)
            for i, values in zip(layers, part.views(mean.flat), strict=True):
                bucket.views(flat)[i][...] = values
            shifts[layers] = mean.layers["aps_shift"]
        return Mean.finite(flat, {"aps_shift": shifts})

    def _mean(
        self,
        way: int,
        gradients: list[Array],
        bucket: Bucket,
        context: Context,
        outs: list[Array] | None,
    ) -> Mean:
        """Return the mean of a bucket whose layers travel one way, in outs if given. Collective."""
        seed = context.seed
        if way:  # other random numbers than those of the ways before
            low, high = random_key(seed, crc32(b"layers"), way)
            seed = low | high << 32
        method = self._allreduce(way, seed)
        if self.error_feedback and method.fmt is not None:
            reduced = self._run_with_memory(method, gradients, bucket, context, outs)
        else:
            reduced = method.run(
                context.world,
                gradients,
                outs,
                iteration=context.iteration,
                segments=bucket.segments,
                agreed=context.agreed,
            )
        if isinstance(method.fmt, TableFormat) and 0 not in method.fmt.numbers:
            bucket.clear_gaps(reduced.arrays[0])
        shifts: Any = reduced.sent_shifts
        if self.layers and not shifts:  # all parts of a model must have the column
            shifts = np.full(len(bucket.names), np.nan)
        layers = {"aps_shift": np.array(shifts, np.float64)} if len(shifts) else {}
        return Mean.finite(reduced.arrays[0], layers)

    def _run_with_memory(
        self,
        method: Allreduce,
        gradients: list[Array],
        bucket: Bucket,
        context: Context,
        outs: list[Array] | None,
    ) -> Reduced:
        """All-reduce the rounded sums of gradients and residuals. Collective.

        As they are rounded here, the wire carries the contributions without further loss.
        """
        world, segments = context.world, bucket.segments
        wanted = with_residuals(self, gradients, bucket, context)
        if method.algorithm in CHOSEN:
            method = method.chosen(world, wanted)
        shifts = method.shifts(world, wanted, segments)
        sent = [_rounded(x, method, shifts, segments) for x in wanted]
        known = shifts if shifts[0] else None
        reduced = method.run(
            world, sent, outs, iteration=context.iteration, segments=segments, shifts=known
        )
        for x, q in zip(wanted, sent, strict=True):
            backend_of(x).subtract(x, q, x)
        keep(context, bucket, RESIDUAL, wanted)
        return reduced

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Array]:
        """Count the values of a rank's own gradient that encoding loses. See Aggregator.observe.

        For any rounding of the wire, the count is that of rounding to nearest: it is not random.
        """
        if not self.layers:
            return count_losses(gradient, bucket, self._allreduce(0, 0), mean)
        counts = {name: np.zeros(len(bucket.names), np.int64) for name in LOST}
        for way, layers in self._groups(bucket).items():
            method = self._allreduce(way, 0)
            if method.fmt is None:  # float32 loses nothing
                continue
            part, shared = _part(bucket, layers), method.parsed_scaling.kind in SHARED
            shifts = {} if shared else {"aps_shift": mean.layers["aps_shift"][layers]}
            flat = part.flatten([bucket.views(gradient)[i] for i in layers])
            found = count_losses(flat, part, method, Mean(mean.flat, shifts))
            for name in LOST:
                counts[name][layers] = found[name]
        return counts


@lru_cache(maxsize=256)  # called for each bucket in each step
def _grouped(
    names: tuple[str, ...], patterns: tuple[str, ...], ways: tuple[int, ...]
) -> dict[int, list[int]]:
    """Return the indices of layers by way; ways: of no pattern, then of each."""
    groups: dict[int, list[int]] = {}
    for layer, name in enumerate(names):
        module, last = name.rpartition(".")[0], 0
        for number, pattern in enumerate(patterns, 1):
            if fnmatchcase(name, pattern) or fnmatchcase(module, pattern):
                last = number
        groups.setdefault(ways[last], []).append(layer)
    return groups


LOST = "saturated_share", "underflow_share"


def _part(bucket: Bucket, layers: Sequence[int]) -> Bucket:
    """Return the layout of some layers of a bucket."""
    names, shapes = (bucket.names[i] for i in layers), (bucket.shapes[i] for i in layers)
    return Bucket(tuple(names), tuple(shapes), bucket.align)


def _rounded(x: Array, method: Allreduce, shifts: Shifts, segments: Sequence[Segment]) -> Array:
    """Return a rank's contribution to an all-reduce, rounded as the wire does, float32[n]."""
    wire, out = method.payloads, np.empty_like(x)
    used = shift_bytes(shifts[0], segments, x.size, x) if shifts[0] else None
    payload = np.empty_like(x, shape=(wire.size_bytes(x.size),), dtype=np.uint8)
    wire.encode(x, used, NO_KEY, 0, payload)
    wire.decode(payload, used, out)
    return out


def count_losses(
    gradient: Array, bucket: Bucket, method: Allreduce, mean: Mean
) -> Mapping[str, Array]:
    """Return how many values of each layer saturate and underflow in a packed wire, int64[layers].

    mean: its "aps_shift" is the shift of each layer; without it tiles have their own
    """
    assert method.fmt is not None, "wire 'raw' is refused"
    if isinstance(method.fmt, TwoScales):  # a block's scale lets nothing saturate
        lost = (_rounded(gradient, method, ((), ()), []) == 0) & (gradient != 0)
        each = [int(lost[start:stop].sum()) for _, start, stop in bucket.segments]
        return dict(zip(LOST, (np.zeros(len(each), np.int64), np.array(each)), strict=True))
    cast = Cast(method.fmt)
    shifts, flat = mean.layers.get("aps_shift"), gradient
    edges = np.array([*(start // TILE for _, start, _ in bucket.segments), tiles(flat.size)])
    shared = SHARED.get(method.parsed_scaling.kind, TILE)
    stored = np.empty(shift_count(flat.size, shared), np.uint8)
    if shifts is not None:
        stored[:] = np.repeat(shifts.astype(np.int64) + SHIFT_BIAS, np.diff(edges))
    # columns: saturated, underflowed, not finite
    counts = placed(np.zeros((tiles(flat.size), 3), np.uint32), flat)
    words = np.empty_like(flat, shape=(packed_bytes(flat.size, cast.fmt.bits),), dtype=np.uint8)
    fit, encode_tiles = shifts is None, backend_of(flat).encode_tiles
    encode_tiles(flat, cast, words, placed(stored, flat), fit=fit, counts=counts)
    sums = np.zeros((tiles(flat.size) + 1, 2), np.int64)  # before each tile: a layer may be empty
    np.cumsum(to_host(counts)[:, :2], axis=0, out=sums[1:])
    saturated, underflowed = np.diff(sums[edges], axis=0).T
    return dict(zip(LOST, (saturated, underflowed), strict=True))
