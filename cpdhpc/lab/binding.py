"""Where ranks sit: cores, sockets and NUMA domains that a process may use, and what was asked for.

It needs the standard library alone: a launcher starts this file on the ranks of any program.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

BINDINGS = ("none", "core", "socket", "numa")
DISTRIBUTIONS = ("block", "cyclic")
CPUS, NUMA = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
RANKS = (  # the launcher's, the scheduler's at last
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
)
Seat = Mapping[str, Any]


def cpus_of(text: str) -> list[int]:
    """Return the numbers of a list of the kernel's, as "0-3,8"."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1) if first else ()
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _places() -> dict[str, dict[int, int]]:
    """Return for each level of BINDINGS where each processor is; what is not known is 0."""
    online = cpus_of(_read(CPUS / "online")) or sorted(os.sched_getaffinity(0))
    core, package = dict[int, int](), dict[int, int]()
    for cpu in online:
        topology = CPUS / f"cpu{cpu}" / "topology"
        core[cpu] = min(cpus_of(_read(topology / "thread_siblings_list")), default=cpu)
        number = _read(topology / "physical_package_id")
        package[cpu] = int(number) if number.isdecimal() else 0
    numa = dict.fromkeys(online, 0)
    for path in NUMA.glob("node[0-9]*"):
        for cpu in cpus_of(_read(path / "cpulist")):
            numa[cpu] = int(path.name[4:])
    return {"core": core, "socket": package, "numa": numa}


def seat() -> dict[str, Any]:
    """Return where this process may run: its host, rank, processors, and units of each level.

    "core", "socket", "numa": units that it may use; "all": how many the host has
    """
    allowed = sorted(os.sched_getaffinity(0))
    places = _places()
    return {
        "host": socket.gethostname(),
        "rank": next((int(os.environ[n]) for n in RANKS if os.environ.get(n, "").isdecimal()), -1),
        "cpus": allowed,
        **{level: sorted({of.get(cpu, 0) for cpu in allowed}) for level, of in places.items()},
        "all": {level: len({*of.values()}) for level, of in places.items()},
    }


def misplaced(seats: Sequence[Seat], bind: str, distribution: str) -> str:
    """Return in what ranks are not where they were to be, "" where they are.

    bind: one of BINDINGS; distribution: one of DISTRIBUTIONS; "": whatever the launcher does
    """
    for host, own in _by_host(seats).items():
        wrong = _unbound(own, bind) or _misdealt(own, distribution)
        if wrong:
            return f"{host}: {wrong}"
    return ""


def _by_host(seats: Iterable[Seat]) -> dict[str, list[Seat]]:
    found: dict[str, list[Seat]] = {}
    for each in sorted(seats, key=lambda seat: seat["rank"]):
        found.setdefault(each["host"], []).append(each)
    return found


def _unbound(seats: Sequence[Seat], bind: str) -> str:
    if bind in ("", "none"):
        free = len({tuple(each["cpus"]) for each in seats}) == 1
        return "" if free or not bind else f"bind is none, and ranks have {_units(seats, 'core')}"
    wide = [each for each in seats if len(each[bind]) > 1 and bind != "core"]
    if bind == "core":
        whole = seats[0]["all"]["core"]
        taken = [core for each in seats for core in each["core"]]
        wide = [each for each in seats if len(each["core"]) == whole > 1]
        if len({*taken}) < len(taken):
            return f"bind is core, and ranks share some: {_units(seats, 'core')}"
    return f"bind is {bind}, and ranks have {_units(seats, bind)}" if wide else ""


def _misdealt(seats: Sequence[Seat], distribution: str) -> str:
    """Return how neighbours are not on one socket, or not on different ones, where these differ."""
    if not distribution or any(each["rank"] < 0 or len(each["socket"]) > 1 for each in seats):
        return ""
    order = [each["socket"][0] for each in seats]
    changes = sum(one != other for one, other in pairwise(order))
    sockets, most = len({*order}), seats[0]["all"]["socket"]
    if distribution == "block" and changes > sockets - 1:
        return f"distribution is block, and ranks have {_units(seats, 'socket')}"
    dealt = changes == len(order) - 1 and sockets == min(most, len(order))
    if distribution == "cyclic" and most > 1 and not dealt:
        return f"distribution is cyclic, and ranks have {_units(seats, 'socket')}"
    return ""


def _units(seats: Sequence[Seat], level: str) -> str:
    return f"{level}s " + " | ".join(",".join(map(str, each[level])) for each in seats[:8])


def said(seats: Sequence[Seat]) -> str:
    """Return in words where ranks are: of each host the cores, sockets and NUMA domains."""
    rows = {
        "; ".join(_units(own, level) for level in ("core", "socket", "numa"))
        for own in _by_host(seats).values()
    }
    return f"ranks may use, of each host, {' or '.join(sorted(rows))}"


if __name__ == "__main__":
    print(json.dumps(seat()), flush=True)
