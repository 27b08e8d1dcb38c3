"""From a study file to its cases, by products, exclusions and rules, and to batches of jobs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

from ...config import (
    UNITS,
    ConfigError,
    Raw,
    flatten,
    located,
    merge,
    read_toml,
    suggest,
    validate,
    value_at,
)
from ...methods import reason
from ...whole_files import read_file_of
from ..kinds import kind_of
from ..kinds.base import Kind
from ..settings import blaming, override
from ..study_data import ABSENT, SEATS, SHAPE, Case, Factor, Factors, Value
from .spec import Constraint, Study

SLUG = 60  # characters of the readable part of an id
NOT_OF_A_JOB = ("compare", "name")  # tables of a job file that factors replace
NOT_MEASURED = ("seed", "interleave")  # keys of [measure] that only order cases


def make_case(study: Study, factors: Factors, nodes: int, ppn: int) -> Case:
    """Return the case of these factors, as Kind.used returns them."""
    measure = study.measure.model_dump(mode="json", exclude=set(NOT_MEASURED))
    decides = {
        "kind": study.kind,
        "factors": dict(factors),
        "nodes": nodes,
        "ppn": ppn,
        "measure": measure,
        "job": _deciding(study),
    }
    text = json.dumps(decides, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = [
        shown(value, known.units if (known := study.factors.get(name)) else "1")
        for name, value in factors.items()
    ]
    slug = re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join([f"{nodes}x{ppn}", *words]))
    return Case(f"{slug[:SLUG].strip('-')}-{digest}", dict(factors), nodes, ppn)


def _deciding(study: Study) -> Raw:
    """Return the tables of the job without keys that do not affect measurements."""
    if not (keys := study.of_kind.may_change):
        return study.job
    return {
        table: {k: v for k, v in rows.items() if f"{table}.{k}" not in keys}
        for table, rows in study.job.items()
    }


def shown(value: Value, units: str = "1") -> str:
    """Return a value as text: bytes in the largest unit that divides them."""
    if units == "byte" and isinstance(value, int) and value > 0:
        unit = next(name for name, size in reversed(UNITS.items()) if value % size == 0 and name)
        return f"{value // UNITS[unit]}{unit}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


FactorValues = dict[str, Value]
SAME = "same"  # base.ranks: speed-ups are at the same number of ranks


@dataclass(frozen=True)
class Expansion:
    """The cases of a study, and the impossible ones, each with the reason."""

    cases: list[Case]
    impossible: list[tuple[Case, str]]


def load_study(path: Path, settings: Iterable[str] = ()) -> Study:
    """Return the study of a file, with settings "table.key=value" laid over it.

    Raises ConfigError for any mistake in it, with a suggestion for an unknown name.
    """
    return blaming(lambda some: _load(path, some), settings, path)


def _load(path: Path, settings: Iterable[str]) -> Study:
    raw = {"name": path.stem} | override(read_file_of(path, "kind"), settings, _laid_over)
    raw |= _flat_factors(raw) | {"job": _job(path, raw)}
    own = () if (kind := _kind(raw)) is None else kind.own_tables
    raw = {name: table for name, table in raw.items() if name not in own}
    study = validate(Study, raw, str(path))
    check_factors(study, str(path))
    return study


def _laid_over(raw: Raw, changes: Raw) -> Raw:
    """Return a study's tables with changes laid over them; its kind does that for the job."""
    job, change, kind = raw.get("job"), changes.get("job"), _kind(raw)
    laid = merge(raw, changes)
    if kind is not None and isinstance(job, dict) and isinstance(change, dict):
        laid["job"] = kind.laid_over(job, change)
    return laid


def _kind(raw: Raw) -> Kind | None:
    """Return the kind that a study names, None if it is unknown: Study raises the error."""
    try:
        return kind_of(str(raw.get("kind")))
    except ConfigError:
        return None


def _flat_factors(raw: Raw) -> Raw:
    """Return the tables of factors with keys as "train.batch", which are nested tables in TOML."""
    tables = {key: raw[key] for key in ("sweep", "weak", "base") if isinstance(raw.get(key), dict)}
    rows = {key: raw[key] for key in ("zip", "exclude") if isinstance(raw.get(key), list)}
    return {key: flatten(table) for key, table in tables.items()} | {
        key: [flatten(row) if isinstance(row, dict) else row for row in table]
        for key, table in rows.items()
    }


def _job(path: Path, raw: Raw) -> Any:
    """Return the tables of the job file that a study names, or of the job in the study itself."""
    train, kind = raw.get("train"), _kind(raw)
    if kind is not None and kind.own_tables:
        given = {name: raw[name] for name in kind.own_tables if name in raw}
        return kind.ready(merge(raw.get("job", {}), given), path)
    if raw.get("job") or not isinstance(train, dict) or not isinstance(train.get("job"), str):
        job = raw.get("job", {})
        if not isinstance(job, dict):
            return job
        if value_at(job, ("train", "seeds")) is not None and not _varies_seeds(raw):
            raise ConfigError(
                f"{path}: job.train.seeds: seeds of a study are its factor sweep.seed"
            )
        return _without_seeds(located(job, path.parent), "seeds")
    if kind is not None and not kind.needs_job:
        return {}
    file = path.parent / train["job"]
    job = located(read_toml(file), file.parent)
    tables = {key: value for key, value in job.items() if key not in NOT_OF_A_JOB}
    tables = _without_seeds(tables, "seed", "seeds")
    if not tables:
        raise ConfigError(f"{path.parent / train['job']}: has no table of a job")
    return tables


def _varies_seeds(raw: Raw) -> bool:
    """Return whether the factor seed is in [sweep] or [[zip]] of a file."""
    rows = raw.get("zip", [])
    tables = [raw.get("sweep"), *(rows if isinstance(rows, list) else [])]
    return any("seed" in table for table in tables if isinstance(table, dict))


def _without_seeds(job: Raw, *names: str) -> Raw:
    """Return the tables of a job without keys of [train] that the factor seed replaces.

    A seed in the study itself stays, because ids of cases depend on it; the factor is laid over it.
    """
    train = job.get("train")
    if not isinstance(train, dict):
        return job
    return job | {"train": {key: value for key, value in train.items() if key not in names}}


def check_factors(study: Study, source: str) -> None:
    """Raise ConfigError, which begins with source, if expand cannot make cases of the study."""
    try:
        _check_factors(study)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_factors(study: Study) -> None:
    given = {name for axis in axes(study) for name in axis[0]}
    if "ranks" in given and "nodes" in given:
        raise ConfigError("sweep: nodes and ranks: give one of them")
    for name, value in study.weak.items():
        factor = _factor(study, name, "weak")
        if factor.type is not int or name in SHAPE:
            raise ConfigError(f"weak.{name}: should be a factor that grows with the ranks")
        if name in given:
            raise ConfigError(f"weak.{name}: is in the sweep too: the rule gives its value")
        _value(factor, value, f"weak.{name}")
    for index, row in enumerate(study.exclude):
        _row(study, row, f"exclude {index + 1}")
    for key, name in study.of_kind.named(study.job):
        if name not in (known := SHAPE | dict(study.factors)):
            raise ConfigError(f"{key}: {name} is no factor of the sweep: {suggest(name, known)}")
    base_factors(study)
    for name, factor in study.factors.items():
        if factor.default is None and name not in given and name not in study.weak:
            raise ConfigError(f"sweep.{name}: is missing ({factor.long_name})")
    if next(_points(study), None) is None:
        raise ConfigError("nothing to measure: exclude and constraints leave no case")


def axes(study: Study) -> list[list[FactorValues]]:
    """Return the lists whose product is the sweep: one for each factor, and for each zip.

    Raises ConfigError for an unknown factor, a wrong value and an empty list.
    """
    found = [
        [{name: value} for value in _values(study, name, given, f"sweep.{name}")]
        for name, given in study.sweep.items()
    ]
    for index, table in enumerate(study.zip):
        found.append(_zipped(study, table, f"zip {index + 1}"))
    names = [name for axis in found for name in axis[0]]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"sweep: {name} is given twice, in sweep or zip")
    if not found:
        raise ConfigError("sweep: is empty: it needs a list for each factor that varies")
    return found


def _zipped(study: Study, table: Raw, key: str) -> list[FactorValues]:
    columns = {name: _values(study, name, given, f"{key}.{name}") for name, given in table.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        each = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(f"{key}: lists should be of one length: {each or 'there is none'}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(study: Study, name: str, given: Any, key: str) -> list[Value]:
    factor = _factor(study, name, key.rpartition(f".{name}")[0])
    values = given if isinstance(given, list) else [given]
    if not values:
        raise ConfigError(f"{key}: is empty: a factor needs a value")
    found = [_value(factor, value, key) for value in values]
    return list(dict.fromkeys(found)) if key.startswith("sweep") else found


def _factor(study: Study, name: str, table: str) -> Factor:
    known = SHAPE | dict(study.factors)
    if name not in known:
        key = f"{table}.{name or repr(name)}"
        raise ConfigError(f"{key}: unknown factor of kind {study.kind}: {suggest(name, known)}")
    return known[name]


def _value(factor: Factor, value: Any, key: str) -> Value:
    if value == ABSENT and factor.default == ABSENT:
        return ABSENT
    try:
        return factor.parse(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value!r}: {reason(error, value)}") from None


def _row(study: Study, row: Mapping[str, Any], table: str) -> FactorValues:
    return {
        name: _value(_factor(study, name, table), value, f"{table}.{name}")
        for name, value in row.items()
    }


def base_factors(study: Study) -> FactorValues:
    """Return the factors that pick the base points of speed-ups.

    ranks = "same" is not among them: it means that the base has as many ranks as the point.
    """
    named = {key: value for key, value in study.base.items() if (key, value) != ("ranks", SAME)}
    return _row(study, named, "base")


def expand(study: Study) -> Expansion:
    """Return the cases in the order of the sweep, the last list fastest, each case once.

    Raises ConfigError if there is none.
    """
    cases: dict[str, Case] = {}
    impossible: dict[str, tuple[Case, str]] = {}
    for point, refused in _points(study):
        case, reason = _case(study, point)
        reason = refused or reason
        if reason is None:
            cases[case.id] = case
        else:
            impossible[case.id] = (case, reason)
    if not cases:
        _, why = next(iter(impossible.values()))
        file = f"{study.train.job}: " if study.train is not None and study.train.job else ""
        raise ConfigError(f"study {study.name}: nothing to measure: {file}{why}")
    return Expansion(list(cases.values()), list(impossible.values()))


def _points(study: Study) -> Iterator[tuple[FactorValues, str | None]]:
    """Yield the points that exclusions and constraints leave, each with an error of its shape."""
    excluded = [_row(study, row, "exclude") for row in study.exclude]
    constraints = [Constraint(text) for text in study.constraints]
    defaults = {name: factor.default for name, factor in study.factors.items()}
    rule = _row(study, study.weak, "weak")
    for parts in product(*axes(study)):
        given: FactorValues = {key: value for part in parts for key, value in part.items()}
        shape, wrong = _shape(given)
        point: FactorValues = {k: v for k, v in defaults.items() if v is not None} | given | shape
        point |= {name: int(value) * int(point["ranks"]) for name, value in rule.items()}
        if any(all(point[k] == v for k, v in row.items()) for row in excluded if row):
            continue
        if all(constraint.holds(point) for constraint in constraints):
            yield point, wrong


def _shape(given: FactorValues) -> tuple[FactorValues, str | None]:
    """Return nodes, ppn and ranks, and what is wrong with them; with ranks, ppn is a maximum."""
    ppn = int(given.get("ppn", 1))
    if "ranks" not in given:
        nodes = int(given.get("nodes", 1))
        return {"nodes": nodes, "ppn": ppn, "ranks": nodes * ppn}, None
    ranks = int(given["ranks"])
    nodes = -(-ranks // ppn)
    if ranks % nodes == 0:
        return {"nodes": nodes, "ppn": ranks // nodes, "ranks": ranks}, None
    wrong = f"{ranks} ranks on {nodes} nodes of {ppn} are not equally many on each"
    return {"nodes": nodes, "ppn": ppn, "ranks": ranks}, wrong


def _case(study: Study, point: FactorValues) -> tuple[Case, str | None]:
    kind = study.of_kind
    nodes, ppn = int(point["nodes"]), int(point["ppn"])
    make = partial(make_case, study, nodes=nodes, ppn=ppn)
    factors = {name: value for name, value in point.items() if name not in SHAPE}
    try:
        used = kind.used(factors)
    except ValueError as error:
        given = {k: factors[k] for k in study.factors if factors.get(k, ABSENT) != ABSENT}
        return make(given), str(error)
    reason = kind.fits(study.job, used, nodes * ppn)
    seats = {name: value for name in SEATS if (value := factors.get(name, ABSENT)) != ABSENT}
    return make({**used, **seats}), reason


START_S = 10.0  # to start MPI and Python on all ranks
SETUP_S = 0.5  # for the data of a case and its check
TRAINING_S = 60.0  # for a case without an estimate


@dataclass(frozen=True)
class Batch:
    """The cases of a job, on at most nodes * ppn ranks.

    time_s: estimate; has_gpus: whether a case needs a GPU for each rank
    seats: how its ranks are bound and distributed
    limit_s: the most that the study allows, not below time_s: the rest goes on in another job
    """

    number: int
    nodes: int
    ppn: int
    cases: tuple[Case, ...]
    time_s: float
    limit_s: float
    has_gpus: bool = False
    seats: tuple[str, str] = ("", "")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ppn

    @property
    def rank_hours(self) -> float:
        """Estimated time, times the ranks."""
        return self.time_s * self.ranks / 3600


def case_time_s(study: Study, case: Case) -> float:
    """Return about how long a case takes."""
    if study.run.case_time_s is not None:
        return study.run.case_time_s
    measure = study.measure
    visits = -(-measure.max_repeats // measure.block)
    guess_s = _guess_s(study, case, measure.max_repeats + visits * measure.warmup)
    least_s = guess_s * measure.min_repeats / measure.max_repeats
    return max(least_s, min(guess_s, measure.max_time_s)) + SETUP_S if guess_s else TRAINING_S


def case_limit_s(study: Study, case: Case) -> float:
    """Return how long a case may take: a visit may begin until its calls took max_time_s.

    For a training, and if run.case_time_s is set, that is the estimate.
    """
    measure, about_s = study.measure, case_time_s(study, case)
    visit_s = _guess_s(study, case, measure.block + measure.warmup)
    if study.run.case_time_s is not None or not visit_s:
        return about_s
    return max(about_s, measure.max_time_s + visit_s + SETUP_S)


def _guess_s(study: Study, case: Case, calls: int) -> float:
    return study.of_kind.time_s(case.factors, case.ranks, calls)


def batches(study: Study, cases: Iterable[Case]) -> list[Batch]:
    """Return the jobs of all cases of a study, small shapes first, numbered from 0.

    The numbers depend on the study alone, not on finished cases.
    """
    ordered = sorted(cases, key=lambda case: (*_shape_of(study, case), case.id))
    if study.run.bundle == "nested":  # the largest shape of each device
        job = partial(_job_of, study)
        groups = [list(group) for _, group in groupby(sorted(ordered, key=job), job)]
    elif study.run.bundle == "case":
        groups = [[case] for case in ordered]
    else:
        by_shape = groupby(ordered, key=partial(_shape_of, study))
        groups = [part for _, group in by_shape for part in _cut(study, list(group))]
    return [_batch(study, number, group) for number, group in enumerate(groups)]


def _shape_of(study: Study, case: Case) -> tuple[int, int, bool, tuple[str, str]]:
    """Return what the cases of a job have in common: ranks, nodes, GPUs, binding."""
    return case.ranks, case.nodes, *_job_of(study, case)


def _job_of(study: Study, case: Case) -> tuple[bool, tuple[str, str]]:
    """Return what the cases of a job have in common besides ranks and nodes."""
    return uses_gpus(study, case), case.seats


def uses_gpus(study: Study, case: Case) -> bool:
    """Whether a case needs a GPU for each rank."""
    return "gpu" in (study.of_kind.device(study.job, case.factors), case.seats[0])


def _cut(study: Study, cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases in parts of at most batch_time_s; a longer case is a part of its own."""
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
    limits_s = [case_limit_s(study, case) for case in cases]
    most_s = max(study.run.batch_time_s, START_S + max(limits_s))
    limit_s = max(time_s, min(START_S + sum(limits_s), most_s))
    nodes, ppn = max(case.nodes for case in cases), max(case.ppn for case in cases)
    has_gpus = any(uses_gpus(study, case) for case in cases)
    _, seats = _job_of(study, cases[0])
    return Batch(number, nodes, ppn, tuple(cases), time_s, limit_s, has_gpus, seats)
