"""Stand-ins for the commands of PBS, LSF and Flux, which answer as their manuals say.

A job waits until a test gives it another state. What they know is in queue.json of the current
directory: a list of elements, each with number, index (None: of no array), name, script, state,
code, why. Files: "full" and "down" have what a submission says, which does not go in then, but if
it is "late", says the text of "down" and goes in all the same.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

COMMANDS = ("qsub", "qstat", "qselect", "qdel", "bsub", "bjobs", "bkill", "flux")
PATTERN = {"pbs": r"^#PBS +(.*)", "lsf": r"^#BSUB +(.*)", "flux": r"^# flux: +(.*)"}
QUEUE = Path("queue.json")
Element = dict[str, Any]


def install(directory: Path) -> None:
    """Write the commands into a folder for PATH."""
    directory.mkdir(exist_ok=True)
    for name in COMMANDS:
        text = f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n'
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


def elements() -> list[Element]:
    """Return all elements of jobs that went in."""
    return json.loads(QUEUE.read_text()) if QUEUE.exists() else []


def keep(found: list[Element]) -> None:
    """Write the elements."""
    QUEUE.write_text(json.dumps(found))


def directives(scheduler: str, text: str) -> list[str]:
    """Return the options in a script: those before the first command."""
    head = text.partition("\n\n")[0]
    return re.findall(PATTERN[scheduler], head, re.MULTILINE)


def went_in(scheduler: str, name: str, script: str, indices: list[int] | None) -> int:
    """Put a job into the queue, or end as files say."""
    for trouble in ("full", "down"):
        if Path(trouble).exists() and not Path("late").exists():
            sys.exit(Path(trouble).read_text())
    found = elements()
    number = max((each["number"] for each in found), default=9) + 1
    for index in [None] if indices is None else indices:
        found.append(
            {"number": number, "index": index, "name": name, "script": script}
            | {"state": "waits", "code": None, "why": ""}
        )
    keep(found)
    if Path("late").exists():
        Path("late").unlink()
        sys.exit(Path("down").read_text())
    return number


def spans(text: str) -> list[int]:
    """Return the numbers of 2-3,7."""
    ends = [part.partition("-") for part in text.split(",")]
    return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]


# --- PBS --------------------------------------------------------------------------------------


def qsub(words: list[str]) -> None:
    """Say 12.server or 12[].server. -J takes a range of two at least."""
    text = Path(words[-1]).read_text()
    given = directives("pbs", text)
    name = next(each[3:] for each in given if each.startswith("-N "))
    ranges = [each[3:] for each in given if each.startswith("-J ")]
    indices = None
    if ranges:
        if not re.fullmatch(r"\d+-\d+(%\d+)?", ranges[0]):
            sys.exit("qsub: illegal -J value")
        indices = spans(ranges[0].partition("%")[0])
        if len(indices) < 2:
            sys.exit("qsub: illegal -J value")
    depends = words[words.index("-W") + 1] if "-W" in words else ""
    known = {pbs_id(each, whole=True) for each in elements()}
    for each in depends.partition("afterany:")[2].split(":") if depends else []:
        if each not in known:
            sys.exit("qsub: Invalid job dependency")
    number = went_in("pbs", name, " ".join(words), indices)
    print(f"{number}{'[]' * bool(ranges)}.server")


def pbs_id(each: Element, whole: bool = False) -> str:
    if each["index"] is None:
        return f"{each['number']}"
    return f"{each['number']}[{'' if whole else each['index']}]"


LETTERS = {"waits": "Q", "runs": "R", "ended": "F", "cancelled": "F"}


def qstat(words: list[str]) -> None:
    """Say in JSON what is known of jobs, and of what is not that it is not."""
    assert {"-t", "-f", "-F", "json"} <= set(words), words
    finished = "-x" in words
    jobs: dict[str, Any] = {}
    wrong = False
    for wanted in [word for word in words if word[0].isdigit()]:
        own = [e for e in elements() if pbs_id(e, whole=True) == wanted.partition(".")[0]]
        live = [e for e in own if e["state"] in ("waits", "runs")]
        if not own:
            print(f"qstat: Unknown Job Id {wanted}.server", file=sys.stderr)
            wrong = True
        elif not live and not finished:
            print(f"qstat: {wanted}.server Job has finished, use -x or -H", file=sys.stderr)
            wrong = True
        elif "[" in wanted:
            base = {"Job_Name": own[0]["name"], "Submit_arguments": own[0]["script"]}
            jobs[f"{wanted}.server"] = base | {"job_state": "B" if live else "F", "array": "True"}
        for each in own if live or finished else []:
            letter = LETTERS[each["state"]]
            letter = "X" if letter == "F" and live and each["index"] is not None else letter
            row = {"Job_Name": each["name"], "job_state": letter, "comment": each["why"]}
            row["Submit_arguments"] = each["script"]
            if each["code"] is not None:
                row["Exit_status"] = each["code"]
            if each["state"] == "cancelled":
                row |= {"Exit_status": 271, "substate": 91}
            jobs[f"{pbs_id(each)}.server"] = row
    if jobs:
        print(json.dumps({"timestamp": 1, "pbs_server": "server", "Jobs": jobs}))
    sys.exit(153 if wrong else 0)


def qselect(words: list[str]) -> None:
    """Print the ids of jobs that wait or run."""
    assert words[0] == "-u"
    live = [each for each in elements() if each["state"] in ("waits", "runs")]
    for each in dict.fromkeys(pbs_id(each, whole=True) for each in live):
        print(f"{each}.server")


def qdel(words: list[str]) -> None:
    """End jobs by the ids that they have."""
    known = {pbs_id(each, whole=True) for each in elements()}
    if set(words) - known:
        sys.exit(f"qdel: Unknown Job Id {(set(words) - known).pop()}")
    end(lambda each: pbs_id(each, whole=True) in words)


def end(wanted: Any) -> None:
    """Cancel the elements that are wanted."""
    found = elements()
    for each in found:
        if wanted(each) and each["state"] in ("waits", "runs"):
            each["state"] = "cancelled"
    keep(found)


# --- LSF --------------------------------------------------------------------------------------


def bsub(words: list[str]) -> None:
    """Read the script from standard input."""
    given = directives("lsf", sys.stdin.read())
    name = next(each[4:-1] if "%" not in each else each[4:] for each in given if each[:2] == "-J")
    found = re.fullmatch(r'([^[]*?)(?:\[([\d,-]+)\](?:%\d+)?)?"?', name)
    assert found is not None, name
    indices = spans(found[2]) if found[2] else None
    if indices and min(indices) < 1:
        sys.exit("Bad job name. Job not submitted.")
    number = went_in("lsf", found[1], words[words.index("-Jd") + 1], indices)
    print(f"Job <{number}> is submitted to queue <normal>.")


WORDS = {"waits": "PEND", "runs": "RUN", "cancelled": "EXIT"}


def bjobs(words: list[str]) -> None:
    """Say in JSON what is known of jobs; without -a and numbers, of those that live."""
    numbers = [int(word) for word in words if word.isdigit()]
    rows: list[dict[str, str]] = []
    for each in elements():
        wanted = each["number"] in numbers if numbers else each["state"] in ("waits", "runs")
        if not wanted:
            continue
        ended = "DONE" if each["code"] == 0 else "EXIT"
        index = each["index"]
        killed = each["state"] == "cancelled"
        rows.append(
            {
                "JOBID": str(each["number"]),
                "JOBINDEX": str(index or 0),
                "JOB_NAME": each["name"] + (f"[{index}]" if index else ""),
                "STAT": WORDS.get(each["state"], ended),
                "EXIT_CODE": "143" if killed else str(each["code"] or ""),
                "PEND_REASON": each["why"],
                "EXIT_REASON": "TERM_OWNER: job killed by owner" if killed else each["why"],
                "JOB_DESCRIPTION": each["script"],
            }
        )
    known = {each["number"] for each in elements()}
    rows += [
        {"JOBID": str(n), "ERROR": f"Job <{n}> is not found"} for n in numbers if n not in known
    ]
    if not rows:
        sys.exit("No unfinished job found")
    print(json.dumps({"COMMAND": "bjobs", "JOBS": len(rows), "RECORDS": rows}))
    sys.exit(255 if any("ERROR" in row for row in rows) else 0)


def bkill(words: list[str]) -> None:
    """End jobs."""
    end(lambda each: str(each["number"]) in words)


# --- Flux -------------------------------------------------------------------------------------


def flux(words: list[str]) -> None:
    """Hand on to the command that the first word names."""
    {"batch": flux_batch, "job": flux_job, "jobs": flux_jobs, "cancel": flux_cancel}[words[0]](
        words[1:]
    )


def flux_batch(words: list[str]) -> None:
    """Print the id, not in decimal."""
    given = directives("flux", Path(words[-1]).read_text())
    if "--dry-run" in words:
        if any("--mine" in each for each in given):
            sys.exit("flux-batch: ERROR: unrecognized arguments: --mine")
        return
    name = next(each.partition("=")[2] for each in given if each.startswith("--job-name="))
    [known] = [word.partition("=")[2] for word in words if word.startswith("--setattr=")]
    print(f"f{went_in('flux', name, known, None)}")


def flux_job(words: list[str]) -> None:
    """Do id, and info of a job's specification."""
    if words[0] == "id":
        print(words[-1].removeprefix("f"))
        return
    [each] = [each for each in elements() if str(each["number"]) == words[1]]
    key, _, path = each["script"].partition("=")
    print(
        json.dumps(
            {
                "attributes": {
                    "system": {"job": {"name": each["name"]}},
                    "user": {key.removeprefix("user."): json.loads(path)},
                }
            }
        )
    )


def flux_jobs(words: list[str]) -> None:
    """Print a line for each job that is asked for, or that lives."""
    numbers = [int(word) for word in words if word.isdigit()]
    for each in elements():
        live = each["state"] in ("waits", "runs")
        if each["number"] in numbers if numbers else live:
            state = {"waits": "SCHED", "runs": "RUN"}.get(each["state"], "INACTIVE")
            status = "CANCELED" if each["state"] == "cancelled" else "COMPLETED"
            status = status if not each["code"] else "FAILED"
            code = "143" if each["state"] == "cancelled" else each["code"]
            cells = (each["number"], each["name"], state, state if live else status)
            print(*cells, "" if code is None else code, "", each["why"], sep="\t")
    unknown = set(numbers) - {each["number"] for each in elements()}
    for number in unknown:
        print(f"JobID {number} unknown", file=sys.stderr)
    sys.exit(bool(unknown))


def flux_cancel(words: list[str]) -> None:
    """End jobs."""
    end(lambda each: str(each["number"]) in words)


if __name__ == "__main__":
    with Path("calls").open("a") as calls:
        print(*sys.argv[1:], file=calls)
    globals()[sys.argv[1]](sys.argv[2:])
