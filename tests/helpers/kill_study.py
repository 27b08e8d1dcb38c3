"""Kill a study by SIGKILL at random moments: python tests/helpers/kill_study.py --kills 100.

Launcher, ranks and all die at once. No finished case may be lost or change, and whatever has the
name of a case's file must be whole. Studies that are through are begun anew.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from subprocess import Popen

from studies import kill_all, start, study_file

from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study_data import Case
from cpdhpc.lab.study_data.study_file import read_result

REPEATS = 60
CHANGES = {
    "sweep": {"size_bytes": [1024 * k for k in (1, 4, 16)], "algorithm": ["ring", "tree", "mpi"]},
    "measure": {"interleave": 3, "min_repeats": REPEATS, "max_repeats": REPEATS},
}
START_S = 600.0  # a study that has begun nothing by then is broken


class Storm:
    """A study that is killed again and again, and what is known to be finished."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.kills = self.finished_cases = self.studies = 0
        self._begin()

    def _begin(self) -> None:
        self.studies += 1
        self.path = study_file(self.directory, **CHANGES)
        self.folder = Folder(self.directory / f"study-{self.studies}")
        self.cases = expand(load_study(self.path)).cases
        self.known: dict[Case, bytes] = {}

    def kill(self) -> None:
        """Run the study, kill it at some moment, and see what is left."""
        words = "study", "run", self.path, "--out", self.folder.path
        process = start(*words, TMPDIR=str(self.directory))  # for what the killed leave
        try:
            self._wait(process)
        finally:
            kill_all(process)
        self.kills += 1
        self.check()
        if len(self.known) == len(self.cases):
            self._begin()

    def _wait(self, process: Popen[str]) -> None:
        """Wait for some time; half of the times first for a case to be finished."""
        if self.random.random() < 0.5:
            time.sleep(self.random.uniform(0, 3))
            return
        until_s = time.monotonic() + START_S
        while self._count() == len(self.known) and process.poll() is None:
            assert time.monotonic() < until_s, "no case is finished"
            time.sleep(0.002)
        time.sleep(self.random.uniform(0, 0.1))

    def _count(self) -> int:
        return sum(self.folder.case_file(case).exists() for case in self.cases)

    def check(self) -> None:
        """Raise AssertionError where a finished case is lost or changed, or a file is not whole."""
        for case, content in self.known.items():
            assert self.folder.case_file(case).read_bytes() == content, case.id
        for case in self.cases:
            path = self.folder.case_file(case)
            if case not in self.known and path.exists():
                assert self.folder.finished(case), case.id
                assert (read_result(path, case).is_warmup == 0).sum() == REPEATS
                self.known[case] = path.read_bytes()
                self.finished_cases += 1


def main() -> None:
    """Kill, and tell how often and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        storm = Storm(Path(directory), arguments.seed)
        while storm.kills < arguments.kills:
            storm.kill()
    print(f"{storm.kills} kills, {storm.finished_cases} finished cases, none lost or changed")


if __name__ == "__main__":
    main()
