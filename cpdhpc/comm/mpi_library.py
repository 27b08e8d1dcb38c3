"""The MPI library of this process; the only file that imports mpi4py, and only when it is used."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


def running_mpi() -> Any:
    """Return the module mpi4py.MPI; importing it starts MPI unless mpi4py.rc says otherwise.

    Raises RuntimeError where MPI is not running.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "finalized already" if MPI.Is_finalized() else "not initialized"
        raise RuntimeError(f"World: MPI is {state}")
    return MPI


def thread_level(mpi: Any) -> str:
    """Return the thread level that MPI gives, by its name."""
    names = ("single", "funneled", "serialized", "multiple")
    return {getattr(mpi, f"THREAD_{name.upper()}"): name for name in names}[mpi.Query_thread()]


def library_version() -> str:
    """Return the name and version of the MPI library, its first line."""
    text = str(running_mpi().Get_library_version())
    return text.partition("\n")[0].partition(",")[0].rstrip("\0 ")


def abort_job(message: str) -> NoReturn:
    """Print message to stderr and end the job: all processes of it where MPI is running."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    running = sys.modules.get("mpi4py.MPI")  # importing it here would start MPI
    if running is not None and running.Is_initialized() and not running.Is_finalized():
        running.COMM_WORLD.Abort(1)
    raise SystemExit(1)
