"""Update rules and controllers that a test brings: ranks of different models, growing batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from training import (
    assert_same_records,
    model_bytes,
    prepared,
    run_job,
    small_data,
    small_job,
    stop,
)

from cpdhpc import store
from cpdhpc.collectives import sparse
from cpdhpc.compress.base import Mean
from cpdhpc.config import merge
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import UPDATES
from cpdhpc.lab.train.training import Training
from cpdhpc.lab.train.update import Update, UpdateRule
from cpdhpc.torch.controllers import CONTROLLERS, Control, Controller, Scheduled, Settings
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback


class Local(Update):
    """Each rank steps by itself; every third step all take the mean of their parameters."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.named = dict(self.model.named_parameters())
        for name, parameter in self.named.items():
            for mine in self._of(name):
                mine[...] = parameter.detach().numpy()

    def _of(self, name: str) -> list[np.ndarray]:  # type: ignore[type-arg]
        return self.state.own(name, "parameter", self.named[name].shape, "copy")

    def begin(self, hosted: int) -> None:
        for name, parameter in self.named.items():
            parameter.data.copy_(torch.from_numpy(self._of(name)[hosted]))

    def keep(self, hosted: int) -> None:
        self.reducer.stash(hosted)
        self.optimizer.step()  # without momentum: it has no state
        for name, parameter in self.named.items():
            self._of(name)[hosted][...] = parameter.detach().numpy()

    def reduce(self) -> Mean:
        mean = self.reducer.reduce()
        if self.reducer.iteration % 3 == 0:
            for name in self.named:
                total = sparse.sum(self.world, [p.reshape(-1) for p in self._of(name)])
                for mine in self._of(name):
                    mine[...] = (total / np.float32(self.world.ranks)).reshape(mine.shape)
        return mean

    def step(self) -> None:
        pass

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        for name, parameter in self.named.items():
            total = sparse.sum(self.world, [p.reshape(-1) for p in self._of(name)])
            mean = (total / np.float32(self.world.ranks)).reshape(parameter.shape)
            parameter.data.copy_(torch.from_numpy(mean))
        yield


class LocalRule(UpdateRule):
    name: Literal["local"] = "local"

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> Local:
        return Local(model, optimizer, reducer)


class Doubling(Scheduled):
    """The batch doubles after so many samples; the rate falls with the mean loss that was seen."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.losses = np.zeros(0)

    def next(self, samples_seen: int) -> tuple[float, int]:
        rate, batch = super().next(samples_seen)
        seen = self.losses[-1] if self.losses.size else 1.0
        return rate * float(seen), batch * (2 if samples_seen >= 60 else 1)

    def observe(self, samples_seen: int, loss: float) -> None:
        self.losses = np.append(self.losses, loss)

    def state(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.losses = state["losses"]


class DoublingControl(Control):
    name: Literal["doubling"] = "doubling"

    def build(self, settings: Settings) -> Controller:
        return Doubling(settings)


CHANGES: dict[str, dict[str, Any]] = {
    "local": {"update": {"name": "local"}, "optimizer": {"momentum": 0.0}},
    "doubling": {"controller": {"name": "doubling"}},
    "noise": {
        "controller": {"name": "noise_scale"},
        "gradient": {"aggregator": "lowbit", "wire": "e3m0"},
    },
    "adaptive": {
        "controller": {"name": "adaptive_batch", "smoothing": 0.5, "share": 1e6},
        "train": {"batch": 12},
    },
    "autowu": {
        "controller": {"name": "autowu", "max_rate": 9.0, "patience": 1, "confidence": 0.51},
        "train": {"epochs": 4},
    },
    "decentlam": {
        "update": {"name": "decentlam", "graph": "ring", "wire": "e4m3"},
        "optimizer": {"momentum": 0.0, "weight_decay": 0.01},
        "schedule": {"warmup_epochs": 1},
    },
    "diloco": {
        "update": {"name": "diloco", "period": 3},
        "optimizer": {"name": "adamw"},
        "gradient": {"aggregator": "lowbit", "wire": "e4m3", "error_feedback": True},
    },
}
OWN = ("local", "decentlam", "diloco")  # whose ranks have models of their own


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UPDATES, "local", LocalRule)
    monkeypatch.setitem(CONTROLLERS, "doubling", DoublingControl)


@pytest.mark.parametrize("name", CHANGES)
def test_resumed_is_undisturbed(tmp_path: Path, name: str) -> None:
    """Stopped twice: in the middle of an epoch, and at the end of one; both within a period."""
    job = small_job(**merge({"train": {"telemetry_every": 2}}, CHANGES[name]))
    (tmp_path / "whole").mkdir()
    whole = run_job(job, Loopback(3), tmp_path / "whole")
    files = Files.of(tmp_path, job)
    for after in (1, 2):
        stopped = prepared(job, Loopback(3), files)
        stopped.resume()
        stop(stopped, after)
        if name in OWN and stopped.iteration % 3:
            assert len({model.tobytes() for model in models(stopped)}) == 3
    training = run_job(job, Loopback(3), files, resume=True)
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(files.record, whole.files.record)
    assert [m.tobytes() for m in models(training)] == [m.tobytes() for m in models(whole)]


def models(training: Training) -> list[np.ndarray]:  # type: ignore[type-arg]
    """The parameters of each hosted rank."""
    state = [entry for _, entry in training.update.state if entry.redistribution is not None]
    entries = [np.ascontiguousarray(entry.array).view(np.uint8).reshape(3, -1) for entry in state]
    return list(np.concatenate(entries, axis=1)) if entries else []


def test_local_steps_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Three models in a loop of its own, for three steps: their mean is what remains."""
    job = small_job(train={"epochs": 1, "batch": 34}, **CHANGES["local"])
    training = run_job(job, Loopback(3), tmp_path)
    data, single = small_data(), prepared(job, Loopback(1), tmp_path)
    start = [p.detach().clone() for p in single.model.parameters()]
    order = store.read(training.files.record)[0]["steps"]["iteration"]
    assert len(order) == 3
    from cpdhpc.lab.train.samples import epoch_order, shard

    wanted = []
    for rank in range(3):
        with torch.no_grad():
            for p, first in zip(single.model.parameters(), start, strict=True):
                p.copy_(first)
        for step in range(3):
            batch = epoch_order(100, job.seed, 0)[34 * step : 34 * (step + 1)]
            mine = shard(batch, 3, rank)
            single.model.zero_grad()
            logits = single.model(torch.from_numpy(data.train_x[mine]))
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.train_y[mine]))
            (loss * (len(mine) * 3 / len(batch))).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p in single.model.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
        wanted.append([p.detach().numpy().copy() for p in single.model.parameters()])
    means = [np.mean(each, axis=0, dtype=np.float64) for each in zip(*wanted, strict=True)]
    for parameter, mean in zip(training.model.parameters(), means, strict=True):
        # sums of three float32 numbers and a division: three roundings of the largest
        bound = 4 * np.finfo(np.float32).eps * max(np.abs(mean).max(), 1e-3)
        assert np.abs(parameter.detach().numpy() - mean).max() <= bound


def test_position_counts_samples(tmp_path: Path) -> None:
    """100 samples: batches of 24 up to the 60th sample, then of 48; epochs are whole."""
    job = small_job(train={"epochs": 2}, **CHANGES["doubling"])
    training = run_job(job, Loopback(1), tmp_path)
    assert training.samples_seen == 200
    assert training.iteration == 4 + 3  # 24 24 24 28, then 48 48 4
    assert store.read_attributes(training.files.checkpoint)["samples_seen"] == 200
