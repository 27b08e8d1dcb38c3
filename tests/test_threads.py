"""Kernels on several threads: the bits of one thread, no thread before it is needed, one number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.config import UserError
from cpdhpc.formats import TILE, TRIT_BYTES, Cast, FloatFormat, packed_bytes, parse_format, tiles
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


def floats(x: np.ndarray, fmt: FloatFormat, rounding: Any, fit: bool) -> list[Any]:
    """What the operations on packed floats write and return, all of them."""
    n, cast, how = x.size, Cast(fmt, rounding), {"key": (3, 4), "offset": 2**32 - 5 * TILE}
    words, hop = (np.zeros(packed_bytes(n, fmt.bits), np.uint8) for _ in range(2))
    shifts, hop_shifts = (np.full(tiles(n), 120, np.uint8) for _ in range(2))
    counts, hop_counts = (np.zeros((tiles(n), 3), np.uint32) for _ in range(2))
    out, total, in_place = np.zeros_like(x), np.zeros_like(x), x.copy()
    cpu.encode_tiles(x, cast, words, shifts, fit=fit, counts=counts, **how)
    lost = cpu.decode_tiles(words, shifts, fmt, out)
    cpu.decode_add_tiles(words, shifts, fmt, x, total)
    cpu.decode_add_tiles(words, shifts, fmt, in_place, in_place)
    cpu.decode_add_encode_tiles(
        words, shifts, cast, x, hop, hop_shifts, fit=fit, counts=hop_counts, **how
    )
    same, same_shifts, written = np.zeros_like(hop), shifts.copy(), np.zeros_like(x)
    lost += cpu.decode_add_encode_tiles(
        words, shifts, cast, x, same, same_shifts, fit=fit, out=written, **how
    )
    codes = cpu.encode(x, cast, shift=2, **how)
    packed = cpu.pack(codes, fmt.bits)
    found = [words, shifts, counts, out, lost, total, in_place, hop, hop_shifts, hop_counts, codes]
    found += [
        same,
        same_shifts,
        written,
        packed,
        cpu.unpack(packed, fmt.bits, n),
        cpu.decode(codes, fmt, 2),
        cpu.amax_tiles(x),
    ]
    return found


def integers(x: np.ndarray, fmt: FloatFormat, rounding: Any) -> list[Any]:
    """What the operations on exact sums write and return, all of them."""
    n, cast, shifts = x.size, Cast(fmt, rounding), np.full(tiles(x.size), 125, np.uint8)
    codes = np.zeros(packed_bytes(n, fmt.bits), np.uint8)
    words, wide = (np.zeros(packed_bytes(n, bits), np.uint8) for bits in (18, 19))
    counts, out = np.zeros((tiles(n), 3), np.uint32), np.zeros_like(x)
    cpu.encode_tiles(x, cast, codes, shifts)
    cpu.add_encode_integers_tiles(
        codes, 0, cast, x, shifts, words, 18, key=(5, 6), offset=7 * TILE, counts=counts
    )
    cpu.add_integers_tiles(words, 18, codes, 0, fmt, wide, 19)
    lost = cpu.decode_integers_tiles(wide, 19, shifts, fmt, out)
    ternary = np.resize(codes, 256 * tiles(n))
    trits, back = np.zeros(TRIT_BYTES * tiles(n), np.uint8), np.zeros_like(ternary)
    cpu.pack_trits(ternary, trits)
    cpu.unpack_trits(trits, back)
    return [words, counts, wide, lost, out, trits, back]


def everything(x: np.ndarray, rounding: str) -> list[bytes]:
    finite = np.nan_to_num(x, nan=0, posinf=0)  # an integer is neither
    found = [
        *floats(x, parse_format("e4m3"), rounding, fit=True),
        *floats(x, parse_format("e6m9"), rounding, fit=False),
        *floats(finite, parse_format("e2m1fn"), rounding, fit=True),
        *integers(finite, FloatFormat(1, 6, "none"), rounding),
    ]
    return [np.asarray(each).tobytes() for each in found]


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
        with pytest.raises(ValueError, match="set_kernel_threads: count="):
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
