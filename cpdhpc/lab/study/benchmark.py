"""The file of a benchmark: that of a study, whose points somebody has chosen on a command line."""

from __future__ import annotations

import argparse

from ...world.ranks import Loopback, Ranks
from ..kinds.base import Measure
from ..kinds.harness import FURTHER, Measured, Point
from ..kinds.place import environment
from ..provenance import hosts
from ..study_data.factors import Case, Factor, Result, over_ranks
from .cases import make_case
from .collect import write_study
from .spec import Study


def write_benchmark(
    measured: Measured, arguments: argparse.Namespace, world: Ranks | None = None
) -> None:
    """Write what a benchmark has measured to --out, if that is given. Collective.

    world: None for a benchmark of one process
    Raises UserError on all processes where the file cannot be written.
    """
    path, ranks = arguments.out, world or Loopback()
    if path is None or not measured.points:
        return
    where = hosts(ranks)

    def write() -> None:
        places = environment(where, measured.cores)
        points = [_result(study, point, measured.warmup, places, ranks) for point in found]
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


def _study(measured: Measured) -> Study:
    """Return a study of the benchmark's name, with no sweep."""
    repeats = max(1, len(measured.points[0].times_s) - measured.warmup)
    measure = Measure(
        warmup=measured.warmup, block=repeats, min_repeats=repeats, max_repeats=repeats
    )
    return Study(name=measured.benchmark, kind=measured.kind, measure=measure)


def _result(
    study: Study, point: Point, warmup: int, places: dict[str, str], world: Ranks
) -> tuple[Case, Result]:
    nodes = len(set(world.nodes))
    case = make_case(study, point.factors, nodes, world.ranks // nodes)
    return case, Result(*over_ranks(point.times_s, warmup), point.outcomes, places)
