"""Batches: cases that one job measures, with the time that it may take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .case import Case, sort_key
from .spec import Study

START_S = 10.0  # to start MPI and Python on all ranks
SETUP_S = 0.5  # of a case: its data and its check
TRAINING_S = 60.0  # for a case of which nothing is known


@dataclass(frozen=True)
class Batch:
    """What a job does: cases on at most nodes * ppn ranks; time_s: an upper estimate."""

    number: int
    nodes: int
    ppn: int
    cases: tuple[Case, ...]
    time_s: float

    @property
    def ranks(self) -> int:
        """Number of MPI processes of the job."""
        return self.nodes * self.ppn

    @property
    def core_hours(self) -> float:
        """Time of all ranks together."""
        return self.time_s * self.ranks / 3600


def case_time_s(study: Study, case: Case) -> float:
    """Return about how long a case takes at most."""
    if study.run.case_time_s is not None:
        return study.run.case_time_s
    measure = study.measure
    visits = -(-measure.max_repeats // measure.block)
    calls = measure.max_repeats + visits * measure.warmup
    guess_s = study.of_kind.time_s(case.factors, case.ranks, calls)
    return min(guess_s, measure.max_time_s) + SETUP_S if guess_s else TRAINING_S


def batches(study: Study, cases: Iterable[Case]) -> list[Batch]:
    """Return the jobs of all cases of a study, small shapes first, numbered from 0.

    The numbers depend on the study alone, whatever is finished.
    """
    ordered = sorted(cases, key=sort_key)
    if study.run.bundle == "nested":
        groups = [ordered] if ordered else []
    elif study.run.bundle == "case":
        groups = [[case] for case in ordered]
    else:
        by_shape = groupby(ordered, key=lambda case: (case.ranks, case.nodes))
        groups = [part for _, group in by_shape for part in _cut(study, list(group))]
    return [_batch(study, number, group) for number, group in enumerate(groups)]


def _cut(study: Study, cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases in parts that take no longer than batch_time_s, if a case does not."""
    parts: list[list[Case]] = [[]]
    left_s = study.run.batch_time_s - START_S
    for case in cases:
        time_s = case_time_s(study, case)
        if parts[-1] and time_s > left_s:
            parts.append([])
            left_s = study.run.batch_time_s - START_S
        parts[-1].append(case)
        left_s -= time_s
    return parts


def _batch(study: Study, number: int, cases: Sequence[Case]) -> Batch:
    time_s = START_S + sum(case_time_s(study, case) for case in cases)
    nodes, ppn = max(case.nodes for case in cases), max(case.ppn for case in cases)
    return Batch(number, nodes, ppn, tuple(cases), time_s)
