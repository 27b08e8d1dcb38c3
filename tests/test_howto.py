"""The how-to guides and tutorials of docs: their files are read, their commands and Python run.

A block of TOML or Python whose first line is `# NAME` is a file; other blocks of Python run in one
namespace of their page. Commands of cpdhpc run in this process, on one rank even if they are under
mpirun; files of Python are launched on two. Not run are submissions to Slurm, and bench fit, which
refuses machines that other programs use: a machine of round figures stands in.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readme import lay_out
from training import ROOT, ran

from cpdhpc.collectives.method import DEFAULT
from cpdhpc.lab.bench.machine import write
from cpdhpc.lab.cli import main, parser

FOLDERS = [ROOT / "docs" / name for name in ("howto", "tutorials")]
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md")) if page.stem != "index"]
# These name commands in passing, or need a cluster or GPUs; test_tutorial.py has the last one.
NOT_RUN = {"choose", "coming_from", "gpu", "install", "moving_from_0.2", "verify", "first_study"}
NOT_RUN |= {"try_commands"}  # tests/test_readme.py runs these
RUN = [page for page in PAGES if page.stem not in NOT_RUN]
QUICKER = {  # what is added to commands that measure
    "bench allreduce": ["--repeats", "2", "--sizes", "64KiB"],
    "bench accuracy": ["--values", "64"],
    "bench predict": ["--ranks", "16", "--ranks-per-node", "4", "--sizes", "1MiB"],
    "bench throughput": ["--workers", "4", "--links", "1", "--methods", "none,powersgd"],
    "report results/now": ["--tolerance", "1000"],  # other tests may run meanwhile
    "precision replay": ["--ranks", "2", "--scalings", "none", "--accumulates", "e6m9"],
}
INSTEAD = {"study submit": ["study", "run"]}  # without Slurm, and without --site


def blocks(page: Path) -> list[tuple[str, str]]:
    """The languages and texts of a page's blocks."""
    return re.findall(r"```(toml|python|sh)\n(.*?)```", page.read_text(), re.DOTALL)


def launched(words: list[str]) -> None:
    """Run Python with these words on two ranks."""
    command = [str(ROOT / "slurm" / "mpirun-local"), "2", sys.executable, *words]
    done = ran(command)
    assert done.returncode == 0, done.stdout + done.stderr


def run(line: str) -> None:
    """Run a line that a page says to type, made quick; patterns of files become files."""
    words = shlex.split(re.sub(r"^mpirun -n \d+ ", "", line), comments=True)
    assert words[:2] == ["python", "-m"] and words[2] in ("cpdhpc", "mpi4py"), line
    if words[2] == "mpi4py":
        return launched(words[1:])
    words = [file for word in words[3:] for file in (sorted(map(str, Path().glob(word))) or [word])]
    name = " ".join(words[:2])
    words += QUICKER.get(name, [])
    if name in INSTEAD:
        parser(words).parse_args(words)
        words = INSTEAD[name] + words[2:3]
    if name == "bench fit":
        return write(parser(words).parse_args(words).out, DEFAULT, {"ranks": 2})
    assert main(words) == 0, line


def test_there_are_twenty_guides() -> None:
    assert len([page for page in PAGES if page.parent.name == "howto"]) >= 20
    index = (ROOT / "docs" / "howto" / "index.md").read_text()
    listed = re.findall(r"^([\w.]+)$", index, re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in PAGES if page.parent.name == "howto")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_all_that_a_page_says_to_type(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    here: dict[str, Any] = {"__name__": "page"}
    ran = 0
    try:
        for language, text in blocks(page):
            named = re.match(r"# ([\w.]+\.(?:toml|py))\n", text)
            if named:
                Path(named[1]).write_text(text)
            elif language == "python":
                exec(compile(text, page.name, "exec"), here)
                ran += 1
            for line in text.splitlines() if language == "sh" else ():
                run(line)
                ran += 1
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert ran


def test_gallery_commands_are_ours() -> None:
    """Each command of the gallery and of the decision page is one that the parser takes."""
    for name in ("measurements/gallery", "howto/choose"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        lines = re.findall(r"^    ((?:mpirun -n \d+ )?python -m cpdhpc .*)$", text, re.MULTILINE)
        assert len(lines) >= 3
        for line in lines:
            words = shlex.split(re.sub(r"^mpirun -n \d+ ", "", line), comments=True)[3:]
            parser(words).parse_args(words)
