"""Measurements on ranks: the cases of a batch, visit by visit, and the points of a benchmark."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import numpy as np

from ... import store
from ...collectives.checks import NonFiniteGradient
from ...config import UserError
from ...store import StoreError
from ...world.cores import own_cores
from ...world.mpi import World, library_version
from ...world.ranks import Loopback, Ranks
from .. import binding
from ..claim import Claim, alone
from ..kinds.base import BEFORE, Calls, Measure, Measuring
from ..kinds.place import JobRanks, Launch, environment
from ..kinds.timing import FURTHER, BenchmarkResult, BenchPoint, interleave_ranks
from ..provenance import difference, hosts, machine
from ..schedulers import current
from ..signals import Caught, Interrupted, catching
from ..study_data import Array, Case, Factor, Outcomes, Result, over_ranks
from ..study_data.study_file import read_environment, write_result
from .cases import Batch, batches, expand, make_case
from .collect import write_study
from .folder import Folder, FolderError
from .spec import Study

ADVICE = (
    "start it by the mpirun that belongs to {library}, or by srun --mpi=pmix (Open MPI) or "
    "--mpi=pmi2 (MPICH)"
)


class PlacementError(UserError):
    """The processes of a job have other nodes or cores than requested."""


def prove(world: Ranks, nodes: int, ppn: int) -> None:
    """Raise PlacementError unless world is nodes times ppn processes. Collective.

    The counts are MPI's: variables of the scheduler are wrong under mpirun.
    """
    asked = f"asked for were {nodes * ppn} (nodes x ranks per node: {nodes} x {ppn})"
    if world.processes != nodes * ppn:
        found = "1 process" if world.processes == 1 else f"{world.processes} processes"
        alone = "every process is alone: " if world.processes == 1 else ""
        advice = ADVICE.format(library=library_version())
        raise PlacementError(f"batch: MPI has {found}, {asked}: {alone}{advice}")
    counts = Counter(world.nodes)
    if len(counts) != nodes or set(counts.values()) != {ppn}:
        found, by = " + ".join(map(str, counts.values())), current()
        raise PlacementError(
            f"batch: MPI has {found} processes, by nodes; {asked}: ask "
            f"{by.TITLE} for {by.shape(nodes, ppn)}"
        )


def members(nodes: Sequence[int], case: Case) -> list[int]:
    """Return the processes that measure a case: the first ppn on each of the first nodes.

    nodes: the node of each process
    """
    found = []
    taken: Counter[int] = Counter()
    for process, node in enumerate(nodes):
        if node < case.nodes and taken[node] < case.ppn:
            taken[node] += 1
            found.append(process)
    return found


class TimedCalls(Measuring):
    """A case whose repeats are collective calls of its ranks; calls: see Kind.measure."""

    def __init__(self, study: Study, case: Case, directory: Path, calls: Calls) -> None:
        super().__init__(study, case, directory)
        self.calls, self.measure = calls, study.measure
        self.times_s = np.empty((0, 3))
        self.is_warmup = np.empty(0, np.uint8)
        self.spent_s = self.spent_j = 0.0
        self.outcomes: Outcomes = {}

    @property
    def counted(self) -> Array:
        """Times of the repeats without warm-ups, of the slowest rank, float64[n]."""
        times: Array = self.times_s[self.is_warmup == 0, 0]
        return times

    def visit(self, place: JobRanks, caught: Caught) -> None:
        """Prepare the call and time it a few times. Collective."""
        world, measure = place.world, self.measure
        left = measure.max_repeats - len(self.counted)
        with _cores(world, self.case) as cores:
            place.cores = cores
            with self.calls(self.study, self.case, place, not len(self.times_s)) as call:
                before_j = place.read_energy()
                repeats, began_s = min(measure.block, left), time.perf_counter()
                times_s = interleave_ranks(
                    world, {0: call.run}, repeats, measure.warmup, lambda _: call.prepare()
                )[0]
                spent_ns = np.array([int((time.perf_counter() - began_s) * 1e9)])
                energy = place.energy_j(before_j)
        self.outcomes |= call.outcomes
        rows, flags = over_ranks(times_s, measure.warmup)
        self.times_s = np.concatenate([self.times_s, rows])
        self.is_warmup = np.concatenate([self.is_warmup, flags])
        if energy:
            self.spent_j += float(energy["energy_j"])
            self.outcomes["energy_j"] = self.spent_j / len(self.times_s)
        self.spent_s += float(world.max(spent_ns)[0]) / 1e9
        counted = self.counted  # the same on all ranks, as all inputs of the decision are
        self.done = measure.is_over(len(counted), self.spent_s, [counted])

    def result(self, place: JobRanks) -> Result:
        return Result(self.times_s, self.is_warmup, self.outcomes, place.environment())


FINISHED, FAILED, UNFINISHED = 0, 1, 85  # exit statuses; 85: start it again
PAUSE_S = 0.002  # between two tests by ranks that wait for a case on other ranks
# Errors of cases that kinds raise, each on all ranks
UNMEASURABLE = (UserError, ArithmeticError, NonFiniteGradient)


def measure_batch(
    world: World | Alone,
    path: Path,
    number: int,
    nodes: int | None = None,
    ppn: int | None = None,
    launch: Launch | None = None,
) -> int:
    """Measure the cases of a batch that are not finished; return the exit status. Collective.

    path: of the study's folder; nodes, ppn: as the job requested, by default the batch's shape
    launch: starts the ranks of cases from this one process, if their kind needs that
    Raises UserError on all processes; PlacementError if they are not as requested.
    """
    folder = Folder(path)
    mark = folder.claim_file(number)
    # First of all: a reader of the claim may send a signal, and all ranks must then catch it.
    with catching() as caught, ExitStack() as locks:
        study, batch = world.agreed(lambda: _load(folder, number))
        if study.of_kind.starts_ranks != (launch is not None):
            other = "programs" if study.of_kind.starts_ranks else "batch, on all ranks"
            raise UserError(f"{path}: is of kind {study.kind}: is measured by cpdhpc {other}")
        if launch is None:
            prove(world, nodes or batch.nodes, ppn or batch.ppn)
            _check(world, batch)
        cases, claim = world.on_first(lambda: _begin(folder, batch, launch, locks))
        some = cast(World, world)  # Alone has all methods that runs of programs call
        runner = _Runner(some, folder, study, cases, claim.restarts, caught, launch)
        runner.run(number)
        state = "stopped" if runner.status == UNFINISHED else "ended"
        world.on_first(lambda: claim.end(mark, state))
    return runner.status


def _load(folder: Folder, number: int) -> tuple[Study, Batch]:
    study = folder.study()
    found = batches(study, expand(study).cases)
    if not 0 <= number < len(found):
        raise UserError(f"batch {number}: {folder.path} has batches 0 to {len(found) - 1}")
    return study, found[number]


def _check(world: Ranks, batch: Batch) -> None:
    """Raise UserError if a job's shape is too small for a case of the batch. Collective.

    PlacementError if ranks are not bound and distributed as requested.
    """
    for case in batch.cases:
        if len(members(world.nodes, case)) != case.ranks:
            raise UserError(
                f"batch {batch.number}: case {case.id} needs {case.nodes} x {case.ppn} ranks"
            )
    if any(batch.seats):
        seats = world.gather(binding.seat(batch.seats[0]) | {"rank": world.process})
        if wrong := binding.misplaced(seats, *batch.seats):
            raise PlacementError(f"batch {batch.number}: {wrong}: the launcher places them")


@contextmanager
def _cores(world: Ranks, case: Case) -> Iterator[str]:
    """Bind ranks to cores of their own, unless the case binds them; yield a text. Collective."""
    bind, distribution = case.seats
    seats = ""
    if bind or distribution:
        seats = binding.said(world.gather(binding.seat(bind) | {"rank": world.process}))
    if bind not in ("", "gpu") or distribution:
        yield seats
        return
    with own_cores(world) as cores:
        yield f"{cores}; {seats}" if seats else cores


def _begin(
    folder: Folder, batch: Batch, launch: Launch | None, locks: ExitStack
) -> tuple[list[Case], Claim]:
    """Return the unfinished cases, and the claim of this start; locks: holds the batch's lock.

    Raises ClaimError if another process measures the batch.
    """
    what, lock = f"measurement of batch {batch.number}", folder.lock_file(batch.number)
    locks.enter_context(alone(lock, what, print, doubted=False))  # killed jobs are submitted again
    finished = _check_same(folder, None if launch is None else machine())
    if launch is not None:
        launch.kept[BEFORE] = finished
    cases = []
    for case in batch.cases:
        if folder.finished(case):
            if launch is None:
                folder.clear_work(case)  # if its process was killed before it did that
        else:
            folder.failure_file(case).unlink(missing_ok=True)
            cases.append(case)
    return cases, Claim.begin(folder.claim_file(batch.number))


def _check_same(folder: Folder, own: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the environment of a finished case, {} if there is none.

    own: the part of this job's environment that must agree with it; None: provenance.identity
    Raises FolderError if it does not agree.
    """
    for path in folder.cases.glob("*.h5"):
        try:
            before = read_environment(path)
        except StoreError:
            continue  # it is damaged: another case has the same environment
        if wrong := difference(before, own):
            raise FolderError(
                f"{folder.path}: holds cases measured with {wrong}, and times of both would be "
                "compared: go on there, or take another folder by --out"
            )
        return before
    return {}


class Alone(Loopback):
    """The one process of a batch whose cases start their ranks themselves."""

    def part(
        self, processes: Sequence[int], *, virtual_ranks: int = 1, timeout_s: float = 0.0
    ) -> Alone:
        """Return this world: cases start their ranks from here."""
        return self


class _Runner:
    """The cases of a batch, group by group, visit by visit. All methods are collective."""

    def __init__(
        self,
        world: World,
        folder: Folder,
        study: Study,
        cases: Sequence[Case],
        restarts: int,
        caught: Caught,
        launch: Launch | None,
    ) -> None:
        self.folder, self.study, self.cases = folder, study, cases
        self.restarts, self.caught, self.launch = restarts, caught, launch
        # Ranks wait here for those that measure, whose own time-outs end the job.
        everyone = world.part(range(world.processes), timeout_s=math.inf)
        assert everyone is not None
        self.world = everyone
        self.places: dict[tuple[int, int, int, float], JobRanks | None] = {}
        self.finished = self.failed = 0
        self.stopped = False

    @property
    def status(self) -> int:
        if self.finished + self.failed < len(self.cases):
            return UNFINISHED
        return FAILED if self.failed else FINISHED

    def run(self, number: int) -> None:
        """Measure all cases, until a signal comes."""
        order = np.random.default_rng([self.study.measure.seed, number])
        shuffled = [self.cases[i] for i in order.permutation(len(self.cases))]
        size = self.study.measure.interleave if self.study.run.bundle != "case" else 1
        for first in range(0, len(shuffled), size):
            self._group(shuffled[first : first + size], order)
            if self.stopped:
                return

    def _group(self, cases: Sequence[Case], order: np.random.Generator) -> None:
        """Measure some cases in turns: a visit to each, then the next round in another order."""
        pending = {case.id: each for case in cases if (each := self._start(case))}
        while pending:
            for name in [list(pending)[i] for i in order.permutation(len(pending))]:
                if self._visit(pending[name]):
                    del pending[name]
                if self.stopped:
                    return

    def _start(self, case: Case) -> Measuring | None:
        """Return the measuring of a case, None if it cannot be measured."""
        measure, work = self.study.of_kind.measure, self.folder.work(case)
        error: Exception | None = None
        found: Measuring | None = None
        try:
            if self.folder.case_file(case).is_dir():
                raise FolderError(f"{case.id}.h5: is a directory: {self.folder.remedy(case)}")
            if isinstance(measure, type):
                found = measure(self.study, case, work)
            else:
                found = TimedCalls(self.study, case, work, measure)
        except UNMEASURABLE as problem:
            error = problem
        wrong = _first(self.world.gather(_line(error)))
        if wrong:
            self._fail(case, wrong)
            return None
        return found

    def _visit(self, measuring: Measuring) -> bool:
        """Visit a case; return whether it is over, finished or failed."""
        place = self._place(measuring)
        error: Exception | None = None
        if place is not None:
            try:
                measuring.visit(place, self.caught)
            except Interrupted:
                pass  # its signal is in self.caught
            except UNMEASURABLE as problem:
                error = problem
        self.world.barrier("a case on other ranks", 0.0 if place else PAUSE_S)
        every = self.world.gather((measuring.done, _line(error), self.caught.number))
        self.stopped = any(number for _, _, number in every)
        wrong = _first(text for _, text, _ in every)
        if wrong:
            self._fail(measuring.case, wrong)
            return True
        if any(done for done, _, _ in every):
            self._finish(measuring, place)
            return True
        return False

    def _place(self, measuring: Measuring) -> JobRanks | None:
        """Return the place of a case, None on ranks that do not measure it."""
        case = measuring.case
        key = (case.nodes, case.ppn, measuring.virtual_ranks, measuring.timeout_s)
        if key not in self.places:
            world = self.world.part(
                members(self.world.nodes, case),
                virtual_ranks=measuring.virtual_ranks,
                timeout_s=measuring.timeout_s,
            )
            self.places[key] = None if world is None else JobRanks(world, self.launch)
        return self.places[key]

    def _finish(self, measuring: Measuring, place: JobRanks | None) -> None:
        """Write the file of a case from process 0."""
        case = measuring.case
        result = None if place is None else measuring.result(place)

        def write() -> None:
            assert result is not None, "process 0 measures all cases"
            extra: dict[str, int | str] = {
                "job_id": current().own_job(),
                "restarts": self.restarts,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            outcomes = {**result.outcomes, **extra}
            write_result(self.folder.case_file(case), case, replace(result, outcomes=outcomes))
            if self.launch is None:
                self.folder.clear_work(case)

        self.world.on_first(write)
        self.finished += 1
        self._say(f"finished {case.id}")

    def _fail(self, case: Case, wrong: str) -> None:
        """Write from process 0 why a case cannot be measured; other cases go on."""
        self.failed += 1
        self._say(f"failed {case.id}: {wrong}")
        path = self.folder.failure_file(case)
        self.world.on_first(lambda: store.put(path, wrong + "\n"))

    def _say(self, text: str) -> None:
        if self.world.process == 0:
            print(f"[{self.finished + self.failed}/{len(self.cases)}] {text}", flush=True)


def _line(error: Exception | None) -> str:
    """Return an error in a line, "" for none."""
    return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())


def _first(texts: Iterable[str]) -> str:
    """Return the first text that is not empty."""
    return next(filter(None, texts), "")


def write_benchmark(
    measured: BenchmarkResult, arguments: argparse.Namespace, world: Ranks | None = None
) -> None:
    """Write the points of a benchmark to --out, if that is set. Collective.

    world: None for a benchmark of one process
    Raises UserError on all processes if the file cannot be written.
    """
    path, ranks = arguments.out, world or Loopback()
    if path is None or not measured.points:
        return
    names = hosts(ranks)

    def write() -> None:
        of_all = environment(names, measured.cores)
        points = [_result(study, point, measured.warmup, of_all, ranks) for point in found]
        write_study(path, study, points, of_benchmark=further)

    found = measured.points
    study = _study(measured)
    further = {
        name: Factor(FURTHER[name], type(value))
        for point in found
        for name, value in point.factors.items()
        if name not in study.factors
    }
    ranks.on_first(write)


def _study(measured: BenchmarkResult) -> Study:
    """Return a study of the benchmark's name, with no sweep."""
    repeats = max(1, len(measured.points[0].times_s) - measured.warmup)
    measure = Measure(
        warmup=measured.warmup, block=repeats, min_repeats=repeats, max_repeats=repeats
    )
    return Study(name=measured.benchmark, kind=measured.kind, measure=measure)


def _result(
    study: Study, point: BenchPoint, warmup: int, of_all: dict[str, str], world: Ranks
) -> tuple[Case, Result]:
    nodes = len(set(world.nodes))
    case = make_case(study, point.factors, nodes, world.ranks // nodes)
    return case, Result(*over_ranks(point.times_s, warmup), point.outcomes, of_all)
