"""Submitting, its record, and the status, with stand-ins for Slurm's commands on PATH."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from rendering import GPU_STUDY, STUDY, some_batches
from stand_ins import Slurm
from studies import some_result

from cpdhpc.config import UserError, validate
from cpdhpc.lab.claim import ClaimError
from cpdhpc.lab.schedulers import calls
from cpdhpc.lab.schedulers import slurm as queue
from cpdhpc.lab.schedulers.base import NoAnswer, SchedulerError
from cpdhpc.lab.study import submit as module
from cpdhpc.lab.study.folder import Folder, FolderError, SubmittedJob, record, recorded
from cpdhpc.lab.study.site import Site
from cpdhpc.lab.study.spec import Study
from cpdhpc.lab.study.status import CaseState, endings, look, states, tail, with_jobs
from cpdhpc.lab.study.submit import cancel, submit
from cpdhpc.lab.study_data import Case
from cpdhpc.lab.study_data.study_file import write_result

FOLDER = Folder(Path("results/demo"))
SCRIPTS = "results/demo/scripts"
FULL = (
    "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
)
WIDE = validate(
    Study,
    {
        "name": "demo",
        "kind": "allreduce",
        "sweep": {"ppn": [2], "size_bytes": [2**n for n in range(12, 20)], "wire": ["raw"]},
        "run": {"bundle": "case", "case_time_s": 100.0},
    },
    "demo.toml",
)  # eight batches of a shape
WRONG_FOLDERS = ["o%j", "a\\b", "a\nb", "-x", "a\x7fb", "a\udcffb", "n" * 256, "n/" * 1800]
WAITS = ("PENDING", 0, "JobArrayTaskLimit")
ENDED = ("COMPLETED", 0, "None")


def finish(case: Case) -> None:
    write_result(FOLDER.case_file(case), case, some_result())


def submitted(said: list[str] | None = None) -> list[SubmittedJob]:
    said = [] if said is None else said
    return submit(STUDY, FOLDER, Site(), said.append).jobs


def test_all_goes_in_array_by_array(fake_slurm: Slurm) -> None:
    said: list[str] = []
    assert submitted(said) == recorded(FOLDER)
    here = Path(SCRIPTS).resolve()
    assert fake_slurm.calls() == [
        f"--test-only {here}/1x2.sbatch",
        f"--parsable {here}/1x2.sbatch",
        f"--test-only {here}/2x2.sbatch",
        # the throttle is of the study: this array waits for the one before
        f"--parsable --dependency=afterany:10 {here}/2x2.sbatch",
        f"--test-only {here}/collect.sbatch",
        f"--parsable --dependency=afterany:10:11 {here}/collect.sbatch",
    ]
    assert recorded(FOLDER) == [
        SubmittedJob(10, "demo-1x2", {0: 0, 1: 1}),
        SubmittedJob(11, "demo-2x2", {2: 2, 3: 3}),
        SubmittedJob(12, "demo-collect", {}),
    ]
    assert f"{SCRIPTS}/2x2.sbatch: sbatch: Job 1 to start at noon" in said
    assert FOLDER.study() == STUDY


def test_what_test_only_refuses_is_a_warning(fake_slurm: Slurm) -> None:
    """It says no where a node is drained; sbatch queues the job."""
    Path("refuse").write_text("2x2")
    said: list[str] = []
    assert len(submitted(said)) == 3
    warning = "warning: --test-only refuses it as things are: sbatch: error: no"
    assert f"{SCRIPTS}/2x2.sbatch: {warning}" in said


def test_what_sbatch_refuses_is_left_out(fake_slurm: Slurm) -> None:
    Path("answers").write_text("never\n")
    said: list[str] = []
    with pytest.raises(UserError, match=r"1x2\.sbatch: sbatch refuses it: .*Invalid qos: 1 script"):
        submitted(said)
    assert [job.name for job in recorded(FOLDER)] == ["demo-2x2", "demo-collect"]
    assert any(line.startswith("left out: 2 batch(es) of 1 x 2 ranks: ") for line in said)
    Path("answers").write_text("never\nnever\n")
    with pytest.raises(UserError, match="are refused, and 0 submitted"):
        submitted(said)


def test_a_queue_that_is_full_takes_a_portion(fake_slurm: Slurm) -> None:
    Path("full").write_text(FULL)
    Path("room").write_text("3")
    said: list[str] = []
    done = submit(WIDE, FOLDER, Site(), said.append)
    # Of eight the half is too much, too; the job that collects gets the last place.
    assert (
        [job.batches for job in done.jobs]
        == [{0: 0, 1: 1}, {}]
        == [job.batches for job in recorded(FOLDER)]
    )
    assert [batch.number for batch in done.left] == [2, 3, 4, 5, 6, 7]
    assert "#SBATCH --array=0-1\n" in Path(f"{SCRIPTS}/1x2.sbatch").read_text()
    assert "not submitted: 6 batch(es), 6 case(s): " in said[-1] and "MaxSubmitJob" in said[-1]
    assert said[-1].endswith(
        "study resume results/demo submits them, as far as Slurm takes them then"
    )
    fake_slurm.knows(10, "demo-1x2", {0: WAITS, 1: WAITS})
    fake_slurm.knows(11, "demo-collect", {0: WAITS})
    standing = look(WIDE, FOLDER)
    assert standing.counts == {"pending": 2, "unsubmitted": 6}
    assert standing.cases[-1].detail == "study resume submits it"

    done = submit(WIDE, FOLDER, Site(), said.append)  # there is no room at all
    assert done.jobs == [] and len(done.left) == 6
    Path("room").unlink()
    done = submit(WIDE, FOLDER, Site(), said.append)
    assert [[*job.batches] for job in done.jobs] == [[2, 3, 4, 5, 6, 7], []] and not done.left


def test_a_study_of_which_nothing_went_in_waits_for_room(fake_slurm: Slurm) -> None:
    Path("full").write_text(FULL)
    Path("room").write_text("0")
    assert not submit(WIDE, FOLDER, Site(), print).jobs
    standing = look(WIDE, FOLDER)
    assert standing.counts == {"unsubmitted": 8}
    assert standing.cases[0].detail == "study resume submits it"


def test_the_collecting_job_goes_in_once_there_is_room(fake_slurm: Slurm) -> None:
    Path("full").write_text(FULL)
    Path("room").write_text("8")
    said: list[str] = []
    assert [job.name for job in submit(WIDE, FOLDER, Site(), said.append).jobs] == ["demo-1x2"]
    assert said[-1].startswith("nothing collects when they have ended: ")
    Path("room").unlink()
    fake_slurm.knows(10, "demo-1x2", dict.fromkeys(range(8), WAITS))
    assert [job.name for job in submit(WIDE, FOLDER, Site(), print).jobs] == ["demo-collect"]
    fake_slurm.knows(11, "demo-collect", {0: WAITS})
    assert submit(WIDE, FOLDER, Site(), print).jobs == []


def test_a_full_controller_is_not_waited_for(
    fake_slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At MaxJobCount sbatch itself tries for two minutes."""
    monkeypatch.setattr(calls, "RETRIES_S", 0.1)
    Path("full").write_text(
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n"
    )
    Path("room").write_text("5")
    done = submit(WIDE, FOLDER, Site(), print)
    assert [[*job.batches] for job in done.jobs] == [[0, 1, 2, 3], []] and len(done.left) == 4


def test_limits_of_one_job_are_no_full_queue(fake_slurm: Slurm) -> None:
    Path("full").write_text(FULL.replace("AssocMaxSubmitJobLimit", "QOSMaxNodePerJobLimit"))
    Path("room").write_text("1")
    with pytest.raises(UserError, match=r"sbatch refuses it: .*QOSMaxNodePerJobLimit"):
        submit(WIDE, FOLDER, Site(), print)


def test_an_sbatch_without_an_answer_counts_once(
    fake_slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0, 0.0))
    Path("answers").write_text("late\nlost\nlost\nlate\n")
    said: list[str] = []
    # The first went in, the second is tried three times and went in, too.
    assert [job.number for job in submitted(said)] == [10, 11, 12]
    assert [job.batches for job in recorded(FOLDER)] == [{0: 0, 1: 1}, {2: 2, 3: 3}, {}]
    assert len([call for call in fake_slurm.calls() if "--parsable" in call]) == 5
    assert any("Socket timed out" in line and "looks whether it went in" in line for line in said)


def test_a_controller_that_never_answers(
    fake_slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    Path("answers").write_text("ok\n" + "lost\n" * 2)
    with pytest.raises(NoAnswer, match="study resume results/demo looks whether it went in"):
        submitted()
    assert [job.number for job in recorded(FOLDER)] == [10]
    fake_slurm.knows(10, "demo-1x2", {0: WAITS, 1: WAITS})
    assert [job.batches for job in submitted()] == [{2: 2, 3: 3}, {}]


def test_a_job_that_nobody_lived_to_record_is_found(fake_slurm: Slurm) -> None:
    submitted()
    (FOLDER.path / "jobs.json").unlink()
    here = Path(SCRIPTS).resolve()
    Path("mine").write_text(
        f"10 0 demo-1x2 {here}/1x2.sbatch\n10 1 demo-1x2 {here}/1x2.sbatch\n"
        f"12 N/A demo-collect {here}/collect.sbatch\n77 N/A my job /elsewhere/1x2.sbatch\n"
    )
    assert [job.batches for job in submitted()] == [{2: 2, 3: 3}, {}]
    assert [job.number for job in recorded(FOLDER)] == [10, 12, 13, 14]
    fake_slurm.knows(10, "demo-1x2", {0: WAITS, 1: WAITS})
    fake_slurm.knows(13, "demo-2x2", {2: WAITS, 3: WAITS})
    with Path("mine").open("a") as file:  # asked for again while the first was under way
        file.write(f"15 2 demo-2x2 {here}/2x2.sbatch\n15 3 demo-2x2 {here}/2x2.sbatch\n")
    fake_slurm.calls()
    said: list[str] = []
    submitted(said)
    assert "scancel 15" in fake_slurm.calls()
    assert "job 15, demo-2x2: has gone in twice: cancelled" in said


def test_a_folder_that_slurm_takes_for_another(fake_slurm: Slurm) -> None:
    for name in WRONG_FOLDERS:
        for do in (
            lambda folder: submit(STUDY, folder, Site(), print),
            lambda folder: folder.prepare(STUDY),
        ):
            with pytest.raises(FolderError, match=r"folder .*: (has|begins with)"):
                do(Folder(Path(name)))
        assert not [*Path().rglob("study.toml")] and not fake_slurm.calls()


def test_a_second_submit_takes_what_is_neither_finished_nor_queued(fake_slurm: Slurm) -> None:
    submitted()
    fake_slurm.calls()
    first, second, third, _ = (batch.cases[0] for batch in some_batches())
    finish(first)
    fake_slurm.knows(10, "demo-1x2", {0: ENDED, 1: ("FAILED", 256, "NonZeroExitCode")})
    fake_slurm.knows(11, "demo-2x2", {2: ENDED, 3: WAITS})
    said: list[str] = []
    new = submitted(said)
    assert [job.batches for job in new] == [{1: 1}, {2: 2}, {}]  # second and third have no file
    assert "#SBATCH --array=1%8" in Path(f"{SCRIPTS}/1x2.sbatch").read_text()
    here = Path(SCRIPTS).resolve()
    assert [call for call in fake_slurm.calls() if "--parsable" in call] == [
        f"--parsable --dependency=afterany:11 {here}/1x2.sbatch",
        f"--parsable --dependency=afterany:13 {here}/2x2.sbatch",
        f"--parsable --dependency=afterany:11:13:14 {here}/collect.sbatch",
    ]
    assert "in the queue already: 1 batch(es)" in said
    assert {second.id, third.id} == {
        some_batches()[number].cases[0].id for job in new for number in job.batches
    }


def test_a_job_of_that_number_but_another_name_is_another_job(fake_slurm: Slurm) -> None:
    submitted()
    fake_slurm.knows(10, "someone-elses", {0: WAITS, 1: WAITS})
    fake_slurm.knows(11, "demo-2x2", {2: WAITS, 3: WAITS})
    assert [job.batches for job in submitted()] == [{0: 0, 1: 1}, {}]


def test_when_nothing_is_left(fake_slurm: Slurm) -> None:
    submitted()
    for each in some_batches():
        finish(each.cases[0])
    said: list[str] = []
    assert submitted(said) == []
    assert said == ["all cases are finished: study collect gathers them"]


def test_shapes_that_the_site_lacks_are_left_out(fake_slurm: Slurm) -> None:
    said: list[str] = []
    new = submit(STUDY, FOLDER, Site(name="s", nodes=1), said.append).jobs
    assert [job.batches for job in new] == [{0: 0, 1: 1}, {}]  # the numbers are those of all
    assert "left out: batch 2, 1 case(s): 2 nodes: site s gives a job 1 at most" in said
    assert look(STUDY, FOLDER).cases[2].detail == (
        "left out: 2 nodes: site s gives a job 1 at most"
    ), "and is not unsubmitted"
    with pytest.raises(UserError, match="nothing can be submitted: 2 ranks per node"):
        submit(STUDY, FOLDER, Site(cores_per_node=1), said.append)


def test_gpus_that_the_site_lacks_are_told_before_slurm_is_asked(fake_slurm: Slurm) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="nothing can be submitted: device gpu: site s has no GPUs"):
        submit(GPU_STUDY, FOLDER, Site(name="s"), said.append)
    assert not fake_slurm.calls()
    submit(GPU_STUDY, FOLDER, Site(gpus_per_node=4), said.append)
    assert "job 10: 1 x 2 ranks, 2 GPUs a node, elements 0-1" in said


def test_another_study_in_the_folder(fake_slurm: Slurm) -> None:
    submitted()
    other = STUDY.model_copy(update={"scaling": "throughput"})
    with pytest.raises(FolderError, match="holds another study: scaling differs"):
        submit(other, FOLDER, Site(), print)


def status() -> list[CaseState]:
    """Where the cases stand, in the order of their batches."""
    jobs = recorded(FOLDER)
    said = queue.states(job.number for job in jobs)
    return with_jobs(states(STUDY, FOLDER), FOLDER, jobs, said, "Slurm")


def told() -> list[tuple[str, str]]:
    return [(each.state, each.detail) for each in status()]


def test_status_without_accounting(fake_slurm: Slurm) -> None:
    submitted()
    finish(some_batches()[0].cases[0])
    fake_slurm.knows(10, "demo-1x2", {0: ENDED, 1: ("FAILED", 3 << 8, "NonZeroExitCode")})
    fake_slurm.knows(11, "demo-2x2", {2: ("RUNNING", 0, "None"), 3: WAITS})
    log = FOLDER.logs / "demo-1x2-10_1.log"
    log.write_text("".join(f"line {number}\n" for number in range(20)))
    assert told() == [
        ("finished", ""),
        ("failed", "job 10_1 FAILED, exit code 3 (NonZeroExitCode)"),
        ("running", "job 11_2 RUNNING"),
        ("pending", "job 11_3 (JobArrayTaskLimit)"),
    ]
    assert endings(status(), FOLDER, recorded(FOLDER)) == [
        f"{log}:",
        *(f"    | line {number}" for number in range(8, 20)),
    ]


def test_status_of_cases_that_told_why_they_failed(fake_slurm: Slurm) -> None:
    submitted()
    for batch in some_batches():
        FOLDER.failure_file(batch.cases[0]).write_text("no room\n")
    fake_slurm.knows(
        10, "demo-1x2", {0: ("RUNNING", 0, "None"), 1: ("FAILED", 256, "NonZeroExitCode")}
    )
    fake_slurm.knows(11, "demo-2x2", {2: ("PENDING", 0, "BeginTime"), 3: ENDED})
    assert told() == [
        ("failed", "job 10_0 RUNNING: no room"),
        ("failed", "job 10_1 FAILED, exit code 1 (NonZeroExitCode): no room"),
        ("pending", "job 11_2 (BeginTime)"),
        ("failed", "job 11_3 COMPLETED, exit code 0: no room"),
    ]


def test_a_damaged_file_is_no_failed_job(fake_slurm: Slurm) -> None:
    submitted()
    first, second, third, _ = (batch.cases[0] for batch in some_batches())
    for case in (first, second, third):
        FOLDER.case_file(case).write_bytes(b"damaged")
    fake_slurm.knows(10, "demo-1x2", {0: ENDED, 1: ("RUNNING", 0, "None")})
    damaged = (
        "damaged",
        f"{first.id}.h5 is damaged or another case's: study resume measures it again",
    )
    assert told()[:2] == [damaged, ("running", "job 10_1 RUNNING")]
    assert told()[2][0] == "damaged", "though Slurm has forgotten its job"
    fake_slurm.knows(10, "demo-1x2", {0: ("FAILED", 512, "NonZeroExitCode"), 1: ENDED})
    failed = "job 10_0 FAILED, exit code 2 (NonZeroExitCode): "
    assert told()[0] == ("failed", failed + damaged[1]), "where it also failed, both are said"


def test_cancel_takes_the_studys_own_jobs_alone(fake_slurm: Slurm) -> None:
    submitted()
    fake_slurm.knows(10, "someone-elses", {0: WAITS, 1: WAITS})
    fake_slurm.knows(11, "demo-2x2", {2: ENDED, 3: WAITS})
    fake_slurm.knows(12, "demo-collect", {0: WAITS})
    fake_slurm.calls()
    said: list[str] = []
    cancel(FOLDER, said.append)
    assert fake_slurm.calls() == ["scancel 11 12"]
    assert said == ["job 11, demo-2x2: cancelled", "job 12, demo-collect: cancelled"]
    for job in (11, 12):
        fake_slurm.knows(job, "demo-2x2", {3: ("CANCELLED", 0, "None")})
    cancel(FOLDER, said.append)
    assert fake_slurm.calls() == [] and "no job of it waits or runs" in said[-1]


def test_status_by_accounting_where_squeue_has_forgotten(fake_slurm: Slurm) -> None:
    submitted()
    fake_slurm.knows(11, "demo-2x2", {2: ENDED, 3: ("TIMEOUT", 9, "TimeLimit")})
    Path("accounts").write_text(
        "10_0|demo-1x2|CANCELLED by 1000|0:15\n"
        "10_1|demo-1x2|FAILED|7:0\n"
        "10_[3-5]|demo-1x2|PENDING|0:0\n"
    )
    known = queue.states([10])
    assert {index for _, index in known} == {0, 1, 3, 4, 5}
    assert told() == [
        ("missing", "job 10_0 CANCELLED: study resume submits it again"),
        ("failed", "job 10_1 FAILED, exit code 7"),
        ("missing", "job 11_2 COMPLETED, exit code 0, and there is no file"),
        ("failed", "job 11_3 TIMEOUT (TimeLimit)"),
    ]


def test_an_array_that_was_cancelled_before_it_started(fake_slurm: Slurm) -> None:
    """Accounting has one line of all its elements."""
    submitted()
    Path("accounts").write_text(
        "10_[0-1%8]|demo-1x2|CANCELLED by 0|0:0\n11_[2,3,...]|demo-2x2|CANCELLED|0:0\n"
        "12|demo-collect|CANCELLED|0:0\n"
    )
    assert told() == [
        ("missing", f"job {job}_{index} CANCELLED, exit code 0: study resume submits it again")
        for job, index in ((10, 0), (10, 1), (11, 2), (11, 3))
    ]


def test_an_element_that_squeue_alone_has_forgotten(fake_slurm: Slurm) -> None:
    submitted()
    fake_slurm.knows(10, "demo-1x2", {1: WAITS})
    fake_slurm.knows(11, "demo-2x2", {2: WAITS, 3: WAITS})
    Path("accounts").write_text("10_0|demo-1x2|FAILED|3:0\n10_1|demo-1x2|PENDING|0:0\n")
    assert [(each.state, each.detail) for each in look(STUDY, FOLDER).cases[:2]] == [
        ("failed", "job 10_0 FAILED, exit code 3"),
        ("pending", "job 10_1 (JobArrayTaskLimit)"),
    ]


def test_status_of_jobs_that_nobody_knows(fake_slurm: Slurm) -> None:
    assert {state for state, _ in told()} == {"missing"}
    submitted()
    assert told()[0] == ("failed", "job 10_0: Slurm has forgotten it")
    assert endings(status(), FOLDER, recorded(FOLDER))[1] == (
        "    | is not there: it never started, or its node could not write here: "
        "other disk, no room"
    )


def test_tail_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff" * 9000 + b"\nlast\n\n")
    assert tail(path)[-1] == "last" and len(tail(path)) == 2
    path.write_bytes(b"")
    assert tail(path) == ["is empty: its disk is full, or nothing was printed"]


def test_slurm_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=r"squeue is not on PATH: .*study run needs none"):
        queue.states([1])
    assert queue.states([]) == {}


def test_slurm_that_does_not_answer(fake_slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("squeue", "sbatch"):
        (fake_slurm.directory / "bin" / name).write_text("#!/bin/bash\nexec sleep 60\n")
    monkeypatch.setattr(calls, "TIMEOUT_S", 0.2)
    with pytest.raises(SchedulerError, match=r"squeue has not answered in 0\.2 s"):
        queue.states([1])
    (fake_slurm.directory / "bin" / "squeue").write_text("#!/bin/bash\necho down >&2\nexit 1\n")
    with pytest.raises(SchedulerError, match="squeue does not answer: down"):
        queue.states([1])
    with pytest.raises(SchedulerError, match="sbatch has not answered"):
        queue.submit(Path("x"))
    (fake_slurm.directory / "bin" / "sbatch").write_text("#!/bin/bash\nexit 3\n")
    with pytest.raises(SchedulerError, match="x: sbatch refuses it: it ends with status 3"):
        queue.submit(Path("x"))


def test_two_that_submit_at_the_same_moment(fake_slurm: Slurm) -> None:
    said: list[str] = []

    def meanwhile(line: str) -> None:
        said.append(line)
        if line.startswith("job 10"):  # the first array is in the queue
            busy = rf"submit\.lock: another study submit is at work: process {os.getpid()} on "
            with pytest.raises(ClaimError, match=busy):
                submitted()

    submit(STUDY, FOLDER, Site(), meanwhile)
    assert [job.number for job in recorded(FOLDER)] == [10, 11, 12]
    assert any(line.startswith("job 10") for line in said)


def test_a_file_system_without_locks(fake_slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    assert len(submitted(said)) == 3
    assert "submit.lock: this file system has no locks" in said[0]


def test_what_ends_a_job() -> None:
    assert queue.live("REQUEUED") and queue.live("COMPLETING") and not queue.live("NODE_FAIL")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"jobs": [1]}', '{"jobs": [{"number": 1}]}'])
def test_a_record_that_is_none(fake_slurm: Slurm, text: str) -> None:
    FOLDER.prepare(STUDY)
    (FOLDER.path / "jobs.json").write_text(text)
    with pytest.raises(FolderError, match=r"jobs\.json: is no record of jobs"):
        recorded(FOLDER)


def test_the_record_is_kept_whole(fake_slurm: Slurm) -> None:
    FOLDER.prepare(STUDY)
    jobs = [SubmittedJob(1, "a", {5: 0, 6: 1}), SubmittedJob(2, "b", {})]
    for job in jobs:
        record(FOLDER, job)
    assert recorded(FOLDER) == jobs
    assert json.loads((FOLDER.path / "jobs.json").read_text())["schema"] == 2
