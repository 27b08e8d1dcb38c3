"""Methods that send few values and keep the others: top-k, random-k, DGC, Strom's, AdaComp.

AdaComp: of each bin of a layer the values that are about its largest, as signs of one scale.

A value that is sent is a code of 8 bits where bins have less than 64 values, else of 16:

    bits   15      14      13 ... 0            7       6       5 ... 0
        +------+-------+------------+       +------+-------+-----------+
        | last | minus |   index    |       | last | minus |   index   |
        +------+-------+------------+       +------+-------+-----------+

index: of the value in its bin; last: the next code is of the next bin. The largest index, which no
bin has, passes over empty bins: one, and as many more as the upper two bits say. Bins behind the
last code are empty too.

    payload: of each layer its scale, float32, and the number of its codes, uint32 | all codes
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from ..ops import backend_of, placed, to_host
from ..ops.reference_sparse import MAGNITUDE
from ..randomness import Key
from .base import (
    Array,
    Column,
    Context,
    DenseMessages,
    Layers,
    Mean,
    blocks,
    check_known,
    zeros,
)
from .bucket import Bucket
from .payload import decode_sparse, encode_sparse
from .sparse import (
    Density,
    LargestValues,
    SparseLayers,
    SparseMessages,
    Warmup,
    count_of,
    density_at,
    exchange,
)


@dataclass(frozen=True)
class TopK(LargestValues):
    """The mean of what each rank sends: the largest values of its gradient and of what waits.

    error_feedback: what is not sent waits, and is added to a rank's next gradient
    Source: Aji, Heafield: Sparse communication for distributed gradient descent, EMNLP 2017;
    Stich, Cordonnier, Jaggi: Sparsified SGD with memory, NeurIPS 2018.
    """

    aggregator: Literal["topk"] = "topk"
    error_feedback: bool = True

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers = SparseLayers(bucket, self.exclude)
        layers.check_place(self, gradients, context)
        waiting = layers.waiting(gradients, context, self.error_feedback, check=False)
        sent, _ = self._send(waiting, layers, context)
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm, sent.values)
        if self.error_feedback:
            layers.keep(waiting, context)
        return Mean(flat, {"sent_share": layers.shares(sent.shares)})


@dataclass(frozen=True)
class RandomK(DenseMessages):
    """The mean of values of each layer that all ranks draw alike, so that no index travels.

    density: share of a layer's values that are sent, one at least
    warmup: densities of the first epochs, one for each
    error_feedback: what is not sent is added to a rank's next gradient; else what is sent is
        multiplied by n / k, so that the mean has no bias
    exclude: layers that travel whole in float32, as do all layers of one dimension
    wire, algorithm, scaling: of the all-reduce of what is sent
    Source: Stich, Cordonnier, Jaggi: Sparsified SGD with memory, NeurIPS 2018 (rand-k).
    """

    columns: ClassVar[Mapping[str, Column]] = SparseMessages.columns

    aggregator: Literal["randomk"] = "randomk"
    density: Density = 0.01
    warmup: Warmup = ()
    error_feedback: bool = True
    exclude: Layers = ()

    def check_layers(self, names: Collection[str]) -> None:
        """See Aggregator.check_layers."""
        check_known("RandomK.exclude", self.exclude, names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers = SparseLayers(bucket, self.exclude)
        layers.check_place(self, gradients, context)
        waiting = layers.waiting(gradients, context, self.error_feedback)
        density = density_at(context.epoch, self.warmup, self.density)
        drawn = {
            name: placed(
                start
                + drawn_alike(context.key(name), count_of(density, stop - start), stop - start),
                waiting[0],
            )
            for name, start, stop in layers.coded.segments
        }
        means = self._mean({name: [x[i] for x in waiting] for name, i in drawn.items()}, context)
        mean, shares = zeros(layers.coded.size, waiting[0]), []
        multiply = backend_of(mean).multiply
        for (name, start, stop), index in zip(layers.coded.segments, drawn.values(), strict=True):
            shares.append(index.size / (stop - start))
            factor = 1.0 if self.error_feedback else (stop - start) / index.size
            mean[index] = multiply(means[name], np.float32(factor))
            for x in waiting:
                x[index] = 0
        flat = layers.mean(mean, waiting, gradients, context, self.algorithm)
        if self.error_feedback:
            layers.keep(waiting, context)
        return Mean(flat, {"sent_share": layers.shares(shares)})


def drawn_alike(key: Key, k: int, n: int) -> Array:
    """Return k of 0..n - 1 by chance, ascending, int64[k]; each choice of k is as likely.

    Numbers are drawn until there are enough different ones: those to take, or those to leave.
    """
    stream = np.random.Philox(np.random.SeedSequence(key))
    taken, few = np.zeros(n, bool), min(k, n - k)
    missing = few
    while missing:
        taken[stream.random_raw(missing) % np.uint64(n)] = True
        missing = few - int(np.count_nonzero(taken))
    return np.flatnonzero(taken == (few == k))


@dataclass(frozen=True)
class Dgc(LargestValues):
    """The mean of the largest values of what each rank's gradients with momentum add up to.

    The optimiser must be SGD without momentum of its own: u = momentum u + gradient, v = v + u, and
    the largest values of v are sent. What travels whole gets its momentum from the mean.
    momentum: of the method, in place of the optimiser's
    masking: set u, too, to 0 where a value is sent, else it goes on
    clip_norm: a rank's gradient of a layer is shortened to this 2-norm times ranks**-0.5; 0: none
    Source: Lin et al.: Deep gradient compression, ICLR 2018: momentum correction, local gradient
    clipping, momentum factor masking, warm-up.
    """

    has_momentum: ClassVar[bool] = True

    aggregator: Literal["dgc"] = "dgc"
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    masking: bool = True
    clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0
    density: Density = 0.001
    warmup: Warmup = (0.25, 0.0625, 0.015, 0.004)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers = SparseLayers(bucket, self.exclude)
        layers.check_place(self, gradients, context)
        clipped = [self._clipped(x, bucket, context) for x in gradients]
        momenta = layers.joined(clipped)
        layers.add(momenta, context, "momentum", self.momentum)
        waiting = SparseLayers(layers.coded).waiting(momenta, context, check=False)
        sent, chosen = self._send(waiting, layers, context)
        flat = layers.mean(sent.mean, waiting, clipped, context, self.algorithm, sent.values)
        for u, indices in zip(momenta, chosen, strict=True):
            if self.masking:
                backend_of(u).clear(u, indices)
        layers.keep(waiting, context)
        layers.keep(momenta, context, "momentum")
        self._push_whole(flat, layers, context)
        return Mean(flat, {"sent_share": layers.shares(sent.shares)})

    def _clipped(self, gradient: Array, bucket: Bucket, context: Context) -> Array:
        """Return a rank's gradient, its layers shortened where they are too long."""
        if not self.clip_norm:
            return gradient
        out, kernels = gradient.copy(), backend_of(gradient)
        limit = self.clip_norm * context.loss_scale / context.world.ranks**0.5
        for x in bucket.views(out):
            norm = np.sqrt(kernels.square_sum(x.reshape(-1)))
            if limit < norm < np.inf:  # what is not finite is left for check
                kernels.multiply(x, np.float32(limit / norm), x)
        return out

    def _push_whole(self, flat: Array, layers: SparseLayers, context: Context) -> None:
        """Give momentum to the mean of the layers that travel whole, alike on all ranks.

        What is shared does not follow the scale of losses, so it is kept without.
        """
        scale, kernels = np.float32(context.loss_scale), backend_of(flat)
        for name, start, stop in layers.bucket.segments:
            if name not in layers.coded.names:
                x = flat[start:stop]
                u = context.state.shared(name, "momentum", partial(np.zeros_like, x), x)
                kernels.multiply(u, np.float32(self.momentum), u)
                kernels.add(u, kernels.divide(x, scale), u)
                kernels.multiply(u, scale, x)


SIGN = "ternary"  # the wire of -1 and 1
ONE = np.float32(1)


@dataclass(frozen=True)
class Strom(SparseMessages):
    """The mean of tau or -tau, where what a rank's gradients add up to is beyond it; else of 0.

    tau: the threshold; what is beyond it stays, and may be sent next time
    Source: Strom: Scalable distributed DNN training using commodity GPU cloud computing,
    Interspeech 2015.
    """

    aggregator: Literal["strom"] = "strom"
    tau: Annotated[float, Field(gt=1e-38, le=1e30, allow_inf_nan=False)] = 0.01

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers, tau = SparseLayers(bucket, self.exclude), np.float32(self.tau * context.loss_scale)
        layers.check_place(self, gradients, context)
        n, waiting = layers.coded.size, layers.waiting(gradients, context, check=False)
        chosen = [_beyond(x, float(tau)) for x in waiting]
        layers.check_largest(waiting, [values for _, values in chosen], context)
        payloads = [encode_sparse(i, np.copysign(ONE, x), n, SIGN) for i, x in chosen]

        def decode(payload: Array) -> tuple[Array, Array]:
            indices, signs = decode_sparse(payload, n, SIGN, waiting[0])
            return indices, backend_of(signs).multiply(signs, tau)

        sent = exchange(context.world, payloads, decode, waiting, layers.coded)
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm, sent.values)
        layers.keep(waiting, context)
        return Mean(flat, {"sent_share": layers.shares(sent.shares)})


def _beyond(x: Array, tau: float) -> tuple[Array, Array]:
    """Return which values are beyond tau, uint32[m], and the values."""
    indices = backend_of(x).select_above(x, tau)
    return indices, backend_of(x).gather(x, indices)


HEAD = np.dtype([("scale", np.float32), ("codes", np.uint32)])  # of a layer
SKIPPED = 4  # empty bins that a code passes over, at most


@dataclass(frozen=True)
class AdaComp(SparseMessages):
    """The mean of those values of each rank that are about the largest of their bin of a layer.

    conv_bin_values: of a bin of weights of three dimensions or more; bin_values: of other weights
    scale: a value is sent where what waits, with the gradient counted so many times, is no less
        than the largest of its bin with the gradient counted once
    The values become signs of one scale a layer, the mean of its bins' largest. What that leaves is
    added to a rank's next gradient. Every rank gets the values of all, added in the order of ranks.
    Source: Chen et al.: AdaComp: adaptive residual gradient compression for data-parallel
    distributed training, AAAI 2018, arXiv 1712.02679; with a mark for the last value of a bin where
    the paper has a second bit for signs.
    """

    aggregator: Literal["adacomp"] = "adacomp"
    conv_bin_values: Annotated[int, Field(ge=1, lt=1 << 14)] = 50
    bin_values: Annotated[int, Field(ge=1, lt=1 << 14)] = 500
    scale: Annotated[float, Field(ge=1, le=1000)] = 2.0

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        layers = SparseLayers(bucket, self.exclude)
        layers.check_place(self, gradients, context)
        coded, waiting = layers.coded, layers.waiting(gradients, context)
        payloads = [
            self._encoded(x, layers.parts(own), coded)
            for x, own in zip(waiting, gradients, strict=True)
        ]
        sent = exchange(
            context.world, payloads, lambda each: self._decoded(each, coded), waiting, coded
        )
        flat = layers.mean(sent.mean, waiting, gradients, context, self.algorithm, sent.values)
        layers.keep(waiting, context)
        return Mean(flat, {"sent_share": layers.shares(sent.shares)})

    def _bins(self, coded: Bucket) -> Iterator[tuple[int, slice]]:
        """Yield how many values a bin of each layer has, and where the layer lies."""
        for shape, (_, start, stop) in zip(coded.shapes, coded.segments, strict=True):
            bin_values = self.conv_bin_values if len(shape) > 2 else self.bin_values
            yield bin_values, slice(start, stop)

    def _encoded(self, x: Array, gradients: Sequence[Array], coded: Bucket) -> Array:
        """Return a rank's payload, uint8[bytes].

        x: float32[coded.size], what waits, the gradients included; gradients: of each layer
        """
        head, codes = np.zeros(len(coded.names), HEAD), []
        for i, (bin_values, part) in enumerate(self._bins(coded)):
            indices, head["scale"][i] = _about_largest(
                x[part], gradients[i], bin_values, np.float32(self.scale - 1)
            )
            chosen = to_host(x[part][placed(indices, x)])
            codes.append(_codes(indices, chosen < 0, bin_values))
            head["codes"][i] = codes[-1].size
        return np.concatenate([each.view(np.uint8) for each in (head, *codes)])

    def _decoded(self, payload: Array, coded: Bucket) -> tuple[Array, Array]:
        """Return the indices in coded, uint32[k], and the values, float32[k], of a payload."""
        end, found = len(coded.names) * HEAD.itemsize, []
        for (bin_values, part), (scale, count) in zip(
            self._bins(coded), payload[:end].view(HEAD), strict=True
        ):
            kind, _ = _coding(bin_values)
            begin, end = end, end + int(count) * kind.itemsize
            indices, is_minus = _places(payload[begin:end].view(kind), bin_values)
            signs = np.array([scale, -scale])
            found.append((indices + part.start, signs[is_minus.view(np.uint8)]))
        indices, values = map(np.concatenate, zip(*found, strict=True))
        return indices.astype(np.uint32), values


def _about_largest(
    x: Array, gradient: Array, bin_values: int, more: np.float32
) -> tuple[Array, np.float32]:
    """Return where x + more * gradient reaches the largest x of its bin, and the mean of those.

    Values of 0 are never chosen, so nothing is of bins of zeros.
    """
    indices, largest, kernels = [], [], backend_of(x)
    for part in blocks(x, bin_values):
        own, rate = x[part], gradient[part]
        if own.size % bin_values:  # the last bin
            short = zeros(-own.size % bin_values, x)
            own, rate = np.concatenate([own, short]), np.concatenate([rate, short])
        with np.errstate(over="ignore"):  # infinity is the largest too
            reach = kernels.multiply(rate, more)
            kernels.add(reach, own, reach)
        magnitudes, reached = (_magnitudes(each, bin_values) for each in (own, reach))
        highest = magnitudes.max(axis=1)
        is_chosen = reached >= highest[:, None]
        is_chosen &= magnitudes != 0
        indices.append(to_host(np.flatnonzero(is_chosen)) + part.start)
        largest.append(to_host(highest).view(np.float32))
    scale = np.concatenate(largest).mean(dtype=np.float64)
    return np.concatenate(indices), np.float32(scale)


def _magnitudes(x: Array, bin_values: int) -> Array:
    """Return the bits of |x|, which compare as they do, by bins: uint32[bins, bin_values]."""
    bits = x.view(np.uint32) & np.uint32(MAGNITUDE)
    return bits.reshape(-1, bin_values)


def _coding(bin_values: int) -> tuple[np.dtype[Any], int]:
    """Return the dtype of codes and how many bits of them are the index."""
    kind = np.dtype(np.uint8 if bin_values < 1 << 6 else np.uint16)
    return kind, 8 * kind.itemsize - 2


def _codes(indices: Array, is_minus: Array, bin_values: int) -> Array:
    """Return the codes of a layer, uint8[codes] or uint16[codes]."""
    kind, index_bits = _coding(bin_values)
    bins = indices // bin_values
    codes = (indices - bins * bin_values).astype(kind)
    codes |= is_minus.astype(kind) << index_bits
    bins_on = np.diff(bins)
    codes[:-1] |= (bins_on != 0).astype(kind) << index_bits + 1
    codes[-1:] |= 1 << index_bits + 1
    behind = np.flatnonzero(bins_on > 1) + 1  # values with empty bins before theirs
    empty = bins_on[behind - 1] - 1
    if bins.size and bins[0]:
        behind, empty = np.append(0, behind), np.append(bins[0], empty)
    passing = np.repeat(behind, -(-empty // SKIPPED))
    if not passing.size:
        return codes
    codes = np.insert(codes, passing, (1 << index_bits + 2) - 1)
    last = behind + np.cumsum(-(-empty // SKIPPED)) - 1  # of those before a value
    codes[last] = (1 << index_bits) - 1 | (empty - 1) % SKIPPED << index_bits
    return codes


def _places(codes: Array, bin_values: int) -> tuple[Array, Array]:
    """Return the indices in the layer and whether values are below 0, of codes."""
    _, index_bits = _coding(bin_values)
    index, upper = codes & (1 << index_bits) - 1, codes >> index_bits
    passing = np.flatnonzero(index == (1 << index_bits) - 1)
    bins_on = upper >> 1
    bins_on[passing] = upper[passing] + 1
    indices = np.cumsum(bins_on, dtype=np.int64)
    indices -= bins_on
    indices *= bin_values
    indices += index
    is_minus = (upper & 1).astype(bool)
    if passing.size:
        return np.delete(indices, passing), np.delete(is_minus, passing)
    return indices, is_minus
