"""Recordings of real ranks: one file, that of as many virtual ranks; refusals on all alike."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from training import run_job, small_job

from cpdhpc.config import UserError
from cpdhpc.torch.precision.recorder import Recorder
from cpdhpc.torch.precision.recording import load
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback


def test_the_file_of_all_ranks_is_that_of_virtual_ones(world: World, folder: Path):
    """Of two ranks a process; a batch of 25 on 4 or more ranks is shared out unevenly."""
    job = small_job(
        train={"virtual_ranks": 2, "batch": 25},
        record={"every": 3, "count": 2},
        gradient={"aggregator": "lowbit", "wire": "e4m3"},
    )
    ours = World(virtual_ranks=2)
    done = run_job(job, ours, folder)
    problems = []
    if world.process == 0:
        alone = folder / "alone"
        alone.mkdir()
        plain = run_job(job, Loopback(ours.ranks), alone)
        one, other = (load(each.files.recording(job)) for each in (done, plain))
        problems = [] if len(one.tensors) == len(other.tensors) > 12 else ["number"]
        for a, b in zip(one.tensors, other.tensors, strict=False):
            if (a.kind, a.name, a.rows) != (b.kind, b.name, b.rows):
                problems.append(f"{a.kind} {a.name}: {a.rows} of {b.rows}")
            elif not np.array_equal(a.read(), b.read()):
                problems.append(f"{a.kind} {a.name}: values")
    assert world.gather(problems)[0] == []
    ours.free()


def test_what_one_rank_finds_wrong_all_are_told(world: World, folder: Path):
    """Settings and patterns that differ, a file that is there, a mean of another kind."""
    last = world.process == world.processes - 1
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    reducer = GradientReducer(model, world)
    found = []

    def told(path: Any = folder / "r.h5", **settings: Any) -> None:
        try:
            Recorder(model, path, reducer, **settings)
            found.append("nothing")
        except (UserError, ValueError, TypeError) as error:
            found.append(str(error))

    told(None if last else folder / "r.h5", every=1)
    told(every=1 + last)
    told(every=1, layers=("1",) if last else ("0",))
    (folder / "r.h5").write_bytes(b"mine")
    told(every=1)
    (folder / "r.h5").unlink(missing_ok=True)
    world.barrier()
    with Recorder(model, folder / "r.h5", reducer, every=1) as recorder:
        model(torch.ones(4, 3)).sum().backward()
        mean = reducer.reduce()
        if last:
            recorder._seen["activations", "0", 0] = {0: "no array"}  # type: ignore[dict-item]
        try:
            recorder.step(mean)
        except Exception as error:
            found.append(type(error).__name__)
    everyone = world.gather(found)
    assert everyone == [everyone[0]] * world.processes
    parts = [
        "path=None: must be a path",
        "every",
        "'1' matches none",
        "r.h5: exists already",
        "AttributeError",
    ]
    assert len(everyone[0]) == len(parts)
    assert all(part in said for part, said in zip(parts, everyone[0], strict=True)), everyone[0]
