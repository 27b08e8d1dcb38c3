"""What a study asked for and has not, and what is there with a reserve."""

from __future__ import annotations

from math import isnan

from ...config import UserError, validate
from ..case import Case
from ..folder import Folder
from ..spec import Study
from ..sweep import expand
from . import text
from .study_file import Point, StudyFile
from .table import Listed

SHARED = "ranks share cores"  # how the environment says it


def listed(file: StudyFile) -> list[Listed]:
    """Return everything that is not as it was asked for."""
    return [*_missing(file), *_shared(file), *_reserves(file)]


def _missing(file: StudyFile) -> list[Listed]:
    """Return the cases without a point, and what could not be measured, each with the reason."""
    try:
        study = validate(Study, dict(file.toml), str(file.path))
        found = expand(study)
    except UserError as error:
        count = text.count(int(file.attributes.get("missing", 0)), "case")
        return [Listed(f"missing, {count}; which cannot be said: {error}")]
    there = {frozenset(point.factors.items()) for point in file.points}
    missing = [case for case in found.cases if frozenset(case.all_factors.items()) not in there]
    reasons: dict[str, list[str]] = {}
    for case, reason in found.impossible:
        reasons.setdefault(reason, []).append(case.id)
    lost = [f"{case.id}{_why(file, case)}" for case in missing]
    return [
        *([Listed(f"missing, {text.count(len(lost), 'case')}", lost)] if lost else []),
        *(
            Listed(f"impossible, {text.count(len(ids), 'case')}: {reason}", ids)
            for reason, ids in reasons.items()
        ),
    ]


def _why(file: StudyFile, case: Case) -> str:
    """Return what the folder of the study says of a case, if the file still lies in it."""
    failure = Folder(file.path.parent).failure(case).splitlines()
    return f": {failure[-1]}" if failure else ""


def _shared(file: StudyFile) -> list[Listed]:
    """Return the points whose ranks had no cores of their own."""
    found: dict[str, list[str]] = {}
    for point in file.points:
        index = int(point.outcomes.get("environment", -1))
        known = 0 <= index < len(file.environments)
        placement = file.environments[index].get("placement", "") if known else ""
        if placement.startswith(SHARED):
            found.setdefault(placement, []).append(point.case_id)
    return [
        Listed(f"{placement}, {text.count(len(items), 'point')}", items)
        for placement, items in found.items()
    ]


def _reserves(file: StudyFile) -> list[Listed]:
    relative = file.toml.get("measure", {}).get("relative", float("inf"))
    few = [point for point in file.points if isnan(point.summary["ci_low_s"])]
    stops = file.kind != "train"  # which goes to its end, however wide the interval is
    wide = [point for point in file.points if stops and _half_width(point) > relative]
    fast = [p for p in file.points if p.summary["median_s"] < p.outcomes.get("bound_s", 0.0)]
    restarted = [point for point in file.points if point.outcomes.get("restarts", 0) > 0]
    asked = f"interval wider than the ±{100 * relative:g} % asked for"
    found = [
        ("no interval, too few repeats", [point.case_id for point in few]),
        (asked, [f"{point.case_id} (±{100 * _half_width(point):.3g} %)" for point in wide]),
        ("faster than the bound, which then is none", [point.case_id for point in fast]),
        ("measured after a restart of the batch", [point.case_id for point in restarted]),
    ]
    return [
        Listed(f"{what}, {text.count(len(items), 'point')}", items)
        for what, items in found
        if items
    ]


def _half_width(point: Point) -> float:
    """Return how far the ends of the interval are from the median, as a share of it."""
    s = point.summary
    return max(s["median_s"] - s["ci_low_s"], s["ci_high_s"] - s["median_s"]) / s["median_s"]
