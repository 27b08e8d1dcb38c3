"""What is shown of a study: the sections of its kind, what is missing, how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...config import suggest
from . import allreduce, autoencoder, codec, halo, text, train
from .deal import Layout
from .method import provenance, rules
from .missing import listed
from .naming import cell, constant, heading, is_number, said, varying
from .pool import Pool, pools
from .scaling import scaling
from .study_file import PLACES, ReportError, StudyFile
from .table import Column, Report, Section, Table

Sections = Callable[[StudyFile, Sequence[Pool], Layout], list[Section]]
KINDS: dict[str, tuple[Sections, Sequence[str]]] = {  # kind: its sections, words with panels
    "allreduce": (allreduce.sections, allreduce.PANELS),
    "autoencoder": (autoencoder.sections, autoencoder.PANELS),
    "codec": (codec.sections, codec.PANELS),
    "halo": (halo.sections, halo.PANELS),
    "train": (train.sections, train.PANELS),
}
QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def study_report(file: StudyFile) -> Report:
    """Return the report of a study. Raises ReportError for an unknown kind."""
    if file.kind not in KINDS:
        raise ReportError(f"{file.path}: kind={file.kind!r}: {suggest(file.kind, KINDS)}")
    own, apart = KINDS[file.kind]
    found = pools(file)
    layout = Layout.of(file, found, apart)
    sections = [*scaling(file, found, layout), *own(file, found, layout)]
    return Report(
        file.name,
        _facts(file, found),
        [*sections, Section("Spread of times", tables=[_spread(found)])],
        listed(file),
        rules(file),
        provenance(file),
        [("study.toml", str(file.attributes["study"]))],
    )


def _facts(file: StudyFile, found: Sequence[Pool]) -> list[tuple[str, str]]:
    """Return what is said first."""
    missing = int(file.attributes.get("missing", 0))
    ranks = sorted({pool.ranks for pool in found})
    repeats = [len(point.times_s) for point in file.points]
    factors = [pool.factors for pool in found]
    same = [said(k, v) for k, v in constant(factors, PLACES).items()]
    hosts = dict.fromkeys(each.get("hosts", "") for each in file.environments)
    return [
        ("what", f"{file.scaling} scaling of {file.kind}"),
        ("points", f"{len(file.points)}" + (f", {missing} missing" if missing else "")),
        ("ranks", ", ".join(map(str, ranks))),
        ("repeats", f"{_range(repeats)} a point, without warm-ups"),
        ("base", file.base_rule),
        *([("the same in all", ", ".join(same))] if same else []),
        ("hosts", "; ".join(hosts)),
        ("written", str(file.attributes.get("date", ""))),
    ]


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _spread(found: Sequence[Pool]) -> Table:
    factors = [pool.factors for pool in found]
    names = varying(factors, ())
    columns = [
        *(Column(heading(name), is_number(name, factors)) for name in names),
        Column("n"),
        *(Column(name) for name in QUANTILES),
        Column("mean"),
        Column("standard\ndeviation"),
    ]
    rows = [
        [
            *(cell(name, pool.factors[name]) if name in pool.factors else "" for name in names),
            str(len(pool.samples_s)),
            *_statistics(pool),
        ]
        for pool in found
    ]
    caption = "Times of the slowest rank, without warm-ups. Quantiles between neighbouring samples."
    return Table("Spread of times", columns, rows, caption, page_only=True)


def _statistics(pool: Pool) -> list[str]:
    samples = pool.samples_s
    if not len(samples):
        return [text.NONE] * (len(QUANTILES) + 2)
    deviation = float(samples.std(ddof=1)) if len(samples) > 1 else float("nan")
    found = [*np.quantile(samples, list(QUANTILES.values())), samples.mean(), deviation]
    return [text.time(float(value)) for value in found]
