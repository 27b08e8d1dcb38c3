"""Faults planted in the CUDA kernels: does a test on the CPU notice each?

Each is compiled into the kernels, and the tests of emulated_gpu run until one fails.
"""

from __future__ import annotations

import subprocess
import sys
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
    "sums beyond the end are kept": (
        "if (n == CPD_TILE) return;",
        "return;",
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


def caught_by(code: str, fault: str) -> str:
    """Return the test that fails first, "a crash", or "" where all pass."""
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "emulated_gpu", "-m"]
    command = [sys.executable, "-m", "pytest", *options, "not slow", "--plant", code, fault]
    done = subprocess.run(
        [*command, "-k", "gpu or simulated", *map(str, TESTS)],
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
    missed = 0
    for what, (code, fault) in FAULTS.items():
        found = caught_by(code, fault)
        missed += not found
        print(f"{what}: {found or 'NOBODY'}", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults are caught")
    return missed


if __name__ == "__main__":
    sys.exit(main())
