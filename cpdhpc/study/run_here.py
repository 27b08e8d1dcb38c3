"""Measure a study on this machine, batch after batch under mpirun, and collect what is finished."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..claim import read_claim
from ..config import UserError
from .cases import Batch, Case, batches, expand
from .collect import collect
from .folder import Folder, FolderError
from .spec import Study

NAMES = ("mpirun", "mpiexec")


class LaunchError(UserError):
    """MPI programs cannot be started here."""


def launcher() -> str:
    """Return the path of the launcher: the first on PATH, else that beside this Python.

    Raises LaunchError where there is none.
    """
    beside = str(Path(sys.executable).parent)
    for path in (None, beside):
        for name in NAMES:
            found = shutil.which(name, path=path)
            if found:
                return found
    raise LaunchError(f"study: neither {' nor '.join(NAMES)} is on PATH or beside {sys.executable}")


def is_open_mpi(path: str) -> bool:
    """Return whether a launcher is Open MPI's. Raises LaunchError where it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"study: {path} --version: {error}") from None
    return bool(re.search(r"open.mpi|open-mpi|prte", done.stdout + done.stderr, re.IGNORECASE))


def local_command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return what to put before a command that runs on so many ranks here, and its environment.

    Allows more ranks than cores, and root, both of which Open MPI refuses unless told; waiting
    ranks give way where ranks share a core.
    """
    path, environment = launcher(), dict(os.environ)
    crowded = ranks > (os.cpu_count() or 1)
    if not is_open_mpi(path):
        environment |= {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if crowded else {}
        return [path, "-n", str(ranks)], environment
    environment |= {"OMPI_MCA_mpi_yield_when_idle": "1"} if crowded else {}
    if os.geteuid() == 0:
        for name in ("OMPI", "PRTE"):
            environment |= {f"{name}_ALLOW_RUN_AS_ROOT": "1"}
            environment |= {f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [path, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)], environment


class Display:
    """The progress of so many cases."""

    def __init__(self, cases: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=cases)

    def __enter__(self) -> Self:
        """Show the bar until the end of the block."""
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self.bar.stop()

    def start(self, text: str, finished: int) -> None:
        """Begin a batch, some of whose cases are finished already."""
        self.bar.update(self.task, description=text)
        self.bar.advance(self.task, finished)
        if self.bar.disable:
            known = f", {finished} case(s) finished already" if finished else ""
            self.line(f"{text}{known}")

    def update(self, folder: Folder, todo: Sequence[Case]) -> list[Case]:
        """Return those of the cases that are not finished yet."""
        left = [case for case in todo if not folder.finished(case)]
        self.bar.advance(self.task, len(todo) - len(left))
        return left

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)


LOOK_S = 0.2  # between two looks at a batch
GRACE_S = 60.0  # for a batch to write its checkpoint after Ctrl-C
INTERRUPTED = 130  # as a shell reports Ctrl-C


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
        claim = read_claim(folder.claim_file(job.number))
        if claim is not None and claim.alive():
            raise FolderError(
                f"{folder.path}: batch {job.number} is being measured by process {claim.pid}"
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
                todo = display.update(folder, todo)
        except KeyboardInterrupt:
            _stop(process)
            raise
    display.update(folder, todo)
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
