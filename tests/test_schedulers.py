"""PBS, LSF and Flux: submission, states, cancellation and job scripts, with stand-ins on PATH."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import queues
from every import every
from rendering import STUDY, array_of
from studies import some_result
from training import ROOT, environment, ran

from cpdhpc.config import ConfigError
from cpdhpc.lab.schedulers import SCHEDULERS, current
from cpdhpc.lab.schedulers.base import JobState, NoAnswer, Refusal, SchedulerError
from cpdhpc.lab.study import submit as module
from cpdhpc.lab.study.folder import RECORD, Folder, SubmittedJob, recorded
from cpdhpc.lab.study.site import Site
from cpdhpc.lab.study.status import look
from cpdhpc.lab.study.submit import cancel, submit, unfinished
from cpdhpc.lab.study_data.study_file import write_result
from cpdhpc.whole_files import sealed_json

OTHERS = ["pbs", "lsf", "flux"]
fresh = pytest.mark.parametrize("name", OTHERS)  # each in a directory of its own
FOLDER = Folder(Path("results/demo"))
HERE = "results/demo/scripts"


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins, first on PATH, in an empty directory."""
    queues.install(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)


def submitted(name: str, said: list[str] | None = None) -> list[SubmittedJob]:
    said = [] if said is None else said
    return submit(STUDY, FOLDER, Site(scheduler=name), said.append).jobs


def calls(*first: str) -> list[str]:
    lines = Path("calls").read_text().splitlines()
    return [line for line in lines if line.startswith(" ".join(first))]


def becomes(number: int, index: int | None, state: str, code: int | None = None) -> None:
    found = queues.elements()
    for each in found:
        if each["number"] == number and each["index"] == index:
            each |= {"state": state, "code": code}
    queues.keep(found)


ARRAYS = [
    SubmittedJob(10, "demo-1x2", {0: 0, 1: 1}),
    SubmittedJob(11, "demo-2x2-from2", {2: 0, 3: 1}),
]
JOBS = {
    "pbs": [*ARRAYS, SubmittedJob(12, "demo-collect", {})],
    "lsf": [
        SubmittedJob(10, "demo-1x2", {0: 1, 1: 2}),
        SubmittedJob(11, "demo-2x2", {2: 3, 3: 4}),
        SubmittedJob(12, "demo-collect", {}),
    ],
    "flux": [
        SubmittedJob(10, "demo-1x2", {0: 0}),
        SubmittedJob(11, "demo-1x2-from1", {1: 0}),
        SubmittedJob(12, "demo-2x2-from2", {2: 0}),
        SubmittedJob(13, "demo-2x2-from3", {3: 0}),
        SubmittedJob(14, "demo-collect", {}),
    ],
}
WAITING = {  # what the job that collects, and with a throttle an array, wait for
    "pbs": ["qsub -W depend=afterany:10[] ", "qsub -W depend=afterany:10[]:11[] "],
    "lsf": ["bsub -Jd {here}/2x2.lsf -w ended(10)", "-w ended(10) && ended(11)"],
    "flux": ["--dependency=afterany:10 --dependency=afterany:11 --dependency=afterany:12 "],
}


@fresh
def test_all_goes_in(name: str) -> None:
    said: list[str] = []
    assert submitted(name, said) == JOBS[name] == recorded(FOLDER)
    went = "\n".join(calls({"pbs": "qsub", "lsf": "bsub", "flux": "flux batch"}[name]))
    for words in WAITING[name]:
        assert words.format(here=Path(HERE).resolve()) in went
    states = look(STUDY, FOLDER)
    assert states.queue == "answers" and states.counts == {"pending": 4}
    assert submitted(name) == [], "all of it waits already"


@fresh
def test_what_became_of_it(name: str) -> None:
    submitted(name)
    places = [(job.number, job.batches[batch]) for job in recorded(FOLDER) for batch in job.batches]
    found = [(n, None if name == "flux" else index) for n, index in places]
    cases = [batch.cases[0] for batch in unfinished(STUDY, FOLDER)]
    write_result(FOLDER.case_file(cases[0]), cases[0], some_result())
    for place, state, code in zip(found, ("ended", "ended", "runs"), (0, 3, None), strict=False):
        becomes(*place, state, code)
    standing = look(STUDY, FOLDER)
    assert standing.counts == {"finished": 1, "failed": 1, "running": 1, "pending": 1}
    told = {each.state: each.detail for each in standing.cases}
    assert ", exit code 3" in told["failed"]
    state = SCHEDULERS[name].states([places[2][0]])[places[2]]
    assert state.live and state.name == next(j.name for j in JOBS[name] if 2 in j.batches)
    assert SCHEDULERS[name].states([99]) == {} == SCHEDULERS[name].states([])


@fresh
def test_what_is_lacking_goes_in_again(name: str) -> None:
    """One element alone, too, of which PBS makes no array."""
    submitted(name)
    for each in queues.elements():
        becomes(each["number"], each["index"], "ended", 1)
    for batch in unfinished(STUDY, FOLDER)[:3]:
        write_result(FOLDER.case_file(batch.cases[0]), batch.cases[0], some_result())
    job, collects = submitted(name)
    first = max(each.number for each in JOBS[name]) + 1
    index = {"pbs": 0, "lsf": 4, "flux": 0}[name]
    title = "demo-2x2" if name == "lsf" else "demo-2x2-from3"
    assert (job, collects.number) == (SubmittedJob(first, title, {3: index}), first + 1)
    assert look(STUDY, FOLDER).counts == {"finished": 3, "pending": 1}


@fresh
def test_only_its_own_jobs_are_cancelled(name: str) -> None:
    submitted(name)
    other = max(each["number"] for each in queues.elements()) + 1
    theirs = {"number": other, "index": None, "name": "theirs", "script": "user.x=1"}
    queues.keep([*queues.elements(), theirs | {"state": "runs", "code": None, "why": ""}])
    said: list[str] = []
    cancel(FOLDER, said.append)
    assert len(said) == len(JOBS[name])
    left = {each["number"]: each["state"] for each in queues.elements()}
    assert {state for number, state in left.items() if number != other} == {"cancelled"}
    assert left[other] == "runs"
    standing = look(STUDY, FOLDER)
    assert standing.counts == {"missing": 4}
    told = standing.cases[0].detail
    assert " CANCELLED" in told and told.endswith(": study resume submits it again")
    cancel(FOLDER, said.append)
    assert "no job of it waits or runs" in said[-1]


@fresh
def test_a_job_that_nobody_recorded_is_found(name: str) -> None:
    submitted(name)
    jobs = [vars(job) for job in recorded(FOLDER) if 3 not in job.batches]
    (FOLDER.path / RECORD).write_text(sealed_json({"schema": 2, "jobs": jobs}))
    said: list[str] = []
    submitted(name, said)
    assert any("has gone in unrecorded" in line for line in said), said
    again = {batch: index for job in recorded(FOLDER) for batch, index in job.batches.items()}
    assert again == {b: i for job in JOBS[name] for b, i in job.batches.items()}


TROUBLE = {  # what its command says: of a queue that is full, a server that is down
    "pbs": ("qsub: would exceed queue limit of jobs per user", "cannot connect to server (15010)"),
    "lsf": ("User <u>: job limit reached. Job not submitted.", "LSF is down. Please wait ..."),
    "flux": ("max active jobs limit exceeded (limit=2)", "flux-batch: ERROR: Connection refused"),
}


@fresh
def test_a_queue_that_is_full(name: str) -> None:
    Path("full").write_text(TROUBLE[name][0])
    done = submit(STUDY, FOLDER, Site(scheduler=name), print)
    assert not done.jobs and len(done.left) == 4


@fresh
def test_an_answer_that_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job went in: it is found, not submitted twice."""
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    Path("down").write_text(TROUBLE[name][1])
    Path("late").touch()

    def up(line: str) -> None:
        if "looks whether it went in" in line:
            Path("down").unlink(missing_ok=True)

    assert submit(STUDY, FOLDER, Site(scheduler=name), up).jobs == JOBS[name]
    Path("down").write_text(TROUBLE[name][1])
    with pytest.raises(NoAnswer, match="study resume results/other looks whether"):
        submit(STUDY, Folder(Path("results/other")), Site(scheduler=name), print)


@fresh
def test_what_is_refused_and_what_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("full").write_text("Illegal attribute or resource value")
    script = tmp_path / "one"
    script.write_text(array_of(Site(scheduler=name)))
    with pytest.raises(Refusal, match="refuses it: Illegal attribute"):
        SCHEDULERS[name].submit(script)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=f"cluster with {SCHEDULERS[name].TITLE}"):
        SCHEDULERS[name].states([1])


@every(
    ("name", "directive", "words"),
    [
        ("pbs", "-N other", "-N is not for directives"),
        ("pbs", "-l walltime=1:00:00", "is not for directives"),
        ("pbs", "mem=1", "should be an option of qsub"),
        ("lsf", "-W 10", "-W is not for directives"),
        ("lsf", "x", "should be an option of bsub"),
        ("flux", "--nodes=3", "--nodes=3 is not for directives"),
        ("flux", "x", "should be an option of flux batch"),
    ],
)
def test_directives_that_the_scripts_see_to(name: str, directive: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Site(scheduler=name, directives=(directive,))
    good = {"pbs": "-m e", "lsf": "-N", "flux": "--exclusive"}[name]
    assert f" {good}\n" in array_of(Site(scheduler=name, directives=(good,)))


@every("name", list(SCHEDULERS))
def test_a_launcher_of_ones_own(name: str) -> None:
    way = "aprun -n {ranks} -N {ppn} -d {cores} --nodes {nodes}"
    site = Site(scheduler=name, launcher=way, cpus_per_rank=3, mpi_flags=("-b",))
    text = array_of(site)
    assert "\naprun -n 4 -N 2 -d 3 --nodes 2 -b python -m cpdhpc batch " in text
    assert "command -v aprun >" in text
    assert name != "slurm" or "#SBATCH --signal=B:USR1@120\n" in text


@fresh
def test_a_process_knows_its_job(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_ENCLOSING_ID"):
        monkeypatch.delenv(each, raising=False)
    key = {"pbs": "PBS_JOBID", "lsf": "LSB_JOBID", "flux": "FLUX_ENCLOSING_ID"}[name]
    monkeypatch.setenv(key, "12[3].server")
    assert current() is SCHEDULERS[name] and current().own_job() == "12[3].server"
    assert current().restarts() == 0


LAUNCHED = """#!/bin/bash
echo "launched $*" >> record
trap 'echo usr1 >> record; exit 85' USR1
trap 'echo term >> record; exit 85' TERM
touch ready
[ -z "${ENDS:-}" ] || exit "$ENDS"
while true; do sleep 0.02; done
"""
GIVEN: dict[str, dict[str, str]] = {
    "pbs": {"PBS_O_WORKDIR": "{here}", "PBS_JOBNAME": "demo-2x2-from2", "PBS_JOBID": "7[1].s"}
    | {"PBS_ARRAY_INDEX": "1", "PBS_NODEFILE": "hosts"},
    "lsf": {"LSB_JOBNAME": "demo-2x2[4]", "LSB_JOBINDEX": "4", "LSB_DJOB_HOSTFILE": "hosts"},
    "flux": {},
}


class Running:
    """A job's script that runs here, with a stand-in for mpirun."""

    def __init__(self, name: str, text: str, **given: str) -> None:
        here = Path.cwd()
        (here / "bin" / "mpirun").write_text(LAUNCHED)
        (here / "bin" / "mpirun").chmod(0o755)
        (here / "bin" / "flux").write_text("#!/bin/sh\necho here\n")
        FOLDER.logs.mkdir(parents=True, exist_ok=True)
        Path("script").write_text(text)
        given |= {key: value.format(here=here) for key, value in GIVEN[name].items()}
        self.process = subprocess.Popen(
            ["bash", "script"],
            env={"PATH": os.environ["PATH"]} | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def tell(self, number: int) -> None:
        end_s = time.monotonic() + 600
        while not Path("ready").exists():
            assert time.monotonic() < end_s and self.process.poll() is None
            time.sleep(0.01)
        self.process.send_signal(number)

    def end(self) -> tuple[int, list[str], str]:
        shown, _ = self.process.communicate(timeout=600)
        logs = "".join(path.read_text() for path in FOLDER.logs.iterdir())
        return self.process.returncode, Path("record").read_text().splitlines(), shown + logs


def a_script(name: str, **run: Any) -> str:
    study = STUDY.model_copy(update={"run": STUDY.run.model_copy(update=run)})
    return array_of(Site(scheduler=name, launcher="mpirun"), study=study)


@fresh
def test_the_script_starts_its_batch(name: str) -> None:
    status, record, shown = Running(name, a_script(name), ENDS="0").end()
    assert (status, shown) == (0, "")
    batch = 2 if name == "flux" else 3
    assert record[0].endswith(f"-m cpdhpc batch results/demo {batch} --nodes 2 --ppn 2")
    if name == "pbs":
        assert [path.name for path in FOLDER.logs.iterdir()] == ["demo-2x2-from2-7_1.log"]


@fresh
def test_signals_reach_the_ranks(name: str) -> None:
    job = Running(name, a_script(name))
    job.tell(signal.SIGUSR1)
    status, record, shown = job.end()
    assert (status, record[1:]) == (85, ["usr1"])
    assert ("submit it again to go on" in shown) == (name != "lsf"), "which queues it again"
    Path("ready").unlink()
    job = Running(name, a_script(name))
    job.tell(signal.SIGTERM)
    status, record, _ = job.end()
    assert (status, record[-1]) == (143 if name == "lsf" else 85, "term")


@fresh
def test_the_time_limit_is_announced_by_the_script_itself(name: str) -> None:
    text = a_script(name)
    assert text.count("sleep 240 &") == 1
    job = Running(name, text.replace("sleep 240 &", "sleep 1 &"))
    status, record, _ = job.end()
    assert (status, record[1:]) == (85, ["usr1"])


@fresh
def test_a_failure_is_tried_again_in_the_job(name: str) -> None:
    status, record, _ = Running(name, a_script(name, retries=2), ENDS="7").end()
    assert status == 7 and [line.split()[0] for line in record] == ["launched"] * 3


@every(
    ("name", "text", "wanted"),
    [("pbs", "no JSON", "is no JSON"), ("lsf", "no JSON", "bjobs does not answer")],
)
def test_answers_that_make_no_sense(name: str, text: str, wanted: str) -> None:
    command = Path("bin") / {"pbs": "qstat", "lsf": "bjobs"}[name]
    command.write_text(f"#!/bin/sh\necho {text}\n")
    with pytest.raises(SchedulerError, match=wanted):
        SCHEDULERS[name].states([1])


def test_states_of_pbs_by_letter() -> None:
    """As the manual of qstat lists them."""
    state = SCHEDULERS["pbs"]._state  # type: ignore[attr-defined]
    shown = {
        letter: state({"Job_Name": "x", "job_state": letter, "Exit_status": 4}).live
        for letter in "BEFHMQRSTUWX"
    }
    assert "".join(letter for letter, live in shown.items() if live) == "BEHQRSTUW"
    told = {"Job_Name": "x", "job_state": "F", "Exit_status": 265, "substate": 93}
    assert state(told) == JobState("x", "FINISHED", None, "", False), "killed by signal 9"


@pytest.mark.skipif(
    not Path("/opt/fluxlab/bin/flux").exists() and shutil.which("flux") is None,
    reason="Flux is not installed (docs/explanation/testing.md)",
)
def test_a_real_flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study from its submission to study.h5, in an instance of one broker."""
    shutil.rmtree(tmp_path / "bin")
    study = STUDY.model_copy(
        update={
            "sweep": {"ppn": [1, 2], "size_bytes": [4096], "wire": ["raw"]},
            "measure": STUDY.measure.model_copy(update={"max_repeats": 10, "max_time_s": 1.0}),
        }
    )
    Path("demo.toml").write_text(study.toml())
    Path("site.toml").write_text(
        'scheduler = "flux"\nlauncher = "mpirun"\nmpi_flags = ["--oversubscribe"]\n'
    )
    program = (
        "python -m cpdhpc study submit demo.toml --site site.toml && flux queue drain && "
        "python -m cpdhpc study status demo.toml --json"
    )
    root = {
        f"{name}_ALLOW_RUN_AS_ROOT{more}": "1"
        for name in ("OMPI", "PRTE")
        for more in ("", "_CONFIRM")
    }
    path = f"{ROOT / '.venv' / 'bin'}:/opt/fluxlab/bin:{os.environ['PATH']}"
    done = ran(
        ["/bin/bash", "-c", f"exec flux start --test-size=1 bash -c {program!r}"],
        env=environment() | root | {"PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["states"]["finished"] == 2 and told["flux"] == "answers", done.stdout
    assert Path("results/demo/study.h5").exists()
