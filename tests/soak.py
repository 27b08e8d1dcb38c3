"""Random all-reduces against the simulator for a set time: make soak MINUTES=30.

Every process draws the same sizes (0 to 2**26), formats, algorithms, scalings, accumulations and
sub-communicators, compares the result with the simulation bit for bit, and watches its memory.
"""

from __future__ import annotations

import argparse
import resource
import time
import zlib

import numpy as np

from cpdhpc.comm import SCHEDULES, Allreduce, Loopback, World

WIRES = ("raw", "e4m3", "e5m2", "e3m0", "e2m1fn", "e4m3fn", "e5m6", "fp16", "bf16")
SCALINGS = ("none", "static:3", "aps", "tile")


def values(rng: np.random.Generator, n: int) -> np.ndarray:  # type: ignore[type-arg]
    """float32[n] over many binades, some zeros, some repeated."""
    block = min(n, 1 << 20)
    x = rng.standard_normal(block, np.float32) * np.exp2(rng.integers(-30, 5, block))
    x[rng.random(block) < 0.05] = 0
    return np.resize(x.astype(np.float32), n)


def draw(rng: np.random.Generator, size: int) -> tuple[int, int, Allreduce]:
    """Return how many ranks, how many values, and how to sum them."""
    ranks = int(rng.integers(1, size + 1))
    n = int(rng.choice([0, 1, 1023, 1024, 1025])) if rng.random() < 0.1 else 0
    n = n or int(2 ** rng.uniform(0, 26 if rng.random() < 0.1 else 20))
    while True:
        algorithm = str(rng.choice(list(SCHEDULES)))
        try:
            return (
                ranks,
                n,
                Allreduce(
                    str(rng.choice(WIRES)),
                    algorithm,
                    str(rng.choice(SCALINGS)),
                    str(rng.choice(SCHEDULES[algorithm].accumulates)),
                    op=str(rng.choice(["sum", "mean"])),  # type: ignore[arg-type]
                    rounding=str(rng.choice(["nearest", "stochastic"])),  # type: ignore[arg-type]
                    seed=int(rng.integers(1 << 30)),
                ),
            )
        except ValueError:
            continue


def main() -> None:
    """Run until the time is over; end the job at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    world = World(timeout_s=300)
    from mpi4py import MPI

    worlds = {p: World(MPI.COMM_WORLD.Split(world.rank < p, world.rank)) for p in range(1, 5)}
    rng = np.random.default_rng(arguments.seed)
    end_s, calls, total_bytes = time.monotonic() + 60 * arguments.minutes, 0, 0
    memory_mib = []
    while world.max(np.array([time.monotonic() < end_s], np.int64))[0]:
        ranks, n, method = draw(rng, world.size)
        seed = int(rng.integers(1 << 30))
        if world.rank < ranks:
            xs = [values(np.random.default_rng((seed, rank)), n) for rank in range(ranks)]
            got = method.run(worlds[ranks], [xs[world.rank]], iteration=calls).arrays[0]
            wanted = method.run(Loopback(ranks), xs, iteration=calls).arrays[0]
            if not np.array_equal(got.view(np.uint32), wanted.view(np.uint32)):
                world.abort(f"soak: call {calls}, {ranks} ranks, {n} values, {method}: differs")
            digest = zlib.crc32(got.tobytes())
            if len(set(worlds[ranks].gather(digest))) > 1:
                world.abort(f"soak: call {calls}: ranks differ")
        calls, total_bytes = calls + 1, total_bytes + 4 * n * ranks
        if calls % 200 == 0:
            memory_mib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
            if world.rank == 0:
                print(
                    f"{calls} calls, {total_bytes / 2**30:.1f} GiB, peak {memory_mib[-1]} MiB",
                    flush=True,
                )
    if world.rank == 0:
        print(f"soak: {calls} calls, {total_bytes / 2**30:.1f} GiB of float32, no difference")


if __name__ == "__main__":
    main()
