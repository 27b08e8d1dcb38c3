"""What Slurm says of a cluster: partitions, nodes, limits, ways to start ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .base import SchedulerError
from .slurm import ask

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A")


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are the same. cores: of one, without further threads of each."""

    count: int
    cores: int
    threads: int
    memory_mib: int
    gpus: int


@dataclass(frozen=True)
class Partition:
    """A partition. nodes: the sorts of its nodes, the most numerous first; None: no limit."""

    name: str
    is_default: bool
    is_up: bool
    nodes: tuple[Nodes, ...]
    max_nodes: int | None
    max_time_min: int | None

    def __str__(self) -> str:
        sorts = "; ".join(
            f"{each.count} x {each.cores} cores"
            + f" x {each.threads} threads" * (each.threads > 1)
            + f", {each.gpus} GPUs" * (each.gpus > 0)
            + f", {each.memory_mib} MiB"
            for each in self.nodes
        )
        limit = "no limit" if self.max_time_min is None else f"{self.max_time_min} min"
        return f"{self.name}: {sorts}; {limit}{'' if self.is_up else '; not up'}"


def partitions() -> list[Partition]:
    """Return the partitions that this user sees. Raises SchedulerError without an answer."""
    sorts: dict[str, list[Nodes]] = {}
    for line in ask(["sinfo", "--noheader", "--format=%R|%D|%z|%m|%G"]).splitlines():
        name, count, shape, memory, gres = line.split("|")
        sockets, cores, threads = (int(number.rstrip("+")) for number in shape.split(":"))
        nodes = Nodes(int(count), sockets * cores, threads, int(memory.rstrip("+")), gpus_of(gres))
        sorts.setdefault(name.strip(), []).append(nodes)
    found = []
    for line in ask(["scontrol", "show", "partition", "--oneliner"]).splitlines():
        said = dict(re.findall(r"(\w+)=(\S+)", line))
        name = said.get("PartitionName", "")
        if name not in sorts:
            continue
        most = said.get("MaxNodes", "UNLIMITED")
        found.append(
            Partition(
                name,
                said.get("Default") == "YES",
                said.get("State", "UP") == "UP",
                tuple(sorted(sorts[name], key=lambda each: -each.count)),
                int(most) if most.isdecimal() else None,
                minutes(said.get("MaxTime", "UNLIMITED")),
            )
        )
    return found


def gpus_of(gres: str) -> int:
    """Return the GPUs in "gpu:a100:4(S:0-1),nvme:1", or "gpu:4"."""
    parts = re.sub(r"\([^)]*\)", "", gres).split(",")
    words = [part.split(":") for part in parts if part.partition(":")[0] == "gpu"]
    return sum(int(each[-1]) if each[-1].isdecimal() else 1 for each in words)


def minutes(text: str) -> int | None:
    """Return a time as Slurm writes it, [DAYS-]HOURS:MINUTES:SECONDS; None for no limit."""
    if text.upper() in UNLIMITED:
        return None
    days, _, clock = text.rpartition("-")
    hours, minute, _ = (int(each) for each in clock.split(":"))
    return (int(days or 0) * 24 + hours) * 60 + minute


def settings() -> dict[str, str]:
    """Return the configuration, by name. Raises SchedulerError where Slurm has no answer."""
    lines = ask(["scontrol", "show", "config"]).splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def mpi_plugins() -> list[str]:
    """Return what srun --mpi can be, [] where it does not say."""
    try:
        text = ask(["srun", "--mpi=list"])
    except SchedulerError:
        return []
    return [word for word in re.findall(r"[\w-]+", text) if word not in ("MPI", "types", "are")]


def accounts(user: str) -> list[str]:
    """Return the accounts of a user, [] where there is no accounting."""
    words = ["show", "associations", f"user={user}", "format=account"]
    try:
        text = ask(["sacctmgr", "--noheader", "--parsable2", *words])
    except SchedulerError:
        return []
    return _each_once(line.strip() for line in text.splitlines())


def _each_once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(word for word in words if word))
