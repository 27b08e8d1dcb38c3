"""Studies of any program: what starts it, what is read from it, how it fails, what files hold."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from textwrap import dedent

import h5py
import numpy as np
import pytest
from every import every
from studies import kill_all, start
from training import ROOT, environment, ran

from cpdhpc.config import ConfigError, UserError, dump_toml, merge
from cpdhpc.lab.cli import main
from cpdhpc.lab.kinds.command_job import RunMetric, filled
from cpdhpc.lab.kinds.command_runs import RunFailed, numbers, taken
from cpdhpc.lab.report.compare import compare
from cpdhpc.lab.report.history import history_report
from cpdhpc.lab.report.points import seed_groups
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.run_here import launch_of
from cpdhpc.lab.study.site import Site
from cpdhpc.lab.study.submit import fitting, scripts
from cpdhpc.lab.study_data import Case
from cpdhpc.lab.study_data.study_file import load_study_file

Run = Callable[..., tuple[int, str]]
QUICK = {"warmup": 1, "block": 3, "min_repeats": 6, "max_repeats": 6}
SMALL = {
    "kind": "command",
    "sweep": {"n": [1, 2]},
    "command": {"argv": ["sh", "-c", "echo value $0", "{n}"], "launch": False},
    "metrics": {"value": {"regex": "^value (.*)$", "unit": "MB/s", "better": "higher"}},
    "measure": QUICK,
}


def study_file(directory: Path, **changes: object) -> Path:
    """Write the small study with changes laid over its tables."""
    path = directory / "small.toml"
    path.write_text(dump_toml(merge(SMALL, changes)))
    return path


WRONG = {  # tables: what is said
    "no program": ({"command": {"argv": []}}, "command.argv"),
    "unknown key": ({"command": {"argvv": []}}, "unknown key command.argvv: did you mean argv?"),
    "unknown factor": ({"command": {"argv": ["x", "{m}"]}}, "command.argv[1]: m is no factor"),
    "attribute": ({"command": {"argv": ["x", "{n.__class__}"]}}, "n.__class__ is no factor"),
    "index": ({"command": {"argv": ["x", "{n[0]}"]}}, "should be {NAME} of a factor"),
    "conversion": ({"command": {"argv": ["x", "{n!r}"]}}, "should be {NAME} of a factor"),
    "brace": ({"command": {"argv": ["x", "{"]}}, "a brace is {{ or }}"),
    "format": ({"command": {"argv": ["x", "{n:s}"]}}, "n is 1: Unknown format code 's'"),
    "option first": ({"command": {"argv": ["-x"]}}, "should be a program"),
    "variable": ({"command": {"environment": {"A-B": 1}}}, "should be the name of a variable"),
    "outside": ({"command": {"templates": {"../x": ""}}}, "inside of the working folder"),
    "template": ({"command": {"templates": {"x": "{{ n"}}}, "command.templates.x: "),
    "no template": ({"command": {"files": {"x": "gone"}}}, "gone: cannot be read: No such file"),
    "undefined": ({"command": {"templates": {"x": "{{ m }}"}}}, "'m' is undefined"),
    "regex": ({"command": {"success": "("}}, "is no regular expression"),
    "no source": ({"metrics": {"a": {}}}, "needs one of regex, json, csv and hdf5: has none"),
    "two sources": (
        {"metrics": {"a": {"regex": "(x)", "json": "a:b"}}},
        "needs one of regex, json, csv and hdf5: has regex and json",
    ),
    "no group": ({"metrics": {"a": {"regex": "x"}}}, "should have one group in brackets"),
    "no place": ({"metrics": {"a": {"csv": "x.csv"}}}, "should be FILE:PLACE"),
    "taken name": ({"metrics": {"wall_s": {"regex": "(x)"}}}, "and not wall_s"),
    "time of what": ({"command": {"time": "valve"}}, "did you mean value?"),
    "no time": ({"command": {"time": "value"}}, "should be a time: s, ms"),
    "work": ({"command": {"work": "m"}}, "command.work: m is no factor of the sweep"),
    "heading": ({"sweep": {"least": [1]}}, "reports have a column of that name"),
    "time": ({"sweep": {"time": [1]}}, "reports have a column of that name"),
    "part of time": ({"sweep": {"a.time": [1]}}, "reports have a column of that name"),
    "metric": ({"sweep": {"value": [1]}}, "[metrics] has one of that name"),
    "column": ({"sweep": {"loss": [1]}}, "study files have another thing of that name"),
    "throughput": ({"scaling": "throughput"}, "needs [command] work"),
}


@every("name", WRONG)
def test_what_is_wrong_in_a_file_is_one_line(name: str, tmp_path: Path) -> None:
    tables, said = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        expand(load_study(study_file(tmp_path, **tables)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_factors_of_any_name_and_type_fill_texts() -> None:
    factors = {"n": 7, "x": 0.1, "fast": True, "a.b": "it's", "ranks": 2}
    folders = {"study": "/s {n}", "build": "/b"}
    for text, said in (
        ("{n:03d}|{x}|{x:.2e}|{fast}", "007|0.1|1.00e-01|true"),
        ("{a.b} {{n}} {ranks}", "it's {n} 2"),
        ("{study}/{build}", "/s {n}//b"),
        ("--left={out}", None),
    ):
        assert filled(text, "argv[0]", factors, folders) == said


VALUES = (
    *("a b", "'", '"', "\\", "$HOME", "$(touch no)", "`touch no`", "a\nb", ":", "-n", "--"),
    *("{n}", "{{", "%s", "é\u2028", "!", "#", ";", "a;touch no", "\t", "~", "*"),
)
SHOW = """
import json, os, sys
names = [name for name in sorted(os.environ) if name.startswith("GIVEN_")]
given = [os.environ[name] for name in names]
print("got", json.dumps([sys.argv[1:], given, open("in.txt").read()]))
"""


def test_any_value_reaches_the_program_as_it_is(tmp_path: Path, run: Run) -> None:
    """As an argument, a variable and a file; on ranks, by mpirun, which has a meaning for ":"."""
    (tmp_path / "show.py").write_text(SHOW)
    values = {f"v{i:02d}": value for i, value in enumerate(VALUES)}
    (tmp_path / "in.j2").write_text("|".join(f"{{{{ {name} }}}}" for name in values))
    given = {
        "argv": [sys.executable, "show.py", *(f"{{{name}}}" for name in values), "x{v01}x"],
        "environment": {f"GIVEN_{name}": f"{{{name}}}" for name in values},
        "files": {"in.txt": "in.j2"},
    }
    once = {"warmup": 0, "block": 1, "min_repeats": 1, "max_repeats": 1}
    path, out = tmp_path / "any.toml", tmp_path / "out"
    path.write_text(
        dump_toml({"kind": "command", "sweep": values, "command": given, "measure": once})
    )
    status, shown = run("study", "run", path, "--out", out)
    assert status == 0, shown
    (case,) = expand(Folder(out).study()).cases
    assert case.factors == values
    line = (Folder(out).work(case) / "output.txt").read_text()
    got = json.loads(line.removeprefix("got "))
    assert got == [[*VALUES, f"x{VALUES[1]}x"], [*VALUES], "|".join(VALUES)]
    assert not list(tmp_path.rglob("no"))
    (point,) = load_study_file(out / "study.h5").points
    assert {k: point.factors[k] for k in values} == values


FOUND = {  # metric, files: values, or what is said
    "regex": ({"regex": "^t (.*)"}, {}, [1.5]),
    "errors too": ({"regex": "^err (.*)"}, {}, [3.0]),
    "several": ({"regex": "^s (.*)"}, {}, "has 3 values in a run: take = 'all'"),
    "all": ({"regex": "^s (.*)", "take": "all"}, {}, [4.0, 1.0, 2.5]),
    "nothing": ({"regex": "^u (.*)"}, {}, "regex = '^u (.*)': found nothing"),
    "no number": ({"regex": "^w (.*)"}, {}, "is 'x': should be a number"),
    "nan": ({"regex": "^nan (.*)"}, {}, "is 'nan': should be a number"),
    "json": ({"json": "o.json:a.b.1"}, {"o.json": '{"a": {"b": [1, 2]}}'}, [2.0]),
    "json list": ({"json": "o.json:a", "take": "all"}, {"o.json": '{"a": [1, 2]}'}, [1.0, 2.0]),
    "json key": ({"json": "o.json:b"}, {"o.json": '{"a": 1}'}, "o.json:b: there is no b"),
    "json true": ({"json": "o.json:a"}, {"o.json": '{"a": true}'}, "should be a number"),
    "json broken": ({"json": "o.json:a"}, {"o.json": "{"}, "o.json:a: "),
    "no file": ({"json": "o.json:a"}, {}, "o.json: cannot be read: No such file or directory"),
    "csv": ({"csv": "o.csv:t", "take": "max"}, {"o.csv": "n,t\n1,2\n2,3.5\n"}, [3.5]),
    "tsv": ({"csv": "o.tsv:t", "take": "sum"}, {"o.tsv": "n\tt\n1\t2\n2\t3\n"}, [5.0]),
    "csv column": ({"csv": "o.csv:x"}, {"o.csv": "n,t\n1,2\n"}, "there is no column x"),
}  # fmt: skip


@every("name", FOUND)
def test_metrics_are_read_from_output_and_files(name: str, tmp_path: Path) -> None:
    given, files, wanted = FOUND[name]
    metric = RunMetric(**given)
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    text = "t 1.5\ns 4\ns 1\ns 2.5\nw x\nnan nan\n\nerr 3"
    if isinstance(wanted, str):
        with pytest.raises(RunFailed) as caught:
            taken(metric, numbers(metric, text, tmp_path))
        assert wanted in str(caught.value)
    else:
        assert taken(metric, numbers(metric, text, tmp_path)) == wanted


def test_metrics_are_read_from_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["a/x"] = np.array([[1, 2], [3, 4]])
        file["s"] = 2.5
        file["t"] = "text"
    for place, take, wanted in (("/a/x", "all", [1, 2, 3, 4]), ("/a/x", "mean", [2.5]),
                                ("s", "one", [2.5])):  # fmt: skip
        metric = RunMetric(hdf5=f"o.h5:{place}", take=take)
        assert taken(metric, numbers(metric, "", tmp_path)) == wanted
    for place, said in (("/b", "o.h5:/b: "), ("/t", "has values of type"), ("/a", "o.h5:/a: ")):
        metric = RunMetric(hdf5=f"o.h5:{place}")
        with pytest.raises(RunFailed, match=said):
            numbers(metric, "", tmp_path)


@every("take", ("first", "last", "min", "max", "sum", "mean", "median"))
def test_one_of_several_values_is_taken(take: str) -> None:
    wanted = {"first": 4.0, "last": 3.0, "min": 1.0, "max": 4.0, "sum": 8.0, "mean": 8 / 3}
    metric = RunMetric(regex="(x)", take=take)
    assert taken(metric, [4.0, 1.0, 3.0]) == [wanted.get(take, 3.0)]


FAILING = {  # what argv's shell does in case n = 2: what is said of it
    "exit 3": "run 1: exit status 3: it printed nothing",
    "echo oh no >&2; exit 1": "run 1: exit status 1: errors.txt ends with: oh no",
    "kill -9 $$": "run 1: died of SIGKILL",
    "sleep 60": "run 1: is ended after timeout_s = 0.5 s",
    "trap '' TERM; sleep 60 & wait; sleep 60": "run 1: is ended after timeout_s = 0.5 s",
    "true": "run 1: success = '^value' is not in its output: it printed nothing",
    "echo value x": "run 1: metrics.value: regex = '^value (.*)$' is 'x': should be a number",
    "echo value 1; echo value 2": "run 1: metrics.value: has 2 values in a run",
    "exec no-such-program": "run 1: exit status 127: errors.txt ends with: ",
}


@every("does", FAILING)
def test_a_case_that_fails_is_named_and_the_others_go_on(
    does: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpdhpc.lab.kinds.command_runs.END_S", 0.2)
    script = f'if [ "$0" = 2 ]; then {does}; else echo value 1; fi'
    changes = {"argv": ["sh", "-c", script, "{n}"], "timeout_s": 0.5, "success": "^value"}
    path = study_file(tmp_path, command=changes)
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    folder = Folder(tmp_path / "out")
    one, two = expand(folder.study()).cases
    assert status == 1, shown
    assert folder.finished(one) and not folder.finished(two)
    failure = folder.failure(two)
    assert FAILING[does] in failure and str(folder.work(two)) in failure
    assert f"{two.id}: {failure}" in shown and shown.endswith("study.h5: 1 of 2 cases\n")
    status, shown = run("study", "status", path, "--out", folder.path)
    assert status == 0 and FAILING[does] in shown
    assert (folder.work(two) / "run.sh").is_file()


def test_a_build_that_fails_is_shown_and_is_tried_again(tmp_path: Path, run: Run) -> None:
    """Once per folder and machine if it works; its folder is {build}, and $CPDHPC_BUILD."""
    made = 'printf "#!/bin/sh\\necho value 1\\n" > $CPDHPC_BUILD/x; chmod +x $CPDHPC_BUILD/x'
    lines = ["cat header", "echo built >> log", made]
    path = study_file(tmp_path, command={"build": lines, "argv": ["{build}/x"]})
    out = tmp_path / "out"
    status, shown = run("study", "run", path, "--out", out)
    assert status == 1 and not (tmp_path / "log").exists()
    assert shown.count("build: exit status 1: errors.txt ends with: cat: header: No such") >= 2
    (tmp_path / "header").touch()
    status, shown = run("study", "resume", out)
    assert status == 0, shown
    status, _ = run("study", "extend", study_file(
        tmp_path, command={"build": lines, "argv": ["{build}/x"]}, sweep={"n": [1, 2, 3]}
    ), "--out", out)  # fmt: skip
    assert status == 0
    status, shown = run("study", "resume", out)
    assert status == 0 and "3 of 3" in shown, shown
    assert (tmp_path / "log").read_text() == "built\n"


def commit(folder: Path, message: str) -> str:
    """Commit what a folder has as a repository of its own; return the commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", message, "--allow-empty"]):
        subprocess.run([*git, *words], check=True)
    done = ran([*git, "rev-parse", "HEAD"], check=True)
    return done.stdout.strip()


CHANGES = {  # what is done to a program between two cases of a study: the error
    "edited": "the program differs from that of finished cases (SHA-256 ",
    "committed": "the program differs from that of finished cases (commit ",
    "beside": "",  # another file of its folder
}


@every("change", CHANGES)
def test_a_program_that_was_changed_is_not_compared(change: str, tmp_path: Path, run: Run) -> None:
    """The file of the study says which one was measured: its commit and its files."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    script = source / "x.sh"
    script.write_text("#!/bin/sh\necho value 1\n")
    first = commit(source, "first")
    argv = ["sh", "x.sh"]
    path = study_file(source, command={"argv": argv}, sweep={"n": [1]})
    assert run("study", "run", path, "--out", out)[0] == 0
    (where,) = load_study_file(out / "study.h5").environments
    assert where["program_commit"] == first and "program_changes" not in where
    if change == "edited":
        script.write_text("#!/bin/sh\necho value 2\n")
    elif change == "committed":
        commit(source, "second")
    else:
        (source / "notes").write_text("none\n")
    path = study_file(source, command={"argv": argv}, sweep={"n": [1, 2]})
    assert run("study", "extend", path, "--out", out)[0] == 0
    status, shown = run("study", "resume", out)
    assert status == bool(CHANGES[change]) and CHANGES[change] in shown


def test_programs_that_factors_name_are_in_the_record(tmp_path: Path, run: Run) -> None:
    """Each case has the hash of its own, by which a study does not tell its cases apart."""
    for name in ("1", "2"):
        (tmp_path / f"x{name}.sh").write_text(f"#!/bin/sh\necho value {name}\n")
    commit(tmp_path, "both")
    (tmp_path / "x1.sh").write_text("#!/bin/sh\necho value 3\n")
    path = study_file(tmp_path, command={"argv": ["sh", "{study}/x{n}.sh"]})
    assert run("study", "run", path, "--out", tmp_path / "out")[0] == 0
    file = load_study_file(tmp_path / "out" / "study.h5")
    assert not {"program", "program_of_case"} & file.points[0].factors.keys()
    assert len({each["program_of_case"] for each in file.environments}) == 2
    assert {each["program_changes"] for each in file.environments} == {"not committed"}


def test_time_limits_may_change_and_what_is_measured_may_not(tmp_path: Path, run: Run) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    assert run("study", "run", path, "--out", out)[0] == 0
    before = [case.id for case in expand(Folder(out).study()).cases]
    path = study_file(tmp_path, command={"timeout_s": 5.0, "keep": False})
    assert run("study", "run", path, "--out", out)[0] == 0
    assert [case.id for case in expand(Folder(out).study()).cases] == before
    status, shown = run("study", "run", study_file(tmp_path, command={"success": "v"}),
                        "--out", out)  # fmt: skip
    assert status == 2 and "job.command.success differs" in shown
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = load_study(study_file(elsewhere))
    assert [case.id for case in expand(moved).cases] == before


NUMBERS = dedent(
    """
    import sys, time, random
    n, x, fast, word = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
    for _ in range(3):
        print("sample", n * 100 + random.random())
    print("time", 2 + n + random.random() / 100)
    """
)


def test_files_hold_every_sample_and_their_statistics(tmp_path: Path, run: Run) -> None:
    """An independent reader finds the medians and intervals again, from the samples."""
    (tmp_path / "numbers.py").write_text(NUMBERS)
    path = tmp_path / "numbers.toml"
    path.write_text(
        dedent(
            f"""
            kind = "command"
            scaling = "strong"
            [sweep]
            ranks = [1, 2]
            ppn = 2
            n = [-1, 0, 1]
            [[zip]]
            x = [1, 2.5]
            fast = [true, false]
            word = ["", "b"]
            [command]
            argv = ["{sys.executable}", "numbers.py", "{{n}}", "{{x}}", "{{fast}}", "x"]
            environment = {{ WORD = "{{word}}" }}
            launch = false
            time = "time"
            [metrics.sample]
            regex = "sample (.*)"
            take = "all"
            unit = "GB/s"
            better = "higher"
            [metrics.time]
            regex = "time (.*)"
            unit = "ms"
            better = "lower"
            [measure]
            warmup = 1
            block = 3
            min_repeats = 6
            max_repeats = 6
            """
        )
    )
    out = tmp_path / "out"
    status, shown = run("study", "run", path, "--out", out)
    assert status == 0, shown
    file = load_study_file(out / "study.h5")
    asked = {(r, n, x) for r in (1, 2) for n in (-1, 0, 1) for x in (1.0, 2.5)}
    factors = [point.factors for point in file.points]
    assert {(f["ranks"], f["n"], f["x"]) for f in factors} == asked
    assert all(("word" in f) == (f["x"] == 2.5) and f["fast"] == (f["x"] == 1.0) for f in factors)
    with h5py.File(out / "study.h5") as raw:
        for name, each in (("sample", 3), ("time", 1), ("wall_s", 1)):
            group = raw[f"metric_{name}"]
            values, index = group["value"][:], group["point_index"][:]
            counts = group["is_warmup"][:] == 0
            assert len(values) == 12 * (6 + 2) * each and counts.sum() == 12 * 6 * each
            for i in range(12):
                own = np.sort(values[counts & (index == i)])
                j = {18: 5, 6: 1}[len(own)]  # P(B < j) of B(18, 1/2), B(6, 1/2) is below 2.5 %
                assert group["n"][i] == len(own)
                assert group["median"][i] == pytest.approx(np.median(own), rel=1e-12)
                ends = group["ci_low"][i], group["ci_high"][i]
                assert ends == (own[j - 1], own[-j])
            assert group["value"].attrs["units"] == {"sample": "GB/s", "time": "ms"}.get(name, "s")
        median_s = raw["summary/median_s"][:]
        assert median_s == pytest.approx(raw["metric_time/median"][:] / 1e3, rel=1e-12)
        wall = raw["metric_wall_s/median"][:]
        assert (wall > 0.005).all()  # a start of Python
    for group in seed_groups(file):
        n = group.factors["n"]
        assert group.metric("sample").value == pytest.approx(100 * n + 0.5, abs=0.5)
    status, shown = run("report", out, "--html", tmp_path / "page.html", "--csv", tmp_path / "csv")
    assert status == 0 and "Metric sample" in shown and "Metric wall_s" in shown
    assert "Times: median of the metric time." in " ".join(shown.split())
    assert len(list((tmp_path / "csv").glob("*metric*.csv"))) == 3
    for each in (tmp_path / "csv").glob("*.csv"):  # a factor is called n
        names = each.read_text().splitlines()[0].split(",")
        assert len(set(names)) == len(names), each
    status, shown = run("report", out, "--x", "n", "--y", "sample", "--figures", tmp_path)
    assert status == 0, shown


def test_a_metric_over_two_studies_of_one_day(tmp_path: Path, run: Run) -> None:
    """The medians and intervals are those of the files; columns have the time of day."""
    files = []
    for factor in (1, 3):
        argv = ["sh", "-c", f"echo value $(($0 * {factor}))", "{n}"]
        often = {"block": 10, "min_repeats": 10, "max_repeats": 10}
        path = study_file(tmp_path, command={"argv": argv}, measure=often)
        out = tmp_path / f"out{factor}"
        assert run("study", "run", path, "--out", out)[0] == 0
        files.append(out / "study.h5")
    studies = []
    for hour, each in zip((11, 13), map(load_study_file, files), strict=True):
        date = {"date": f"2026-11-01T{hour}:00:00+00:00"}
        studies.append(replace(each, attributes={**each.attributes, **date}))
    (table,) = history_report(studies, "value").tables
    heads = ["point", "2026-11-01 11:00", "2026-11-01 13:00"]
    assert [each[: len(heads[1])] for each in table.headings] == heads
    assert table.rows == [["n 1", "1.00", "3.00 (+)"], ["n 2", "2.00", "6.00 (+)"]]
    status, shown = run("report", *files, "--history", "valve")
    assert status == 2 and "no file has it; known are " in shown and "value" in shown


def test_status_says_why_cases_are_left_out_here(tmp_path: Path, run: Run) -> None:
    """Without ppn each rank has a node of its own, which this machine is not."""
    path, out = study_file(tmp_path, sweep={"n": [1], "ranks": [1, 2]}), tmp_path / "out"
    assert run("study", "run", path, "--out", out)[0] == 1
    status, shown = run("study", "status", out)
    assert status == 0 and shown.count("missing      needs 2 nodes, and study run has one") == 1


def test_a_report_without_a_figure_says_so(tmp_path: Path, run: Run) -> None:
    path, out = study_file(tmp_path, sweep={"n": [1]}), tmp_path / "out"
    assert run("study", "run", path, "--out", out)[0] == 0
    status, shown = run("report", out, "--figures", tmp_path / "figures")
    assert status == 0 and "nothing written: these reports have no figure" in shown, shown
    assert not (tmp_path / "figures").exists()


def test_metrics_are_compared(tmp_path: Path, run: Run) -> None:
    """Of one that is better when higher a fall is worse, and --fail-on-slower sees it."""
    outs = []
    for factor in (10, 5):
        argv = ["sh", "-c", f"echo value $(($0 * {factor}))", "{n}"]
        often = {"block": 10, "min_repeats": 10, "max_repeats": 10}  # for an interval of the ratio
        path = study_file(tmp_path, command={"argv": argv}, measure=often)
        outs.append(tmp_path / f"out{factor}")
        assert run("study", "run", path, "--out", outs[-1])[0] == 0
    files = [load_study_file(out / "study.h5") for out in outs]
    for before, after, verdict in ((*files, "slower"), (*files[::-1], "faster")):
        found = [c for c in compare(before, after).changes if c.metric]
        assert [c.verdict for c in found] == [verdict] * 2
        assert found[0].times.value == {"slower": 2.0, "faster": 0.5}[verdict]
    status, shown = run("report", outs[1], "--compare", outs[0], "--fail-on-slower")
    assert status == 1 and "n 1: value" in shown, shown


TIMED = """
import sys, time
factor, pause_s = float(sys.argv[2]), float(sys.argv[3])
time.sleep(pause_s)
for i in range(10):
    print("lat", factor * (int(sys.argv[1]) + i / 1000))
"""


def test_a_metric_that_is_the_time_is_judged_once_and_the_wall_time_is_not(
    tmp_path: Path, run: Run
) -> None:
    """The second is twice as fast by its metric, while its start takes far longer."""
    (tmp_path / "timed.py").write_text(TIMED)
    often = {"warmup": 0, "block": 10, "min_repeats": 10, "max_repeats": 10}
    metrics = {"lat": {"regex": "lat (.*)", "unit": "ms", "better": "lower", "take": "median"}}
    outs = []
    for factor, pause_s in ((2, 0), (1, 0.2)):
        argv = [sys.executable, "timed.py", "{n}", str(factor), str(pause_s)]
        command = {"argv": argv, "launch": False, "time": "lat"}
        tables = SMALL | {"command": command, "metrics": metrics, "measure": often}
        path, out = tmp_path / "timed.toml", tmp_path / f"out{factor}"
        path.write_text(dump_toml(tables))
        assert run("study", "run", path, "--out", out)[0] == 0
        outs.append(out)
    slow, fast = outs
    found = compare(*(load_study_file(out / "study.h5") for out in outs))
    assert [(c.metric, c.verdict) for c in found.changes] == [("", "faster")] * 2
    assert [(c.metric, c.verdict) for c in found.shown] == [("wall_s", "slower")] * 2
    status, shown = run("report", fast, "--compare", slow, "--fail-on-slower")
    assert status == 0 and "0 of 2 points slower" in shown, shown
    assert shown.count("shown only") == 2 and "wall_s is shown and not judged" in shown
    status, shown = run("report", slow, "--compare", fast, "--fail-on-slower")
    assert status == 1 and "2 of 2 points slower: n 2: lat by " in shown.replace("n 1", "n 2"), (
        shown
    )
    path.write_text(dump_toml(tables | {"command": command | {"time": ""}}))
    assert run("study", "run", path, "--out", tmp_path / "wall")[0] == 0
    status, shown = run("report", tmp_path / "wall", "--compare", slow)
    assert status == 2 and "times are the metric lat and the wall times of runs" in shown


def rendered(path: Path, out: Path, site: Site) -> dict[str, str]:
    """The job scripts of a study, by name."""
    study = load_study(path)
    todo, _ = fitting(_batches(study), site)
    return {p.name: text for p, text in scripts(study, Folder(out), site, todo).items()}


def _batches(study):  # type: ignore[no-untyped-def]
    from cpdhpc.lab.study.cases import batches

    return batches(study, expand(study).cases)


@every("launcher", ("mpirun", "mpiexec", "srun-pmix"))
def test_scripts_start_one_process_that_starts_the_ranks(launcher: str, tmp_path: Path) -> None:
    path = study_file(tmp_path, sweep={"ranks": [2], "ppn": 2}, command={"launch": True})
    text = rendered(path, tmp_path / "out", Site(launcher=launcher))["1x2.sbatch"]
    assert "#SBATCH --signal=B:USR1@120" in text
    (line,) = [each for each in text.splitlines() if " programs " in each]
    words = shlex.split(line)
    assert words[:4] == ["python", "-m", "cpdhpc", "programs"]
    launch = words[words.index("--launch") + 1]
    assert launch.startswith(launcher.partition("-")[0] + " ")
    assert "$ranks" in launch and "$ppn" in launch
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    if launcher.startswith("srun"):
        assert '--nodes="$nodes"' in launch
    with pytest.raises(UserError, match="container"):
        rendered(path, tmp_path / "out", Site(launcher=launcher, container="a.sif"))


def layout(folder: Path) -> set[str]:
    """The names of all files of a study's folder, but for those of jobs."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = ("logs/", "scripts/", "jobs.json", "site.toml", "study.h5")
    return {name for name in names if not name.startswith(own)}


JOBS = {  # what a scheduler puts into the environment of an element
    "slurm": {"SLURM_ARRAY_TASK_ID": "{index}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"}
    | {"SLURM_JOB_NAME": "x"},
    "pbs": {"PBS_JOBID": "7.s", "PBS_JOBNAME": "x", "PBS_O_WORKDIR": "{here}"}
    | {"PBS_NODEFILE": "{here}/hosts"},
    "lsf": {"LSB_JOBINDEX": "{index}", "LSB_JOBID": "7", "LSB_JOBNAME": "x[{index}]"}
    | {"LSB_DJOB_HOSTFILE": "{here}/hosts"},
    "flux": {"FLUX_ENCLOSING_ID": "7"},
}


@every("left", (False, True))
def test_a_launcher_whose_number_a_killed_one_had_has_a_directory_of_its_own(
    left: bool, tmp_path: Path
) -> None:
    """Open MPI names its directory by its process number, and ends if dead sockets are there."""
    words, _ = launch_of("printenv PRTE_MCA_prte_tmpdir_base").command(Case("x", {}, 1, 1))
    before = 'mkdir "$TMPDIR/ompi.$$"; ' * left + 'exec "$@"'
    done = ran(
        ["sh", "-c", before, "sh", *words],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
    )
    (own,) = done.stdout.split() or [""]
    assert bool(own) == left == (done.returncode == 0) and (not left or Path(own).is_dir())


AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")  # else mpirun refuses


def test_jobs_give_the_files_that_a_local_run_gives(tmp_path: Path, run: Run) -> None:
    """The script of each batch, run as each scheduler would, on ranks of this machine."""
    path = study_file(
        tmp_path,
        sweep={"ranks": [1, 2], "ppn": 2},
        command={"launch": True},
        metrics={"value": {"take": "first"}},
    )
    here = tmp_path / "here"
    status, shown = run("study", "run", path, "--out", here)
    assert status == 0, shown
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flux").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "bin" / "flux").chmod(0o755)
    for scheduler, given in JOBS.items():
        there = tmp_path / scheduler
        site = Site(
            scheduler=scheduler,
            launcher="mpirun",
            python=sys.executable,
            mpi_flags=("--oversubscribe",),
        )
        Folder(there).prepare(load_study(path))
        for name, text in rendered(path, there, site).items():
            number = {"1x1": 0, "1x2": 1}.get(name.partition(".")[0].partition("-")[0])
            if number is None:
                continue
            keys = {"here": tmp_path, "index": number + site.by.FIRST}
            own = environment() | {k: value.format(**keys) for k, value in given.items()}
            own |= dict.fromkeys(AS_ROOT, "1")
            done = ran(
                ["bash", "-c", text], env=own | {"PATH": f"{tmp_path / 'bin'}:{own['PATH']}"}
            )
            logs = [each.read_text() for each in Folder(there).logs.iterdir()]
            assert done.returncode == 0, (scheduler, done.stdout, done.stderr, logs)
        assert run("study", "collect", there)[0] == 0
        assert layout(here) == layout(there), scheduler
        one, two = (load_study_file(each / "study.h5") for each in (here, there))
        assert [p.case_id for p in one.points] == [p.case_id for p in two.points]
        assert [p.factors for p in one.points] == [p.factors for p in two.points]
        assert [p.outcomes.keys() for p in one.points] == [p.outcomes.keys() for p in two.points]
        assert scheduler == "slurm" or all(scheduler in each for each in two.environments), (
            "facts of its job"
        )


def test_a_launcher_that_starts_others_than_asked_for_is_found_out(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "Open MPI 9"\n'
        'while [ "$1" != -n ]; do shift; done\nshift 2\nexec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    path = study_file(tmp_path, command={"launch": True}, sweep={"ranks": [1, 2], "ppn": 2})
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    assert status == 1 and shown.endswith("study.h5: 2 of 4 cases\n"), shown
    said = "has started 1 rank(s), by hosts; asked for were 2 (nodes x ranks per node: 1 x 2)"
    assert shown.count(said) == 2
    (file,) = [load_study_file(tmp_path / "out" / "study.h5")]
    assert {each["launcher"] for each in file.environments} == {"Open MPI 9"}


def _alive(word: str) -> int:
    found = ran(["pgrep", "-fc", word])
    return int(found.stdout)


def _waited(test: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not test() and time.monotonic() < end:
        time.sleep(0.05)
    return test()


@every("number", (signal.SIGKILL, signal.SIGINT))
def test_a_study_that_is_killed_leaves_no_program_and_goes_on(
    number: int, tmp_path: Path, run: Run
) -> None:
    """SIGKILL goes to the study and to the process of its batch, not to the program."""
    word = f"sleep 1000.{os.getpid()}{number}"
    go = tmp_path / "go"
    slow = f'[ "$0" = 1 ] || [ -e {go} ] || {word}; echo value 1'
    path = study_file(tmp_path, command={"argv": ["sh", "-c", slow, "{n}"]}, run={"bundle": "case"})
    out = tmp_path / "out"
    started = start("study", "run", path, "--out", out)
    try:
        assert _waited(lambda: _alive(f"^{word}") > 0)
        if number == signal.SIGINT:
            started.send_signal(number)
            assert started.wait(60) == 130
        else:
            claim = json.loads((out / "logs" / "batch-1.json").read_text())
            os.kill(started.pid, number)
            os.kill(claim["pid"], number)
        assert _waited(lambda: _alive(f"^{word}") == 0)
    finally:
        kill_all(started)
    one, two = expand(load_study(path)).cases
    folder = Folder(out)
    assert folder.finished(one) and not folder.finished(two)
    go.touch()
    status, shown = run("study", "resume", out)
    assert status == 0 and "2 of 2" in shown, shown


OWN = '''
"""A kind of one's own."""
from dataclasses import replace
from cpdhpc.lab.kinds.codec import CODEC
from cpdhpc.lab.study_data import Factor

COPY = replace(CODEC, sample="one copy", factors={**CODEC.factors})
'''


def test_a_kind_of_ones_own_is_imported(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From plan to report, where its package can be imported."""
    (tmp_path / "ownkinds.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    path = tmp_path / "own.toml"
    tables = {"kind": "ownkinds:COPY", "sweep": {"size_bytes": ["4KiB"], "format": ["e4m3"]}}
    tables["measure"] = QUICK
    path.write_text(dump_toml(tables))
    status, shown = run("study", "run", path, "--out", tmp_path / "out")
    assert status == 0, shown
    status, shown = run("report", tmp_path / "out")
    assert status == 0 and "strong scaling of ownkinds:COPY" in shown
    for name, said in (
        ("ownkinds:GONE", "module ownkinds has no kind GONE"),
        ("nomodule:X", "ModuleNotFoundError"),
        ("codecs", "did you mean codec?"),
    ):
        path.write_text(dump_toml(tables | {"kind": name}))
        with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
            load_study(path)


def test_the_example_runs(tmp_path: Path, run: Run) -> None:
    path = ROOT / "inputs" / "study_command.toml"
    fewer = ("measure.min_repeats=1", "measure.max_repeats=1", "measure.warmup=0")
    settings = [word for each in fewer for word in ("--set", each)]
    status, shown = run("study", "run", path, "--out", tmp_path / "out", *settings)
    assert status == 0, shown
    status, shown = run("report", tmp_path / "out")
    assert status == 0 and "Metric step" in shown and "Metric wall_s" in shown


def test_of_many_starts_at_one_moment_one_measures(tmp_path: Path) -> None:
    """The programs are slow, so that the others begin before they end."""
    ran_by, context = tmp_path / "ran", get_context("fork")
    argv = ["sh", "-c", f"echo value 1; echo $0 >>{ran_by}; sleep 0.1", "{n}"]
    folder = Folder(tmp_path / "x")
    folder.prepare(load_study(study_file(tmp_path, command={"argv": argv})))
    together = context.Barrier(8)

    def start() -> None:
        together.wait()
        sys.exit(main(["programs", str(folder.path), "0"]))

    starts = [context.Process(target=start) for _ in range(together.parties)]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    assert sorted(each.exitcode for each in starts) == [0, *[2] * 7]
    assert sorted(ran_by.read_text().split()) == [*"1" * 8, *"2" * 8]  # 2 visits: 2 warm-ups, 6
    assert not folder.lock_file(0).exists()
