"""Influence on real ranks: the bits of one process, and one error on all."""

import argparse
from pathlib import Path

import pytest
from test_mpi_updates import together
from training import run_job, small_job

from cpdhpc import store
from cpdhpc.config import UserError
from cpdhpc.lab.commands.trained import add_influence, run_influence
from cpdhpc.lab.train.imports import ImportedData
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback, Ranks

pytestmark = pytest.mark.two_ranks

DATA = """
import torch


class Digits(torch.utils.data.Dataset):
    classes = 8

    def __init__(self, n, lost):
        self.n, self.lost = n, lost

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.lost:
            raise OSError(f"no image {i}")
        return torch.rand(8, 8, generator=torch.Generator().manual_seed(i)), i % 8


def digits(lost=-1):
    return Digits(260, lost), Digits(140, -1)
"""


def influence(ranks: Ranks, *arguments: object) -> None:
    parser = argparse.ArgumentParser()
    add_influence(parser)
    run_influence(parser.parse_args([str(each) for each in arguments]), ranks)


def test_ranks_give_the_bits_of_one_process_and_one_error(
    world: World,
    folder: Path,
) -> None:
    """260 samples are 5 chunks, 140 are 3, so that ranks have unequal parts, or none."""
    if world.process == 0:
        (folder / "many.py").write_text(DATA)
    world.barrier()
    data = {"import": "many:digits", "import_from": str(folder)}
    job = small_job(data=data, train={"keep_every": 1})
    assert isinstance(job.data, ImportedData)
    run_job(job, world, folder, job.data.load())
    verdicts = []
    for name, options in {
        "last": ("--test", "0:140", "--self"),
        "all": ("--test", "0:140", "--layers", "all", "--memory", 1),
        "projected": ("--test", "3,70:139", "--projection", 16, "--train", "0:200"),
        "self": ("--self", "--train", "0:30"),
    }.items():
        paths = [folder / f"{name}-{which}.h5" for which in ("real", "alone")]
        influence(world, folder, *options, "--out", paths[0])
        if world.process == 0:
            influence(Loopback(), folder, *options, "--out", paths[1])
            attributes, rooms = store.contents(paths[0])
            verdicts += [attributes == store.contents(paths[1])[0]]
            for dataset in rooms:
                box = (slice(None),) * len(rooms[dataset].shape)
                one, other = (store.read_box(path, dataset, box) for path in paths)
                verdicts += [one.tobytes() == other.tobytes(), bool(one.any())]
    together(world, *verdicts)
    told = []
    for options in (("--test", "140"), ("--self", "--set", "data.lost=257")):
        try:
            influence(world, folder, *options, "--out", folder / "lost.h5")
        except UserError as error:
            told.append(str(error))
    everywhere = world.gather(told)
    together(
        world,
        everywhere == [everywhere[0]] * world.processes,
        "140 is not there" in told[0],
        "item 257: OSError: no image 257" in told[1],
        not (folder / "lost.h5").exists(),
    )
