"""Local SGD and DiLoCo against loops of plain torch; batch norm; other numbers of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import finish, prepared, run_job, small_data, small_job, stop

from cpdhpc import store
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import UPDATES
from cpdhpc.lab.train.update import OwnModels
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

EPS = float(np.finfo(np.float32).eps)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    first = torch.nn.Linear(4, 6, bias=False)  # in front of a norm its gradient would be rounding
    return torch.nn.Sequential(
        first, torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    )


def flat(model: torch.nn.Module) -> np.ndarray:  # type: ignore[type-arg]
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).numpy()


def backward(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "keys, outer",
    [
        ({"name": "localsgd", "period": 3}, {"lr": 1.0}),
        (
            {"name": "diloco", "period": 3, "outer_rate": 0.5, "outer_momentum": 0.8},
            {"lr": 0.5, "momentum": 0.8, "nesterov": True},
        ),
    ],
)
def test_beside_plain_torch(keys: dict[str, Any], outer: dict[str, Any]) -> None:
    """Three models with Adam each, and torch's own SGD with Nesterov's momentum outside."""
    ranks, steps = 3, 8
    rng = torch.Generator().manual_seed(1)
    xs = torch.randn(steps, ranks, 5, 4, generator=rng)
    ys = torch.randint(0, 3, (steps, ranks, 5), generator=rng)
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-2)
    reducer = GradientReducer(model, Loopback(ranks))
    update = UPDATES[keys["name"]].model_validate(keys).build(model, adam, reducer)
    anchor, models = net(), [net() for _ in range(ranks)]
    adams = [torch.optim.Adam(each.parameters(), lr=0.02, eps=1e-2) for each in models]
    outside = torch.optim.SGD(anchor.parameters(), **outer)
    for step in range(steps):
        for rank in range(ranks):
            reducer.begin(rank)
            update.begin(rank)
            backward(model, xs[step, rank], ys[step, rank])
            update.keep(rank)
            backward(models[rank], xs[step, rank], ys[step, rank])
            adams[rank].step()
        update.reduce()
        update.step()
        if step % 3 == 2:
            for p, *others in zip(*(m.parameters() for m in (anchor, *models)), strict=True):
                p.grad = p.detach() - torch.stack([o.detach() for o in others]).mean(0)
            outside.step()
            for each in models:
                state = each.state_dict()  # statistics of batch norm stay where they are
                each.load_state_dict(state | dict(anchor.named_parameters()))
        assert isinstance(update, OwnModels)
        for mine, theirs in zip(update.parameters, models, strict=True):
            # Some 20 roundings a step, of values up to 2. Adam multiplies errors of gradients by
            # 0.02 / eps = 2 at most.
            assert np.abs(mine - flat(theirs)).max() < 40 * (step + 1) * EPS
    assert len({x.tobytes() for x in update.parameters}) == ranks  # 8 steps: 2 after the last mean
    with update.evaluated():
        mean = np.mean([flat(each) for each in models], axis=0)
        assert np.abs(flat(model) - mean).max() < 40 * steps * EPS
        norms = [each[1] for each in models]
        for name in ("running_mean", "running_var"):
            wanted = torch.stack([getattr(n, name) for n in norms]).mean(0)
            assert torch.allclose(getattr(model[1], name), wanted, rtol=1e-5, atol=1e-6)  # type: ignore[index]
        assert model[1].num_batches_tracked == steps  # type: ignore[index]
    spread = np.square(np.array([flat(each) for each in models]) - mean).sum(axis=1)
    assert update.consensus_distance == pytest.approx(spread.mean() ** 0.5, rel=1e-3)


def test_with_another_number_of_ranks_all_begin_with_the_average(tmp_path: Path) -> None:
    job = small_job(update={"name": "diloco", "period": 2}, optimizer={"name": "adam"})
    files = Files.of(tmp_path, job)
    stop(prepared(job, Loopback(3), files), 3)
    saved = store.read(files.checkpoint)[0]["model"]
    training = prepared(job, Loopback(2), files)
    said = training.resume()
    assert said.startswith("3 ranks before, 2 now: all begin with the average")
    update = training.update
    assert isinstance(update, OwnModels)
    values = update.bucket.views(update.parameters[1])
    names = update.bucket.names
    assert all(np.array_equal(v, saved[n]) for n, v in zip(names, values, strict=True))
    momentum = update.state.shared("", "outer_momentum", lambda: np.zeros(1))
    assert momentum.any()  # what ranks hold alike goes on
    finish(training)
    assert store.read_attributes(files.record)["status"] == "complete"
    again = prepared(job, Loopback(2), files)
    assert again.resume() == ""


def test_the_record_has_the_worst_rank_beside_the_average(tmp_path: Path) -> None:
    """The worst rank's scores are those of its model in a plain loop over all test images."""
    job = small_job(update={"name": "localsgd", "period": 100}, train={"telemetry_every": 1})
    training = run_job(job, Loopback(3), tmp_path)
    groups = store.read(training.files.record)[0]
    data, losses = small_data(), []
    images, labels = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    for rank in range(3):
        training.update.begin(rank)
        with torch.no_grad():
            logits = training.model(images).double()
        losses.append(float(torch.nn.functional.cross_entropy(logits, labels)))
    of_ranks = groups["ranks"]
    assert of_ranks["worst_rank"][-1] == int(np.argmax(losses))
    assert of_ranks["test_loss"][-1] == pytest.approx(max(losses), rel=1e-9)
    assert of_ranks["consensus_distance"][-1] > 0
    assert groups["epochs"]["test_loss"][-1] != of_ranks["test_loss"][-1]
    assert not len(groups["layers"]["iteration"])  # no mean was formed, of which to tell
    quiet = small_job(update={"name": "localsgd", "evaluate_ranks": False}, name="q")
    groups = store.read(run_job(quiet, Loopback(3), tmp_path).files.record)[0]
    assert (groups["ranks"]["worst_rank"] == -1).all()
    # 10 steps, a mean in the 8th, telemetry of every 2nd: of iteration 7, as 0, 2, 4, 6 are in it
    assert groups["layers"]["iteration"].tolist() == [7]
