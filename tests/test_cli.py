"""The command line: help, errors of one line on one rank, exit statuses on all, signals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training import environment, mpirun, write_idx

from cpdhpc import store
from cpdhpc.cli import COMMANDS, main
from cpdhpc.config import UserError
from cpdhpc.world.mpi import World

DRIVER = """
import json, sys
import numpy as np
import cpdhpc.train.step as steps
from cpdhpc.cli import main
from cpdhpc.world.mpi import World

world, backward, calls = World(), steps.backward, []

def poisoned(model, *rest):
    loss = backward(model, *rest)
    calls.append(loss)
    if len(calls) == 3 and world.process == 1:
        list(model.parameters())[2].grad[0, 0] = np.nan
    return loss

for case in json.loads(sys.argv[1]):
    steps.backward = poisoned if "poison" in case[-1] else backward
    world.barrier()
    print(f"status {world.process} {main(case)}", flush=True)
"""
BUG = """
import sys
import cpdhpc.provenance
from cpdhpc.cli import main
from cpdhpc.world.mpi import World

if World().rank == 1:
    cpdhpc.provenance.gpu = None
sys.exit(main(["info"]))
"""


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_tells_what_there_is(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: cpdhpc" in shown
    assert len(shown.splitlines()) >= 5


def test_help_and_report_need_neither_torch_nor_mpi(tmp_path: Path) -> None:
    program = (
        "import sys; from cpdhpc.cli import main\n"
        f"status = main(['report', {str(tmp_path)!r}])\n"
        "assert not {'torch', 'mpi4py.MPI', 'cupy'} & set(sys.modules), 'heavy'\n"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"cpdhpc: error: {tmp_path}: there is no file of a study or")
    assert done.stderr.count("\n") == 1


def job_file(directory: Path, name: str, data: Path) -> str:
    path = directory / f"{name}.toml"
    path.write_text(
        f"[data]\nname = 'idx'\ndir = '{data}'\n[train]\nepochs = 1\nbatch = 4\nthreads = 1\n"
    )
    return str(path)


def test_what_the_user_can_mend_is_one_line_and_a_status_on_all_ranks(tmp_path: Path) -> None:
    """One mpirun for all: what the line says and the command, the last with a NaN on rank 1."""
    images, cut, out = tmp_path / "images", tmp_path / "cut", str(tmp_path / "out")
    images.mkdir()
    cut.mkdir()
    write_idx(images)
    (cut / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03 cut off")
    good = job_file(tmp_path, "good", images)
    (tmp_path / "wall").write_bytes(b"")
    cases = {
        "gone.toml: cannot be read": ["train", str(tmp_path / "gone.toml")],
        "unknown key train.epoch: did you mean epochs?": ["train", good, "--set", "train.epoch=3"],
        "train.batch='x': should be a valid integer": ["train", good, "--set", "train.batch=x"],
        "--set x: the form is": ["train", good, "--set", "x"],
        "gradient: parse_format: 'e4': known are eXmY": [
            *("train", good, "--set", "gradient.aggregator=lowbit", "--set", "gradient.wire=e4"),
        ],
        "train-images-idx3-ubyte: 12 bytes, the header alone has 16": [
            *("train", job_file(tmp_path, "cut", cut), "--out", out),
        ],
        "nothing/train-images-idx3-ubyte: there is no such file": [
            *("train", good, "--set", "data.dir=nothing", "--out", out),
        ],
        "wall: cannot be made": ["train", good, "--out", str(tmp_path / "wall")],
        "": ["train", good, "--out", out],
        "is there already: --resume goes on": ["train", good, "--out", out],
        "model.hidden is [64] there and [8] here": [
            *("train", good, "--out", out, "--resume"),
            *("--set", "model.name=mlp", "--set", "model.hidden=[8]"),
        ],
        "good-s0: iteration 2: allreduce: NaN or infinity in '3.weight' on rank 1": [
            *("train", good, "--out", str(tmp_path / "poison")),
        ],
    }
    done = mpirun(2, "-c", DRIVER, json.dumps(list(cases.values())))
    assert done.returncode == 0, done.stderr
    for rank in "01":
        statuses = [
            int(line.split()[2])
            for line in done.stdout.splitlines()
            if line.startswith(f"status {rank}")
        ]
        assert statuses == [2 if says else 0 for says in cases]
    errors = done.stderr.splitlines()
    assert len(errors) == len([says for says in cases if says]), done.stderr
    for line, says in zip(errors, filter(None, cases), strict=True):
        assert line.startswith("cpdhpc: error: ")
        assert says in line


@pytest.mark.parametrize(
    "command", ["train x.toml", "bench allreduce", "bench latency", "bench fit --out m"]
)
def test_the_timeout_is_that_of_the_world(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The world is replaced by one that only shows how long it would wait."""

    def world(timeout_s: float) -> World:
        raise UserError(f"waits {timeout_s} s")

    monkeypatch.setattr("cpdhpc.world.mpi.World", world)
    for options, shown in (("--timeout 2.5", "waits 2.5 s"), ("", "waits 600.0 s")):
        assert main([*command.split(), *options.split()]) == 2
        assert shown in capsys.readouterr().err
    for wrong in ("0", "-1", "nan", "x"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--timeout", wrong])
        assert f"argument --timeout: invalid seconds value: '{wrong}'" in capsys.readouterr().err


def test_the_timeout_of_train_is_the_jobs(tmp_path: Path) -> None:
    write_idx(tmp_path)
    out = tmp_path / "out"
    job = job_file(tmp_path, "job", tmp_path)
    assert main(["train", job, "--timeout", "7", "--out", str(out)]) == 0
    assert "timeout_s = 7.0" in store.read_attributes(out / "job-s0.h5")["toml"]


def test_any_other_error_ends_the_job_with_a_traceback_of_its_rank() -> None:
    done = mpirun(2, "-c", BUG)
    assert done.returncode == 1
    assert "rank 1 | Traceback" in done.stderr
    assert "TypeError: 'NoneType' object is not callable" in done.stderr
