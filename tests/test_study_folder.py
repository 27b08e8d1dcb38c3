"""Folders: one study each, nothing lost to damage or strangers, and what the commands say."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every
from stand_ins import Slurm
from studies import fill, small_study, some_result, study_file

from cpdhpc import store
from cpdhpc.config import ConfigError, UserError
from cpdhpc.lab.claim import Claim, read_claim
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import COMMANDS
from cpdhpc.lab.study.cases import batches, expand, load_study
from cpdhpc.lab.study.collect import collect, find
from cpdhpc.lab.study.folder import Folder, FolderError, SubmittedJob, record, recorded
from cpdhpc.lab.study.run_here import measure
from cpdhpc.lab.study.status import states
from cpdhpc.lab.study.submit import extend, unfinished
from cpdhpc.lab.study_data.study_file import read_result, write_result

Run = Callable[..., tuple[int, str]]


def contents(folder: Folder) -> dict[str, bytes]:
    """Every file of a folder."""
    paths = (path for path in folder.path.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in paths}


def test_a_folder_holds_one_study(tmp_path: Path) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    fill(folder, study)
    before = contents(folder)
    folder.prepare(study)
    folder.check(study)
    assert contents(folder) == before
    for changes, key in (
        ({"measure": {"max_repeats": 9}}, "measure.max_repeats"),
        ({"sweep": {"ranks": [1]}}, "sweep.ranks"),
        ({"constraints": ["ranks < 2"]}, "constraints"),
    ):
        other = small_study(tmp_path, **changes)
        with pytest.raises(FolderError, match=rf"x: holds another study: {key} differs"):
            folder.prepare(other)
    (tmp_path / "codec.toml").write_text('kind = "codec"\nexclude = []\n[sweep]\nsize_bytes = 4\n')
    with pytest.raises(FolderError, match="of kind allreduce, and this one is of kind codec: "):
        folder.prepare(load_study(tmp_path / "codec.toml"))
    assert contents(folder) == before
    folder.prepare(small_study(tmp_path, run={"throttle": 3}))  # changes no case and no number
    assert folder.study().run.throttle == 3


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "wall").write_bytes(b"")
    study = small_study(tmp_path)
    for path in (tmp_path / "wall", tmp_path / "wall" / "x"):
        with pytest.raises(UserError, match=r"cannot be written: (Not a directory|File exists)"):
            Folder(path).prepare(study)
    folder = Folder(tmp_path / "x")
    fill(folder, study)
    folder.study_file.mkdir()
    with pytest.raises(UserError, match=r"study.h5: cannot be written"):
        collect(study, folder)


def test_more_levels_in_a_folder(tmp_path: Path, fake_slurm: Slurm) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    larger = small_study(tmp_path, sweep={"size_bytes": [4, "4KiB"], "ranks": [1, 2, 4]})
    said: list[str] = []
    with pytest.raises(FolderError, match="nothing was run there yet"):
        extend(larger, folder)
    finished = fill(folder, study, expand(study).cases[:3])
    before = contents(folder)
    Claim("elsewhere", 1, "7", "today", 0, "stopped")._write(folder.claim_file(0))
    record(folder, SubmittedJob(7, "small-1x1", {0: 0}))
    fake_slurm.knows(7, "small-1x1", {0: ("PENDING", 0, "None")})
    for other, says in (
        (larger, "job 7 waits or runs: wait, or study cancel"),
        (small_study(tmp_path, measure={"max_repeats": 9}), "4 of its 4 cases are not in the"),
        (small_study(tmp_path, sweep={"algorithm": ["ring", "tree"]}), "2 of its 4 cases are not"),
    ):
        with pytest.raises(FolderError, match=says):
            extend(other, folder)
    assert folder.study() == study and recorded(folder)
    fake_slurm.knows(7, "small-1x1", {0: ("COMPLETED", 0, "None")})
    extend(larger, folder, said.append)
    assert said == [f"{folder.path}: 12 cases, 8 of them new, 3 finished: study resume"]
    assert folder.study() == larger and not recorded(folder)
    assert read_claim(folder.claim_file(0)) is None, "its number is of another batch now"
    after = contents(folder)
    assert {name: after[name] for name in before if name.startswith("cases/")} == {
        name: text for name, text in before.items() if name.startswith("cases/")
    }
    found = states(larger, folder)
    assert {each.case.id for each in found if each.state == "finished"} == {c.id for c in finished}
    Claim("elsewhere", 1, "", "today", 0, "running")._write(folder.claim_file(2))
    with pytest.raises(FolderError, match="batch 2 is being measured on elsewhere"):
        extend(larger, folder)


def test_only_a_whole_file_of_its_own_is_finished(tmp_path: Path) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    cases = fill(folder, study, expand(study).cases[:1])
    (case,) = cases
    path = folder.case_file(case)
    whole = path.read_bytes()
    assert folder.finished(case)
    for damage in (b"", whole[: len(whole) // 2], b"x" * 500):
        path.write_bytes(damage)
        assert not folder.finished(case)
        with pytest.raises(store.StoreError, match=path.name):
            read_result(path, case)
    other = expand(study).cases[1]
    path.write_bytes(whole)
    groups, _ = store.read(path, {"time_s", "is_warmup"})
    samples, environment = groups["samples"], '"environment": {}'
    write_result(path, other, some_result())
    assert not folder.finished(case)
    with pytest.raises(store.StoreError, match=f"is of case {re.escape(other.id)}"):
        read_result(path, case)
    for changes, says in (
        ({"case_id": case.id, "status": "running"}, "is not complete"),
        ({"status": "complete", "record": "{"}, "is damaged"),
        ({"record": '{"half":'}, "is damaged"),
        ({"record": "[]"}, "is damaged"),
        ({"record": f'{{"cpdhpc_schema": 1, "outcomes": 3, {environment}}}'}, "is damaged"),
        ({"record": '{"cpdhpc_schema": 2}'}, "has schema 2, known is 1"),
        ({"kind": "run"}, "is no file of a case"),
    ):
        attributes = store.read_attributes(path) | changes
        store.write(path, groups, attributes)
        assert not folder.finished(case)
        with pytest.raises(store.StoreError, match=says):
            read_result(path, case)
    for other_groups in ({}, groups | {"samples": samples | {"is_warmup": np.zeros(3, np.uint8)}}):
        write_result(path, case, some_result())
        store.write(path, other_groups, store.read_attributes(path))
        assert not folder.finished(case)
        with pytest.raises(store.StoreError, match="is damaged"):
            read_result(path, case)
    assert [each.state for each in states(study, folder) if each.case == case] == ["damaged"]
    assert unfinished(study, folder) == batches(study, expand(study).cases)
    store.write(path, groups, store.read_attributes(path))
    assert folder.finished(case), "of labels nothing is asked"


def test_report_of_a_study_that_is_not_collected_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    folder.prepare(study)
    resume = f"`study resume {folder.path}` goes on\n"
    for files, says in (
        (": no case has ended, ", resume),
        (", but 4 files of cases: ", f"`study collect {folder.path}` makes one, {resume}"),
    ):
        assert main(["report", str(folder.path)]) == 2
        shown = capsys.readouterr().err
        assert shown.endswith(f"{folder.path}: the study has no study.h5 yet{files}{says}")
        assert shown.count("\n") == 1
        fill(folder, study)
    assert main(["study", "collect", str(folder.path)]) == 0
    assert main(["report", str(folder.path)]) == 0


def test_collect_leaves_out_what_is_damaged_or_foreign_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    cases = fill(folder, study)
    folder.case_file(cases[1]).write_bytes(b"damaged")
    stranger = folder.cases / "stranger.h5"
    stranger.write_bytes(folder.case_file(cases[0]).read_bytes())
    (folder.cases / f".{cases[2].id}.h5.tmp").write_bytes(b"on its way")
    before = contents(folder)
    found = collect(study, folder)
    assert [case for case, _ in found.results] == [cases[0], cases[2], cases[3]]
    assert found.missing == [cases[1]]
    assert set(found.rejected) == {folder.case_file(cases[1]).name, stranger.name}
    shown = capsys.readouterr().out
    assert f"left out: {cases[1].id}.h5: {folder.case_file(cases[1])}: is not an HDF5 file" in shown
    assert "first bytes are damaged; study resume measures it again\n" in shown
    assert "left out: stranger.h5: is of no case of this study" in shown
    assert shown.endswith("study.h5: 3 of 4 cases\n")
    after = contents(folder)
    del after["study.h5"]
    assert after == before
    for path in folder.cases.iterdir():
        path.unlink()
    with pytest.raises(FolderError, match="no case of study small is finished"):
        collect(study, folder)
    assert folder.study_file.exists(), "what was collected before is not lost"


def test_status_by_files_and_marks(tmp_path: Path) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    cases = expand(study).cases
    fill(folder, study, cases[:1])
    folder.failure_file(cases[1]).write_text("ArithmeticError: too much\n")

    def found(**alive: Any) -> list[tuple[str, str]]:
        return [(each.state, each.detail) for each in states(study, folder, **alive)]

    by_case = dict(zip(sorted(cases, key=lambda c: (c.ranks, c.id)), found(), strict=True))
    assert by_case[cases[0]] == ("finished", "")
    assert by_case[cases[1]] == ("failed", "ArithmeticError: too much")
    assert by_case[cases[2]] == by_case[cases[3]] == ("missing", "")
    claim = Claim("elsewhere", 1, "77", "today", 0, "running")
    claim._write(folder.claim_file(1))
    assert found()[2] == ("running", "since today on elsewhere, or dead: not known here")
    assert found(job_alive=lambda job: job == "77")[2] == ("running", "since today on elsewhere")
    died = ("failed", "its batch, started today on elsewhere, died")
    assert found(job_alive=lambda job: False)[2] == died
    claim.end(folder.claim_file(1), "stopped")
    assert found()[2] == ("missing", "its batch was stopped")
    claim.end(folder.claim_file(1), "ended")
    assert found()[2] == ("missing", "there is no file of it, though its batch has ended")
    folder.case_file(cases[2]).write_bytes(b"")
    assert "is damaged or another case's" in str(found())


def test_marks_count_starts_and_see_their_process(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "batch-0.json"
    assert read_claim(path) is None
    first = Claim.begin(path)
    assert first.restarts == 0 and read_claim(path) == first
    assert first.alive() is False, "its own process may begin again"
    assert Claim.begin(path).restarts == 1
    init = Claim(socket.gethostname(), 1, "", "", 0, "running")
    assert init.alive() is False, "process 1 is not of this package"
    assert Claim("elsewhere", 1, "", "", 0, "running").alive() is None
    path.write_text("{")
    assert read_claim(path) is None
    assert os.getpid() == first.pid


def test_commands_that_need_no_job(tmp_path: Path, run: Run) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    status, shown = run("study", "plan", path, "--out", out, "--set", 'sweep.wire=["raw", "e4m3"]')
    assert status == 0 and not out.exists()
    assert "6 cases in 2 batch(es), about 0.0" in shown
    assert "impossible, 2 case(s): mpi has no wire e4m3, only raw" in shown
    status, shown = run("study", "plan", path, "--set", "sweep.ranks=2")
    assert "strong scaling, but all cases have 2 rank(s)" in shown
    for action in ("status", "collect", "resume"):
        status, shown = run("study", action, path, "--out", out)
        assert status == 2
        assert (
            shown == f"cpdhpc: error: {out}: is no folder of a study: nothing was run there yet\n"
        )
    folder = Folder(out)
    fill(folder, small_study(tmp_path))
    status, shown = run("study", "status", out)
    assert status == 0 and "small: 4 cases: 4 finished" in shown
    head, first, *_ = shown.splitlines()
    assert head.split() == ["batch", "case", "state", "why"]
    assert [head.index(word) for word in ("case", "state")] == [
        first.index(word) for word in (first.split()[1], "finished")
    ]
    status, shown = run("study", "collect", path, "--out", out)
    assert (status, shown) == (0, f"{out}/study.h5: 4 of 4 cases\n")
    status, shown = run("study", "run", path, "--out", out)  # finished: nothing is started
    assert status == 0 and "1 rank(s), 2 case(s) finished already" in shown
    status, shown = run("study", "run", path, "--out", out, "--set", "measure.seed=5")
    assert status == 2 and "holds another study: measure.seed differs" in shown
    status, shown = run("study", "plan", path, "--set", "sweep.wires=raw")
    assert status == 2 and "sweep.wires: unknown factor of kind allreduce: did you mean" in shown


def test_shapes_of_several_nodes_are_left_out_here(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text("kind = 'allreduce'\n[sweep]\nnodes = [2]\nppn = [2]\nsize_bytes = 4\n")
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    assert status == 1
    assert shown == (
        "batch 0: 1 case(s) left out: it needs 2 nodes, and this machine is one "
        "(ppn is 2: ranks on a node)\n"
    )


def test_a_folder_that_is_being_measured_is_left_alone(tmp_path: Path) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    folder.prepare(study)
    code = "import time; print('here', flush=True); time.sleep(3600)"
    command = [sys.executable, "-c", code, "cpdhpc"]
    sleeper = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()  # a process that has just begun has no command line yet
        Claim(socket.gethostname(), sleeper.pid, "", "", 0, "running")._write(folder.claim_file(1))
        told = (
            rf"batch 1 is being measured by process {sleeper.pid} on {socket.gethostname()}, since "
            rf".*: wait for it, or end it there \(kill {sleeper.pid}\); then study resume"
        )
        with pytest.raises(FolderError, match=told):
            measure(study, folder)
    finally:
        sleeper.kill()
        sleeper.communicate()


def test_a_frozen_study_that_was_edited_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By all commands; its own file mends it, and what changes no case may be edited."""
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    folder.prepare(study)
    frozen = folder.study_toml.read_text()
    key = "max_repeats = "
    assert key in frozen and "throttle = 0" in frozen
    folder.study_toml.write_text(frozen.replace("throttle = 0", "throttle = 2 # few"))
    folder.check(folder.study())
    folder.study_toml.write_text(frozen.replace(key, f"{key}1"))
    for command in "resume", "status", "run", "collect", "extend", "cancel":
        assert main(["study", command, str(folder.path)]) == 2
        assert "study.toml: was changed by hand" in capsys.readouterr().err
    with pytest.raises(FolderError, match="was changed by hand"):
        folder.prepare(small_study(tmp_path, measure={"max_repeats": 9}))
    with pytest.raises(FolderError, match="was changed by hand"):
        folder.study()  # as jobs read it
    folder.prepare(study)
    assert folder.study_toml.read_text() == frozen
    old = frozen.partition("\n")[2]  # of a folder of an older version
    folder.study_toml.write_text(old.replace(key, f"{key}1"))
    folder.check(folder.study())


@every("damage", [b"x = [", b"\xff\xfe", b"[sweep"])
def test_a_frozen_study_that_is_no_toml_any_more(damage: bytes, tmp_path: Path, run: Run) -> None:
    """Its own file mends what still has its digest; else one line names the file, for all."""
    folder, path = Folder(tmp_path / "x"), study_file(tmp_path)
    study = small_study(tmp_path)
    fill(folder, study)
    frozen = folder.study_toml.read_bytes()
    said: set[str] = set()
    for text in (damage, frozen[:200] + b"\n" + damage):
        for action in ("run", "freeze", "status", "resume", "collect", "cancel", "extend", "plan"):
            folder.study_toml.write_bytes(text)
            status, shown = run("study", action, path, "--out", folder.path)
            if action in ("run", "freeze") and text != damage:
                assert status == 0 and folder.study_toml.read_bytes() == frozen
            else:
                assert status == 2 and shown.count("\n") == 1
                assert shown.startswith(f"cpdhpc: error: {folder.study_toml}: ")
                said.add(shown)
        folder.study_toml.write_bytes(text)
        with pytest.raises(UserError, match=r"study\.toml: "):
            folder.prepare(small_study(tmp_path, measure={"max_repeats": 9}))
        study_file(tmp_path)
    assert any("remove it, and give study run the file that it was made of" in s for s in said)
    folder.study_toml.unlink()
    assert run("study", "run", path, "--out", folder.path)[0] == 0
    assert all(map(folder.finished, expand(study).cases))


def test_a_frozen_study_that_was_changed_is_an_error(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "x")
    folder.prepare(small_study(tmp_path))
    folder.study_toml.write_text("kind = 'allreduce'\nunknown = 1\n")
    with pytest.raises(ConfigError, match="unknown key unknown"):
        folder.study()


def test_find_takes_the_order_of_the_sweep(tmp_path: Path) -> None:
    folder, study = Folder(tmp_path / "x"), small_study(tmp_path)
    cases = fill(folder, study)
    assert [case for case, _ in find(folder, cases).results] == cases


@every("action", COMMANDS["study"].actions)
def test_actions_have_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["study", action, "--help"])
    assert caught.value.code == 0 and f"usage: cpdhpc study {action}" in capsys.readouterr().out
