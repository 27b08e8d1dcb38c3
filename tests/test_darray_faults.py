"""Distributed arrays whose ranks do not do the same end with a message, and files stay whole."""

import re

import h5py
import numpy as np
import pytest
from test_faults import LATE_S, MPIRUN, PREPARE, launch

pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.skipif(MPIRUN is None, reason="needs mpirun, beside python or in PATH"),
]

PLAN = """
from cpdhpc.darray import Box, DistArray, Layout, WindowPlan
layout = Layout.grid((8,), (world.size,))
start, stop = layout.owner(world.rank)
window = Box((start[0] - 1,), (stop[0] + 1,))
plan = WindowPlan(world, layout, window, "wrap", name="pixels")
first = world.rank == 0
x = np.ones(plan.owned.shape)
"""
ENDS = {  # what ranks do otherwise -> what is said
    "a rank that never calls exchange": (
        "plan.exchange(x)\nplan.exchange(x) if first else time.sleep(600)",
        r"rank 0 \| exchange of plan 'pixels': waited [\d.]+ s for rank 1",
    ),
    "a rank that never makes the plan": (
        "WindowPlan(world, layout, window, name='late') if first else time.sleep(600)",
        r"rank 0 \| WindowPlan: waited [\d.]+ s for rank 1",
    ),
    "other dtypes": (
        "plan.exchange(x.astype(np.float32 if first else np.float64))",
        r"exchange of plan 'pixels': rank \d has exchange of float\d\d, further axes \(\), wire "
        r"raw, this rank exchange of float\d\d",
    ),
    "other dtypes through MPI": (
        "world = World(timeout_s=3, share_memory=False)\n"
        "plan = WindowPlan(world, layout, window, 'wrap', name='pixels')\n"
        "plan.exchange(x.astype(np.float32 if first else np.float64))",
        r"exchange of plan 'pixels': rank \d has exchange of float\d\d",
    ),
    "other further axes, where both were there before": (
        "a, b = np.ones((*x.shape, 2)), np.ones((*x.shape, 3))\n"
        "plan.exchange(a), plan.exchange(b)\nplan.exchange(a if first else b)",
        r"rank \d \| exchange of plan 'pixels': waited [\d.]+ s for rank \d",
    ),
    "an exchange and its transpose": (
        "plan.exchange(x) if first else plan.accumulate(np.ones(plan.window.shape))",
        r"plan 'pixels': rank \d has (exchange|accumulate) of float64",
    ),
}


QUICK = {"a rank that never calls exchange", "other dtypes", "in its turn"}


def rows(table):
    """The rows of a table as parameters; all but a few are left to make test-slow."""
    for name, row in table.items():
        yield pytest.param(*row, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("code, said", [*rows(ENDS)])
def test_the_job_ends_and_says_why(code, said):
    status, output, taken_s = launch(PLAN + code + "\nworld.barrier()")
    assert status != 0 and taken_s < LATE_S
    assert re.search(said, output), output


SAVE = """
layout = Layout.grid((64, 3), (world.size, 1))
data = np.arange(192.0).reshape(64, 3)
path = sys.argv[1] + "/a.h5"
DistArray.from_global(world, layout, data).save(path)
def die(*_, **__):
    open(sys.argv[1] + "/../killed", "w").close()  # mpirun may lose what is printed now
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == int(sys.argv[2]):
    STOP = die
DistArray.from_global(world, layout, -data).save(path, **HOW)
"""
MOMENTS = {  # where a rank is killed -> rank, how it saves, patched
    "before it writes": (1, "{}", "world.write_box"),
    "in its turn": (1, "{'chunks': (8, 3)}", "store.write_box"),
    "before the name is changed": (0, "{}", "store._sync"),
}


@pytest.mark.parametrize("rank, how, place", [*rows(MOMENTS)])
def test_a_killed_save_leaves_the_old_file(tmp_path, rank, how, place):
    """And the next save leaves nothing else in the folder."""
    code = SAVE.replace("STOP", place).replace("HOW", how)
    script = tmp_path / "job.py"
    script.write_text(f"import os, signal, sys\nfrom cpdhpc import store\n{PREPARE}{PLAN}{code}")
    folder = tmp_path / "files"
    folder.mkdir()
    status, output, _ = launch("", str(script), str(folder), str(rank))
    assert status != 0 and (tmp_path / "killed").exists(), output
    data = np.arange(192.0).reshape(64, 3)
    with h5py.File(folder / "a.h5") as file:
        assert (file["data"][...] == data).all()
    status, output, _ = launch("", str(script), str(folder), "9")
    assert status == 0, output
    with h5py.File(folder / "a.h5") as file:
        assert (file["data"][...] == -data).all()
    assert [path.name for path in folder.iterdir()] == ["a.h5"]
