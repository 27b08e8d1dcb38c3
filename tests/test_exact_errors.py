"""What exact sums refuse, before data moves."""

import numpy as np
import pytest
from every import every
from exact_oracle import format_of

from cpdhpc.collectives.allreduce import allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import sum_bits
from cpdhpc.world.ranks import Loopback

SEGMENTS = [Segment("a", 0, 900), Segment("zero", 1024, 1030), Segment("b", 2048, 2300)]


@every("value", [np.nan, np.inf])
@every(
    "wire, scaling",
    [("int8", None), ("ternary", "aps"), ("e4m3", "aps"), ("e4m3", "none"), ("e3m0", "static:1")],
)
def test_nonfinite_values_raise_before_data_moves(wire, scaling, value):
    for algorithm in SCHEDULES:
        xs, world = list(np.ones((3, 2300), np.float32)), Loopback(3)
        xs[1][2200] = value
        with pytest.raises(NonFiniteGradient) as caught:
            allreduce(world, xs, wire, algorithm, scaling, "exact", segments=SEGMENTS)
        assert caught.value.segments == ("b",) and caught.value.ranks == (1,)
        assert world.messages_sent.sum() == 0


def test_a_sum_beyond_float32_has_no_rank():
    for algorithm in SCHEDULES:
        with pytest.raises(NonFiniteGradient, match="the sum"):
            xs = [np.full(9, 3e38, np.float32)] * 2
            simulate(xs, "e4m12", algorithm, accumulate="exact")


@every(
    "options, words",
    [
        ({"wire": "int8", "scaling": "tile"}, "wire='int8' needs shifts .*: known are aps$"),
        ({"wire": "ternary", "scaling": "none"}, "known are aps$"),
        ({"wire": "int4", "scaling": "static:1"}, "known are aps$"),
        ({"wire": "e4m3", "accumulate": "exact", "scaling": "tile"}, "none, static:K, aps$"),
        ({"wire": "int8", "accumulate": "requantise"}, "known are exact$"),
        ({"wire": "ternary", "accumulate": "float32", "algorithm": "direct"}, "known are exact$"),
        ({"wire": "int8", "algorithm": "mpi"}, "must be 'raw'"),
        ({"wire": "int8", "overflow": "inf"}, "must be .saturate., or not given"),
        ({"wire": "raw", "accumulate": "exact"}, "float32, requantise"),
        ({"wire": "e5m2", "accumulate": "exact"}, "sums of 3 ranks take 35 bits: .* 32 or fewer"),
        ({"wire": "bf16", "accumulate": "exact", "scaling": "none"}, "take 2.. bits"),
        ({"wire": "int1"}, "int2, int3, .*, int16, ternary"),
        ({"wire": "int17"}, "ternary"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        simulate([np.ones(9, np.float32)] * 3, **options)
    assert str(caught.value).startswith(("allreduce", "parse_format"))


def test_the_width_decides_how_many_ranks_may_sum():
    fmt = format_of("e4m3")  # 2**31 - 1 divided by 240 * 512
    assert sum_bits(fmt, 17476) == 32 and sum_bits(fmt, 17477) == 33
    x = np.ones((), np.float32)
    with pytest.raises(ValueError, match="sums of 17477 ranks take 33 bits"):
        allreduce(Loopback(17477), [x] * 17477, "e4m3", "tree", accumulate="exact")
