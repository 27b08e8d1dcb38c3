"""Stand-ins for Slurm's commands."""

from pathlib import Path

from cpdhpc.lab.schedulers.slurm import FIELDS

# Files: "refuse", of which script --test-only says no; "room", for how many elements there is;
# "full", what is said where there is none; "answers", a word a call, of the next calls.
SBATCH = """#!/bin/bash
echo "$*" >> calls
if [ "$1" = --test-only ]; then
    case "$2" in
        *"$(cat refuse 2>/dev/null || echo NONE)"*) echo "sbatch: error: no" >&2; exit 1;;
    esac
    echo "sbatch: Job 1 to start at noon" >&2
    exit 0
fi
for script; do :; done
ranges=$(grep '^#SBATCH --array=' "$script" | sed 's/.*=//;s/%.*//;s/,/ /g')
elements=0
for range in $ranges; do
    elements=$((elements + ${range#*-} - ${range%-*} + 1))
done
[ $elements != 0 ] || elements=1
room=$(cat room 2>/dev/null || echo 1000000)
answer=$(head -n 1 answers 2>/dev/null)
[ ! -e answers ] || sed -i 1d answers
case $answer in
    never) echo "sbatch: error: Batch job submission failed: Invalid qos" >&2; exit 1;;
    lost) echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1;;
esac
if [ $elements -gt $room ]; then
    cat full >&2
    ! grep -q retrying full || exec sleep 60
    exit 1
fi
[ ! -e room ] || echo $((room - elements)) > room
number=$(($(cat number 2>/dev/null || echo 9) + 1))
echo $number > number
case $answer in
    late)
        name=$(sed -n 's/^#SBATCH --job-name=//p' "$script")
        for range in $ranges; do
            for ((i = ${range%-*}; i <= ${range#*-}; i++)); do
                echo "$number $i $name $script" >> mine
            done
        done
        [ -n "$ranges" ] || echo "$number N/A $name $script" >> mine
        echo "sbatch: error: Socket timed out on send/recv operation" >&2
        exit 1;;
esac
echo "$number;cluster"
"""
SQUEUE = """#!/bin/bash
for each; do case $each in --jobs=*) job=${each#--jobs=};; esac; done
[ -n "$job" ] || { cat mine 2>/dev/null; exit 0; }
[ -e "queue.$job" ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
cat "queue.$job"
"""
SACCT = """#!/bin/bash
for each; do [ "$each" != --array ] || { echo "unrecognized option" >&2; exit 1; }; done
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
