"""The commands of python -m cpdhpc: their one-line help, their examples, and the code they run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

MPIRUN = "under mpirun"  # of a command that needs ranks
EITHER = "alone or under mpirun"


@dataclass(frozen=True)
class Command:
    """A command, or an action of one. Its module is imported only if the command is used.

    target: "module:NAME" in cpdhpc.lab, which has add_NAME(parser) and run_NAME(arguments) -> exit
        status, None for 0, or the points for --out; or "module", which has add_arguments and run,
        and whose docstring is the long help
    first, second: two examples, without mpirun and without the command itself
    on_ranks: MPIRUN or EITHER if all processes of mpirun run it, as run(arguments, world); then it
        has --timeout and --trace
    starts_mpi: it calls mpirun itself, so that several copies of it are an error
    """

    summary: str
    target: str
    first: str
    second: str
    on_ranks: str = ""
    starts_mpi: bool = False

    @property
    def help(self) -> str:
        """The line of a list of commands."""
        return f"{self.summary} ({self.on_ranks})" if self.on_ranks else self.summary

    def example(self, number: int, prog: str) -> str:
        """Return an example as one types it; prog: the command with what stands before it."""
        ranks = self.on_ranks == MPIRUN or (self.on_ranks == EITHER and number > 0)
        return (
            f"{'mpirun -n 2 ' if ranks else ''}{prog} {(self.first, self.second)[number]}".rstrip()
        )

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments and examples to its parser."""
        from ..settings import add_timeout

        module, _, name = self.target.partition(":")
        code = import_module(f"cpdhpc.lab.{module}")
        getattr(code, f"add_{name}" if name else "add_arguments")(parser)
        if not name:
            parser.description = code.__doc__
        if self.on_ranks:
            add_timeout(parser)
        parser.epilog = epilog(self.example(i, parser.prog) for i in (0, 1))
        parser.set_defaults(run=self)

    def run(self, *given: Any) -> int:
        """Run it, collectively if it is on_ranks, and return the exit status."""
        if getattr(given[0], "png", None) is not None:
            from ..settings import check_picture

            check = partial(check_picture, given[0].png)
            given[1].on_first(check) if self.on_ranks else check()
        module, _, name = self.target.partition(":")
        found = getattr(import_module(f"cpdhpc.lab.{module}"), f"run_{name}" if name else "run")(
            *given
        )
        if found is None or isinstance(found, int):
            return found or 0
        import_module("cpdhpc.lab.study.batch").write_benchmark(found, *given)
        return 0


@dataclass(frozen=True)
class Group:
    """A command with actions of its own; default: what it does without one, if anything."""

    help: str
    actions: Mapping[str, Command]
    default: Command | None = None

    def epilog(self, prog: str) -> str:
        """Return an example of each of its first two actions."""
        first = list(self.actions.items())[:2]
        return epilog(row.example(0, f"{prog} {name}") for name, row in first)


def epilog(lines: Any) -> str:
    """Return the last part of a command's help."""
    return "Examples:\n\n" + "\n".join(f"    {line}" for line in lines)


Rows = dict[str, Command | Group]
RUN: Rows = {
    "train": Command(
        "train the runs of a job file with all seeds",
        "commands.train:train",
        "inputs/train_digits.toml",
        'inputs/train_digits.toml --set "train.seeds=[0]" --out results/digits',
        EITHER,
    ),
    "autoencoder": Group(
        "train an autoencoder whose cells are split over ranks; probe shows what it has learned",
        {
            "probe": Command(
                "find what neurons of a trained autoencoder respond to",
                "commands.trained:probe",
                "inputs/cots_digits.toml --png probe.png",
                "inputs/cots_digits.toml --features features.h5",
                EITHER,
            )
        },
        Command(
            "train an autoencoder whose cells are split over ranks",
            "commands.train:autoencoder",
            "inputs/cots_digits.toml --set train.iterations=100",
            "inputs/cots_digits.toml --png filters.png --resume",
            EITHER,
        ),
    ),
    "export": Command(
        "write a trained quantised network as integers",
        "train.export",
        "results/integers/cnn-s0.checkpoint.h5 --out cnn.h5",
        "results/integers/cnn-s0.checkpoint.h5 --out cnn.h5 --set data.dir=/data/mnist",
    ),
}
STUDY: Rows = {
    "study": Group(
        "plan and run a sweep, on this machine or as jobs, and collect its results",
        {
            "plan": Command(
                "show the cases, their rank hours, and the impossible cases with reasons",
                "commands.study:plan",
                "inputs/study_smoke.toml",
                "inputs/study_allreduce_strong.toml --site slurm/sites/local.toml",
            ),
            "render": Command(
                "print the job scripts of all cases, and of the job that collects results",
                "commands.study:render",
                "inputs/study_smoke.toml",
                "inputs/study_smoke.toml --site slurm/sites/local.toml --script collect",
            ),
            "submit": Command(
                "submit the cases that are neither finished nor queued, and a job that collects "
                "results",
                "commands.study:submit",
                "inputs/study_allreduce_strong.toml --site site.toml",
                "inputs/study_smoke.toml --site site.toml --out results/smoke",
            ),
            "run": Command(
                "measure all cases on this machine with mpirun, then collect",
                "commands.study:run",
                "inputs/study_smoke.toml",
                'inputs/study_smoke.toml --set "sweep.ranks=[1,2]" --out results/smoke',
                starts_mpi=True,
            ),
            "status": Command(
                "show the state of each case: finished, running, pending, failed or missing",
                "commands.study:status",
                "results/smoke",
                "results/smoke --summary --watch 60",
            ),
            "resume": Command(
                "measure the unfinished cases, on this machine or as jobs, as before",
                "commands.study:resume",
                "results/smoke",
                "results/smoke --site site.toml",
                starts_mpi=True,
            ),
            "cancel": Command(
                "remove the study's jobs from the queue",
                "commands.study:cancel",
                "results/smoke",
                "inputs/study_smoke.toml --out results/smoke",
            ),
            "extend": Command(
                "add levels to the study of a folder, and keep its finished cases",
                "commands.study:extend",
                'inputs/study_smoke.toml --set "sweep.ranks=[1,2,4]"',
                "inputs/study_smoke.toml --out results/smoke",
            ),
            "collect": Command(
                "write the finished cases to study.h5",
                "commands.study:collect",
                "results/smoke",
                "inputs/study_smoke.toml --out results/smoke",
            ),
            "freeze": Command(
                "create the folder of a study for job scripts of your own, and print its path",
                "commands.study:freeze",
                "inputs/study_smoke.toml",
                "inputs/study_smoke.toml --by-hash --out results/mine",
            ),
            "site": Command(
                "write the profile of this cluster or machine",
                "commands.study:site_action",
                "discover",
                "discover --partition gpu --out gpu.toml",
            ),
        },
    ),
    "precision": Group(
        "find the bits that each layer needs; list, show, record and replay precisions",
        {
            "search": Command(
                "find the fewest bits of each layer within a budget of accuracy",
                "commands.precision:search",
                "inputs/claim_search.toml --budget 0.5",
                "inputs/claim_search.toml --gradient-error 0.1 --trials 20",
                EITHER,
            ),
            "presets": Command(
                "list the presets of [precision], or print one as TOML",
                "commands.precision:presets",
                "",
                "mxfp4",
            ),
            "show": Command(
                "show the precision of each layer of a job",
                "commands.precision:show",
                "inputs/train_precision.toml",
                "inputs/train_digits.toml --set precision.preset=mxfp4",
            ),
            "record": Command(
                "train, and record gradients, activations, errors and weights of layers",
                "commands.precision:record",
                "inputs/record_digits.toml --out recording.h5",
                "inputs/record_digits.toml --tensors gradients --every 10 --count 5",
                EITHER,
            ),
            "replay": Command(
                "compute the errors that formats, sums and products make in recorded tensors",
                "commands.precision:replay",
                "recording.h5",
                "recording.h5 --formats e4m3,e2m1fn --ranks 2,8 --html page.html",
            ),
        },
    ),
    "scripts": Command(
        "write the job scripts of this package's examples, for your cluster",
        "commands.study:scripts",
        "--out jobs",
        "--site slurm/sites/local.toml --out jobs",
    ),
}
MEASURE: Rows = {
    "bench": Group(
        "measure this machine, predict others; start actions marked 'under mpirun' with it",
        {
            "allreduce": Command(
                "time all-reduces by size, beside MPI_Allreduce, gloo, memcpy and a bound",
                "bench.allreduce",
                "--sizes 1MiB,64MiB --wires raw,e4m3",
                "--collective all_gather --out all_gather.h5",
                MPIRUN,
            ),
            "codec": Command(
                "time the codec on one core or more, in GB/s of float32, beside memcpy",
                "bench.codec",
                "--formats e4m3,e3m0",
                "--mib 16 --threads 1,2 --out codec.h5",
            ),
            "latency": Command(
                "time small all-reduces, by tree, beside MPI_Allreduce and memcpy",
                "bench.allreduce:latency",
                "--sizes 8:64KiB:x4",
                "--all --out latency.h5",
                MPIRUN,
            ),
            "compress": Command(
                "compare compressors on recorded gradients: bytes, errors, time",
                "bench.compress",
                "--methods lowbit:wire=e3m0 topk",
                "--values 1000000 --out results/compress",
                EITHER,
            ),
            "step": Command(
                "time a training step of your model, beside DistributedDataParallel",
                "bench.step",
                "inputs/step_resnet18.toml --backends gloo cpdhpc",
                "torchvision.models:resnet18 --input 3,224,224",
                MPIRUN,
            ),
            "fsdp": Command(
                "compare losses after training by FSDP2 over gloo and over MPI in few bits",
                "bench.fsdp",
                "inputs/fsdp_markov.toml --backends gloo cpdhpc:gradient=e4m3",
                "inputs/fsdp_markov.toml --steps 20 --set train.seeds=[0]",
                MPIRUN,
            ),
            "overlap": Command(
                "time training steps with and without overlap of reduction and backward",
                "bench.overlap",
                "inputs/train_digits.toml --rows float32,e4m3-tile",
                "inputs/train_mnist.toml --set train.batch=120 --repeats 20",
                MPIRUN,
            ),
            "optimizer": Command(
                "time steps of optimizers, beside torch's fused Adam, SGD and AdamW",
                "bench.optimizers",
                "--threads 2",
                "--widths 64,128 --repeats 50",
            ),
            "torch": Command(
                "time collectives of torch.distributed over MPI, beside gloo",
                "bench.torch_calls",
                "--sizes 1MiB,16MiB",
                "--sizes 1MiB --link 10 --backends cpdhpc cpdhpc:gradient=e4m3,parameter=e4m3",
                MPIRUN,
            ),
            "halo": Command(
                "time halo exchanges, beside MPI's datatypes and neighbour collectives",
                "bench.halo",
                "--usual cube,small",
                "--shape 256,256 --procs 2,1 --halo 1 --repeats 9",
                MPIRUN,
            ),
            "split": Command(
                "time networks on split images, beside plain torch on the part of one rank",
                "bench.split",
                "--networks conv,unet --sizes 256",
                "--grid 1x2 --width 32 --images 4",
                MPIRUN,
            ),
            "fit": Command(
                "time links, additions and the codec, and fit the model of predictions to them",
                "bench.machine:fit",
                "--out machine.toml",
                "--out machine.toml --format e3m0",
                MPIRUN,
            ),
            "predict": Command(
                "predict times on any number of ranks, from a file of bench fit",
                "bench.machine:predict",
                "machine.toml --ranks 1024",
                "machine.toml --ranks 64 --ranks-per-node 8 --algorithms ring,hier,auto",
            ),
            "throughput": Command(
                "predict the samples/s of many workers, by compressor and link",
                "bench.throughput",
                "--network vgg-a --tflops 10",
                "--rate 300 --links 1,100 --png throughput.png",
            ),
            "layer": Command(
                "count the bytes, memory and FLOP of a layer of the autoencoder on many ranks",
                "bench.layer",
                "--ranks 64",
                "--ranks 1024 --image 400 --maps 256",
            ),
            "accuracy": Command(
                "compute the error of sums by algorithm, accumulation and scaling",
                "bench.accuracy",
                "--ranks 2,32 --formats e4m3",
                "--ways all --csv errors.csv --png errors.png",
            ),
            "rounding": Command(
                "compute the error of rounding once, by format and shared exponents",
                "bench.accuracy:rounding",
                "--formats e4m3fn,e2m1fn",
                "--gradients recording.h5",
            ),
            "batchnorm": Command(
                "compute shifts and differences of batch norms in integers",
                "bench.accuracy:batchnorm",
                "--channels 50",
                "--settings 16384:8 --channels 20 --seed 1",
            ),
        },
    ),
    "verify": Command(
        "prove that kernels, collectives and trainings are right on this machine, and time them",
        "commands.verify",
        "--quick",
        "--device gpu --html verify.html",
        EITHER,
    ),
}
LOOK: Rows = {
    "report": Command(
        "show studies and runs as tables, figures and a page",
        "commands.report",
        "results/digits --png digits.png --html digits.html",
        "results/smoke --compare results/before --fail-on-slower",
    ),
    "influence": Command(
        "find the training samples that changed a loss most",
        "commands.trained:influence",
        "results/digits --test 0:100 --png influence.png",
        "results/digits --self",
        EITHER,
    ),
    "info": Command(
        "show versions, the MPI library, hosts, kernels and GPUs",
        "provenance:info",
        "",
        "--timeout 30",
        EITHER,
    ),
    "darray": Group(
        "show plans of distributed arrays",
        {
            "show": Command(
                "show the ranks, windows and messages of a plan as a table and a picture",
                "darray_show",
                "--shape 12,16 --procs 2,3 --halo 1",
                "--shape 64,64 --procs 4,4 --halo 2 --boundary wrap --png plan.png",
            )
        },
    ),
    "examples": Command(
        "write this package's job files, job scripts and pages to a folder",
        "commands.examples:examples",
        "examples",
        "$SCRATCH/cpdhpc",
    ),
    "completion": Command(
        "print the script that completes commands and options in a shell",
        "commands.completion:completion",
        "bash > ~/.local/share/bash-completion/completions/cpdhpc",
        "fish > ~/.config/fish/completions/cpdhpc.fish",
    ),
}
INTERNAL: Rows = {
    "batch": Command(
        "Internal: runs one batch of a study; job scripts call this",
        "commands.study:batch",
        "results/smoke 0",
        "results/smoke 3 --nodes 2 --ppn 4",
        MPIRUN,
    ),
    "programs": Command(
        "Internal: runs one batch of a study of programs; job scripts call this",
        "commands.study:programs",
        "results/programs 0",
        "results/programs 0 --launch 'srun --ntasks $ranks'",
        starts_mpi=True,
    ),
}
SECTIONS = {
    "run": RUN,
    "study": STUDY,
    "measure": MEASURE,
    "look": LOOK,
    "internal": INTERNAL,
}
COMMANDS = {name: row for rows in SECTIONS.values() for name, row in rows.items()}
