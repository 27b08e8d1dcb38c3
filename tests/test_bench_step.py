"""bench step: a line for each way to train, of a job and of a module; what is refused."""

import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from training import ran

from cpdhpc.lab.bench.fsdp import backends_of, bare_jobs
from cpdhpc.lab.cli import main, parser

ROOT = Path(__file__).parent.parent

JOB = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "digits"
[train]
batch = 20
"""
NETS = """
import torch

def pixels():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))

def words():
    return torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))

def pair():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
        def forward(self, x):
            return x, self.weight
    return Pair()

def own(size, forward, fill=1.0):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((size,), fill))
        def forward(self, x):
            return forward(self.weight, x)
    return Own()

def hollow():
    return own(0, lambda weight, x: weight.sum())

def detached():
    return own(1, lambda weight, x: x)

def unknown():
    return own(1, lambda weight, x: weight * x.sum(), float("nan"))

def lazy():
    return torch.nn.LazyLinear(2)

number = 3
"""
FEW = ["--repeats", "2", "--warmup", "0"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "own_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)


def rows_of(out: str) -> dict[str, list[float]]:
    """Return the numbers of each row; - as NaN."""
    lines = [line for line in out.splitlines() if line and line[0] != "#"]
    split = [line.rsplit(maxsplit=8) for line in lines]
    return {
        name.strip(): [math.nan if cell == "-" else float(cell) for cell in cells]
        for name, *cells in split
    }


@pytest.mark.parametrize(
    "what",
    [
        ["job.toml"],
        ["own_nets:pixels", "--input", "3,2,2", "--batch", "3"],
        ["own_nets:words", "--input", "6", "--tokens", "9"],
    ],
)
def test_each_way_has_its_line(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """On one process the mean is the gradient itself, whoever averages."""
    assert main(["bench", "step", *what, "--methods", "none", "lowbit:wire=e4m3", *FEW]) == 0
    rows = rows_of(capsys.readouterr().out)
    names = ("none", "lowbit:wire=e4m3")
    ways = [f"{name}{way}" for name in names for way in ("", " overlap", " hook")]
    assert list(rows) == ["alone", "ddp", *ways]
    for name, (step, fastest, slowest, by_ddp, reduce, total, _, error) in rows.items():
        assert 0 <= fastest <= step <= slowest
        ddp = rows["ddp"][0]
        assert abs(by_ddp * ddp - step) <= 0.006 * (1 + by_ddp + ddp)  # two decimals of each
        assert math.isnan(reduce) == math.isnan(total) == (name not in names)
        assert math.isnan(error) if name == "alone" else error == 0 or "e4m3" in name
    assert all(0 < rows[each][7] < 2**-4 for each in ways[3:])  # 3 bits of mantissa: half an ulp


TAKEN = """
import numpy as np, torch
from cpdhpc.lab.bench.step import PeakMemory
watch = PeakMemory(torch.device("cpu"))
taken = np.ones(1 << 22)
del taken
print(watch.peak_bytes(), PeakMemory(torch.device("cpu")).peak_bytes())
"""


def test_memory_is_what_is_taken_and_touched() -> None:
    """In a process whose other threads take none meanwhile."""
    run = [sys.executable, "-c", TAKEN]
    out = ran(run, check=True).stdout
    peak, later = map(float, out.split())
    # what is freed again counts, what was freed before does not. Linux counts pages by threads, in
    # lots of 64 (proc(5), VmRSS: inaccurate), so some may be missing; the interpreter takes others
    assert (1 << 25) - (1 << 20) <= peak < 1.25 * (1 << 25) and later < 1 << 22


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["none.toml"], "none.toml: cannot be read"),
        (["own_nets"], 'must be "module:function"'),
        (["own_nets:pixel"], "did you mean pixels?"),
        (["own_nets:number"], "has no function number"),
        (["own_nets:pair", "--input", "3"], "own_nets:pair: returned tuple: must be a tensor"),
        (["torch.nn:Identity"], "torch.nn:Identity: has no parameter that is trained"),
        (["own_nets:hollow"], "own_nets:hollow: has no parameter that is trained"),
        (["own_nets:lazy"], "own_nets:lazy: has lazy parameters"),
        (["own_nets:detached"], "own_nets:detached: inputs"),
        (["own_nets:unknown"], "own_nets:unknown: gradients have NaN or infinity"),
        (["own_nets:pixels", "--input", "3,0"], "--input 3,0: must be numbers, 1 or more"),
        (["own_nets:pixels", "--batch", "0"], "--batch 0: must be 1 or more"),
        (["own_nets:pixels", "--methods", "nine"], "--methods nine: "),
        (["own_nets:words", "--input", "6"], "own_nets:words: "),
        (["job.toml", "--set", "train.virtual_ranks=2"], "train.virtual_ranks=2: must be 1"),
    ],
)
def test_what_is_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *options, *FEW]) == 2
    assert said in capsys.readouterr().err


def test_commands_of_the_page_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their jobs and backends; tests/mpi/test_mpi_bench_torch.py runs such ones on two ranks."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "reference" / "torch_backend.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^    mpirun -n 2 python -m cpdhpc (bench .*)$", page, re.MULTILINE)
    assert len(found) == 3
    for argv in map(shlex.split, found):
        arguments = parser(argv).parse_args(argv)
        assert backends_of(arguments.backends).keys() >= {"gloo", "cpdhpc"}
        assert bare_jobs(Path(argv[2]), arguments, " ".join(argv[:2]))
