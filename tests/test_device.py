"""Which GPU a process takes, what kernels refuse, and whether MPI takes GPU memory."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from every import every
from refusing import refused
from simulated_cupy import simulated

import cpdhpc
from cpdhpc import arrays
from cpdhpc.collectives.allreduce import allreduce
from cpdhpc.collectives.checks import is_finite
from cpdhpc.collectives.engine import give_up
from cpdhpc.config import UserError
from cpdhpc.darray.layout import Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.formats import Cast, parse_format
from cpdhpc.ops import cpu, to_host
from cpdhpc.world import gpu_messages
from cpdhpc.world.gpu_messages import use_gpu
from cpdhpc.world.ranks import Loopback


class Library:
    """A library with some of the queries, or the variable of Open MPI 4."""

    def __init__(self, name: str, value: int) -> None:
        self.value = value
        if name:
            setattr(self, name, self.cuda if "cuda" in name else self.gpu)

    def cuda(self) -> int:
        return self.value

    def gpu(self, kind: int, flag: Any) -> int:
        flag._obj.value = self.value
        return 0


@every("name", ["MPIX_Query_cuda_support", "MPIX_GPU_query_support"])
@every("value", [0, 1])
def test_both_queries_are_understood(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    libraries = {"libmpi_cxx.so.40": Library("", 0), "libmpi.so.40": Library(name, value)}
    monkeypatch.setattr(
        gpu_messages, "loaded", lambda start: list(libraries) if "mpi" in start else []
    )
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    assert gpu_messages.query() == (bool(value), name)


def test_open_mpi_4_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_messages, "loaded", lambda start: [f"{start}.so.40"])
    library, flag = Library("MPIX_Query_cuda_support", 1), ctypes.c_bool()
    known = SimpleNamespace(in_dll=lambda library, name: flag)
    stand_in = SimpleNamespace(CDLL=lambda path: library, c_bool=known)
    monkeypatch.setattr(gpu_messages, "ctypes", stand_in)
    for flag.value in (False, True):
        assert gpu_messages.query().yes == flag.value


def test_no_query_is_no() -> None:
    assert str(gpu_messages.Answer(False, "why")) == "no (why)"
    assert gpu_messages.loaded("libno-such") == [] and len(gpu_messages.loaded("libpython")) <= 1


def test_a_no_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_messages, "exchange", pytest.fail)  # one process cannot try
    for yes in (False, True):
        monkeypatch.setattr(
            gpu_messages, "query", lambda yes=yes: gpu_messages.Answer(yes, "the query")
        )
        answer = gpu_messages.find_out(Loopback())
        assert answer.yes == yes and ("not tried" in answer.why) == yes
    world = Loopback()
    world.gpu_direct = False
    assert "gpu_direct=False" in gpu_messages.find_out(world).why


class Processes(Loopback):
    """One of several processes of two nodes, and what the others tell."""

    def __init__(self, process: int, nodes: list[int], told: list[tuple[str, str, bool]]) -> None:
        super().__init__(len(nodes), nodes=nodes)
        self.virtual_ranks, self.process, self._told = 1, process, told

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        return [value if i == self.process else each for i, each in enumerate(self._told)]


def bus(place: int, shared: bool = False) -> tuple[str, str, bool]:
    return f"0000:{place:02x}:00.0", "", shared


def test_processes_of_a_node_take_gpus_of_their_own() -> None:
    nodes, told = [0, 0, 1, 1], [bus(0), bus(1), bus(0), bus(1)]
    for process, expected in enumerate([0, 1, 0, 1]):
        with simulated() as (gpu, cupy):
            gpu.count = 4
            assert use_gpu(Processes(process, nodes, told)) == expected == gpu.device_id
            assert cupy.zeros(3, np.float32).device.id == expected
    with simulated() as (gpu, cupy):  # Slurm's --gpus-per-task: each process sees one, its own
        gpu.first = 1
        assert use_gpu(Processes(1, nodes, told)) == 0
    with simulated() as (gpu, cupy):
        gpu.count = 4
        cupy.cuda.Device(3).use()  # chosen already
        assert use_gpu(Processes(1, nodes, told)) == 3


def test_too_few_gpus_are_an_error_on_all_processes() -> None:
    nodes, told = [0, 0, 1], [bus(0), bus(0), bus(0)]
    for process in range(3):
        world = Processes(process, nodes, told)
        with simulated():
            for here in (False, True):  # all must allow it
                with pytest.raises(UserError, match="processes 0, 1 would share GPUs of their"):
                    use_gpu(world, oversubscribe=here)
            allowed = Processes(process, nodes, [bus(0, shared=True)] * 3)
            assert use_gpu(allowed, oversubscribe=True) == 0
            world = Processes(process, nodes, [bus(0), bus(1), ("", "sees no GPU", False)])
            if process != 2:
                with pytest.raises(UserError, match=r"process 2 sees no GPU$"):
                    use_gpu(world)


def test_wrong_arguments_of_use_gpu_are_named() -> None:
    with pytest.raises(TypeError, match=r"use_gpu: world is int: must be a World"):
        use_gpu(3)  # type: ignore[arg-type]
    with refused("use_gpu", "oversubscribe"):
        use_gpu(Loopback(), oversubscribe="no")  # type: ignore[arg-type]


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_messages, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"process 0 has no CuPy: pip install 'cpdhpc\[gpu\]'$"):
        use_gpu(Loopback())


def test_kernels_refuse_what_would_end_the_context() -> None:
    with simulated() as (gpu, cupy):
        from cpdhpc.ops import gpu as ops

        codes = np.arange(2000, dtype=np.uint8) % 16
        packed = cpu.pack(codes.astype(np.uint32), 4)
        there = cupy.asarray(np.concatenate([[np.uint8(0)], packed]))
        assert arrays.unpack(there[1:], 4, 2000).get().tolist() == codes.tolist()
        x, shifts = cupy.zeros(1024, np.float32), cupy.zeros(1, np.uint8)
        odd, cast = cupy.zeros(4097, np.uint8)[1:], Cast(parse_format("e4m3"))
        says = "begins at .*: must begin at a multiple of 4 bytes"
        with pytest.raises(ValueError, match=f"words: {says}"):
            ops.encode_tiles(x, cast, odd[:1024], shifts)
        with pytest.raises(ValueError, match=f"x: {says}"):
            ops.amax_tiles(odd.view(np.float32))
        gpu.count = 2
        cupy.cuda.Device(1).use()
        with pytest.raises(ValueError, match="x: is on GPU 0: must be on CuPy's current one, 1"):
            ops.amax_tiles(x)


def test_a_gpu_that_hangs_is_not_waited_for_without_end() -> None:
    """Whoever needs a value of the GPU's on the host: the sum of bad values, a copy, a count."""
    layout = Layout.grid((4,), (1,))
    with simulated() as (gpu, cupy):
        x = cupy.asarray(np.ones(5000, np.float32))
        runtime = importlib.import_module("cpdhpc.ops.gpu_runtime")
        kernels = importlib.import_module("cpdhpc.ops.gpu")
        world = Loopback()
        plan = WindowPlan(world, layout, layout.owner(0))
        plan.exchange(x[:4])
        world.timeout_s = 0.0
        cases: list[Callable[[], object]] = [
            lambda: to_host(x),
            lambda: allreduce(world, x, "e4m3"),
            lambda: is_finite(x),
            lambda: kernels.kth_magnitude(x, 3),
            lambda: kernels.select_above(x, 0.5),
            lambda: kernels.square_sum(x),
            runtime.finished(lambda: None),
            lambda: runtime.to_device(np.ones(3)),
            plan.free,
        ]
        for wait in cases:
            runtime.wait_at_most(0.0)
            gpu.stalled = None if wait is cases[-2] else gpu.null
            gpu.delay()
            with pytest.raises(TimeoutError, match=r"GPU 0: is at work for more than 0 s"):
                wait()


WAITS = re.compile(r"\.synchronize\(|\.get\(\)|\.cpu\(\)|streamSynchronize|Event\.synchronize")
WAITING = {  # where the host waits for a GPU, behind wait
    "ops/gpu_runtime.py": [".get()"],
    "ops/tensors.py": [".cpu()"],
}


def test_all_waits_for_a_gpu_are_in_one_place() -> None:
    package = Path(cpdhpc.__file__).parent
    sources = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    found = {name: WAITS.findall(path.read_text()) for name, path in sources.items()}
    assert {name: waits for name, waits in found.items() if waits} == WAITING


def test_a_fault_of_the_gpu_is_one_line_and_ends_the_plan() -> None:
    """All of CUDA's calls fail after one; an array that is freed then is not waited for."""
    layout = Layout.grid((4,), (1,))
    with simulated() as (gpu, cupy):
        error = cupy.cuda.runtime.CUDARuntimeError
        plan, x = WindowPlan(Loopback(), layout, layout.owner(0)), cupy.zeros(4)
        gpu.fault = 700  # cudaErrorIllegalAddress
        with pytest.raises(error, match="CUDA error 700"):
            plan.exchange(x)
        with pytest.raises(RuntimeError, match=r"'windows' was ended by .*: CUDA error 700"):
            plan.exchange(x)
        plan.free()
        said: list[str] = []
        world: Any = SimpleNamespace(failure=lambda *_: None, processes=2, abort=said.append)
        give_up(world, error(700), "exchange of plan 'windows'")
        assert said == ["exchange of plan 'windows': Error: CUDA error 700"]
