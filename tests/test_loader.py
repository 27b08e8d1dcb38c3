"""Samples that workers read ahead: the same bits, and a way out of whatever happens to them."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from items import Items
from training import finish, model_bytes, prepared, small_data, small_job

from cpdhpc.config import ConfigError
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.samples import InMemory, Loader, MapStyle, Prefetched, StreamedData, Workers
from cpdhpc.lab.train.setup import prepare
from cpdhpc.lab.train.step import PHASES
from cpdhpc.lab.train.training import Training
from cpdhpc.torch.controllers import BySchedule, Control, Controller, Settings
from cpdhpc.world.ranks import Loopback


class Slow(InMemory):
    """Samples that take time to read; who has read them."""

    time_s = 0.004

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.readers = set[str]()

    def take(self, index: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.readers.add(threading.current_thread().name)
        time.sleep(self.time_s)
        x, y = super().take(index, seed)
        noise = np.random.default_rng([seed, *index.tolist()]).normal(size=tuple(x.shape))
        return x + 0.1 * torch.from_numpy(noise).float(), y


def trained(directory: Path, ranks: int = 1, **tables: Any) -> tuple[Training, Slow]:
    directory.mkdir()
    data, job = small_data(), small_job(**tables)
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    slow = Slow(x, y)
    source = StreamedData(slow, InMemory(x[:30], y[:30]), (8, 8), 8)
    training = prepared(job, Loopback(ranks), directory, source)
    slow.readers.clear()
    finish(training)
    return training, slow


class Growing(Controller):
    """Batches that nobody could have told before."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def next(self, seen: int) -> tuple[float, int]:
        return 0.05, 8 + seen % 7

    def observe(self, seen: int, loss: float) -> None:
        pass


def test_threads_read_ahead_and_change_no_bit(tmp_path: Path) -> None:
    alone, slow = trained(tmp_path / "alone", 3)
    assert slow.readers == {"MainThread"}
    ahead, slow = trained(tmp_path / "ahead", 3, loader={"workers": 2, "prefetch": 3})
    assert slow.readers and all("loader" in name for name in slow.readers)
    assert model_bytes(alone.files.checkpoint) == model_bytes(ahead.files.checkpoint)
    assert not [t for t in threading.enumerate() if "loader" in t.name]


def test_batches_of_other_sizes_are_read_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BySchedule, "build", lambda self, settings: Growing(settings))
    assert issubclass(BySchedule, Control)
    runs = [trained(tmp_path / str(n), 2, loader={"workers": n})[0] for n in (0, 2)]
    steps = [[[*row.values()][:3] for row in each.record.rows["steps"]] for each in runs]
    assert steps[0] == steps[1] and len({len(each) for each in steps}) == 1
    one, other = (model_bytes(each.files.checkpoint) for each in runs)
    assert one == other


def test_time_that_ranks_wait_is_less_with_workers(tmp_path: Path) -> None:
    """A step has 30 ms of reading beside 50 ms of work: all is waited for, or less than half."""

    class Slower(Slow):
        time_s = 0.03

    class Busy(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return super().forward(x)

    def waited(name: str, **loader: int) -> float:
        job = small_job(loader=loader, train={"epochs": 1, "batch": 10})
        data = small_data()
        x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
        source = StreamedData(Slower(x, y), InMemory(x[:9], y[:9]), (8, 8), 8)
        (tmp_path / name).mkdir()
        training = prepare(job, Loopback(1), source, Files.of(tmp_path / name, job))
        training.model.__class__ = Busy
        finish(training)
        times_s = training.record.arrays()["steps"]["time_s"]
        return float(np.median(times_s[2:, PHASES.index("data")]))

    assert waited("alone") >= 0.03
    assert waited("ahead", workers=1) < 0.015


def prefetched(wrong: str = "") -> tuple[Workers, Prefetched]:
    here = str(Path(__file__).parent)
    workers = Workers(Loader(workers=2), [MapStyle("data", Items(wrong))], here, wait_s=60.0)
    return workers, Prefetched(workers, 0)


def test_processes_read_as_the_rank_would_and_end_with_it() -> None:
    workers, samples = prefetched()
    shares = [(np.arange(i, i + 3), 5) for i in range(0, 12, 3)]
    with workers:
        samples.plan(shares)
        for share in shares:
            x, pid = samples.take(*share)
            expected, own = workers.sources[0].take(*share)
            assert torch.equal(x, expected)
            assert (pid != own).all()
        assert not samples._read
        children = multiprocessing.active_children()
        assert children
        os.kill(children[0].pid or 0, signal.SIGUSR1)  # as Slurm tells all processes
        samples.plan(shares)
        assert torch.equal(samples.take(*shares[3])[0], expected)
    assert not multiprocessing.active_children()


@every(
    ("wrong", "says"),
    [
        ("raise", "data: item 7: OSError: image 7 is damaged"),
        ("kill", "loader.workers=2: items 6, 7, 8: a worker died: killed, or out of memory"),
        ("hang", "loader.workers=2: items 6, 7, 8: were not read in 0.5 s"),
    ],
)
def test_what_happens_to_a_worker_is_one_line_and_no_hang(wrong: str, says: str) -> None:
    workers, samples = prefetched(wrong)
    with workers:
        samples.plan([(np.arange(i, i + 3), 0) for i in (0, 3, 6, 9)])
        if wrong != "kill":
            samples.take(np.arange(3), 0)
            workers.wait_s = 0.5
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
            samples.take(np.arange(6, 9), 0)
    assert not multiprocessing.active_children()


def test_what_no_process_can_have_is_refused_at_once() -> None:
    unknown = MapStyle("data", [(torch.zeros(1), 0)])
    unknown.dataset = type("Local", (), {"__len__": lambda self: 1})()
    with pytest.raises(ConfigError, match=r"loader.workers=1: the datasets cannot be sent to a"):
        Workers(Loader(workers=1), [unknown], sys.path[0], 1.0)
