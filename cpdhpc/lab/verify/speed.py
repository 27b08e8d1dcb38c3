"""Speeds beside copies, MPI_Allreduce, gloo and NCCL in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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
from .base import Check, Found, Place, Ratio

Times = Sequence[float]


class Expected(NamedTuple):
    """Limits of a ratio of speeds, and advice for ratios outside them."""

    low: float
    high: float
    advice: str

    def beside(
        self, what: str, other: str, device: str, size_bytes: int, times_s: Times, beside_s: Times
    ) -> Ratio:
        """Return the ratio of times that should be within the limits."""
        return Ratio(what, other, device, size_bytes, times_s, beside_s, *self)


ANY = float("inf")
NONE = Expected(0.0, ANY, "")  # for ratios of the machine alone
SCALAR = "info shows the kernels, of which v3 and v4 are fast; a rank needs a core of its own"

BUSY = "another process may use the GPU; nvidia-smi shows clocks and power"
# The codec beside a copy by all ranks at once. On the CPU: docs/measurements/performance.md for two
# processors, widened by half; on the GPU: its table of predictions, less a third.
CODEC: dict[str, dict[str, Expected]] = {
    "cpu": {
        "encode tile": Expected(0.35, ANY, SCALAR),
        "decode": Expected(0.35, ANY, SCALAR),
        "decode_add": Expected(0.35, ANY, SCALAR),
        "hop tile": Expected(0.25, ANY, SCALAR),
    },
    "gpu": {
        "encode tile": Expected(0.65, ANY, BUSY),
        "decode": Expected(0.65, ANY, BUSY),
        "decode_add": Expected(0.65, ANY, BUSY),
        "hop tile": Expected(0.45, ANY, BUSY),
    },
}
# By compute capability and format: docs/measurements/performance.md for an H200, less a fifth.
MEASURED: dict[tuple[str, str], dict[str, Expected]] = {
    ("90", "e4m3"): {
        "encode tile": Expected(1.29, ANY, BUSY),
        "decode": Expected(1.10, ANY, BUSY),
        "decode_add": Expected(0.70, ANY, BUSY),
        "hop tile": Expected(1.07, ANY, BUSY),
    },
}
WARMUP = 2
MIB = 1 << 20


def expected(device: str, fmt: str) -> dict[str, Expected]:
    """Return the expected speeds of the codec in a format, on this process's device."""
    if device == "gpu":
        from ...ops.gpu_runtime import compute_capability

        return MEASURED.get((compute_capability(), fmt), CODEC["gpu"])
    return CODEC[device]


def codec(place: Place) -> Found:
    """Time the codec beside a copy of the same data, all ranks at once.

    On a GPU the data is so large that a launch, about 10 us, takes little of a call.
    """
    found, world = Found(), place.world
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
            for operation, row in wanted.items():
                beside = slowest[MEMCPY]
                data = place.device, 4 * n, slowest[operation], beside
                found.ratios.append(row.beside(f"{operation} {name}", MEMCPY, *data))
                found.counted += len(beside)
    return found


OTHER = "bench allreduce --algorithms ring,tree,direct,hier shows which algorithm suits the machine"
SMALL = "start ranks on cores of their own (--bind-to core); bench latency shows all sizes"
# Our all-reduces over the library's: in docs/measurements/performance.md 1.4 to 4.2 over MPI on a
# node for large arrays, more over gloo; NCCL copies between GPUs in kernels, ours sends messages.
LIBRARIES: dict[str, dict[str, Expected]] = {
    "mpi": {"raw": Expected(0.8, ANY, OTHER), "e4m3": Expected(0.8, ANY, OTHER)},
    "gloo": {"raw": Expected(1.0, ANY, OTHER), "e4m3": Expected(1.0, ANY, OTHER)},
    "nccl": {
        "raw": Expected(0.02, ANY, "between GPUs of a node NCCL is meant; see docs/howto/gpu.md"),
        "e4m3": Expected(0.05, ANY, "between GPUs of a node NCCL is meant; see docs/howto/gpu.md"),
    },
}


def beside(library: str, place: Place) -> Found:
    """Time all-reduces beside those of a library, and beside a copy by all ranks."""
    world, found = place.world, Found()
    if world.ranks < 2:
        return Found(not_run="there is one rank")
    why = missing(world, library)
    if why:
        return Found(not_run=why)
    sizes = place.of((64 << 10, 4 * MIB), (64 << 10, MIB, 16 * MIB, 64 * MIB))
    with own_cores(world), group_of(world, [library]):
        for size_bytes in sizes:
            given = {"size_bytes": size_bytes, "wire": "raw"}
            others = [{**given, "algorithm": name} for name in (library, MEMCPY)]
            wires = "raw", "e4m3"
            times = _times(place, [*others, *(_ours(size_bytes, wire) for wire in wires)])
            found.counted += sum(map(len, times))
            data = place.device, size_bytes
            for name, mine in zip(wires, times[2:], strict=True):
                row, what = LIBRARIES[library][name], f"all-reduce {name}"
                found.ratios.append(row.beside(what, library, *data, mine, times[0]))
                if library == "mpi":
                    found.ratios.append(NONE.beside(what, MEMCPY, *data, mine, times[1]))
    return found


def _ours(size_bytes: int, wire: str) -> Factors:
    """Return the case of an all-reduce of ours that is prepared."""
    return {"size_bytes": size_bytes, "algorithm": "ring", "wire": wire, "call": "prepared"}


def _times(place: Place, cases: Sequence[Factors], repeats: int = 0) -> list[list[float]]:
    """Return the slowest rank's times of all cases, each checked before. Collective."""
    on_device: Factors = {"device": place.device} if place.device == "gpu" else {}
    asked = [{**case, **on_device} for case in cases]
    ranks = JobRanks(place.world, share_gpus=place.oversubscribe)
    points = measure(ALLREDUCE, ranks, asked, repeats or place.of(7, 15), WARMUP)
    return [point.slowest_s(WARMUP).tolist() for point in points]


def latency(place: Place) -> Found:
    """Time small all-reduces that are prepared beside MPI's."""
    if place.world.ranks < 2:
        return Found(not_run="there is one rank")
    found, call = Found(), "prepared" if place.device == "cpu" else "graphs"
    row = Expected(0.5, ANY, SMALL) if place.device == "cpu" else Expected(0.2, ANY, SMALL)
    with own_cores(place.world):
        for size_bytes in place.of((64,), (64, 4096)):
            tree = {"size_bytes": size_bytes, "algorithm": "tree", "wire": "raw"}
            cases = [{**tree, "algorithm": "mpi"}, {**tree, "call": call}]
            times = _times(place, cases, place.of(100, 300))
            data = place.device, size_bytes, times[1], times[0]
            found.ratios.append(row.beside("all-reduce raw, tree", "mpi", *data))
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
