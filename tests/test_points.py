"""What points are called in tables and figures."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from every import every

from cpdhpc.lab.report.points import Facets, Factors, label


@every(
    ("factors", "name"),
    [
        ({"gradient.aggregator": "lowbit", "optimizer.name": "lamb"}, "lowbit lamb"),
        ({"gradient.aggregator": "none", "optimizer.name": "lamb"}, "float32 lamb"),
        ({"gradient.aggregator": "lowbit", "gradient.wire": "e4m3"}, "e4m3"),
        ({"gradient.aggregator": "powersgd", "gradient.wire": "e4m3"}, "powersgd e4m3"),
        ({"gradient.aggregator": "lowbit"}, "lowbit"),
    ],
)
def test_a_compressor_is_named_unless_its_wire_is(factors: Factors, name: str) -> None:
    assert label(factors, factors) == name


@pytest.mark.parametrize("several", [False, True])
def test_rates_that_optimizers_decide_have_no_panels_of_their_own(several: bool) -> None:
    """So that optimizers stand side by side; a grid of rates for each has a panel a rate."""
    rates = {"sgd": [0.1, 1.0], "lamb": [0.01, 0.1]} if several else {"sgd": [0.1], "lamb": [0.01]}
    factors = [
        {"optimizer.name": name, "train.learning_rate": rate, "train.batch": batch}
        for name, each in rates.items()
        for rate in each
        for batch in (32, 256)
    ]
    groups: Any = [SimpleNamespace(factors=each, ranks=1) for each in factors]
    layout = Facets.of(cast(Any, SimpleNamespace(weak=(), over="ranks")), groups, ())
    rate = ["train.learning_rate"]
    assert sorted(layout.panels) == ["train.batch", *(rate if several else [])]
    assert sorted(layout.lines) == ["optimizer.name", *([] if several else rate)]


def test_baselines_beyond_those_with_a_style_of_their_own_have_one_in_order() -> None:
    factors = [{"operation": f"sum {i}", "algorithm": "mpi"} for i in range(9)]
    layout = Facets.named([], ["operation"], (), factors)
    assert [*layout.styles] == [f"sum {i}" for i in (4, 5, 6, 7, 8, 0, 1, 2, 3)]
