"""Prove that cpdhpc is right on this machine, on all ranks of mpirun, and measure how fast it is.

Prints the hardware and the libraries, compares kernels, collectives, windows and a training with
their specification, bit for bit, and times them beside copies and other libraries. If a check fails
or hangs, a line is printed, and the other checks continue. The exit status is 1 if anything is
wrong or a file cannot be written; an unexpected speed only prints a line. report shows the file,
and report --compare shows two of them side by side.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from ... import store
from ...lazy import to_install
from ...world.mpi import World
from ..kinds.flags import add_device
from ..kinds.printing import machine_line
from ..settings import check_file, options
from ..verify.pages import verify_report
from ..verify.results import KIND, Results
from ..verify.run import VerifyOptions, verify
from .report import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of verify."""
    add_device(parser)
    add = options(parser)
    add("--quick", "take 20 seconds instead of minutes")
    add("--out FILE.h5", "write all results", Path("verify.h5"), type=Path)
    add("--html FILE.html", "write one self-contained page", Path)
    add(
        "--limit SECONDS",
        "longest time of each check (default 120 if quick, else 480; on GPUs 240 more)",
        float,
    )


def run(arguments: argparse.Namespace, world: World) -> int:
    """Carry out all checks, print a line of each, and return the exit status. Collective."""
    world.on_first(lambda: _check_files(arguments))
    asked = VerifyOptions(
        arguments.out,
        arguments.device,
        arguments.quick,
        arguments.oversubscribe_gpus,
        arguments.limit,
    )
    machine = machine_line(world)
    if world.process == 0:
        print(f"verify: {machine}", flush=True)
    status, clean = verify(
        world, asked, partial(print, flush=True), partial(_write_page, arguments.html)
    )
    if not clean:  # MPI would wait for messages that never come
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _check_files(arguments: argparse.Namespace) -> None:
    check_file(arguments.out, "--out")
    store.check_target(arguments.out, KIND)
    if arguments.html is not None:
        check_file(arguments.html, "--html")


def _write_page(path: Path | None, results: Results) -> None:
    """Write the page, or print why there is none."""
    if path is None:
        return
    try:
        store.put(path, page([verify_report(results)]).encode())
        print(f"wrote {path}", flush=True)
    except ModuleNotFoundError as error:
        print(f"no page: {to_install(error, 'lab') or error}", flush=True)
