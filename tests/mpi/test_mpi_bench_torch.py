"""bench torch, bench fsdp, and bench step with backends: tables, pictures, exactness, refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cpdhpc.lab.bench.torch_calls import BACKENDS, calls  # noqa: E402
from cpdhpc.lab.cli import main  # noqa: E402
from cpdhpc.lab.train.job import load  # noqa: E402
from cpdhpc.lab.train.samples import epoch_order, taken  # noqa: E402
from cpdhpc.lab.train.setup import build_model, samples_of  # noqa: E402

pytestmark = [pytest.mark.two_ranks, pytest.mark.usefixtures("one_thread")]
JOB = Path(__file__).parents[2] / "inputs" / "fsdp_markov.toml"
TINY = ["model.width=8", "data.states=6", "data.time=5", "data.train=24", "data.test=7"]
TINY += ["train.batch=8", "train.seeds=[0, 1]"]
SET = [word for setting in TINY for word in ("--set", setting)]
WIRES_OF_BOTH = "cpdhpc:gradient=e4m3,parameter=e2m1fn"
WIRES = ["cpdhpc:gradient=e4m3,accumulate=exact,from_bytes=0", "cpdhpc:parameter=e4m3,from_bytes=0"]


def table(world: Any, capsys: pytest.CaptureFixture[str], *arguments: object) -> list[list[str]]:
    """The words of each row that process 0 of a benchmark has shown."""
    status = main(["bench", *map(str, arguments)])
    out = world.gather(capsys.readouterr().out)[0]
    assert world.gather(status) == [0] * world.processes
    return [line.split() for line in out.splitlines() if line[:1] == " "]


def test_calls_have_a_table_and_a_picture(
    world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png = Path(world.gather(str(tmp_path))[0]) / "calls.png"
    few = ("--repeats", 2, "--warmup", 0, "--png", png)
    rows = table(world, capsys, "torch", "--sizes", "64,4KiB", *few)
    names = [*calls(64, world.size)]
    assert [row[:2] for row in rows] == [[size, name] for size in ("64", "4096") for name in names]
    for *_, gloo, gloo_least, ours, ours_least, ratio in rows:
        assert 0 < float(gloo_least) <= float(gloo) and 0 < float(ours_least) <= float(ours)
        # each is shown to a tenth of a microsecond, and the ratio to a tenth
        low, high = ((float(gloo) + s * 0.05) / (float(ours) - s * 0.05) for s in (-1, 1))
        assert low - 0.05 <= float(ratio) <= high + 0.05
    if world.process == 0:
        assert png.read_bytes().startswith(b"\x89PNG")


def test_calls_beside_the_time_of_their_bytes_on_a_link(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits per value: 32; of e4m3 8, of e2m1fn 4, and a byte for each tile of 1,024 values."""
    few = ("--repeats", 1, "--warmup", 0, "--sizes", "1MiB", "--link", 2)
    rows = table(world, capsys, "torch", *few, "--backends", "cpdhpc", WIRES_OF_BOTH)
    share = 2**18 // world.size  # values
    for _, name, us, _, raw, times, its_us, _, packed, _, ratio in rows:
        count = {"all_reduce": 2, "broadcast": world.size / (world.size - 1)}.get(name, 1)
        sent = count * (world.size - 1) * share
        # us at 2 Gb/s, as 1e9 bits/s are 1e3 bits/us; shown to a tenth
        assert float(raw) == pytest.approx(sent * 32 / 2e3, abs=0.06)
        few_bits = {"all_reduce": 8, "reduce_scatter_tensor": 8, "all_gather_into_tensor": 4}
        bits = few_bits[name] + 8 / 1024 if name in few_bits else 32
        assert float(packed) == pytest.approx(sent * bits / 2e3, abs=0.06)
        assert float(times) == pytest.approx(float(us) / float(raw), rel=0.01, abs=0.01)
        assert float(ratio) == pytest.approx(float(us) / float(its_us), rel=0.01, abs=0.06)


def test_steps_of_backends_end_with_the_mean_of_ddp(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gradient of float32 is that of DDP but for the order of sums; that of e4m3 is near it."""
    backends = [*BACKENDS, *WIRES]
    few = ("--repeats", 1, "--warmup", 0, "--methods", "", "--backends", *backends)
    rows = table(world, capsys, "step", JOB, *SET, *few)
    errors = {" ".join(row[:-8]): row[-1] for row in rows}
    assert [*errors][2:] == [f"{name} {kind}" for name in backends for kind in ("ddp", "fsdp")]
    rounded = [f"{WIRES[0]} ddp", f"{WIRES[0]} fsdp", f"{WIRES[1]} fsdp"]
    for name, error in list(errors.items())[1:]:
        if name in rounded:
            assert 2**-9 < float(error) < 2**-2, errors
        else:  # see test_steps_end_with_the_mean_of_ddp in test_mpi_bench.py
            assert float(error) < 2**-18, errors


def by_hand(seed: int, steps: int) -> float:
    """The loss that a training of whole batches in one process ends with."""
    job = load(JOB, TINY)[seed]
    data = job.data.load()
    train, test = samples_of(data)
    model, loss = build_model(job, data), job.loss.build()
    optimizer = torch.optim.AdamW(
        model.parameters(), job.train.learning_rate, weight_decay=job.optimizer.weight_decay
    )
    for step in range(steps):
        epoch, number = divmod(step, 3)  # batches of 8 of 24 samples
        index = epoch_order(24, job.seed, epoch)[8 * number :][:8]
        inputs, targets = taken(train, index, 0, torch.device("cpu"))
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    inputs, targets = taken(test, np.arange(7), 0, torch.device("cpu"))
    with torch.no_grad():
        return float(loss(model.eval()(inputs), targets))


def test_fsdp_ends_with_the_loss_of_one_process(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = [*BACKENDS, *WIRES]
    rows = table(world, capsys, "fsdp", JOB, *SET, "--steps", 5, "--backends", *backends)
    losses = {name: [float(cell) for cell in cells] for name, *cells in rows}
    assert [*losses] == backends
    expected = [by_hand(seed, 5) for seed in (0, 1)]
    for name in BACKENDS:  # shown to four decimals; sums are in another order
        assert losses[name] == pytest.approx([*expected, 0], abs=2e-4)
    for name in WIRES:
        *own, more = losses[name]
        assert own != losses["gloo"][:2] and own == pytest.approx(expected, abs=0.1)
        differences = [a - b for a, b in zip(own, losses["gloo"], strict=False)]
        assert more == pytest.approx(sum(differences) / 2, abs=2e-4)


REFUSED: list[tuple[Sequence[object], str]] = [
    (["torch", "--png", "none/x.png"], "--png none/x.png: none is no directory"),
    (["torch", "--link", 0], "--link 0: must be above 0"),
    (["torch", "--backends"], "--backends: must name one or more"),
    (["torch", "--repeats", 0], "--repeats 0: must be 1 or more"),
    (["fsdp", JOB, "--steps", 0], "--steps 0: must be 1 or more"),
    (["fsdp", JOB, "--backends", "glo"], "--backends glo: did you mean gloo?"),
    (
        ["fsdp", JOB, "--backends", "gloo:wire=e4m3"],
        "gloo:wire=e4m3: unknown key wire: none is known",
    ),
    (["fsdp", JOB, "--backends", "cpdhpc:e4m3"], "the form is NAME:OPTION=VALUE"),
    (["fsdp", JOB, "--backends", "cpdhpc:gradient=e9m9x"], "--backends: set_wires: all_reduce: "),
    (["fsdp", JOB, "--set", "train.batch=1"], "train.batch=1: must be at least the"),
    (["fsdp", JOB, "--set", "data.train=8"], "at most the 8 training samples"),
    (["fsdp", JOB, "--set", "train.virtual_ranks=2"], "train.virtual_ranks=2: must be 1"),
    (["fsdp", JOB, "--set", 'precision.name="fp8"'], "precision"),
    (["step", JOB, "--backends", "nccl"], "--backends nccl: "),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_what_is_refused(
    world: Any, arguments: Sequence[object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["bench", *map(str, arguments)])
    assert world.gather(status) == [2] * world.processes
    assert said in world.gather(capsys.readouterr().err)[0]
