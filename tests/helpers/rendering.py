"""Job scripts as golden files hold them; `python tests/helpers/rendering.py` writes them anew.

With a folder as its argument it writes every script there, whole.
"""

import sys
from difflib import SequenceMatcher
from pathlib import Path

from cpdhpc.config import validate
from cpdhpc.lab.kinds.command_job import ProgramCommand
from cpdhpc.lab.schedulers import DEFAULT, SCHEDULERS
from cpdhpc.lab.study.cases import Batch, batches, expand
from cpdhpc.lab.study.site import Site, array_script, arrays, collect_script, load_site, scripts
from cpdhpc.lab.study.spec import Study

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "scripts.diff"
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


def rendered() -> dict[str, str]:
    """Text by name: arrays for each launcher, and the sites' scripts.

    Of each launcher one with CPUs, one with GPUs, and one of a study of programs; of some also one
    with a GPU for each rank.

    A site with GPUs has the array of the study on GPUs.
    """
    found: dict[str, str] = {}
    for name, scheduler in SCHEDULERS.items():
        to, suffix = f"{name}/", scheduler.SUFFIX
        for launcher in scheduler.LAUNCHERS:
            for kind, gpus in (("cpu", 0), ("gpu", 4)):
                cores = 4 if gpus else 1
                keys = {"scheduler": name, "launcher": launcher}
                site = Site(**keys, gpus_per_node=gpus, cpus_per_rank=cores)
                study = GPU_STUDY if gpus else STUDY
                found[f"{to}array-{launcher}-{kind}{suffix}"] = array_of(site, study=study)
            site = Site(scheduler=name, launcher=launcher)
            found[f"{to}programs-{launcher}{suffix}"] = array_of(site, study=COMMAND_STUDY)
            if launcher in OWN_GPU_WAYS[name]:
                site = Site(scheduler=name, launcher=launcher, gpus_per_node=4)
                for title, study in (("array", STUDY), ("programs", COMMAND_STUDY)):
                    own = study.model_copy(update={"sweep": {**study.sweep, **OWN_GPU}})
                    found[f"{to}{title}-{launcher}-own-gpu{suffix}"] = array_of(site, study=own)
        if name != DEFAULT:
            site = full_site(name)
            found[f"{to}collect{suffix}"] = collect_script(site, "demo", FOLDER)
            found |= {to + file: text for file, text in scripts(site).items()}
    for path in sorted((ROOT / "slurm" / "sites").glob("*.toml")):
        site = load_site(path)
        study = GPU_STUDY if site.gpus_per_node else STUDY
        title = f"site-{site.name}.sbatch"
        found[f"{DEFAULT}/array-{title}"] = array_of(site, study=study)
        found[f"{DEFAULT}/collect-{title}"] = collect_script(site, "demo", FOLDER)
    return found


def shipped() -> dict[Path, str]:
    """Text by path: the scripts of the folder slurm, which are golden files as they are."""
    return {ROOT / "slurm" / name: text for name, text in scripts(Site()).items()}


def changes(before: list[str], after: list[str]) -> list[str]:
    """What makes one list of lines the other; @@ has the line that stands before a change."""
    found = []
    for what, i, end, j, last in SequenceMatcher(None, before, after, False).get_opcodes():
        if what != "equal":
            found += [f"@@ {before[i - 1]}".rstrip() if i else "@@"]
            found += [f"-{line}" for line in before[i:end]]
            found += [f"+{line}" for line in after[j:last]]
    return found


def differences() -> dict[str, str]:
    """Of each script its changes from the one before that is most like it, of the first all."""
    texts: dict[str, list[str]] = {"nothing": []}
    texts |= {k: v.split("\n") for k, v in rendered().items()}
    found = {}
    for n, name in list(enumerate(texts))[1:]:
        others = [(each, changes(texts[each], texts[name])) for each in list(texts)[:n]]
        other, lines = min(others, key=lambda pair: len(pair[1]))
        found[name] = "\n".join((f"=== {name}: from {other}", *lines, ""))
    return found


def main() -> None:
    """Write the golden files, or all scripts."""
    for folder in map(Path, sys.argv[1:]):
        for name, text in rendered().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return
    for path, text in {GOLDEN: "".join(differences().values()), **shipped()}.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
