"""Kernels on several threads: the bits of one thread, no thread before it is needed, one number."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from every import every
from refusing import refused

from cpdhpc.config import UserError
from cpdhpc.formats import TILE, Cast, FloatFormat, parse_format
from cpdhpc.lab.verify.outcomes import of_codes, of_sums, of_tiles
from cpdhpc.ops import common, cpu, kernel_threads, omp_num_threads, set_kernel_threads
from cpdhpc.world.cores import threads_of_rank
from cpdhpc.world.ranks import Loopback

SHARED = 256 * TILE  # values from which on threads share the work
SIZES = (SHARED, SHARED + 1, 300_001, 9 * 32 * TILE - 1)


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """Each test leaves the number as it was."""
    before = list(common._chosen)
    yield
    common._chosen[:] = before


def values(n: int) -> np.ndarray:
    """Normal values of many sizes, with a NaN, an infinity, and some values after the last tile."""
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-20, 20, n))).astype(np.float32)
    x[n // 3], x[-1] = np.nan, np.inf
    return x


def everything(x: np.ndarray, rounding: str) -> list[bytes]:
    finite = np.nan_to_num(x, nan=0, posinf=0)  # an integer is neither
    found = of_sums(cpu, finite, FloatFormat(1, 6, "none"), rounding, 125)
    for name, fit, given in (("e4m3", True, x), ("e6m9", False, x), ("e2m1fn", True, finite)):
        cast: Any = Cast(parse_format(name), rounding)  # type: ignore[arg-type]
        found += of_tiles(cpu, given, given, cast, fit=fit, shift=120) + of_codes(cpu, given, cast)
    return [each.tobytes() for each in found]


@every("rounding", ["nearest", "zero", "stochastic"])
@every("n", SIZES)
def test_the_bits_do_not_depend_on_the_number_of_threads(n: int, rounding: str) -> None:
    x = values(n)
    set_kernel_threads(1)
    one = everything(x, rounding)
    for count in (2, 7):
        set_kernel_threads(count)
        assert everything(x, rounding) == one


def test_threads_of_a_program_may_call_at_the_same_time() -> None:
    xs = [values(SHARED + i) for i in range(4)]
    set_kernel_threads(1)
    alone = [everything(x, "stochastic") for x in xs]
    set_kernel_threads(3)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: everything(x, "stochastic"), xs * 3)) == alone * 3


def test_a_wrong_length_is_an_error_on_any_number_of_threads() -> None:
    set_kernel_threads(2)
    x, shifts = values(SHARED), np.zeros(SHARED // TILE, np.uint8)
    with pytest.raises(ValueError, match="words: 262143 bytes given, 262144 needed"):
        cpu.encode_tiles(x, Cast(parse_format("e4m3")), np.zeros(SHARED - 1, np.uint8), shifts)


PROGRAM = """
import os
import numpy as np
from cpdhpc.ops import cpu
from cpdhpc.ops import kernel_threads

def tasks():
    return len(os.listdir("/proc/self/task"))

before, x = tasks(), np.ones(256 * 1024, np.float32)
assert kernel_threads() == 3
cpu.amax_tiles(x[:-1])
assert tasks() == before, "a small array has started threads"
one = cpu.amax_tiles(x)
assert tasks() == before + 2, "a large array has started no threads"
cpu.amax_tiles(x)
assert tasks() == before + 2, "more threads than asked for"
child = os.fork()
if child == 0:
    assert tasks() == 1
    same = cpu.amax_tiles(x).tobytes() == one.tobytes()
    os._exit(0 if same and tasks() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0, "a child has no threads of its own"
"""


def test_threads_start_when_they_are_needed_and_in_children_too() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=1800)


def test_the_number_is_given_or_of_openmp_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    common._chosen.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", " 4, 2")
    assert kernel_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert kernel_threads() == 4, "read once"
    set_kernel_threads(2)
    assert kernel_threads() == 2
    common._chosen.clear()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert kernel_threads() == 1 and omp_num_threads() is None
    for wrong in (0, -1, 1.5, "2", None):
        with refused("set_kernel_threads", "count"):
            set_kernel_threads(wrong)  # type: ignore[arg-type]


def test_the_number_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_rank(Loopback()) == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_of_rank(Loopback()) == 7
    for wrong in ("0", "x", "-2", "1.5"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(UserError, match=f"OMP_NUM_THREADS={wrong}: must be a number of"):
            threads_of_rank(Loopback())
