"""Job scripts as golden files hold them; `python tests/helpers/rendering.py` writes them anew."""

from pathlib import Path

from cpdhpc.config import validate
from cpdhpc.lab.kinds.command_job import ProgramCommand
from cpdhpc.lab.schedulers import DEFAULT, SCHEDULERS
from cpdhpc.lab.study.cases import Batch, batches, expand
from cpdhpc.lab.study.site import Site, array_script, arrays, collect_script, load_site, scripts
from cpdhpc.lab.study.spec import Study

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
FOLDER = Path("results/demo")
STUDY = validate(
    Study,
    {
        "name": "demo",
        "kind": "allreduce",
        "sweep": {"nodes": [1, 2], "ppn": [2], "size_bytes": [65536], "wire": ["raw", "e4m3"]},
        "run": {"bundle": "case", "throttle": 8, "case_time_s": 100.0},
    },
    "demo.toml",
)

COMMAND_STUDY = validate(
    Study,
    {
        "name": "demo",
        "kind": "command",
        "sweep": {"nodes": [1, 2], "ppn": [2], "n": [1, 2]},
        "job": {"command": ProgramCommand(argv=("solve", "{n}"), directory="/home").model_dump()},
        "run": {"bundle": "case", "throttle": 8},
    },
    "demo.toml",
)
GPU_STUDY = STUDY.model_copy(update={"sweep": {**STUDY.sweep, "device": ["gpu"]}})
OWN_GPU = {"bind": ["gpu"]}  # of launchers with an option for it, and of one without
OWN_GPU_WAYS = {"slurm": ["srun-pmix", "mpirun"], "pbs": ["pals"], "lsf": ["jsrun"]} | {
    "flux": ["flux-run"]
}


def some_batches(study: Study = STUDY) -> list[Batch]:
    """The batches of the study: two on 1 x 2 ranks, two on 2 x 2."""
    return batches(study, expand(study).cases)


def array_of(site: Site, nodes: int = 2, study: Study = STUDY) -> str:
    """The script of the array on so many nodes."""
    array = next(each for each in arrays(some_batches(study), site) if each.nodes == nodes)
    return array_script(array, site, study, FOLDER)


def full_site(scheduler: str) -> Site:
    """A site of a scheduler, with all keys that it knows."""
    keys = {key: f"its-{key}" for key in SCHEDULERS[scheduler].KEYS}
    return Site(scheduler=scheduler, directives=("--mine",), modules=("mpi",), **keys)


def golden() -> dict[Path, str]:
    """Text by path: arrays for each launcher, the sites' scripts and slurm/'s own.

    Of each launcher one with CPUs, one with GPUs, and one of a study of programs; of some also one
    with a GPU for each rank.

    A site with GPUs has the array of the study on GPUs.
    """
    found: dict[Path, str] = {}
    for name, scheduler in SCHEDULERS.items():
        to, suffix = GOLDEN / name, scheduler.SUFFIX
        for launcher in scheduler.LAUNCHERS:
            for kind, gpus in (("cpu", 0), ("gpu", 4)):
                cores = 4 if gpus else 1
                keys = {"scheduler": name, "launcher": launcher}
                site = Site(**keys, gpus_per_node=gpus, cpus_per_rank=cores)
                study = GPU_STUDY if gpus else STUDY
                found[to / f"array-{launcher}-{kind}{suffix}"] = array_of(site, study=study)
            site = Site(scheduler=name, launcher=launcher)
            found[to / f"programs-{launcher}{suffix}"] = array_of(site, study=COMMAND_STUDY)
            if launcher in OWN_GPU_WAYS[name]:
                site = Site(scheduler=name, launcher=launcher, gpus_per_node=4)
                for title, study in (("array", STUDY), ("programs", COMMAND_STUDY)):
                    own = study.model_copy(update={"sweep": {**study.sweep, **OWN_GPU}})
                    path = to / f"{title}-{launcher}-own-gpu{suffix}"
                    found[path] = array_of(site, study=own)
        if name != DEFAULT:
            site = full_site(name)
            found[to / f"collect{suffix}"] = collect_script(site, "demo", FOLDER)
            found |= {to / file: text for file, text in scripts(site).items()}
    for path in sorted((ROOT / "slurm" / "sites").glob("*.toml")):
        site = load_site(path)
        study = GPU_STUDY if site.gpus_per_node else STUDY
        found[GOLDEN / DEFAULT / f"array-site-{site.name}.sbatch"] = array_of(site, study=study)
        found[GOLDEN / DEFAULT / f"collect-site-{site.name}.sbatch"] = collect_script(
            site, "demo", FOLDER
        )
    return found | {ROOT / "slurm" / name: text for name, text in scripts(Site()).items()}


if __name__ == "__main__":
    for path, text in golden().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
