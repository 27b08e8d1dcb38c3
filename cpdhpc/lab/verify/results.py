"""The results of all checks and ranks, as rows and as a file."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ... import store
from ..report import units
from .base import Array, CheckResult, Ratio
from .watch import Outcome

KIND, SCHEMA = "verify", 1
RIGHT, WRONG, FAILED, NOT_RUN = "right", "wrong", "failed", "not run"
MOST_SAID = 20  # lines about a check


@dataclass(frozen=True)
class CheckRow:
    """The result of a check.

    status: RIGHT, WRONG (something differs), FAILED (it did not end), or NOT_RUN
    counted: comparisons or measurements of all ranks; said: lines about errors and reasons
    """

    name: str
    section: str
    what: str
    device: str
    status: str
    counted: int = 0
    time_s: float = 0.0
    said: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether something is wrong with this machine, or this program on it."""
        return self.status in (WRONG, FAILED)


def joined(outcomes: Mapping[int, Outcome], lost: Iterable[int]) -> tuple[str, tuple[str, ...]]:
    """Return the status of a check and the lines about it, from the outcomes of ranks.

    lost: ranks that do not answer any more
    """
    said = [f"rank {rank}: hangs, and is excluded" for rank in lost]
    failed = [(rank, each) for rank, each in outcomes.items() if each.found is None]
    failed.sort(key=lambda pair: _follows(pair[1]))  # causes first
    said += [f"rank {rank}: {each.error}" for rank, each in failed]
    if said:
        return FAILED, _short(said)
    founds = {rank: each.found for rank, each in outcomes.items() if each.found is not None}
    for rank, found in founds.items():
        said += [f"rank {rank}: {line}" for line in found.wrong]
    if said:
        return WRONG, _short(said)
    why = {found.not_run for found in founds.values() if found.not_run}
    if not why and not any(found.counted or found.facts for found in founds.values()):
        why = {"nothing was compared"}
    return (NOT_RUN, tuple(sorted(why))) if why else (RIGHT, ())


def _follows(outcome: Outcome) -> bool:
    """Whether a rank left a check because of another one."""
    return outcome.waited or outcome.error.startswith("another rank")


def _short(lines: list[str]) -> tuple[str, ...]:
    more = len(lines) - MOST_SAID
    return (*lines[:MOST_SAID], *([f"and {more} more"] if more > 0 else []))


@dataclass
class Results:
    """The results until now.

    asked: number of checks; attributes: of the machine and the job, for the file
    ended: why the job ended before all checks, or ""
    unwritten: why the last write of the file failed, or ""
    """

    title: str
    asked: int
    attributes: dict[str, Any]
    rows: list[CheckRow] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    ended: str = ""
    unwritten: str = field(default="", compare=False)
    _writing: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def add(self, row: CheckRow, found: CheckResult | None) -> None:
        """Add a check, with the results of the first rank."""
        self.rows.append(row)
        if found is not None:
            self.facts |= found.facts
            self.ratios += found.ratios
            self.arrays |= found.arrays

    @property
    def right(self) -> bool:
        """Whether all checks ended, and nothing is wrong."""
        return not self.ended and not any(row.bad for row in self.rows)

    @property
    def verdict(self) -> str:
        """The result of all checks in a line."""
        bad = [row for row in self.rows if row.bad]
        done = [row for row in self.rows if row.status != NOT_RUN]
        slow = [each for each in self.ratios if not each.expected]
        parts = []
        if self.ended:
            parts.append(f"{self.ended}; {len(self.rows)} of {self.asked} checks done")
        if bad:
            parts.append(
                f"{len(bad)} of {units.count(len(done), 'check')}: "
                + "; ".join(f"{row.name}: {row.said[0] if row.said else row.status}" for row in bad)
            )
        elif not self.ended:
            count = sum(row.counted for row in self.rows)
            parts.append(f"{units.count(len(done), 'check')}, {count:,} comparisons")
        if len(done) < len(self.rows):
            parts.append(f"{len(self.rows) - len(done)} not run")
        if self.ratios:
            several = units.count(len(self.ratios), "speed")
            parts.append(f"{len(slow)} of {several} outside what is expected")
        return f"{'RIGHT' if self.right else 'WRONG'}: {', '.join(parts)}"

    def keep(self) -> None:
        """Let only this thread write from now on, as it ends the process. Others wait."""
        self._writing.acquire()

    def write(self, path: Path, ended: str) -> None:
        """Write the file with the reason why the job ended, or "". Sets unwritten on an error.

        A full disk ends no check, as results can still be printed.
        """
        with self._writing:
            self.ended, self.unwritten = ended, ""
            try:
                self._write(path)
            except store.StoreError as error:
                self.unwritten = str(error)

    def _write(self, path: Path) -> None:
        ratios = [each._asdict() for each in self.ratios]
        times = {name: [each.pop(name) for each in ratios] for name in TIMES}
        groups: dict[str, dict[str, Any]] = {
            "checks": _columns([{**asdict(row), "said": "\n".join(row.said)} for row in self.rows]),
            "facts": _columns([{"name": k, "value": v} for k, v in self.facts.items()]),
            "ratios": _columns(ratios),
            "arrays": dict(self.arrays),
        }
        if ratios:
            most = max(len(each) for rows in times.values() for each in rows)
            groups["ratios"]["repeat"] = store.Variable(("repeat",), np.arange(most), "repeat")
        for name, rows in times.items() if ratios else ():
            data = np.full((len(rows), most), np.nan)
            for row, values in zip(data, rows, strict=True):
                row[: len(values)] = values
            groups["ratios"][name] = store.Variable(("row", "repeat"), data, *OF_TIMES)
        notes = {"kind": KIND, "schema": SCHEMA, "title": self.title, "verdict": self.verdict}
        notes |= {"right": int(self.right), "asked": self.asked, "ended": self.ended}
        store.write(path, {k: v for k, v in groups.items() if v}, self.attributes | notes)


TIMES, OF_TIMES = ("times_s", "beside_s"), ("time of a call, of the slowest rank", "s")


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of rows as labelled variables; none if there are no rows."""
    found = {name: [row[name] for row in rows] for name in (rows or [{}])[0]}
    found |= {"row": list(range(len(rows)))} if rows else {}
    return {name: store.Variable(("row",), values, name) for name, values in found.items()}


def read_writer(path: Path) -> int:
    """Return the process that wrote a file, -1 if there is none."""
    try:
        return int(store.read_attributes(path).get("writer", -1))
    except store.StoreError:
        return -1


def read(path: Path) -> Results:
    """Return the results of a file. Raises StoreError."""
    groups, notes = store.read(path)
    if notes.get("kind") != KIND or notes.get("schema") != SCHEMA:
        raise store.StoreError(f"{path}: is no file of verify that this version reads")

    def rows(group: str) -> list[dict[str, Any]]:
        there = groups.get(group, {})
        columns = {k: v.tolist() for k, v in there.items() if k not in ("row", "repeat")}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    title, asked = str(notes["title"]), int(notes["asked"])
    results = Results(title, asked, notes, ended=str(notes["ended"]))
    for row in rows("checks"):
        said = row.pop("said")
        results.rows.append(CheckRow(**row, said=tuple(said.split("\n")) if said else ()))
    results.facts = {row["name"]: row["value"] for row in rows("facts")}
    for row in rows("ratios"):
        for name in TIMES:
            row[name] = [each for each in row[name] if each == each]
        results.ratios.append(Ratio(**row))
    results.arrays = dict(groups.get("arrays", {}))
    return results
