"""Runs of a program: it is built, started and watched, and its metrics are read."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ... import ordinary, store
from ...config import UserError, suggest
from ...whole_files import open_own, sealed_json, unsealed_json
from .. import binding
from ..claim import ClaimError, alone
from ..schedulers import facts
from ..signals import Caught, Interrupted
from ..study_data import Array, Case, Outcomes, Result
from ..study_data.study_file import METRIC, WALL
from . import command_job
from .base import BEFORE, MeasuredStudy, Measuring

if TYPE_CHECKING:
    from .place import JobRanks, Launch

T = TypeVar("T")
LOOK_S = 0.2  # between two looks for signals
END_S = 10.0  # for a program to end after SIGTERM
BUILD_S = 7200.0  # for a build, and for the wait for that of another batch
PROBE_S = 300.0  # for a launcher to start ranks that do nothing
RULE = "-----"
LINES = 5  # that are shown of a failed run, its last
GUARD = "guard"
SCRIPT, OUTPUT, ERRORS, FILES = "run.sh", "output.txt", "errors.txt", "files"


class RunFailed(UserError):
    """A run failed, or cannot be started."""


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process. status: None if it was ended because it took too long."""

    status: int | None
    time_s: float


# $0 is a time in s. After the name in a stat are state, parent, group, session.
GUARDING = """
while read line; do group=$line; done
[ -n "$group" ] || exit 0
kill -s TERM -- "$group" 2>/dev/null
sleep "$0"
for stat in /proc/[0-9]*/stat; do
    read line <"$stat" || continue
    set -- ${line##*)}
    [ "$4" != "${group#-}" ] || { pid=${stat#/proc/}; kill -s KILL "${pid%/stat}"; }
done 2>/dev/null
"""


class ProgramGuard:
    """A process that ends a program if its batch dies, even by SIGKILL: that closes a pipe."""

    def __init__(self) -> None:
        command = ["/bin/sh", "-c", GUARDING, f"{END_S:g}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self, group: int | None, launched: bool = False) -> None:
        """Let it end this group of processes, None for none, if the batch dies. See _end."""
        assert self._process.stdin is not None
        first = "" if group is None else f"{group}" if launched else f"-{group}"
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{first}\n")
            self._process.stdin.flush()


def run(
    command: Sequence[str],
    directory: Path,
    outputs: tuple[Path, Path],
    timeout_s: float,
    caught: Caught,
    environment: Mapping[str, str],
    guard: ProgramGuard,
    launched: bool = False,
) -> ProcessEnd:
    """Run a command to its end, or for a time.

    outputs: files of its output, and of its errors; launched: whether it begins with a launcher
    Raises RunFailed if it cannot be started, Interrupted at a signal, once it has ended.
    """
    if caught.number:
        raise Interrupted(caught.number)
    with (
        open(outputs[0], "wb", opener=open_own) as out,
        open(outputs[1], "ab", opener=open_own) as err,
    ):
        began_s = time.perf_counter()
        try:
            process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RunFailed(f"{command[0]}: cannot be started: {error.strerror}") from None
    guard.watch(process.pid, launched)
    took_s: list[float] = []

    def wait() -> None:  # in a thread, as a wait with a time-out looks only every 50 ms
        process.wait()
        took_s.append(time.perf_counter() - began_s)

    waiting = threading.Thread(target=wait, name="run", daemon=True)
    waiting.start()
    try:
        while waiting.is_alive():
            waiting.join(LOOK_S)
            late = time.perf_counter() - began_s > timeout_s
            if waiting.is_alive() and (late or caught.number):
                _end(process, waiting, launched)
                if not caught.number:
                    return ProcessEnd(None, timeout_s)
                raise Interrupted(caught.number)
    finally:
        guard.watch(None)
    return ProcessEnd(process.returncode, took_s[0])


def _end(process: subprocess.Popen[bytes], waiting: threading.Thread, launched: bool) -> None:
    """End a process and those of its session; a launcher gets SIGTERM alone, to end its ranks.

    Processes by which it reaches other nodes, as srun of mpirun, must not end before these ranks.
    Open MPI 5 under Slurm now and then ends before the ranks of its own node, which are in its
    session.
    """
    with suppress(ProcessLookupError):
        (os.kill if launched else os.killpg)(process.pid, signal.SIGTERM)
    waiting.join(END_S)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # ended since
            if int(path.read_text().rpartition(")")[2].split()[3]) == process.pid:
                os.kill(int(path.parent.name), signal.SIGKILL)
    waiting.join()


def _failure(ended: ProcessEnd, timeout_s: float) -> str:
    """Return how a process failed, "" if it did not."""
    if ended.status is None:
        return f"is ended after timeout_s = {timeout_s:g} s"
    if ended.status < 0:
        return f"died of {signal.Signals(-ended.status).name}"
    return f"exit status {ended.status}" if ended.status else ""


def _last_lines(*paths: Path) -> str:
    """Return the last lines of the first file that has some, as text.

    Lines from the first rule on are left out: there Open MPI says that a rank has failed.
    """
    for path in paths:
        with suppress(OSError):
            lines = [x.strip() for x in ordinary.text(path, "replace").splitlines() if x.strip()]
            own = list(takewhile(lambda line: not line.startswith(RULE), lines))
            own = own or [line for line in lines if not line.startswith(RULE)]
            if own:
                return f"{path.name} ends with: {' | '.join(own[-LINES:])}"
    return "it printed nothing"


def build(
    command: command_job.ProgramCommand, folder: Path, caught: Caught, guard: ProgramGuard
) -> Path:
    """Return the place of a program's build, which is built once per folder and sort of machine.

    Raises RunFailed if it fails, Interrupted at a signal.
    """
    from ..provenance import processor

    machine = (processor(), platform.machine(), *platform.libc_ver())
    text = "\n".join(("set -e", *command.build))
    digest = hashlib.sha256(json.dumps([command.directory, text, *machine]).encode()).hexdigest()
    place = folder / "builds" / digest[:16]
    if not command.build or _is_built(place):
        return place
    try:
        (place / command_job.BUILD).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailed(f"{place}: cannot be written: {error.strerror}") from None
    end_s = time.monotonic() + BUILD_S
    while True:
        try:
            with alone(place / "build.lock", "build", print):
                if not _is_built(place):
                    _build(command, text, place, caught, guard)
                return place
        except ClaimError:
            if _is_built(place):
                return place
            if time.monotonic() > end_s:
                raise
        if caught.number:
            raise Interrupted(caught.number)
        time.sleep(LOOK_S)


def _is_built(place: Path) -> bool:
    try:
        return bool(unsealed_json(ordinary.text(place / "built.json"))["built"])
    except (OSError, ValueError, KeyError):
        return False


def _build(
    command: command_job.ProgramCommand, text: str, place: Path, caught: Caught, guard: ProgramGuard
) -> None:
    outputs = place / OUTPUT, place / ERRORS
    for path in outputs:
        path.unlink(missing_ok=True)
    environment = os.environ | {"CPDHPC_BUILD": str(place / command_job.BUILD)}
    ended = run(
        ["bash", "-c", text], Path(command.directory), outputs, BUILD_S, caught, environment, guard
    )
    if wrong := _failure(ended, BUILD_S):
        raise RunFailed(f"build: {wrong}: {_last_lines(*outputs[::-1])}: see {place}")
    store.put(place / "built.json", sealed_json({"built": True, "commands": text}))


def probed(launch: Launch, case: Case, directory: Path, caught: Caught) -> dict[str, str]:
    """Return hosts and placement of a case's ranks, as each of them sees it.

    Raises RunFailed if the launcher starts other ranks than requested, or places them elsewhere.
    """
    before, environment = launch.command(case)
    outputs = directory / "ranks.txt", directory / "ranks_errors.txt"
    for path in outputs:
        path.unlink(missing_ok=True)
    script = str(Path(binding.__file__).resolve())
    command = [*before, sys.executable, "-I", "-S", script, case.seats[0]]
    guard = _once(launch, GUARD, ProgramGuard)
    ended = run(command, directory, outputs, PROBE_S, caught, environment, guard, True)
    if wrong := _failure(ended, PROBE_S):
        raise RunFailed(f"{launch.program}: {wrong}: {_last_lines(*outputs[::-1])}")
    seats = []
    for line in ordinary.text(outputs[0], "replace").splitlines():
        with suppress(ValueError):  # output of the launcher itself
            seats.append(json.loads(line))
    counts = Counter(each["host"] for each in seats)
    if len(seats) != case.ranks or {*counts.values()} != {case.ppn}:
        found = " + ".join(map(str, counts.values())) or "no"
        raise RunFailed(
            f"{launch.program}: has started {found} rank(s), by hosts; asked for were {case.ranks} "
            f"(nodes x ranks per node: {case.nodes} x {case.ppn})"
        )
    if wrong := binding.misplaced(seats, *case.seats):
        raise RunFailed(f"{launch.program}: {wrong}")
    for path in outputs:
        path.unlink(missing_ok=True)
    return {"hosts": " ".join(sorted(counts)), "placement": binding.said(seats)}


def _version(program: str) -> str:
    """Return the first line of a launcher's --version, "" if it has none."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((line.strip() for line in done.stdout.splitlines() if line.strip()), "")


class ProgramRuns(Measuring):
    """A case of a program: each repeat is a run of it."""

    def __init__(self, study: MeasuredStudy, case: Case, directory: Path) -> None:
        super().__init__(study, case, directory.resolve())
        job = command_job.job_of(study.job)
        self.command, self.metrics, self.deciding = job.command, job.metrics, job.deciding
        self.wall_s: list[float] = []
        self.is_warmup: list[bool] = []
        self.values: dict[str, list[list[float]]] = {name: [] for name in self.metrics}
        self.spent_s = 0.0
        self.energy_j: list[float] = []
        self.where: dict[str, str] = {}

    def visit(self, place: JobRanks, caught: Caught) -> None:
        """Run the program a few times. Raises RunFailed, Interrupted; see Measuring.visit."""
        measure = self.study.measure
        launch = place.launch
        assert launch is not None, "a batch of this kind has one"
        folders = self._folders(launch, caught)
        self._place(launch, folders, caught)
        left = measure.max_repeats - self.is_warmup.count(False)
        for i in range(measure.warmup + min(measure.block, left)):
            before_j = place.read_energy()
            self._run(launch, folders, caught)
            self.is_warmup.append(i < measure.warmup)
            if self.case.nodes == 1 and (used := place.energy_j(before_j)):
                self.energy_j.append(float(used["energy_j"]))
        self.spent_s = sum(self.wall_s)
        repeats = self.is_warmup.count(False)
        self.done = measure.is_over(repeats, self.spent_s, self._samples())

    def _samples(self) -> list[Array]:
        """Return the samples that decide: of metrics with a direction, else of the time."""
        names = self.deciding or [""]
        return [self._columns(name)[0][self._columns(name)[2] == 0] for name in names]

    def _columns(self, name: str) -> tuple[Array, Array, Array]:
        """Return value, run and is_warmup of each sample of a metric, "" for the wall time."""
        values = self.values[name] if name else [[each] for each in self.wall_s]
        runs = np.repeat(np.arange(len(values)), [len(each) for each in values])
        flags = np.array(self.is_warmup, np.uint8)
        return np.array([x for each in values for x in each], np.float64), runs, flags[runs]

    def _folders(self, launch: Launch, caught: Caught) -> dict[str, str]:
        """Return the values of {study} and {build}, once the program is built."""
        guard, folder = _once(launch, GUARD, ProgramGuard), self.directory.parent.parent
        place = _once(launch, command_job.BUILD, lambda: build(self.command, folder, caught, guard))
        return {
            command_job.STUDY: self.command.directory,
            command_job.BUILD: str(place / command_job.BUILD),
        }

    def _place(self, launch: Launch, folders: Mapping[str, str], caught: Caught) -> None:
        """Find out where the ranks of the case are, and which program it is. Raises RunFailed."""
        from ..provenance import processor, versions

        case = self.case
        self.directory.mkdir(parents=True, exist_ok=True)
        where = {"hosts": platform.node(), "placement": "started as it stands, by no launcher"}
        if self.command.launch:
            shape = case.nodes, case.ppn, *case.seats
            where = _once(launch, shape, lambda: probed(launch, case, self.directory, caught))
            where |= {"launcher": _once(launch, "version", lambda: _version(launch.program))}
        argv = tuple(command_job.words(self.command, case.all_factors, folders))
        program = _once(launch, argv, lambda: _program(self.command, argv, folders))
        for name, title in (("program", "SHA-256"), ("program_commit", "commit")):
            own = program.get(name, "")
            if own != (before := launch.kept.get(BEFORE, {}).get(name, own)):
                raise RunFailed(
                    f"the program differs from that of finished cases ({title} {own[:12] or 'none'}"
                    f", not {before[:12]}): choose another folder with --out"
                )
        self.where = {
            **where,
            "processor": processor(),
            "cores": str(os.cpu_count()),
            **program,
            "versions": json.dumps({k: versions()[k] for k in ("cpdhpc", "python")}),
            **facts(),
        }

    def _run(self, launch: Launch, folders: Mapping[str, str], caught: Caught) -> None:
        """Run the program once, in an empty working folder. Raises RunFailed, Interrupted."""
        case, command = self.case, self.command
        files = self._prepare(folders)
        before: list[str] = []
        environment: Mapping[str, str] = os.environ
        if command.launch:
            before, environment = launch.command(case)
        whole = [*before, "/bin/sh", str(self.directory / SCRIPT)]
        outputs = self.directory / OUTPUT, self.directory / ERRORS
        guard = _once(launch, GUARD, ProgramGuard)
        ended = run(
            whole, files, outputs, command.timeout_s, caught, environment, guard, command.launch
        )
        if wrong := _failure(ended, command.timeout_s):
            raise self._failed(f"{wrong}: {_last_lines(*outputs[::-1])}")
        text = "\n".join(ordinary.text(path, "replace") for path in outputs)
        if command.success and not re.search(command.success, text, re.MULTILINE):
            last = _last_lines(*outputs)
            raise self._failed(f"success = {command.success!r} is not in its output: {last}")
        for name, metric in self.metrics.items():
            try:
                found = taken(metric, numbers(metric, text, files))
            except RunFailed as error:
                raise self._failed(f"metrics.{name}: {error}: {_last_lines(*outputs)}") from None
            self.values[name].append(found)
        self.wall_s.append(ended.time_s)

    def _prepare(self, folders: Mapping[str, str]) -> Path:
        """Write the script of the ranks and the files from templates; return the working folder."""
        command, factors = self.command, self.case.all_factors
        given = command_job.variables(command, factors, folders)
        exports = [f"export {name}={shlex.quote(text)}" for name, text in given.items()]
        line = shlex.join(command_job.words(command, factors, folders))
        files = self.directory / FILES
        try:
            if files.exists():
                shutil.rmtree(files)
            for name in (OUTPUT, ERRORS):
                (self.directory / name).unlink(missing_ok=True)
            files.mkdir(parents=True)
            for made, text in command_job.rendered(command, factors).items():
                (files / made).parent.mkdir(parents=True, exist_ok=True)
                store.put(files / made, text)
            about = f"# What each rank of case {self.case.id} runs, in {FILES}."
            text = "\n".join(["#!/bin/sh", about, *exports, f"exec {line}", ""])
            store.put(self.directory / SCRIPT, text)
        except OSError as error:
            place = error.filename or self.directory
            raise RunFailed(f"{place}: cannot be written: {error.strerror}") from None
        return files.resolve()

    def _failed(self, wrong: str) -> RunFailed:
        return RunFailed(f"run {len(self.wall_s) + 1}: {wrong}: see {self.directory}")

    def result(self, place: JobRanks) -> Result:
        """Return the times of all runs, and the samples of all metrics."""
        times_s, _, flags = self._columns(self.command.time)
        series = {METRIC + name: self._series(name) for name in self.metrics}
        if name := self.command.time:
            times_s = times_s * command_job.TIME_UNITS[self.metrics[name].unit]
            series[METRIC + WALL] = self._series("")
        outcomes: Outcomes = {}
        if len(self.energy_j) == len(self.wall_s):
            outcomes["energy_j"] = float(np.mean(self.energy_j))
        if not self.command.keep:
            shutil.rmtree(self.directory, ignore_errors=True)
        return Result(np.stack([times_s] * 3, axis=1), flags, outcomes, self.where, series)

    def _series(self, name: str) -> dict[str, Array]:
        return dict(zip(("value", "run", "is_warmup"), self._columns(name), strict=True))


def _once(launch: Launch, key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of make, or raise its RunFailed; it is called once for all cases."""
    if key not in launch.kept:
        try:
            launch.kept[key] = make()
        except RunFailed as error:
            launch.kept[key] = error
    found = launch.kept[key]
    if isinstance(found, RunFailed):
        raise RunFailed(str(found))
    return found


def _program(
    command: command_job.ProgramCommand, argv: Sequence[str], folders: Mapping[str, str]
) -> dict[str, str]:
    """Return the hashes of a program's files, and the commits of their folders, if there are any.

    argv: the words of the case
    "program": hash of the files that argv names for all cases; "program_of_case": of those that it
    names by factors; "program_commit": commits, also that of the folder of the study file if the
    program is built there; "program_changes": there if files differ from a commit
    """
    from ..provenance import commit_of

    first = shutil.which(command.argv[0])
    named = [*([first] if first else []), *command_job.constant_words(command, folders)]
    fixed = _files(named)
    of_case = [path for path in _files(argv) if path not in fixed]
    build = [Path(command.directory)] * bool(command.build)
    places = dict.fromkeys([*(path.parent for path in (*fixed, *of_case)), *build])
    commits = [commit_of(place) for place in places]
    found = {
        "program": _digest(fixed),
        "program_of_case": _digest(of_case),
        "program_commit": " ".join(dict.fromkeys(name for name, _ in commits if name)),
        "program_changes": "not committed" * any(differs for _, differs in commits),
    }
    return {name: text for name, text in found.items() if text}


def _files(texts: Iterable[str]) -> list[Path]:
    """Return the files whose absolute paths are among some texts."""
    return [path for path in map(Path, texts) if path.is_absolute() and path.is_file()]


def _digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of the SHA-256 of files, "" for none."""
    digests = []
    for path in paths:
        with suppress(OSError):
            digests.append(hashlib.sha256(ordinary.content(path)).digest())
    return hashlib.sha256(b"".join(digests)).hexdigest() if digests else ""


def numbers(metric: command_job.RunMetric, text: str, files: Path) -> list[float]:
    """Return the values of a metric in the output and the files of a run. Raises RunFailed."""
    if metric.regex:
        found: list[Any] = [each[1] for each in re.finditer(metric.regex, text, re.MULTILINE)]
        source = f"regex = {metric.regex!r}"
    else:
        file, place = metric.place
        source = f"{file}:{place}"
        reader = _json if metric.json_ else _csv if metric.csv else _hdf5
        try:
            found = reader(files / file, place)
        except OSError as error:
            raise RunFailed(f"{file}: cannot be read: {error.strerror}") from None
        except (UserError, ValueError, csv.Error) as error:
            raise RunFailed(f"{source}: {error}") from None
    return [_number(each, source) for each in found]


def _number(given: Any, source: str) -> float:
    try:
        number = float("nan" if isinstance(given, bool | None) else given)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise RunFailed(f"{source} is {given!r}: should be a number")
    return number


def _json(path: Path, place: str) -> list[Any]:
    here = json.loads(ordinary.text(path))
    for part in place.split("."):
        if isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, dict) and part in here:
            here = here[part]
        else:
            known = f": {suggest(part, here)}" if isinstance(here, dict) else ""
            raise RunFailed(f"there is no {part}{known}")
    return here if isinstance(here, list) else [here]


def _csv(path: Path, place: str) -> list[Any]:
    text = StringIO(ordinary.text(path), newline="")
    rows = csv.DictReader(text, delimiter="\t" if path.suffix == ".tsv" else ",")
    if place not in (names := rows.fieldnames or []):
        raise RunFailed(f"there is no column {place}: {suggest(place, names)}")
    return [row[place] for row in rows]


def _hdf5(path: Path, place: str) -> list[Any]:
    values = np.asarray(store.read_box(path, place, ()))
    if values.dtype.kind not in "iuf":
        raise RunFailed(f"has values of type {values.dtype}")
    return list(values.ravel().tolist())


TAKE: dict[str, Callable[[list[float]], float]] = {
    "first": lambda found: found[0],
    "last": lambda found: found[-1],
    "min": min,
    "max": max,
    "sum": sum,
    "mean": lambda found: float(np.mean(found)),
    "median": lambda found: float(np.median(found)),
}


def taken(metric: command_job.RunMetric, found: list[float]) -> list[float]:
    """Return the samples among the values of a run. Raises RunFailed for none, or too many."""
    if not found:
        source = next(f"{key} = {text!r}" for key, text in metric.sources.items() if text)
        raise RunFailed(f"{source}: found nothing")
    if metric.take == "one" and len(found) > 1:
        raise RunFailed(
            f"has {len(found)} values in a run: take = 'all' makes each a repeat, "
            f"{', '.join(map(repr, TAKE))} take one"
        )
    return [TAKE[metric.take](found)] if metric.take in TAKE else found
