"""Wires of layers, and the search for them, on real ranks."""

from pathlib import Path
from typing import Any

import pytest
from reducing import backward, gradients, model_of
from training import model_bytes, run_job, small_data, small_job
from verdicts import together

from cpdhpc.lab.cli import main
from cpdhpc.lab.precision.evidence import Evidence
from cpdhpc.lab.train.command import Trainer
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

WIRES: dict[str, Any] = {
    "wire": "e4m3",
    "layers": {"1": {"wire": "e3m0", "rounding": "stochastic"}, "2": "e5m2", "*.bias": "raw"},
}


@pytest.mark.parametrize("overlap", [False, True])
def test_wires_of_layers_have_the_bits_of_virtual_ranks(world: World, overlap: bool) -> None:
    """In small buckets, with overlap; beside one process that plays all ranks."""
    model, alone = model_of(), model_of()
    how: dict[str, Any] = {"bucket_mib": 0.005, "seed": 3, **WIRES}
    mine = GradientReducer(model, world, "lowbit", overlap=overlap, **how)
    whole = GradientReducer(alone, Loopback(world.ranks), "lowbit", **how)
    same = []
    with mine:
        for step in range(3):
            for rank in range(world.ranks):
                backward(alone, 100 * step + rank)
                whole.stash(rank)
            whole.reduce()
            backward(model, 100 * step + world.rank)
            mine.reduce()
            same.append(gradients(model) == gradients(alone))
    together(world, *same)


def test_a_job_with_wires_of_a_policy_has_the_bits_of_virtual_ranks(
    world: World, folder: Path, tmp_path: Path
) -> None:
    rules = [{"layers": "1", "wire": "e3m0"}, {"layers": "3", "wire": "e5m2"}]
    job = small_job(precision={"rule": rules}, train={"epochs": 1})
    (tmp_path / "alone").mkdir()
    alone = run_job(job, Loopback(world.ranks), tmp_path / "alone")
    run_job(job, world, folder)
    together(
        world,
        model_bytes(folder / f"{job.id}.checkpoint.h5") == model_bytes(alone.files.checkpoint),
    )


@pytest.mark.two_ranks
def test_a_search_under_mpirun_goes_on_and_refuses_alike(
    world: World, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "data_of", lambda self, job: small_data())
    path = tmp_path / "job.toml"
    path.write_text(
        "name = 'job'\n[model]\nname = 'mlp'\nhidden = [64]\n[data]\nname = 'digits'\n[train]\n"
        "epochs = 1\nbatch = 24\nthreads = 1\nseeds = [0]\n"
    )
    words = ["precision", "search", str(path), "--out", str(folder / "out")]
    limits = ["--gradient-error", "0.2", "--trials", "7"]
    few = world.ranks == 1
    status = [main([*words, *limits])]
    again = [main([*words, *limits]), main([*words, *limits, "--resume"])]
    refused = [main([*words, "--budget", "0"]), main([*words, *limits, "--set", "train.epochs=0"])]
    together(
        world,
        status == ([2] if few else [0]),
        again == ([2, 2] if few else [2, 0]),
        refused == [2, 2],
    )
    if not few:
        found = Evidence.read(folder / "out" / "search.h5")
        trial = found.trial(found.found, (0,))
        together(world, trial is not None and 0 < trial.error <= 0.2, len(found.trials) == 7)
