"""Benchmarks of GPU arrays run on the GPU, which is checked as on the CPU."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from simulated_cupy import simulated
from simulated_gpu import Gpu

from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.compress import TopK
from cpdhpc.config import UserError, validate
from cpdhpc.lab.bench import allreduce, codec
from cpdhpc.lab.bench.allreduce import parse_baselines
from cpdhpc.lab.bench.compress import replay
from cpdhpc.lab.kinds import allreduce_cases
from cpdhpc.lab.kinds.allreduce_cases import CaseArrays, schedule_case
from cpdhpc.lab.kinds.flags import take_device
from cpdhpc.lab.kinds.place import JobRanks
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.study.batch import TimedCalls
from cpdhpc.lab.study.cases import expand
from cpdhpc.lab.study.spec import Study
from cpdhpc.lab.train.gradients import Gradients
from cpdhpc.world.ranks import Loopback


def parsed(add: Callable[[argparse.ArgumentParser], None], *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def test_all_reduces_and_their_sums_are_on_the_gpu() -> None:
    with simulated() as (gpu, cupy):
        world = Loopback()
        arrays = CaseArrays(world, 1024, "gpu")
        cases = [schedule_case(world, Allreduce(wire), arrays) for wire in ("raw", "e4m3")]
        for case in cases:
            case.check(world)
            assert isinstance(case.out, cupy.ndarray) and isinstance(case.data.x, cupy.ndarray)
            case.run()
            assert not gpu.null.work, "a call is timed until the GPU is done with it"
        cases[0].data.total[0] += 1  # a sum that is wrong is told of arrays there, too
        with pytest.raises(ArithmeticError, match="a result is not exact"):
            cases[0].check(world)


def test_the_codec_is_timed_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--device=gpu", "--formats=e4m3", "--mib=0.02", "--repeats=1"]
    names += ["--operations=encode,hop"]
    synchronised: list[Gpu] = []
    with simulated() as (gpu, _):
        finish = gpu.finish
        monkeypatch.setattr(gpu, "finish", lambda s: (synchronised.append(gpu), finish(s)))
        measured = codec.run(parsed(codec.add_arguments, *names))
    assert {point.factors["operation"] for point in measured.points} == {"memcpy", "encode", "hop"}
    assert "arrays on a GPU of each process, simulated" in capsys.readouterr().out
    assert len(synchronised) >= 6  # two calls of three operations


def test_threads_are_of_the_cpu() -> None:
    with pytest.raises(UserError, match=r"--threads 1,2: .* must be 1 with --device gpu"):
        codec.run(parsed(codec.add_arguments, "--device=gpu", "--threads=1,2"))


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("allreduce", {"size_bytes": 8192, "algorithm": "direct", "wire": "e4m3"}),
        ("codec", {"size_bytes": 8192, "operation": "hop tile", "format": "e4m3"}),
        ("halo", {"rows": 9, "columns": 5, "boundary": "wrap", "transfer": "accumulate"}),
        ("halo", {"rows": 9, "columns": 5, "boundary": "wrap", "wire": "e4m3"}),
    ],
)
def test_studies_measure_on_the_gpu_what_they_do_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, factors: dict[str, Any]
) -> None:
    given = {"name": "s", "kind": kind, "sweep": factors}
    found = {}
    for device in ("cpu", "gpu"):
        study = validate(Study, given | {"sweep": given["sweep"] | {"device": device}}, "test")
        (case,) = expand(study).cases
        assert case.factors.get("device", "cpu") == device
        with simulated() as (gpu, _):
            monkeypatch.setattr(gpu, "give", work := Mock(wraps=gpu.give))
            place: Any = JobRanks(Loopback())  # type: ignore[arg-type]
            measuring = TimedCalls(study, case, tmp_path, study.of_kind.measure)  # type: ignore[arg-type]
            measuring.visit(place, Caught())
            assert work.called == (device == "gpu")
            assert (device == "gpu") == ("gpu" in place.environment())
        found[device] = measuring.outcomes
    assert found["cpu"].keys() == found["gpu"].keys()
    assert found["cpu"].get("error") == found["gpu"].get("error")


def test_compressors_see_gradients_on_the_gpu_and_send_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    layers = {"w": rng.standard_normal((2, 30, 20)).astype(np.float32)}
    recorded = [Gradients(0, 2, layers, "made"), Gradients(1, 2, layers, "made")]
    expected = replay(Loopback(2), TopK(density=0.1), recorded)
    with simulated() as (gpu, _):
        monkeypatch.setattr(gpu, "give", work := Mock(wraps=gpu.give))
        found = replay(Loopback(2), TopK(density=0.1), recorded, "gpu")
        assert work.called
    for name in ("error", "cosine", "sum_error", "nonzero_share"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.sent_bytes == expected.sent_bytes).all()


def test_a_baseline_that_cannot_run_is_said() -> None:
    world = Loopback()
    with simulated():
        found, why = parse_baselines(world, None, "gpu")
        assert found == ["mpi", "memcpy"] and why["gloo"] == "takes no gpu arrays"
        assert re.fullmatch(r"torch \S+ (is built without NCCL|finds no GPU)", why["nccl"])
        with pytest.raises(UserError, match=r"^--baselines nccl-bf16: torch \S+ "):
            parse_baselines(world, ["nccl-bf16"], "gpu")
    with pytest.raises(UserError, match=r"^--baselines nccl: takes no cpu arrays$"):
        parse_baselines(world, ["nccl"], "cpu")


def test_processes_that_share_a_gpu_have_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce_cases, "_lacks", lambda library: "")
    both = SimpleNamespace(gather=lambda x: [x, x], nodes=(0, 0), virtual_ranks=1)
    with simulated():
        monkeypatch.setattr(allreduce_cases, "use_own_gpu", lambda world: (0, "0000:01:00.0"))
        assert allreduce_cases.missing(both, "nccl") == "processes share GPUs"  # type: ignore[arg-type]


def test_without_a_gpu_a_line_says_so() -> None:
    with simulated() as (gpu, _):
        gpu.count = 0
        with pytest.raises(UserError, match=r"^use_gpu: process 0 sees no GPU"):
            take_device(parsed(allreduce.add_arguments, "--device", "gpu"), Loopback())
