"""Bits that batches need, by made-up accuracies, and the study that asks for them."""

from math import isnan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from every import every
from training import ROOT

from cpdhpc.config import ConfigError
from cpdhpc.lab.kinds.train import _measure
from cpdhpc.lab.report.fits import Score
from cpdhpc.lab.report.trainings import bits_by_batch, needed
from cpdhpc.lab.study.cases import expand, load_study

INPUT = ROOT / "inputs" / "bits_against_batch.toml"
ACCURACY = Score("accuracy", "%", lower=False, loss_unit="nat")


def group(accuracy: float, **factors: Any) -> Any:
    """What the report knows of trainings that differ in the seed."""
    named = {name.replace("_", ".", 1): value for name, value in factors.items()}
    return SimpleNamespace(factors=named, mean=lambda name: accuracy)


def lowbit(wire: str, accuracy: float, batch: int, scaling: str = "tile") -> Any:
    return group(
        accuracy, train_batch=batch, gradient_aggregator="lowbit", gradient_wire=wire,
        gradient_scaling=scaling, gradient_accumulate="requantise", **by_batch(batch),
    )  # fmt: skip


def by_batch(batch: int) -> dict[str, int]:
    return {"train_epochs": batch // 32}


@every(
    ("differences", "bits", "wire"),
    [
        ({"e2m0": -0.1, "e3m0": 0.2, "e4m3": 0.0}, 3, "e2m0"),
        ({"e2m0": -9.0, "e3m0": -1.0, "e4m3": 0.0}, 4, "e3m0"),  # the tolerance itself is within
        ({"e2m0": 0.0, "e3m0": -1.1, "e4m3": 0.0}, 8, "e4m3"),  # by chance: more bits are not
        ({"e3m0": -5.0, "e4m3": -2.0, "e5m2": -0.5}, 8, "e5m2"),  # the best of one width
        ({"e3m0": 0.0, "e4m3": np.nan}, None, ""),
        ({"e3m0": -3.0, "e4m3": -2.0}, None, ""),
    ],
)
def test_fewest_bits(differences: dict[str, float], bits: int | None, wire: str) -> None:
    found = needed([(lowbit(w, 0, 1), d) for w, d in differences.items()], 1.0)
    assert found.wire == wire and (found.bits == bits or (bits is None and isnan(found.bits)))


def test_each_batch_is_compared_with_float32_at_that_batch() -> None:
    groups = []
    for batch, base, loss in ((64, 95.0, 0.0), (512, 80.0, 2.0)):  # epochs go with them: no line
        groups.append(group(base, train_batch=batch, gradient_aggregator="none", **by_batch(batch)))
        for scaling, harm in (("tile", 0.0), ("none", 20.0)):
            groups += [
                lowbit("e2m0", base - harm - loss, batch, scaling),
                lowbit("e4m3", base - harm / 20, batch, scaling),
                lowbit("e5m10", base, batch, scaling),
            ]
    file: Any = SimpleNamespace(name="x", toml={"train": {"tolerance": 0.5}})
    (section,) = bits_by_batch(file, groups, ACCURACY)
    (table,), (chart,) = section.tables, section.charts
    cells = {row[0]: [cell.split(" ")[0] for cell in row[1:]] for row in table.rows}
    assert cells == {"tile": ["3", "8"], "unscaled": ["16", "16"]}
    assert [list(series.y) for series in chart.panels[0].series] == [[3, 8], [16, 16]]
    assert "float32 95.0 %" in table.columns[1].heading
    assert bits_by_batch(file, groups[1:], ACCURACY) == []  # one batch is left that has float32


def test_what_was_not_measured_is_not_drawn_as_more_bits() -> None:
    groups = [
        group(90.0, train_batch=b, gradient_aggregator="none", **by_batch(b)) for b in (8, 64)
    ]
    for wire, accuracy in (("e2m0", 10.0), ("e3m0", 90.0), ("e4m3", 90.0)):
        groups += [
            lowbit(wire, accuracy, 8),
            lowbit(wire, 10.0, 64),
            lowbit(wire, accuracy, 8, "aps"),
        ]
    file: Any = SimpleNamespace(toml={})
    (section,) = bits_by_batch(file, groups, ACCURACY)
    (chart,) = section.charts
    first, beyond, second = chart.panels[0].series
    np.testing.assert_array_equal([*first.y, *second.y], [4, np.nan, 4])
    assert [*beyond.x] == [first.x[1]] and beyond.y[0] > 4 and not beyond.label
    assert "more bits" in chart.notes[0] and "not measured" in chart.notes[0]


def test_a_job_whose_aggregator_is_swept_alone_is_reported() -> None:
    """Its tables say how gradients travel but for the aggregator, which each case adds."""
    file: Any = SimpleNamespace(toml={"job": {"gradient": {"algorithm": "tree"}}})
    swept = group(90.0, gradient_aggregator="lowbit", gradient_wire="e4m3", train_batch=64)
    assert _measure(file, [swept]).label == "accuracy"


def test_the_study_has_float32_at_every_batch_and_one_rank_for_32_samples() -> None:
    study = load_study(INPUT, ["sweep.seed=[0]"])
    cases = [case.factors for case in expand(study).cases]
    batches = {64, 128, 256, 512, 1024}
    assert {c["train.batch"] for c in cases if c["gradient.aggregator"] == "none"} == batches
    assert len(cases) == 5 * (1 + 11 * 3 * 2 + 7)  # rounded and float32 sums; exact ones
    for case in cases:
        assert case["train.batch"] == 32 * int(case["train.virtual_ranks"])
    assert study.train is not None and study.train.tolerance == 1.0
    with pytest.raises(ConfigError, match=r"train\.tolerance=0"):
        load_study(INPUT, ["train.tolerance=0.0"])
