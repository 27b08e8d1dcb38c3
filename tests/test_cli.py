"""The command line: help, errors of one line on one rank, exit statuses on all, signals."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_page import commands, parser_of
from every import every
from training import mpirun, ran, write_idx, write_job

import cpdhpc
from cpdhpc import store
from cpdhpc.config import UserError
from cpdhpc.lab.autoencoder import job as autoencoder_job
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import COMMANDS
from cpdhpc.lab.train import job as train_job
from cpdhpc.world.mpi import World

BUG = """
import sys
import cpdhpc.lab.provenance
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import COMMANDS
from cpdhpc.world.mpi import World

if World().rank == 1:
    cpdhpc.lab.provenance.gpu = None
sys.exit(main(["info"]))
"""


@every("command", [[], *([name] for name in COMMANDS)])
def test_help_tells_what_there_is(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: cpdhpc" in shown
    assert len(shown.splitlines()) >= 5


METAVARS = (  # of what may come from the command line
    r"(FILE|MODEL|RUN|STUDY|MACHINE|RUN\.checkpoint)?(\.(h5|toml|png|html|npy|csv))?|DIR|FOLDER|NUMBER"
    r"|(N|NAME|SIZE|GBIT|A:B|MODE|KIND|PATTERN|NAME=VALUE|RANGE:BITS|ROWSxCOLUMNS)([,;]\.\.\.)?"
    r"|NAME\[:OPTION=VALUE,...\]|(data\.)?KEY=VALUE|SECONDS|MIB|RATE|TFLOPS|SHARE|POINTS|ACTION|WORDS"
)


@every("command", list(commands()))
def test_options_say_what_they_take_and_their_defaults(command: list[str]) -> None:
    """No option's value is called as the option, and each default is in the text, once."""
    here = parser_of(command)
    shown = here._get_formatter()
    for action in here._actions:
        if action.nargs == 0:
            continue
        if not action.choices:
            assert re.fullmatch(METAVARS, str(action.metavar)), action.option_strings
        if action.default not in (None, "", []):
            assert shown._expand_help(action).count("default") == 1, action.option_strings
        else:
            assert shown._expand_help(action), action.option_strings


@pytest.mark.parametrize(
    ("command", "load", "text"),
    [
        ("train", train_job.load, '[model]\nname = "mlp"\nhidden = [4]\n[data]\nname = "idx"\n'),
        (
            "autoencoder",
            autoencoder_job.load,
            '[data]\nname = "idx"\n[[layer]]\nmaps = 2\nfield = 4\npool = 1\n',
        ),
    ],
)
def test_keys_that_help_shows_are_keys_of_the_job(
    command: str,
    load: Callable[[Path, list[str]], object],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    (keys,) = re.findall(r"for example (\S+) or (\S+);", " ".join(capsys.readouterr().out.split()))
    assert load(path, list(keys))
    with pytest.raises(UserError, match=r"unknown key train\.no_such_key"):
        load(path, [*keys, "train.no_such_key=3"])


@every(
    "line, said",
    [
        ("info --nope", "info: unknown option --nope: -h shows all"),
        ("bench throughput --metods=topk", "unknown option --metods: did you mean --methods?"),
        ("train x.toml --ste train.epochs=1", "train: unknown option --ste: did you mean --set?"),
        ("study status x y", "study status: y: is one argument too many: -h shows all"),
        ("bench allreduce --device tpu", "bench allreduce: --device tpu: did you mean gpu or cpu?"),
        ("report x --tolerance y", "report: --tolerance y: must be a number"),
        ("bench batchnorm --seed y", "bench batchnorm: --seed y: must be an integer"),
        ("precision replay x --ranks 2,y", "--ranks 2,y: must be integers, for example 2,4"),
        ("study status x --watch -1", "--watch -1: must be a number of seconds above 0"),
        ("train x.toml --timeout -1", "train: --timeout -1: must be a number of seconds above 0"),
        ("report x --png", "--png expected one argument: write one that begins with - after ="),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what_was_meant(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


def test_what_is_missing_is_said_with_the_commands_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ([], ["bench"], ["bench", "predict"], ["train"]):
        with pytest.raises(SystemExit) as caught:
            main(command)
        assert caught.value.code == 2
        shown = capsys.readouterr().err
        assert shown.startswith(" ".join(["usage: cpdhpc", *command]))
        assert "the following arguments are required" in shown.splitlines()[-1]


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cpdhpc {cpdhpc.__version__}\n"


def test_help_and_report_need_neither_torch_nor_mpi(tmp_path: Path) -> None:
    program = (
        "import sys; from cpdhpc.lab.cli import main\n"
        f"status = main(['report', {str(tmp_path)!r}])\n"
        "heavy = {'torch', 'mpi4py.MPI', 'cupy', 'cpdhpc.lab.train'}\n"
        "assert not heavy & set(sys.modules), 'heavy'\n"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", program]
    done = ran(command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"cpdhpc: error: {tmp_path}: nothing that report shows: ")
    assert done.stderr.count("\n") == 1


@every("command", ["train x.toml", "bench allreduce", "bench latency", "bench fit --out m"])
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
        said = f"--timeout {wrong}: must be a number of seconds above 0"
        assert said in capsys.readouterr().err


def test_the_timeout_of_train_is_the_jobs(tmp_path: Path) -> None:
    write_idx(tmp_path)
    out = tmp_path / "out"
    job = write_job(tmp_path, "job", tmp_path)
    assert main(["train", job, "--timeout", "7", "--out", str(out)]) == 0
    assert "timeout_s = 7.0" in store.read_attributes(out / "job-s0.h5")["toml"]


def test_any_other_error_ends_the_job_with_a_traceback_of_its_rank() -> None:
    done = mpirun(2, "-c", BUG)
    assert done.returncode == 1
    assert "rank 1 | Traceback" in done.stderr
    assert "TypeError: 'NoneType' object is not callable" in done.stderr


SLOW_START = """
import sys, time, types
class Slow(types.ModuleType):
    def __getattr__(self, name):
        if name != "World": raise AttributeError(name)
        print("starting", flush=True)
        time.sleep(60)
sys.modules["cpdhpc.world.mpi"] = Slow("cpdhpc.world.mpi")
sys.argv = ["cpdhpc", "bench", "latency"]
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import COMMANDS
main()
"""
PLANS = """
import sys, time
from cpdhpc.lab.commands import study
def wait(arguments):
    try:
        print("starting", flush=True)
        time.sleep(60)
    finally:
        print("tidied up", flush=True)
study.run_plan = wait
sys.argv = ["cpdhpc", "study", "plan", "x.toml"]
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import COMMANDS
sys.exit(main())
"""


@every("program, status, said", [(SLOW_START, -signal.SIGINT, ""), (PLANS, 130, "tidied up\n")])
def test_ctrl_c_ends_a_command_without_a_traceback(program: str, status: int, said: str) -> None:
    """At once where ranks start; where files are written they are tidied up first."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "starting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (status, said, "")


def test_a_terminal_that_lacks_a_character_shows_another(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "cpdhpc", "examples", str(tmp_path / "±")]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    run = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120)
    assert (run.returncode, run.stderr) == (0, "") and str(tmp_path / "?") in run.stdout
