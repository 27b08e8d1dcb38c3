"""Process 0's display of a run: a bar on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PARENT, TERMINAL = 1, 4  # of proc_pid_stat(5), after the name
QUIET_S = 10  # among many runs, one that takes longer shows its epochs


class Display:
    """Shows the progress of one run after another; silent unless shown is true."""

    def __init__(self, shown: bool, runs: int) -> None:
        self.shown, self.runs, self.run = shown, runs, 0
        self.last_s = time.monotonic()  # when the last line was printed
        self.console = Console(force_terminal=on_terminal(), highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not (shown and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", note="")

    def start(self, run_id: str, samples: int, done: int) -> None:
        """Begin a run of so many samples, some of which it may have seen already."""
        self.run += 1
        self.bar.start()
        self.bar.reset(self.task, total=samples, completed=done, note="", description=run_id)

    @property
    def has_bar(self) -> bool:
        return not self.bar.disable

    def step(self, samples: int = 1, note: str | None = None) -> None:
        """Count samples seen; note: text after the bar, None: unchanged."""
        self.bar.advance(self.task, samples)
        if note is not None:
            self.bar.update(self.task, note=note)

    def epoch(self, run_id: str, epoch: int, epochs: int, note: str) -> None:
        """Show the result of an epoch; see note."""
        if not self.has_bar and (self.runs == 1 or time.monotonic() - self.last_s > QUIET_S):
            self.line(f"{self._which()}{run_id}: epoch {epoch} of {epochs}: {note}")
        self.bar.update(self.task, note=note)

    def end(self, text: str) -> None:
        """Remove the bar and print a final line."""
        self.bar.stop()
        self.line(f"{self._which()}{text}")

    def line(self, text: str) -> None:
        self.last_s = time.monotonic()
        if self.shown:
            self.console.print(text, markup=False)

    def _which(self) -> str:
        return f"[{self.run}/{self.runs}] " if self.runs > 1 else ""


def on_terminal() -> bool:
    """Whether a person sees stdout; mpirun gives ranks a terminal even if it has none itself.

    If stdout is not the controlling terminal, the nearest ancestor process with another stdout
    decides: mpirun, whatever was started in between.
    """
    if not sys.stdout.isatty():
        return False
    try:
        ours, pid = Path("/proc/self/fd/1").readlink(), os.getpid()
        if int(_status(pid)[TERMINAL]) == os.fstat(1).st_rdev:
            return True
        while True:
            pid = int(_status(pid)[PARENT])
            other = Path(f"/proc/{pid}/fd/1").readlink()
            if other != ours:
                return str(other).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # another user's process, or not Linux
        return False


def _status(pid: int) -> list[str]:
    """Return the system's data on a process, after its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
