"""Speeds beside copies, MPI_Allreduce, gloo and NCCL in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...formats import Cast
from ...methods import MEMCPY
from ...world.cores import own_cores
from ..kinds.allreduce import ALLREDUCE
from ..kinds.allreduce_cases import group_of, missing
from ..kinds.codec_cases import format_of, operations
from ..kinds.place import JobRanks
from ..kinds.timing import interleave_ranks, measure, on_device
from ..study_data import Factors
from .base import Check, CheckPlace, CheckResult, Ratio

ANY = float("inf")
SCALAR = "info shows the kernels, of which v3 and v4 are fast; a rank needs a core of its own"
BUSY = "another process may use the GPU; nvidia-smi shows clocks and power"
# The least speed of the codec beside a copy by all ranks at once. On the CPU:
# docs/measurements/performance.md for two processors, widened by half; on the GPU: its table of
# predictions, less a third.
CODEC = {
    "cpu": {"encode tile": 0.35, "decode": 0.35, "decode_add": 0.35, "hop tile": 0.25},
    "gpu": {"encode tile": 0.65, "decode": 0.65, "decode_add": 0.65, "hop tile": 0.45},
}
# By compute capability and format: docs/measurements/performance.md for an H200, less a fifth.
MEASURED = {
    ("90", "e4m3"): {"encode tile": 1.29, "decode": 1.10, "decode_add": 0.70, "hop tile": 1.07},
}
WARMUP = 2
MIB = 1 << 20


def expected(device: str, fmt: str) -> dict[str, float]:
    """Return the least speeds of the codec in a format, on this process's device."""
    if device == "gpu":
        from ...ops.gpu_runtime import compute_capability

        return MEASURED.get((compute_capability(), fmt), CODEC["gpu"])
    return CODEC[device]


def codec(place: CheckPlace) -> CheckResult:
    """Time the codec beside a copy of the same data, all ranks at once.

    On a GPU the data is so large that a launch, about 10 us, takes little of a call.
    """
    found, world = CheckResult(), place.world
    mib = place.of(8, 64) if place.device == "cpu" else 512
    n = mib * MIB // 4
    normal = np.random.default_rng(0).standard_normal(n, np.float32)
    with own_cores(world):
        x = on_device(normal, place.device)
        for name in place.of(("e4m3",), ("e4m3", "e2m1fn", "bf16")):
            runs: Any = operations(x, Cast(format_of(name)))
            wanted = expected(place.device, name)
            some = {each: runs[each] for each in (MEMCPY, *wanted)}
            times = interleave_ranks(world, some, place.of(5, 15), WARMUP)
            slowest = {each: t[WARMUP:].max(axis=1).tolist() for each, t in times.items()}
            advice = SCALAR if place.device == "cpu" else BUSY
            for operation, least in wanted.items():
                data = place.device, 4 * n, slowest[operation], slowest[MEMCPY]
                ratio = Ratio(f"{operation} {name}", MEMCPY, *data, least, ANY, advice)
                found.ratios.append(ratio)
                found.counted += len(ratio.beside_s)
    return found


OTHER = "bench allreduce --algorithms ring,tree,direct,hier shows which algorithm suits the machine"
SMALL = "start ranks on cores of their own (--bind-to core); bench latency shows all sizes"
NCCL = "between GPUs of a node NCCL is meant; see docs/howto/gpu.md"
# The least of our all-reduces over the library's, by wire, and advice: in
# docs/measurements/performance.md 1.4 to 4.2 over MPI on a node for large arrays, more over gloo;
# NCCL copies between GPUs in kernels, ours sends messages.
LIBRARIES = {
    "mpi": ({"raw": 0.8, "e4m3": 0.8}, OTHER),
    "gloo": ({"raw": 1.0, "e4m3": 1.0}, OTHER),
    "nccl": ({"raw": 0.02, "e4m3": 0.05}, NCCL),
}


def beside(library: str, place: CheckPlace) -> CheckResult:
    """Time all-reduces beside those of a library, and beside a copy by all ranks."""
    world, found = place.world, CheckResult()
    if world.ranks < 2:
        return CheckResult(not_run="there is one rank")
    why = missing(world, library)
    if why:
        return CheckResult(not_run=why)
    sizes = place.of((64 << 10, 4 * MIB), (64 << 10, MIB, 16 * MIB, 64 * MIB))
    with own_cores(world), group_of(world, [library]):
        for size_bytes in sizes:
            given = {"size_bytes": size_bytes, "wire": "raw"}
            others = [{**given, "algorithm": name} for name in (library, MEMCPY)]
            leasts, advice = LIBRARIES[library]
            ours = {**given, "algorithm": "ring", "call": "prepared"}
            times = _times(place, [*others, *({**ours, "wire": wire} for wire in leasts)])
            found.counted += sum(map(len, times))
            data = place.device, size_bytes
            for (name, least), mine in zip(leasts.items(), times[2:], strict=True):
                what = f"all-reduce {name}"
                ratio = Ratio(what, library, *data, mine, times[0], least, ANY, advice)
                found.ratios.append(ratio)
                if library == "mpi":  # beside a copy: of the machine alone, nothing is expected
                    found.ratios.append(Ratio(what, MEMCPY, *data, mine, times[1], 0.0, ANY, ""))
    return found


def _times(place: CheckPlace, cases: Sequence[Factors], repeats: int = 0) -> list[list[float]]:
    """Return the slowest rank's times of all cases, each checked before. Collective."""
    on_device: Factors = {"device": place.device} if place.device == "gpu" else {}
    asked = [{**case, **on_device} for case in cases]
    ranks = JobRanks(place.world, share_gpus=place.oversubscribe)
    points = measure(ALLREDUCE, ranks, asked, repeats or place.of(7, 15), WARMUP)
    return [point.slowest_s(WARMUP).tolist() for point in points]


def latency(place: CheckPlace) -> CheckResult:
    """Time small all-reduces that are prepared beside MPI's."""
    if place.world.ranks < 2:
        return CheckResult(not_run="there is one rank")
    found, call = CheckResult(), "prepared" if place.device == "cpu" else "graphs"
    least = 0.5 if place.device == "cpu" else 0.2
    with own_cores(place.world):
        for size_bytes in place.of((64,), (64, 4096)):
            tree = {"size_bytes": size_bytes, "algorithm": "tree", "wire": "raw"}
            cases = [{**tree, "algorithm": "mpi"}, {**tree, "call": call}]
            times = _times(place, cases, place.of(100, 300))
            data = place.device, size_bytes, times[1], times[0]
            found.ratios.append(Ratio("all-reduce raw, tree", "mpi", *data, least, ANY, SMALL))
            found.counted += len(times[0])
    return found


CHECKS: dict[str, Check] = {
    "codec": Check("speed", "the codec beside a copy", codec),
    "beside MPI": Check("speed", "all-reduces beside MPI_Allreduce", partial(beside, "mpi")),
    "small beside MPI": Check("speed", "small all-reduces beside MPI_Allreduce", latency),
}
OTHERS: dict[str, Check] = {  # the last checks, as a library may wait for ever
    "beside gloo": Check(
        "speed", "all-reduces beside torch's gloo", partial(beside, "gloo"), devices=("cpu",)
    ),
    "beside NCCL": Check(
        "speed", "all-reduces beside torch's NCCL", partial(beside, "nccl"), devices=("gpu",)
    ),
}
