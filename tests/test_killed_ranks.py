"""SIGKILL to a rank in the compiled wait of a call list, or while others are in theirs.

What ends the job is the launcher, which sees the death, or where it does not the world's time-out.
"""

import re
from pathlib import Path

import pytest
from test_faults import LATE_S, launch, launch_with_a_death, needs_mpirun

pytestmark = needs_mpirun

LOOKS = 50  # at a rank that must be found in the compiled wait, one after another

# Rank 2 and one of the others run an all-reduce that the third never comes to. A thread finds its
# rank in compiled code, which has no frame: in a function that calls it. Rank 1 is the one to die.
KILLED = """
import os, signal, sys, threading
from contextlib import suppress
from pathlib import Path
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.recorded import RecordedCall
from cpdhpc.world.node_memory import CallBoard
world = World(timeout_s=TIMEOUT_S)
me, folder, main = world.rank, Path("FOLDER"), threading.get_ident()
of_recording = RecordedCall.run, RecordedCall.run_agreed, RecordedCall.Test
callers = {each.__code__ for each in (*of_recording, CallBoard.Test)}
method = Allreduce("raw", "direct")
call = method.prepare(world, [x]).run if PREPARED else (lambda: method.run(world, [x]))
for _ in range(3):
    call()
maps = [line.split(None, 5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
assert any("memfd:cpdhpc" in each for each in maps)
(folder / f"maps{me}").write_text("".join(sorted({m + "\\n" for m in maps if "/dev/shm/" in m})))
mortal = world.gather(os.getpid())[1]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(then):
    seen = 0
    while seen < LOOKS:
        time.sleep(0.002)
        seen = seen + 1 if sys._current_frames()[main].f_code in callers else 0
    then()

def await_found(*ranks):
    while not all((folder / f"found{rank}").exists() for rank in ranks):
        time.sleep(0.01)

def found():
    (folder / f"found{me}").touch()
    if me == 1:
        await_found(2)
        die()

if me == LATE:
    await_found(*{0, 1, 2} - {me})
    if me == 1:
        die()
    with suppress(OSError):  # the launcher has seen it
        while Path(f"/proc/{mortal}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
threading.Thread(target=watch, args=[found], daemon=True).start()
call()
"""


def killed(folder, late, prepared, timeout_s):
    """What three ranks run, with rank 1 killed."""
    code = KILLED.replace("TIMEOUT_S", str(timeout_s)).replace("LATE", str(late))
    code = code.replace("FOLDER", str(folder))
    return code.replace("PREPARED", str(prepared)).replace("LOOKS", str(LOOKS))


def check(folder, late, output):
    """Each was in its compiled wait, and no file in memory is left."""
    waited = {each.name for each in folder.glob("found*")}
    assert waited >= {f"found{rank}" for rank in range(3) if rank != late}, output
    mapped = [folder / f"maps{rank}" for rank in range(3)]
    left = [path for each in mapped for path in each.read_text().splitlines()]
    assert not [path for path in left if Path(path).exists()]


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "plain"])
@pytest.mark.parametrize("late", [0, 1], ids=["as-it-waits", "as-others-wait"])
def test_the_launcher_ends_the_job(tmp_path, late, prepared):
    status, output, taken_s = launch(killed(tmp_path, late, prepared, 900), ranks=3)
    check(tmp_path, late, output)
    assert status != 0 and taken_s < LATE_S and "waited" not in output, output


@pytest.mark.slow  # as it waits, longer than a busy machine may let a rank stand
@pytest.mark.parametrize("late", [0, 1], ids=["as-it-waits", "as-others-wait"])
def test_where_the_launcher_lets_it_go_on_the_time_out_does(tmp_path, late):
    said = r"rank [02] \| allreduce direct: waited [\d.]+ s for rank 1,"
    code = killed(tmp_path, late, True, 30)
    status, output = launch_with_a_death(code, 3, ("--enable-recovery",), said, 1)
    check(tmp_path, late, output)
    assert re.search(said, output) and status != 0, output
