"""Samples a second that many workers would train on, by compressor, over links of several speeds.

A worker computes a batch, then all average their gradients: the time of a step is the sum of both,
nothing overlaps. Computation is measured once, or given. What the averaging takes is predicted
from the collectives that each compressor calls for the network's layers.
Source: the performance model of Wen et al.: TernGrad, NIPS 2017, section 5, with other terms.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .. import store
from ..collectives.method import Machine, as_machine
from ..collectives.schedules import SCHEDULES
from ..compress import COMPRESSORS
from ..config import UserError
from .harness import check_positive, known, parse_counts, parse_names
from .networks import NETWORKS, Network
from .traffic import Call, calls_of, price

DENSE = "none"  # the compressor that sends float32
MATRIX = 1536  # rows and columns of the product that is measured
MEASURED_S = 0.5
MARKERS = "os^Dv<>pPX*hd"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--network", default="resnet50", help=", ".join(NETWORKS))
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(COMPRESSORS),
        metavar="NAME",
        help="compressors, apart by spaces or commas (default: all)",
    )
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker (default 32)")
    parser.add_argument(
        "--workers", default="1,2,4,8,16,32,64,128,256,512", help="comma-separated numbers"
    )
    parser.add_argument("--links", default="1,10,100,400", help="Gb/s, comma-separated")
    compute = parser.add_mutually_exclusive_group()
    compute.add_argument("--rate", type=float, help="samples/s of one worker, as you measured")
    compute.add_argument(
        "--tflops", type=float, help="of one worker in training; by default measured here"
    )
    parser.add_argument(
        "--machine", type=Path, metavar="MACHINE.toml", help="other times, written by bench fit"
    )
    parser.add_argument(
        "--algorithms", default="ring,rhd", help="an all-reduce takes the fastest of these"
    )
    parser.add_argument("--bucket-mib", type=float, default=25.0, help="as of a job (default 25)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the figures")


@dataclass(frozen=True)
class Model:
    """What the figures rest on.

    compute_s: of a worker's batch; calls: the collectives of a step, by compressor
    """

    network: Network
    batch: int
    compute_s: float
    calls: Mapping[str, Sequence[Call]]
    algorithms: Sequence[str]

    def step(self, name: str, workers: int, machine: Machine) -> tuple[float, float]:
        """Return the time of communication in s, and the bytes that leave a worker."""
        prices = [price(machine, call, workers, self.algorithms) for call in self.calls[name]]
        return math.fsum(time_s for time_s, _ in prices), math.fsum(sent for _, sent in prices)

    def rate(self, name: str, workers: int, machine: Machine) -> float:
        """Return the samples a second of all workers."""
        time_s = self.compute_s + self.step(name, workers, machine)[0]
        return workers * self.batch / time_s


def measured_flops() -> float:
    """Return the operations a second of this machine's float32 matrix products."""
    a = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    times: list[float] = []
    while sum(times) < MEASURED_S:
        start = perf_counter()
        a @ a
        times.append(perf_counter() - start)
    return 2 * MATRIX**3 / float(np.median(times))


def run(arguments: argparse.Namespace) -> None:
    """Print what the figures rest on, a table for each speed of links, and draw them."""
    given = _checked(arguments)
    network: Network = NETWORKS[arguments.network]()
    if arguments.rate:
        compute_s, source = arguments.batch / arguments.rate, "given"
    else:
        flops, source = 1e12 * (arguments.tflops or 0), "of the TFLOP/s that are given"
        if not flops:
            flops, source = measured_flops(), "of matrix products measured here"
        compute_s = arguments.batch * network.flop / flops
    calls = {
        name: calls_of(COMPRESSORS[name](), network.bucket, arguments.bucket_mib)
        for name in given["methods"]
    }
    model = Model(network, arguments.batch, compute_s, calls, given["algorithms"])
    machine = as_machine(arguments.machine)
    print("\n".join(_rests_on(arguments, model, machine, source, max(given["workers"]))))
    rates = {
        (link, name): [
            model.rate(name, p, replace(machine, beta_s=8e-9 / link)) for p in given["workers"]
        ]
        for link in given["links"]
        for name in calls
    }
    for link in given["links"]:
        print("\n".join(_table(link, given["workers"], rates, network.sample)))
    if arguments.png:
        draw(
            arguments.png,
            f"{arguments.network}, {model.batch} {network.sample} a worker",
            given["workers"],
            rates,
            model,
        )
        print(f"wrote {arguments.png}")


def _checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the lists that the options name. Raises UserError."""
    check_positive(arguments, "batch")
    parse_names("--network", arguments.network, known(NETWORKS))
    for option in ("rate", "tflops", "bucket_mib"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{option.replace('_', '-')} {value:g}: must be above 0, and finite")
    try:
        links = [float(text) for text in arguments.links.split(",")]
    except ValueError:
        links = [0.0]
    if not all(0 < link < math.inf for link in links):
        raise UserError(f"--links {arguments.links}: must be numbers above 0, in Gb/s")
    if arguments.png and not os.access(arguments.png.absolute().parent, os.W_OK):
        raise UserError(f"--png {arguments.png}: its directory cannot be written to")
    methods = parse_names("--methods", ",".join(arguments.methods), known(COMPRESSORS))
    algorithms = parse_names("--algorithms", arguments.algorithms, known(SCHEDULES))
    if not methods or not algorithms:
        raise UserError("--methods, --algorithms: must name one at least")
    return {
        "links": links,
        "methods": methods,
        "algorithms": algorithms,
        "workers": parse_counts("--workers", arguments.workers),
    }


def _rests_on(
    arguments: argparse.Namespace, model: Model, machine: Machine, source: str, most: int
) -> list[str]:
    """Return what the figures rest on: assumptions, and for each compressor what it sends."""
    network = model.network
    times = arguments.machine or "round figures for a cluster, measured nowhere"
    dense = sum(call.size_bytes for call in model.calls.get(DENSE, ())) or 4 * network.parameters
    lines = [
        f"{arguments.network}: {network.parameters:,} parameters in {len(network.layers)} layers, "
        f"{network.flop / 1e9:.4g} GFLOP for a training step of one of its {network.sample}",
        f"computation: {1e3 * model.compute_s:.4g} ms for {model.batch} {network.sample}, "
        f"{model.batch / model.compute_s:.4g} {network.sample}/s of a worker, {source}",
        "predicted, not measured; computation and communication do not overlap; links alike, no "
        "contention; methods with default options",
        f"not in it: selecting, and decoding what an all-gather brings; times: {times}; an "
        f"all-reduce takes the fastest of {', '.join(model.algorithms)}",
        "payloads counted on 4 ranks with random gradients of widely spread magnitudes",
    ]
    heads = f"{'method':>12} {'calls':>6} {'payload(MB)':>12} {'of float32':>10} {'bits/value':>10}"
    rows = [f"{heads} {f'sent by a worker of {most}(MB)':>28}"]
    for name, calls in model.calls.items():
        size = math.fsum(call.size_bytes for call in calls)
        sent = model.step(name, most, machine)[1]
        rows.append(
            f"{name:>12} {len(calls):>6} {size / 1e6:>12.4g} {size / dense:>10.2%} "
            f"{8 * size / network.parameters:>10.3g} {sent / 1e6:>28.4g}"
        )
    return [f"# {line}" for line in [*lines, *rows]]


def _table(
    link: float, workers: Sequence[int], rates: Mapping[tuple[float, str], list[float]], sample: str
) -> list[str]:
    """Return the table of one speed of links."""
    rows = [f"# {sample}/s by workers, links of {link:g} Gb/s"]
    rows.append(f"# {'method':>12} " + " ".join(f"{count:>9}" for count in workers))
    for (speed, name), each in rates.items():
        if speed == link:
            rows.append(f"  {name:>12} " + " ".join(f"{rate:>9.4g}" for rate in each))
    return rows


def draw(
    path: Path,
    title: str,
    workers: Sequence[int],
    rates: Mapping[tuple[float, str], list[float]],
    model: Model,
) -> None:
    """Draw samples a second against workers, a panel for each speed of links."""
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(link for link, _ in rates))
    figure = Figure(figsize=(4.2 * len(links), 5.2), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    one = model.batch / model.compute_s
    for link, axes in zip(links, panels, strict=True):
        axes.plot(workers, [one * p for p in workers], color="0.6", linestyle=":", label="ideal")
        for i, name in enumerate(model.calls):
            marker, color = MARKERS[i % len(MARKERS)], f"C{i % 10}"
            style = "-" if i < 10 else "--"
            axes.plot(
                workers, rates[link, name], style, marker=marker, color=color, ms=4, label=name
            )
        axes.set(title=f"{link:g} Gb/s", xscale="log", yscale="log", xlabel="workers")
        axes.set_xticks(workers, map(str, workers), rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{model.network.sample}/s")
    figure.suptitle(title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8)
    with store.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:] or None)
