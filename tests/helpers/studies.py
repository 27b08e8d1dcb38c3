"""Small studies for the tests."""

import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

import numpy as np
from training import environment

from cpdhpc.config import dump_toml, merge
from cpdhpc.lab.report.tables import Table
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.spec import Study
from cpdhpc.lab.study_data import Case, Result
from cpdhpc.lab.study_data.study_file import write_result

SMALL = {
    "name": "small",
    "kind": "allreduce",
    "sweep": {"ranks": [1, 2], "ppn": 2, "size_bytes": ["4KiB"], "algorithm": ["ring", "mpi"]},
    "measure": {"warmup": 1, "block": 3, "min_repeats": 6, "max_repeats": 6},
}


def study_file(directory: Path, **changes: object) -> Path:
    """Write the small study with changes laid over its tables."""
    path = directory / "small.toml"
    path.write_text(dump_toml(merge(SMALL, changes)))
    return path


def small_study(directory: Path, **changes: object) -> Study:
    """The small study with changes laid over its tables, as its file says it."""
    return load_study(study_file(directory, **changes))


def some_result(seed: int = 0, repeats: int = 50, warmup: int = 2) -> Result:
    """Times of no measurement."""
    times_s = np.sort(np.random.default_rng(seed).lognormal(-7, 0.3, (repeats, 3)), axis=1)
    outcomes = {"error": 0.1, "wire_bytes": 4096.0, "payload_bytes": 65540.0}
    outcomes |= {"bound_s": 1e-6, "job_id": "7", "restarts": 1}
    return Result(
        times_s[:, [2, 0, 1]],
        (np.arange(repeats) < warmup).astype(np.uint8),
        outcomes,
        {"hosts": "n1 n2", "processor": "a processor"},
    )


def fill(folder: Folder, study: Study, cases: list[Case] | None = None) -> list[Case]:
    """Write the files of cases, by default of all."""
    folder.prepare(study)
    cases = expand(study).cases if cases is None else cases
    for seed, case in enumerate(cases):
        write_result(folder.case_file(case), case, some_result(seed))
    return cases


def no_numbers(tables: Iterable[Table]) -> dict[str, list[str]]:
    """Columns of numbers of which some programs would read text in CSV, and what they would."""
    found: dict[str, list[str]] = {}
    for table in tables:
        head, *rows = csv.reader(StringIO(table.csv()))
        for column in (each for each in table.columns if each.numbers):
            begin = " ".join(column.heading.replace("-\n", "").split())
            for at in (i for i, name in enumerate(head) if name.startswith(begin)):
                bad = [row[at] for row in rows if row[at] and not NUMBER.fullmatch(row[at])]
                if bad:
                    found[f"{table.title}: {head[at]}"] = bad
    return found


NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?")


def command(*words: object) -> list[str]:
    """The command line of cpdhpc."""
    return [sys.executable, "-m", "cpdhpc", *map(str, words)]


def start(*words: object, **variables: str) -> subprocess.Popen[str]:
    """Start cpdhpc in the background, with more variables of the environment."""
    pipe, given = subprocess.PIPE, environment() | variables
    return subprocess.Popen(command(*words), env=given, stdout=pipe, stderr=pipe, text=True)


def tree(pid: int) -> list[int]:
    """A process and all that come from it, as far as they still have their parents."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def kill_all(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a process and to all that come from it: the launcher and the ranks."""
    for pid in tree(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()
