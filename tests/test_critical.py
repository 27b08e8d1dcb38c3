"""The critical batch, from invented steps and from noise scales, and in the report of a study."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from every import every

from cpdhpc.lab.report.figures import draw
from cpdhpc.lab.report.fits import critical, critical_batch, crossing, tradeoff
from cpdhpc.lab.report.points import SeedGroup

BATCHES = np.array([8.0, 16, 32, 64, 128, 256, 512])


def invented(least_steps: float, least_samples: float, batches: Any, error: float) -> Any:
    """Steps of three seeds for each batch, with relative errors."""
    many = np.repeat(batches, 3)
    chance = np.random.default_rng(4).normal(0, error, many.size)
    return many, (least_steps + least_samples / many) * np.exp(chance)


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_the_fit_recovers_what_steps_were_made_of(error: float) -> None:
    """200 steps, 10,000 samples: a critical batch of 50. 21 points of 5 %: some 3 % remain."""
    found = tradeoff(*invented(200, 10000, BATCHES, error), 0.95)
    assert not found.refusal
    for estimate, true in ((found.steps, 200), (found.samples, 1e4), (found.batch, 50)):
        assert estimate.value == pytest.approx(true, rel=1e-5 if not error else 0.08)
        assert estimate.low - 1e-3 <= true <= estimate.high + 1e-3
        assert (estimate.high / estimate.low < 1.4) == bool(estimate.low)


@every(
    ("batches", "samples", "error"),
    [
        ([8.0, 16], 1e4, 0.0),  # two batches: a line through two points
        ([8.0, 16, 32, 64], 1e9, 0.1),  # all far below the critical batch
        ([512.0, 1024, 2048], 1e3, 0.1),  # all far above it
    ],
)
def test_what_the_steps_do_not_determine_is_refused(
    batches: list[float], samples: float, error: float
) -> None:
    found = tradeoff(*invented(200, samples, np.array(batches), error), 0.95)
    assert found.refusal and np.isnan(found.batch.value)


def test_the_noise_scale_predicts_the_steps_of_its_law() -> None:
    """Steps whose noise is constant: E_min / S_min is the noise, whatever the batches.

    Infinite noise is work of nothing, unknown noise counts as no step at all.
    """
    batches = np.array([8, 8, 64, 512])
    assert critical_batch(batches, np.full(4, 50.0)) == pytest.approx(np.full(4, 50.0))
    found = critical_batch(np.array([10, 10, 10]), np.array([np.nan, 10.0, np.inf]))
    assert np.isnan(found[0]) and found[1:] == pytest.approx([10, 30])  # 5 / 0.5, 15 / 0.5


def test_a_crossing_lies_between_epochs() -> None:
    steps = np.array([10.0, 20, 30])
    assert crossing(np.array([3.0, 2, 1]), 1.5, steps) == 25
    assert np.isnan(crossing(np.array([3.0, 2, 1]), 0.5, steps))
    assert np.isnan(crossing(np.array([1.0, 2, 1]), 1.5, steps))  # somewhere in the first epoch


def study(**target: float) -> tuple[Any, list[SeedGroup]]:
    """Losses that reach 1 in 200 + 10,000 / B steps, at the second of three rates for each batch.

    The loss is 1 + (steps to 1 - steps) / 1,000; other rates take three times the steps. The
    accuracy is 80 % there, and rises by 10 points where the loss falls by 1.
    """
    groups, loss, steps, samples = [], [], [], []
    for batch in (16, 64, 256):
        for rate in (0.1, 0.2, 0.4):
            points = []
            for _ in range(2):
                points.append(SimpleNamespace(index=len(loss), ranks=1))
                done = 50.0 * np.arange(1, 101)
                wanted = (200 + 1e4 / batch) * (1 if rate == 0.2 else 3)
                loss.append(1 + (wanted - done) / 1000)
                steps.append(done)
                samples.append(done * batch)
            factors = {"ranks": 1, "train.batch": batch, "train.learning_rate": rate}
            factors["train.epochs"] = batch  # larger batches are given more of them
            groups.append(SeedGroup(factors, cast(Any, tuple(points)), (), 0.95))
    training = {
        "test_loss": np.array(loss),
        "test_accuracy": 90 - 10 * np.array(loss),
        "steps_done": np.array(steps),
        "samples_seen": np.array(samples),
        "critical_batch": np.full(np.shape(loss), 60.0),
    }
    file = SimpleNamespace(
        name="s", training=training, toml={"train": target}, level=0.95, percent="95 %"
    )
    return file, groups


@pytest.mark.parametrize(
    ("target", "told"), [({"target_loss": 1.0}, "1.00 nat"), ({"target_accuracy": 80.0}, "80.0 %")]
)
def test_a_study_has_the_best_rate_of_each_batch(target: dict[str, float], told: str) -> None:
    (section,) = critical(*study(**target))
    (row,) = section.tables[0].rows
    assert row[1:3] == [told, "3"] and row[3].startswith("200 (200")
    assert row[5].startswith("50.0") and row[6:] == ["60.0", "-"]
    (chart,) = section.charts
    assert chart.panels[0].series[0].y == pytest.approx([825, 356.25, 239.0625])
    assert not section.notes
    assert draw(chart).axes
    file, groups = study()
    slowest = [
        group.points[0].index for group in groups if group.factors["train.learning_rate"] == 0.4
    ]
    file.training["test_loss"][slowest] = np.nan  # as where they diverge
    (without,) = critical(file, groups)
    assert without.tables[0].rows[0][1:3] == critical(*study())[0].tables[0].rows[0][1:3]
    (own,) = critical(*study())  # all go on to the end of the run, whose loss is the least
    assert float(str(own.tables[0].rows[0][1]).partition(" ")[0]) < 0
