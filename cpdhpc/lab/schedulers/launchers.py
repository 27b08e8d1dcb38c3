"""Launchers: the words that start ranks and place them, and those that come with an MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...config import UserError
from ..binding import CORE_BINDINGS

FIELDS = ("ranks", "ppn", "nodes", "cores")  # ppn: ranks of a node; cores: of a rank


@dataclass(frozen=True)
class Counts:
    """Ranks in all, ranks of a node, and nodes, as words of the shell."""

    ranks: str
    ppn: str
    nodes: str


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks.

    command: of the shell, with the fields of FIELDS; Slurm's launchers take the cores of a rank
        from the job, because it may be submitted with others than in its script
    in_order: options that place the ranks of a node on its cores in their order, so that each is
        near its GPU if GPUs are numbered along the sockets
    signal: the signal that Slurm sends to the step before the time is over; "": to the script
    gpus: the option that gives each rank a GPU, if the launcher needs one
    one_gpu: the options with which each rank sees one GPU, its own; "": launchers.OWN_GPU does it
    forward: the command of the script that forwards the signal "$1" to the ranks
    part: options that start ranks on some of the job's nodes
    bind, distribution: options by names of lab.binding; those of "" are the default. Options of
        distribution take the place of the field {deal} in a command that has it
    several: options in place of bind[""] if a rank has more than one core
    """

    command: str
    in_order: str = ""
    signal: str = ""
    gpus: str = ""
    one_gpu: str = ""
    forward: str = 'kill -"$1" "$launched"'
    part: str = ""
    bind: Mapping[str, str] = field(default_factory=dict)
    distribution: Mapping[str, str] = field(default_factory=dict)
    several: str = ""

    def start(self, counts: Counts, cores: int, seats: tuple[str, str] = ("", "")) -> str:
        """Return the words that start ranks, and place them.

        cores: of a rank; seats: how ranks are bound and distributed; "": the launcher's default
        Raises UserError for a binding or distribution without an option.
        """
        bind, distribution = seats
        bind = "" if bind == "gpu" else bind  # cores are then as by default
        for name, given, known in (
            ("bind", bind, self.bind),
            ("distribution", distribution, self.distribution),
        ):
            if given and given not in known:
                raise UserError(f"{name} = {given!r}: {self.program} has no option known for it")
        numbers = vars(counts) | {"cores": cores}
        deal = self.distribution.get(distribution, "")
        placed = self.bind.get(bind, "")
        if cores > 1 and not bind:
            placed = self.several or placed
        form = self.command + ("" if "{deal}" in self.command else deal) + placed
        return form.format(**numbers, deal=deal.format(**numbers))

    @property
    def program(self) -> str:
        """The program that must be on PATH."""
        return self.command.split()[0]


# A launcher without an option for it starts this in place of the program. Of the GPUs that the
# scheduler shows, each rank then sees the one that has the number of the rank on its node.
# Open MPI has no such option; hydra has -gpus-per-proc, but not before MPICH 4 nor in Intel MPI.
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID")
OWN_GPU = (
    "sh",
    "-c",
    f"gpu=${{{LOCAL_RANKS[0]}:-${{{LOCAL_RANKS[1]}:-${{{LOCAL_RANKS[2]}:?"
    "bind is gpu, and no variable of the launcher has the number of the rank on its node}}}; "
    '[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || '
    'gpu=$(echo "$CUDA_VISIBLE_DEVICES," | cut -d, -f$((gpu + 1))); '
    'export CUDA_VISIBLE_DEVICES="$gpu"; exec "$@"',
    "sh",
)


def open_mpi(hosts: str = "", cores: str = ":PE={cores}", given: str = "") -> Launcher:
    """Return Open MPI's mpirun, which fills the slots of a node package by package, or in turn.

    hosts: its option for them, "" if it asks the scheduler
    cores: the option for the cores of a rank; given: the same by a variable of the job
    """
    return Launcher(
        f"mpirun -n {{ranks}}{hosts} --map-by {{deal}}",
        bind={each: f" --bind-to {each}" for each in CORE_BINDINGS}
        | {"": given, "core": f"{given or cores} --bind-to core"},
        distribution=dict.fromkeys(("", "block"), "ppr:{ppn}:node") | {"cyclic": "package"},
        several=given or cores,
    )


def hydra(hosts: str = "", cores: str = ":{cores}", given: str = "") -> Launcher:
    """Return the mpiexec of MPICH and its descendants, which takes one binding. See open_mpi."""
    core = f" -bind-to core{cores}"
    return Launcher(
        f"mpiexec -n {{ranks}}{hosts} -ppn {{ppn}}",
        bind={each: f" -bind-to {each}" for each in CORE_BINDINGS} | {"": given, "core": core},
        distribution={"block": " -map-by core", "cyclic": " -map-by socket"},
        several=given or core,
    )
