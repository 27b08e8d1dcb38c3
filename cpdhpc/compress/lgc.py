"""LGC: the largest values of gradients, compressed by an autoencoder that is trained on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from zlib import crc32

import numpy as np

from ..collectives.sparse import allgather, broadcast
from ..collectives.sparse import sum as sum_of_ranks
from ..ops import backend_of, placed, to_host
from ..options import Allowed
from ..world.ranks import Ranks
from .base import Array, Column, Context, DenseMessages, Layers, Mean, check_known
from .bucket import Bucket
from .payload import decode_sparse, encode_sparse
from .sparse import Density, SparseLayers, SparseMessages, coded_layers, count_of, largest

if TYPE_CHECKING:
    from torch import Tensor

# (channels in, channels out, kernel, stride); a leaky ReLU follows each but the last of both
ENCODER = ((1, 64, 3, 2), (64, 128, 3, 2), (128, 256, 3, 2), (256, 64, 3, 2), (64, 4, 1, 1))
DECODER = ((4, 32, 4, 2), (32, 64, 4, 2), (64, 128, 4, 2), (128, 32, 4, 2))  # transposed
SHORTER = 16  # a code has 4 channels, each shorter than the vector by this factor
SIMILARITY = 0.5  # weight of the codes' distances in the loss of exchange "server"
DECAYS = 0.9, 0.999  # of Adam's two moments


@dataclass(frozen=True)
class Lgc(DenseMessages):
    """The mean of the values at the indices of one rank's largest ones, sent as short codes.

    The ranks take turns as the leader, whose largest values are chosen. Each rank keeps the values
    that it does not send; errors of decoding are not kept. Once trained, the autoencoder makes
    codes of a quarter as many values; it computes in float64, with one thread.
    dense_steps: number of first iterations in which all values travel in float32
    training_steps: number of iterations after them in which the chosen values of all ranks go to
        all, and every rank trains the same autoencoder
    exchange: "ring": the mean of all ranks' codes is decoded; "server": the leader's code is, for
        each rank by a decoder of its own, which also gets that rank's innovation
    density: share of a layer's values that are chosen, one at least; small networks need 0.1, as
        most ranks send values that another one has chosen
    innovation: share of a rank's chosen values, the largest ones, that it also sends if exchange
        is "server"
    learning_rate: of Adam, which trains the autoencoder
    exclude: layers that travel whole in float32, as do all layers of one dimension; in the paper
        the first ones
    plain: layers whose chosen values travel without autoencoder; in the paper the last one
    wire, algorithm, scaling: options of the all-reduce of codes and of values of plain layers
    Source: Abrahamyan, Chen, Bekoulis, Deligiannis: Learned gradient compression for distributed
    deep learning, IEEE TNNLS 2021, arXiv 2103.08870. Here the leader chooses for "server" too, and
    no server is needed: its input goes to all ranks.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        **SparseMessages.columns,
        "decoding_error": Column("squared error of what is decoded, of values; NaN: not known"),
    }

    aggregator: Literal["lgc"] = "lgc"
    exchange: Literal["ring", "server"] = "ring"
    dense_steps: Annotated[int, Allowed(ge=0)] = 200
    training_steps: Annotated[int, Allowed(ge=0)] = 300
    density: Density = 0.001
    innovation: Density = 0.05
    learning_rate: Annotated[float, Allowed(gt=0, le=1)] = 1e-3
    exclude: Layers = ()
    plain: Layers = ()

    @property
    def holds_back(self) -> bool:
        return self.density < 1

    @property
    def most_momentum(self) -> float:
        """See Aggregator.most_momentum: the first dense_steps leave no residuals."""
        return 0.7

    def check_layers(self, names: Collection[str]) -> None:
        check_known("Lgc.exclude", self.exclude, names)
        check_known("Lgc.plain", self.plain, names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        is_dense = context.iteration < self.dense_steps
        layers = coded_layers(self, gradients, bucket, context, is_dense)
        if not layers.coded.size:
            flat = np.zeros_like(gradients[0], shape=(bucket.size,))
            return Mean.finite(layers.mean(flat, 0, gradients), layers.shares([]))
        waiting = layers.with_residuals()
        chosen = self._chosen(waiting, layers.coded, context)
        places = placed(chosen.places, waiting[0])
        values = [to_host(backend_of(x).take(x, places)) for x in waiting]
        training = context.iteration < self.dense_steps + self.training_steps
        found = (self._trained if training else self._decoded)(values, chosen, context)
        at = layers.in_bucket(places, np.array(chosen.counts, np.int64))
        mean, most = layers.mean_of([at], [placed(found.values, at)], 1.0)
        flat = layers.mean(mean, most, waiting)
        layers.keep(waiting)
        return Mean.finite(flat, self._telemetry(layers, chosen, found))

    def _chosen(self, waiting: Sequence[Array], coded: Bucket, context: Context) -> Chosen:
        """Return the indices of the leader's largest values, the same on all ranks. Collective."""
        world, leader = context.world, context.iteration % context.world.ranks
        counts = [count_of(self.density, stop - start) for _, start, stop in coded.segments]
        payloads: list[Array | None] = [None] * len(waiting)
        values = np.zeros(sum(counts), np.float32)  # the end of a payload, which is not sent
        if world.hosts(leader):
            i = leader - world.hosted.start
            places = largest(waiting[i], coded, self.density, "layer")
            payloads[i] = encode_sparse(to_host(places), values, coded.size)[: -values.nbytes]
        came = broadcast(world, payloads, leader)
        whole = np.concatenate([came, values.view(np.uint8)])
        return Chosen(decode_sparse(whole, coded.size)[0], coded, tuple(counts), self.plain, leader)

    def _trained(self, values: Sequence[Array], chosen: Chosen, context: Context) -> Found:
        """Return the mean of the chosen values, and train the autoencoder. Collective."""
        all_values, world = allgather(context.world, values), context.world
        mean = np.zeros_like(values[0])
        with np.errstate(over="ignore", invalid="ignore"):  # SparseLayers.mean checks it
            for each in all_values:  # in the order of ranks
                mean += each
        mean /= np.float32(world.ranks)
        if not chosen.coded_count or not np.isfinite(mean).all():
            return Found(mean)
        rows = np.stack(all_values)[:, chosen.is_coded].astype(np.float64)
        scale = np.abs(rows).mean() or 1.0
        rows /= scale
        innovations = np.zeros_like(rows)
        for row, into in zip(rows.astype(np.float32, order="C"), innovations, strict=True):
            at = self._innovation(row)
            into[at] = row[at]
        net = self._autoencoder(chosen, context)
        decoded = net.train(
            _padded(rows),
            _padded(innovations) if self.exchange == "server" else None,
            chosen.leader,
            context.iteration - self.dense_steps + 1,
            self.learning_rate,
        )
        _check_bits(world, net.encoder, net.decoders)
        guess = mean.astype(np.float64)
        guess[chosen.is_coded] = decoded[: chosen.coded_count] * scale
        return Found(mean, guess)

    def _decoded(self, values: Sequence[Array], chosen: Chosen, context: Context) -> Found:
        """Return the values that the codes of the chosen ones decode to. Collective."""
        world, is_coded = context.world, chosen.is_coded
        rows = [v[is_coded].astype(np.float64) for v in values]
        sums = sum_of_ranks(world, [np.array([np.abs(row).sum()]) for row in rows])
        scale = float(sums[0]) / (world.ranks * max(chosen.coded_count, 1)) or 1.0
        net = self._autoencoder(chosen, context)
        padded = _padded(np.stack(rows) / scale)
        parts = {"plain": [v[~is_coded] for v in values]}
        if self.exchange == "ring":
            parts["codes"] = list(net.encode(padded).astype(np.float32))
        means = self._mean({key: each for key, each in parts.items() if each[0].size}, context)
        out = np.zeros_like(values[0])
        if chosen.coded_count:
            if self.exchange == "ring":
                decoded = net.decode(means["codes"][None])[0]
            else:
                decoded = self._of_leader(net, padded, rows, scale, chosen, context)
            out[is_coded] = decoded[: chosen.coded_count] * scale
            _check_bits(world, out)
            out[~self._is_given(values, chosen, world)] = 0
        out[~is_coded] = means.get("plain", np.empty(0, np.float32))
        return Found(out)

    def _is_given(self, values: Sequence[Array], chosen: Chosen, world: Ranks) -> Array:
        """Return which chosen values belong to layers with a gradient on any rank. Collective.

        bool[sum of counts]. A code of zeros only is not decoded to zeros, and a layer that has no
        gradient on any rank must not get one.
        """
        own = np.add.reduceat(np.stack(values) != 0, chosen.starts, axis=1)
        given = world.max(np.asarray(own.any(axis=0), np.int64), "lgc: layers with values")
        return np.repeat(given > 0, chosen.counts)

    def _of_leader(
        self,
        net: Autoencoder,
        padded: Array,
        rows: Sequence[Array],
        scale: float,
        chosen: Chosen,
        context: Context,
    ) -> Array:
        """Return the mean of all ranks' decoders' results for the leader's code. Collective."""
        world = context.world
        codes: list[Array | None] = [None] * len(rows)
        if world.hosts(chosen.leader):
            i = chosen.leader - world.hosted.start
            codes[i] = net.encode(padded[i : i + 1])[0].astype(np.float32)
        code = broadcast(world, codes, chosen.leader)
        own = [(row / scale).astype(np.float32) for row in rows]
        places = [self._innovation(row) for row in own]
        payloads = [encode_sparse(at, x[at], x.size) for at, x in zip(places, own, strict=True)]
        came = np.zeros((world.ranks, padded.shape[1]))
        for into, payload in zip(came, allgather(world, payloads), strict=True):
            at, sent = decode_sparse(payload, chosen.coded_count)
            into[at] = sent
        return net.decode(np.repeat(code[None], world.ranks, axis=0), came).mean(axis=0)

    def _innovation(self, values: Array) -> Array:
        """Return the indices of the innovation in a rank's float32[coded values], uint32[m]."""
        select = backend_of(values).select_magnitude
        return select(values, count_of(self.innovation, values.size))

    def _autoencoder(self, chosen: Chosen, context: Context) -> Autoencoder:
        """Return the autoencoder of a bucket; the state has it under the first layer."""
        innovated = self.exchange == "server"
        decoders = context.world.ranks if innovated else 1
        name, shared = chosen.coded.names[0], context.state.shared
        key = np.random.SeedSequence(context.key(f"lgc {name}"))
        draw = np.random.Generator(np.random.Philox(key))
        last = (DECODER[-1][1] + innovated, 1, 1, 1)
        sizes = ENCODER, (*DECODER, last)
        encoder = shared(name, "encoder", lambda: _drawn(1, sizes[0], draw))
        return Autoencoder(
            encoder[0], shared(name, "decoders", lambda: _drawn(decoders, sizes[1], draw)), sizes[1]
        )

    def _telemetry(self, layers: SparseLayers, chosen: Chosen, found: Found) -> dict[str, Array]:
        """Return the columns."""
        sizes = [stop - start for _, start, stop in chosen.coded.segments]
        shares = layers.shares(np.divide(chosen.counts, sizes))
        if found.guess is None:
            return shares
        lost = np.add.reduceat((found.guess - found.values) ** 2, chosen.starts)
        given = np.add.reduceat(found.values.astype(np.float64) ** 2, chosen.starts)
        errors = dict(zip(chosen.coded.names, lost / np.where(given, given, 1), strict=True))
        known = [
            np.nan if name in self.plain else errors.get(name, np.nan)
            for name in layers.bucket.names
        ]
        return shares | {"decoding_error": np.array(known)}


@dataclass(frozen=True)
class Found:
    """values: float32[chosen], their mean; guess: the decoded mean while the autoencoder trains."""

    values: Array
    guess: Array | None = None


@dataclass(frozen=True)
class Chosen:
    """The values of the coded layers that are chosen, the same on all ranks.

    places: uint32[sum of counts], ascending; counts: of each layer; plain: layers without
    autoencoder; leader: the rank that has chosen
    """

    places: Array
    coded: Bucket
    counts: tuple[int, ...]
    plain: Collection[str]
    leader: int

    @cached_property
    def is_coded(self) -> Array:
        """Whether the autoencoder encodes each chosen value, bool[sum of counts]."""
        return np.repeat([name not in self.plain for name in self.coded.names], self.counts)

    @cached_property
    def starts(self) -> Array:
        """The first of each layer's chosen values, int64[layers]."""
        return np.cumsum([0, *self.counts[:-1]])

    @cached_property
    def coded_count(self) -> int:
        """The number of chosen values that the autoencoder encodes."""
        return int(self.is_coded.sum())


@dataclass(frozen=True)
class Autoencoder:
    """An autoencoder of vectors. Arrays are parameters and Adam's two moments.

    encoder: float64[3, parameters]; decoders: float64[decoders, 3, parameters]; rank r uses number
        r modulo decoders; sizes: of a decoder's convolutions
    """

    encoder: Array
    decoders: Array
    sizes: Sequence[tuple[int, int, int, int]]

    def encode(self, rows: Array) -> Array:
        """Return the codes of float64[vectors, n], n a multiple of SHORTER: float64[., n / 4]."""
        import torch

        with _one_thread(), torch.no_grad():
            codes = _encoded(torch.from_numpy(self.encoder[0]), torch.from_numpy(rows)[:, None])
        return np.asarray(codes.reshape(len(rows), -1).numpy())

    def decode(self, codes: Array, innovations: Array | None = None) -> Array:
        """Return float64[vectors, n] of codes; vector r is decoded by rank r's decoder.

        innovations: float64[vectors, n] for decoders that take them
        """
        import torch

        with _one_thread(), torch.no_grad():
            wide = torch.from_numpy(codes.astype(np.float64)).reshape(
                len(codes), ENCODER[-1][1], -1
            )
            parameters = [torch.from_numpy(each[0]) for each in self.decoders]
            return np.asarray(self._decoded(parameters, wide, innovations).numpy())

    def _decoded(
        self, parameters: Sequence[Tensor], codes: Tensor, innovations: Array | None
    ) -> Tensor:
        import torch

        rows = []
        for r, code in enumerate(codes):
            own = None if innovations is None else torch.from_numpy(innovations[r])[None, None]
            rows.append(_long(parameters[r % len(parameters)], self.sizes, code[None], own)[0, 0])
        return torch.stack(rows)

    def train(
        self, rows: Array, innovations: Array | None, leader: int, step: int, learning_rate: float
    ) -> Array:
        """Train on all ranks' float64[ranks, n]; return their mean as decoded before the step.

        innovations: of all ranks, for decoders that take them; leader: the rank whose code these
        decode; step: from 1
        """
        import torch

        with _one_thread(), torch.enable_grad():
            encoder = torch.from_numpy(self.encoder[0].copy()).requires_grad_()
            decoders = [torch.from_numpy(d[0].copy()).requires_grad_() for d in self.decoders]
            wanted = torch.from_numpy(rows)
            codes = _encoded(encoder, wanted[:, None])
            if innovations is None:
                found = self._decoded(decoders, codes.mean(dim=0, keepdim=True), None)
                loss = torch.nn.functional.mse_loss(found[0], wanted.mean(dim=0))
            else:
                leaders = codes[leader].expand_as(codes)
                found = self._decoded(decoders, leaders, innovations)
                loss = torch.nn.functional.mse_loss(found, wanted)
                if len(rows) > 1:  # twice the variance: the mean squared distance of two codes
                    loss = loss + SIMILARITY * 2 * codes.var(dim=0).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            for kept, tensor in zip(
                (self.encoder, *self.decoders), (encoder, *decoders), strict=True
            ):
                if tensor.grad is not None:
                    _adam(kept, tensor.grad.numpy(), step, learning_rate)
            return np.asarray(found.detach().mean(dim=0).numpy())


def _padded(rows: Array) -> Array:
    """Return float64[vectors, n] padded with zeros to a multiple of SHORTER, two at least.

    A code of length one is too short for the decoder's convolutions.
    """
    n = max(2 * SHORTER, -(-rows.shape[1] // SHORTER) * SHORTER)
    return np.pad(rows, ((0, 0), (0, n - rows.shape[1])))


def _drawn(
    count: int, sizes: Sequence[tuple[int, int, int, int]], draw: np.random.Generator
) -> Array:
    """Return new parameters, within +-1 / sqrt(inputs of a channel), and moments 0."""
    out = np.zeros((count, 3, sum((i * k + 1) * o for i, o, k, _ in sizes)))
    for parameters in out[:, 0]:
        bounds = [np.full((i * k + 1) * o, 1 / sqrt(i * k)) for i, o, k, _ in sizes]
        parameters[:] = draw.uniform(-1, 1, parameters.size) * np.concatenate(bounds)
    return out


def _layers_of(
    parameters: Tensor, sizes: Sequence[tuple[int, int, int, int]], *, transposed: bool
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield weights, biases and stride of each convolution."""
    at = 0
    for i, o, kernel, stride in sizes:
        shape = (i, o, kernel) if transposed and kernel > 1 else (o, i, kernel)
        weight, at = parameters[at : at + prod(shape)].reshape(shape), at + prod(shape)
        bias, at = parameters[at : at + o], at + o
        yield weight, bias, stride


def _encoded(parameters: Tensor, x: Tensor) -> Tensor:
    """Return the codes of [vectors, 1, n]: [vectors, 4, n / SHORTER]."""
    from torch.nn import functional

    for weight, bias, stride in _layers_of(parameters, ENCODER, transposed=False):
        x = functional.conv1d(x, weight, bias, stride, padding=weight.shape[2] // 2)
        x = functional.leaky_relu(x) if stride > 1 else x
    return x


def _long(
    parameters: Tensor,
    sizes: Sequence[tuple[int, int, int, int]],
    code: Tensor,
    innovation: Tensor | None,
) -> Tensor:
    """Return the vectors of codes, [vectors, 1, n]; innovation: of the same shape, or None."""
    import torch
    from torch.nn import functional

    *layers, (weight, bias, _) = _layers_of(parameters, sizes, transposed=True)
    for w, b, stride in layers:
        code = functional.leaky_relu(functional.conv_transpose1d(code, w, b, stride, padding=1))
    if innovation is not None:
        code = torch.cat([code, innovation], dim=1)
    return functional.conv1d(code, weight, bias)


def _adam(kept: Array, gradient: Array, step: int, learning_rate: float) -> None:
    """Change parameters and moments, float64[3, parameters], in place.

    Source: Kingma, Ba: Adam, ICLR 2015, algorithm 1.
    """
    parameters, *moments = kept
    for moment, decay, power in zip(moments, DECAYS, (1, 2), strict=True):
        moment += (1 - decay) * (gradient**power - moment)
    first, second = (m / (1 - decay**step) for m, decay in zip(moments, DECAYS, strict=True))
    parameters -= learning_rate * first / (np.sqrt(second) + 1e-8)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread here: the bits of its sums depend on the number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_bits(world: Ranks, *arrays: Array) -> None:
    """Raise ValueError on all ranks if one has computed other bits than rank 0. Collective."""
    own = 0
    for array in arrays:
        own = crc32(np.ascontiguousarray(array).data, own)
    largest, smallest = world.max(np.array([own, -own]), "lgc: bits of the autoencoder").tolist()
    if largest != -smallest:
        every = world.gather(own)
        ranks = [i * world.virtual_ranks for i, each in enumerate(every) if each != every[0]]
        raise ValueError(
            f"Lgc: the autoencoder of rank {', '.join(map(str, ranks))} has other bits than that "
            "of rank 0: all ranks should have the same processor and version of torch"
        )
