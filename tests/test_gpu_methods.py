"""Gradients on a GPU: means and what is kept have the CPU's bits, and no gradient is copied."""

from importlib import import_module
from platform import machine
from typing import Any

import numpy as np
import pytest
import simulated_cupy
from every import every
from gpus import either_cupy
from simulated_cupy import simulated

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import COMPRESSORS, Aggregator, Context, Mean, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.ops import cpu
from cpdhpc.world.ranks import Loopback

SHAPES = ((90, 120), (9,), (8, 3, 5, 5))
NAMES = ("weight", "bias", "kernel")
ON_GPU: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("lowbit", {}),
    ("lowbit", {"wire": "int4", "error_feedback": True}),
    ("lowbit", {"wire": "e4m3", "scaling": "aps", "error_feedback": True}),
    ("topk", {}),
    ("topk", {"within": "bucket", "wire": "e4m3", "error_feedback": False}),
    ("randomk", {}),
    ("randomk", {"error_feedback": False, "wire": "e4m3", "scaling": "aps"}),
    ("dgc", {"warmup": (0.05,)}),
    ("strom", {"tau": 2.0, "exclude": ("kernel",)}),
    ("scalecom", {"per_chunk": 2, "wire": "e4m3"}),
    ("flexpoint", {"wire": "int8"}),
    ("lgc", {"dense_steps": 1, "training_steps": 1, "density": 0.05}),
    ("dgc", {"clip_norm": 1.0, "warmup": (0.05,)}),
    ("terngrad", {}),
    ("terngrad", {"bucket_values": 500, "share": False, "clip": 0.0, "exclude": ("bias",)}),
    ("qsgd", {}),
    ("qsgd", {"levels": 1, "bucket_values": 4000}),
    ("onebit", {}),
    ("powersgd", {}),
    ("powersgd", {"wire": "e4m3", "warm_start": False, "error_feedback": False}),
    ("powersgd", {"momentum": 0.9}),
    ("gradientflow", {"chunk_values": 300, "dense_epochs": 0.5}),
    ("adacomp", {}),
    ("adacomp", {"bin_values": 20, "scale": 1.0}),
    ("oktopk", {"estimate_every": 2, "rebalance_every": 3}),
    ("oktopk", {"density": 0.05, "estimate_every": 1, "wire": "e4m3"}),
]
SUMS = (1, 2, 7, 9, 128, 129, 137, 1000, 8192, 8193, 20_011, 100_003)  # halves, buffers, a rest


def gradients(bucket: Bucket, ranks: int, iteration: int) -> list[np.ndarray]:
    """Normal numbers, subnormal ones, and layers with fewer values than are sent."""
    rng = np.random.default_rng((ranks, iteration))
    flats = []
    for _ in range(ranks):
        weight, bias, kernel = (rng.standard_normal(shape, np.float32) for shape in SHAPES)
        weight[:40] *= np.float32(2.0**-140)
        for layer in (kernel, weight) if iteration == 0 else (kernel,):
            layer[rng.random(layer.shape) < 0.999] = 0
        if iteration == 2:
            bias[:] = 0.1  # whose deviation is 0
        flats.append(bucket.flatten([weight, bias, kernel]))
    return flats


def aggregate(
    method: Aggregator, flats: list[Any], bucket: Bucket, state: State, iteration: int
) -> Mean:
    world = Loopback(len(flats))
    context = Context(world, state, seed=3, iteration=iteration, epoch=iteration / 3)
    return method.aggregate(flats, bucket, context)


@pytest.mark.parametrize(
    ("name", "options", "ranks"), [(*row, 3 - 2 * (i % 4 == 2)) for i, row in enumerate(ON_GPU)]
)
def test_means_and_memories_have_the_bits_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], ranks: int
) -> None:
    method = COMPRESSORS[name](**options)
    bucket = Bucket(NAMES, SHAPES, method.align)
    here, there = State(range(ranks), ranks), State(range(ranks), ranks)
    copied, get = [0], simulated_cupy.ndarray.get
    with simulated(ranks) as (_, cupy):
        for iteration in range(3):
            flats = gradients(bucket, ranks, iteration)
            expected = aggregate(method, flats, bucket, here, iteration)
            on_gpu = [cupy.asarray(flat) for flat in flats]
            with monkeypatch.context() as patch:
                patch.setattr(
                    simulated_cupy.ndarray,
                    "get",
                    lambda self, out=None: (copied.append(self.nbytes), get(self, out))[1],
                )
                found = aggregate(method, on_gpu, bucket, there, iteration)
            assert isinstance(found.flat, cupy.ndarray)
            assert cupy.asnumpy(found.flat).tobytes() == expected.flat.tobytes()
            assert all(map(np.array_equal, map(cupy.asnumpy, on_gpu), flats))
            for column, values in expected.layers.items():
                assert np.array_equal(found.layers[column], values, equal_nan=True)
            seen = method.observe(flats[0], bucket, expected)
            for column, values in method.observe(on_gpu[0], bucket, found).items():
                assert np.array_equal(values, seen[column]) and column in seen
            for (key, entry), (_, own) in zip(there, here, strict=True):
                in_memory = isinstance(entry.array, cupy.ndarray)
                kept = cupy.asnumpy(entry.array) if in_memory else entry.array
                assert kept.tobytes() == own.array.tobytes(), key
                assert in_memory == (key[1] in ("residual", "momentum")), key
        assert max(copied) < bucket.size, "a fourth of a gradient at most comes down at once"


@pytest.mark.parametrize(
    ("name", "options"),
    [("topk", {}), ("dgc", {}), ("lowbit", {"wire": "int4", "error_feedback": True})],
)
def test_a_state_of_the_cpu_goes_on_on_the_gpu_and_back(name: str, options: dict[str, Any]) -> None:
    """As that of a checkpoint does; and a loss scale's change keeps subnormal numbers."""
    method = COMPRESSORS[name](**options)
    bucket = Bucket(NAMES, SHAPES, method.align)
    here, moved = State(range(3), 3), State(range(3), 3)
    with simulated() as (_, cupy):
        for iteration, place in enumerate((np.asarray, cupy.asarray, cupy.asarray, np.asarray)):
            flats = gradients(bucket, 3, iteration)
            expected = aggregate(method, flats, bucket, here, iteration).flat
            found = aggregate(method, [place(x) for x in flats], bucket, moved, iteration).flat
            found = found if isinstance(found, np.ndarray) else cupy.asnumpy(found)
            assert found.tobytes() == expected.tobytes()
            here.scale(0.5)
            moved = moved.copy()
            moved.scale(0.5)


@pytest.mark.parametrize(("name", "options"), ON_GPU)
def test_nan_on_the_gpu_is_named_and_ranks_of_a_process_must_agree(
    name: str, options: dict[str, Any]
) -> None:
    method = COMPRESSORS[name](**options)
    bucket = Bucket(NAMES, SHAPES, method.align)
    with simulated() as (_, cupy):
        flats = gradients(bucket, 2, 0)
        bucket.views(flats[1])[0][3, 3] = np.nan
        with pytest.raises(NonFiniteGradient) as caught:
            aggregate(method, [cupy.asarray(x) for x in flats], bucket, State(range(2), 2), 0)
        flats = gradients(bucket, 2, 0)
        with pytest.raises(TypeError, match=r"cupy\.ndarray and numpy\.ndarray|is on the CPU"):
            aggregate(method, [cupy.asarray(flats[0]), flats[1]], bucket, State(range(2), 2), 0)
    assert caught.value.segments == ("weight",) and caught.value.ranks == (1,)


@every("name", COMPRESSORS)
def test_other_arrays_are_refused(name: str) -> None:
    bucket = Bucket(NAMES, SHAPES)
    flats = [np.ma.masked_array(x) for x in gradients(bucket, 2, 0)]
    says = r"gradients: numpy\.ma\S*\.MaskedArray: must be numpy.ndarray or cupy.ndarray$"
    if name in ("none", "lowbit", "flexpoint", "lgc"):  # whose all-reduce takes no others
        says = "^allreduce: x of rank 0 is numpy.MaskedArray: its mask would be ignored"
    with pytest.raises(TypeError, match=says):
        aggregate(COMPRESSORS[name](), flats, bucket, State(range(2), 2), 0)


def test_every_compressor_is_run_on_the_gpu() -> None:
    assert {name for name, _ in ON_GPU} == {*COMPRESSORS}


@pytest.mark.parametrize("where", ["simulated", pytest.param("GPU", marks=pytest.mark.gpu)])
def test_sums_have_the_bits_of_numpys(where: str) -> None:
    """Terms of many magnitudes, so that another order of additions shows."""
    with either_cupy(where) as cupy:
        gpu = import_module("cpdhpc.ops.gpu")
        for n in SUMS:
            rng = np.random.default_rng(n)
            x = (rng.standard_normal(3 * n) * 10.0 ** rng.integers(-9, 9, 3 * n)).astype(np.float32)
            there, starts = cupy.asarray(x), np.array([0, n, n + 1])[: n + 1]
            rows = there.reshape(3, n), x.reshape(3, n)
            assert gpu.row_sums(rows[0]).tobytes() == rows[1].sum(axis=1, dtype=float).tobytes()
            for of, terms in (
                ("magnitude", np.abs),
                ("square", lambda x: np.square(x, dtype=float)),
            ):
                expected = np.add.reduceat(terms(x), starts, dtype=float)
                assert gpu.run_sums(there, starts, of).tobytes() == expected.tobytes()
            assert gpu.square_sum(there, 0.1) == np.square(x - np.float64(0.1)).sum()
        assert gpu.square_sum(there[:0]) == 0 and gpu.row_sums(there[:0].reshape(3, 0)).sum() == 0


@pytest.mark.skipif(machine() not in ("x86_64", "AMD64"), reason="elsewhere einsum fuses products")
def test_einsum_adds_as_the_cuda_kernels_do() -> None:
    """The order that kernels/cuda_sums.h writes down, in NumPy's elementwise operations."""
    for columns in (3, 16, 23, 75):
        rng = np.random.default_rng(columns)
        m, rows = (rng.standard_normal((n, columns)).astype(np.float32) for n in (30, 2))
        products = np.zeros((2, 30, -(-columns // 4), 4), np.float32)
        products.reshape(2, 30, -1)[:, :, :columns] = rows[:, None] * m
        side, fours = np.zeros((2, 30, 4), np.float32), [*range(products.shape[2])]
        whole = columns // 16 * 4
        for k in [at + 3 - i for at in range(0, whole, 4) for i in range(4)] + fours[whole:]:
            side = products[:, :, k] + side
        expected = (side[..., 0] + side[..., 1]) + (side[..., 2] + side[..., 3])
        assert cpu.row_products(m, rows).tobytes() == expected.tobytes()
        total = np.zeros((2, columns), np.float32)
        for i, row in enumerate(m):
            total += expected[:, i, None] * row
        assert cpu.column_products(m, expected).tobytes() == total.tobytes()
