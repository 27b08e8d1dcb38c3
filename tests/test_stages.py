"""Layer-parallel training, stages played by one process: equations, bits, checkpoints, refusals."""

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from training import finish, model_bytes, prepared, run_job, small_data, stop

from cpdhpc import store
from cpdhpc.config import ConfigError, merge, validate
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.lab.train.pipeline import Filter, StageWire, balanced, cut
from cpdhpc.lab.train.samples import epoch_order
from cpdhpc.lab.train.stages import Stages
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Loopback

RESIDUAL = {
    "name": "staged",
    "model": {"name": "residual_mlp", "width": 8, "blocks": 3},
    "train": {"epochs": 2, "batch": 24, "threads": 1, "telemetry_every": 2, "learning_rate": 0.05},
}


def job_of(count: int, **changes: Any) -> Job:
    return validate(Job, merge(RESIDUAL | {"stages": {"count": count}}, changes), "test")


def losses(training: Training) -> list[float]:
    return [float(row["loss"]) for row in training.record.rows["steps"]]


@pytest.mark.parametrize(("count", "shares"), [(4, 1), (3, 2)])
def test_all_stages_in_turn_are_ordinary_training(tmp_path: Path, count: int, shares: int) -> None:
    """correction = 1: backward through messages is backward, whatever the cut. Bit for bit."""
    whole = run_job(job_of(1, optimizer={"momentum": 0.5}), Loopback(shares), tmp_path)
    files = Files.of(tmp_path / "cut", job_of(1))
    files.record.parent.mkdir()
    job = job_of(count, stages={"correction": 1.0}, optimizer={"momentum": 0.5})
    training = run_job(job, Loopback(shares), files.record.parent)
    assert training.world.ranks == count * shares
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    # the losses of shares are scaled by the stages before their mean is taken: one rounding each
    np.testing.assert_allclose(losses(training), losses(whole), rtol=4e-16)
    one, other = (store.read(each)[0]["layers"] for each in (files.record, whole.files.record))
    assert one["nonzero"].tolist() == other["nonzero"].tolist()
    assert one["layer"].tolist() == other["layer"].tolist()


def by_the_equations(given: Stages, steps: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Parameters after a refresh and some local steps on one batch: whole graphs, in float64."""
    job = job_of(1)
    data = small_data()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = job.model.build((8, 8), 8).double()
    blocks = list(model)  # flatten, linear, three residual blocks, relu, linear
    starts = [0, *given.cut, len(blocks)]
    stages = [torch.nn.Sequential(*blocks[a:b]) for a, b in pairwise(starts)]
    batch = epoch_order(100, job.seed, 0)[: job.train.batch]
    x, targets = (
        torch.from_numpy(data.train_x[batch]).double(),
        torch.from_numpy(data.train_y)[batch],
    )
    means = torch.eye(8, dtype=torch.float64)  # P: rows take groups of neighbours, of norm 1
    means = means.reshape(8 // given.filter, given.filter, 8).sum(1) / given.filter**0.5
    cross_entropy = torch.nn.functional.cross_entropy

    entering = [x]
    for stage in stages[:-1]:
        entering.append(stage(entering[-1]))
    sum_of_losses = cross_entropy(stages[-1](entering[-1]), targets, reduction="sum")
    gradients = torch.autograd.grad(sum_of_losses, entering[1:])
    has_multipliers = given.method == "lagrangian"
    step = 0 if has_multipliers else given.z_rate / given.beta
    z = [y - step * g for y, g in zip(entering[1:], gradients, strict=True)]
    multipliers = [-given.z_rate * has_multipliers * g @ means.T for g in gradients]
    for _ in range(steps):
        z = [each.detach().requires_grad_() for each in z]
        parameters = list(model.parameters())
        total, residuals = torch.zeros((), dtype=torch.float64), []
        for stage, enters, gives in zip(stages[:-1], [x, *z], z, strict=False):
            residuals.append((gives - stage(enters)) @ means.T)
        total = cross_entropy(stages[-1](z[-1]), targets, reduction="sum")
        for residual, multiplier in zip(residuals, multipliers, strict=True):
            total = total + (given.beta / 2 * residual**2 + multiplier.detach() * residual).sum()
        slopes = torch.autograd.grad(total, [*parameters, *z])
        moved = [
            each - given.z_rate / given.beta * slope
            for each, slope in zip(z, slopes[len(parameters) :], strict=True)
        ]
        multipliers = [
            m + given.beta * has_multipliers * (r + (new - old) @ means.T)
            for m, r, new, old in zip(multipliers, residuals, moved, z, strict=True)
        ]
        z = moved
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=False):
                parameter -= job.train.learning_rate / len(batch) * slope
    return [p.detach().numpy() for p in model.parameters()]


@every("method", ["penalty", "lagrangian"])
@every(("factor", "steps", "beta"), [(1, 1, 1.0), (1, 3, 4.0), (2, 2, 1.0)])
def test_local_steps_are_those_of_the_equations(
    tmp_path: Path, method: str, factor: int, steps: int, beta: float
) -> None:
    stages: dict[str, Any] = {
        "cut": [2, 4],
        "method": method,
        "correction": 0.0,
        "refresh_every": 1,
        "local_steps": steps,
        "filter": factor,
        "beta": beta,
        "z_rate": 0.5,
    }
    job = job_of(3, stages=stages, optimizer={"momentum": 0.0})
    training = prepared(job, Loopback(1), tmp_path)
    before = [p.detach().numpy().copy() for p in training.model.parameters()]
    order = epoch_order(100, job.seed, 0)
    for group in training.optimizer.param_groups:
        group["lr"] = job.train.learning_rate
    training.train_on(training.update.batch(order, job.train.batch), 0)
    expected = by_the_equations(job.stages, steps)
    for parameter, wanted, first in zip(training.model.parameters(), expected, before, strict=True):
        # float32 sums of at most 64 terms, through 9 layers back and forth, for each step; and
        # r = z - y loses what y is larger than r: y is of order 1, r of order 1 / (10 beta)
        bound = 64 * 18 * steps * 10 * beta * 2.0**-24 * np.abs(wanted - first).max() + 2.0**-24
        assert np.abs(wanted - first).max() > 4 * bound, "the bound says something"
        assert np.abs(parameter.detach().numpy() - wanted).max() <= bound


def test_the_first_step_after_a_refresh_has_the_gradients_of_the_network(tmp_path: Path) -> None:
    """Of all stages with multipliers, of the first one by the penalty, whatever beta is."""
    whole = prepared(job_of(1), Loopback(1), tmp_path)
    order = epoch_order(100, 0, 0)
    whole.train_on(whole.update.batch(order, 24), 0)
    for method, beta in (("lagrangian", 1.0), ("penalty", 0.5), ("penalty", 2.0)):
        stages = {"correction": 0.0, "refresh_every": 1, "beta": beta, "method": method}
        job = job_of(4, stages=stages)
        training = prepared(job, Loopback(1), tmp_path)
        training.train_on(training.update.batch(order, 24), 0)
        pairs = list(zip(training.model.parameters(), whole.model.parameters(), strict=True))
        for one, other in pairs if method == "lagrangian" else pairs[:2]:
            assert one.grad is not None
            assert other.grad is not None
            # float32 sums through 18 layers; y - (y - g / beta) loses half an ulp of y below 4
            bound = 64 * 18 * 2.0**-24 * float(other.grad.abs().max()) + 24 * beta * 2.0**-22
            assert float((one.grad - other.grad).abs().max()) <= bound
            assert float(other.grad.abs().max()) > 10 * bound


WINDOWS = {"correction": 0.4, "refresh_every": 3, "beta": 2.0, "method": "lagrangian"}


@pytest.mark.parametrize("after", [4])
def test_resumed_is_undisturbed(tmp_path: Path, after: int) -> None:
    """A signal within a window is obeyed at its end: nothing that stages keep is lost."""
    job = job_of(4, stages=WINDOWS, optimizer={"name": "adam"})
    (tmp_path / "whole").mkdir()
    whole = run_job(job, Loopback(2), tmp_path / "whole")
    files = Files.of(tmp_path, job)
    stopped = stop(prepared(job, Loopback(2), files), after, stays=True)
    assert stopped.iteration in (3, 5, 8, 10)  # the ends of windows: 5 iterations are an epoch
    run_job(job, Loopback(2), files, resume=True)
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    one, other = (store.read(each)[0] for each in (files.record, whole.files.record))
    for group, columns in one.items():
        for name, column in columns.items():
            if not name.endswith("time_s"):
                assert column.tobytes() == other[group][name].tobytes(), (group, name)


def test_the_record_has_windows(tmp_path: Path) -> None:
    job = job_of(4, stages=WINDOWS)
    training = run_job(job, Loopback(1), tmp_path)
    windows = store.read(training.files.record)[0]["windows"]
    assert windows["iteration"].tolist() == [0, 3, 5, 8]
    # floor(0.4 i) rises at 3, 5, 8, 10: one correction in each window, first of its batches
    assert ((windows["busy_time_s"][:, 0] > 0).all(axis=1)).tolist() == [True] * 4
    # of 3 batches 2 are local ones, and the second finds y changed; of 2 one, and z is y still
    assert ((windows["violation"] > 0) == [[True] * 3, [False] * 3] * 2).all()
    assert (windows["time_s"] > 0).all()


def test_buffers_move_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh leaves running statistics as they are: those of the first stage, without error."""
    job = imported(tmp_path, monkeypatch, NORMALISED, count=2)
    whole = imported(tmp_path, monkeypatch, NORMALISED, count=1)
    models = []
    for each in (job, whole):
        training = prepared(each, Loopback(1), tmp_path)
        training.train_on(training.update.batch(epoch_order(100, 0, 0), 24), 0)
        models.append(training.model.state_dict())
    for name in ("2.running_mean", "2.num_batches_tracked"):
        assert models[0][name].equal(models[1][name])


NORMALISED = """
return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8),
    torch.nn.Linear(8, 8))
"""
BLOCKS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 8)
        self.stem = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8))
    @property
    def blocks(self):
        return [self.stem, self.head]
    def forward(self, x):
        return self.head(self.stem(x)){more}
return Net()
"""


def imported(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str, count: int) -> Job:
    """A job whose model is a function of this body."""
    name = f"nets_{abs(hash(body))}"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (directory / f"{name}.py").write_text(f"import torch\n\n\ndef net():\n{lines}\n")
    model = {"import": f"{name}:net", "import_from": str(directory)}
    stages = {"count": count, "refresh_every": 1, "correction": 0.0}
    stages |= {"cut": [3]} if body == NORMALISED and count > 1 else {}
    return validate(Job, RESIDUAL | {"model": model, "stages": stages}, "test")


def test_models_that_say_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = imported(tmp_path, monkeypatch, BLOCKS.format(more=""), count=2)
    training = run_job(job, Loopback(1), tmp_path)
    assert training.record.layers == ["stem.1.weight", "stem.1.bias", "head.weight", "head.bias"]
    wrong = imported(tmp_path, monkeypatch, BLOCKS.format(more=" * 2"), count=2)
    with pytest.raises(ConfigError, match="Net cannot be cut: its blocks, one after the other"):
        prepared(wrong, Loopback(1), tmp_path)


@every(
    ("changes", "says"),
    [
        ({"stages": {"count": 6}}, "stages.count=6: the network has 5 blocks to train"),
        ({"stages": {"cut": [9]}}, r"stages.cut=\[9\]: should be below 7, the blocks"),
        ({"stages": {"cut": [1, 2]}}, "should be 1, one per cut"),
        ({"stages": {"filter": 3}}, r"stages.filter=3: a cut has samples of \[8\]"),
        ({"stages": {"wire": "e9m3"}}, "stages.wire"),
        ({"update": {"name": "other"}}, "update.name"),
        ({"train": {"overlap": True}}, "does not allow this train.overlap"),
        ({"train": {"loss_scale": 2.0}}, "does not allow this train.loss_scale"),
        ({"gradient": {"aggregator": "topk"}}, "does not allow this gradient.aggregator"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        job = job_of(2, **changes)
        prepared(job, Loopback(1), tmp_path)
    assert "\n" not in str(caught.value)


@every(
    ("count", "processes", "layout"),
    [(4, 1, (1, 1)), (4, 2, (2, 1)), (4, 8, (4, 2)), (4, 3, None), (4, 6, None), (3, 2, None)],
)
def test_stages_and_processes(count: int, processes: int, layout: tuple[int, int] | None) -> None:
    if layout is not None:
        assert Stages(count=count).layout(processes) == layout
        return
    with pytest.raises(ValueError, match=f"stages.count={count} on {processes} processes"):
        Stages(count=count).layout(processes)


@pytest.mark.parametrize("correction", [0.0, 1.0])
def test_nan_stops_with_parameters_as_they_were(tmp_path: Path, correction: float) -> None:
    job = job_of(4, stages={"correction": correction})
    training = prepared(job, Loopback(1), tmp_path)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.train.x[:] = torch.nan  # type: ignore[attr-defined]
    with pytest.raises(Diverged, match="NaN or infinity"):
        finish(training)
    assert all(a.equal(b) for a, b in zip(training.model.parameters(), before, strict=True))


def test_filters_take_means_and_their_transpose_spreads() -> None:
    rng = np.random.default_rng(0)
    for shape in ((3, 4, 8), (6, 8)):
        x = torch.from_numpy(rng.integers(-8, 8, (2, *shape)).astype(np.float32))
        some = Filter(4, shape)
        p = torch.from_numpy(rng.integers(-8, 8, (2, *some.shape)).astype(np.float32))
        assert some.means(some.spread(p)).equal(p)  # P P^T = 1: powers of two, exact
        assert float((some.means(x) * p).sum()) == float((x * some.spread(p)).sum())
    maps = torch.arange(32.0).reshape(1, 2, 4, 4)
    pooled = torch.nn.functional.avg_pool2d(maps, 2)
    assert Filter(2, (2, 4, 4)).means(maps).equal(2 * pooled)  # scaled so that P P^T = 1


def test_wires_carry_values_and_nan() -> None:
    x = torch.tensor([[1.0, -0.5, 3.0, 0.0]])
    for name in ("raw", "bf16", "e4m3", "int8", "mxfp8"):
        wire = StageWire(name)
        assert wire.encode(x).size == wire.size_bytes(4)
        assert wire.decode(wire.encode(x), (1, 4)).equal(x)
        damaged = torch.tensor([[1.0, torch.nan]])
        assert not wire.decode(wire.encode(damaged), (1, 2)).isfinite().all()


def test_cuts_are_the_most_even_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = [int(n) for n in rng.integers(0, 9, 7) * rng.integers(0, 2, 7)]
        some = sum(size > 0 for size in sizes)
        for count in range(1, some + 1):
            starts = balanced(sizes, count)
            assert starts[0] == 0
            found = [sum(sizes[a:b]) for a, b in pairwise([*starts, 7])]
            every = [
                [sum(sizes[a:b]) for a, b in pairwise([0, *inner, 7])]
                for inner in combinations(range(1, 7), count - 1)
            ]
            assert max(found) == min(max(parts) for parts in every if min(parts) > 0)
            assert min(found) > 0
        with pytest.raises(ValueError, match=f"the network has {some} blocks"):
            balanced(sizes, some + 1)


def test_tied_parameters_are_not_cut_apart() -> None:
    one = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"stages.cut: 1\.0\.weight belongs to two stages"):
        cut(torch.nn.Sequential(one, torch.nn.Sequential(one)), 2, (), 1, torch.ones(2, 4))
