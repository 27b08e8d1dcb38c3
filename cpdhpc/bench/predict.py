"""Predicted times of all-reduces on many ranks of a machine that bench fit has measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..comm.cost import Prediction, predict
from ..comm.machine import MachineFile, read_machine
from ..comm.method import AUTO
from ..config import UserError
from .allreduce import add_choices, parse_methods
from .options import check_positive, parse_sizes

SUMMARY = "predicted times on any number of ranks, from a file of bench fit; needs no MPI"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("machine", type=Path, metavar="MACHINE.toml", help="written by bench fit")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, help="for the steps of hier (default 1)"
    )
    add_choices(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print a table of predictions, and in words what they rest on."""
    check_positive(arguments, "ranks", "ranks_per_node")
    file = read_machine(arguments.machine)
    sizes = parse_sizes(arguments.sizes)
    methods, skipped = parse_methods(arguments, None)
    methods = [method for method in methods if method.algorithm != AUTO]
    if not methods:
        raise UserError("--algorithms auto: is the best of the others: name those")
    nodes = tuple(rank // arguments.ranks_per_node for rank in range(arguments.ranks))
    found = {
        (size, method): predict(file.machine, method, nodes, size // 4)
        for size in sizes
        for method in methods
    }
    print("\n".join(f"# {text}" for text in rests_on(file, arguments, list(found.values()))))
    for text in skipped:
        print(f"# left out: {text}")
    print(
        f"# {'size(B)':>11} {'algorithm':>9} {'wire':>6} {'scaling':>9} {'accumulate':>10} "
        f"{'time(us)':>12} {'algbw(GB/s)':>11} {'wire bytes':>13}  fastest"
    )
    for (size, method), prediction in found.items():
        packed = method.fmt is not None
        best = min(each.time_s for (at, _), each in found.items() if at == size)
        print(
            f"  {size:>11} {method.algorithm:>9} {method.wire!s:>6} "
            f"{method.scaling if packed else '-':>9} "
            f"{method.accumulating if packed else 'float32':>10} {1e6 * prediction.time_s:>12.1f} "
            f"{size / prediction.time_s / 1e9:>11.3f} {prediction.wire_bytes:>13} "
            f" {'*' if prediction.time_s == best else ''}".rstrip()
        )


def rests_on(
    file: MachineFile, arguments: argparse.Namespace, predictions: list[Prediction]
) -> list[str]:
    """Return what the predictions rest on."""
    fit = file.fit
    where = (
        f"fitted on {fit['ranks']} ranks of {fit['processor']} ({fit['hosts']}) on {fit['date']}"
        if {"ranks", "processor", "hosts", "date"} <= fit.keys()
        else "of a file that does not say where its times come from"
    )
    one = any(each.walked == 1 for each in predictions) and arguments.ranks > 1
    return [
        f"predicted for {arguments.ranks} ranks, not measured; times {where}",
        "assumed: links alike, inside nodes and between; ranks alike, on cores of their own; no "
        "contention, no noise",
        "all ranks' steps are walked"
        + ("; where all ranks do the same, those of one that stands for all" if one else ""),
    ]
