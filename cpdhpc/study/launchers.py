"""How MPI programs start inside a Slurm job, one row for each way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from shlex import quote


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks.

    command: of the shell, with the fields ranks, ppn (ranks per node), cpus (cores per rank)
    many_cpus: what replaces the field bind where a rank has several cores
    signal: what sbatch --signal has before the seconds. A launcher that runs in the batch shell
        gets the signal from that shell ("B:USR1"): sent to all steps it would hit Open MPI's
        daemons, and mpirun would end with status 0. Under srun the ranks are the step.
    """

    command: str
    many_cpus: str
    signal: str


# srun does not take over sbatch's cpus-per-task. A rank that dies alone ends the others after
# --wait seconds. Not at once, by --kill-on-bad-exit: when all ranks end with status 85, those that
# are a little later would be killed, and theirs would be srun's status.
SRUN = (
    "srun --mpi={} --ntasks={{ranks}} --ntasks-per-node={{ppn}} --cpus-per-task={{cpus}} "
    "--kill-on-bad-exit=0 --wait=60"
)
LAUNCHERS = {
    "mpirun": Launcher(  # Open MPI
        "mpirun -n {ranks} --map-by ppr:{ppn}:node{bind}", ":PE={cpus}", "B:USR1"
    ),
    "mpiexec": Launcher(  # MPICH's hydra and what descends from it
        "mpiexec -n {ranks} -ppn {ppn}{bind}", " -bind-to core:{cpus}", "B:USR1"
    ),
    "srun-pmix": Launcher(SRUN.format("pmix"), "", "USR1"),
    "srun-pmi2": Launcher(SRUN.format("pmi2"), "", "USR1"),
    "srun-cray": Launcher(SRUN.format("cray_shasta"), "", "USR1"),
}


def launch(name: str, ranks: str, ppn: str, cpus: int, flags: Iterable[str] = ()) -> str:
    """Return the words of the shell before the program.

    ranks, ppn: numbers, or shell words that become numbers in the job
    """
    way = LAUNCHERS[name]
    bind = way.many_cpus.format(cpus=cpus) if cpus > 1 else ""
    command = way.command.format(ranks=ranks, ppn=ppn, cpus=cpus, bind=bind)
    return " ".join([command, *map(quote, flags)])
