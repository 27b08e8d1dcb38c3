"""A site file made from the answers of Slurm, or from this machine."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...config import UserError, dump_toml, suggest, validate
from ..schedulers import slurm_site
from ..schedulers.base import SchedulerError
from ..schedulers.slurm_site import Partition
from .run_here import is_open_mpi
from .site import Site


def _key(key: str, value: str | int | list[str] | None, note: str = "") -> str:
    """Return the line of a key, a comment if its value is not known; note: a comment before it."""
    if value is None:
        return f"# {key}: {note}"
    line = dump_toml({key: value}).strip()
    return f"# {note}\n{line}" if note else line


def _text(about: str, lines: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return a site file. about: its first comment; lines: of keys; others: further comments."""
    head = [f"# {about}", "# docs/reference/sites.md says what each key means."]
    rest = ["", *(f"# {line}" for line in others)] if others else []
    text = "\n".join([*head, "", *lines, *rest]) + "\n"
    validate(Site, tomllib.loads(text), "site discover")
    return text


def discover(partition: str | None = None) -> str:
    """Return the text of a site file for Slurm if it answers, else for this machine.

    Keys that could not be found out are comments.
    partition: of Slurm, by default its own default
    Raises UserError for an unknown partition.
    """
    try:
        found = slurm_site.partitions()
    except SchedulerError as error:
        if partition is not None:
            raise UserError(f"--partition {partition}: {error}") from None
        return _machine(str(error))
    return _cluster(_chosen(found, partition), found, partition is not None)


def _chosen(found: Sequence[Partition], name: str | None) -> Partition:
    if not found:
        raise UserError("site discover: Slurm shows no partition to this user")
    if name is not None:
        one = next((each for each in found if each.name == name), None)
        if one is None:
            known = [each.name for each in found]
            raise UserError(f"--partition {name}: {suggest(name, known)}")
        return one
    up = [each for each in found if each.is_up] or found
    return next((each for each in up if each.is_default), up[0])


def _cluster(chosen: Partition, every: Sequence[Partition], named: bool) -> str:
    first, *others = chosen.nodes
    count = sum(each.count for each in chosen.nodes)
    most = count if chosen.max_nodes is None else min(count, chosen.max_nodes)
    sorts = (
        f"its nodes differ: these are the {first.count} of {count} of one sort; set constraint, or "
        "nodes, so that jobs get them alone"
        if others
        else ""
    )
    threads = f"{first.threads} threads a core: --hint=nomultithread in directives gives whole ones"
    try:
        settings = slurm_site.settings()
    except SchedulerError:
        settings = {}
    array = settings.get("MaxArraySize", "")
    limit = chosen.max_time_min
    longest = int(array) if array.isdecimal() else None
    lines = [
        _key("scheduler", "slurm"),
        _key("partition", chosen.name, "" if named or chosen.is_default else "the first one"),
        *_account(),
        _key("nodes", most, sorts),
        _key("cores_per_node", first.cores, threads if first.threads > 1 else ""),
        _key("gpus_per_node", first.gpus),
        _key("max_time_min", limit, "the partition has no limit of time" if limit is None else ""),
        _key("max_array", longest, "is not known" if longest is None else ""),
        *_launcher(slurm_site.mpi_plugins()),
        *_modules(),
    ]
    if settings.get("JobRequeue") == "0":
        lines.append(_key("max_requeues", 0, "JobRequeue = 0: Slurm requeues no job"))
    lists = ["partitions:", *(f"  {each}" for each in every)]
    name = settings.get("ClusterName", "")
    return _text(f"What Slurm{f' of {name}' * bool(name)} says.", lines, lists)


def _account() -> Iterator[str]:
    accounts = slurm_site.accounts(getpass.getuser())
    if len(accounts) == 1:
        yield _key("account", accounts[0])
    elif accounts:
        yield _key("account", None, f"one of {', '.join(accounts)}")
    else:
        yield _key("account", None, "not known: Slurm's accounting does not answer")
    yield _key("qos", None, "not asked for")


def _launcher(plugins: Sequence[str]) -> Iterator[str]:
    """Yield the launcher: that of the MPI on PATH, else srun with a plugin that it has."""
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name)
        if path is not None and is_open_mpi(path) == (name == "mpirun"):
            yield _key("launcher", name, f"{path}, on PATH when this was written")
            return
    for plugin in ("pmix", "pmi2"):
        if any(each.startswith(plugin) for each in plugins):
            note = f"neither mpirun nor mpiexec is on PATH, and srun has {plugin}"
            yield _key("launcher", f"srun-{plugin}", f"{note}: must be what MPI was built for")
            return
    yield _key("launcher", None, "not known: neither mpirun nor mpiexec is on PATH")


def _modules() -> Iterator[str]:
    loaded = [word for word in os.environ.get("LOADEDMODULES", "").split(":") if word]
    if loaded:
        yield _key("modules", loaded, "loaded when this was written")
    else:
        yield _key("modules", None, "none is loaded here: jobs get the environment of submit")


def _machine(why: str) -> str:
    """Return a site file for studies that run on this machine."""
    lines = [
        _key("nodes", 1),
        _key("cores_per_node", _cores()),
        _key("gpus_per_node", _gpus()),
        _key("max_time_min", None, "this machine has no limit"),
        *_launcher([]),
    ]
    about = f"What this machine says; Slurm: {' '.join(why.split()).partition(';')[0]}."
    return _text(about, lines)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    allowed = os.sched_getaffinity(0)
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(path.read_text().strip())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def _gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver lists, 0 without a driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE)) if not done.returncode else 0
