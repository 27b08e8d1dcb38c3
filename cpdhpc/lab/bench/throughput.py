"""Predict the samples/s of many workers, by compressor, over links of several speeds.

Each worker computes a batch, then all average their gradients. The time of a step is the sum of
both; nothing overlaps. Computation is measured once, or is an option. The time of averaging is
predicted from the collectives that each compressor calls for the network's layers.
Source: the performance model of Wen et al.: TernGrad, NIPS 2017, section 5, with other terms.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ... import store
from ...collectives.allreduce import Allreduce
from ...collectives.method import Machine, as_machine
from ...collectives.predict import predict
from ...collectives.schedules import SCHEDULES
from ...collectives.sparse import DTYPES, GATHERED_BYTES
from ...compress import COMPRESSORS
from ...compress.base import Aggregator, Array, Context
from ...compress.bucket import Bucket, State, split_bucket
from ...config import UserError, among, suggest
from ...world.ranks import Loopback
from ..kinds import flags, printing
from ..report.figures import IDEAL, Axis, Chart, Panel, Series, image, styles
from ..settings import options
from .accuracy import contributions


# Networks of the literature: layers with parameters, and their work. Each function follows the
# rule of an architecture; a test compares the totals with the published ones.
class NetworkLayer(NamedTuple):
    """Parameters that are one tensor; shape as torch has it: outputs, inputs, window.

    positions: how often a sample multiplies by each of them in a forward pass
    """

    name: str
    shape: tuple[int, ...]
    positions: int


class Network(NamedTuple):
    """The layers in the order of a forward pass; sample: the plural of its samples' name."""

    layers: tuple[NetworkLayer, ...]
    sample: str

    @property
    def parameters(self) -> int:
        """How many values a gradient has."""
        return sum(prod(layer.shape) for layer in self.layers)

    @property
    def flop(self) -> int:
        """Operations of a sample's forward and backward pass: 2 for each multiplication, 3 times.

        Backward multiplies twice as often: for the gradient of the weights and of the inputs.
        """
        return 6 * sum(prod(layer.shape) * layer.positions for layer in self.layers)

    @property
    def bucket(self) -> Bucket:
        """The layout of a gradient."""
        names, shapes, _ = zip(*self.layers, strict=True)
        return Bucket(names, shapes)


def _weights(name: str, shape: tuple[int, ...], positions: int) -> Iterator[NetworkLayer]:
    """Yield a layer's weights and its bias."""
    yield NetworkLayer(f"{name}.weight", shape, positions)
    yield NetworkLayer(f"{name}.bias", shape[:1], 0)


def _convolution(
    name: str, outputs: int, inputs: int, window: int, side: int, norm: bool = False
) -> Iterator[NetworkLayer]:
    """Yield a convolution to side x side pixels, with a bias, or a batch norm after it."""
    yield from _weights(name, (outputs, inputs, window, window), side * side)
    if norm:  # scale and offset; the convolution needs no bias
        yield NetworkLayer(f"{name}.norm", (outputs,), 0)


def _fully_connected(inputs: int) -> Iterator[NetworkLayer]:
    """Yield the last three layers of AlexNet and VGG-A."""
    for i, shape in enumerate([(4096, inputs), (4096, 4096), (1000, 4096)], 6):
        yield from _weights(f"fc{i}", shape, 1)


def alexnet() -> Iterator[NetworkLayer]:
    """Yield the layers of AlexNet, whose second, fourth and fifth layer have two groups.

    Source: Krizhevsky, Sutskever, Hinton: ImageNet classification with deep convolutional neural
    networks, NIPS 2012, section 3.5.
    """
    rows = [(96, 3, 11, 55), (256, 48, 5, 27), (384, 256, 3, 13), (384, 192, 3, 13)]
    for i, row in enumerate([*rows, (256, 192, 3, 13)], 1):
        yield from _convolution(f"conv{i}", *row)
    yield from _fully_connected(256 * 6 * 6)


def vgg_a() -> Iterator[NetworkLayer]:
    """Yield the layers of VGG-A.

    Source: Simonyan, Zisserman: Very deep convolutional networks for large-scale image
    recognition, ICLR 2015, table 1.
    """
    inputs, side = 3, 224
    for i, stage in enumerate([(64,), (128,), (256, 256), (512, 512), (512, 512)], 1):
        for j, outputs in enumerate(stage, 1):
            yield from _convolution(f"conv{i}_{j}", outputs, inputs, 3, side)
            inputs = outputs
        side //= 2
    yield from _fully_connected(512 * 7 * 7)


GOOGLENET_MODULES = {  # name -> side, then outputs: 1x1; 3x3 reduced, 3x3; 5x5 reduced, 5x5; pool
    "3a": (28, 64, 96, 128, 16, 32, 32),
    "3b": (28, 128, 128, 192, 32, 96, 64),
    "4a": (14, 192, 96, 208, 16, 48, 64),
    "4b": (14, 160, 112, 224, 24, 64, 64),
    "4c": (14, 128, 128, 256, 24, 64, 64),
    "4d": (14, 112, 144, 288, 32, 64, 64),
    "4e": (14, 256, 160, 320, 32, 128, 128),
    "5a": (7, 256, 160, 320, 32, 128, 128),
    "5b": (7, 384, 192, 384, 48, 128, 128),
}


def googlenet() -> Iterator[NetworkLayer]:
    """Yield the layers of GoogLeNet without its auxiliary classifiers.

    Source: Szegedy et al.: Going deeper with convolutions, CVPR 2015, table 1.
    """
    yield from _convolution("conv1", 64, 3, 7, 112)
    yield from _convolution("conv2.reduce", 64, 64, 1, 56)
    yield from _convolution("conv2", 192, 64, 3, 56)
    inputs = 192
    for name, (side, one, less3, three, less5, five, pool) in GOOGLENET_MODULES.items():
        yield from _convolution(f"{name}.1x1", one, inputs, 1, side)
        yield from _convolution(f"{name}.3x3.reduce", less3, inputs, 1, side)
        yield from _convolution(f"{name}.3x3", three, less3, 3, side)
        yield from _convolution(f"{name}.5x5.reduce", less5, inputs, 1, side)
        yield from _convolution(f"{name}.5x5", five, less5, 5, side)
        yield from _convolution(f"{name}.pool", pool, inputs, 1, side)
        inputs = one + three + five + pool
    yield from _weights("classifier", (1000, inputs), 1)


def resnet50() -> Iterator[NetworkLayer]:
    """Yield the layers of ResNet-50, whose blocks halve images in their 3 x 3 convolution.

    Source: He, Zhang, Ren, Sun: Deep residual learning for image recognition, CVPR 2016, table 1.
    """
    yield from _convolution("conv1", 64, 3, 7, 112, norm=True)
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, out = 64 << stage, 56 >> stage
        for block in range(blocks):
            name = f"stage{stage + 1}.{block}"
            yield from _convolution(f"{name}.1", width, inputs, 1, side, norm=True)
            yield from _convolution(f"{name}.2", width, width, 3, out, norm=True)
            yield from _convolution(f"{name}.3", 4 * width, width, 1, out, norm=True)
            if block == 0:
                yield from _convolution(f"{name}.skip", 4 * width, inputs, 1, out, norm=True)
            inputs, side = 4 * width, out
    yield from _weights("classifier", (1000, inputs), 1)


TOKENS = 32  # of a sentence and of its translation, about the mean of WMT's
VOCABULARY = 37_000


def transformer() -> Iterator[NetworkLayer]:
    """Yield the layers of the base Transformer, with one embedding for input and output.

    Products of activations in attention have no parameters and are not counted.
    Source: Vaswani et al.: Attention is all you need, NIPS 2017, table 3.
    """
    width, inner = 512, 2048

    def norm(name: str) -> Iterator[NetworkLayer]:
        yield from (NetworkLayer(f"{name}.norm.{each}", (width,), 0) for each in ("weight", "bias"))

    yield NetworkLayer("embedding", (VOCABULARY, width), TOKENS)
    for part, attentions in (("encoder", 1), ("decoder", 2)):
        for name in (f"{part}.{i}" for i in range(6)):
            for attention in (f"{name}.attention{j}" for j in range(attentions)):
                for each in ("query", "key", "value", "out"):
                    yield from _weights(f"{attention}.{each}", (width, width), TOKENS)
                yield from norm(attention)
            yield from _weights(f"{name}.inner", (inner, width), TOKENS)
            yield from _weights(f"{name}.outer", (width, inner), TOKENS)
            yield from norm(name)


NETWORKS: dict[str, Callable[[], Network]] = {
    "alexnet": lambda: Network(tuple(alexnet()), "images"),
    "googlenet": lambda: Network(tuple(googlenet()), "images"),
    "vgg-a": lambda: Network(tuple(vgg_a()), "images"),
    "resnet50": lambda: Network(tuple(resnet50()), "images"),
    "transformer": lambda: Network(tuple(transformer()), "sentences"),
}


DENSE = "none"  # the compressor that sends float32
MATRIX = 1536  # rows and columns of the product that is measured
MEASURED_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    names, above_0 = flags.names, flags.above_0()
    network = flags.named(among(NETWORKS))
    add("--network NAME", "network: " + ", ".join(NETWORKS), "resnet50", type=network)
    add(
        "--methods NAME",
        "compressors, separated by spaces or commas (default: all)",
        [*COMPRESSORS],
        nargs="+",
    )
    add("--batch N", "samples of each worker", 32, type=flags.at_least(1))
    workers = "1,2,4,8,16,32,64,128,256,512"
    add("--workers N,...", "numbers of workers", workers, type=flags.counts)
    add("--links GBIT,...", "rates of links, 1e9 bit/s", "1,10,100,400", type=_links)
    compute = options(parser.add_mutually_exclusive_group())
    compute("--rate RATE", "samples/s of one worker, as you measured", above_0)
    tflops = "TFLOP/s of one worker in training (default: measured here)"
    compute("--tflops TFLOPS", tflops, above_0)
    machine = "file of bench fit (default: times of round figures)"
    add("--machine MACHINE.toml", machine, Path)
    algorithms = "algorithms, of which an all-reduce takes the fastest"
    add("--algorithms NAME,...", algorithms, "ring,rhd", type=names(among(SCHEDULES)))
    add("--bucket-mib MIB", "size of buckets, as in a job", 25.0, type=above_0)
    add("--png FILE.png", "draw the figures", Path)


def _links(text: str) -> list[float]:
    try:
        return [flags.above_0()(each) for each in text.split(",")]
    except UserError:
        raise UserError(f"{text}: must be numbers above 0, in Gb/s") from None


@dataclass(frozen=True)
class PerformanceModel:
    """The performance model.

    compute_s: of a worker's batch; calls: the collectives of a step, by compressor
    """

    network: Network
    batch: int
    compute_s: float
    calls: Mapping[str, Sequence[ListedCall]]
    algorithms: Sequence[str]

    def step(self, name: str, workers: int, machine: Machine) -> tuple[float, float]:
        """Return the time of communication in s, and the bytes that leave a worker."""
        prices = [price(machine, call, workers, self.algorithms) for call in self.calls[name]]
        return math.fsum(time_s for time_s, _ in prices), math.fsum(sent for _, sent in prices)

    def rate(self, name: str, workers: int, machine: Machine) -> float:
        """Return the samples a second of all workers."""
        time_s = self.compute_s + self.step(name, workers, machine)[0]
        return workers * self.batch / time_s


def measured_flops() -> float:
    """Return the operations a second of this machine's float32 matrix products."""
    a = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    times: list[float] = []
    while sum(times) < MEASURED_S:
        start = perf_counter()
        a @ a
        times.append(perf_counter() - start)
    return 2 * MATRIX**3 / float(np.median(times))


def run(arguments: argparse.Namespace) -> None:
    """Print the assumptions, a table for each speed of links, and draw them."""
    methods = flags.methods(arguments.methods)
    for name in methods:
        if name not in COMPRESSORS:
            raise UserError(f"--methods {name}: {suggest(name, COMPRESSORS)}")
    if not methods or not arguments.algorithms:
        raise UserError("--methods, --algorithms: must name one at least")
    machine, network = as_machine(arguments.machine), NETWORKS[arguments.network]()
    if arguments.rate:
        compute_s, source = arguments.batch / arguments.rate, "from --rate"
    else:
        flops, source = 1e12 * (arguments.tflops or 0), "from --tflops"
        if not flops:
            flops, source = measured_flops(), "from matrix products measured here"
        compute_s = arguments.batch * network.flop / flops
    calls = {
        name: calls_of(COMPRESSORS[name](), network.bucket, arguments.bucket_mib)
        for name in methods
    }
    model = PerformanceModel(network, arguments.batch, compute_s, calls, arguments.algorithms)
    workers = arguments.workers
    print("\n".join(_rests_on(arguments, model, machine, source, max(workers))))
    rates = {
        (link, name): [model.rate(name, p, replace(machine, beta_s=8e-9 / link)) for p in workers]
        for link in arguments.links
        for name in calls
    }
    for link in arguments.links:
        forms = {"method": "12"} | {str(count): "9.4g" for count in workers}
        of_link = [(name, *each) for (speed, name), each in rates.items() if speed == link]
        print(f"# {network.sample}/s by workers, links of {link:g} Gb/s")
        print("\n".join(printing.table(forms, of_link)))
    if arguments.png:
        drawn = chart(arguments.network, workers, rates, model)
        store.put(arguments.png, image(drawn, arguments.png.suffix[1:] or "png"))
        print(f"wrote {arguments.png}")


def _rests_on(
    arguments: argparse.Namespace, model: PerformanceModel, machine: Machine, source: str, most: int
) -> list[str]:
    """Return the assumptions, and for each compressor the bytes that it sends."""
    network = model.network
    times = arguments.machine or "round figures for a cluster, measured nowhere"
    dense = sum(call.size_bytes for call in model.calls.get(DENSE, ())) or 4 * network.parameters
    lines = [
        f"{arguments.network}: {network.parameters:,} parameters in {len(network.layers)} layers, "
        f"{network.flop / 1e9:.4g} GFLOP for a training step of one of its {network.sample}",
        f"computation: {1e3 * model.compute_s:.4g} ms for {model.batch} {network.sample}, "
        f"{model.batch / model.compute_s:.4g} {network.sample}/s of a worker, {source}",
        "predicted, not measured; computation and communication do not overlap; equal links, no "
        "contention; methods with default options",
        f"not included: selecting, and decoding the results of all-gathers; times: {times}; an "
        f"all-reduce takes the fastest of {', '.join(model.algorithms)}",
        "payloads counted on 4 ranks with random gradients of widely spread magnitudes",
    ]
    forms = {"method": "12", "calls": "6", "payload(MB)": "12.4g", "of float32": "10.2%"}
    forms |= {"bits/value": "10.3g", f"sent by a worker of {most}(MB)": "28.4g"}
    rows = []
    for name, calls in model.calls.items():
        size = math.fsum(call.size_bytes for call in calls)
        sent = model.step(name, most, machine)[1]
        share, bits = size / dense, 8 * size / network.parameters
        rows.append((name, len(calls), size / 1e6, share, bits, sent / 1e6))
    of_methods = printing.table(forms, rows)
    return [*(f"# {line}" for line in lines), of_methods[0], *("#" + x[1:] for x in of_methods[1:])]


def chart(
    name: str,
    workers: Sequence[int],
    rates: Mapping[tuple[float, str], list[float]],
    model: PerformanceModel,
) -> Chart:
    """Return samples a second against workers, a panel for each speed of links."""
    looks, sample = styles(model.calls), model.network.sample
    one = model.batch / model.compute_s
    ideal = Series("ideal", IDEAL, workers, [one * p for p in workers])
    x, y = Axis("workers", "log2", ticks=workers), Axis(f"{sample}/s", "log")
    panels = [
        Panel(
            f"{link:g} Gb/s",
            x,
            y,
            [
                ideal,
                *(Series(name, look, workers, rates[link, name]) for name, look in looks.items()),
            ],
        )
        for link in dict.fromkeys(link for link, _ in rates)
    ]
    title = f"{name}: {sample} a second, {model.batch} {sample} a worker"
    return Chart("throughput", title, ["Predicted, not measured."], "", panels, len(panels))


RANKS = 4  # virtual ones that a method is run on
WARMUP = 1  # iterations before the one that is counted, so that residuals are not empty
LATE = 1_000_000  # epoch and first iteration after the warm-up of every method
FACTORS = [1 << i for i in range(10)]  # by which large layers are made smaller
LEAST_VALUES, LEAST_ROWS = 1 << 13, 16  # of a layer that is made smaller


class ListedCall(NamedTuple):
    """A collective; size_bytes: data of one of RANKS, the mean over them.

    method, values: of an all-reduce; divided: whether the data of all ranks together has the same
        size on any number of ranks
    """

    name: str
    size_bytes: float
    method: Allreduce | None = None
    values: float = 0.0
    divided: bool = False


class CountedRanks(Loopback):
    """Virtual ranks in one process that list the collectives that are called."""

    def __init__(self, virtual_ranks: int) -> None:
        super().__init__(virtual_ranks)
        self.calls: list[ListedCall] = []
        self.account = self._list
        self._neighbours: int | None = None  # index of the call of neighbours under way
        self._before_bytes = 0  # sent before it

    def max(self, values: Array, what: str = "max") -> Array:
        """Return a copy, and list the call unless an all-reduce makes it: its prediction has it."""
        if not what.startswith("allreduce"):
            self.calls.append(ListedCall("agreement", values.nbytes))
        return super().max(values, what)

    def _list(self, name: str, arguments: Mapping[str, Any], numbers: Sequence[int]) -> None:
        self.close()
        if name == "allreduce":
            method = Allreduce(**{field.name: arguments[field.name] for field in fields(Allreduce)})
            n = prod(arguments["x.shape"])
            self.calls.append(ListedCall(name, method.payloads.size_bytes(n), method, n))
            return
        self.calls.append(ListedCall(name, self._data_bytes(name, arguments, numbers)))

    def _data_bytes(self, name: str, arguments: Mapping[str, Any], numbers: Sequence[int]) -> float:
        """Return the bytes of a rank's data in a collective of cpdhpc.collectives.sparse."""
        if name == "allgather":
            return sum(numbers) / self.ranks * np.dtype(arguments["dtype"]).itemsize
        if name == "broadcast":
            length, dtype = numbers
            return length * np.dtype(DTYPES[dtype]).itemsize
        if name == "sum":
            return prod(arguments["shape"]) * np.dtype(arguments["dtype"]).itemsize
        assert name == "neighbours", name
        self._neighbours, self._before_bytes = len(self.calls), int(self.bytes_sent.sum())
        return 0  # until close replaces it

    def close(self) -> None:
        """Set the bytes of the last call of neighbours, which has ended."""
        if self._neighbours is not None:
            sent = int(self.bytes_sent.sum()) - self._before_bytes
            self.calls[self._neighbours] = ListedCall("neighbours", sent / self.ranks)
            self._neighbours = None


class CollectiveCost(NamedTuple):
    """Messages and bytes of a collective one after another, and mean bytes that leave a rank."""

    messages: int
    path_bytes: float
    sent_bytes: float


def _gathered(ranks: int, size: float) -> CollectiveCost:
    return CollectiveCost((ranks - 1).bit_length(), (ranks - 1) * size, (ranks - 1) * size)


def _summed(ranks: int, size: float) -> CollectiveCost:
    if size <= GATHERED_BYTES:
        return _gathered(ranks, size)
    both = 2 * (ranks - 1) / ranks * size
    return CollectiveCost(ranks - 1 + (ranks - 1).bit_length(), both, both)


def _spread(ranks: int, size: float) -> CollectiveCost:
    depth = (ranks - 1).bit_length()
    return CollectiveCost(depth, depth * size, (ranks - 1) / ranks * size)


def _to_all(ranks: int, size: float) -> CollectiveCost:
    """Return the cost of neighbours if each rank sends every other one a part; size: on RANKS."""
    sent = size * RANKS / (RANKS - 1) * (ranks - 1) / ranks
    return CollectiveCost(ranks - 1 + (ranks - 1).bit_length(), sent, sent)


COSTS: dict[str, Callable[[int, float], CollectiveCost]] = {  # of the calls of collectives.sparse
    "agreement": lambda ranks, size: _spread(ranks, size)._replace(sent_bytes=0.0),
    "allgather": _gathered,
    "sum": _summed,
    "broadcast": _spread,
    "neighbours": _to_all,
}


def price(
    machine: Machine, call: ListedCall, ranks: int, algorithms: Sequence[str]
) -> tuple[float, float]:
    """Return the time in s of a collective on so many ranks, and the bytes that leave a rank.

    algorithms: an all-reduce takes the one with the least predicted time
    """
    if ranks == 1:
        return 0.0, 0.0
    if call.method is not None:
        ways = [replace(call.method, algorithm=name) for name in algorithms]
        nodes, n = tuple(range(ranks)), round(call.values)
        found = min(predict(machine, way, nodes, n) for way in ways)
        return found.time_s, found.wire_bytes
    size = call.size_bytes * (RANKS / ranks if call.divided else 1.0)
    cost = COSTS[call.name](ranks, size)
    call_s, step_s = machine.call_s, machine.step_s
    if call.name == "agreement":  # MPI's own, without steps of ours
        call_s, step_s = 0.0, 0.0
    message_s, byte_s = machine.alpha_s + step_s, machine.beta_s + 2 * machine.host_s
    return call_s + cost.messages * message_s + cost.path_bytes * byte_s, cost.sent_bytes


def count_calls(method: Aggregator, bucket: Bucket, ranks: int = RANKS) -> list[ListedCall]:
    """Return the collectives of an iteration in which a method averages a bucket's gradients.

    They are the same for any number of ranks. The gradients are random, with magnitudes over many
    binades.
    """
    world = CountedRanks(ranks)
    state = State(world.hosted, ranks)
    for step in range(WARMUP + 1):
        world.calls.clear()
        flats = contributions("spread", ranks, bucket.size, seed=step)
        context = Context(world, state, iteration=LATE + step, epoch=float(LATE))
        method.aggregate(flats, bucket, context)
    world.close()
    return world.calls


def calls_of(method: Aggregator, bucket: Bucket, bucket_mib: float) -> list[ListedCall]:
    """Return the collectives of an iteration, of all the buckets that a reducer makes.

    Large layers are run with some of their rows, which are output units. The bytes of a method are
    linear in rows, so two sizes determine the whole. A bucket whose calls differ between the two
    sizes is run in full.
    """
    found: list[ListedCall] = []
    for part in split_bucket(Bucket(bucket.names, bucket.shapes, method.align), bucket_mib):
        factor = min(FACTORS, key=lambda f: _shrunk(part.bucket, f, 2).size)
        whole = _shrunk(part.bucket, factor, 1)
        calls = _marked(method, whole)
        more = count_calls(method, _shrunk(part.bucket, factor, 2)) if factor > 1 else calls
        if _kinds(calls) != _kinds(more):
            factor, calls = 1, _marked(method, part.bucket)
            more = calls
        found += [_extended(a, b, factor) for a, b in zip(calls, more, strict=True)]
    return found


def _marked(method: Aggregator, bucket: Bucket) -> list[ListedCall]:
    """Return the calls of a bucket; they are divided if half the ranks have twice the data each."""
    calls, few = count_calls(method, bucket), count_calls(method, bucket, RANKS // 2)
    if _kinds(calls) != _kinds(few):
        return calls
    return [
        a._replace(divided=a.name == "allgather" and b.size_bytes > 2**0.5 * a.size_bytes)
        for a, b in zip(calls, few, strict=True)
    ]


def _kinds(calls: Sequence[ListedCall]) -> list[tuple[str, Allreduce | None]]:
    return [(call.name, call.method) for call in calls]


def _shrunk(bucket: Bucket, factor: int, times: int) -> Bucket:
    """Return a bucket whose large layers have times / factor of their rows."""
    shapes = []
    for shape in bucket.shapes:
        rows, columns = shape[0], prod(shape[1:])
        if rows >= LEAST_ROWS * factor and rows * columns >= LEAST_VALUES * factor > LEAST_VALUES:
            rows = times * -(-rows // factor)
        shapes.append((rows, *shape[1:]))
    return Bucket(bucket.names, tuple(shapes), bucket.align)


def _extended(small: ListedCall, large: ListedCall, factor: int) -> ListedCall:
    """Return the call of all rows, from those of a part of them and of twice as many."""
    size, values = (
        getattr(small, name) + (factor - 1) * (getattr(large, name) - getattr(small, name))
        for name in ("size_bytes", "values")
    )
    return small._replace(size_bytes=size, values=values)
