"""What points are called in tables and figures."""

from __future__ import annotations

import pytest

from cpdhpc.report.points import Factors, label

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize(
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
