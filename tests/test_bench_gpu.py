"""Benchmarks of GPU arrays run on the GPU, which is checked as on the CPU."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from simulated_cupy import simulated
from simulated_gpu import Gpu

from cpdhpc.bench import codec, latency
from cpdhpc.bench.allreduce_cases import cases_of_size
from cpdhpc.bench.harness import take_device
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.config import UserError
from cpdhpc.world.ranks import Loopback


def parsed(module: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)


def test_all_reduces_and_their_sums_are_on_the_gpu() -> None:
    with simulated() as (gpu, cupy):
        cases = cases_of_size(Loopback(), 4096, [Allreduce("raw"), Allreduce("e4m3")], [], "gpu")
        for case in cases:
            assert isinstance(case.out, cupy.ndarray) and isinstance(case.data.x, cupy.ndarray)
            case.run()
            assert not gpu.null.work, "a call is timed until the GPU is done with it"
        cases[0].data.total[0] += 1  # a sum that is wrong is told of arrays there, too
        with pytest.raises(ArithmeticError, match="the sum of integers is not exact"):
            cases[0].check(Loopback())


def test_the_codec_is_timed_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--device=gpu", "--formats=e4m3", "--mib=0.02", "--repeats=1"]
    names += ["--operations=encode,hop"]
    synchronised: list[Gpu] = []
    with simulated() as (gpu, _):
        finish = gpu.finish
        monkeypatch.setattr(gpu, "finish", lambda s: (synchronised.append(gpu), finish(s)))
        measured = codec.run(parsed(codec, *names))
    assert {point.factors["operation"] for point in measured.points} == {"memcpy", "encode", "hop"}
    assert "arrays on a GPU of each process, simulated" in capsys.readouterr().out
    assert len(synchronised) >= 6  # two calls of three operations


def test_without_a_gpu_a_line_says_so() -> None:
    with simulated() as (gpu, _):
        gpu.count = 0
        with pytest.raises(UserError, match=r"^use_gpu: process 0 sees no GPU"):
            take_device(parsed(latency, "--device", "gpu"), Loopback())
