"""Buckets of layers: their order, their sizes, their random bits."""

import math

import numpy as np
import pytest
import torch
from every import every
from reducing import SIZES_MIB, backward, gradients, model_of

from cpdhpc.compress.bucket import Bucket, split_bucket
from cpdhpc.compress.lowbit import LowBit
from cpdhpc.torch.averaging import part_seed
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback


def layout(bucket_mib: float, align: int = 1) -> list[tuple[str, ...]]:
    whole = Bucket(("a", "b", "c", "d"), ((2, 3), (100,), (), (50,)), align)
    parts = split_bucket(whole, bucket_mib)
    flat = np.arange(whole.size, dtype=np.float32)
    for part in parts:
        views = part.bucket.views(flat[part.start : part.stop])
        for view, expected in zip(views, whole.views(flat)[part.layers.start :], strict=False):
            assert np.array_equal(view, expected)
    return [part.bucket.names for part in parts]


@pytest.mark.parametrize("align", [1, 1024])
def test_buckets_hold_the_last_layers_first(align: int) -> None:
    kib4 = 4 / 2**20  # of one value
    assert layout(25.0, align) == [("a", "b", "c", "d")]
    assert layout(151 * kib4, align) == [("b", "c", "d"), ("a",)]
    assert layout(150 * kib4, align) == [("c", "d"), ("a", "b")]
    assert layout(6 * kib4, align) == [("d",), ("c",), ("b",), ("a",)]
    assert layout(1e-9, align) == [("d",), ("c",), ("b",), ("a",)]


@every("bucket_mib", [0.0, -1.0, math.nan])
def test_buckets_have_a_size(bucket_mib: float) -> None:
    with pytest.raises(ValueError, match=r"bucket_mib=.*: should be above 0"):
        GradientReducer(model_of(), Loopback(), bucket_mib=bucket_mib)


def test_buckets_change_no_bit_where_nothing_depends_on_them() -> None:
    """One rank, rounding to nearest: a value's code depends on its tile alone."""
    found = []
    for bucket_mib in SIZES_MIB:
        model = model_of()
        backward(model)
        mean = GradientReducer(
            model, Loopback(), LowBit(wire="e4m3", scaling="aps"), bucket_mib=bucket_mib
        ).reduce()
        found.append((gradients(model), mean.flat.tobytes(), mean.layers["aps_shift"].tolist()))
    assert found[0] == found[1] == found[2]


def test_random_bits_differ_between_buckets() -> None:
    """Two equal layers are rounded alike if and only if they are given the same stream."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    reducer = GradientReducer(
        model, Loopback(), "lowbit", wire="e3m0", rounding="stochastic", bucket_mib=1e-6
    )
    values = torch.linspace(0.1, 1, 64 * 64).reshape(64, 64)
    for parameter in model.parameters():
        parameter.grad = values.clone()
    reducer.reduce()
    first, second = gradients(model)
    assert first != second
    assert part_seed(5, 0) == 5  # one bucket: the bits of a model without buckets
    assert len({part_seed(5, index) for index in range(100)}) == 100
