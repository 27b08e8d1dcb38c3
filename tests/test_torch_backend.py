"""The backend "cpdhpc" of torch.distributed: how it starts and ends, alone and under mpirun."""

import configparser
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_faults import launch, launch_with_a_death, needs_mpirun
from torch import distributed as dist
from training import ran

import cpdhpc.torch
from cpdhpc.errors import UserError
from cpdhpc.torch.backend import registration, start

ROOT = Path(cpdhpc.__file__).parents[1]


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of one process, without mpirun."""
    command = [sys.executable, "-W", "error", "-c", program]
    return ran(command, env={**os.environ, **environment})


def test_torch_knows_the_backend_by_its_entry_point() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (line,) = config["options.entry_points"]["torch.backends"].split("\n")[1:]
    module, function = line.partition("=")[2].strip().split(":")
    assert getattr(importlib.import_module(module), function) is registration.register
    registration.register()  # a second time
    assert dist.Backend.backend_list.count("cpdhpc") == 1
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo", "what others ask for"


def test_registering_loads_nothing_more_and_starts_nothing() -> None:
    program = (
        "import sys, torch\n"
        "before = {*sys.modules}\n"
        "import cpdhpc.torch, torch.distributed\n"
        "assert 'cpdhpc' in torch.distributed.Backend.backend_list\n"
        "ours = {m for m in {*sys.modules} - before if m.startswith('cpdhpc')}\n"
        "assert 'mpi4py' not in sys.modules and 'cpdhpc.torch.backend.start' not in ours, ours\n"
    )
    done = run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


ALONE = """
import cpdhpc.torch, torch
from torch import distributed as dist
dist.init_process_group("cpdhpc", init_method="mpi://")
x = torch.arange(6.0)
dist.all_reduce(x); dist.broadcast(x, 0); dist.barrier()
out, share, got = torch.empty(6), torch.empty(6), torch.empty(6)
dist.all_gather_single(out, x); dist.reduce_scatter_single(share, x)
dist.all_to_all_single(got, x); dist.reduce(x, 0)
outs = [torch.empty(6)]
dist.all_gather(outs, x); dist.gather(x, outs, 0); dist.scatter(x, outs, 0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert all(torch.equal(torch.arange(6.0), each) for each in (x, out, share, got, *outs))
dist.destroy_process_group()
print("as one rank")
"""


def test_one_process_needs_no_mpirun() -> None:
    done = run(ALONE)
    assert done.stdout == "as one rank\n", done.stderr


def test_without_mpi_one_line_says_how_to_start() -> None:
    program = (
        "import cpdhpc.torch\nfrom torch import distributed as dist\n"
        "dist.init_process_group('cpdhpc', init_method='mpi://')\n"
    )
    done = run(program, RANK="1", WORLD_SIZE="4")  # as torchrun sets them
    assert done.stderr.splitlines()[-1].endswith(
        "UserError: cpdhpc: 4 ranks, but MPI has 1 process: start the program by "
        "mpirun -n RANKS python ... or srun --mpi=pmix python ..."
    )


def test_other_numbers_than_those_of_mpi_are_refused() -> None:
    with pytest.raises(UserError, match="cpdhpc: rank=1: is 0 in MPI: leave it out"):
        start.rendezvous("mpi://?rank=1&world_size=1")


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded that it may lack."""
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    monkeypatch.setitem(sys.modules, "cpdhpc.torch.backend.start", None)
    with pytest.raises(UserError, match=r"torch is 2.12.1\+cpu: must be 2.13 or newer$"):
        dist.init_process_group("cpdhpc", init_method="mpi://")
    with pytest.raises(UserError, match=r"torch is 2.12.1\+cpu: must be 2.13 or newer$"):
        assert registration.set_wires


def test_a_torch_of_the_future_that_lacks_something_is_refused() -> None:
    program = (
        "import cpdhpc.torch, torch\n"
        "torch.__version__ = '3.1.0'\n"
        "del torch.distributed.AllreduceOptions\n"
        "torch.distributed.init_process_group('cpdhpc', init_method='mpi://')\n"
    )
    assert run(program).stderr.splitlines()[-1] == (
        "cpdhpc.errors.UserError: cpdhpc: torch is 3.1.0: must be 2.13 or newer; 2.15 is the "
        "newest that was tried: module 'torch.distributed' has no attribute 'AllreduceOptions'"
    )


def test_mpi_without_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "thread_level", lambda mpi: "funneled")
    with pytest.raises(UserError, match="thread level 'funneled': must be 'multiple'"):
        start.mpi_with(1)


def test_wires_are_for_groups_of_this_backend(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="must be a process group of 'cpdhpc'"):
            cpdhpc.torch.set_wires(all_reduce="e4m3")
    finally:
        dist.destroy_process_group()


def test_a_member_that_does_not_come_is_named() -> None:
    class Store:
        """Of a group of two, of which one comes."""

        def __init__(self) -> None:
            self.keys: dict[str, str] = {}

        def set(self, key: str, value: str) -> None:
            self.keys[key] = value

        def add(self, key: str, number: int) -> int:
            return number

        def check(self, keys: list[str]) -> bool:
            return all(key in self.keys for key in keys)

        def wait(self, keys: list[str], limit: Any) -> None:
            raise TimeoutError

    with pytest.raises(RuntimeError, match=r"new process group: waited 0.5 s for rank 1"):
        start.meet(Store(), 0, 2, 0, None, 0.5)


STARTED = """
import time
from datetime import timedelta
import cpdhpc.torch, torch
from torch import distributed as dist
dist.init_process_group("cpdhpc", init_method="mpi://")
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=2))
me = dist.get_rank()
"""


@needs_mpirun
def test_an_error_that_nobody_catches_is_shown_and_ends_the_job() -> None:
    program = STARTED + "dist.all_reduce(torch.ones(2 + me)) if me else time.sleep(600)"
    status, output, _ = launch(program, python=())
    assert status not in (0, None)
    assert "all_reduce SUM float32[3]: timeout after 2.0 s of waiting for rank 0" in output


LEAVES = """
left = [dist.all_reduce(torch.ones(1_000_000), async_op=True)]
left.append(dist.barrier(async_op=True).get_future().then(lambda future: time.sleep(600)))
if me:
    left += [dist.all_reduce(torch.ones(1_000_000), async_op=True)]
    left += [dist.isend(torch.ones(5_000_000), 0)]
print("at its end", flush=True)
"""


@needs_mpirun
def test_a_program_ends_whatever_it_has_left_under_way() -> None:
    status, output, _ = launch(STARTED + LEAVES, python=())
    assert status == 0 and output.count("at its end") == 2, output


DIES = """
dist.all_reduce(torch.ones(3))
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    print(f"survived {me}: {error}", flush=True)
    os._exit(0)
"""


@needs_mpirun
def test_a_rank_that_dies_ends_the_wait_of_the_others() -> None:
    """Where mpirun outlives it; else that ends them."""
    program = "import os, signal" + STARTED + DIES
    _, output = launch_with_a_death(program, ranks=3, times=2)
    for rank in (0, 2):
        assert f"survived {rank}: all_reduce SUM float32[3]: " in output, output
