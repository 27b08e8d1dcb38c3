"""A run from its current position to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from math import isfinite, isnan
from typing import NoReturn

import numpy as np
from numpy import inf, nan, nan_to_num

from ...collectives.checks import NonFiniteGradient
from ...compress.base import Mean
from ...randomness import random_key
from ...torch.precision.conversion import BY_TORCH
from ...torch.precision.recorder import Recorder
from ..signals import Caught, Interrupted
from . import checkpoint, gradients
from .adversary import Attacked
from .losses import Diverged
from .progress import Display
from .record import FGSM
from .samples import Array, Prefetched, epoch_order, shard
from .step import StepResult, evaluate, evaluate_each, exchange, of_samples, roots, squared_norms
from .training import Training
from .update import NOTHING, OwnModels, OwnModelsRule

SAMPLES = 3  # stream of random numbers: for random changes of samples


def run(training: Training, caught: Caught, display: Display) -> None:
    """Train until the end and write the files. Collective.

    Raises Interrupted on all processes after a signal to any of them, with the checkpoint
    written; Diverged if a gradient or the loss is not finite, with the checkpoint unchanged.
    """
    job = training.job
    for line in _announced(training):
        display.line(f"{job.id}: {line}")
    display.start(job.id, training.samples * job.train.epochs, training.samples_seen)
    with training.reducer, training.workers, _recording(training):
        while not training.ended:
            _epoch(training, caught, display)
    training.save("complete")
    scores = training.record.rows["epochs"][-1]
    loss, guessed = scores["test_loss"], job.loss.guessed(training.classes)
    verdict = "" if loss < guessed else f": no better than guessing, whose loss is {guessed:.4f}"
    display.end(f"{job.id}: complete: {_told(training, scores, loss)}{verdict}")
    for line in _missing(training) if display.shown else ():
        display.line(f"{job.id}: {line}")


def _announced(training: Training) -> Iterator[str]:
    job, files, advice = training.job, training.files, training.provenance.get("advice")
    steps, interval = job.train.epochs * training.iterations_per_epoch, training.update.interval
    if recorded := len(job.train.record_gradients):
        mib = gradients.size_bytes(training.reducer) / 2**20
        yield f"records gradients: {recorded} times {mib:.3g} MiB"
    if job.train.keep_every:
        mib = checkpoint.size_bytes(training.model) / 2**20
        yield f"keeps weights: {len(job.train.kept_epochs)} times {mib:.3g} MiB"
    if job.record.number:
        yield f"records up to {job.record.number} iterations into {files.recording(job)}"
    if job.train.batch > training.samples:
        scaled = ", and rates are scaled for it" if job.schedule.base_batch else ""
        what = f"train.batch={job.train.batch} is more than the {training.samples} samples"
        yield f"{what}: a step has these{scaled}"
    if advice:
        yield str(advice)
    if obeying := str(training.provenance["precision"]).splitlines():
        left = [line.partition(":")[0] for line in obeying if line.endswith(BY_TORCH)]
        told = f"; not in {', '.join(left)}, whose {BY_TORCH}" if left else ""
        yield f"[precision] in {len(obeying) - len(left)} layers{told}"
    if (warmup := job.precision.warmup) >= steps:
        yield f"[precision]: warmup={warmup}: fixed scales round nothing in {steps} steps"
    if job.record.iterations and (first := min(job.record.iterations)) >= steps:
        yield (
            f"[record]: none of its {steps} iterations, from 0, will be recorded: the first "
            f"one to record is {first}"
        )
    if interval > steps:
        yield f"update.period={interval}: no mean over ranks in {steps} steps"


def _missing(training: Training) -> Iterator[str]:
    """Yield notices of recordings that a complete run was configured for but does not have."""
    job, done = training.job, training.iteration
    if job.record.iterations and min(job.record.iterations) >= done:
        yield f"[record]: none of its {done} iterations is recorded"
    paths = {i: gradients.path_of(training.files.record, i) for i in job.train.record_gradients}
    if missing := [str(i) for i, path in paths.items() if not path.exists()]:
        yield (
            f"no gradients of iteration {', '.join(missing)}: not among its {done}, or its step "
            "was skipped"
        )


@contextmanager
def _recording(training: Training) -> Iterator[None]:
    """Record in the block as [record] says, from the next iteration on. Collective."""
    if not training.job.record.number:
        yield
        return
    file = training.files.recording(training.job)
    settings = training.job.record.model_dump(exclude={"file"})
    recorder = Recorder(training.model, file, training.reducer, resume=True, **settings)
    with recorder as training.recorder:
        recorder.begin(training.iteration)
        yield


def _told(training: Training, scores: Mapping[str, float], loss: float) -> str:
    """Return as text the scores, by column, of metrics other than the loss, and the loss."""
    told = [m.told(scores[m.column]) for m in training.job.told if m.column in scores]
    return ", ".join([*told, f"loss {loss:.4f}"])


def _epoch(training: Training, caught: Caught, display: Display) -> None:
    """Finish the current epoch."""
    job, began = training.job, time.perf_counter()
    epoch, seen = divmod(training.samples_seen, training.samples)
    order = _order(training.samples, job.seed, epoch)
    while seen < len(order):
        rate, size = _decided(training)
        batch = training.update.batch(order[seen:], size)
        _plan(training, epoch, order[seen:], size)
        signal = _iteration(training, rate, batch, caught)
        display.step(len(batch))
        seen += len(batch)
        if signal and seen < len(order) and training.update.at_rest:
            _stop(training, signal, display)
    with training.update.evaluated():
        scores, loss = _evaluated(training)
    of_ranks = _of_ranks(training, epoch + 1)
    elapsed_ns = training.world.max(np.array([int((time.perf_counter() - began) * 1e9)]))
    row = {"epoch": epoch + 1, **scores, "test_loss": loss, "time_s": elapsed_ns[0] / 1e9}
    training.record.add("epochs", row)
    told = _told(training, scores, loss) + of_ranks
    display.epoch(job.id, epoch + 1, job.train.epochs, told)
    for column in [column for column, score in scores.items() if isnan(score) and isfinite(loss)]:
        display.line(f"{job.id}: {column} is NaN, though the loss is finite: see its metric")
    if epoch + 1 in job.train.kept_epochs:
        training.save_weights(epoch + 1)
    if signal:  # in the last iteration: the resumed run would not repeat this evaluation
        _stop(training, signal, display)
    if (epoch + 1) % job.train.checkpoint_every == 0 and epoch + 1 < job.train.epochs:
        training.save("running")


def _plan(training: Training, epoch: int, order: Array, size: int) -> None:
    """Announce to workers, if there are any, this process's shares of the coming batches.

    order: the rest of the epoch; size: of its batches, and of later ones while it is unknown
    """
    if not isinstance(training.train, Prefetched):
        return
    count, job = training.workers.ahead + 1, training.job
    batches = [
        (epoch, order[at : at + size]) for at in range(0, min(len(order), count * size), size)
    ]
    if len(batches) < count and epoch + 1 < job.train.epochs:
        order = _order(training.samples, job.seed, epoch + 1)
        batches += [(epoch + 1, order[at : at + size]) for at in range(0, len(order), size)[:count]]
    shares = training.world.ranks // training.sharing
    training.train.plan(
        (shard(batch, shares, rank // training.sharing), _seed(job.seed, of_epoch))
        for of_epoch, batch in batches[:count]
        for rank in training.world.hosted
    )


def gradient_of(
    training: Training, weights: Mapping[str, Array], iteration: int
) -> dict[str, Array]:
    """Return the mean gradient at some weights on the batch of an iteration, by name. Collective.

    weights: by the name of the parameter, all others stay; the model keeps them afterwards
    The batch is that of a controller that never changes it. Raises NonFiniteGradient on all
    processes.
    """
    for name, parameter in training.model.named_parameters():
        if name in weights:
            parameter.data.copy_(parameter.new_tensor(weights[name]))
    training.reducer.iteration = iteration
    epoch, inside = divmod(iteration, training.iterations_per_epoch)
    size, bucket = training.job.train.batch, training.reducer.bucket
    batch = _order(training.samples, training.job.seed, epoch)[inside * size :][:size]
    done = training.train_on(batch, _seed(training.job.seed, epoch))
    assert done.mean is not None, "static loss scales skip no step"
    return dict(zip(bucket.names, bucket.views(done.mean.flat), strict=True))


_order = lru_cache(maxsize=2)(epoch_order)  # sorting a million takes 0.1 s


def _seed(seed: int, epoch: int) -> int:
    """Return the seed of the random changes of samples in an epoch."""
    return random_key(seed, SAMPLES, epoch)[0]


def _evaluated(training: Training) -> tuple[dict[str, float], float]:
    """Return the scores by column, including the metric of copies if there are some; the loss."""
    job, adversary, of = training.job, training.adversary, (training.model, training.world)
    how = training.sharing, training.at_once
    found, loss = evaluate(*of, training.test, training.loss, job.told, *how)
    scores = {metric.column: score for metric, score in zip(job.told, found, strict=True)}
    if adversary and job.metric in job.told:
        attacked = Attacked(adversary, training.test, training.loss)
        (score,), _ = evaluate(*of, attacked, training.loss, [job.metric], *how)
        scores[job.metric.column + FGSM] = score
    return scores, loss


def _of_ranks(training: Training, epoch: int) -> str:
    """Record and return the results of the ranks' own models, if they have some. Collective."""
    rule, update = training.job.update, training.update
    if not (isinstance(rule, OwnModelsRule) and isinstance(update, OwnModels)):
        return ""
    rank, worst, said = -1, (nan, nan), ""
    metric = next(iter(training.job.told), training.job.metric)  # of the record's columns
    if rule.evaluate_ranks:
        given = training.test, training.loss, metric, training.at_once
        found = evaluate_each(update, *given)
        rank = max(range(len(found)), key=lambda i: nan_to_num(found[i][1], nan=inf))
        worst = found[rank]
        told = _told(training, {metric.column: worst[0]}, worst[1])
        said = f"; worst rank {rank}: {told}"
    distance = {"epoch": epoch, "consensus_distance": update.consensus_distance}
    scores = {"worst_rank": rank, metric.column: worst[0], "test_loss": worst[1]}
    training.record.add("ranks", distance | scores)
    return f"{said}; consensus distance {update.consensus_distance:.3g}"


def _stop(training: Training, signal: int, display: Display) -> NoReturn:
    training.save("interrupted")
    display.end(f"{training.job.id}: interrupted after iteration {training.iteration}")
    raise Interrupted(signal)


def _fail(training: Training, why: str) -> NoReturn:
    training.save_record("failed")
    raise Diverged(f"{training.job.id}: iteration {training.iteration}: {why}")


def _decided(training: Training) -> tuple[float, int]:
    """Return the controller's decision, unless a step with it is impossible."""
    rate, size = training.controller.next(training.samples_seen)
    if not (isfinite(rate) and rate >= 0 and size >= 1):
        _fail(training, f"controller: learning rate {rate} and batch {size}: are not possible")
    return rate, size


def _iteration(training: Training, rate: float, batch: Array, caught: Caught) -> int:
    """Do one iteration, and return the signal that any process has caught, or 0."""
    job, iteration = training.job, training.iteration
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    training.reducer.alike = {"learning rate": rate, "batch": len(batch)}
    training.reducer.epoch = training.samples_seen / training.samples
    before, scale = training.sent_bytes, training.scaler.scale
    done, norms = _stepped(training, batch, scale)
    sent = training.sent_bytes - before
    if training.recorder is not None:
        training.recorder.step(done.mean)
    told = exchange(training.world, done.losses, done.time_ns, sent, caught.number, norms)
    if not isfinite(told.loss):
        _fail(training, f"the loss is {told.loss}")
    training.samples_seen += len(batch)
    if job.controller.measures_norms:
        training.controller.observe_norms(of_samples(told.norms, len(batch)))
    training.controller.observe(training.samples_seen, told.loss)
    former = training.record.ranks - told.wire_bytes.size  # of a run that had more
    row = {
        "iteration": iteration,
        "samples": len(batch),
        "loss": told.loss,
        "learning_rate": rate,
        "loss_scale": scale,
        "time_s": told.time_ns / 1e9,
        "wire_bytes": np.pad(told.wire_bytes, (0, former)),
    }
    training.record.add("steps", {**row, **training.controller.telemetry()})
    if done.mean is not None:
        _observe(training, done.mean)
    training.iteration += 1
    return told.signal


def _stepped(training: Training, batch: Array, scale: float) -> tuple[StepResult, Array | None]:
    """Train on a batch; return also the norms of gradients, if the controller needs them."""
    job, by = training.job, None
    measured = job.controller.measures_norms
    if measured and job.optimizer.preconditions:
        by = roots(training.reducer, job.optimizer, training.optimizer)
        measured = by is not None
    try:
        seed = _seed(job.seed, training.samples_seen // training.samples)
        done = training.train_on(batch, seed)
    except NonFiniteGradient as error:
        if training.recorder is not None:
            training.recorder.step()
        _fail(training, str(error))
    if not measured or done.mean is None:
        return done, None
    return done, squared_norms(training.reducer, done.mean, scale, by)


def _observe(training: Training, mean: Mean) -> None:
    """Write the gradients and the telemetry of an iteration, if they are due. Collective."""
    train, iteration = training.job.train, training.iteration
    if iteration in train.record_gradients:
        training.save_gradients()
    every, interval = train.telemetry_every, training.update.interval
    if iteration // every != (iteration - interval) // every and mean is not NOTHING:
        of_layers = training.observe(mean)
        training.record.add("layers", {"iteration": iteration, **of_layers})
