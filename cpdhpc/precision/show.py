"""Policies in the terminal: presets, and what a job's says of each layer."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import ConfigError, dump_toml, suggest, validate
from .policy import Policy
from .presets import PRESETS

if TYPE_CHECKING:
    from ..train.job import Job


def add_presets(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of presets."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one as TOML")


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
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="the job")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="lay a value over the file's; may be repeated")  # fmt: skip


def run_show(arguments: argparse.Namespace) -> None:
    """Print a table of each row of a job file: layers, and what each obeys. Raises UserError."""
    from ..train.job import load

    jobs = {job.name: job for job in reversed(load(arguments.file, arguments.set))}
    for name in reversed(jobs):
        print(f"{name}\n" + "\n".join(_table(jobs[name])))


def _table(job: Job) -> list[str]:
    """Return a line for each layer that has parameters or products."""
    from ..train.fitting import build_model
    from .conversion import BY_TORCH, resolved, unconverted

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
