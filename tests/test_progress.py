"""The bar is for people: mpirun gives ranks a terminal even where its own output is a file."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from training import ROOT, environment

PROGRESS = ROOT / "cpdhpc" / "lab" / "train" / "progress.py"
CHILD = """
import runpy, sys
progress = runpy.run_path(sys.argv[1])  # the file alone: its package imports torch
print(progress["on_terminal"](), file=sys.stderr, flush=True)
display = progress["Display"](True, 1)
display.start("run", 2, 0)
display.epoch("run", 1, 2, "accuracy 50.00%, loss 1.2500")
display.end("run: complete")
"""
PARENT = """
import os, pty, subprocess, sys
print("first", flush=True)
outer, inner = pty.openpty()
command = [*sys.argv[3:], sys.executable, "-c", *sys.argv[1:3]]
done = subprocess.run(command, stdout=inner, stderr=subprocess.PIPE, check=True)
print(done.stderr.decode(), os.read(outer, 100000).decode(), flush=True)
"""


@pytest.mark.parametrize(
    ("terminal", "between"), [(True, []), (True, ["timeout", "600"]), (False, ["timeout", "600"])]
)
def test_a_bar_only_where_the_launcher_writes_to_a_terminal(
    tmp_path: Path, terminal: bool, between: list[str]
) -> None:
    log = tmp_path / "log"
    outer, inner = pty.openpty()
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", PARENT, CHILD, str(PROGRESS), *between],
            stdout=inner if terminal else file,
            env=environment() | {"TERM": "xterm"},
            check=True,
            timeout=1800,
        )
    os.close(inner)
    shown = os.read(outer, 100000).decode() if terminal else log.read_text()
    assert shown.startswith("first"), "the log is as it was"
    assert str(terminal) in shown
    assert ("epoch 1 of 2: accuracy 50.00%, loss 1.2500" in shown) == (not terminal)
    assert ("\x1b[" in shown) == terminal
    assert "run: complete" in shown
