"""One step of training: a global batch, its gradient on every hosted rank, the mean, the update."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...collectives import sparse
from ...compress import NoCompression
from ...compress.base import Array, Mean
from ...compress.bucket import Bucket
from ...config import ConfigError, UserError
from ...ops import tensors, to_host
from ...ops.tensors import values_of
from ...partition import split
from ...randomness import random_key
from ...torch.controllers import Norms
from ...torch.loss_scaling import LossScaler
from ...torch.reducer import GradientReducer
from ...world import timeline
from ...world.ranks import Loopback, Ranks
from ...world.timeline import KINDS, PHASES
from .adversary import Adversary
from .losses import LossFunction, Metric, MetricFunction, TargetError
from .optimizers import Optimizer
from .samples import Prefetched, Samples, device_of, shard, taken
from .update import Update

FORWARD = 4  # stream of random numbers: of the model, for example dropout
_NOTHING = np.iinfo(np.int64).min  # below all values that a process sends for its own ranks


@dataclass(frozen=True)
class StepExchange:
    """loss: of the global batch; time_ns: int64[phases], the slowest process's;
    wire_bytes: int64[ranks], sent so far; signal: number of one that any process caught, or 0;
    norms: float64[ranks + 1], of all ranks and of the mean, if they were measured."""

    loss: float
    time_ns: Array
    wire_bytes: Array
    signal: int
    norms: Array | None = None


def exchange(
    world: Ranks,
    losses: list[float],
    time_ns: list[int],
    sent: Array,
    signal: int,
    norms: Array | None = None,
) -> StepExchange:
    """Exchange values. Collective: one MAX all-reduce of 2 ranks + phases + 1 words.

    losses: one per hosted rank, their mean over all ranks is the loss of the batch
    sent: int64[hosted], cumulative bytes
    norms: float64[hosted + 1] of 0 or more: ranks + 1 words more; or None on all processes
    """
    ranks, hosted = world.ranks, slice(world.hosted.start, world.hosted.stop)
    of_ranks = [np.array(losses, np.float64).view(np.int64), sent]  # bits: only one rank's
    bits = np.empty(0, np.int64) if norms is None else norms.view(np.int64)
    of_ranks += [] if norms is None else [bits[:-1]]
    words = np.full(len(of_ranks) * ranks, _NOTHING, np.int64).reshape(-1, ranks)
    words[:, hosted] = of_ranks
    found = world.max(np.concatenate([words.ravel(), bits[-1:], time_ns, [signal]]))
    loss_bits, wire_bytes, *norm_bits = found[: words.size].reshape(words.shape)
    of_mean, times = np.split(found[words.size : -1], [-len(time_ns)])
    return StepExchange(
        loss=fsum(loss_bits.view(np.float64)) / ranks,
        time_ns=times,
        wire_bytes=wire_bytes,
        signal=int(found[-1]),
        norms=np.concatenate([*norm_bits, of_mean]).view(np.float64) if norm_bits else None,
    )


CHUNK = 1000  # largest number of samples that are evaluated at once
LARGEST_BYTES = 2**28  # of a layer's output for them: a few such tensors exist at once
KEPT_BYTES = 2**30  # of all layers' outputs, if backward needs them


def samples_at_once(model: torch.nn.Module, samples: Samples, keeps: bool = False) -> int:
    """Return how many samples are evaluated at once: CHUNK, or fewer if their layers are large.

    Found by a forward of the first one, which is collective if images are split.
    keeps: whether backward follows, as for adversarial copies
    """
    sizes, training = [1], model.training

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        several = output if isinstance(output, tuple | list) else (output,)
        sizes.extend(each.nbytes for each in several if isinstance(each, torch.Tensor))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(taken(samples, np.zeros(1, np.int64), 0, device_of(model))[0])
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    most = KEPT_BYTES // sum(sizes) if keeps else LARGEST_BYTES // max(sizes)
    return max(1, min(CHUNK, most))


def evaluate(
    model: torch.nn.Module,
    world: Ranks,
    samples: Samples,
    loss: LossFunction,
    metrics: Sequence[Metric],
    sharing: int = 1,
    at_once: int = CHUNK,
) -> tuple[list[float], float]:
    """Return (scores by the metrics, loss), over all targets of all samples. Collective.

    Each rank, virtual or not, evaluates its own part, so virtual ranks change no bit.
    sharing: consecutive ranks that evaluate a part together, as their images are split
    at_once: samples that go through the model together; see samples_at_once
    Raises any rank's error on all ranks; if images are split, on that rank alone.
    """
    model.eval()
    shares = [split(len(samples), world.ranks // sharing, rank // sharing) for rank in world.hosted]

    def of_hosted() -> list[list[Sum]]:
        functions = [metric.build() for metric in metrics]
        return [_part(model, samples, loss, functions, at_once, *share) for share in shares]

    # If images are split, forward has messages: the other ranks may wait in it.
    parts = of_hosted() if sharing > 1 else world.agreed(of_hosted, "evaluation", Exception)
    model.train()
    everywhere = [part for process in world.gather(parts)[::sharing] for part in process]
    sums = [zip(*each, strict=True) for each in zip(*everywhere, strict=True)]
    (loss_sum, targets), *others = ((fsum(values), sum(counts)) for values, counts in sums)
    mean_loss = loss_sum / targets
    means = (values / count if count else mean_loss for values, count in others)
    return [metric.score(mean) for metric, mean in zip(metrics, means, strict=True)], mean_loss


def evaluate_each(
    update: Update, samples: Samples, loss: LossFunction, metric: Metric, at_once: int = CHUNK
) -> list[tuple[float, float]]:
    """Return (score, loss) of each rank's own model on all samples. Collective. See evaluate.

    Raises any rank's error on all ranks.
    """

    def own() -> list[tuple[float, float]]:
        found, alone = [], Loopback()
        for hosted in range(update.world.virtual_ranks):
            update.begin(hosted)
            given = update.model, alone, samples, loss, [metric], 1, at_once
            (score,), mean_loss = evaluate(*given)
            found.append((score, mean_loss))
        return found

    everyone = update.world.gather_from(own, "evaluation")
    return [scores for process in everyone for scores in process]


Sum = tuple[float, int]  # of values, and their number


@torch.no_grad()
def _part(
    model: torch.nn.Module,
    samples: Samples,
    loss: LossFunction,
    metrics: Sequence[MetricFunction | None],
    at_once: int,
    start: int,
    stop: int,
) -> list[Sum]:
    """Return the sums of losses, and of the values of each metric, except for None."""
    values = [list[float]() for _ in (loss, *metrics)]
    chunks = [np.arange(at, min(at + at_once, stop)) for at in range(start, stop, at_once)]
    if isinstance(samples, Prefetched):
        samples.plan((index, 0) for index in chunks)
    for index in chunks:
        inputs, targets = taken(samples, index, 0, device_of(model))
        outputs = model(inputs)
        with naming_items(index):
            values[0] += tensors.listed(loss(outputs, targets, reduction="none"))
            for found, metric in zip(values[1:], metrics, strict=True):
                if metric is not None:
                    found += tensors.listed(metric(outputs, targets))
    return [(fsum(each), len(each)) for each in values]


@contextmanager
def naming_items(index: Array) -> Iterator[None]:
    """Name the item if the block raises TargetError. index: int64[b], the items of the batch."""
    try:
        yield
    except TargetError as error:
        raise ConfigError(f"data: item {index[error.row]}: {error}") from None


@dataclass
class Stopwatch:
    """Nanoseconds spent in each phase; since: of a timeline, the end of the last one."""

    time_ns: list[int]
    last_ns: int
    since: int = 0

    @classmethod
    def start(cls) -> Stopwatch:
        return cls([0] * len(PHASES), time.perf_counter_ns(), timeline.began())

    def lap(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.perf_counter_ns()
        timeline.done(KINDS.index(phase), self.since)
        self.since = timeline.began()
        self.time_ns[PHASES.index(phase)] += now - self.last_ns
        self.last_ns = now


@dataclass(frozen=True)
class StepResult:
    """losses: of each hosted rank, whose mean over all ranks is the loss of the batch

    mean: None if a gradient overflowed, and the step was skipped
    """

    losses: list[float]
    mean: Mean | None
    time_ns: list[int]


def step(
    update: Update,
    samples: Samples,
    batch: Array,
    loss: LossFunction,
    sharing: int = 1,
    seed: int = 0,
    scaler: LossScaler | None = None,
    adversary: Adversary | None = None,
) -> StepResult:
    """Train on one global batch. Collective.

    samples: all of training; batch: int64[b], the same on all ranks; loss: to be minimised
    sharing: consecutive ranks that take the same samples, whose images are split over them
    seed: of random changes of samples
    scaler: of the loss; None: nothing is scaled or skipped
    adversary: makes copies of samples that are trained on too; None: there are none
    Raises on all ranks, with the model unchanged, NonFiniteGradient, and UserError for errors of
    forward or backward on any rank; if images are split the latter on that rank alone.
    """
    world, model, watch, losses = update.world, update.model, Stopwatch.start(), []
    shares = world.ranks // sharing
    iteration = update.reducer.iteration
    stream = update.reducer.seed, FORWARD, iteration
    for hosted, rank in enumerate(world.hosted):
        update.reducer.begin(hosted)
        update.begin(hosted)
        try:
            part, parts = adversary.part(rank) if adversary else (rank // sharing, shares)
            share = shard(batch, parts, part)
            inputs, targets = taken(samples, share, seed, update.reducer.device)
            watch.lap("data")
            tensors.seed(random_key(*stream, part)[0], update.reducer.device)  # of dropout
            scale = update.reducer.loss_scale
            weight = len(inputs) * parts / batch.size
            whole = partial(adversary.loss_of, rank, iteration, loss) if adversary else None
            given = update.optimizer, inputs, targets, loss, weight, scale, whole
            with naming_items(share):
                losses.append(backward(model, *given))
        except Exception as error:
            if sharing > 1:  # forward has messages: the other ranks may wait in it
                raise
            update.reducer.fail(_told(error, iteration, rank))
            losses.append(0.0)
        watch.lap("forward_backward")
        update.keep(hosted)
        watch.lap("reduce")
    mean = update.reduce() if scaler is None else scaler.reduce(update.reduce)
    watch.lap("reduce")
    if adversary:
        adversary.share()
        adversary.remember(iteration)
    if mean is not None:
        update.step()
    watch.lap("optimizer")
    return StepResult(losses, mean, watch.time_ns)


def _told(error: Exception, iteration: int, rank: int) -> UserError:
    """Return a line for an error of a rank's forward or backward, with the place in its file."""
    if isinstance(error, UserError):
        return error
    others = Path(torch.__file__).parent, Path(__file__).parents[2]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(o) for o in others)]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    said = " ".join(str(error).split())
    return UserError(
        f"rank {rank} | iteration {iteration}: forward or backward: "
        f"{type(error).__name__}{place}: {said}"
    )


def backward(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss: LossFunction,
    weight: float = 1.0,
    scale: float = 1.0,
    whole: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> float:
    """Leave in p.grad the gradient of this rank's share times scale, and return its loss.

    weight: of the mean over a share's b samples, b * shares / batch, so that the mean over shares,
        and over ranks, is the mean over the batch; exactly 1 if the batch divides evenly
    whole: the inputs and targets that weight is for; None: the loss of the model's outputs
    """
    optimizer.zero_grad(set_to_none=True)
    if not len(inputs):
        return 0.0
    mean = loss(model(inputs), targets) if whole is None else whole(inputs, targets)
    weighted = mean * weight
    weighted.backward(torch.full_like(weighted, scale))  # type: ignore[no-untyped-call]
    return float(tensors.listed(weighted)[0])


SIGNS = 6  # stream of random numbers: of sketches
BUCKETS = 4093  # of a sketch; prime, so that a layer's strides do not map onto the same ones
BLOCK = 256 * BUCKETS  # values that are processed together


def squared(flat: Array, bucket: Bucket) -> float:
    """Return the sum of the squares of float32[bucket.size], in float64."""
    return fsum(float(np.square(v, dtype=np.float64).sum()) for v in bucket.views(flat))


def roots(
    reducer: GradientReducer, given: Optimizer, optimizer: torch.optim.Optimizer
) -> Array | None:
    """Return the roots of the next step's factors on gradients, float32[bucket.size].

    None if nothing is known, for example before the first step. A parameter without a state has 0.
    For steps along P g, use the coordinates w / sqrt(P), in which steps are plain: the gradient is
    sqrt(P) g, whose noise scale tr(P Sigma) / (G' P G) is that of the batch. Taken before the step:
    a P that includes the step's own gradients would hide their noise.
    Source: McCandlish et al., arXiv 1812.06162, with a preconditioner.
    """
    found = np.zeros(reducer.bucket.size, np.float32)
    for parameter, view in zip(reducer.parameters, reducer.bucket.views(found), strict=True):
        state = optimizer.state.get(parameter)
        if state:
            view[...] = np.sqrt(values_of(torch.as_tensor(given.factors(state))))
    return found if found.any() else None


def squared_norms(
    reducer: GradientReducer, mean: Mean, loss_scale: float, by: Array | None = None
) -> Array:
    """Return float64[hosted + 1]: of each hosted rank's gradient, of the exact mean. Collective.

    After a reduce, whose gradients were those of a loss times loss_scale; mean: its result
    by: float32[bucket.size], factors on gradients; None: no factors
    Float32 gradients already have an exact mean. Any other method's mean depends on its wire, its
    memory and its momentum, and its norm does not measure the noise, so the exact gradients are
    summed as sketches.
    """
    given, mean_flat = [to_host(flat) for flat in reducer.flats], to_host(mean.flat)
    flats = given if by is None else [flat * by for flat in given]
    own = [squared(flat, reducer.bucket) / loss_scale**2 for flat in flats]
    if isinstance(reducer.aggregator, NoCompression):
        exact = mean_flat if by is None else mean_flat * by
        return np.array([*own, squared(exact, reducer.bucket)])
    key = random_key(reducer.seed, SIGNS, reducer.iteration)
    total = sparse.sum(reducer.world, sketches(flats, key))
    return np.array([*own, float(np.square(total / (reducer.world.ranks * loss_scale)).sum())])


def of_samples(norms: Array | None, batch: int) -> Norms | None:
    """Return the norms for controllers from those that all ranks shared; None: there are none.

    A rank's gradient was that of its samples' mean loss times their share of the batch and ranks,
    so that the mean over ranks is that over samples.
    """
    if norms is None:
        return None
    ranks = len(norms) - 1
    shares = (split(batch, ranks, rank) for rank in range(ranks))
    samples = np.array([stop - start for start, stop in shares])
    weights = np.maximum(samples, 1) * (ranks / batch)
    return Norms(norms[:-1] / weights**2, float(norms[-1]), samples)


def sketches(flats: Sequence[Array], key: tuple[int, int]) -> list[Array]:
    """Return float64[BUCKETS] for each of float32[n], with the same random signs for all.

    Value i is added, with its sign, to element i modulo BUCKETS. Over the signs the squared norm
    has the mean |flat|^2, and a variance of 2 |flat|^4 / BUCKETS if values are spread evenly;
    up to n = BUCKETS it is |flat|^2 itself.
    Source: Charikar, Chen, Farach-Colton: Finding frequent items in data streams, ICALP 2002.
    """
    size, bits = flats[0].size, np.random.Philox(key=key[0] | key[1] << 32)
    found = [np.zeros(BUCKETS) for _ in flats]
    for start in range(0, size, BLOCK):
        here = slice(start, min(start + BLOCK, size))
        count = here.stop - start
        words = np.asarray(bits.random_raw(-(-count // 64)), "<u8")
        signs = np.unpackbits(words.view(np.uint8))[:count] * np.float32(2) - 1
        for total, flat in zip(found, flats, strict=True):
            rows = np.zeros(-(-count // BUCKETS) * BUCKETS)
            rows[:count] = flat[here] * signs
            total += rows.reshape(-1, BUCKETS).sum(axis=0)
    return found
