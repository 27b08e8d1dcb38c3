"""Adversarial copies: which gradient, by which parameters, on how many ranks, and their files."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from training import prepared, run_job, small_data, small_job, stop

from cpdhpc import store
from cpdhpc.config import ConfigError
from cpdhpc.lab.train.adversary import Adversary, add_statistics
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.losses import Adversarial
from cpdhpc.world.ranks import Loopback

F = torch.nn.functional


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 8),
    )


def job_of(**changes: Any) -> Job:
    tables = {
        "model": {"name": "quantized_cnn", "channels": [2, 2], "hidden": 8},
        "adversarial": {"epsilon": 0.1, "tau": 2, "low": 0.0, "high": 1.0},
        "train": {"batch": 50},
    }
    return small_job(**{name: table | changes.get(name, {}) for name, table in tables.items()})


def test_the_gradient_is_that_of_both_one_after_the_other() -> None:
    """To the bit: halves are exact, and a sum of two knows no order. tau = 0."""
    data = small_data()
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    clean, copies = network(), network()
    own = x.clone().requires_grad_()
    (F.cross_entropy(clean(own), y) / 2).backward()
    assert own.grad is not None
    changed = x + 0.1 * own.grad.sign()
    (F.cross_entropy(copies(changed), y) / 2).backward()
    model = network()
    add_statistics(model)
    adversary = Adversary(Adversarial(epsilon=0.1, tau=0), model, Loopback(1))
    adversary.loss_of(0, 0, F.cross_entropy, x, y).backward()
    both = zip(clean.parameters(), copies.parameters(), model.parameters(), strict=True)
    for one, other, found in both:
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad + other.grad, found.grad)
    buffers = dict(model.named_buffers())
    for name, buffer in clean.named_buffers():
        assert torch.equal(buffers[name], buffer)
    for name, buffer in copies.named_buffers():
        where, _, last = name.rpartition(".")
        assert torch.equal(buffers[f"{where}.adversarial_{last}"], buffer)
        assert last == "num_batches_tracked" or not torch.equal(buffers[name], buffer)


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_copies_are_made_by_parameters_tau_steps_old(
    tau: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, live = list[Any](), list[Any]()
    plain = Adversary.copies

    def noted(self: Adversary, x: Any, y: Any, loss: Any, parameters: Any) -> Any:
        if self.model.training:
            given.append([each.clone() for each in parameters.values()])
            live.append([each.detach().clone() for each in self.model.parameters()])
        return plain(self, x, y, loss, parameters)

    monkeypatch.setattr(Adversary, "copies", noted)
    job = small_job(adversarial={"epsilon": 0.1, "tau": tau})
    run_job(job, Loopback(1), tmp_path)
    assert len(given) == 10
    for step, parameters in enumerate(given):
        wanted = live[max(0, step - tau)]
        assert all(torch.equal(a, b) for a, b in zip(parameters, wanted, strict=True))
    assert not torch.equal(live[0][0], live[1][0])


def test_two_groups_of_one_rank_are_one_rank_that_does_both(tmp_path: Path) -> None:
    """To the bit, statistics of both too: a mean of two float32 halves nothing that is lost."""
    states = []
    for alternate, ranks in (("turns", 1), ("ranks", 2)):
        directory = tmp_path / alternate
        directory.mkdir()
        job = job_of(adversarial={"alternate": alternate})
        training = run_job(job, Loopback(ranks), directory)
        states.append(training.model.state_dict())
    assert {name.rpartition(".")[2] for name in states[0]} > {"adversarial_running_var"}
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_resumed_bit_for_bit_with_old_parameters_and_both_statistics(tmp_path: Path) -> None:
    job = job_of(adversarial={"alternate": "ranks"})
    whole, parts = run_job(job, Loopback(4), tmp_path), tmp_path / "parts"
    parts.mkdir()
    files = Files.of(parts, job)
    stop(prepared(job, Loopback(4), files), 3)
    training = run_job(job, Loopback(4), files, resume=True)
    pairs = zip(whole.model.state_dict().items(), training.model.state_dict().items(), strict=True)
    for (name, one), (_, other) in pairs:
        assert torch.equal(one, other), name
    columns = [store.read(each.files.record)[0]["epochs"] for each in (whole, training)]
    for name in ("test_accuracy", "test_accuracy_fgsm", "test_loss"):
        assert (columns[0][name] == columns[1][name]).all()


def test_accuracy_of_copies_is_that_of_the_trained_model(tmp_path: Path) -> None:
    training, data = run_job(job_of(), Loopback(1), tmp_path), small_data()
    model = deepcopy(training.model).eval()
    x, y = torch.from_numpy(data.test_x).requires_grad_(), torch.from_numpy(data.test_y)
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    changed = (x + 0.1 * x.grad.sign()).clamp(0, 1)
    right = float((model(changed).argmax(1) == y).double().mean())
    assert store.read(training.files.record)[0]["epochs"]["test_accuracy_fgsm"][-1] == right


@every(
    "changes, ranks, words",
    [
        (
            {"adversarial": {"alternate": "ranks"}},
            3,
            "adversarial.alternate='ranks': 3 ranks: must be even",
        ),
        (
            {"train": {"image_grid": [1, 2]}},
            1,
            "adversarial: does not allow this train.image_grid: must be",
        ),
        ({"adversarial": {"epsilon": -1.0}}, 1, "adversarial.epsilon=-1.0: should be greater"),
    ],
)
def test_what_does_not_go_with_copies_is_one_line(
    changes: dict[str, Any], ranks: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_job(job_of(**changes), Loopback(ranks), tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_have_no_copies() -> None:
    x, y = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    adversary = Adversary(Adversarial(epsilon=0.1), torch.nn.Linear(3, 2), Loopback(1))
    with pytest.raises(ConfigError, match="int64: must be floating point"):
        adversary.copies(x, y, F.cross_entropy, adversary.now())
