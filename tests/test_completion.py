"""Completion: the scripts in the shells themselves, and without torch."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from every import every
from training import ran

from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.completion import SHELLS

LACKS_TORCH = """import sys
sys.modules["torch"] = None
from cpdhpc.lab.cli import main
sys.exit(main(["completion", "bash"]))
"""
LINES = (  # the words before Tab, what bash offers
    ("st", ["study"]),
    ("study su", ["submit"]),
    ("study status --js", ["--json"]),
    ("bench allreduce --al", ["--algorithms", "--all"]),
    ("bench allreduce --device ", ["cpu", "gpu"]),
    ("completion ", list(SHELLS)),
    ("train job", ["job.toml", "jobs"]),
    ("train job.toml --out job", ["jobs"]),
    ("report --html x", []),
    ("autoencoder pr", ["probe"]),
    ("autoencoder probe job.toml --fe", ["--features"]),
    ("bench overlap --r", ["--rows", "--repeats"]),
)


def offered(line: str, source: Path) -> list[str]:
    """What bash offers after words of cpdhpc: it calls the function that `complete` names."""
    words = ["cpdhpc", *line.split(" ")]
    program = f"""
        source {shlex.quote(str(source))}
        COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}
        name=$(complete -p cpdhpc | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        "$name"; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = ran(["bash", "--norc", "-c", program], cwd=source.parent, check=True)
    return done.stdout.split()


def check(script: str, directory: Path, *, torch: bool) -> None:
    """Compare what bash offers for all LINES; torch: whether it was there for the script."""
    source = directory / "completion"
    source.write_text(script)
    (directory / "job.toml").touch()
    (directory / "jobs").mkdir()
    for line, expected in LINES:
        known = expected if torch or not line.startswith("bench overlap ") else []
        assert sorted(offered(line, source)) == sorted(known), line


def test_bash_completes_commands_options_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    check(capsys.readouterr().out, tmp_path, torch=True)


def test_without_torch_only_options_of_commands_that_import_it_are_missing(tmp_path: Path) -> None:
    done = ran([sys.executable, "-c", LACKS_TORCH])
    assert done.returncode == 0, done.stderr
    check(done.stdout, tmp_path, torch=False)


@every("shell", SHELLS)
def test_each_shell_reads_its_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    source = tmp_path / "completion"
    source.write_text(capsys.readouterr().out)
    assert "allreduce" in source.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(source)], check=True, timeout=600)
