"""A cluster by the answers of Slurm: partitions, nodes, limits, ways to start ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .base import SchedulerError
from .slurm import ask

UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A")


@dataclass(frozen=True)
class Nodes:
    """Identical nodes of a partition. cores: of a node, not counting further threads of a core."""

    count: int
    cores: int
    threads: int
    memory_mib: int
    gpus: int


@dataclass(frozen=True)
class Partition:
    """A partition. nodes: by sort, the most numerous sort first; None: no limit."""

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
    """Return the partitions that this user sees. Raises SchedulerError if Slurm does not answer."""
    sorts: dict[str, list[Nodes]] = {}
    for line in ask(["sinfo", "--noheader", "--format=%R|%D|%z|%m|%G"]).splitlines():
        name, count, shape, memory, gres = line.split("|")
        sockets, cores, threads = (int(number.rstrip("+")) for number in shape.split(":"))
        nodes = Nodes(int(count), sockets * cores, threads, int(memory.rstrip("+")), gpus_of(gres))
        sorts.setdefault(name.strip(), []).append(nodes)
    found = []
    for line in ask(["scontrol", "show", "partition", "--oneliner"]).splitlines():
        keys = dict(re.findall(r"(\w+)=(\S+)", line))
        name = keys.get("PartitionName", "")
        if name not in sorts:
            continue
        most = keys.get("MaxNodes", "UNLIMITED")
        found.append(
            Partition(
                name,
                keys.get("Default") == "YES",
                keys.get("State", "UP") == "UP",
                tuple(sorted(sorts[name], key=lambda each: -each.count)),
                int(most) if most.isdecimal() else None,
                minutes(keys.get("MaxTime", "UNLIMITED")),
            )
        )
    return found


def gpus_of(gres: str) -> int:
    """Return the number of GPUs in "gpu:a100:4(S:0-1),nvme:1", or "gpu:4"."""
    parts = re.sub(r"\([^)]*\)", "", gres).split(",")
    words = [part.split(":") for part in parts if part.partition(":")[0] == "gpu"]
    return sum(int(each[-1]) if each[-1].isdecimal() else 1 for each in words)


def minutes(text: str) -> int | None:
    """Return the minutes in Slurm's [DAYS-]HOURS:MINUTES:SECONDS; None for no limit."""
    if text.upper() in UNLIMITED:
        return None
    days, _, clock = text.rpartition("-")
    hours, minute, _ = (int(each) for each in clock.split(":"))
    return (int(days or 0) * 24 + hours) * 60 + minute


def settings() -> dict[str, str]:
    """Return the configuration, by name. Raises SchedulerError if Slurm does not answer."""
    lines = ask(["scontrol", "show", "config"]).splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def mpi_plugins() -> list[str]:
    """Return the values that srun --mpi may have, [] if srun does not answer."""
    try:
        text = ask(["srun", "--mpi=list"])
    except SchedulerError:
        return []
    return [word for word in re.findall(r"[\w-]+", text) if word not in ("MPI", "types", "are")]


def accounts(user: str) -> list[str]:
    """Return the accounts of a user, [] if there is no accounting."""
    words = ["show", "associations", f"user={user}", "format=account"]
    try:
        text = ask(["sacctmgr", "--noheader", "--parsable2", *words])
    except SchedulerError:
        return []
    return list(dict.fromkeys(filter(None, map(str.strip, text.splitlines()))))
