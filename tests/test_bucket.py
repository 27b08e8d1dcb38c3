"""Arrays in a bucket come back as they were, between zeros, on their borders."""

import numpy as np
import pytest
from every import every
from hypothesis import given
from hypothesis import strategies as st

from cpdhpc.collectives.allreduce import simulate
from cpdhpc.collectives.method import Segment
from cpdhpc.compress.bucket import Bucket

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6)


@given(SHAPES, st.sampled_from([1, 3, 1024]))
def test_round_trip(shapes, align):
    bucket = Bucket([f"w{i}" for i in range(len(shapes))], shapes, align)
    arrays = [np.random.default_rng(i).random(s, np.float32) + 1 for i, s in enumerate(shapes)]
    flat = bucket.flatten(arrays, np.full(bucket.size, np.nan, np.float32))
    np.testing.assert_array_equal(flat, bucket.flatten(arrays))
    for view, array in zip(bucket.views(flat), arrays, strict=True):
        np.testing.assert_array_equal(view, array)
        assert view.shape == array.shape and (view.size == 0 or np.shares_memory(view, flat))
    used = np.zeros(bucket.size, bool)
    for name, start, stop in bucket.segments:
        assert start % align == 0 and stop - start == arrays[int(name[1:])].size
        assert not used[start:stop].any()
        used[start:stop] = True
    assert (flat[~used] == 0).all() and (flat[used] >= 1).all()


def test_segments_of_layers():
    bucket = Bucket(("weight", "bias"), ((30, 50), (50,)), 1024)
    assert bucket.segments == (Segment("weight", 0, 1500), Segment("bias", 2048, 2098))
    assert bucket.size == 2098
    assert Bucket(("weight", "bias"), ((30, 50), (50,))).size == 1550
    assert Bucket((), ()).size == 0


def test_a_bucket_goes_through_an_allreduce():
    bucket = Bucket(("weight", "bias"), ((30, 50), (50,)), 1024)
    arrays = [np.full((30, 50), 2.0**-30, np.float32), np.full(50, 2.0**20, np.float32)]
    flat = bucket.flatten(arrays)
    got = simulate([flat, flat], "e2m1fn", scaling="aps", segments=bucket.segments)
    for view, array in zip(bucket.views(got), arrays, strict=True):
        np.testing.assert_array_equal(view, 2 * array)


@every(
    "arguments, words",
    [
        ((("a",), ()), "1 names for 0 shapes"),
        ((("a", "a"), ((1,), (1,))), "each must come once"),
        ((("a",), ((1,),), 0), "align=0"),
    ],
)
def test_bad_layouts(arguments, words):
    with pytest.raises(ValueError, match=words):
        Bucket(*arguments)


def test_bad_arrays():
    bucket = Bucket(("a",), ((2, 3),), 1)
    good = np.zeros((2, 3), np.float32)
    for arrays in ([], [good, good], [good.T]):
        with pytest.raises(ValueError, match="shapes"):
            bucket.flatten(arrays)
    for flat in (np.zeros(6), np.zeros(7, np.float32), np.zeros(12, np.float32)[::2]):
        with pytest.raises(ValueError, match=r"float32\[6\]"):
            bucket.views(flat)
        with pytest.raises(ValueError, match=r"float32\[6\]"):
            bucket.flatten([good], flat)
