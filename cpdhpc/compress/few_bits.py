"""Gradients of few bits: TernGrad, QSGD and 1-bit SGD."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..collectives.allreduce import Allreduce, configured
from ..collectives.sparse import allgather
from ..formats import (
    INTEGERS,
    SHIFT_BIAS,
    TILE,
    Cast,
    tiles,
)
from ..ops import backend_of, on_gpu, placed, to_host
from ..ops.payloads import Exact
from ..ops.reference_sparse import MAGNITUDE
from ..world.ranks import Ranks
from .base import (
    Aggregator,
    Array,
    Context,
    Layers,
    Mean,
    blocks,
    check_known,
    check_place,
    mean_in_float32,
    raise_unless_finite,
    shared_largest,
    zeros,
)
from .bucket import Bucket

TRITS = Exact(Cast(INTEGERS["ternary"], "stochastic"), trits=True)
UNIT_SHIFT = 1 + SHIFT_BIAS  # the format's numbers are -2, 0 and 2: those of 2 x are wanted


@dataclass(frozen=True)
class TernGrad(Aggregator):
    """The mean of gradients whose values become -s, 0 or s by chance, without bias.

    clip: values beyond so many standard deviations of their layer are cut to them; 0: none are
    bucket_values: so many values of a layer have an s of their own; 0: a layer has one
    share: the s of all ranks is the largest, so that integers are summed: 2 ranks + 1 levels;
        else each rank keeps its own, and gets the values of all others
    exclude: layers that travel in float32; algorithm: of the all-reduces
    Source: Wen et al.: TernGrad, NIPS 2017: equations 1 to 3 (ternary values), section 3.2
    (sharing), section 3.3 (clipping, scalers by layer).
    """

    aggregator: Literal["terngrad"] = "terngrad"
    clip: Annotated[float, Field(ge=0, le=1e6)] = 2.5
    bucket_values: Annotated[int, Field(ge=0)] = 0
    share: bool = True
    exclude: Layers = ()
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        self._allreduce(seed=0)

    def _allreduce(self, seed: int) -> Allreduce:
        return configured(
            wire="ternary", algorithm=self.algorithm, op="mean", rounding="stochastic", seed=seed
        )

    def check_layers(self, names: Collection[str]) -> None:
        """See Aggregator.check_layers."""
        check_known("TernGrad.exclude", self.exclude, names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        ends = self._ends(bucket)
        check_place(self, context.world, gradients, ends.size)
        clipped = [self._clipped(gradient, bucket) for gradient in gradients]
        scalers = self._scalers(clipped, ends, bucket, context.world, gradients)
        for x, scaler in zip(clipped, scalers, strict=True):  # now -1 to 1
            divisors = np.where(scaler == 0, np.float32(1), scaler)
            for part in blocks(x):
                backend_of(x).divide_runs(x[part], divisors, ends, x[part], part.start)
        if self.share:
            method = self._allreduce(context.seed)
            flat = method.run(context.world, clipped, iteration=context.iteration).arrays[0]
            for part in blocks(flat):
                backend_of(flat).multiply_runs(flat[part], scalers[0], ends, flat[part], part.start)
        else:
            flat = self._mean_of_own(clipped, scalers, ends, context)
        mean_in_float32(gradients, bucket, self.exclude, context, flat, self.algorithm)
        return Mean(flat)

    def _ends(self, bucket: Bucket) -> Array:
        """Return where the values that have a scaler each end, int64[scalers], in order."""
        found: list[int] = []
        for _, start, stop in bucket.segments:
            whole = self.bucket_values or max(stop - start, 1)
            found += [min(at + whole, stop) for at in range(start, stop, whole)]
        return np.array(found, np.int64)

    def _clipped(self, gradient: Array, bucket: Bucket) -> Array:
        """Return a copy of a gradient, cut to its layers' deviations; zeros where excluded."""
        out = gradient.copy()
        for name, start, stop in bucket.segments:
            x = out[start:stop]
            if name in self.exclude:
                x[...] = 0
            elif self.clip and x.size:
                with np.errstate(invalid="ignore"):  # of infinity: the scaler will show it
                    limit = np.float32(self.clip * _deviation(x))
                _cut(x, limit)
        return out

    def _scalers(
        self,
        clipped: list[Array],
        ends: Array,
        bucket: Bucket,
        world: Ranks,
        gradients: list[Array],
    ) -> list[Array]:
        """Return the largest values of each hosted rank, or of all ranks. Collective."""
        own = [_maxima(x, ends) for x in clipped]
        largest = shared_largest(world, gradients, bucket, np.max(own, axis=0))
        return [largest] * len(own) if self.share else own

    def _mean_of_own(
        self, clipped: list[Array], scalers: list[Array], ends: Array, context: Context
    ) -> Array:
        """Return the mean of ternary values with scalers by rank, added in the order of ranks."""
        world, n, payloads = context.world, clipped[0].size, []
        shifts = placed(np.full(tiles(n), UNIT_SHIFT, np.uint8), clipped[0])
        for rank, x in zip(world.hosted, clipped, strict=True):
            payload = np.empty_like(x, shape=(TRITS.size_bytes(n),), dtype=np.uint8)
            TRITS.encode(x, shifts, context.key("ternary", rank), 0, payload)
            payloads.append(to_host(payload))
        scales, total = allgather(world, scalers), zeros(n, clipped[0])
        return decoded_mean(TRITS, shifts, allgather(world, payloads), scales, ends, total)


def _deviation(x: Array) -> float:
    """Return x.std(dtype=np.float64) of float32[n], the same bits, without arrays as long as x."""
    kernels = backend_of(x)
    mean = kernels.row_sums(x.reshape(1, -1))[0] / x.size
    return float(np.sqrt(kernels.square_sum(x, mean) / x.size))


def _cut(x: Array, limit: np.float32) -> None:
    """Cut float32[n] to +-limit; where that is not finite, nor is x, and it stays so."""
    if on_gpu(x):  # whose minimum of floats makes zeros of subnormal numbers
        if np.isfinite(limit):
            bits = x.view(np.uint32)
            sign = bits & np.uint32(~MAGNITUDE)
            bits[...] = np.minimum(bits & np.uint32(MAGNITUDE), limit.view(np.uint32)) | sign
        return
    for part in blocks(x):
        np.clip(x[part], -limit, limit, out=x[part])


def _maxima(x: Array, ends: Array) -> Array:
    """Return the largest magnitude of each run of float32[n], float32[runs]; NaN where one is."""
    starts = np.concatenate([[0], ends])
    if on_gpu(x):
        return _maxima_on_gpu(x, starts)
    found = np.zeros(ends.size, np.float32)
    for part in blocks(x):
        first, last = np.searchsorted(ends, [part.start, part.stop - 1], side="right")
        own = found[first : last + 1]
        inside = np.maximum(starts[first : last + 1] - part.start, 0)
        np.maximum(own, np.maximum.reduceat(np.abs(x[part]), inside), out=own)
    return found


def _maxima_on_gpu(x: Array, borders: Array) -> Array:
    """Return _maxima of a CuPy array: of equally long runs those of all, of a lone one by tiles."""
    found, sizes = [], np.diff(borders)
    first_of_equals = np.flatnonzero(np.diff(sizes, prepend=-1, append=-1))
    for first, behind in pairwise(first_of_equals):
        part = x[borders[first] : borders[behind]]
        if behind - first == 1:
            rows = backend_of(x).amax_tiles(part).reshape(1, -1)
        else:
            rows = part.view(np.uint32).reshape(behind - first, -1) & np.uint32(MAGNITUDE)
        found.append(to_host(rows.max(axis=1)))
    return np.concatenate([np.empty(0, np.uint32), *found]).view(np.float32)


@dataclass(frozen=True)
class Qsgd(Aggregator):
    """The mean of gradients rounded by chance to levels of their bucket's norm, without bias.

    levels: s: a value becomes the norm times -s/s, ..., 0, ..., s/s
    bucket_values: so many values have a norm of their own
    A value travels in ceil(log2(2 s + 1)) bits, without the paper's Elias codes; every rank gets
    the values of all, and adds them in the order of ranks.
    Source: Alistarh et al.: QSGD, NIPS 2017, equations 3.1 to 3.3; section 4 (buckets).
    """

    aggregator: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Field(ge=1, lt=1 << 15)] = 4
    bucket_values: Annotated[int, Field(ge=1)] = 512

    def _wire(self) -> Exact:
        bits = self.levels.bit_length() + 1
        return Exact(
            Cast(INTEGERS[f"int{bits}" if bits > 2 else "ternary"], "stochastic"), bits == 2
        )

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, n, wire = context.world, bucket.size, self._wire()
        starts = np.arange(0, n, self.bucket_values)
        check_place(self, world, gradients, starts.size)
        norms = [self._norms(gradient, starts) for gradient in gradients]
        shared_largest(world, gradients, bucket, np.max(norms, axis=0))
        # Levels are integers: multiples of the format's smallest number.
        shift = int(np.log2(wire.cast.fmt.smallest))
        shifts = placed(np.full(tiles(n), shift + SHIFT_BIAS, np.uint8), gradients[0])
        ends, payloads = np.minimum(starts + self.bucket_values, n), []
        for rank, gradient, norm in zip(world.hosted, gradients, norms, strict=True):
            key, divisors = context.key("levels", rank), np.where(norm == 0, np.float32(1), norm)
            payload = np.empty_like(gradient, shape=(wire.size_bytes(n),), dtype=np.uint8)
            kernels = backend_of(gradient)
            for part in blocks(gradient, TILE):
                x = np.empty_like(gradient[part])
                kernels.divide_runs(gradient[part], divisors, ends, x, part.start)
                kernels.multiply(x, np.float32(self.levels), x)
                words = payload_part(wire, payload, part)
                wire.encode(x, shifts[: tiles(x.size)], key, part.start, words)
            payloads.append(to_host(payload))
        scales = [norm / np.float32(self.levels) for norm in allgather(world, norms)]
        total = zeros(n, gradients[0])
        return Mean(decoded_mean(wire, shifts, allgather(world, payloads), scales, ends, total))

    def _norms(self, gradient: Array, starts: Array) -> Array:
        """Return the 2-norm of each bucket, float32, no smaller than its largest value."""
        squares = np.empty(starts.size)
        for part in blocks(gradient, self.bucket_values):
            own = slice(part.start // self.bucket_values, -(-part.stop // self.bucket_values))
            runs = starts[own] - part.start
            squares[own] = backend_of(gradient).run_sums(gradient[part], runs, "square")
        return np.sqrt(squares).astype(np.float32)


def decoded_mean(
    wire: Exact,
    shifts: Array,
    payloads: Sequence[Array],
    scales: Sequence[Array],
    ends: Array,
    total: Array,
) -> Array:
    """Return the mean of integers times their scales, added onto total in the order of ranks.

    shifts: uint8[tiles], all alike, where total lies; payloads: uint8[bytes] of each rank
    scales: float32[runs] of each rank, of runs that end at ends, int64[runs]
    total: float32[n], zeros at first
    """
    kernels = backend_of(total)
    for part in blocks(total, TILE):
        into = total[part]
        term = np.empty_like(into)
        for payload, scale in zip(payloads, scales, strict=True):
            words = placed(payload_part(wire, payload, part), total)
            wire.decode(words, shifts[: tiles(into.size)], term)
            kernels.multiply_runs(term, scale, ends, term, part.start)
            kernels.add(into, term, into)
        kernels.divide(into, np.float32(len(payloads)), into)
    return total


def payload_part(wire: Exact, payload: Array, part: slice) -> Array:
    """Return where a slice of values, from a whole tile on, lies in a payload."""
    start = wire.size_bytes(part.start)
    return payload[start : start + wire.size_bytes(part.stop - part.start)]


@dataclass(frozen=True)
class OneBit(Aggregator):
    """The mean of gradients whose values are one of two, by their sign.

    The two are the means of the values below 0, and of the others, of an output unit: a row of a
    layer's weights, as torch lays them out. Layers of one dimension travel in float32.
    error_feedback: what is lost is added to a rank's next gradient
    algorithm: of the all-reduce of layers of one dimension
    Source: Seide et al.: 1-bit stochastic gradient descent, Interspeech 2014, section 3.1.
    """

    aggregator: Literal["onebit"] = "onebit"
    error_feedback: bool = True
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        configured(wire="raw", algorithm=self.algorithm, op="mean")

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, flat = context.world, zeros(bucket.size, gradients[0])
        check_place(self, world, gradients)
        raise_unless_finite(world, gradients, bucket)
        coded = [i for i, shape in enumerate(bucket.shapes) if len(shape) > 1 and 0 not in shape]
        messages: list[tuple[list[Array], list[Array]]] = [([], []) for _ in gradients]
        for i in coded:
            name, start, stop = bucket.segments[i]
            memory = context.state.own(name, "residual", (stop - start,), like=flat)
            for (signs, pairs), gradient, residual in zip(messages, gradients, memory, strict=True):
                rows = bucket.shapes[i][0]
                positive, pair = self._encoded(
                    gradient[start:stop].reshape(rows, -1), residual.reshape(rows, -1)
                )
                signs.append(to_host(np.packbits(positive)))
                pairs.append(pair)
        signs_of_all = allgather(world, [_joined(signs, np.uint8) for signs, _ in messages])
        pairs_of_all = allgather(world, [_joined(pairs, np.float32) for _, pairs in messages])
        for sign, pair in zip(signs_of_all, pairs_of_all, strict=True):  # in the order of ranks
            for i in coded:
                _, start, stop = bucket.segments[i]
                rows, size_bytes = bucket.shapes[i][0], -(-(stop - start) // 8)
                bits = np.unpackbits(placed(sign[:size_bytes], flat))
                positive = bits[: stop - start].view(bool)
                _decode_onto(
                    flat[start:stop].reshape(rows, -1), positive.reshape(rows, -1), pair[: 2 * rows]
                )
                sign, pair = sign[size_bytes:], pair[2 * rows :]
        backend_of(flat).divide(flat, np.float32(world.ranks), flat)
        dense = [name for i, name in enumerate(bucket.names) if i not in coded]
        mean_in_float32(gradients, bucket, dense, context, flat, self.algorithm)
        return Mean(flat)

    def _encoded(self, gradient: Array, residual: Array) -> tuple[Array, Array]:
        """Return whether values are not below 0, bool[rows, columns], and float32[2 rows].

        gradient, residual: float32[rows, columns]; what is lost becomes the residual
        """
        positive, pairs = np.empty_like(gradient, bool), np.empty((len(gradient), 2), np.float32)
        kernels = backend_of(gradient)
        for part in _row_blocks(gradient):
            x = kernels.add(gradient[part], residual[part])
            _find_positive(x, positive[part])
            mask = _mask(positive[part])
            pairs[part] = _pairs(x, mask)
            if self.error_feedback:
                kernels.subtract(x, _decoded(mask, pairs[part]), residual[part])
        return positive, pairs.ravel()


def _decode_onto(x: Array, positive: Array, pairs: Array) -> None:
    """Add to x, float32[rows, columns], what signs and float32[2 rows] stand for."""
    for part in _row_blocks(x):
        more = _decoded(_mask(positive[part]), pairs.reshape(-1, 2)[part])
        backend_of(x).add(x[part], more, x[part])


def _row_blocks(x: Array) -> Iterator[slice]:
    columns = x.shape[1]
    return (slice(p.start // columns, p.stop // columns) for p in blocks(x, columns))


def _find_positive(x: Array, out: Array) -> None:
    """Write whether values are not below 0 into out."""
    if on_gpu(x):  # which compares subnormal numbers as zeros
        bits = x.view(np.int32)
        out[...] = (bits >= 0) | (bits == np.int32(-(1 << 31)))  # -0.0
    else:
        np.greater_equal(x, 0, out=out)


def _mask(positive: Array) -> Array:
    """Return int32 with all bits set where positive is true: & takes less time than np.where."""
    mask = positive.astype(np.int32)
    return np.negative(mask, out=mask)


def _pairs(x: Array, mask: Array) -> Array:
    """Return the means of the values below 0 and of the others, NumPy's float32[rows, 2]."""
    counts = -to_host(mask.sum(axis=1, dtype=np.int32))
    bits, row_sums = x.view(np.int32), backend_of(x).row_sums
    above = row_sums((bits & mask).view(np.float32))
    below = row_sums((bits & ~mask).view(np.float32))
    means = (below / np.maximum(x.shape[1] - counts, 1), above / np.maximum(counts, 1))
    return np.stack(means, axis=1).astype(np.float32)


def _decoded(mask: Array, pairs: Array) -> Array:
    """Return what signs and pairs, float32[rows, 2], stand for: float32[rows, columns]."""
    bits = placed(pairs.view(np.int32), mask)
    below, above = bits[:, :1], bits[:, 1:]
    chosen = mask & (below ^ above)
    chosen ^= below
    return chosen.view(np.float32)


def _joined(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
