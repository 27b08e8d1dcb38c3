"""A training step of your model: alone, by DistributedDataParallel, by FSDP2 and by each method.

MODEL is a job file of train, which gives model, data, loss and optimizer; or a module:function that
returns a torch.nn.Module: then inputs are random, the loss is the mean square of the outputs and
the optimizer is SGD with momentum. Each row has a copy of the model, and the
rows take steps in turns: forward, backward, mean of the gradients, optimizer. "alone" sends
nothing. "ddp" is DistributedDataParallel over gloo, or over nccl on GPUs; "hook" is the
same with ddp_hook. --backends adds rows "ddp" and "fsdp", DistributedDataParallel and FSDP2 over
each; "gradient" is the wire of their sums, "parameter" that of what FSDP2 gathers. The other rows
are GradientReducer, "overlap" with overlap=True.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...collectives.allreduce import Allreduce
from ...compress.base import Aggregator
from ...compress.lowbit import LowBit
from ...compress.none import NoCompression
from ...config import ConfigError, told, validate
from ...ops import set_kernel_threads
from ...ops.tensors import values_of
from ...torch.backend.registration import register
from ...torch.ddp import ddp_hook
from ...torch.reducer import GradientReducer
from ...world.mpi import World
from ..kinds import flags, printing, timing
from ..kinds.allreduce_cases import missing, torch_group
from ..settings import add_settings, options
from ..signals import Caught
from ..train.command import Trainer, check_jobs
from ..train.imports import ImportedModel
from ..train.samples import shard, taken
from ..train.setup import build_model, cast_forward, own_device, own_threads, samples_of
from .compress import method_of
from .fsdp import add_backends, backends_of, bare_jobs, sharded, unfused
from .overlap import until_done
from .throughput import LATE

ALONE, DDP, FSDP = "alone", "ddp", "fsdp"
METHODS = ["none", "lowbit:wire=e4m3"]
SETTLED = 3  # steps after which all that is made once has been made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("what MODEL", "a job, FILE.toml, or module:function of a model")
    add_settings(parser, "replace a value of the job, for example train.batch=120; may be repeated")
    whole, samples = flags.at_least(0), "samples of each rank, for module:function"
    add("--batch N", samples, 2, type=flags.at_least(1))
    add("--input N,...", "shape of a sample, for module:function", "3,32,32", type=flags.shape)
    add("--tokens N", "samples are integers below N, for module:function", 0, type=whole)
    add(
        "--methods NAME[:OPTION=VALUE,...]",
        "compressors, separated by spaces or commas",
        METHODS,
        nargs="+",
    )
    add_backends(parser, [])
    add("--device", "device of the model, for module:function", "cpu", choices=["cpu", "gpu"])
    flags.add_repeats(parser, 10, 2, "steps")


@dataclass(frozen=True)
class Subject:
    """What is trained: model() and optimizer(model) make one of each, loss(model) is one forward.

    name: for the heading; bucket_mib: as of GradientReducer
    """

    name: str
    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    loss: Callable[[torch.nn.Module], torch.Tensor]
    device: torch.device
    threads: int
    bucket_mib: float = 25.0


def of_job(arguments: argparse.Namespace, world: World) -> Subject:
    """Return what a job file trains. Collective. Raises UserError on all processes."""
    path = Path(arguments.what)
    jobs = world.agreed(lambda: bare_jobs(path, arguments, "bench step")[:1])
    check_jobs(world, jobs, "bench step: jobs")
    job, section = jobs[0], jobs[0].train
    job.check_ranks(world.ranks)
    data = Trainer(world, Caught(), quiet=True).data_of(job)
    device = own_device(world, section.device, oversubscribe=section.oversubscribe_gpus)
    train = samples_of(data)[0]
    batch = np.arange(section.batch) % len(train)
    inputs, targets = taken(train, shard(batch, world.ranks, world.rank), 0, device)
    loss = world.agreed(job.loss.build)

    def model() -> torch.nn.Module:
        built = build_model(job, data).to(device)
        cast_forward(built, section, device)
        return built

    return Subject(
        job.id,
        model,
        lambda model: job.optimizer.build(model.parameters(), section.learning_rate),
        lambda model: loss(model(inputs), targets),
        device,
        own_threads(world, section.threads),
        section.bucket_mib,
    )


def of_module(arguments: argparse.Namespace, world: World) -> Subject:
    """Return what module:function returns, on random inputs. Collective. Raises UserError."""
    shape, raw = arguments.input, {"import": arguments.what, "import_from": str(Path.cwd())}
    network = world.agreed(lambda: validate(ImportedModel, raw, "bench step"))
    device = own_device(world, arguments.device, oversubscribe=False)
    threads = own_threads(world, 0)
    drawn = torch.Generator().manual_seed(world.rank)
    if arguments.tokens:
        inputs = torch.randint(arguments.tokens, (arguments.batch, *shape), generator=drawn)
    else:
        inputs = torch.randn(arguments.batch, *shape, generator=drawn)
    inputs = inputs.to(device)

    def model() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return network.build((), 0).to(device)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        return model(inputs).float().square().mean()

    def check() -> None:
        with told(f"{arguments.what}: inputs {tuple(inputs.shape)}"):
            built = model()
            trained = [p for p in built.parameters() if p.requires_grad]
            if any(map(torch.nn.parameter.is_lazy, trained)):
                raise ConfigError(f"{arguments.what}: has lazy parameters: must have shapes")
            if not sum(p.numel() for p in trained):
                raise ConfigError(
                    f"{arguments.what}: has no parameter that is trained: must have one or more"
                )
            outputs = built(inputs)
            if not isinstance(outputs, torch.Tensor):
                raise ConfigError(
                    f"{arguments.what}: returned {type(outputs).__name__}: must be a tensor"
                )
            outputs.float().square().mean().backward()  # type: ignore[no-untyped-call]
            if not all(p.grad.isfinite().all() for p in trained if p.grad is not None):
                raise ConfigError(f"{arguments.what}: gradients have NaN or infinity")

    world.agreed(check)
    return Subject(
        arguments.what,
        model,
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        loss,
        device,
        threads,
    )


@dataclass
class PreparedWay:
    """A way to train: step() is one step, whose gradients are left; reduce: of GradientReducer.

    first: the gradients of the first step, float32[parameters]
    memory: peak bytes of this process by making it and its first steps, NaN if unknown
    """

    name: str
    model: torch.nn.Module
    step: Callable[[], None]
    first: np.ndarray
    reducer: GradientReducer | None = None
    overlap: bool = False
    memory: float = float("nan")


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure and print the table. Collective. Raises UserError on all processes."""
    texts = flags.methods(arguments.methods)
    methods = world.agreed(lambda: {text: method_of(text) for text in texts})
    backends = world.agreed(lambda: backends_of(arguments.backends))
    make = of_job if arguments.what.endswith(".toml") else of_module
    subject = make(arguments, world)
    on_gpu = subject.device.type == "cuda"
    backend = "nccl" if on_gpu and not missing(world, "nccl") else "gloo"
    machine = printing.machine_line(world)
    with ExitStack() as opened:
        opened.enter_context(torch_group(world, backend))
        torch.set_num_threads(subject.threads)
        register()
        groups = {text: backend.group() for text, backend in backends.items()}
        ways = list(_ways(methods, groups))
        for way in ways[1:3]:
            with _row(subject, world, way):
                pass  # what torch and the world allocate once is no row's
        rows = [opened.enter_context(_row(subject, world, way)) for way in ways]
        exact = rows[1].first
        errors = [float("nan"), *(_error(row, exact) for row in rows[1:])]
        sums = {text: _sum_of(world, method, exact) for text, method in methods.items()}
        times = _timed(world, subject, rows, sums, arguments)
    above = [
        machine,
        f"{subject.name}: {len(exact):,} parameters that are trained; "
        f"{subject.threads} thread(s) of torch a rank, ddp over {backend}",
        "ms, medians of the slowest rank, rows in turns; reduce: GradientReducer.reduce() "
        "by itself, sum: the all-reduce of the same values by itself",
        "memory: peak of a process above that of alone, by the gradients' bytes; error: "
        "distance of the mean gradient from ddp's, by its length",
    ]
    forms = {"row": f"<{max(len(row.name) for row in rows)}"} | FORMS
    printing.show(world, above, forms, _cells(rows, times, errors, 4 * len(exact)))


@dataclass(frozen=True)
class TrainingWay:
    """A way to train; group: of torch's own, None for the default one."""

    kind: str
    name: str
    method: Aggregator | None = None
    group: distributed.ProcessGroup | None = None


def _ways(
    methods: Mapping[str, Aggregator], groups: Mapping[str, distributed.ProcessGroup]
) -> Iterator[TrainingWay]:
    """Yield the way of each row; the first two are alone and ddp."""
    yield TrainingWay(ALONE, ALONE)
    yield TrainingWay(DDP, DDP)
    for text, group in groups.items():
        yield from (TrainingWay(kind, f"{text} {kind}", group=group) for kind in (DDP, FSDP))
    for text, method in methods.items():
        yield TrainingWay("plain", text, method)
        yield TrainingWay("overlap", f"{text} overlap", method)
        yield TrainingWay("hook", f"{text} hook", method)


@contextmanager
def _row(subject: Subject, world: World, way: TrainingWay) -> Iterator[PreparedWay]:
    """Yield a row after its first steps. Collective."""
    watch = PeakMemory(subject.device)
    model = subject.model()
    reducer, called = None, model
    if way.kind in (DDP, "hook"):
        called = DistributedDataParallel(
            model, bucket_cap_mb=subject.bucket_mib, process_group=way.group
        )
    elif way.kind == FSDP and way.group is not None:
        called = sharded(model, way.group)
    optimizer = subject.optimizer(model)
    if way.kind == FSDP:
        unfused(optimizer)
    if way.kind == "hook" and way.method is not None:
        called.register_comm_hook(*ddp_hook(world, way.method, model=called))  # type: ignore[operator]
    elif way.method is not None:
        reducer = GradientReducer(
            model, world, way.method, bucket_mib=subject.bucket_mib, overlap=way.kind == "overlap"
        )
        reducer.epoch = LATE  # all warming up of a method is over

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        subject.loss(called).backward()  # type: ignore[no-untyped-call]
        if reducer is not None:
            reducer.reduce()
        optimizer.step()

    step()
    own = _gradients(model)
    for _ in range(SETTLED - 1):
        step()
    # what the first gradients are copied to is no part of it
    memory = watch.peak_bytes() - sum(each.nbytes for each in own)
    if way.kind == FSDP:  # shards are rows
        own = [np.concatenate(each) for each in zip(*world.gather(own), strict=True)]
    first = np.concatenate([each.ravel() for each in own])
    row = PreparedWay(way.name, model, step, first, reducer, way.kind == "overlap", memory)
    if way.kind != ALONE:
        _check(world, row)
    with ExitStack() as closing:
        if reducer is not None:
            closing.enter_context(reducer)
        yield row


def _check(world: World, row: PreparedWay) -> None:
    """Raise ArithmeticError on all processes unless they have the same gradients. Collective."""
    own = row.first
    first = world.gather(own if world.process == 0 else None, "bench step")[0]
    if not all(world.gather(np.array_equal(own.view(np.uint32), first.view(np.uint32)))):
        raise ArithmeticError(f"bench step: {row.name}: gradients differ over ranks")


def _gradients(model: torch.nn.Module) -> list[np.ndarray]:
    """Return copies of this rank's part of gradients, float32, by parameter; zeros for none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
    return [np.array(values_of(each.float())) for each in local]


def _error(row: PreparedWay, exact: np.ndarray) -> float:
    """Return the distance of a row's mean from another, by the length of the latter."""
    apart = np.linalg.norm(row.first.astype(np.float64) - exact)
    return float(apart / max(float(np.linalg.norm(exact.astype(np.float64))), 1e-300))


def _sum_of(world: World, method: Aggregator, like: np.ndarray) -> Callable[[], object] | None:
    """Return the all-reduce of as many values as a method sends it; None for other methods."""
    if not isinstance(method, NoCompression | LowBit) or getattr(method, "layers", {}):
        return None
    own = vars(method).keys() & {each.name for each in fields(Allreduce)}
    options = {"op": "mean"} | {name: getattr(method, name) for name in own}
    config = Allreduce(**options)
    x, out = like.copy(), np.empty_like(like)
    return lambda: config.run(world, [x], [out])


def _timed(
    world: World,
    subject: Subject,
    rows: Sequence[PreparedWay],
    sums: Mapping[str, Callable[[], object] | None],
    arguments: argparse.Namespace,
) -> dict[tuple[str, str], timing.Times]:
    """Return seconds by row and "step", "reduce" or "sum", float64[repeats]. Collective."""
    cases: dict[tuple[str, str], Callable[[], object]] = {(r.name, "step"): r.step for r in rows}
    for row in rows:
        if row.reducer is not None and not row.overlap:
            cases[row.name, "reduce"] = row.reducer.reduce
    cases |= {(text, "sum"): each for text, each in sums.items() if each is not None}
    overlapped = {row.name for row in rows if row.overlap}

    def before(case: tuple[str, str]) -> None:
        set_kernel_threads(1 if case[0] in overlapped else subject.threads)

    run = {case: partial(until_done, subject.device, each) for case, each in cases.items()}
    return timing.slowest(world, run, arguments.repeats, arguments.warmup, before)


FORMS = {
    **{"step": "8.2f", "fastest": "8.2f", "slowest": "8.2f", "/ ddp": "6.2f", "reduce": "8.2f"},
    **{"sum": "8.2f", "memory": "7.2f", "error": "8.1e"},
}


def _cells(
    rows: Sequence[PreparedWay],
    times_s: Mapping[tuple[str, str], timing.Times],
    errors: Sequence[float],
    gradient_bytes: int,
) -> Iterator[list[object]]:
    """Yield the cells of each row."""
    ms = {case: timing.ms(each) for case, each in times_s.items()}
    for row, error in zip(rows, errors, strict=True):
        step, *ends = ms[row.name, "step"]
        alone = [ms.get((row.name, what), [np.nan])[0] for what in ("reduce", "sum")]
        more = (row.memory - rows[0].memory) / gradient_bytes if row.name != ALONE else np.nan
        yield [row.name, step, *ends, step / ms[DDP, "step"][0], *alone, more, error]


class PeakMemory:
    """The most memory that this process takes from now on, above what it has now.

    Linux alone can forget the former peak; elsewhere, and where it may not, the answer is NaN. On
    GPUs it is what is taken of the device's memory when asked, by all that share it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._now()
        if device.type == "cpu":
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # see proc(5)

    def peak_bytes(self) -> float:
        """Return the peak since this was made, in bytes."""
        return self._now("VmHWM") - self._before

    def _now(self, name: str = "VmRSS") -> float:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return float(total - free)
        gc.collect()
        if sys.platform != "linux":
            return float("nan")
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        lines = [line.split() for line in status.splitlines() if line.startswith(f"{name}:")]
        return 1024.0 * int(lines[0][1])
