"""Measure a study on this machine, batch after batch under mpirun, and collect finished cases."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from ... import ordinary
from ...config import UserError
from ...whole_files import open_own
from ..claim import read_claim
from ..kinds.place import Launch
from ..schedulers.launchers import OWN_GPU
from ..signals import INTERRUPTED, Caught, catching
from ..study_data import Case
from ..train.progress import Display
from .cases import Batch, batches, expand
from .collect import collect
from .folder import EMPTY_LOG, Folder, FolderError
from .spec import Study

NAMES = ("mpirun", "mpiexec")


class LaunchError(UserError):
    """MPI programs cannot be started here."""


def launcher() -> str:
    """Return the path of the launcher: the first on PATH, else that beside this Python.

    Raises LaunchError if there is none.
    """
    for path in (None, str(Path(sys.executable).parent)):
        for name in NAMES:
            if found := shutil.which(name, path=path):
                return found
    raise LaunchError(f"study: neither {' nor '.join(NAMES)} is on PATH or beside {sys.executable}")


def is_open_mpi(path: str) -> bool:
    """Return whether a launcher is Open MPI's. Raises LaunchError if it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"study: {path} --version: {error}") from None
    return bool(re.search(r"open.mpi|open-mpi|prte", done.stdout + done.stderr, re.IGNORECASE))


def local_command(
    ranks: int, seats: tuple[str, str] = ("", "")
) -> tuple[list[str], dict[str, str]]:
    """Return the words that start a command on so many ranks here, and its environment.

    seats: how ranks are bound and distributed; by default they are not bound
    More ranks than cores are allowed, and root, which Open MPI refuses by default. If there are
    more ranks than cores, waiting ranks yield.
    """
    (bind, deal), path, environment = seats, launcher(), dict(os.environ)
    starter = list(OWN_GPU) if bind == "gpu" else []
    bind = "" if starter else bind
    crowded = ranks > (os.cpu_count() or 1)
    if not is_open_mpi(path):
        environment |= {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if crowded else {}
        words = ["-bind-to", bind] if bind else []
        words += ["-map-by", {"block": "core"}.get(deal, "socket")] if deal else []
        return [path, *words, "-n", str(ranks), *starter], environment
    environment |= {"OMPI_MCA_mpi_yield_when_idle": "1"} if crowded else {}
    if os.geteuid() == 0:
        for name in ("OMPI", "PRTE"):
            environment |= {f"{name}_ALLOW_RUN_AS_ROOT": "1"}
            environment |= {f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["--oversubscribe", "--bind-to", bind or "none"]
    words += ["--map-by", {"block": "core"}.get(deal, "package")] if deal else []
    return [path, *words, "-n", str(ranks), *starter], environment


def launch_of(words: str | None) -> Launch:
    """Return the launch of the programs of a batch.

    words: of a shell, before the program, with $ranks, $ppn (ranks per node) and $nodes; None: by
        the launcher of this machine
    """
    if words is None:
        here = cache(local_command)
        return Launch(lambda case: here(case.ranks, case.seats), launcher())

    def by(case: Case) -> tuple[list[str], dict[str, str]]:
        shape = f"ranks={case.ranks} ppn={case.ppn} nodes={case.nodes}"
        line = f'{shape}; {OWN_SESSION}; exec {words} "$@"'
        return ["/bin/sh", "-c", line, "sh"], dict(os.environ)

    return Launch(by, words.split()[0])


LOOK_S = 0.2  # between two looks at a batch
GRACE_S = 60.0  # for a batch to write its checkpoint after Ctrl-C
LOG_LINES = 15  # shown of a batch that ends without an error of cpdhpc: its launcher's reason
# Open MPI names its directory by its process number. A directory of another user, or of a launcher
# that was killed, ends a later launcher of that number (status 213). So each gets its own.
SESSIONS = "PRTE_MCA_prte_tmpdir_base"
# The same in a job, where the directory is that of each node: another one only if it is there.
OWN_SESSION = f'[ ! -e "${{TMPDIR:-/tmp}}/ompi.$$" ] || export {SESSIONS}="$(mktemp -d)"'
LOST_S = 30.0  # for a launcher to end after its ranks: Open MPI 5 now and then does not end
SEARCH_S = 5.0  # between two searches for ranks


def measure(study: Study, folder: Folder) -> int:
    """Run every batch with unfinished cases, collect, and return the exit status."""
    jobs = batches(study, expand(study).cases)
    _check_idle(folder, jobs)
    local = [job for job in jobs if job.nodes == 1]
    display = Display(True, 1)
    display.start("", sum(len(job.cases) for job in local), 0)
    with catching() as caught, display.bar:
        for job in local:
            if not caught.number:
                _batch(study, folder, job, display, caught)
        if caught.number:
            display.line("stopped; resume goes on from here")
    unfinished = [(job, _unfinished(folder, job.cases)) for job in jobs]
    for line in _reasons(folder, unfinished):
        print(line)
    if any(len(left) < len(job.cases) for job, left in unfinished):
        collect(study, folder)
    if caught.number:
        return INTERRUPTED
    return 1 if any(left for _, left in unfinished) else 0


def _reasons(folder: Folder, unfinished: Sequence[tuple[Batch, list[Case]]]) -> Iterator[str]:
    """Yield why cases are not finished."""
    for job, cases in unfinished:
        if cases and job.nodes > 1:
            yield (
                f"batch {job.number}: {len(cases)} case(s) left out: it needs {job.nodes} nodes, "
                f"and this machine is one (ppn is {job.ranks // job.nodes}: ranks on a node)"
            )
            continue
        for case in cases:
            reason = folder.failure(case) or "not measured"
            yield f"batch {job.number}: {case.id}: {reason}"


def _check_idle(folder: Folder, jobs: Sequence[Batch]) -> None:
    """Raise FolderError if another run measures in the folder."""
    for job in jobs:
        claim = read_claim(folder.claim_file(job.number))
        if claim is not None and claim.alive():
            raise FolderError(
                f"{folder.path}: batch {job.number} is being measured by {claim}: wait for it, "
                f"or end it there (kill {claim.pid}); then study resume"
            )


def _unfinished(folder: Folder, cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if not folder.finished(case)]


def _batch(study: Study, folder: Folder, job: Batch, display: Display, caught: Caught) -> None:
    """Run a batch, and again if it fails and the study has retries, until a signal comes."""
    todo, text = _unfinished(folder, job.cases), f"batch {job.number}, {job.ranks} rank(s)"
    finished = len(job.cases) - len(todo)
    display.step(finished, text)
    if not display.has_bar:
        display.line(text + (f", {finished} case(s) finished already" if finished else ""))
    for _ in range(1 + study.run.retries):
        if not todo:
            return
        log = folder.log_file(job.number)
        before = log.stat().st_size if log.exists() else 0
        status = _launch(study, folder, job, todo, display, caught)
        if caught.number:
            return
        todo = _unfinished(folder, job.cases)
        if todo:
            display.line(
                f"batch {job.number}: status {status}, {len(todo)} case(s) left: see {log}"
            )
            known = all(folder.failure(case) for case in todo)
            for line in () if known else _last_words(log, before):
                display.line(line)


def _looked(folder: Folder, todo: Sequence[Case], display: Display) -> list[Case]:
    """Return the cases that are still unfinished, and count the others."""
    left = _unfinished(folder, todo)
    display.step(len(todo) - len(left))
    return left


def _last_words(log: Path, start: int) -> list[str]:
    """Return a batch's last error, else its last lines, else that its log is empty.

    start: the first byte of the log that is read
    """
    lines = ordinary.content(log)[start:].decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("cpdhpc: error:")]
    last = [line for line in lines if line.strip()][-LOG_LINES:]
    return errors[-1:] or last or [f"{log}: {EMPTY_LOG}"]


def _launch(
    study: Study, folder: Folder, job: Batch, todo: list[Case], display: Display, caught: Caught
) -> int:
    """Run a batch once, under mpirun unless its kind starts ranks; return its exit status."""
    name, prefix, environment = "programs", list[str](), dict(os.environ)
    if not study.of_kind.starts_ranks:
        name, (prefix, environment) = "batch", local_command(job.ranks, job.seats)
    command = [*prefix, sys.executable, "-m", "cpdhpc", name, str(folder.path), str(job.number)]
    path = folder.log_file(job.number)
    with ExitStack() as opened:
        with _writable(str(path)):
            log = opened.enter_context(open(path, "ab", opener=open_own))
        with _writable("directory for temporary files"):
            sessions = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="cpdhpc-", ignore_cleanup_errors=True)
            )
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={SESSIONS: sessions} | environment,
            start_new_session=True,  # a terminal's Ctrl-C would end the ranks at once
        )
        watch = LauncherWatch(command[len(prefix) :])
        while process.poll() is None and not caught.number:
            time.sleep(LOOK_S)
            todo = _looked(folder, todo, display)
            if watch.lost():
                display.line(f"batch {job.number}: {command[0]} outlives its ranks: is ended")
                process.kill()
                process.wait()
        if caught.number:
            _stop(process, folder.claim_file(job.number), caught)
    _looked(folder, todo, display)
    return process.returncode


class LauncherWatch:
    """Finds out whether a launcher goes on after its ranks have ended.

    command: of each rank, with its arguments; without /proc no rank is ever found
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._line = b"".join(word.encode() + b"\0" for word in command)
        self._search_s = self._seen_s = 0.0

    def lost(self) -> bool:
        """Return whether ranks were found, and none in the last LOST_S."""
        now_s = time.monotonic()
        if now_s >= self._search_s:
            self._search_s = now_s + min(SEARCH_S, LOST_S)
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):  # ended since, or another user's
                    if path.read_bytes() == self._line:
                        self._seen_s = now_s
        return bool(self._seen_s) and now_s - self._seen_s > LOST_S


@contextmanager
def _writable(what: str) -> Iterator[None]:
    """Raise FolderError for an OSError, for example on a full disk."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{what}: cannot be written: {error.strerror or error}") from None


def _stop(process: subprocess.Popen[bytes], mark: Path, caught: Caught) -> None:
    """Ask ranks that measure for a checkpoint; end ranks that have not begun, or take too long."""
    claim = read_claim(mark)
    if claim is not None and claim.alive():
        process.send_signal(signal.SIGUSR1)
        if _ends(process, caught):
            return
    process.terminate()
    if not _ends(process, caught):
        process.kill()
        process.wait()


def _ends(process: subprocess.Popen[bytes], caught: Caught) -> bool:
    """Return whether a process ends in time, and before another signal."""
    asked, caught.number = caught.number, 0
    end_s = time.monotonic() + GRACE_S
    while process.poll() is None and not caught.number and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    caught.number = caught.number or asked
    return process.returncode is not None
