"""python -m cpdhpc precision record, replay, search: what tensors of a training need."""

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
        raise argparse.ArgumentTypeError(f"{text}: must be integers, as 2,4") from None


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of precision record."""
    parser.description = (
        "Train a job file's run as train does, and record what passes through layers: keys of "
        "[record]. Exit statuses and the run's own files are those of train."
    )
    add = options(parser)
    add("file FILE.toml", "the job, of one run", Path)
    add("--layers PATTERN,...", 'as "conv*" (default all)', _names)
    add("--tensors KIND,...", f"of {', '.join(KINDS)}", _names)
    add("--every N", "iterations apart, from 0", int)
    add("--count N", "so many of them at most (default 20)", int)
    add("--iterations N,...", "in place of --every", _counts)
    add("--max-mib MIB", "of all arrays (default 256)", float)
    add(
        "--thin",
        "where arrays take more than --max-mib, keep the rows that fit instead of refusing",
        default=None,
    )
    add("--out FILE.h5", "the recording", Path)
    add("--results DIR", "the run's own files (default: results/ + FILE's name)", Path)
    add_settings(parser, "as train")
    add("--resume", "as train")


OPTIONS = ("layers", "tensors", "every", "count", "iterations", "max_mib", "thin")


def run_record(arguments: argparse.Namespace, world: World) -> int:
    """Train, and record what the options say. Collective.

    Raises ConfigError on all alike, before training, where they ask for no iteration; UserError
    behind all runs where some diverged.
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
    """Return what the options are as settings of the job, and how they were given."""
    found = {}
    for name in OPTIONS:
        if (value := getattr(arguments, name)) is not None:
            # rich arrays of several lines are for files: a setting is one line
            setting = " ".join(f"record.{dump_toml({name: value})}".split())
            given = ",".join(map(str, value)) if isinstance(value, tuple) else value
            found[setting] = f"--{name.replace('_', '-')} {given}"
    return found


def _recording(file: Path, settings: list[str], given: dict[str, str]) -> list[Job]:
    """Return the runs of a job file; given: see _settings.

    Raises ConfigError where one would record no iteration, or an option is wrong.
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
        "What formats, sums over ranks and products do to the tensors of a recording, without "
        "training. Needs neither torch nor MPI."
    )
    add = options(parser)
    add("file FILE.h5", "of precision record", Path)
    for name, metavar, text, default in (
        ("formats", "NAME", "tensors are rounded to", asked.formats),
        ("scalings", "NAME", "how they are brought into the range", asked.scalings),
        ("accumulates", "NAME", "products are summed in", asked.accumulates),
    ):
        shown = f"{text} (default {','.join(default)})"
        add(f"--{name} {metavar},...", shown, _names)
    add("--ranks N,...", "gradients are summed over (default: 2,4,...)", _counts)
    add("--out FILE.h5", "the results (default: FILE.replay.h5)", Path)
    add("--html FILE.html", "write one self-contained page", Path)
    add("--figures DIR", "write every figure: PNG, SVG", Path)
    add("--csv DIR", "write every table, all digits", Path)
    add("--quiet", "print no table")


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a recording, write the results and show them as report does."""
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
        "Find the fewest bits of each layer, in which its gradients travel or its products are "
        "computed, by trainings of a job of one row, under a budget of accuracy or of the "
        "gradient's error. What it may cost is printed first."
    )
    add = options(parser)
    add("file FILE.toml", "a job of one row, with seeds", Path)
    add(
        "--over",
        "what has few bits: gradients that travel (wire, the default), operands and sums of "
        "products (arithmetic), or both",
        OVER[0],
        choices=OVER,
    )
    add("--budget POINTS", "accuracy below float32, mean over seeds", float)
    add(
        "--gradient-error SHARE",
        "in place of it: error of the mean gradient relative to the float64 one",
        float,
    )
    add(
        "--trials N",
        "trainings at most, each of all seeds, float32, uniform and unseen ones included",
        40,
    )
    add("--test-seeds N", "seeds beyond the job's to test the result with", 1)
    add_settings(parser, "of the job")
    add("--out DIR", "of the search (default: results/ + FILE's name + -search)", Path)
    add("--resume", "go on with the search in DIR")


def run_search(arguments: argparse.Namespace, world: World) -> int:
    """Search, print the tables, write evidence and policy. Collective."""
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
    options(parser)("name NAME", "print this one as TOML", nargs="?")


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
    add_settings(parser, "lay a value over the file's; may be repeated")


def run_show(arguments: argparse.Namespace) -> None:
    """Print a table of each row of a job file: layers, and what each obeys. Raises UserError."""
    from ..train.job import load

    jobs = {job.name: job for job in reversed(load(arguments.file, arguments.set))}
    for name in reversed(jobs):
        print(f"{name}\n" + "\n".join(_table(jobs[name])))


def _table(job: Job) -> list[str]:
    """Return a line for each layer that has parameters or products."""
    from ...torch.precision.conversion import BY_TORCH, resolved, unconverted
    from ..train.setup import build_model

    model = build_model(job, job.data.load())
    said, left = resolved(model, job.precision), unconverted(model)
    rows = []
    for name, layer in model.named_modules():
        if layer._parameters or name in said:
            told = said[name].told() if name in said else "float32"
            told += f"; {BY_TORCH}" if name in left else ""
            rows.append((name, type(layer).__name__, told))
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    return [f"  {name:{widths[0]}}  {kind:{widths[1]}}  {told}" for name, kind, told in rows]
