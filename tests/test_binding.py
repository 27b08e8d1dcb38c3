"""Where ranks sit: what is asked for, what launchers are told, and what a job sees itself."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from every import every
from studies import small_study, study_file

from cpdhpc.config import ConfigError, UserError
from cpdhpc.lab.binding import cpus_of, misplaced, said, seat
from cpdhpc.lab.cli import main
from cpdhpc.lab.schedulers import SCHEDULERS
from cpdhpc.lab.schedulers.base import Counts, Launcher
from cpdhpc.lab.study.cases import batches, expand
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.site import Site, arrays, launch
from cpdhpc.lab.study.submit import scripts
from cpdhpc.lab.study_data.study_file import load_study_file

pytestmark = pytest.mark.mpi_skip
WHOLE = {"core": 8, "socket": 2, "numa": 4}  # of a node: 4 cores a socket, 2 a NUMA domain


def node(*cores: Sequence[int], host: str = "n1", whole: dict[str, int] = WHOLE) -> list[Any]:
    """What ranks of a node see that may use these cores."""
    of = {"core": 1, "numa": 2, "socket": 4}
    return [
        {"host": host, "rank": rank, "cpus": [*own], "all": whole}
        | {level: sorted({core // size for core in own}) for level, size in of.items()}
        for rank, own in enumerate(cores)
    ]


ALL = range(8)
FOUND = [  # bind, distribution, cores of each rank, what is wrong
    ("", "", [ALL, [0]], ""),
    ("none", "", [ALL, ALL], ""),
    ("none", "", [[0], [1]], "bind is none, and ranks have cores 0 | 1"),
    ("core", "", [[0], [1]], ""),
    ("core", "", [[0, 1], [2, 3]], ""),
    ("core", "", [[0], [0]], "bind is core, and ranks share some: cores 0 | 0"),
    ("core", "", [ALL], "bind is core, and ranks have cores 0,1,2,3,4,5,6,7"),
    ("socket", "", [range(4), range(4)], ""),
    ("socket", "", [range(4), ALL], "bind is socket, and ranks have sockets 0 | 0,1"),
    ("numa", "", [[0, 1], [6, 7]], ""),
    ("numa", "", [range(4), [6]], "bind is numa, and ranks have numas 0,1 | 3"),
    ("core", "block", [[0], [1], [4], [5]], ""),
    ("core", "block", [[0], [4], [1], [5]], "distribution is block, and ranks have sockets 0 | 1"),
    ("core", "cyclic", [[0], [4], [1], [5]], ""),
    ("core", "cyclic", [[0], [1], [4], [5]], "distribution is cyclic, and ranks have sockets 0"),
    ("core", "cyclic", [[0], [1]], "distribution is cyclic, and ranks have sockets 0 | 0"),
    ("core", "cyclic", [[0]], ""),
    ("none", "cyclic", [ALL, ALL], ""),  # nobody can say
]


@every(("bind", "distribution", "cores", "wrong"), FOUND)
def test_ranks_that_are_elsewhere_are_found(
    bind: str, distribution: str, cores: list[Sequence[int]], wrong: str
) -> None:
    told = misplaced(node(*cores), bind, distribution)
    assert told.startswith(f"n1: {wrong}") if wrong else not told
    second = misplaced([*node(*cores), *node(*cores, host="n2")], bind, distribution)
    assert bool(second) == bool(wrong), "of each host by itself"


def test_where_ranks_are_is_said_in_words() -> None:
    two = [*node([0], [4]), *node([0], [4], host="n2")]
    assert said(two) == ("ranks may use, of each host, cores 0 | 4; sockets 0 | 1; numas 0 | 2")
    own = seat()
    assert own["cpus"] == sorted(os.sched_getaffinity(0)) and own["all"]["core"] >= 1
    assert [cpus_of(text) for text in ("0-2,5", "3", "")] == [[0, 1, 2, 5], [3], []]


COUNTS = Counts("4", "2", "2")
WAYS = [(name, each) for name, of in SCHEDULERS.items() for each in of.LAUNCHERS]
ALL_BINDINGS = {"none", "core", "socket", "numa"}
FEWER = {  # what has not all of them
    "pals": (ALL_BINDINGS, set()),
    "jsrun": ({"none", "core"}, {"block"}),
    "flux-run": ({"none", "core"}, {"block"}),
}
SAID = {  # in other words than lab.binding has
    "pals": {"core": "--cpu-bind depth"},
    "jsrun": {"core": "-b packed:1"},
    "flux-run": {"none": "cpu-affinity=off", "core": "cpu-affinity=per-task"},
}


@every(("scheduler", "launcher"), WAYS)
def test_launchers_are_told(scheduler: str, launcher: str) -> None:
    way = SCHEDULERS[scheduler].LAUNCHERS[launcher]
    bindings, dealings = FEWER.get(launcher, (ALL_BINDINGS, {"block", "cyclic"}))
    assert way.bind.keys() - {""} == bindings and way.distribution.keys() - {""} == dealings
    told = {""}
    for bind in bindings:
        text = launch(way, COUNTS, near_gpus=True, seats=(bind, ""))
        assert SAID.get(launcher, {}).get(bind, bind) in text.replace("ldoms", "numa")
        assert not way.in_order or way.in_order not in text
        assert text not in told
        told.add(text)
    dealt = {launch(way, COUNTS, seats=("", each)) for each in dealings}
    assert len(dealt) == len(dealings)
    plain = launch(way, COUNTS)
    assert shlex.split(plain)[0] == way.program and "{" not in plain.replace("${", "")
    if launcher.startswith("srun"):
        assert f"{plain} --distribution=block:cyclic" in dealt


@every("scheduler", SCHEDULERS)
def test_ranks_of_several_cores_are_bound_once(scheduler: str) -> None:
    """To cores unless to something larger, which Open MPI and hydra refuse together."""
    ways = SCHEDULERS[scheduler].LAUNCHERS
    many = {"SLURM_CPUS_PER_TASK": "3", "PATH": os.environ["PATH"]}
    for bind, pe, once in (
        ("", ":PE=3", "-bind-to core:3"),
        ("core", ":PE=3 --bind-to core", "-bind-to core:3"),
        ("socket", " --bind-to socket", "-bind-to socket"),
    ):
        for name, wanted in (("mpirun", pe), ("mpiexec", once)):
            text = launch(ways[name], COUNTS, cores=3, seats=(bind, ""))
            shown = subprocess.run(
                ["bash", "-c", f"echo {text}"], env=many, capture_output=True, text=True, check=True
            ).stdout.strip()
            assert shown.endswith(wanted) and shown.count("core") == once.count("core") - (
                name == "mpirun" and not bind
            ), shown


def test_what_a_launcher_has_no_option_for_is_an_error() -> None:
    with pytest.raises(UserError, match="bind = 'core': go has no option known for it"):
        launch(Launcher("go {ranks}"), COUNTS, seats=("core", ""))
    for scheduler, launcher, seats in (
        ("pbs", "pals", ("", "block")),
        ("lsf", "jsrun", ("socket", "")),
        ("flux", "flux-run", ("", "cyclic")),
    ):
        site = Site(scheduler=scheduler, launcher=launcher)
        with pytest.raises(UserError, match=f"{site.way.program} has no option known for it"):
            launch(site.way, COUNTS, seats=seats)


def test_cases_that_sit_elsewhere_have_jobs_of_their_own(tmp_path: Path) -> None:
    """For all ways to bundle; ids of cases without the factors are what they were."""
    before = {case.id for case in expand(small_study(tmp_path)).cases}
    seats = {"sweep": {"bind": ["", "core"], "distribution": ["", "cyclic"]}}
    for bundle in ("shape", "nested", "case"):
        study = small_study(tmp_path, **seats, run={"bundle": bundle})
        cases = expand(study).cases
        assert before < {case.id for case in cases} and len(cases) == 4 * len(before)
        jobs = batches(study, cases)
        for job in jobs:
            assert {case.seats for case in job.cases} == {job.seats}
        site = Site()
        todo = arrays(jobs, site)
        names = [array.name for array in todo]
        assert len({*names}) == len(names) and "1x2-core-cyclic" in names
        texts = scripts(study, Folder(tmp_path / "out"), site, todo)
        text = next(t for path, t in texts.items() if path.stem == "1x2-core-cyclic")
        assert "--map-by package" in text and "--bind-to core" in text
    with pytest.raises(ConfigError, match="did you mean core"):
        expand(small_study(tmp_path, sweep={"bind": ["cores"]}))


def test_a_study_runs_where_it_says_and_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("binding needs two cores")
    path = study_file(
        tmp_path, sweep={"ranks": [2], "algorithm": ["ring"], "bind": ["none", "core"]}
    )
    out = tmp_path / "out"
    assert main(["study", "run", str(path), "--out", str(out)]) == 0
    file = load_study_file(out / "study.h5")
    placed = {
        point.factors["bind"]: file.environments[int(point.outcomes["environment"])]["placement"]
        for point in file.points
    }
    cores = [text.partition("; ")[0].rpartition("cores ")[2] for text in placed.values()]
    assert [*placed] == ["none", "core"]
    assert len({*cores[0].split(" | ")}) == 1 and len({*cores[1].split(" | ")}) == 2
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    assert " bind " in capsys.readouterr().out


def test_a_launcher_that_does_not_bind_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It drops what it is told of binding: of studies of all kinds, and of programs."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("binding needs two cores")
    import shutil

    real = shutil.which("mpirun")
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/bash\nwords=()\nfor word; do\n"
        '    [ "$word" = core ] && word=none\n    words+=("$word")\ndone\n'
        f'exec {real} "${{words[@]}}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    sweep = {"ranks": [2], "algorithm": ["ring"], "bind": ["core"]}
    path = study_file(tmp_path, sweep=sweep)
    assert main(["study", "run", str(path), "--out", str(tmp_path / "out")]) == 1
    wrong = "bind is core, and ranks share some: cores "
    assert wrong in capsys.readouterr().out
    path = tmp_path / "program.toml"
    path.write_text(
        'kind = "command"\n[sweep]\nranks = 2\nppn = 2\nbind = "core"\n[command]\nargv = ["true"]\n'
        "[measure]\nwarmup = 0\nblock = 1\nmin_repeats = 1\nmax_repeats = 1\n"
    )
    assert main(["study", "run", str(path), "--out", str(tmp_path / "out2")]) == 1
    assert wrong in capsys.readouterr().out
