"""Commands of schedulers, each with a time-out."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from .base import NoAnswer, SchedulerError

TIMEOUT_S = 60.0
LOOK_S = 0.2  # between looks at what a command that runs has said
RETRIES_S = 5.0  # for a command that says that it tries again


def call(
    title: str, command: list[str], until: re.Pattern[str] | None = None, reads: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or for RETRIES_S if it says what until matches.

    title: of the scheduler; reads: the file that is its standard input
    Raises NoAnswer after TIMEOUT_S, SchedulerError where it cannot be run.
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
            heard = (late.stderr or b"").decode(errors="replace")
            if waited_s > RETRIES_S and until is not None and until.search(heard):
                return subprocess.CompletedProcess(command, 1, "", heard)
            if waited_s > TIMEOUT_S:
                raise NoAnswer(f"{command[0]} has not answered in {TIMEOUT_S:g} s") from None
            continue
        texts = (text.decode(errors="replace") for text in (out, err))
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def answer(done: subprocess.CompletedProcess[str]) -> str:
    """Return in a line what a command has said."""
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it ends with status {done.returncode} and says nothing"
