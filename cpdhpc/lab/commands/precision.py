"""Arguments and output of python -m cpdhpc precision: presets, show, record, replay, search."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from ... import store
from ...config import ConfigError, UserError, dump_toml, suggest, validate
from ...torch.precision.policy import PRESETS, Policy
from ...torch.precision.recording import KINDS, load
from ..precision.evidence import OVER
from ..precision.measures import KIND, Question, replay
from ..settings import add_settings, options, settings_of

if TYPE_CHECKING:
    from ...world.mpi import World
    from ..train.job import Job


def _names(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in _names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be integers, for example 2,4") from None


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of precision record."""
    parser.description = (
        "Train the run of a job file like train, and record the tensors of its layers. The options "
        "are keys of [record]. Exit statuses and the run's own files are those of train."
    )
    add = options(parser)
    add("file FILE.toml", "the job, of one run", Path)
    add("--layers PATTERN,...", 'names of layers, for example "conv*" (default all)', _names)
    add("--tensors KIND,...", f"kinds of tensors: {', '.join(KINDS)}", _names)
    add("--every N", "record every Nth iteration, from 0", int)
    add("--count N", "record at most N iterations (default 20)", int)
    add("--iterations N,...", "record these iterations, instead of --every", _counts)
    add("--max-mib MIB", "largest size of all arrays (default 256)", float)
    add(
        "--thin",
        "keep the rows that fit if arrays exceed --max-mib, instead of an error",
        default=None,
    )
    add("--out FILE.h5", "the recording", Path)
    add("--results DIR", "the run's own files (default: results/ + FILE's name)", Path)
    add_settings(parser, "the same as of train")
    add("--resume", "the same as of train")


OPTIONS = ("layers", "tensors", "every", "count", "iterations", "max_mib", "thin")


def run_record(arguments: argparse.Namespace, world: World) -> int:
    """Train, and record the tensors of the options. Collective.

    Raises ConfigError on all ranks before training if no iteration would be recorded, and UserError
    after all runs if some diverged.
    """
    from ..train.checkpoint import Files
    from ..train.command import train
    from ..train.setup import agreed

    settings = list(given := _settings(arguments))
    if arguments.every is None and arguments.iterations is None:
        settings.append("record.every=1")
    if arguments.out is not None:
        settings.append(f"record.{dump_toml({'file': str(arguments.out)}).strip()}")
    settings += settings_of(arguments)
    directory = arguments.results or Path("results") / arguments.file.stem
    jobs = agreed(world, lambda: _recording(arguments.file, settings, given))
    _, diverged = train(world, arguments.file, settings, directory, arguments.resume)
    if world.process == 0:
        for path in [Files.of(directory, job).recording(job) for job in jobs]:
            found = path.exists() and store.contents(path)[1]
            print(f"recording: {path}{'' if found else ': holds no iteration'}")
    if diverged:
        raise UserError(f"{len(diverged)} of {len(jobs)} runs: {'; '.join(diverged)}")
    return 0


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options as settings of the job, each with its form on the command line."""
    found = {}
    for name in OPTIONS:
        if (value := getattr(arguments, name)) is not None:
            # dump_toml writes long arrays in several lines; a setting is one line
            setting = " ".join(f"record.{dump_toml({name: value})}".split())
            given = ",".join(map(str, value)) if isinstance(value, tuple) else value
            found[setting] = f"--{name.replace('_', '-')} {given}"
    return found


def _recording(file: Path, settings: list[str], given: dict[str, str]) -> list[Job]:
    """Return the runs of a job file; given: see _settings.

    Raises ConfigError if a run would record no iteration, or an option is wrong.
    """
    from ..train.job import load

    try:
        jobs = load(file, settings)
    except ConfigError as error:
        setting = str(error).removeprefix("--set ").partition(": ")[0]
        if setting not in given:
            raise
        raise ConfigError(str(error).replace(f"--set {setting}", given[setting], 1)) from None
    for job in jobs:
        if not job.record.number:
            raise ConfigError(
                f"precision record: {job.id}: no iteration would be recorded: --every N, 1 or "
                "more, or --iterations N,..."
            )
    return jobs


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of precision replay."""
    asked = Question()
    parser.description = (
        "Compute the errors that formats, sums over ranks and products make in the tensors of a "
        "recording, without training. Needs neither torch nor MPI."
    )
    add = options(parser)
    add("file FILE.h5", "file of precision record", Path)
    for name, metavar, text, default in (
        ("formats", "NAME", "formats that tensors are rounded to", asked.formats),
        ("scalings", "NAME", "ways to scale tensors into the range of a format", asked.scalings),
        ("accumulates", "NAME", "formats that products are summed in", asked.accumulates),
    ):
        shown = f"{text} (default {','.join(default)})"
        add(f"--{name} {metavar},...", shown, _names)
    add(
        "--ranks N,...",
        "numbers of ranks that gradients are summed over (default: 2,4,...)",
        _counts,
    )
    add("--out FILE.h5", "the results (default: FILE.replay.h5)", Path)
    add("--html FILE.html", "write one self-contained page", Path)
    add("--figures DIR", "write every figure as PNG and SVG", Path)
    add("--csv DIR", "write every table with all digits", Path)
    add("--quiet", "print no table")


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a recording, write the results, and show them like report."""
    from .report import Outputs, report

    of = arguments
    asked = {
        name: getattr(of, name)
        for name in ("formats", "scalings", "ranks", "accumulates")
        if getattr(of, name) is not None
    }
    outputs = Outputs(of.html, of.figures, of.csv, None, of.quiet)
    outputs.check()
    question = Question(**asked)
    out = of.out or of.file.with_suffix(".replay.h5")
    store.check_target(out, KIND)
    answers = replay(load(of.file), question)
    notes = {"kind": KIND, "recording": str(of.file), "left_out": "\n".join(answers.left_out)}
    store.write(out, answers.groups, notes)
    print(f"wrote {out}")
    return report([out], outputs)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of precision search."""
    parser.description = (
        "Find the fewest bits in which the gradients of each layer travel, or its products are "
        "computed, within a budget of accuracy or of the gradient's error. The search trains a job "
        "of one row many times, and first prints how much that may cost."
    )
    add = options(parser)
    add("file FILE.toml", "a job of one row, with seeds", Path)
    add(
        "--over",
        "search the bits of gradients that travel (wire, the default), of operands and sums of "
        "products (arithmetic), or of both",
        OVER[0],
        choices=OVER,
    )
    add("--budget POINTS", "accuracy that may be lost to float32, mean over seeds", float)
    add(
        "--gradient-error SHARE",
        "instead of --budget: relative error of the mean gradient, compared with float64",
        float,
    )
    add(
        "--trials N",
        "most trainings, each of all seeds; float32, uniform bits and unseen seeds count",
        40,
    )
    add("--test-seeds N", "number of further seeds that test the result", 1)
    add_settings(parser, "replace a value of the job; may be repeated")
    add("--out DIR", "folder of the search (default: results/ + FILE's name + -search)", Path)
    add("--resume", "continue the search in DIR")


def run_search(arguments: argparse.Namespace, world: World) -> int:
    """Search, print the tables, and write evidence and policy. Collective."""
    from ..precision.evidence import FILE, Evidence, asked_of
    from ..precision.search import POLICY, Search
    from ..signals import catching
    from ..train.command import Trainer

    settings = settings_of(arguments)
    asked = world.agreed(lambda: asked_of(arguments, settings, world.processes))
    directory = arguments.out or Path("results") / f"{arguments.file.stem}-search"
    with catching() as caught:
        Search(asked, directory, Trainer(world, caught, quiet=True), arguments.resume).run()
    if world.process == 0:
        from ..train.progress import on_terminal
        from .report import Outputs, report

        report([directory / FILE], Outputs(terminal=on_terminal()))
        found = Evidence.read(directory / FILE).outcome
        print(f"found: {found}; evidence: {directory / FILE}, policy: {directory / POLICY}")
    return 0


def add_presets(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of presets."""
    options(parser)("name NAME", "print this preset as TOML", nargs="?")


def run_presets(arguments: argparse.Namespace) -> None:
    """List the presets, or print one as the sections of a job file. Raises ConfigError."""
    if arguments.name is None:
        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:{width}}  {preset.source}")
        return
    if arguments.name not in PRESETS:
        raise ConfigError(f"NAME={arguments.name}: {suggest(arguments.name, PRESETS)}")
    preset = PRESETS[arguments.name]
    policy = validate(Policy, preset.policy, f"preset {arguments.name}")
    train = tomllib.loads(dump_toml({"train": preset.train} if preset.train else {}))
    print(f"# {preset.source}\n# left out: {preset.leaves_out}")
    print(policy.toml() + (f"\n{dump_toml(train)}" if train else ""), end="")


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of show."""
    options(parser)("file FILE.toml", "the job", Path)
    add_settings(parser, "replace a value of the file; may be repeated")


def run_show(arguments: argparse.Namespace) -> None:
    """Print the precision of each layer, for each row of a job file. Raises UserError."""
    from ..train.job import load

    jobs = {job.name: job for job in reversed(load(arguments.file, arguments.set))}
    for name in reversed(jobs):
        print(f"{name}\n" + "\n".join(_table(jobs[name])))


def _table(job: Job) -> list[str]:
    """Return a line for each layer that has parameters or products."""
    from ...torch.precision.conversion import BY_TORCH, resolved, unconverted
    from ..train.setup import build_model

    model = build_model(job, job.data.load())
    precisions, left = resolved(model, job.precision), unconverted(model)
    rows = []
    for name, layer in model.named_modules():
        if layer._parameters or name in precisions:
            words = precisions[name].told() if name in precisions else "float32"
            words += f"; {BY_TORCH}" if name in left else ""
            rows.append((name, type(layer).__name__, words))
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    return [f"  {name:{widths[0]}}  {kind:{widths[1]}}  {words}" for name, kind, words in rows]
