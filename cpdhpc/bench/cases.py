"""The cases of the all-reduce benchmarks: data whose sum is known, calls, and their checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..comm import SCHEDULES, Allreduce, Ranks
from ..comm.method import AUTO

Array = NDArray[np.float32]
LARGEST = 8  # of the integers: their sum is exact in float32 for 2**21 ranks
APART = 97  # places between the windows of two ranks in the common numbers


class Data(NamedTuple):
    """A rank's contribution, float32[n], and the sum of all ranks', float64[n], exact to 2**-53."""

    x: Array
    total: NDArray[np.float64]


def window_data(numbers: Array, n: int, world: Ranks) -> Data:
    """Return the data of this rank: a window of common numbers, at a place of its own."""
    total = np.zeros(n)
    for rank in range(world.ranks):
        total += numbers[rank * APART : rank * APART + n]
    start = world.hosted.start * APART
    return Data(numbers[start : start + n].copy(), total)


def integer_data(n: int, world: Ranks) -> Data:
    """Return small integers: every order of summation gives their exact sum."""
    rng = np.random.default_rng(0)
    size = n + world.ranks * APART
    return window_data(rng.integers(-LARGEST, LARGEST + 1, size).astype(np.float32), n, world)


def normal_data(n: int, world: Ranks) -> Data:
    """Return standard normal values."""
    rng = np.random.default_rng(0)
    return window_data(rng.standard_normal(n + world.ranks * APART, np.float32), n, world)


@dataclass
class Case:
    """A call to time, and what is known of it.

    exact: whether the sum must be exact, and so the data integers
    prepare: done before each call, and not timed
    chosen: the algorithm that ran; wire_bytes: what left the rank that sent most, nan where only
        the library knows; error: of the sum, relative, in the Euclidean norm
    """

    algorithm: str
    wire: str
    scaling: str
    accumulate: str
    data: Data
    out: Array
    run: Callable[[], object]
    exact: bool = True
    prepare: Callable[[], object] = lambda: None
    method: Allreduce | None = None
    chosen: str = ""
    wire_bytes: float = np.nan
    error: float = np.nan

    @property
    def name(self) -> str:
        """The algorithm as shown: with what auto has chosen."""
        return f"{self.algorithm}({self.chosen})" if self.algorithm == AUTO else self.algorithm

    def check(self, world: Ranks) -> None:
        """Run once; set what is known afterwards. Collective.

        Raises ArithmeticError on all processes where ranks differ in a bit, or the sum of integers
        is not exact.
        """
        self.out.fill(np.nan)
        sent = world.bytes_sent.copy()
        self.prepare()
        reduced: Any = self.run()
        sent_bytes = world.bytes_sent - sent
        exact = not self.exact or np.array_equal(self.out, self.data.total)
        digest = hashlib.blake2b(self.out.tobytes()).hexdigest()
        found = world.gather((exact, digest, int(sent_bytes.max())), "bench: results")
        what = f"bench: {self.algorithm} {self.wire} {self.scaling} {self.accumulate}"
        if len({digest for _, digest, _ in found}) > 1:
            raise ArithmeticError(f"{what}: the ranks' results differ")
        if not all(right for right, _, _ in found):
            raise ArithmeticError(f"{what}: the sum of integers is not exact")
        if self.method is not None:
            self.wire_bytes = max(size for _, _, size in found)
            self.chosen = reduced.algorithm
        norm = float(np.linalg.norm(self.data.total))
        self.error = float(np.linalg.norm(self.out - self.data.total)) / norm if norm else 0.0


def schedule_case(world: Ranks, method: Allreduce, data: Data, out: Array) -> Case:
    """Return the case of an all-reduce of ours."""
    packed = method.fmt is not None
    known = method.algorithm in SCHEDULES
    return Case(
        algorithm=method.algorithm,
        wire=str(method.wire),
        scaling=(method.scaling or method.parsed_scaling.kind) if packed else "-",
        accumulate=(method.accumulating if known else method.accumulate or "default")
        if packed
        else "float32",
        data=data,
        out=out,
        run=lambda: method.run(world, [data.x], [out]),
        exact=not packed,
        method=method,
    )


def _mpi(world: Ranks, ints: Data, normal: Data, out: Array) -> Case:
    """MPI_Allreduce of float32, called without any of ours around it."""
    run = lambda: world.sum_by_mpi(out, ints.x)  # noqa: E731
    return Case("mpi", "raw", "-", "float32", ints, out, run)


def _gloo(world: Ranks, ints: Data, normal: Data, out: Array) -> Case:
    """Gloo in float32, in place, as DDP does."""
    from ..train.gloo import sum_float32

    def fill() -> None:
        out[:] = ints.x

    return Case("gloo", "raw", "-", "float32", ints, out, lambda: sum_float32(out), prepare=fill)


def _gloo_bfloat16(world: Ranks, ints: Data, normal: Data, out: Array) -> Case:
    """Gloo in bfloat16, with the conversions, as DDP's hook does."""
    from ..train.gloo import sum_bfloat16

    run = lambda: sum_bfloat16(normal.x, out)  # noqa: E731
    return Case("gloo", "bf16", "none", "requantise", normal, out, run, exact=False)


Baseline = Callable[[Ranks, Data, Data, Array], Case]
BASELINES: dict[str, Baseline] = {"mpi": _mpi, "gloo": _gloo, "gloo-bf16": _gloo_bfloat16}


def cases_of_size(
    world: Ranks, size_bytes: int, methods: Sequence[Allreduce], baselines: Sequence[str]
) -> list[Case]:
    """Return the checked cases of a size, baselines first. Collective."""
    n = size_bytes // 4
    ints, normal, out = integer_data(n, world), normal_data(n, world), np.empty(n, np.float32)
    cases = [BASELINES[name](world, ints, normal, out) for name in baselines]
    cases += [
        schedule_case(world, method, normal if method.fmt else ints, out) for method in methods
    ]
    for case in cases:
        case.check(world)
    return cases
