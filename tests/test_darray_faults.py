"""Files of distributed arrays stay whole where a rank is killed while they are written."""

import sys

import h5py
import numpy as np
import pytest
from test_faults import MPIRUN, PREPARE, launch

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun, beside python or in PATH")

PLAN = """
from cpdhpc.darray import Box, DistArray, Layout, WindowPlan
layout = Layout.grid((8,), (world.size,))
start, stop = layout.owner(world.rank)
window = Box((start[0] - 1,), (stop[0] + 1,))
plan = WindowPlan(world, layout, window, "wrap", name="pixels")
first = world.rank == 0
x = np.ones(plan.owned.shape)
"""
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
MOMENTS = [  # the rank that is killed, how it saves, the function that kills it
    pytest.param(1, "{}", "world.write_box", id="before it writes", marks=pytest.mark.slow),
    pytest.param(1, "{'chunks': (8, 3)}", "store.write_box", id="in its turn"),
    pytest.param(0, "{}", "store._sync", id="before the name is changed", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rank, how, place", MOMENTS)
def test_a_killed_save_leaves_the_old_file(tmp_path, monkeypatch, rank, how, place):
    """And the next save, here of one process, leaves nothing else in the folder."""
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
    monkeypatch.setattr(sys, "argv", ["job.py", str(folder), "9"])
    exec(script.read_text(), {})
    with h5py.File(folder / "a.h5") as file:
        assert (file["data"][...] == -data).all()
    assert [path.name for path in folder.iterdir()] == ["a.h5"]
