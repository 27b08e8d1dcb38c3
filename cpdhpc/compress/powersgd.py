"""PowerSGD: each layer's gradient becomes a product of two thin matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import numpy as np

from ..ops import backend_of, placed, to_host
from ..ops.common import NONFINITE_BITS
from ..options import Allowed
from .base import (
    HALF_ULP,
    RESIDUAL,
    Array,
    Context,
    DenseMessages,
    Mean,
    as_float,
    bits_of_largest,
    check_place,
    checked_mean,
    mean_in_float32,
    raise_unless_finite,
    shared_largest,
)
from .bucket import Bucket
from .memory import empty_mean, give_spare, keep, take_spare
from .momentum import keep_momenta, pushed


@dataclass(frozen=True)
class PowerSgd(DenseMessages):
    """The mean gradient of each layer, approximated by one step of the power method.

    rank: columns of the two matrices; a layer of n x m weights sends rank * (n + m) values
    min_rate: a layer whose compression rate would be smaller travels in float32, as do those of
        one dimension
    warm_start: begin with the second matrix of the last iteration, else with a new random one
    error_feedback: the error is added to a rank's next gradient
    momentum: of the paper's algorithm 2: m = momentum m + mean, and the optimiser, SGD without
        momentum of its own, steps by mean + m; also for layers that travel in float32. 0: only the
        optimiser has momentum; its SGD steps by m, or by mean + momentum m with Nesterov's
    wire, algorithm, scaling: of the all-reduces of both matrices
    Source: Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, algorithms 1 and 2.
    """

    aggregator: Literal["powersgd"] = "powersgd"
    rank: Annotated[int, Allowed(ge=1)] = 2
    min_rate: Annotated[float, Allowed(ge=1)] = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    momentum: Annotated[float, Allowed(ge=0, lt=1)] = 0.0

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        check_place(self, context.world, gradients)
        layers = self._layers(bucket)
        summed = self._with_memory(layers, gradients, bucket, context)
        matrices = {
            i: [x[start:stop].reshape(bucket.shapes[i][0], -1) for x in summed]
            for i, (_, start, stop) in enumerate(bucket.segments)
            if i in layers
        }
        flat = empty_mean(context, bucket, gradients[0])
        dense = [name for i, name in enumerate(bucket.names) if i not in layers]
        mean_in_float32(gradients, bucket, dense, context, flat, self.algorithm)
        second = {i: self._second(i, bucket, context) for i in layers}
        names = {i: bucket.names[i] for i in layers}
        kernels, views = backend_of(flat), bucket.views(flat)
        means = {i: views[i].reshape(matrices[i][0].shape) for i in layers}
        on_rows = {i: placed(rows, flat) for i, rows in second.items()}
        products = self._mean(
            {names[i]: [kernels.row_products(m, on_rows[i]) for m in matrices[i]] for i in layers},
            context,
        )
        first = {i: placed(_orthonormal(to_host(products[names[i]])), flat) for i in layers}
        found = self._mean(
            {names[i]: [kernels.column_products(m, first[i]) for m in matrices[i]] for i in layers},
            context,
        )
        most = [  # elementwise, so identical on all ranks
            kernels.outer(first[i], found[names[i]], mean) for i, mean in means.items()
        ]
        if max(most, default=0) >= NONFINITE_BITS:
            checked_mean(context.world, flat, gradients, bucket)
        momenta = {}
        if self.momentum:
            momenta = pushed(flat, bucket, bucket.names, self.momentum, context)
        ahead = self._ahead(flat, momenta, gradients, bucket, context)
        if self.error_feedback and layers:
            self._keep(summed, matrices, means, max(most), bucket, context)
        elif layers:
            give_spare(context, RESIDUAL, summed)
        for i, name in names.items():
            second[i][:] = to_host(found[name])
        keep_momenta(momenta, context)
        return Mean.finite(ahead)

    def _ahead(
        self,
        flat: Array,
        momenta: Mapping[str, Array],
        gradients: list[Array],
        bucket: Bucket,
        context: Context,
    ) -> Array:
        """Return a mean plus momenta, float32[bucket.size], finite. Collective if it raises."""
        if not momenta:
            return flat
        ahead = flat.copy()
        with np.errstate(over="ignore"):  # checked_mean checks it
            for name, start, stop in bucket.segments:
                x = ahead[start:stop]
                backend_of(x).add(x, momenta[name], x)
        return checked_mean(context.world, ahead, gradients, bucket)

    def _keep(
        self,
        summed: list[Array],
        matrices: Mapping[int, list[Array]],
        means: Mapping[int, Array],
        most: int,
        bucket: Bucket,
        context: Context,
    ) -> None:
        """Keep matrices minus means as residuals. Collective if they may overflow.

        summed: float32[bucket.size] of each hosted rank, of which the matrices are views
        most: the bits of the largest magnitude of the means
        Raises NonFiniteGradient if one overflows, before anything is kept.
        """
        subtract = backend_of(summed[0]).subtract
        with np.errstate(over="ignore"):
            for i, mean in means.items():
                for matrix in matrices[i]:
                    subtract(matrix, mean, matrix)
        if as_float(most)[0] >= HALF_ULP:  # on all ranks or on none
            lost = [np.zeros_like(x) for x in summed]
            for i in means:
                _, start, stop = bucket.segments[i]
                for x, out in zip(summed, lost, strict=True):
                    out[start:stop] = x[start:stop]
            raise_unless_finite(context.world, lost, bucket)
        keep(context, bucket, RESIDUAL, summed, [bucket.names[i] for i in means])

    def _layers(self, bucket: Bucket) -> list[int]:
        """Return the indices of the layers that are compressed."""
        found = []
        for i, shape in enumerate(bucket.shapes):
            n = prod(shape)
            if len(shape) > 1 and n:
                columns = n // shape[0]
                sent = min(self.rank, shape[0], columns) * (shape[0] + columns)
                found += [i] if n >= self.min_rate * sent else []
        return found

    def _with_memory(
        self, layers: list[int], gradients: list[Array], bucket: Bucket, context: Context
    ) -> list[Array]:
        """Return gradients plus residuals of layers, float32[bucket.size]. Collective.

        They are of each hosted rank; the content for other layers is arbitrary.
        Raises NonFiniteGradient if a gradient is not finite. A sum may overflow; then the products
        and their mean are not finite.
        """
        found = take_spare(context, RESIDUAL, bucket.size, gradients) if layers else []
        largest = [0]
        for i, (name, start, stop) in enumerate(bucket.segments):
            if i not in layers:
                largest.append(bits_of_largest([x[start:stop] for x in gradients]))
                continue
            memory = context.state.own(name, RESIDUAL, (stop - start,), like=gradients[0])
            for x, gradient, residual in zip(found, gradients, memory, strict=True):
                sums = backend_of(x).accumulate
                bits = sums(gradient[start:stop], residual, x[start:stop])
                if bits >= NONFINITE_BITS:  # residuals are finite: is it the gradient?
                    bits = bits_of_largest([gradient[start:stop]])
                largest.append(bits)
        shared_largest(context.world, gradients, bucket, as_float(max(largest)))
        return found

    def _second(self, i: int, bucket: Bucket, context: Context) -> Array:
        """Return the second matrix of a layer, float32[rank, m], identical on all ranks."""
        name, start, stop = bucket.segments[i]
        rows = bucket.shapes[i][0]
        columns = (stop - start) // rows
        rank = min(self.rank, rows, columns)

        def draw() -> Array:
            stream = np.random.Philox(np.random.SeedSequence(context.key(f"powersgd {name}")))
            bits = stream.random_raw(rank * columns) >> np.uint64(40)
            return (bits.astype(np.float32) * np.float32(2**-23) - 1).reshape(rank, columns)

        second = context.state.shared(name, "second", draw)
        if not self.warm_start:
            second[:] = draw()
        return second


def _orthonormal(rows: Array) -> Array:
    """Return the rows of float32[rank, n] made orthonormal; a dependent row may become zeros.

    The modified Gram-Schmidt process, in float64 and elementwise, so that no order of additions
    depends on the machine: each rank computes it.
    """
    wide = rows.astype(np.float64)
    for k, row in enumerate(wide):
        for before in wide[:k]:
            row -= (before * row).sum() * before
        norm = np.sqrt(np.square(row).sum())
        row *= 0.0 if norm == 0 else 1 / norm
    return wide.astype(np.float32)
