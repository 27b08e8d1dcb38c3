"""Whole runs on one rank, bit for bit beside the published formulas in plain torch."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from training import run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.compress import Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.lowbit import LowBit
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.record import observe
from cpdhpc.lab.train.samples import epoch_order
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Loopback

PER_EPOCH = 4  # iterations: 100 samples in batches of 25
TRAIN: dict[str, Any] = {"epochs": 3, "batch": 25, "learning_rate": 0.125, "telemetry_every": 1}
# A warm-up by quarters, then a half from each milestone on: exact in binary.
SCHEDULE = {"warmup_epochs": 1.0, "decay": "step", "milestones": [1.5, 2.25], "gamma": 0.5}
RATES = [0.125 * f for f in (0.25, 0.5, 0.75, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25)]


def batches(job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The images and labels of each iteration, in the order that the seed gives."""
    data = small_data()
    for epoch in range(job.train.epochs):
        order = epoch_order(len(data.train_y), job.seed, epoch)
        for start in range(0, len(order), job.train.batch):
            batch = order[start : start + job.train.batch]
            yield torch.from_numpy(data.train_x[batch]), torch.from_numpy(data.train_y[batch])


def first_model(job: Job) -> torch.nn.Module:
    """The model before its first step."""
    torch.manual_seed(job.seed)
    return job.model.build((8, 8), 8)


def gradient(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Of the mean cross entropy, by parameter."""
    loss = torch.nn.functional.cross_entropy(model(x), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_defaults_decide_results_so_they_stay() -> None:
    plain = Job(name="x").plain()
    sgd = {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
    constant = {"warmup_epochs": 0.0, "decay": "constant", "milestones": (), "gamma": 0.1}
    train = {"epochs": 10, "batch": 64, "learning_rate": 0.1, "seeds": (0,), "bucket_mib": 25.0}
    train |= {"virtual_ranks": 1, "image_grid": (1, 1)}
    assert plain["model"] == {"name": "mlp", "hidden": (64,)}
    assert plain["data"] == {"name": "digits", "test_share": 1 / 3, "split_seed": 0}
    for table, values in (("optimizer", sgd), ("schedule", constant), ("train", train)):
        assert values.items() <= plain[table].items(), table


@pytest.mark.parametrize("nesterov", [False, True])
def test_runs_follow_the_formulas_of_sgd_and_of_the_schedule(
    tmp_path: Path, nesterov: bool
) -> None:
    """d = gradient + decay * w; v = momentum * v + d; w -= rate * (nesterov: d + momentum * v, v)

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning,
    2013, with the rate outside v, as torch.optim.SGD states it.
    """
    momentum, decay = 0.75, 0.0625
    optimizer = {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    job = small_job(train=TRAIN, optimizer=optimizer, schedule=SCHEDULE)
    done = run_job(job, Loopback(), tmp_path)
    model = first_model(job)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for (x, y), rate in zip(batches(job), RATES, strict=True):
        for p, v, g in zip(model.parameters(), velocity, gradient(model, x, y), strict=True):
            with torch.no_grad():
                d = g.add(p, alpha=decay)
                v.mul_(momentum).add_(d)
                p.add_(d.add(v, alpha=momentum) if nesterov else v, alpha=-rate)
    for got, expected in zip(done.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, expected)
    groups, _ = store.read(done.files.record)
    assert groups["steps"]["learning_rate"].tolist() == RATES


def test_the_record_tells_underflow_from_saturation(tmp_path: Path) -> None:
    """e2m1's smallest number is 0.5 and its largest 6, with 7 half a spacing above it.

    So of the gradient times 2**9 what is at most 0.25 becomes 0, and what is 7 or more saturates.
    """
    options = {"aggregator": "lowbit", "wire": "e2m1fn", "scaling": "static:9"}
    job = small_job(train=TRAIN | {"epochs": 1}, gradient=options)
    groups, _ = store.read(run_job(job, Loopback(), tmp_path).files.record)
    found = groups["layers"]
    x, y = next(batches(job))
    sent = [g.abs().double() * 2.0**9 for g in gradient(first_model(job), x, y)]
    nonzero = [int((g > 0).sum()) for g in sent]
    lost = [int(((g > 0) & (g <= 0.25)).sum()) for g in sent]
    capped = [int((g >= 7).sum()) for g in sent]
    assert sum(lost) > 0 < sum(capped) != sum(lost)  # else the test would show nothing
    assert found["nonzero"][0].tolist() == nonzero
    for name, counts in (("underflow_share", lost), ("saturated_share", capped)):
        shares = [count / of for count, of in zip(counts, nonzero, strict=True)]
        assert found[name][0].tolist() == shares


def test_what_is_written_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step, every epoch, telemetry every third iteration, a checkpoint every second epoch."""
    saved: list[tuple[str, int]] = []
    save = Training.save

    def noted(training: Training, status: str) -> None:
        saved.append((status, training.samples_seen))
        save(training, status)

    monkeypatch.setattr(Training, "save", noted)
    job = small_job(train=TRAIN | {"epochs": 5, "telemetry_every": 3, "checkpoint_every": 2})
    began_s = time.perf_counter()
    groups, attributes = store.read(run_job(job, Loopback(), tmp_path).files.record)
    elapsed_s = time.perf_counter() - began_s
    assert saved == [("running", 200), ("running", 400), ("complete", 500)]
    assert groups["steps"]["iteration"].tolist() == [*range(5 * PER_EPOCH)]
    assert groups["layers"]["iteration"].tolist() == [*range(0, 5 * PER_EPOCH, 3)]
    assert groups["epochs"]["epoch"].tolist() == [1, 2, 3, 4, 5]
    of_steps, of_epochs = (groups[name]["time_s"].sum() for name in ("steps", "epochs"))
    assert 0 < of_steps < of_epochs < elapsed_s
    assert attributes["schema"] == 1  # readers ask for it


def test_a_share_of_one_value_and_of_none() -> None:
    """e2m1's smallest number is 0.5: a layer's only value is lost; one of zeros loses nothing."""
    bucket = Bucket(("one", "none", "kept"), ((3,), (2,), (2,)), align=1024)
    flat = np.zeros(bucket.size, np.float32)
    bucket.views(flat)[0][1], bucket.views(flat)[2][:] = 0.125, (1, 0.125)
    aggregator = LowBit(wire="e2m1fn", scaling="none")
    mean = aggregator.aggregate([flat], bucket, Context(Loopback(), State(range(1), 1), 0, 0))
    reducer = SimpleNamespace(bucket=bucket, aggregator=aggregator, flats=[flat], world=Loopback())
    found = observe(reducer, mean)  # type: ignore[arg-type]
    assert found["nonzero"].tolist() == [1, 0, 2]
    assert found["underflow_share"].tolist() == [1, 0, 0.5]
    assert found["saturated_share"].tolist() == [0, 0, 0]
