"""Which GPU a process takes, what kernels refuse, and whether MPI takes GPU memory."""

import ctypes
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
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
from cpdhpc.ops.products import FLOAT32, Products
from cpdhpc.ops.tensors import OwnStream, in_stream
from cpdhpc.whole_files import once_for_all
from cpdhpc.world import gpu_messages
from cpdhpc.world.gpu_messages import carrier_of_gpu, check_gpus, use_gpu
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
        self.processes = len(nodes)

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        return [value if i == self.process else each for i, each in enumerate(self._told)]

    def gather_from(self, make: Callable[[], Any], what: str) -> list[Any]:
        return self.gather(make(), what)


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


def test_torch_is_given_the_gpu_too_and_its_own_choice_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, told = [0, 0, 1, 1], [bus(0), bus(1), bus(0), bus(1)]
    for chosen, expected in ((0, 1), (3, 3)):
        current = [chosen]
        fakes = {
            "is_available": lambda: True,
            "current_device": lambda current=current: current[-1],
            "set_device": current.append,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        with simulated() as (gpu, cupy):
            gpu.count = 4
            assert use_gpu(Processes(1, nodes, told)) == expected
            assert (cupy.cuda.Device().id, current[-1]) == (expected, expected)


def test_each_gpu_has_kernels_tables_and_streams_of_its_own() -> None:
    """The simulated GPU refuses a launch of another one's kernel, arrays or stream."""
    x, cast = np.arange(2048, dtype=np.float32), Cast(parse_format("e4m3"))
    how, world = Products(Cast(FLOAT32), Cast(FLOAT32)), Loopback()
    with simulated() as (gpu, cupy):
        gpu.count = 3
        from cpdhpc.ops import gpu as ops
        from cpdhpc.ops import gpu_runtime

        for number in (1, 0, 2, 1):
            with cupy.cuda.Device(number):
                there = cupy.asarray(x)
                words, shifts = cupy.zeros(2048, np.uint8), cupy.zeros(2, np.uint8)
                ops.encode_tiles(there, cast, words, shifts, fit=True)
                codes = ops.encode(there, cast)
                ops.matmul(there.reshape(1, 2, 1024), there.reshape(1, 1024, 2), how)
                carrier = carrier_of_gpu(world)
                host, copied = carrier.streams.start_to_host(words, carrier.streams.mark())
                gpu_runtime.wait(copied)
                assert host.tobytes() == words.get().tobytes()
                assert codes.get().tobytes() == cpu.encode(x, cast).tobytes()


class Cuda:
    """torch.cuda of three GPUs, whose current device is 0: streams are those of a device."""

    def __init__(self) -> None:
        self.now, self.entered = 0, list[int]()

    def number(self, device: Any) -> int:
        return self.now if device is None else int(torch.device(device).index)

    def current_stream(self, device: Any = None) -> SimpleNamespace:
        number = self.number(device)
        return SimpleNamespace(
            cuda_stream=0, device=number, record_event=lambda: number,
            wait_stream=lambda other: self.entered.append(10 * number + other.device),
        )  # fmt: skip

    def Stream(self, device: Any = None) -> SimpleNamespace:
        number = self.number(device)
        return SimpleNamespace(
            cuda_stream=0, device=number,
            wait_event=lambda event: self.entered.append(10 * number + event),
        )  # fmt: skip

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.now = self.now, self.number(device)
        yield
        self.now = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        assert stream.device == self.now
        yield


def test_streams_of_torch_are_those_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device, asked = Cuda(), torch.device("cuda", 2), list[Any]()
    current = cuda.current_stream
    for name in ("Stream", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))

    def current_stream(device: Any = None) -> SimpleNamespace:
        asked.append(cuda.number(device))
        return current(device)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    with simulated() as (gpu, _):
        gpu.count = 3
        with in_stream(device):
            assert gpu.device_id == 2
        assert gpu.device_id == 0
        own = OwnStream(device)
        event = own.mark()
        with own.after(event):
            assert (cuda.now, gpu.device_id) == (2, 2)
        own.join()
    assert asked == [2, 2, 2, 2] and cuda.entered == [22, 22]


def test_a_device_is_a_threads_own() -> None:
    """As CUDA's: a thread of overlap begins on the first GPU, whatever its process has chosen."""
    with simulated() as (gpu, cupy):
        gpu.count = 2
        cupy.cuda.Device(1).use()
        found = list[int]()
        thread = Thread(target=lambda: found.append(cupy.cuda.Device().id))
        thread.start()
        thread.join()
        assert (found, cupy.cuda.Device().id) == ([0], 1)


def shares(place: int, allowed: bool = False) -> Any:
    return bus(place)[0], f"cuda:{place}", allowed, True


@pytest.mark.parametrize(
    ("nodes", "places", "allowed", "said"),
    [
        ([0, 0, 1, 1], [0, 0, 0, 1], False, r"R: model: processes 0, 1 of a node share a GPU \(c"),
        ([0, 0, 1, 1], [0, 1, 1, 1], False, r"processes 2, 3 of a node share a GPU \(cuda:1, cuda"),
        ([0, 0, 1, 1], [0, 1, 0, 1], False, ""),
        ([0, 0, 1, 1], [0, 0, 0, 0], True, ""),
        ([0], [0], False, ""),
    ],
)
def test_a_model_on_a_gpu_that_others_have_is_refused(
    nodes: list[int], places: list[int], allowed: bool, said: str
) -> None:
    """As where model.cuda() comes before use_gpu: all are on the first."""
    for process, place in enumerate(places):
        with simulated() as (gpu, _):
            gpu.count = 4
            world = Processes(process, nodes, [shares(each, allowed) for each in places])
            world.shares_gpus = allowed
            with pytest.raises(UserError, match=said) if said else nullcontext():
                check_gpus(world, "R", place, 4096)


def test_memory_that_mpi_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's with expandable_segments, where MPI would be given it as it is."""
    told = [shares(0), shares(1)[:3] + (False,)]
    for aware in (True, False):
        answer = gpu_messages.Answer(aware, "simulated")
        monkeypatch.setattr(gpu_messages, "gpu_aware", lambda world, answer=answer: answer)
        for process in range(2):
            with simulated() as (gpu, _):
                gpu.count, gpu.closed = 2, process == 1
                world = Processes(process, [0, 0], told)
                said = r"^R: memory of torch on process 1 cannot be shared by CUDA IPC, as MPI does"
                with pytest.raises(UserError, match=said) if aware else nullcontext():
                    check_gpus(world, "R", process, 4096)


@pytest.mark.parametrize(
    ("toolkit", "capability", "hip", "said"),
    [
        (
            13,
            70,
            False,
            r"process 0 has a GPU of compute capability 7\.0, and CUDA 13 compiles for 7",
        ),
        (13, 75, False, ""),
        (12, 70, False, ""),
        (12, 90, True, r"process 0 has CuPy for ROCm: the kernels are CUDA's, for NVIDIA's GPUs"),
    ],
)
def test_gpus_that_have_no_kernels_are_refused_early(
    toolkit: int, capability: int, hip: bool, said: str
) -> None:
    with simulated() as (gpu, cupy):
        gpu.toolkit, gpu.capability, cupy.cuda.runtime.is_hip = toolkit, capability, hip
        with pytest.raises(UserError, match=said) if said else nullcontext():
            use_gpu(Loopback())
        with pytest.raises(UserError, match="cpdhpc: this ") if said else nullcontext():
            arrays.quantize(cupy.zeros(3, np.float32), "e4m3")


def test_one_process_compiles_and_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The others wait for its lock; whoever holds it too long is not waited for."""
    for _ in range(2):
        with simulated() as (gpu, cupy):
            arrays.quantize(cupy.zeros(3, np.float32), "e2m5")
            assert gpu.compiled == 1
        said = capfd.readouterr().err
    assert not said
    path = Path(gpu.folder) / "work"
    doing, order = Event(), list[str]()

    def work(name: str) -> None:
        with once_for_all(path, 10) as (is_first, done):
            doing.set()
            sleep(0.1 if is_first else 0)
            order.append(f"{name} {is_first}")
            done()

    threads = [Thread(target=work, args=(name,)) for name in "ab"]
    threads[0].start()
    doing.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert order == ["a True", "b False"]
    with once_for_all(path, 10), once_for_all(path, 0.1) as (is_first, _):
        assert not is_first
    with once_for_all(Path("/proc/nothing/here"), 10) as (is_first, done):
        done()
        assert is_first


def test_a_wait_leaves_the_core_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Slow:
        def Test(self) -> bool:
            nonlocal looks
            looks += 1
            return monotonic() - start > 0.3

    with simulated():
        from cpdhpc.ops import gpu_runtime

        monkeypatch.setattr(gpu_runtime, "MOST_PAUSE_S", 1e-3)
        start = monotonic()
        gpu_runtime.wait(Slow())  # type: ignore[arg-type]
    assert looks < 20_000  # some while it spins, and then one a millisecond


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
    "torch/backend/progress.py": [".get()"],  # of a queue
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
