"""The machine: processors, GPUs, MPI, versions, cores of ranks, and the links between them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from itertools import combinations

import numpy as np

from ...errors import UserError
from ...world.gpu_messages import gpu_aware, use_gpu
from ..kinds.timing import PING_BYTES, line, message_times
from ..provenance import gpu, gpu_rows, info_rows
from ..study.site import ranges
from .base import Check, CheckPlace, CheckResult


def machine(place: CheckPlace) -> CheckResult:
    """Return the facts that info shows, without GPUs."""
    return CheckResult(facts=dict(info_rows(place.world)))


def binding(place: CheckPlace) -> CheckResult:
    """Return the host and the cores of each rank."""
    mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
    everyone = place.world.gather(mine, "verify")
    found = CheckResult(counted=len(everyone))
    for rank, (host, cores) in enumerate(everyone):
        found.facts[f"rank {rank}"] = f"{host}, cores {ranges(cores)}"
    used = Counter((host, core) for host, cores in everyone for core in cores)
    cores_of = Counter(host for host, _ in used)
    ranks_of = Counter(host for host, _ in everyone)
    crowded = [host for host in ranks_of if ranks_of[host] > cores_of[host]]
    if crowded:
        found.facts["cores"] = (
            f"more ranks than cores on {', '.join(crowded)}: times are of waiting for one another"
        )
    elif max(used.values()) > 1:
        found.facts["cores"] = "ranks of a host may use the same cores: speeds are measured bound"
    else:
        found.facts["cores"] = "every rank has cores of its own"
    return found


def gpus(place: CheckPlace) -> CheckResult:
    """Take a GPU for each rank if the user wants GPUs; send GPU memory by MPI, if MPI takes it."""
    if place.asked == "cpu":
        return CheckResult(facts={"GPU": f"{gpu() or 'none'}; --device gpu checks it"})
    try:
        use_gpu(place.world, oversubscribe=place.oversubscribe)
    except UserError as error:
        return CheckResult(wrong=[str(error)])
    gpu_aware(place.world)
    return CheckResult(counted=1, facts={"GPU": gpu(), **dict(gpu_rows(place.world))})


MOST_LINKED = 8  # ranks whose pairs are all measured


def links(place: CheckPlace) -> CheckResult:
    """Send messages there and back between pairs of ranks, one after the other."""
    world = place.world
    if world.ranks < 2:
        return CheckResult(not_run="there is one rank")
    several = range(min(world.ranks, MOST_LINKED))
    pairs = list(combinations(several, 2))
    pairs += [(0, other) for other in range(MOST_LINKED, world.ranks)][: 2 * MOST_LINKED]
    times = np.array(
        [
            message_times(world, pair, PING_BYTES, place.of(5, 20), device=place.device)
            for pair in pairs
        ]
    )
    found = CheckResult(counted=times.size)
    name = "links" if place.device == "cpu" else "links of GPUs"
    found.arrays = {
        f"{name}: pairs": np.array(pairs),
        f"{name}: bytes": np.array(PING_BYTES),
        f"{name}: times_s": times,
    }
    rates = [1e-9 / max(line(PING_BYTES, each)[1], 1e-15) for each in times]
    found.facts = {
        f"{name}, message of {PING_BYTES[0]} B": _span(1e6 * times[:, 0], "us"),
        f"{name}, rate of long ones": _span(np.array(rates), "GB/s"),
    }
    return found


def _span(numbers: np.ndarray[tuple[int], np.dtype[np.float64]], unit: str) -> str:
    low, high = numbers.min(), numbers.max()
    return f"{low:.3g} {unit}" if len(numbers) == 1 else f"{low:.3g} to {high:.3g} {unit}"


CHECKS: dict[str, Check] = {
    "machine": Check("what is there", "versions, MPI, processors", machine, devices=("cpu",)),
    "ranks": Check("what is there", "hosts and cores of ranks", binding, devices=("cpu",)),
    "GPUs": Check(
        "what is there", "the GPU of each rank, and whether MPI takes its memory", gpus,
        devices=("cpu",),
    ),
    "links": Check("what is there", "messages between ranks, measured", links),
}  # fmt: skip
