"""Show the cases of a study, their batches, the core hours they may take, and what cannot be."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .actions import study_of
from .batch import Batch, batches, case_time_s
from .case import Case, shown
from .kind import SHAPE
from .site import add_site, load_site
from .spec import Study
from .sweep import expand

SUMMARY = "show cases, ids, shapes, core hours, and what is impossible and why"
WIDTH = 140  # columns of a table that goes to no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of plan."""
    add_site(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    study, folder = study_of(arguments)
    expansion = expand(study)
    site = load_site(arguments.site)
    every = [(job, site.refusal(job.nodes, job.ppn)) for job in batches(study, expansion.cases)]
    jobs = [job for job, why in every if why is None]  # numbered as they are on any site
    refused = [(case, why) for job, why in every if why is not None for case in job.cases]
    console = console_of_width()
    if jobs:
        console.print(table(study, jobs))
    lines = [
        *totals(study, jobs),
        *refusals([*expansion.impossible, *refused]),
        f"folder: {folder.path}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def console_of_width() -> Console:
    """Return the console of stdout, of a fixed width where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(force_terminal=False, width=WIDTH)


def table(study: Study, jobs: Sequence[Batch]) -> Table:
    """Return the cases, batch by batch, with the factors that vary."""
    cases = [case for job in jobs for case in job.cases]
    names = varying(cases)
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("batch", justify="right")
    result.add_column("case", no_wrap=True)
    for name in names:
        result.add_column(name, justify="right")
    result.add_column("at most\ns", justify="right")
    for job in jobs:
        for case in job.cases:
            cells = [shown_factor(study, case, name) for name in names]
            result.add_row(str(job.number), case.id, *cells, f"{case_time_s(study, case):.3g}")
    return result


def varying(cases: Sequence[Case]) -> list[str]:
    """Return the shape, and the factors that are not the same in all cases."""
    names = dict.fromkeys(name for case in cases for name in case.factors)
    several = [name for name in names if len({case.factors.get(name) for case in cases}) > 1]
    return ["nodes", "ppn", "ranks", *several]


def shown_factor(study: Study, case: Case, name: str) -> str:
    """Return a factor as it is shown, "" where the case has none."""
    value = case.all_factors.get(name)
    known = SHAPE | dict(study.of_kind.factors)
    return "" if value is None else shown(value, known[name].units)


def totals(study: Study, jobs: Sequence[Batch]) -> list[str]:
    """Return what the study takes in all."""
    cases = [case for job in jobs for case in job.cases]
    hours = sum(job.core_hours for job in jobs)
    longest_s = max((job.time_s for job in jobs), default=0.0)
    ranks = {case.ranks for case in cases}
    lines = [
        f"{study.name}: {study.scaling} scaling of {study.kind}: {len(cases)} cases in {len(jobs)} "
        f"batch(es), at most {hours:.3g} core hours (ranks x time), {longest_s:.0f} s a batch"
    ]
    if study.scaling != "throughput" and len(ranks) == 1:
        lines.append(f"{study.scaling} scaling, but all cases have {ranks.pop()} rank(s)")
    if cases and not any(study.of_kind.time_s(case.factors, case.ranks, 1) for case in cases):
        assumed = "run.case_time_s" if study.run.case_time_s else "a guess: set run.case_time_s"
        lines.append(f"time of a case: {assumed}")
    return lines


def refusals(impossible: Sequence[tuple[Case, str]]) -> list[str]:
    """Return how many cases are impossible, by reason."""
    reasons = Counter(reason for _, reason in impossible)
    return [f"impossible, {count} case(s): {reason}" for reason, count in reasons.items()]
