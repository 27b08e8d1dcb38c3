"""ScaleCom: the ranks take turns in choosing the values that are all-reduced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.sparse import broadcast
from ..ops import backend_of, placed, to_host
from ..ops.common import MAGNITUDE
from ..options import Allowed
from .base import Array, Column, Context, DenseMessages, Layers, Mean, blocks, check_known
from .bucket import Bucket
from .sparse import Epochs, OfLayer, SparseMessages, coded_layers

RATE_OF_COST = {196: 25, 128: 50, 0: 400}  # by the least operations per weight; Chen et al.
LARGEST_CHUNK = 1 << 16  # positions have 16 bits at most


@dataclass(frozen=True)
class ScaleCom(DenseMessages):
    """The mean of the values that are the largest of their chunk of a layer on the leading rank.

    The leading rank is iteration modulo ranks. The bytes that a rank sends do not grow with
    the number of ranks. Rounding errors of the wire are not kept.
    rate: one of so many values is sent
    per_chunk: values that are chosen of each rate * per_chunk
    rates: rate of some layers, by name
    costs: of some layers, by name, the floating-point operations of a rank's batch for each
        weight: the rate is 25 from 196 on, 50 from 128 on, and else 400
    beta: factor of a low-pass filter: the share of a value that is not sent that the residual
        takes; usually 1; the paper uses less for learning rates of large batches. Nothing is lost,
        as sent values and residual / beta add up to the gradients, but values are sent 1 / beta
        times as late
    dense_epochs: until then everything is sent
    exclude: layers that travel in float32, as all of one dimension do; in the paper the first one
    wire, algorithm, scaling: of the all-reduce of the values that are sent
    Source: Chen et al.: ScaleCom: scalable sparsified gradient compression for
    communication-efficient distributed training, NeurIPS 2020, arXiv 2104.11125.
    """

    columns: ClassVar[Mapping[str, Column]] = SparseMessages.columns

    aggregator: Literal["scalecom"] = "scalecom"
    rate: Annotated[int, Allowed(ge=1)] = 50
    per_chunk: Annotated[int, Allowed(ge=1)] = 1
    rates: Mapping[str, Annotated[int, Allowed(ge=1)]] = field(default_factory=dict, hash=False)
    costs: Mapping[str, Annotated[float, Allowed(ge=0)]] = field(default_factory=dict, hash=False)
    beta: Annotated[float, Allowed(gt=0, le=1)] = 1.0
    dense_epochs: Epochs = 0.0
    exclude: Layers = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.rates.keys() & self.costs.keys():
            raise ValueError(f"ScaleCom: costs: {name!r} has a rate in rates: must be in one only")
        largest = max(self.rate, *self.rates.values(), *map(_rate_of, self.costs.values()), 0)
        if largest * self.per_chunk > LARGEST_CHUNK:
            raise ValueError(
                f"ScaleCom: per_chunk={self.per_chunk}: chunks have {largest} * per_chunk values: "
                f"must be {LARGEST_CHUNK} at most"
            )

    @property
    def holds_back(self) -> bool:
        return True

    @property
    def most_momentum(self) -> float:
        """See Aggregator.most_momentum: most ranks send values that another one has chosen."""
        return 0.0

    def check_layers(self, names: Collection[str]) -> None:
        for option in ("exclude", "rates", "costs"):
            check_known(f"ScaleCom.{option}", getattr(self, option), names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        is_dense = context.epoch < self.dense_epochs
        layers = coded_layers(self, gradients, bucket, context, is_dense)
        coded, leaders, leader = layers.coded, dict[int, Array](), _leader(context)

        def accumulate(of: OfLayer) -> int:
            sums, kernels = (of.gradient, of.kept, of.x), backend_of(of.x)
            if context.world.hosted[of.row] != leader or self.per_chunk > 1:
                return kernels.accumulate(*sums)
            chunk_values = self._chunk_values(coded.names[of.layer])
            most, leaders[of.layer] = kernels.accumulate_chunks(*sums, chunk_values)
            return most

        waiting = layers.accumulated(accumulate)
        chosen = self._chosen(waiting, leaders, coded, context) if coded.names else {}
        take = backend_of(waiting[0]).take
        parts = {name: [take(x, i) for x in waiting] for name, i in chosen.items()}
        total, most = layers.mean_of_layers(chosen, self._mean(parts, context))
        if self.beta < 1:
            for of in layers.each(waiting):
                kernels = backend_of(of.x)
                for part in blocks(of.x):
                    kernels.multiply(of.x[part], np.float32(self.beta), of.x[part])
                    kernels.accumulate(of.x[part], of.kept[part], of.x[part], factor=1 - self.beta)
        shares = [chosen[name].size / (stop - start) for name, start, stop in coded.segments]
        return layers.finished(total, most, waiting, shares)

    def _chunk_values(self, name: str) -> int:
        """Return the number of values of a chunk of a layer."""
        rate = _rate_of(self.costs[name]) if name in self.costs else self.rates.get(name, self.rate)
        return rate * self.per_chunk

    def _chosen(
        self, waiting: list[Array], leaders: Mapping[int, Array], coded: Bucket, context: Context
    ) -> dict[str, Array]:
        """Return the indices that the leading rank chooses, uint32[m] by layer. Collective.

        waiting: float32[coded.size] of each hosted rank
        leaders: the places of the largest of chunks by the number of a layer, if they are known
        The payload has positions in chunks, of one byte or two.
        """
        world, leader = context.world, _leader(context)
        payload = broadcast(
            world,
            [
                self._positions(x, leaders, coded) if rank == leader else None
                for rank, x in zip(world.hosted, waiting, strict=True)
            ],
            leader,
        )
        found, end = {}, 0
        for name, start, stop in coded.segments:
            chunk_values = self._chunk_values(name)
            chunks, kind = -(-(stop - start) // chunk_values), _kind(chunk_values)
            begin, end = end, end + chunks * self.per_chunk * kind.itemsize
            positions = payload[begin:end].view(kind).reshape(chunks, self.per_chunk)
            indices = (start + np.arange(chunks)[:, None] * chunk_values + positions).ravel()
            found[name] = placed(indices[indices < stop].astype(np.uint32), waiting[0])
        return found

    def _positions(self, x: Array, leaders: Mapping[int, Array], coded: Bucket) -> Array:
        """Return the positions of the largest values in the chunks of all layers, as bytes."""
        found = []
        for layer, (name, start, stop) in enumerate(coded.segments):
            chunk_values = self._chunk_values(name)
            positions = leaders.get(layer)
            if positions is None:
                positions = _largest(x[start:stop], chunk_values, self.per_chunk)
            found.append(to_host(positions.astype(_kind(chunk_values))).ravel().view(np.uint8))
        return np.concatenate(found)


def _leader(context: Context) -> int:
    return context.iteration % context.world.ranks


def _rate_of(cost: float) -> int:
    """Return the rate of a layer by its operations per weight."""
    return next(rate for least, rate in RATE_OF_COST.items() if cost >= least)


def _kind(chunk_values: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint8 if chunk_values <= 1 << 8 else np.uint16)


def _largest(x: Array, chunk_values: int, per_chunk: int) -> Array:
    """Return the positions of each chunk's largest values, ascending: int64[chunks, per_chunk].

    Of values of one magnitude the first ones are taken. If the last chunk has too few values, its
    positions may lie beyond the end.
    """
    found = []
    for part in blocks(x, chunk_values):
        own = x[part]
        size = -(-own.size // chunk_values) * chunk_values
        bits = np.full_like(x, -1, shape=(size,), dtype=np.int32)  # in the order of magnitudes
        np.bitwise_and(own.view(np.int32), np.int32(MAGNITUDE), out=bits[: own.size])
        chunks, columns = bits.reshape(-1, chunk_values), []
        rows = placed(np.arange(len(chunks)), x)
        for _ in range(per_chunk):
            columns.append(chunks.argmax(axis=1))
            chunks[rows, columns[-1]] = -2
        found.append(np.sort(np.stack(columns, axis=1), axis=1))
    return np.concatenate(found)
