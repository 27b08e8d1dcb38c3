"""Stages on ranks of their own: the bits of one process, and errors that end all alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import finish, prepared, run_job

from cpdhpc import store
from cpdhpc.config import ConfigError, merge, validate
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.lab.train.samples import Dataset
from cpdhpc.lab.train.training import Training
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

JOB: dict[str, Any] = {
    "name": "m",
    "model": {"name": "residual_mlp", "width": 8, "blocks": 3},
    "train": {"epochs": 2, "batch": 24, "threads": 1, "telemetry_every": 2, "learning_rate": 0.05},
}
METHODS: dict[str, dict[str, Any]] = {
    "penalty": {"stages": {"correction": 0.4, "refresh_every": 3}},
    "lagrangian": {
        "stages": {"method": "lagrangian", "filter": 2, "wire": "e4m3", "local_steps": 2},
        "gradient": {"aggregator": "lowbit", "rounding": "stochastic"},
        "optimizer": {"name": "adam"},
    },
}
COUNTS = {1: 4, 2: 4, 3: 3, 4: 4, 6: 3}  # stages by processes; 6: two groups


def data() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.random((90, 8, 8), np.float32), rng.integers(0, 4, 90)
    return Dataset(x[:60], y[:60], x[60:], y[60:], classes=4)


def trained(job: Job, world: Any, folder: Path) -> Training:
    training = run_job(job, world, folder, data())
    training.close()
    return training


def contents(files: Files) -> list[tuple[str, str, bytes]]:
    """All arrays of checkpoint and record but times, and bytes, which are of other ranks."""
    return [
        (group, name, array.tobytes())
        for path in (files.checkpoint, files.record)
        for group, arrays in store.read(path)[0].items()
        for name, array in arrays.items()
        if not name.endswith("time_s") and name != "wire_bytes"
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [None, 2])
def test_stages_on_ranks_have_the_bits_of_one_process(
    world: World, folder: Path, method: str, count: int | None
) -> None:
    """count 2 on 4 and 6 processes: groups of ranks, whose shares one process plays too."""
    stages = {"count": count or COUNTS.get(world.processes, world.processes)}
    if (stages["count"] % world.processes) * (world.processes % stages["count"]):
        pytest.skip(f"{stages['count']} stages and {world.processes} processes")
    job = validate(Job, merge(merge(JOB, METHODS[method]), {"stages": stages}), "test")
    real = trained(job, world, folder)

    def alone() -> list[tuple[str, str]]:
        (folder / "alone").mkdir()
        shares = max(1, world.processes // stages["count"])
        one = trained(job, Loopback(shares), folder / "alone")
        assert real.world.ranks == one.world.ranks
        pairs = zip(contents(real.files), contents(one.files), strict=True)
        return [mine[:2] for mine, other in pairs if mine != other]

    assert world.gather(alone() if world.process == 0 else [])[0] == []


def gone(*_: object) -> Any:
    raise KeyError("samples are gone")


def test_what_one_rank_finds_ends_all_alike(world: World, folder: Path) -> None:
    """NaN among the first stage's samples, data that fails there or at the last: nobody waits."""
    job = validate(Job, merge(JOB, {"stages": {"count": COUNTS[world.processes]}}), "test")
    said = []
    for damage in ("nan", "inputs", "targets"):
        training = prepared(job, world, folder, data())
        before = [p.detach().clone() for p in training.model.parameters()]
        if world.process == 0 and damage == "nan":
            training.train.x[:] = np.nan  # type: ignore[attr-defined]
        if world.process == {"inputs": 0, "targets": world.processes - 1}.get(damage):
            training.train.take = gone  # type: ignore[method-assign]
        try:
            finish(training)
        except (Diverged, KeyError) as error:
            same = all(a.equal(b) for a, b in zip(training.model.parameters(), before, strict=True))
            said.append((damage, type(error).__name__, str(error).splitlines()[0], same))
        training.close()
    told = world.gather(said)
    kinds = [("nan", "Diverged"), ("inputs", "KeyError"), ("targets", "KeyError")]
    assert [each[:2] for each in told[0]] == kinds
    assert told == [told[0]] * world.processes
    assert all(each[3] for each in told[0])


def test_processes_that_no_stages_fit(world: World, folder: Path) -> None:
    count = world.processes + 1
    if count % world.processes == 0:
        pytest.skip("a process holds any number of stages")
    job = validate(Job, merge(JOB, {"stages": {"count": count}}), "test")
    said = ""
    try:
        prepared(job, world, folder, data())
    except ConfigError as error:
        said = str(error)
    expected = (
        f"m-s0: stages.count={count} on {world.processes} processes: their number should divide "
        "it, or be a multiple of it"
    )
    assert world.gather(said) == [expected] * world.processes
