"""Loss of a job that torch's FSDP2 has trained, over gloo and over MPI in few bits.

The job's model is trained from each of its seeds for some steps, once for each backend: its data,
loss, optimizer and train.batch, at train.learning_rate. Each block is sharded on its own. The loss
is that of all test samples afterwards. Rounding is "gradient" for sums and "parameter" for what
is gathered; without them the backend cpdhpc sends what torch gives it.
"""

from __future__ import annotations

import argparse
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ...config import ConfigError, Section, UserError, Whole
from ...ops.tensors import CPU
from ...torch.backend.registration import register
from ...torch.backend.wires import FROM_BYTES, set_wires
from ...world.mpi import World
from ..kinds import flags, printing
from ..kinds.allreduce_cases import torch_group
from ..settings import add_settings, options, settings_of
from ..signals import Caught
from ..train.command import Trainer, check_jobs
from ..train.job import Job, load
from ..train.samples import Dataset, StreamedData, epoch_order, shard, taken
from ..train.setup import build_model, own_threads, samples_of
from .overlap import check_plain


class Backend(Section):
    """A backend of torch.distributed, and how its groups send values."""

    @abstractmethod
    def group(self) -> distributed.ProcessGroup:
        """Return a new process group of all ranks. Collective. Raises UserError on all alike."""


class Gloo(Backend):
    """torch's own backend for CPUs."""

    def group(self) -> distributed.ProcessGroup:
        return distributed.new_group(backend="gloo")


class OverMpi(Backend):
    """The backend cpdhpc.

    gradient: wire of all-reduces and reduce-scatters, "" for float32; accumulate: of their sums
    parameter: wire of all-gathers; from_bytes: tensors with fewer bytes are never rounded
    """

    gradient: str = ""
    accumulate: str = ""
    parameter: str = ""
    from_bytes: Whole = FROM_BYTES

    def group(self) -> distributed.ProcessGroup:
        group = distributed.new_group(backend="cpdhpc")
        given = {"wire": self.gradient, "accumulate": self.accumulate}
        summed = {name: value for name, value in given.items() if value} or None
        try:
            set_wires(
                group,
                all_reduce=summed,
                reduce_scatter=summed,
                all_gather=self.parameter or None,
                from_bytes=self.from_bytes,
            )
        except ValueError as error:
            raise UserError(f"--backends: {error}") from None
        return group


BACKENDS: dict[str, type[Backend]] = {"gloo": Gloo, "cpdhpc": OverMpi}


def add_backends(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """Add the option --backends to a command-line parser."""
    options(parser)(
        "--backends NAME[:OPTION=VALUE,...]",
        "backends, separated by spaces or commas: gloo, cpdhpc with the options "
        f"{', '.join(OverMpi.model_fields)}",
        default,
        nargs="*",
    )


def backends_of(texts: Iterable[str]) -> dict[str, Backend]:
    """Return the backends of --backends by what names them. Raises UserError."""
    return {text: flags.row_of("--backends", text, BACKENDS) for text in flags.methods(texts)}


def sharded(model: nn.Module, group: distributed.ProcessGroup) -> nn.Module:
    """Return a model as FSDP2 trains it over a group: each block, then the rest. Collective."""
    # its outputs may be views, which it warns of: losses do not write to them
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unfused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer without torch's fused loop, which FSDP2's tensors lack for SGD."""
    for group in optimizer.param_groups:
        group["fused"] = False
    return optimizer


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of several layers in a model's sequences."""
    for child in model.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _blocks(child)
        elif any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("file FILE.toml", "a job, as of train", Path)
    add_settings(parser, "replace a value of the job, for example train.batch=120; may be repeated")
    add_backends(parser, ["gloo", "cpdhpc", "cpdhpc:gradient=e4m3,accumulate=exact"])
    add("--steps N", "of each training", 120, type=flags.at_least(1))


def bare_jobs(path: Path, arguments: argparse.Namespace, command: str) -> list[Job]:
    """Return the runs of a job file's first row. Raises UserError for what torch alone lacks."""
    first, *others = load(path, settings_of(arguments))
    check_plain(first, f"for {command}")
    for key in ("precision", "augment"):
        if getattr(first, key) != type(getattr(first, key))():
            raise UserError(f"{first.id}: {key}: must be left out for {command}")
    return [first, *(job for job in others if job.name == first.name)]


def run(arguments: argparse.Namespace, world: World) -> None:
    """Train, and print the table. Collective. Raises UserError on all processes."""
    backends = world.agreed(lambda: backends_of(arguments.backends))
    jobs = world.agreed(lambda: bare_jobs(arguments.file, arguments, "bench fsdp"))
    check_jobs(world, jobs, "bench fsdp: jobs")
    data = Trainer(world, Caught(), quiet=True).data_of(jobs[0])
    world.agreed(lambda: _check(jobs[0], data, world))
    own_threads(world, jobs[0].train.threads)
    register()
    losses = {}
    with torch_group(world, "gloo"):
        for text, backend in backends.items():
            group = backend.group()
            losses[text] = [_loss(job, data, group, arguments.steps) for job in jobs]
    above = [
        printing.machine_line(world) + f", torch {torch.__version__}",
        f"{jobs[0].name}: loss of the test samples after {arguments.steps} steps of FSDP2, by "
        "seed; more: mean of the differences from the first row",
    ]
    first = np.array(next(iter(losses.values()), []))
    rows = [[text, *found, np.mean(found - first)] for text, found in losses.items()]
    forms = {"backend": f"<{max(map(len, losses), default=0)}"}
    forms |= {f"seed {job.seed}": "9.4f" for job in jobs} | {"more": "8.4f"}
    printing.show(world, above, forms, rows)


def _check(job: Job, data: Dataset | StreamedData, world: World) -> None:
    """Raise ConfigError unless a job has a batch for all ranks, on CPUs."""
    job.check_ranks(world.ranks)
    samples, batch = len(samples_of(data)[0]), job.train.batch
    if not world.ranks <= batch <= samples:
        raise ConfigError(
            f"{job.id}: train.batch={batch}: must be at least the {world.ranks} ranks and at most "
            f"the {samples} training samples"
        )
    if job.train.device != "cpu":
        raise ConfigError(f"{job.id}: train.device={job.train.device!r}: must be 'cpu'")


def _loss(
    job: Job, data: Dataset | StreamedData, group: distributed.ProcessGroup, steps: int
) -> float:
    """Return the mean loss of all test samples after a training of so many steps. Collective."""
    model, loss = sharded(build_model(job, data), group), job.loss.build()
    optimizer = unfused(job.optimizer.build(model.parameters(), job.train.learning_rate))
    train, test = samples_of(data)
    batch, rank, ranks = job.train.batch, group.rank(), group.size()
    torch.manual_seed(job.seed + rank)  # for dropout
    for step in range(steps):
        epoch, number = divmod(step, len(train) // batch)
        order = epoch_order(len(train), job.seed, epoch)[number * batch : (number + 1) * batch]
        inputs, targets = taken(train, shard(order, ranks, rank), 0, CPU)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(test), batch):
            index = np.arange(start, min(start + batch, len(test)))
            inputs, targets = taken(test, index, 0, CPU)
            total += len(index) * loss(model(inputs), targets).item()
    return total / len(test)
