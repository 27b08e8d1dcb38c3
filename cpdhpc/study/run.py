"""Measure a study on this machine, batch after batch under mpirun, and collect what is finished."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .actions import study_of
from .batch import Batch, batches
from .case import Case
from .collect import collect
from .display import Display
from .folder import Folder, FolderError
from .launch import local_command
from .mark import read_mark
from .spec import Study
from .sweep import expand

SUMMARY = "measure all cases on this machine with mpirun, then collect"
LOOK_S = 0.2  # between two looks at a batch
GRACE_S = 60.0  # for a batch to write its checkpoint after Ctrl-C
INTERRUPTED = 130  # as a shell reports Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of run: none."""


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not finished; return 0 where all cases are finished, else 1, or 130."""
    study, folder = study_of(arguments)
    folder.freeze(study)
    return measure(study, folder)


def measure(study: Study, folder: Folder) -> int:
    """Run every batch with unfinished cases, collect, and return the exit status."""
    jobs = batches(study, expand(study).cases)
    _check_idle(folder, jobs)
    local = [job for job in jobs if job.nodes == 1]
    status = 0
    with _stoppable(), Display(sum(len(job.cases) for job in local)) as display:
        try:
            for job in local:
                _batch(study, folder, job, display)
        except KeyboardInterrupt:
            display.line("stopped; resume goes on from here")
            status = INTERRUPTED
    unfinished = [(job, _unfinished(folder, job.cases)) for job in jobs]
    for line in _reasons(folder, unfinished):
        print(line)
    if any(len(left) < len(job.cases) for job, left in unfinished):
        collect(study, folder)
    return status or (1 if any(left for _, left in unfinished) else 0)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C, until the end of the block."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _reasons(folder: Folder, unfinished: Sequence[tuple[Batch, list[Case]]]) -> Iterator[str]:
    """Yield why cases are not finished."""
    for job, cases in unfinished:
        if cases and job.nodes > 1:
            yield (
                f"batch {job.number}: {len(cases)} case(s) left out: it needs {job.nodes} nodes, "
                "and this machine is one"
            )
            continue
        for case in cases:
            reason = folder.failure(case) or "not measured"
            yield f"batch {job.number}: {case.id}: {reason}"


def _check_idle(folder: Folder, jobs: Sequence[Batch]) -> None:
    """Raise FolderError where another run measures here."""
    for job in jobs:
        mark = read_mark(folder.mark_file(job.number))
        if mark is not None and mark.alive():
            raise FolderError(
                f"{folder.path}: batch {job.number} is being measured by process {mark.pid}"
            )


def _unfinished(folder: Folder, cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if not folder.finished(case)]


def _batch(study: Study, folder: Folder, job: Batch, display: Display) -> None:
    """Run a batch, and again where it fails and the study allows."""
    todo = _unfinished(folder, job.cases)
    display.start(f"batch {job.number}, {job.ranks} rank(s)", len(job.cases) - len(todo))
    for _ in range(1 + study.run.retries):
        if not todo:
            return
        log = folder.log_file(job.number)
        before = log.stat().st_size if log.exists() else 0
        status = _launch(folder, job, todo, display)
        todo = _unfinished(folder, job.cases)
        if todo:
            display.line(
                f"batch {job.number}: status {status}, {len(todo)} case(s) left: see {log}"
            )
            for line in _errors(log, before):
                display.line(line)


def _errors(log: Path, start: int) -> list[str]:
    """Return what a batch says that the user can mend, the last of it, from a place in its log."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    return [line for line in lines if line.startswith("cpdhpc: error:")][-1:]


def _launch(folder: Folder, job: Batch, todo: list[Case], display: Display) -> int:
    """Run a batch once under mpirun and return its exit status."""
    prefix, environment = local_command(job.ranks)
    command = [*prefix, sys.executable, "-m", "cpdhpc", "batch", str(folder.path), str(job.number)]
    with folder.log_file(job.number).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C would end the ranks at once
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_S)
                todo = display.look(folder, todo)
        except KeyboardInterrupt:
            _stop(process)
            raise
    display.look(folder, todo)
    return process.returncode


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the ranks to write what they have; end them where they take too long."""
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
