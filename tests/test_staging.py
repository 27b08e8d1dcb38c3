"""How GPU arrays travel, shown without a GPU: what kernels get, and what waits for what."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpdhpc.collectives.allreduce import allreduce, simulate
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import INTEGERS, Cast, parse_format
from cpdhpc.lab.verify.outcomes import OnGpu, differing, of_codes, of_sums, of_tiles
from cpdhpc.ops import cpu
from cpdhpc.world import gpu_messages
from cpdhpc.world.ranks import Loopback

N = 2500
GPU_METHODS = (
    "reshape", "view", "get", "sum", "max", "all", "argmax", "astype", "copy", "ravel",
    "__array_function__", "__iter__", "__len__",
)  # fmt: skip


def gradients(ranks: int) -> list[np.ndarray]:
    return list(np.random.default_rng(ranks).standard_normal((ranks, N)).astype(np.float32))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_the_simulator_takes_gpu_arrays(gpu: Any, algorithm: str) -> None:
    xs = gradients(5)
    for accumulate in SCHEDULES[algorithm].accumulates:
        for wire in ("raw", "e4m3"):
            got = simulate([gpu[1].asarray(x) for x in xs], wire, algorithm, None, accumulate)
            assert got.get().tobytes() == simulate(xs, wire, algorithm, None, accumulate).tobytes()
    for wire in ("int4", "ternary"):
        got = simulate([gpu[1].asarray(x) for x in xs], wire, algorithm)
        assert got.get().tobytes() == simulate(xs, wire, algorithm).tobytes()


@pytest.mark.parametrize("name", ["e4m3", "e2m1fn", "fp32"])
def test_kernels_get_their_arguments(gpu: Any, name: str) -> None:
    """Every operation of ops.gpu calls its kernel with what the kernel's signature asks for."""
    cast, x, found = Cast(parse_format(name), "stochastic"), gradients(1)[0], []
    for ops in (cpu, OnGpu(importlib.import_module("cpdhpc.ops.gpu"))):
        found.append(of_tiles(ops, x, x[::-1].copy(), cast) + of_codes(ops, x, cast))
        found[-1] += of_sums(ops, x, INTEGERS["int2"], "stochastic", 126)
        found[-1] += [ops.add(x, x), ops.subtract(x, x[::-1].copy())]
        found[-1] += [ops.multiply(x, np.float32(2**-127)), ops.divide(x, np.float32(3))]
    assert not differing(*found)


class Moment:
    """An event that comes when it is told to."""

    come = False

    def Test(self) -> bool:
        return self.come


class Notes:
    """A world, or streams, that notes what is started."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.events: list[Moment] = []

    def isend(self, rank: int, to: int, payload: Any, stream: int) -> list[Moment]:
        self.started.append(f"to {to}")
        return [self.mark()]

    def irecv(self, source: int, rank: int, buffer: Any, stream: int) -> list[Moment]:
        self.started.append(f"from {source}")
        return [self.mark()]

    def mark(self) -> Moment:
        self.events.append(Moment())
        return self.events[-1]


def test_messages_wait_for_the_stream_and_keep_their_order() -> None:
    notes: Any = Notes()
    carrier = gpu_messages.Direct(notes, notes)
    nothing = np.zeros(4, np.uint8)
    first = carrier.isend(0, 1, nothing)[0]
    then = carrier.irecv(2, 0, nothing)[0]
    assert not first.Test() and not then.Test() and notes.started == []
    notes.events[1].come = True
    assert not then.Test() and notes.started == [], "the second may not overtake the first"
    notes.events[0].come = True
    assert not then.Test() and notes.started == ["to 1", "from 2"]
    notes.events[3].come = True
    assert then.Test() and not first.Test()
    notes.events[2].come = True
    assert first.Test() and first.Test()


def test_an_error_on_the_gpu_is_raised_and_not_waited_for(gpu: Any) -> None:
    streams = importlib.import_module("cpdhpc.ops.gpu_runtime")
    event = streams.Event(gpu[1].cuda.get_current_stream())
    assert not event.Test() and event.Test()
    gpu[1].cuda.runtime.eventQuery = lambda ptr: 700  # cudaErrorIllegalAddress
    with pytest.raises(gpu[1].cuda.runtime.CUDARuntimeError, match="700"):
        event.Test()


def test_arrays_must_be_on_the_current_gpu(gpu: Any) -> None:
    x = gpu[1].asarray(np.ones(3, np.float32))
    x.device = SimpleNamespace(id=1)
    with pytest.raises(
        ValueError, match="allreduce: x is on GPU 1: must be on CuPy's current one, 0"
    ):
        allreduce(Loopback(), x)
    with pytest.raises(TypeError, match="x of rank 1 is on the GPU: the first is on the CPU"):
        allreduce(Loopback(2), [np.ones(3, np.float32), gpu[1].asarray(np.ones(3, np.float32))])


@pytest.mark.gpu
def test_the_simulation_has_only_what_cupy_has(gpu: Any) -> None:
    """Names and what they are in; run where CuPy is installed, a GPU is not needed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cupy", "cupyx"):
            patch.delitem(sys.modules, name)
        cupy = pytest.importorskip("cupy")
        for name in vars(gpu[1]):
            assert name.startswith("__") or hasattr(cupy, name), name
        for part in ("cuda", "cuda.runtime"):
            theirs = (
                importlib.import_module(f"cupy.{part}") if "." not in part else cupy.cuda.runtime
            )
            ours = gpu[1].cuda if part == "cuda" else gpu[1].cuda.runtime
            assert all(hasattr(theirs, name) for name in vars(ours)), part
        assert hasattr(importlib.import_module("cupyx"), "empty_pinned")
        for method in GPU_METHODS:
            assert hasattr(cupy.ndarray, method)
