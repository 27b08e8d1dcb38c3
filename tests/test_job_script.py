"""What a job's script does, with stand-ins for the launcher and scontrol on PATH."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from every import every
from rendering import STUDY, array_of
from training import ran

from cpdhpc.lab.study import site as standalone
from cpdhpc.lab.study.site import Site

LAUNCHED = """#!/bin/bash
echo "launched $*" >> "$RECORD"
trap 'echo usr1 >> "$RECORD"; [ -e more ] && touch told || exit 85' USR1
trap 'echo term >> "$RECORD"; exit 85' TERM
touch ready
if [ -n "${ENDS:-}" ]; then exit "$ENDS"; fi
while [ ! -e told ] || [ -e more ]; do sleep 0.02; done
exit 0
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$RECORD"
[ -z "${REFUSES:-}" ]
"""


class Job:
    """A rendered script that runs here."""

    def __init__(self, directory: Path, text: str, **given: str) -> None:
        self.directory, self.record = directory, directory / "record"
        for name, program in (("mpirun", LAUNCHED), ("scontrol", SCONTROL)):
            (directory / name).write_text(program)
            (directory / name).chmod(0o755)
        script = directory / "script"
        script.write_text(text)
        ours = {
            "PATH": f"{directory}:{os.environ['PATH']}",
            "RECORD": str(self.record),
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_JOB_NAME": "demo",
        }
        self.process = subprocess.Popen(
            ["bash", str(script)],
            cwd=directory,
            env=ours | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def tell(self, number: int) -> None:
        self.until("ready")
        self.process.send_signal(number)

    def until(self, name: str) -> None:
        end_s = time.monotonic() + 1800
        while not (self.directory / name).exists():
            assert time.monotonic() < end_s and self.process.poll() is None, self.process
            time.sleep(0.01)

    def end(self) -> tuple[int, list[str], str]:
        shown, _ = self.process.communicate(timeout=1800)
        return self.process.returncode, self.record.read_text().splitlines()[1:], shown


def test_usr1_is_forwarded_and_the_job_requeued_by_its_index(tmp_path: Path) -> None:
    job = Job(tmp_path, array_of(Site()))
    job.tell(signal.SIGUSR1)
    assert job.end() == (85, ["usr1", "scontrol requeue 7_3"], "")


def test_the_script_waits_on_after_a_signal(tmp_path: Path) -> None:
    (tmp_path / "more").touch()  # the ranks go on for a while
    job = Job(tmp_path, array_of(Site()))
    job.tell(signal.SIGUSR1)
    job.until("told")
    (tmp_path / "more").unlink()
    assert job.end() == (0, ["usr1"], "")


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, array_of(Site()))
    job.tell(signal.SIGTERM)
    assert job.end() == (85, ["term"], "demo: is not requeued: submit it again to go on\n")


@every("status", [0, 1, 137])
def test_the_status_of_the_ranks_is_the_jobs(tmp_path: Path, status: int) -> None:
    assert Job(tmp_path, array_of(Site()), ENDS=str(status)).end() == (status, [], "")


@every(
    ("given", "record", "words"),
    [
        ({"SLURM_RESTART_COUNT": "3"}, [], "is not requeued: submit it again to go on"),
        ({"SLURM_RESTART_COUNT": "2"}, ["scontrol requeue 7_3"], ""),
        ({"REFUSES": "1"}, ["scontrol requeue 7_3"], "submit it again to go on"),
    ],
)
def test_where_requeuing_ends(
    tmp_path: Path, given: dict[str, str], record: list[str], words: str
) -> None:
    status, found, shown = Job(tmp_path, array_of(Site(max_requeues=3)), ENDS="85", **given).end()
    assert (status, found) == (85, record)
    assert words in shown and bool(words) == bool(shown)


@every(("restarts", "again"), [("0", True), ("1", True), ("2", False)])
def test_a_failure_is_tried_again(tmp_path: Path, restarts: str, again: bool) -> None:
    run = STUDY.run.model_copy(update={"retries": 2})
    text = array_of(Site(), study=STUDY.model_copy(update={"run": run}))
    status, found, _ = Job(tmp_path, text, ENDS="1", SLURM_RESTART_COUNT=restarts).end()
    assert (status, found) == (1, ["scontrol requeue 7_3"] if again else [])


def test_a_setup_line_that_fails_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, array_of(Site(setup=("cd /nowhere/at/all",))))
    shown, _ = job.process.communicate(timeout=1800)
    assert job.process.returncode == 1 and "nowhere" in shown
    assert not job.record.exists()


def test_train_script_wants_a_job_file(tmp_path: Path) -> None:
    text = standalone.scripts(Site())["train.sbatch"]
    job = Job(tmp_path, text)
    shown, _ = job.process.communicate(timeout=1800)
    assert job.process.returncode == 2 and "sbatch slurm/train.sbatch JOB.toml" in shown


def test_verify_script_names_its_files_by_the_job(tmp_path: Path) -> None:
    text = standalone.scripts(Site())["verify.sbatch"]
    shape = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    job = Job(tmp_path, text, ENDS="1", **shape)
    assert job.end()[0] == 1  # as verify's
    launched = job.record.read_text().splitlines()[0]
    assert "verify --out verify-7.h5 --html verify-7.html" in launched


def test_without_the_launcher_it_says_what_to_load(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(array_of(Site()))
    bash = shutil.which("bash")
    assert bash is not None
    done = ran(
        [bash, str(script)],
        env={"PATH": str(tmp_path), "SLURM_JOB_NAME": "demo", "SLURM_ARRAY_TASK_ID": "3"},
    )
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == (
        "demo: mpirun is not on PATH: load the MPI that has it (docs/reference/sites.md)\n"
    )


def test_python_may_be_in_a_container(tmp_path: Path) -> None:
    site = Site(container="my image.sif", runtime="apptainer exec --nv", python="python3 -u")
    job = Job(tmp_path, array_of(site), ENDS="0")
    assert job.process.wait(60) == 0
    (launched,) = job.record.read_text().splitlines()
    assert launched.startswith(
        "launched -n 4 --map-by ppr:2:node apptainer exec --nv my image.sif python3 -u -m cpdhpc "
    )
