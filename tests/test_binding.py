"""Where ranks sit: what is asked for, what launchers are told, and what a job sees itself."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from every import every
from gpu_driver import two_gpus_in
from studies import small_study, study_file
from training import environment, ran

from cpdhpc.config import ConfigError, UserError
from cpdhpc.lab.binding import BINDINGS, CORE_BINDINGS, cpus_of, gpus, misplaced, said, seat
from cpdhpc.lab.cli import main
from cpdhpc.lab.schedulers import SCHEDULERS
from cpdhpc.lab.schedulers.launchers import LOCAL_RANKS, OWN_GPU, Counts, Launcher
from cpdhpc.lab.study.cases import batches, expand, load_study
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.site import Site, arrays, launch
from cpdhpc.lab.study.submit import scripts
from cpdhpc.lab.study_data.study_file import load_study_file, read_result

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


NO_GPU: dict[str, str] = {}
A, B = {"aa": "0000:01:00.0"}, {"bb": "0000:02:00.0"}
SLICES = {"a1": "0000:01:00.0"}, {"a2": "0000:01:00.0"}  # instances of MIG, of one GPU
SEEN = [  # GPUs of each rank, what is wrong
    ([A, B], ""),
    (SLICES, ""),
    ([A], ""),
    ([A, A], "GPUs 0000:01:00.0 | 0000:01:00.0"),
    ([A | B, A | B], "GPUs 0000:01:00.0,0000:02:00.0 | 0000:01:00.0,0000:02:00.0"),
    ([A, NO_GPU], "GPUs 0000:01:00.0 | none"),
]


@every(("seen", "wrong"), SEEN)
def test_ranks_without_a_gpu_of_their_own_are_found(
    seen: Sequence[dict[str, str]], wrong: str
) -> None:
    """On a node; the GPU of another node is another one, whatever its address is."""
    nodes = [node(*[ALL] * len(seen), host=host) for host in ("n1", "n2")]
    seats = [each | {"gpu": own} for each, own in zip(nodes[0], seen, strict=True)]
    expected = f"n1: bind is gpu, and ranks see {wrong}" if wrong else ""
    assert misplaced(seats, "gpu", "") == expected
    seats += [
        each | {"gpu": {f"{uuid}2": address for uuid, address in own.items()}}
        for each, own in zip(nodes[1], seen, strict=True)
    ]
    assert misplaced(seats, "gpu", "") == expected
    assert said(seats).count("GPUs") == 1


def test_where_ranks_are_is_said_in_words() -> None:
    two = [*node([0], [4]), *node([0], [4], host="n2")]
    assert said(two) == ("ranks may use, of each host, cores 0 | 4; sockets 0 | 1; numas 0 | 2")
    own = seat()
    assert own["cpus"] == sorted(os.sched_getaffinity(0)) and own["all"]["core"] >= 1
    assert [cpus_of(text) for text in ("0-2,5", "3", "")] == [[0, 1, 2, 5], [3], []]


COUNTS = Counts("4", "2", "2")
WAYS = [(name, each) for name, of in SCHEDULERS.items() for each in of.LAUNCHERS]
ALL_BINDINGS = {*CORE_BINDINGS}
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

ONE_GPU = {  # what has an option for it
    **dict.fromkeys(
        ("srun-pmix", "srun-pmi2", "srun-cray"), "--gpus-per-node=2 --gpu-bind=per_task:1"
    ),
    "jsrun": "-g 1",
    "flux-run": "--gpus-per-task=1 -o gpu-affinity=per-task",
}
NO_VARIABLE = f"{LOCAL_RANKS[-1]}: bind is gpu, and no variable"
CHOSEN = [  # variables of a launcher, and of a scheduler; what the program sees
    ({LOCAL_RANKS[0]: "1"}, None, "1"),
    ({LOCAL_RANKS[1]: "0"}, "2,3", "2"),
    ({LOCAL_RANKS[2]: "1"}, "GPU-a b,GPU-c", "GPU-c"),
    ({LOCAL_RANKS[0]: "1", LOCAL_RANKS[2]: "0"}, "2,3", "3"),
    ({LOCAL_RANKS[0]: "1"}, "3", ""),  # there are fewer than ranks
    ({LOCAL_RANKS[0]: "0"}, "", ""),
    ({}, "0,1", None),
]


@every(("of_launcher", "visible", "sees"), CHOSEN)
def test_a_rank_is_started_with_one_gpu(
    of_launcher: dict[str, str], visible: str | None, sees: str | None
) -> None:
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = ran(
        [*OWN_GPU, "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES|$*"', "sh", "a b", "$c"],
        env=of_launcher | given | {"PATH": os.environ["PATH"]},
    )
    if sees is None:
        assert done.returncode and NO_VARIABLE in done.stderr
    else:
        assert done.stdout == f"{sees}|a b $c\n" and not done.stderr


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
    flags = ("--flag", "a b")
    words = shlex.split(launch(way, COUNTS, flags=flags, has_gpus=True, seats=("gpu", "")))
    options = shlex.split(ONE_GPU.get(launcher, ""))
    tail = [*options, *flags] if options else [*flags, *OWN_GPU]
    assert words[-len(tail) :] == tail and words.count("-g") <= 1
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
            shown = ran(["bash", "-c", f"echo {text}"], env=many, check=True).stdout.strip()
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


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA driver of two GPUs, as far as it says which ones a process sees."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(two_gpus_in(tmp_path)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


PROGRAM = (
    'kind = "command"\n[sweep]\nranks = 2\nppn = 2\nbind = "gpu"\n[command]\nargv = ["true"]\n'
    "[measure]\nwarmup = 0\nblock = 1\nmin_repeats = 1\nmax_repeats = 1\n"
)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_sees_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of studies of calls and of programs; with fewer GPUs, or none, the cases fail."""
    program = tmp_path / "program.toml"
    program.write_text(PROGRAM)
    sweep = {"ranks": [2], "algorithm": ["ring"], "bind": ["gpu"]}
    for name, path in (("calls", study_file(tmp_path, sweep=sweep)), ("program", program)):
        out = tmp_path / name
        assert main(["study", "run", str(path), "--out", str(out)]) == 0
        file = load_study_file(out / "study.h5")
        placements = {each["placement"] for each in file.environments}
        assert all("GPUs 0000:a0:00.0 | 0000:a1:00.0" in text for text in placements)
        for visible, seen in (("1", "0000:a1:00.0 | none"), ("", "none | none")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            capsys.readouterr()
            assert main(["study", "run", str(path), "--out", str(out) + (visible or "no")]) == 1
            assert f"bind is gpu, and ranks see GPUs {seen}" in capsys.readouterr().out
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("two_gpus")
def test_a_job_script_gives_each_rank_a_gpu_of_its_own(tmp_path: Path) -> None:
    """By the line of sh, of those GPUs that the scheduler shows, in their order."""
    program = tmp_path / "program.toml"
    program.write_text(
        PROGRAM.replace('["true"]', '["sh", "-c", "echo gpu $CUDA_VISIBLE_DEVICES"]')
    )
    study, folder = load_study(program), Folder(tmp_path / "out")
    site = Site(
        python=sys.executable, gpus_per_node=2, mpi_flags=("--oversubscribe", "--bind-to", "none")
    )
    folder.prepare(study)
    todo = arrays(batches(study, expand(study).cases), site)
    text = scripts(study, folder, site, todo)[folder.scripts / "1x2-gpu-gpu.sbatch"]
    assert "#SBATCH --gpus-per-node=2\n" in text
    job = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "7"}
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    own = {"SLURM_JOB_NAME": "x", "CUDA_VISIBLE_DEVICES": "1,0"} | job | root
    done = ran(
        ["bash", "-c", text],
        env=environment() | own | {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = expand(study).cases
    result = read_result(folder.case_file(case), case)
    assert result.environment["placement"].endswith("GPUs 0000:a1:00.0 | 0000:a0:00.0")
    printed = (folder.work(case) / "output.txt").read_text().split("\n")
    assert sorted(filter(None, printed)) == ["gpu 0", "gpu 1"]


def test_without_a_driver_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", none)
    assert gpus() == {} and seat("gpu")["gpu"] == {} and "gpu" not in seat("core")
    assert {*BINDINGS} - {*CORE_BINDINGS} == {"gpu"}
