"""Faults planted in the CUDA kernels: does a test on the CPU notice each?

Each is compiled into the kernels, and the tests of emulated_gpu run until one fails: for windows of
GPU arrays those of MPI, on one rank.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from training import environment

HERE = Path(__file__).parent
TESTS = [
    HERE / f"test_{name}.py"
    for name in (
        "cuda_codec",
        "ops",
        "blocks",
        "selection",
        "gpu_methods",
        "products",
        "integers",
        "trits",
    )
]
FAULTS = {  # what is wrong: the code, and what it becomes
    "a lane is not counted as one of the warp's": (
        "value = max(value, __shfl_xor_sync(ALL_LANES, value, step));",
        "value = max(value, __shfl_xor_sync(0x7fffffffu, value, step));",
    ),
    "the largest of half a warp": (
        "for (int step = CPD_LANES / 2; step; step /= 2)\n        value = max",
        "for (int step = CPD_LANES / 4; step; step /= 2)\n        value = max",
    ),
    "a shuffle that some lanes miss": (
        "u32 saturated = warp_sum(c.saturated);",
        "u32 saturated = lane_of_thread() ? warp_sum(c.saturated) : c.saturated;",
    ),
    "every lane writes the tile's shift, before it is known": (
        "if (how.blocks || lane == 0) shifts[",
        "shifts[",
    ),
    "a block's tiles are counted once": (
        "__device__ i64 tile_stride() { return (i64)gridDim.x * CPD_WARPS; }",
        "__device__ i64 tile_stride() { return (i64)gridDim.x; }",
    ),
    "values beyond the end are written": (
        "CPD_FN void store(float* x, i64 i, i64 n, F value) {\n    if (i < n) x[i] = value;\n}",
        "CPD_FN void store(float* x, i64 i, i64 n, F value) { x[i] = value; }",
    ),
    "values that are not finite are counted per thread only": (
        "if (count) atomicAdd(nonfinite, (u64)count);\n}\n\n"
        "CPD_BOUNDED __global__ void decode_add_tiles",
        "if (count) *nonfinite = (u64)count;\n}\n\nCPD_BOUNDED __global__ void decode_add_tiles",
    ),
    "random bits by the place in the tile": (
        "key, offset + t * CPD_TILE, counts + 3 * t);\n    }\n}\n\nCPD_BOUNDED",
        "key, offset, counts + 3 * t);\n    }\n}\n\nCPD_BOUNDED",
    ),
    "the last tile is taken for a whole one": (
        "return n - t * CPD_TILE < CPD_TILE ? (int)(n - t * CPD_TILE) : CPD_TILE;",
        "return CPD_TILE;",
    ),
    "a row too many of the last tile": (
        "return r * CPD_LANES < n - lane_of_thread();",
        "return r * CPD_LANES <= n - lane_of_thread();",
    ),
    "all lanes are taken to stay inside where one does": (
        "largest_inside(how.cast)) == ALL_LANES;",
        "largest_inside(how.cast)) != 0;",
    ),
    "the largest magnitude of half its size": (
        "most >>= 1;",
        "most >>= 2;",
    ),
    "the second block is decoded over the first": (
        "body(b * rows + r, read(",
        "body(r, read(",
    ),
    "shifts of the first lane for all blocks": (
        "if (how.blocks) shifts += lane_of_thread();",
        "",
    ),
    "no barrier before shared memory is read": (
        "        __syncthreads();\n        for (int t = 0; t < CPD_SIDE",
        "        for (int t = 0; t < CPD_SIDE",
    ),
    "no barrier before shared memory is written again": (
        "        __syncthreads();\n    }\n    if (i < m && j < n)",
        "    }\n    if (i < m && j < n)",
    ),
    "a table of counts for all warps": (
        "u32* table = tables[threadIdx.x / CPD_LANES];",
        "u32* table = tables[0];",
    ),
    "counts added without an atomic": (
        "if (table[b]) atomicAdd(counts + b, table[b]);",
        "if (table[b]) counts[b] = table[b];",
    ),
    "subnormal numbers flushed in sums": (
        'asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));',
        "sum = a + b; if (sum < 1.17549435e-38f && sum > -1.17549435e-38f) sum = 0.0f;",
    ),
    "the lanes before this one include it": (
        "return sum - value;",
        "return sum;",
    ),
}
FAULTS_OF_MOVES = {  # of the kernel that moves windows
    "the first unit of a box is taken for the last of the one before": (
        "if (boxes[middle + 1].first > i)",
        "if (boxes[middle + 1].first >= i)",
    ),
    "a partial sum replaces the total": (
        "part = value, several = true;",
        "part = value;",
    ),
    "the mark of a partial sum is taken for a part of the base": (
        "const char* at = arrays.from(term.base % CPD_BEGINS) + term.offset;",
        "const char* at = arrays.from(term.base) + term.offset;",
    ),
    "half of a wide unit is copied": (
        "return move_copies<Wide>(",
        "return move_copies<u64>(",
    ),
    "sources lie as targets do": (
        "*(const T*)(from + ahead_of(place, term.strides));",
        "*(const T*)(from + ahead_of(place, box.strides));",
    ),
    "sums of short floats are cut, not rounded": (
        """const float wide_sum = add(wide(a), wide(b));
        Type y;""",
        """const float wide_sum = from_bits(bits_of(add(wide(a), wide(b))) & 0xffffe000u);
        Type y;""",
    ),
}
MOVES = ["--with-mpi", "-m", "not gpu and not slow", str(HERE / "mpi" / "test_mpi_darray_gpu.py")]
SERIAL = ["-m", "not slow", "-k", "gpu or simulated", *map(str, TESTS)]


def caught_by(code: str, fault: str, tests: Sequence[str]) -> str:
    """Return the test that fails first, "a crash", or "" where all pass."""
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "emulated_gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--plant", code, fault, *tests],
        env=environment() | {"PYTHONPATH": f"{HERE.parent}:{HERE}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1) and done.returncode > 0:
        raise SystemExit(done.stdout + done.stderr)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" - ")[0].partition("::")[2]
    return "a crash" if done.returncode else ""


def main() -> int:
    """Print who catches each fault, and return how many nobody does."""
    faults = [(each, SERIAL) for each in FAULTS.items()]
    faults += [(each, MOVES) for each in FAULTS_OF_MOVES.items()]
    missed = 0
    for (what, (code, fault)), tests in faults:
        found = caught_by(code, fault, tests)
        missed += not found
        print(f"{what}: {found or 'NOBODY'}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults are caught")
    return missed


if __name__ == "__main__":
    sys.exit(main())
