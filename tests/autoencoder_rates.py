"""How fast iterations of the autoencoder are, beside what the machine can do, in one run by turns.

    python tests/autoencoder_rates.py --batch 8 96
    mpirun -n 2 python tests/autoencoder_rates.py --batch 96

On one rank: its share of the rate of torch.mm, and how many times as long it takes as to read and
write weights and momentum. On more: how many times as fast they are as rank 0 alone, while the
others wait. Each figure is the median of rounds, of ratios within a round, with its quartiles.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cpdhpc.lab.autoencoder.job import load
from cpdhpc.lab.autoencoder.training import Stack, set_process
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

JOB = Path(__file__).parents[1] / "inputs" / "cots_throughput.toml"
SIDE = 1024  # of the matrices that torch.mm multiplies


def seconds(work: Callable[[], object]) -> float:
    """Return what a call takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(world: World, batch: int, rounds: int) -> None:
    """Print the figures of a batch. Collective."""
    settings = [f"train.batch={batch}", "train.threads=1", f"train.iterations={10**6}"]
    job = load(JOB, settings)
    set_process(world, job.train)
    images = job.data.load()
    split, alone = Stack(job, world, images), Stack(job, Loopback(), images)
    x, part = alone.batch(), split.batch()
    layer, square = alone.layers[0], torch.rand(SIDE, SIDE)
    product, found = torch.empty_like(square), defaultdict(list)
    for number in range(rounds + 2):
        if not world.process:
            one = alone.step(x).time_s
            mm = 2 * SIDE**3 / seconds(lambda: torch.mm(square, square, out=product))
            passes = seconds(lambda: (layer.weight.mul_(1), layer.momentum.mul_(1)))
        world.barrier()
        step = split.step(part)
        if number >= 2 and not world.process:  # in the first ones memory is made
            rate = layer.geometry.flop(batch) / one
            found["milliseconds on one rank"].append(1e3 * one)
            found["GFLOP/s"].append(rate / 1e9)
            found["of torch.mm's rate, %"].append(100 * rate / mm)
            found["times reading and writing weights and momentum"].append(one / passes)
            if world.ranks > 1:
                found[f"milliseconds on {world.ranks} ranks"].append(1e3 * step.time_s)
                found["times as fast"].append(one / step.time_s)
                found["in exchanges, %"].append(100 * step.exchange_s / step.time_s)
    for name, values in found.items():
        low, middle, high = np.percentile(values, [25, 50, 75])
        print(f"batch {batch:3}: {middle:8.2f} ({low:.2f} - {high:.2f}) {name}")


def main() -> None:
    """Measure every batch that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    world = World(timeout_s=600)
    for batch in given.batch:
        measure(world, batch, given.rounds)


if __name__ == "__main__":
    main()
