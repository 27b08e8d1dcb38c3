"""study render, submit, status, resume, freeze and scripts, as the command line has them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rendering import GPU_STUDY, STUDY, array_of, some_batches
from stand_ins import Slurm
from studies import some_result
from training import ROOT, environment, ran

from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import study as commands
from cpdhpc.lab.kinds import KINDS
from cpdhpc.lab.study.folder import Folder, recorded
from cpdhpc.lab.study.site import load_site
from cpdhpc.lab.study_data.study_file import write_result

LIGHT = {  # parts of the package; lab/study is study
    "_cpu", "_version", "binding", "claim", "cli", "collectives", "commands", "config",
    "errors", "formats", "kinds", "lab", "lazy", "methods", "ops", "options", "ordinary",
    "partition", "randomness", "report", "schedulers", "settings", "signals", "store", "study",
    "study_data", "table_formats", "whole_files", "world",
}  # fmt: skip
JOBS = {"autoencoder", "train"}  # kinds whose job's own models are asked, without torch and MPI
INPUTS = sorted((ROOT / "inputs").glob("study_*.toml"))
SITE = str(ROOT / "slurm" / "sites" / "openmpi_gpu.toml")


@pytest.fixture
def study(tmp_path: Path) -> str:
    """The file of the study of the golden scripts."""
    path = tmp_path / "demo.toml"
    path.write_text(STUDY.toml())
    return str(path)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_render_prints_what_submit_hands_over(
    fake_slurm: Slurm, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = call(capsys, "study", "render", study, "--site", SITE)
    assert status == 0 and not Path("results").exists(), "render writes nothing"
    assert call(capsys, "study", "submit", study, "--site", SITE)[0] == 0
    names = ("1x2", "2x2", "collect")
    parts = [Path(f"results/demo/scripts/{name}.sbatch").read_text() for name in names]
    headed = [f"==> {name} <==\n{part}" for name, part in zip(names, parts, strict=True)]
    assert text == "\n".join(headed)
    for name, part in zip(names, parts, strict=True):
        one = call(capsys, "study", "render", study, "--site", SITE, "--script", name)
        assert one == (0, part, "")
    assert parts[1] == array_of(load_site(Path(SITE)))


def test_render_says_what_it_cannot(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = call(capsys, "study", "render", study, "--script", "2x3")
    assert status == 2 and "--script 2x3: did you mean 2x2" in error
    small = Path(study).with_name("small.toml")
    small.write_text("cores_per_node = 1")
    status, _, error = call(capsys, "study", "render", study, "--site", str(small))
    assert status == 2 and "nothing can be submitted: 2 ranks per node" in error


def test_plan_says_what_a_site_lacks(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = Path(study).with_name("small.toml")
    small.write_text("nodes = 1")
    status, text, _ = call(capsys, "study", "plan", study, "--site", str(small))
    assert status == 0 and "2 cases in 2 batch(es)" in text
    assert "impossible, 2 case(s): 2 nodes: site small gives a job 1 at most" in text


def test_plan_says_what_is_asked_of_gpus(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(study).write_text(GPU_STUDY.toml())
    _, text, _ = call(capsys, "study", "plan", study)
    assert "GPUs: 2 batch(es) ask for 4 on 2 nodes, 2 a node\n" in text
    site = Path(study).with_name("plain.toml")
    site.write_text("")
    _, text, _ = call(capsys, "study", "plan", study, "--site", str(site))
    assert "impossible, 4 case(s): device gpu: site plain has no GPUs (gpus_per_node = 0)" in text


def test_resume_submits_with_the_site_of_the_last_time(
    fake_slurm: Slurm, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "study", "submit", study, "--site", SITE)
    folder = Folder(Path("results/demo"))
    first = some_batches()[0].cases[0]
    write_result(folder.case_file(first), first, some_result())
    fake_slurm.calls()
    status, text, _ = call(capsys, "study", "resume", "results/demo")
    assert status == 0 and "job 13: 1 x 2 ranks, elements 1" in text
    assert fake_slurm.calls()[-1].startswith("--parsable --dependency=afterany:13:14 ")
    assert "module load openmpi/5.0" in Path("results/demo/scripts/1x2.sbatch").read_text()
    assert len(recorded(folder)) == 6


def test_resume_submits_where_no_job_has_gone_in_yet(
    fake_slurm: Slurm, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not measure on the login node. Status 1: there is more to submit."""
    Path("full").write_text("sbatch: error: AssocMaxSubmitJobLimit\n")
    Path("room").write_text("0")
    for action in ("submit", "resume"):
        status, text, _ = call(capsys, "study", action, study)
        assert status == 1 and "not submitted: 4 batch(es), 4 case(s)" in text, action
    Path("room").write_text("5")
    status, text, _ = call(capsys, "study", "resume", study)
    assert status == 0 and "job 12: collects" in text


def test_plan_refuses_what_slurm_takes_otherwise(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("plan", "render", "run", "freeze", "submit"):
        for name, why in (("o%j", "has %"), ("-x", "begins with -"), ("o" * 300, "has a name of")):
            status, _, error = call(capsys, "study", action, study, f"--out={name}")
            assert status == 2 and why in error and error.count("\n") == 1, (action, name)
        status, _, error = call(capsys, "study", action, study, "--set", f"name={'n' * 101}")
        assert status == 2 and "name" in error, action


def test_status_lists_what_slurm_says(
    fake_slurm: Slurm, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "study", "submit", study)
    fake_slurm.knows(10, "demo-1x2", {0: ("FAILED", 512, "NonZeroExitCode"), 1: ("RUNNING", 0, "")})
    fake_slurm.knows(11, "demo-2x2", {2: ("PENDING", 0, "Priority"), 3: ("PENDING", 0, "Priority")})
    Path("results/demo/logs/demo-1x2-10_0.log").write_text("what went wrong\n")
    status, text, _ = call(capsys, "study", "status", study)
    assert status == 0
    assert "job 10_0 FAILED, exit code 2" in text and "    | what went wrong" in text
    assert text.endswith("demo: 4 cases: 1 running, 2 pending, 1 failed\n")


def test_status_for_programs_and_without_slurm(
    fake_slurm: Slurm, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "study", "freeze", study)
    _, text, _ = call(capsys, "study", "status", study, "--json")
    assert json.loads(text)["slurm"] == "nothing submitted"
    call(capsys, "study", "submit", study)
    folder, first = Folder(Path("results/demo")), some_batches()[0].cases[0]
    write_result(folder.case_file(first), first, some_result())
    squeue = fake_slurm.directory / "bin" / "squeue"
    working = squeue.read_text()
    squeue.write_text("#!/bin/bash\necho no route to host >&2\nexit 1\n")
    status, text, _ = call(capsys, "study", "status", study, "--summary", "--watch", "0.01")
    assert status == 0 and text.splitlines() == [
        "nodes x ppn  cases  finished  missing",
        "-----------  -----  --------  -------",
        "1 x 2            2         1        1",
        "2 x 2            2         0        2",
        "Slurm: squeue does not answer: no route to host: the states are those of the files",
        "demo: 4 cases: 1 finished, 3 missing",
    ]
    squeue.write_text(working)
    fake_slurm.knows(11, "demo-2x2", {2: ("RUNNING", 0, "None"), 3: ("PENDING", 0, "None")})
    status, text, _ = call(capsys, "study", "status", study, "--json")
    told = json.loads(text)
    assert status == 0 and told["slurm"] == "answers" and told["folder"] == "results/demo"
    assert told["states"] | {"finished": 1, "running": 1, "pending": 1} == told["states"]
    assert [each["state"] for each in told["cases"]] == ["finished", "failed", "running", "pending"]
    status, text, _ = call(capsys, "study", "status", study, "--json", "--summary")
    assert json.loads(text)["shapes"]["2 x 2"] == {"running": 1, "pending": 1}


def test_watch_looks_until_nothing_is_under_way(
    fake_slurm: Slurm,
    study: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call(capsys, "study", "submit", study)
    fake_slurm.knows(11, "demo-2x2", {2: ("RUNNING", 0, "None"), 3: ("PENDING", 0, "None")})
    waits: list[float] = []

    def ends(seconds: float) -> None:
        waits.append(seconds)
        fake_slurm.knows(11, "demo-2x2", {2: ("FAILED", 256, ""), 3: ("FAILED", 256, "")})

    monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=ends))
    status, text, _ = call(capsys, "study", "status", study, "--summary", "--watch")
    assert status == 0 and waits == [30]
    assert [line for line in text.splitlines() if line.startswith("demo:")] == [
        "demo: 4 cases: 1 running, 1 pending, 2 failed",
        "demo: 4 cases: 4 failed",
    ]

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=stop))
    fake_slurm.knows(11, "demo-2x2", {2: ("RUNNING", 0, "None")})
    assert call(capsys, "study", "status", study, "--watch")[0] == 130


def test_a_folder_for_each_setting(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    def frozen(*settings: str) -> str:
        status, path, error = call(capsys, "study", "freeze", study, "--by-hash", *settings)
        assert status == 0, error
        return path.strip()

    first = frozen()
    assert Path(first).name.startswith("demo-") and frozen() == first
    other = frozen("--set", "measure.max_repeats=60")
    assert other != first and Folder(Path(other)).study().measure.max_repeats == 60


def test_freeze_makes_a_folder_for_ones_own_script(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "mine")
    assert call(capsys, "study", "freeze", study, "--out", out) == (0, f"{out}\n", "")
    assert Folder(tmp_path / "mine").study() == STUDY
    status, _, error = call(
        capsys, "study", "freeze", study, "--out", out, "--set", "scaling=throughput"
    )
    assert status == 2 and "holds another study: scaling differs" in error


def test_scripts_are_written_for_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "er"
    status, text, _ = call(capsys, "scripts", "--out", str(out), "--site", SITE)
    assert status == 0 and text.split() == [
        str(out / "train.sbatch"),
        str(out / "allreduce_scaling.sbatch"),
        str(out / "verify.sbatch"),
    ]
    assert call(capsys, "scripts", "--out", str(out))[0] == 0
    for path in out.iterdir():
        assert path.read_text() == (ROOT / "slurm" / path.name).read_text()
    (tmp_path / "file").touch()
    status, _, error = call(capsys, "scripts", "--out", str(tmp_path / "file"))
    assert status == 2 and "file: cannot be created: File exists" in error


def test_neither_a_plan_nor_a_submission_loads_what_measures(study: str, tmp_path: Path) -> None:
    """A plan of every kind of study, in one process, where no program of Slurm is on PATH."""
    paths = {k: next(str(p) for p in INPUTS if f'kind = "{k}"' in p.read_text()) for k in KINDS}
    light = [path for kind, path in paths.items() if kind not in JOBS]
    with_job = [path for kind, path in paths.items() if kind in JOBS]
    program = (
        "import sys; from cpdhpc.lab.cli import main\n"
        f"status = max(main(['study', 'plan', path]) for path in {light!r})\n"
        "outside = {'torch', 'mpi4py', 'h5py', 'matplotlib'} & set(sys.modules)\n"
        "ours = [name[7:] for name in sys.modules if name.startswith('cpdhpc.')]\n"
        "rooms = {name.removeprefix('lab.').partition('.')[0] for name in ours}\n"
        f"assert rooms <= {LIGHT!r}, rooms\n"
        f"status = max([status, *(main(['study', 'plan', path]) for path in {with_job!r})])\n"
        "outside = {'torch', 'mpi4py', 'h5py', 'matplotlib'} & set(sys.modules)\n"
        "assert not outside and status == 0, (outside, status)\n"
        f"status = main(['study', 'submit', {study!r}, '--out', {str(tmp_path / 'o')!r}])\n"
        "assert not {'torch', 'mpi4py.MPI', 'cupy', 'matplotlib'} & set(sys.modules), 'heavy'\n"
        "sys.exit(status)"
    )
    done = ran([sys.executable, "-c", program], env=environment() | {"PATH": str(tmp_path)})
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("cpdhpc: error: sbatch is not on PATH: is this a login node")
    assert done.stderr.count("\n") == 1
