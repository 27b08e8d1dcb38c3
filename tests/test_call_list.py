"""Call lists of ranks that are threads: right sums, and no access that nothing orders."""

import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from every import every
from rank_threads import all_reduces, run_threads
from training import ran

from cpdhpc import _cpu
from cpdhpc.collectives import recorded
from cpdhpc.ops.cpu import WAITING

ROOT = Path(__file__).parents[1]
# Raw payloads need no loops but copies.
ONE_LOOP = f"""
#include <string.h>
#include "{ROOT}/kernels/cpu_table.h"
static void copy(u8* out, const u8* x, i64 size) {{ memcpy(out, x, (size_t)size); }}
const Loops cpd_loops_portable = {{.name = "one", .copy = copy}};
"""
SANITISERS = {
    "thread": ("libtsan.so", "TSAN_OPTIONS", "halt_on_error=1 exitcode=66"),
    "address": ("libasan.so", "ASAN_OPTIONS", "detect_leaks=0 exitcode=66"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("far_ns", [-1, recorded.FAR_NS])
def test_lists_of_threads_have_the_bits_of_the_simulation(ranks, far_ns, monkeypatch):
    """In many small parts, whose memory is used again and again; two write past the caches."""
    monkeypatch.setattr(recorded, "PART_VALUES", 1024)
    monkeypatch.setattr(recorded, "FAR_NS", far_ns)  # -1: all are, however near
    monkeypatch.setattr(recorded, "STREAMED_BYTES", {2: 1, 3: 1 << 30}[ranks])
    assert run_threads(ranks, lambda world: all_reduces(world, ["raw", "e4m3"])) == [[]] * ranks


def sanitised(name, directory, text=None):
    """Run rank_threads.py with a build of a sanitiser; return exit status and output.

    text: of cpu_call_list.h in place of what it is
    """
    library, variable, options = SANITISERS[name]
    found = ran(["g++", f"-print-file-name={library}"], check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"g++ has no {library}")
    for header in (ROOT / "kernels").iterdir():
        (directory / header.name).write_bytes(header.read_bytes())
    if text is not None:
        (directory / "cpu_call_list.h").write_text(text)
    (directory / "one.cpp").write_text(ONE_LOOP)
    module = directory / "sanitised.so"
    flags = ["-O1", "-g", "-std=c++17", "-fPIC", "-shared", "-pthread", "-DCPD_PORTABLE"]
    flags += ["-Wno-psabi", "-ffp-contract=off", "-DPy_LIMITED_API=0x030B0000"]
    include = f"-I{sysconfig.get_path('include')}"
    sources = [directory / "cpu_module.cpp", directory / "one.cpp"]
    command = ["g++", *flags, f"-fsanitize={name}", include, *sources, "-o", module]
    subprocess.run(command, check=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = ran(
        ["setarch", "-R", sys.executable, ROOT / "tests" / "helpers" / "rank_threads.py", module],
        env=os.environ | {"LD_PRELOAD": found, variable: options, "PYTHONPATH": path},
    )
    return done.returncode, done.stdout + done.stderr


@every("past_caches", [False, True])
def test_copies_of_any_size_from_anywhere_to_anywhere(clone, past_caches):
    """No byte beside them is written."""
    copy = _cpu.copy_past_caches if past_caches else _cpu.copy
    source = np.random.default_rng(0).integers(0, 256, 3000, np.uint8)
    for size in [0, 1, 3, 15, 16, 63, 64, 65, 127, 255, 256, 257, 300, 511, 1023, 1025, 2100]:
        for start in (0, 1, 16, 63):
            for place in (0, 4, 31, 64):
                target = np.zeros(3000, np.uint8)
                copy(1, source[start : start + size], target[place : place + size])
                assert (target[place : place + size] == source[start : start + size]).all()
                assert not target[:place].any() and not target[place + size :].any()


def test_a_round_trip_is_measured_where_both_come():
    """And takes no longer than a look at the time where the other one does not."""
    boards = np.zeros((2, 128), np.uint8)
    before_s = time.perf_counter()
    assert _cpu.round_trip(boards[0], boards[1], True, 1) == 0
    assert time.perf_counter() - before_s < 5  # 10 ms, where nobody else has the core
    found = [0, 0]

    def measure(mine, call):
        found[mine] = _cpu.round_trip(boards[mine], boards[1 - mine], mine == 0, call)

    for call in range(2, 1000):  # on a busy machine one of them may come late
        threads = [threading.Thread(target=measure, args=(mine, call)) for mine in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if min(found) > 0:
            break
    assert min(found) > 0 and max(found) < 10**9


def test_waits_end_by_time_however_many_looks_there_are_left():
    """A look takes long where others have the core: who waits must get to see the time."""
    board = _cpu.make_board(tuple(np.zeros(128, np.uint8) for _ in range(2)))
    assert _cpu.meet(board, 1, 1 << 60) == WAITING
    x, word = np.zeros(1, np.float32), np.zeros(8, np.uint8)
    calls = _cpu.make_list(x, x.copy(), ((np.zeros(8, np.uint8),),))
    _cpu.begin_segment(calls, 0)
    _cpu.add_word(calls, word, 0)
    counter = np.zeros(1, np.int64)
    _cpu.end_list(calls, 1, False, counter, 0, counter, 0)
    assert _cpu.run_list(calls, 1, 1 << 60, x, x.copy()) == WAITING
    word[0] = 1
    assert _cpu.resume_list(calls, 1) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITISERS)
def test_a_sanitiser_finds_nothing(name, tmp_path):
    status, output = sanitised(name, tmp_path)
    assert status == 0 and "all sums are right" in output, output[-5000:]


@pytest.mark.slow
def test_the_thread_sanitiser_would_find_a_slot_that_is_taken_too_early(tmp_path):
    """Where the words that tell what is ended are not waited for."""
    text = (ROOT / "kernels" / "cpu_call_list.h").read_text()
    planted, count = re.subn(r"if \(word_of\(word\) < used\[slot\]\) return false;", "", text)
    assert count == 1
    status, output = sanitised("thread", tmp_path, planted)
    assert status == 66 and "data race" in output, output[-5000:]
