"""Which training samples lowered or raised the loss of test samples: TracIn, arXiv 2002.08484.

RUN is a run of `cpdhpc train` whose weights were kept (train.keep_every): its record, or a
directory with one. For each kept epoch the gradients of single samples are found, and their inner
products times the epoch's learning rate are summed: a training sample with a score above 0 is a
proponent of the test sample, below 0 an opponent. --self finds how much each training sample
lowered its own loss: mislabelled ones come first. Samples are dealt to the ranks of mpirun; neither
their number nor the memory changes a bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ... import store
from ...ops import set_kernel_threads
from ...world.ranks import Ranks
from ..influence.show import draw, tables
from ..settings import add_settings, options
from ..train.progress import Display


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = options(parser)
    add("run_of RUN", "a run's record, or its directory", Path)
    add("--test A:B,...", "numbers of test samples, as 0:100 or 3,7,90:99", "")
    add("--train A:B,...", "numbers of training samples (default: all)", ":")
    add("--self", "find the influence of training samples on themselves", dest="own")
    add(
        "--layers NAME",
        "whose gradients: last (default), the linear layer that runs last; all; or names of layers",
        ["last"],
        nargs="+",
    )
    add(
        "--projection N",
        "compare N random sums of gradients, right on average (default 0: whole gradients)",
        0,
    )
    add("--seed N", "of the projection", 0)
    add("--epochs N,...", "which kept epochs (default: all)", "")
    add_settings(parser, "where the data is now; must be that of the run", "data.KEY")
    add("--memory MIB", "of a rank for gradients and scores", 1024)
    add("--out FILE.h5", "scores (default: RUN's name with .influence.h5)", Path)
    add("--png FILE.png", "draw test images with their proponents and opponents", Path)
    add("--top N", "of these that are shown", 5)


def run(arguments: argparse.Namespace, world: Ranks) -> int:
    """Find the scores, write and show them. Collective. Raises UserError on all ranks alike."""
    from ..influence.scores import KIND, Scores, planned
    from ..train.device import own_threads
    from ..train.setup import agreed

    plan = agreed(world, lambda: planned(arguments))
    set_kernel_threads(own_threads(world, plan.job.train.threads))
    wanted = plan.wanted
    scores = agreed(world, lambda: Scores(world, plan.run, plan.gradients, plan.projection, wanted))
    out = arguments.out or plan.record.with_suffix(f".{KIND}.h5")
    world.on_first(lambda: store.check_target(out, KIND), "output")
    display = Display(world.process == 0, 1)
    if out.exists():
        display.line(f"{out}: is there already: its scores will be replaced")
    if plan.status != "complete":
        display.line(
            f"{plan.record}: this run has not ended: its status is {plan.status!r}; scores are of "
            "the weights that it has kept so far"
        )
    epochs = ", ".join(str(kept.epoch) for _, kept in plan.run.kept)
    display.line(
        f"{plan.job.id}: weights after epoch {epochs}; {len(wanted.test)} test samples, "
        f"{len(wanted.train)} training samples on {world.processes} processes; gradients of "
        f"{plan.gradients.values:,} values; passes over them: {len(scores.blocks)}"
    )
    display.start("influence", scores.samples, 0)
    attributes = {
        "run": plan.job.id,
        "run_status": plan.status,
        "layers": " ".join(arguments.layers),
        "projection": arguments.projection,
        "projection_seed": arguments.seed,
        "toml": plan.job.toml(),
    }
    try:
        scores.save(out, attributes, display)
    finally:
        display.bar.stop()

    def show() -> None:
        for line in tables(out, arguments.top):
            display.line(line)
        if arguments.png is not None:
            draw(arguments.png, out, plan.run.train, plan.run.test, arguments.top)
        display.line(f"scores: {out}")

    world.on_first(show, "show")
    return 0
