"""Where ranks sit: cores, sockets, NUMA domains and GPUs of a process, and whether as requested.

It needs the standard library alone: a launcher starts this file on the ranks of any program.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

CORE_BINDINGS = ("none", "core", "socket", "numa")
BINDINGS = (*CORE_BINDINGS, "gpu")  # "gpu": one GPU for a rank; its cores are the launcher's choice
DISTRIBUTIONS = ("block", "cyclic")
CPUS, NUMA = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
RANKS = (  # variables of launchers, and last of a scheduler
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
)
Seat = Mapping[str, Any]


def cpus_of(text: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it, as "0-3,8"."""
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
    """Return for each level of CORE_BINDINGS where each processor is; 0 if that is not known."""
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


def gpus() -> dict[str, str]:
    """Return the GPUs that this process sees by CUDA: UUID -> address on the bus.

    {} if there is no CUDA driver, or it sees none. CUDA_VISIBLE_DEVICES alone would not tell: in
    containers of processes (cgroups) the same number is a different GPU in each.
    Source: CUDA driver API, device management; instances of MIG have a UUID each.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    count, device = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return {}
    uuid_of = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    found = {}
    for number in range(count.value):
        uuid, address = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
        failed = (
            cuda.cuDeviceGet(ctypes.byref(device), number)
            or uuid_of(uuid, device)
            or cuda.cuDeviceGetPCIBusId(address, len(address), device)
        )
        if not failed:
            found[uuid.raw.hex()] = address.value.decode().lower()
    return found


def seat(bind: str = "") -> dict[str, Any]:
    """Return where this process may run: its host, rank, processors, and units of each level.

    "core", "socket", "numa": units that it may use; "all": how many the host has
    "gpu": what gpus returns, if bind is "gpu": the driver is not loaded for other bindings
    """
    allowed = sorted(os.sched_getaffinity(0))
    places = _places()
    return {
        "host": socket.gethostname(),
        "rank": next((int(os.environ[n]) for n in RANKS if os.environ.get(n, "").isdecimal()), -1),
        "cpus": allowed,
        **{level: sorted({of.get(cpu, 0) for cpu in allowed}) for level, of in places.items()},
        "all": {level: len({*of.values()}) for level, of in places.items()},
        **({"gpu": gpus()} if bind == "gpu" else {}),
    }


def misplaced(seats: Sequence[Seat], bind: str, distribution: str) -> str:
    """Return how ranks are not bound or distributed as requested, "" if they are.

    bind: one of BINDINGS; distribution: one of DISTRIBUTIONS; "": anything is right
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
    if bind == "gpu":
        seen = [gpu for each in seats for gpu in each["gpu"]]
        right = all(len(each["gpu"]) == 1 for each in seats) and len({*seen}) == len(seen)
        return "" if right else f"bind is gpu, and ranks see {_gpus(seats)}"
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
    """Return how ranks are not distributed as requested, if each has a single socket."""
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


def _gpus(seats: Sequence[Seat]) -> str:
    own = (",".join(each["gpu"].values()) or "none" for each in seats[:8])
    return f"GPUs {' | '.join(own)}"


def said(seats: Sequence[Seat]) -> str:
    """Return a text that says which cores, sockets, NUMA domains and GPUs ranks of a host use."""
    rows = set()
    for own in _by_host(seats).values():
        units = [_units(own, level) for level in ("core", "socket", "numa")]
        rows.add("; ".join([*units, _gpus(own)] if "gpu" in own[0] else units))
    return f"ranks may use, of each host, {' or '.join(sorted(rows))}"


if __name__ == "__main__":
    print(json.dumps(seat(*sys.argv[1:])), flush=True)
