"""CUDA graphs on the simulated GPU: what may be captured, and what a launch does again."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated_cupy import simulated
from simulated_gpu import CAPTURED, INVALIDATED, ISOLATION, UNSUPPORTED, Error

from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.config import UserError
from cpdhpc.lab.bench.allreduce import add_latency, cases_of, parse_calls
from cpdhpc.lab.kinds.allreduce import ALLREDUCE
from cpdhpc.lab.kinds.place import JobRanks
from cpdhpc.lab.kinds.timing import opened
from cpdhpc.world.ranks import Loopback

X = np.arange(100, dtype=np.float32)


def test_a_launch_does_the_same_again_in_the_stream_that_is_current_then() -> None:
    with simulated() as (_, cupy):
        from cpdhpc.ops import gpu as ops
        from cpdhpc.ops.gpu_runtime import Graphs, copy_down, to_host, wait_for_stream

        graphs, x, y = Graphs(), cupy.asarray(X), cupy.zeros(100, np.float32)
        host = graphs.pinned(400)

        def launches() -> str:
            total = ops.add(x, x)
            ops.add(total, x, y)
            copy_down(y.view(np.uint8), host)
            return "what it returns"

        wait_for_stream()
        graphs.rehearse(launches)
        assert to_host(y).tolist() == (3 * X).tolist()
        y[...] = 0
        wait_for_stream()
        graph, said = graphs.capture(launches)
        assert said == "what it returns"
        assert not to_host(y).any(), "nothing is done while it is captured"
        for factor in (1, 5):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                x[...] = cupy.asarray(factor * X)
                graph.launch()
                stream.synchronize()
            assert host.view(np.float32).tolist() == (3 * factor * X).tolist()
        del graphs
        with pytest.raises(AssertionError, match="a graph's memory was let go"):
            graph.launch()


def waits(cupy: Any) -> None:
    cupy.cuda.get_current_stream().synchronize()


def asks(cupy: Any) -> None:
    from cpdhpc.ops.gpu_runtime import wait_for_stream

    wait_for_stream()


def follows(cupy: Any) -> None:
    event = cupy.cuda.Event(disable_timing=True)
    with cupy.cuda.Stream(non_blocking=True) as other:
        event.record(other)
    cupy.cuda.get_current_stream().wait_event(event)


def loads(cupy: Any) -> None:
    from cpdhpc.ops import gpu as ops

    ops.add(cupy.zeros(4, np.float32), cupy.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("forbidden", "status"),
    [(waits, UNSUPPORTED), (asks, CAPTURED), (follows, ISOLATION), (loads, UNSUPPORTED)],
)
def test_what_cannot_be_captured_is_an_error(forbidden: Callable[[Any], None], status: int) -> None:
    with simulated() as (gpu, cupy):
        from cpdhpc.ops.gpu_runtime import Graphs

        graphs = Graphs()
        with pytest.raises(Error) as caught:
            graphs.capture(lambda: forbidden(cupy))
        assert caught.value.status == status
        assert not any(stream.is_capturing() for stream in gpu.streams.values())
        graphs.capture(lambda: None)  # the stream is as before
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.begin_capture()
        with stream, pytest.raises(Error):
            forbidden(cupy)
        with pytest.raises(Error) as caught:
            stream.end_capture()
        assert caught.value.status == INVALIDATED


def test_pageable_copies_the_null_stream_and_cuda_malloc() -> None:
    with simulated() as (_, cupy):
        from cpdhpc.ops.gpu_runtime import Graphs, copy_up

        x = cupy.zeros(100, np.float32)
        with pytest.raises(RuntimeError, match="stream is capturing"):
            Graphs().capture(lambda: cupy.asarray(X))
        with pytest.raises(RuntimeError, match="stream is capturing"):
            Graphs().capture(lambda: x.set(X))
        with pytest.raises(AssertionError, match="are not pinned memory"):
            Graphs().capture(lambda: copy_up(X.view(np.uint8), x.view(np.uint8)))
        with pytest.raises(RuntimeError, match="cannot capture on the default"):
            cupy.cuda.get_current_stream().begin_capture()
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.begin_capture(0)  # cudaStreamCaptureModeGlobal
        with stream, pytest.raises(Error):
            cupy.zeros(4, np.float32)


def test_a_fault_is_told_by_the_next_launch() -> None:
    with simulated() as (gpu, cupy):
        x = cupy.asarray(X)
        prepared = Allreduce("e4m3").prepare(Loopback(), [x], graphs=True)
        prepared.run()
        gpu.fault = 700
        with pytest.raises(Error, match="700"):
            prepared.run()
        gpu.fault = 0
        with pytest.raises(RuntimeError, match="is freed, or was ended by a failure"):
            prepared.run()


def test_benchmarks_time_graphs_beside_the_other_calls() -> None:
    parser = argparse.ArgumentParser()
    add_latency(parser)
    given = parser.parse_args(["--device", "gpu", "--link", "1"])
    calls, skipped = parse_calls(given, Loopback())
    assert calls == ["plain", "prepared", "graphs"] and not skipped
    with simulated() as (gpu, _):
        place: Any = JobRanks(Loopback())  # type: ignore[arg-type]
        cases = cases_of(64, [Allreduce("raw")], [], calls, "gpu")
        assert [case["call"] for case in cases] == calls
        with opened(ALLREDUCE, place, cases) as made:
            before = gpu.graphs
            for call in made:
                call.run()
            assert gpu.graphs == before + 1
    given = parser.parse_args(["--calls", "graphs"])
    with pytest.raises(UserError, match="--calls graphs: none of them takes cpu arrays"):
        parse_calls(given, Loopback())
