"""Stand-ins for Slurm's commands."""

from __future__ import annotations

from pathlib import Path

from cpdhpc.study.slurm.queue import FIELDS

SBATCH = """#!/bin/bash
echo "$*" >> calls
if [ "$1" = --test-only ]; then
    case "$2" in
        *"$(cat refuse 2>/dev/null || echo NONE)"*) echo "sbatch: error: no" >&2; exit 1;;
    esac
    echo "sbatch: Job 1 to start at noon" >&2
    exit 0
fi
number=$(($(cat number 2>/dev/null || echo 9) + 1))
echo $number > number
echo "$number;cluster"
"""
SQUEUE = """#!/bin/bash
for each; do case $each in --jobs=*) job=${each#--jobs=};; esac; done
[ -e "queue.$job" ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
cat "queue.$job"
"""
SACCT = """#!/bin/bash
[ -e accounts ] || { echo "Slurm accounting storage is disabled" >&2; exit 1; }
cat accounts
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> calls
"""
PROGRAMS = {"sbatch": SBATCH, "squeue": SQUEUE, "sacct": SACCT, "scancel": SCANCEL}


class Slurm:
    """Stand-ins, which keep what they know in files of the current directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, program in PROGRAMS.items():
            (directory / "bin").mkdir(exist_ok=True)
            (directory / "bin" / name).write_text(program)
            (directory / "bin" / name).chmod(0o755)

    def calls(self) -> list[str]:
        """Arguments of the calls of sbatch, and of scancel with its name, since the last time."""
        path = self.directory / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def knows(self, job: int, name: str, states: dict[int, tuple[str, int, str]]) -> None:
        """Let squeue say of each element: state, status as waitpid has it, reason."""
        rows = [
            dict(zip(FIELDS, (job, index, name, *said), strict=True))
            for index, said in states.items()
        ]
        text = "".join(
            "".join(f"{row[field]!s:{width}}" for field, width in FIELDS.items()) + "\n"
            for row in rows
        )
        (self.directory / f"queue.{job}").write_text(text)
