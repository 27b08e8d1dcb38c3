"""How a study was measured, and where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .study_file import StudyFile
from .table import Column, Table

NOT_SHOWN = ("study", "title", "kind", "scaling", "sample", "work", "Conventions")


def rules(file: StudyFile) -> list[str]:
    """Return the rules, after Hoefler and Belli (SC15)."""
    return [
        f"A repeat is {file.attributes.get('sample', 'one call')}. Its time is that of the slowest "
        "rank.",
        *(_trainings if file.kind == "train" else _calls)(file.toml.get("measure", {})),
        f"Figures are medians with {file.percent} intervals from order statistics: no distribution "
        "is assumed, only that repeats are independent.",
        "The interval of a ratio takes in those of both medians, each wide enough for both to hold "
        f"with {file.percent} (Bonferroni).",
        f"Base of speed-ups: {file.base_rule}.",
        "Rates are bytes over the median time. Ratios are never averaged.",
        "Bytes and errors are counted or computed, not sampled: they have no interval. A bound is "
        "from one measurement of the ping-pong's rate.",
        "Lines join points only where values between them are meant; dotted ones lead the eye.",
    ]


def _calls(asked: Mapping[str, Any]) -> list[str]:
    return [
        "Besides the slowest rank's times the file has those of the fastest, and means over ranks.",
        f"Warm-up calls before each block of repeats: {asked.get('warmup', '?')}. They are kept in "
        "the file with a flag, and in no figure here.",
        f"Repeats: {asked.get('min_repeats', '?')} to {asked.get('max_repeats', '?')}, until the "
        f"interval of the median is within {100 * asked.get('relative', float('nan')):g} % of it, "
        f"or {asked.get('max_time_s', '?')} s are over; all ranks stop together.",
        "The cases of a batch take turns in shuffled order "
        f"(seed {asked.get('seed', '?')}), so that drift is not taken for an effect.",
    ]


def _trainings(asked: Mapping[str, Any]) -> list[str]:
    return [
        f"Warm-up steps at the start, and after a restart: {asked.get('warmup', '?')}. They are "
        "kept in the file with a flag, and in no figure of times.",
        "Every training goes to its end. Seeds are taken together: the repeats are the steps of "
        "all of them, which may depend on one another more than independent repeats do.",
    ]


def provenance(file: StudyFile) -> list[Table]:
    """Return the tables of the file and of the environments."""
    known = {key: value for key, value in file.attributes.items() if key not in NOT_SHOWN}
    rows = [
        ["path", str(file.path)],
        *([key.replace("_", " "), str(v)] for key, v in known.items()),
    ]
    names = [Column("", numbers=False), Column("", numbers=False)]
    return [Table("File", names, rows, page_only=True), *_environments(file)]


def _environments(file: StudyFile) -> list[Table]:
    if not file.environments:
        return []
    counts = Counter(int(point.outcomes.get("environment", 0)) for point in file.points)
    keys = list(dict.fromkeys(key for each in file.environments for key in each))
    columns = [Column("", numbers=False)]
    columns += [Column(f"environment {i}", numbers=False) for i in range(len(file.environments))]
    rows = [["points", *(str(counts[i]) for i in range(len(file.environments)))]]
    for key in keys:
        values = [_plain(each.get(key, "")) for each in file.environments]
        if any(values):
            rows.append([key.replace("_", " "), *values])
    return [Table("Environment", columns, rows, page_only=True)]


def _plain(value: str) -> str:
    """Return JSON tables as text."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    if isinstance(parsed, dict):
        return ", ".join(f"{key} {item}" for key, item in parsed.items())
    return value
