"""Jobs that go wrong end, with a message; what it says is in tests/mpi/test_mpi_faults.py."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from studies import kill_all
from training import environment, leave_sessions, ran

from cpdhpc.world.ending import Begun
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Ranks

ROOT = Path(__file__).parents[1]
MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs mpirun, beside python or in PATH")
pytestmark = needs_mpirun

PREPARE = """
import time
import numpy as np
from cpdhpc import World, allreduce
world = World(timeout_s=900)
x = np.ones(5000, np.float32)
allreduce(world, x)
"""

LATE_S = 1800  # a job that has not ended by then waits for a sleeper, whatever the machine

LEAVE_S = 5  # of a job whose ranks are through


def command_of(code, arguments, ranks, options=(), python=("-m", "mpi4py")):
    """What runs python -m mpi4py on some ranks."""
    local = str(ROOT / "slurm" / "mpirun-local")
    return [local, str(ranks), *options, sys.executable, *python, *arguments] + (
        ["-c", PREPARE + code] if code else []
    )


def launch(code, *arguments, ranks=2, options=(), python=("-m", "mpi4py")):
    """Run it; return exit status, all output, seconds."""
    start_s = time.monotonic()
    done = ran(command_of(code, arguments, ranks, options, python))
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start_s


# Whatever the machine, ranks 0 and 2 hear of each other, and both have said it when the job ends.
NEVER_COMES = """
from pathlib import Path
from cpdhpc.world import ending
world._timeout._timeout_s = 1
ending.GRACE_S = 900
me, say = world.process, ending.say

class UntilTold:
    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Recv(self, *alarm):
        self.comm.Recv(*alarm)
        ending.GRACE_S = 0

def say_both(lines):
    say(lines)
    Path("FOLDER", f"said{me}").touch()
    while not Path("FOLDER", f"said{2 - me}").exists():
        time.sleep(0.01)

world._timeout._comm, ending.say = UntilTold(world._timeout._comm), say_both
time.sleep(3600) if me == 1 else world.barrier()
"""
STOPPED = """
import os, signal, threading
from pathlib import Path
from cpdhpc.collectives.allreduce import Allreduce
prepared = Allreduce("raw", "ring").prepare(world, [x])
prepared.run()
mortal = world.gather(os.getpid())[1]
if world.process == 1:
    threading.Timer(0.2, os.kill, (mortal, signal.SIGSTOP)).start()
else:
    while Path(f"/proc/{mortal}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    world._timeout._timeout_s = 0.3
prepared.run()
"""


def test_all_who_wait_report_and_a_stopped_rank_does_not_hold_up_the_end(tmp_path):
    """Two jobs at a time, as both wait most of theirs; the second stops in a call list."""
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(launch, NEVER_COMES.replace("FOLDER", str(tmp_path)), ranks=3)
        stopped = pool.submit(launch, STOPPED)
        for status, output, taken_s in (waiting.result(), stopped.result()):
            assert status != 0 and taken_s < LATE_S, output
    for rank in (0, 2):
        said = rf"rank {rank} \| barrier: waited [\d.]+ s for rank 1\n"
        assert re.search(said, waiting.result()[1]), waiting.result()
    said = r"rank 0 \| allreduce ring: waited [\d.]+ s for rank 1, round 1, chunk 1\n"
    assert re.search(said, stopped.result()[1]), stopped.result()


def test_a_world_that_a_rank_does_not_make_ends_the_job():
    """Whatever that rank does instead: MPI's own calls have no time-out."""
    code = "World(timeout_s=0.5) if world.rank == 0 else time.sleep(3600)"
    status, output, taken_s = launch(code)
    assert status != 0 and taken_s < LATE_S, output
    assert re.search(r"rank 0 of 2 \| World: waited [\d.]+ s for another rank to make it", output)


def test_an_error_that_nobody_catches_ends_the_job_without_mpi4pys_help():
    """Of arguments by which the others could not be told: the world itself is wrong."""
    status, output, taken_s = launch(
        "world = World(timeout_s=900); allreduce(3 if world.process == 1 else world, x)", python=()
    )
    assert status != 0 and taken_s < LATE_S
    assert (
        "rank 1 | ends the job: ArgumentTypeError: allreduce: world is int: must be a World"
        in output
    ), output


def test_a_refusal_that_others_do_not_hear_of_names_its_rank_once(capsys):
    class Deaf:
        """Processes 0 to 3, of which this is 2 and no other ever looks."""

        Get_rank, Get_size = (lambda self: 2), (lambda self: 4)
        isend = staticmethod(lambda *_: SimpleNamespace(test=lambda: (False, None)))
        Iprobe = staticmethod(lambda *_: False)
        Abort = staticmethod(lambda status: None)

    world = object.__new__(World)
    Ranks.__init__(world, 2, 4, 1)
    world._duplicate, world._most_tag, world.timeout_s = Deaf(), 1, 0.01
    world._begun = [Begun()]
    with pytest.raises(SystemExit):
        world.refuse(ValueError("layer 1: input has shape (3,)"))
    said = "rank 2 | layer 1: input has shape (3,): rank 0, 1, 3 did not learn of it in 0 s\n"
    assert capsys.readouterr().err == said


def test_at_exit_after_a_death_mpi_has_some_time_only(tmp_path):
    """What mpi4py registers for the very end is stood in for by libc's pause: it holds the GIL."""
    code = f"""
import atexit, ctypes
from cpdhpc.world.ending import limit_finalise
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)
limit_finalise(0.1)
file = open({str(tmp_path / "file")!r}, "w")  # flushed when Python ends
file.write("whole")
atexit.register(print, "work is done")
limit_finalise(0.2)
"""
    done = ran([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert done.stdout == "work is done\n"
    assert done.stderr == "MPI_Finalize: takes more than 0.2 s after a death: ended without it\n"
    assert (tmp_path / "file").read_text() == "whole"


HANGS = """
import ctypes
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)  # before mpi4py's, so it comes after
from functools import partial
from mpi4py import MPI
from cpdhpc import World
from cpdhpc.world import ending
ending.limit_finalise = partial(ending.limit_finalise, 0.1)
world = World()
world.failure(MPI.Exception(MPI.ERR_PROC_FAILED), "allreduce")
print("work is done")
"""


def test_whoever_hears_of_a_death_ends_in_time():
    """Without World.shrink, too; here MPI_Finalize ends, and what comes behind it does not."""
    done = ran(
        [sys.executable, "-c", HANGS], env=environment() | {"PYTHONPATH": str(ROOT)}, check=True
    )
    assert done.stdout == "work is done\n"
    assert "MPI_Finalize: takes more than 0.1 s" in done.stderr


def test_a_test_that_fails_on_one_rank_fails_on_all(tmp_path, monkeypatch):
    """Where killed launchers had the number that this one will have, too."""
    (tmp_path / "sessions").mkdir()
    leave_sessions(tmp_path / "sessions", monkeypatch)
    shutil.copy(ROOT / "tests/mpi/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "def test_bad(world):\n"
        "    assert world.process == 0, 'rank 1 is bad'\n"
        "def test_good(world):\n"
        "    world.barrier()\n"
        f"    open(r'{tmp_path}/good%d' % world.process, 'w').close()\n"
    )
    words = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--color=no"]
    status, output, taken_s = launch("", *words, str(tmp_path / "test_it.py"))
    assert status != 0 and taken_s < LATE_S
    assert "rank 1 is bad" in output and "test_bad failed on ranks [1]" in output, output
    assert {path.name for path in tmp_path.glob("good*")} == {"good0", "good1"}, output


DYING = """
import os, signal, threading
from cpdhpc import RankFailure
world, me, step, lost = World(timeout_s=900), World().rank, 0, 0
x = np.full(1 << 19, float(1 << me), np.float32)  # sums are whole numbers below 2**11: exact
kept = x.copy()
while True:
    if me == 2 and step == 5:
        threading.Timer(DELAY_S, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    wire, algorithm = ("raw", "fp16")[step % 2], ("ring", "tree", "direct", "gather")[step % 4]
    try:
        if step == 24:  # all that are left leave together: a death must not find some gone
            time.sleep(3600 * (me == 2))
            world.barrier()
            break
        total = allreduce(world, x, wire, algorithm)
    except RankFailure as failure:
        assert "process 2 died" in str(failure) and "allreduce" in str(failure)
        assert failure.processes == (2,)  # on those too that heard of it from others
        assert (x == kept).all()
        world = world.shrink()
        step, lost = -int(world.max(np.array([-step]))[0]), lost + 1
        continue
    assert (total == sum(1 << r for r in range(4) if not (lost and r == 2))).all()
    step += 1
print("survived", me, world.processes, lost, flush=True)
"""


def has_fault_tolerance():
    shown = ran([MPIRUN, "--version"])
    return "Open MPI" in shown.stdout


def launch_with_a_death(code, ranks=4, option=("--with-ft", "ulfm"), says="survived", times=3):
    """Run it with an option by which mpirun outlives the death of a rank.

    Return exit status and output. Open MPI's mpirun may not see the end of such a job, or waits for
    a lock of its own when no rank is left: once those that live have said so that many times, it
    has LEAVE_S to end. Its status is None where it does not.
    """
    if not has_fault_tolerance():
        pytest.skip(f"needs Open MPI: its mpirun {' '.join(option)}")
    output = ""
    with subprocess.Popen(
        command_of(code, (), ranks, option),
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        limit = threading.Timer(LATE_S, kill_all, [process])
        limit.start()
        while len(re.findall(says, output)) < times and (line := process.stdout.readline()):
            output += line
        try:
            output += process.communicate(timeout=LEAVE_S)[0]
            status = process.returncode
        except subprocess.TimeoutExpired:
            kill_all(process)
            status = None
        limit.cancel()
    return status, output


@pytest.mark.parametrize("delay_s", [0.004, pytest.param(0.0, marks=pytest.mark.slow)])
def test_survivors_go_on_after_a_death(delay_s):
    status, output = launch_with_a_death(DYING.replace("DELAY_S", str(delay_s)))
    for rank in (0, 1, 3):
        assert f"survived {rank} 3 1" in output, output
    assert not status, output


def test_a_death_ends_the_job_where_mpi_has_no_fault_tolerance():
    status, output, taken_s = launch(
        """
import os, signal
if world.process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
allreduce(World(timeout_s=900), x)
"""
    )
    assert status != 0 and taken_s < LATE_S, output
