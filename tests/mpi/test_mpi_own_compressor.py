"""A compressor of somebody's own on real ranks: from a file beside a job, and one that trusts."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from training import ROOT, model_bytes, write_idx
from verdicts import together

from cpdhpc.collectives import sparse
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import Aggregator, Context, Mean
from cpdhpc.compress.bucket import Bucket
from cpdhpc.lab.cli import main
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import load
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.torch import GradientReducer, ddp_hook
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

pytestmark = pytest.mark.two_ranks


JOB = """
gradient = {{ import = "of_the_tutorial:Mine", density = 0.2 }}
[data]
name = "idx"
dir = "{directory}"
[train]
epochs = 2
batch = 6
threads = 1
bucket_mib = 0.01
overlap = {overlap}
"""


@pytest.mark.parametrize("overlap", [False, True])
def test_the_tutorials_compressor_beside_a_job_file_trains(
    world: World, folder: Path, overlap: bool
) -> None:
    """From the command line, with the bits of virtual ranks; a wrong density is refused."""
    job = folder / "job.toml"
    if world.process == 0:
        page = (ROOT / "docs" / "tutorials" / "first_study.md").read_text()
        source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
        (folder / "of_the_tutorial.py").write_text(source)
        write_idx(folder)
        job.write_text(JOB.format(directory=folder, overlap=str(overlap).lower()))
    world.gather(None)
    done = main(["train", str(job), "--out", str(folder / "out")])
    same = True
    if world.process == 0:
        (here,) = load(job, ["train.overlap=false"])
        alone = Files(folder / "alone.h5", folder / "alone.checkpoint.h5")
        training = prepare(here, Loopback(world.ranks), here.data.load(), alone)
        run(training, Caught(), Display(False, 1))
        there = folder / "out" / "job-s0.checkpoint.h5"
        same = model_bytes(there) == model_bytes(alone.checkpoint) and any(training.reducer.state)
    wrong = main(["train", str(job), "--out", str(folder / "x"), "--set", "gradient.density=2"])
    together(world, done == 0, same, wrong == 2)


@dataclass(frozen=True)
class Trusting(Aggregator):
    """The mean, which it does not look at. last: what the last rank alone makes of it."""

    last: str = "mean"

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        is_last = context.world.rank == context.world.ranks - 1
        if is_last and self.last == "raises at once":
            raise KeyError("mine")
        with np.errstate(over="ignore"):
            flat = sparse.sum(context.world, gradients) / np.float32(context.world.ranks)
        if is_last:
            if self.last == "infinity":
                flat[-1] = np.inf
            elif self.last == "double":
                flat = flat.astype(np.float64)
            elif self.last == "raises":
                raise KeyError("mine")
        return Mean(flat)


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))


def backward(model: torch.nn.Module, factor: float) -> None:
    """Make each gradient factor times ones."""
    for p in model.parameters():
        p.grad = None
    (factor * sum(p.sum() for p in model.parameters())).backward()


SAYS = {  # last, factor -> what all ranks raise
    ("mean", 3e38): "allreduce: the sum of finite values is not finite in ",
    ("infinity", 1.0): "allreduce: the sum of finite values is not finite in '1.bias'",
    ("double", 1.0): "rank {last} | Trusting.aggregate: mean: flat has shape ",
    ("raises", 1.0): "mine",
    ("raises at once", 1.0): "mine",
}


@pytest.mark.parametrize("how", ["reduce", "overlap", "ddp", "ddp, overlap"])
@pytest.mark.parametrize(("last", "factor"), SAYS)
def test_what_an_aggregator_does_not_look_at_never_gets_into_gradients(
    world: World, group: None, how: str, last: str, factor: float
) -> None:
    """All raise the same, p.grad stays the rank's own; the next step of a good mean works."""
    model, overlap = layers(), "overlap" in how
    method: Any = Trusting(last)
    if "ddp" in how:
        net: Any = DistributedDataParallel(model)
        reducer, hook = ddp_hook(world, method, model=net, overlap=overlap)
        net.register_comm_hook(reducer, hook)
    else:
        reducer = GradientReducer(model, world, method, bucket_mib=1e-5, overlap=overlap)

    def step(factor: float) -> None:
        if "ddp" not in how:
            backward(model, factor)
            reducer.reduce()
            return
        for p in model.parameters():
            p.grad = None
        # which is what DDP averages: its forward has to be gone through
        net(torch.zeros(1, 3)).sum().mul(0.0).add(
            factor * sum(p.sum() for p in model.parameters())
        ).backward()

    said, kind = "", Exception
    try:
        step(factor)
    except (NonFiniteGradient, ValueError, KeyError) as error:
        said, kind = str(error), type(error)
    own = all(torch.equal(p.grad, torch.full_like(p, factor)) for p in model.parameters())
    reducer.aggregator = Trusting()
    step(2.0)
    after = all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in model.parameters())
    reducer.close()
    says = (
        SAYS[last, factor].format(last=world.ranks - 1) in said
        and len(set(world.gather(said))) == 1
    )
    kinds = {"double": ValueError, "raises": KeyError, "raises at once": KeyError}
    raised = kind is kinds.get(last, NonFiniteGradient)
    together(world, says, raised, own, after)
