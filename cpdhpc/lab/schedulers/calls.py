"""Commands of schedulers, each with a time-out, and errors by what they print."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from .base import NoAnswer, QueueFull, Refusal, SchedulerError

TIMEOUT_S = 60.0
LOOK_S = 0.2  # between two looks at the output of a command
RETRIES_S = 5.0  # for a command that prints that it tries again


def call(
    title: str, command: list[str], until: re.Pattern[str] | None = None, reads: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or for RETRIES_S if its errors match until.

    title: of the scheduler; reads: the file that is its standard input
    Raises NoAnswer after TIMEOUT_S, SchedulerError if it cannot be run.
    """
    try:
        with (reads or Path(os.devnull)).open("rb") as stdin:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"LC_ALL": "C"},
            )
    except FileNotFoundError:
        raise SchedulerError(
            f"{command[0]} is not on PATH: is this a login node of a cluster with {title}? "
            "study run needs none"
        ) from None
    except OSError as error:
        raise SchedulerError(f"{command[0]} cannot be run: {error.strerror}") from None
    with process:
        try:
            return _ended(process, command, until)
        finally:
            process.kill()


def _ended(
    process: subprocess.Popen[bytes], command: list[str], until: re.Pattern[str] | None
) -> subprocess.CompletedProcess[str]:
    began_s = time.monotonic()
    while True:
        try:
            out, err = process.communicate(timeout=LOOK_S)
        except subprocess.TimeoutExpired as late:
            waited_s = time.monotonic() - began_s
            errors = (late.stderr or b"").decode(errors="replace")
            if waited_s > RETRIES_S and until is not None and until.search(errors):
                return subprocess.CompletedProcess(command, 1, "", errors)
            if waited_s > TIMEOUT_S:
                raise NoAnswer(f"{command[0]} has not answered in {TIMEOUT_S:g} s") from None
            continue
        texts = (text.decode(errors="replace") for text in (out, err))
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def answer(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command in a line."""
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it ends with status {done.returncode} and says nothing"


def no_answer(
    command: str, done: subprocess.CompletedProcess[str], unsure: re.Pattern[str]
) -> SchedulerError:
    """Return the error of a question that failed: NoAnswer if its output matches unsure."""
    text = answer(done)
    return (NoAnswer if unsure.search(text) else SchedulerError)(
        f"{command} does not answer: {text}"
    )


def not_submitted(
    script: Path,
    command: str,
    done: subprocess.CompletedProcess[str],
    unsure: re.Pattern[str],
    full: re.Pattern[str],
) -> SchedulerError:
    """Return the error of a submission that failed, by the output of its command.

    unsure, full: match the output if the request may have been read, and if there is no room
    """
    text = answer(done)
    if unsure.search(text):
        return NoAnswer(f"{script}: {command} has no answer: {text}")
    if full.search(text):
        return QueueFull(f"{script}: {command} takes no more: {text}")
    return Refusal(f"{script}: {command} refuses it: {text}")
