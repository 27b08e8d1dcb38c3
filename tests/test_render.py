"""Slurm scripts: as the golden files have them, sound as bash, with the options they need."""

import subprocess
from pathlib import Path

from every import every
from rendering import (
    FOLDER,
    GOLDEN,
    GPU_STUDY,
    ROOT,
    STUDY,
    array_of,
    differences,
    rendered,
    shipped,
    some_batches,
)
from training import ran

from cpdhpc.lab.kinds import KINDS
from cpdhpc.lab.schedulers import SCHEDULERS
from cpdhpc.lab.schedulers.base import Scheduler
from cpdhpc.lab.schedulers.launchers import Counts
from cpdhpc.lab.schedulers.slurm import LAUNCHERS
from cpdhpc.lab.study.cases import Batch
from cpdhpc.lab.study.site import (
    PROGRAMS,
    Site,
    array_script,
    arrays,
    collect_script,
    launch,
    load_site,
    minutes,
    ranges,
    scripts,
)
from cpdhpc.lab.study.spec import Study

SHIPPED = shipped()
TEXTS = rendered() | {path.name: text for path, text in SHIPPED.items()}
COUNTS = Counts("4", "2", "2")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def test_scripts_are_the_golden_ones() -> None:
    hint = "python tests/helpers/rendering.py, and look"
    assert {path: path.read_text() for path in (ROOT / "slurm").glob("*.sbatch")} == SHIPPED, hint
    assert GOLDEN.read_text() == "".join(differences().values()), hint


@every("name", SCHEDULERS)
def test_a_scheduler_has_what_the_rest_asks_for(name: str) -> None:
    """And a template for each script that is made in its words."""
    of = SCHEDULERS[name]
    asked = {*Scheduler.__annotations__, *vars(Scheduler)}
    assert all(hasattr(of, each) for each in asked if not each.startswith("_"))
    site = Site(scheduler=name)
    assert site.launcher in of.LAUNCHERS
    assert {*scripts(site)} == {f"{program}{of.SUFFIX}" for program in PROGRAMS}
    assert "-m cpdhpc batch results/demo" in array_of(site)
    assert "-m cpdhpc study collect results/demo" in collect_script(site, "demo", FOLDER)


@every("name", TEXTS)
def test_scripts_are_sound(name: str) -> None:
    text = TEXTS[name]
    checked = ran(["bash", "-n"], input=text)
    assert checked.returncode == 0 and not checked.stderr
    head, _, body = text.partition("\n\n")
    assert all(line.startswith("#") for line in head.splitlines()), "options end at a command"
    assert not any(word in body for word in ("#SBATCH", "#PBS", "#BSUB", "# flux:"))
    assert "PROCID" not in text and "None" not in text
    assert "{{" not in text.replace("{{id.dec}}", ""), "Flux fills that in"


@every("name", [name for name in TEXTS if name.endswith(".sbatch")])
def test_scripts_ask_for_ranks_on_each_node(name: str) -> None:
    text = TEXTS[name]
    given = directives(text)
    assert len({line.partition("=")[0] for line in given}) == len(given), "an option twice"
    assert any(line.startswith("--ntasks-per-node=") for line in given)
    assert not [line for line in given if line.startswith("--ntasks=")]
    assert text.partition("\n\n")[2].startswith("unset SLURM_EXPORT_ENV")


@every("launcher", LAUNCHERS)
@every("study", [STUDY, GPU_STUDY])
def test_options_of_a_launcher(launcher: str, study: Study) -> None:
    """GPUs are asked for where cases use them, whatever the site has."""
    site = Site(launcher=launcher, gpus_per_node=4)
    text = array_of(site, study=study)
    given = directives(text)
    to_the_script = not launcher.startswith("srun")
    assert ("--signal=B:USR1@120" in given) == to_the_script
    assert ("--signal=USR1@120" in given) == (not to_the_script)
    assert [each for each in given if "gpu" in each] == (
        ["--job-name=demo-2x2-gpu", "--gpus-per-node=2"] if study is GPU_STUDY else []
    )
    assert (" --distribution=block:block --cpu-bind=cores " in text) == (not to_the_script)
    assert {"--requeue", "--open-mode=append", "--array=2-3%8", "--nodes=2"} <= set(given)
    assert f"{launch(LAUNCHERS[launcher], COUNTS, near_gpus=True)} python -m cpdhpc batch" in text


def words(command: str, **environment: str) -> list[str]:
    """Return the words of a command as bash makes them, in an environment."""
    show = ["bash", "-uc", f"printf '%s\\n' {command}"]
    told = subprocess.run(show, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return told.stdout.splitlines()


def test_cores_a_rank_are_those_that_the_job_was_given() -> None:
    """By the script's --cpus-per-task or by sbatch's, which wins; none: as the launcher does."""
    many = {"SLURM_CPUS_PER_TASK": "16"}
    counts = Counts("8", "4", "2")
    mpirun = launch(LAUNCHERS["mpirun"], counts, flags=["--mca", "a b"])
    mpiexec, srun = (launch(LAUNCHERS[name], counts) for name in ("mpiexec", "srun-pmix"))
    assert words(mpirun, **many) == [
        "mpirun",
        "-n",
        "8",
        "--map-by",
        "ppr:4:node:PE=16",
        "--mca",
        "a b",
    ]
    assert words(mpirun)[4] == "ppr:4:node"
    assert words(mpiexec, **many) == ["mpiexec", "-n", "8", "-ppn", "4", "-bind-to", "core:16"]
    assert words(mpiexec) == ["mpiexec", "-n", "8", "-ppn", "4"]
    assert "--cpus-per-task=16" in words(srun, **many) and "--cpus-per-task=1" in words(srun)
    for site in (Site(), Site(cpus_per_rank=16)):
        assert f"{launch(LAUNCHERS['mpirun'], COUNTS)} python" in array_of(site)


def test_names_that_need_quotes() -> None:
    [array, *_] = arrays(some_batches(), Site())
    text = array_script(array, Site(), STUDY, Path("results/a b"))
    assert "--output='results/a b/logs/%x-%A_%a.log'" in text
    assert "cpdhpc batch 'results/a b' " in text
    assert "study collect 'results/a b'" in collect_script(Site(), "demo", Path("results/a b"))


def test_all_elements_at_a_time_without_a_throttle() -> None:
    run = STUDY.run.model_copy(update={"throttle": 0})
    text = array_of(Site(), study=STUDY.model_copy(update={"run": run}))
    assert "--array=2-3" in directives(text)


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([5]) == "5"
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3,7,9-10"


def batch(number: int, nodes: int, time_s: float = 10.0) -> Batch:
    return Batch(number, nodes, 2, (), time_s, time_s)


def test_arrays_by_shape_and_length() -> None:
    made = [batch(number, 1 + number % 2) for number in range(12)]
    found = arrays(made, Site(max_array=8))
    told = [(each.name, each.indices, [b.number for b in each.batches]) for each in found]
    assert told == [
        ("1x2", "0,2,4,6", [0, 2, 4, 6]),
        ("1x2-from8", "0,2", [8, 10]),
        ("2x2", "1,3,5,7", [1, 3, 5, 7]),
        ("2x2-from8", "1,3", [9, 11]),
    ]
    text = array_script(found[1], Site(), STUDY, Path("f"))
    assert "batch f $((8 + SLURM_ARRAY_TASK_ID)) --nodes 1" in text


def test_minutes() -> None:
    # 1.5 times the estimate, a minute to start, the two minutes before the signal.
    assert minutes(600.0, Site()) == 15 + 1 + 2
    assert minutes(1.0, Site()) == 4
    assert minutes(6000.0, Site(max_time_min=60)) == 60


def test_an_array_lasts_as_long_as_its_longest_batch() -> None:
    [array] = arrays([batch(0, 1, 10.0), batch(1, 1, 1200.0)], Site())
    assert "--time=33" in directives(array_script(array, Site(), STUDY, Path("f")))


def test_cases_on_gpus_have_jobs_of_their_own() -> None:
    both = STUDY.model_copy(update={"sweep": {**STUDY.sweep, "device": ["cpu", "gpu"]}})
    shapes = [each.shape for each in arrays(some_batches(both), Site())]
    assert shapes == [
        "1 x 2 ranks", "1 x 2 ranks, 2 GPUs a node", "2 x 2 ranks", "2 x 2 ranks, 2 GPUs a node"
    ]  # fmt: skip
    ids = [case.id for batch in some_batches(both) for case in batch.cases if not batch.has_gpus]
    assert ids == [case.id for batch in some_batches() for case in batch.cases], "as ever"
    nested = both.model_copy(update={"run": both.run.model_copy(update={"bundle": "nested"})})
    host, gpu = some_batches(nested)  # a job each, so that a site without GPUs runs the first
    assert (host.has_gpus, gpu.has_gpus) == (False, True)
    assert {case.id for case in host.cases} == set(ids)
    assert {case.factors["device"] for case in gpu.cases} == {"gpu"}


@every(
    ("job", "factor", "device"),
    [
        ({}, {}, "cpu"),
        ({"device": "gpu"}, {}, "gpu"),
        ({"device": "gpu"}, {"train.device": "cpu"}, "cpu"),
        ({}, {"train.device": "gpu"}, "gpu"),
    ],
)
def test_where_a_training_computes(
    job: dict[str, str], factor: dict[str, str], device: str
) -> None:
    assert KINDS["train"].device({"train": job}, factor) == device


def test_standalone_scripts_of_a_site() -> None:
    site = load_site(ROOT / "slurm" / "sites" / "openmpi_gpu.toml")
    texts = scripts(site)
    assert list(texts) == ["train.sbatch", "allreduce_scaling.sbatch", "verify.sbatch"]
    for text in texts.values():
        assert "module load openmpi/5.0" in text
        assert not [each for each in directives(text) if "gpus" in each], "the job file decides"


def test_the_study_of_the_golden_files() -> None:
    assert [each.name for each in arrays(some_batches(), Site())] == ["1x2", "2x2"]
    assert STUDY.run.throttle == 8
