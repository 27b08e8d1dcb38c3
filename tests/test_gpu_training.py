"""Training on a GPU: the reducer has the CPU's bits there, and runs move between the two.

On the emulated GPU the model's own arithmetic is torch's on the CPU, so whole runs have the same
bits; on a real one they are near.
"""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gpus import card
from simulated_gpu import Gpu
from test_models import TINY
from training import ROWS, SMALL, model_bytes, run_job, small_job

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress.base import Aggregator, Context, Mean
from cpdhpc.compress.bucket import Bucket
from cpdhpc.config import ConfigError, UserError, validate
from cpdhpc.lab.bench import overlap as bench_overlap
from cpdhpc.lab.train import gradients
from cpdhpc.lab.train.job import Job
from cpdhpc.ops.tensors import CPU, OwnStream, array_of, in_stream, values_of
from cpdhpc.torch.ddp import ddp_hook
from cpdhpc.torch.loss_scaling import LossScaler
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback, Ranks

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.gpu
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("lowbit", {"wire": "e4m3", "scaling": "aps", "error_feedback": True}),
    ("powersgd", {}),
    ("topk", {"density": 0.1}),
]


@pytest.fixture
def gpu() -> Iterator[Gpu | None]:
    with card() as found:
        yield found


def network(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Layers of several sizes, of one dtype, and buffers."""
    torch.manual_seed(0)
    sizes = (30, 40, 50)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(50, affine=False))
    return model.to(device, dtype)


def backward(model: torch.nn.Module, step: int, scale: float = 1.0) -> None:
    """Give each parameter a gradient that depends on the step alone, by a backward."""
    rng = np.random.default_rng(step)
    terms = []
    for p in model.parameters():
        wanted = torch.from_numpy(rng.standard_normal(p.shape).astype(np.float32) * scale)
        terms.append((p * wanted.to(p.device, p.dtype)).sum())
    torch.stack(terms).sum().backward()
    model[-1].running_mean.fill_(float(step))


def steps(
    device: torch.device,
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    world: Ranks | None = None,
    **more: Any,
) -> tuple[list[bytes], dict[str, Any]]:
    """Return the bits of all means and buffers of three steps, and what the method kept."""
    model, found, world = network(device, dtype), [], world or Loopback()
    reducer = GradientReducer(model, world, name, bucket_mib=0.002, **more, **options)
    for step in range(3):
        model.zero_grad()
        reducer.loss_scale = (1.0, 4.0, 4.0)[step]
        backward(model, step + 3 * world.rank)
        reducer.reduce()
        for tensor in [p.grad for p in model.parameters()] + list(model.buffers()):
            assert tensor is not None and tensor.device == device
            found.append(values_of(tensor.float()).tobytes())
    kept = {key: entry["values"] for key, entry in reducer.state_dict()["state"].items()}
    reducer.close()
    return found, kept


def test_tensors_without_elements_are_given_and_reduced_too(gpu: Gpu | None) -> None:
    """NumPy's arrays without elements have strides of 0, which torch takes for no view."""
    model = torch.nn.Linear(3, 2)
    model.nothing = torch.nn.Parameter(torch.zeros(0, 3))
    model.register_buffer("none", torch.zeros(0, 2))
    model.to(DEVICE)
    for mode in ("broadcast", "mean"):
        reducer = GradientReducer(model, Loopback(), buffers=mode)
        (model(torch.ones(1, 3, device=DEVICE)).sum() + model.nothing.sum()).backward()
        reducer.reduce()
        assert model.nothing.grad.shape == (0, 3) and model.none.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), WAYS, ids=[name for name, _ in WAYS])
def test_means_have_the_bits_of_the_cpu(
    gpu: Gpu | None, name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    expected, kept = steps(CPU, name, options, dtype)
    for overlap in (False, True):
        found, there = steps(DEVICE, name, options, dtype, overlap=overlap)
        assert found == expected, overlap
        assert kept.keys() == there.keys()
        assert all(torch.equal(kept[key], there[key]) for key in kept)


def test_the_threads_stream_and_that_of_backward_wait_for_one_another(gpu: Gpu | None) -> None:
    if gpu is None:
        pytest.skip("the simulation is late as it is told")
    own, x = OwnStream(DEVICE), torch.zeros(100, device=DEVICE)
    with in_stream(DEVICE):
        array = array_of(x)
        gpu.delay()
        array[...] = 1
    with own.after(own.mark()):
        gathered = array + np.float32(1)
        gpu.delay()
        mean = gathered + np.float32(1)
    own.join()
    with in_stream(DEVICE):
        assert (mean + np.float32(1)).get().tolist() == [4.0] * 100


@dataclass(frozen=True)
class Late(Aggregator):
    """Notes gradients, which the GPU reads late."""

    noted: ClassVar[dict[tuple[str, ...], Any]] = {}
    gpu: ClassVar[Gpu]

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        """Return the gradient of the one rank."""
        time.sleep(0.2 if self.noted else 0)  # the mean of the first one is looked at meanwhile
        self.gpu.delay()
        self.noted.setdefault(bucket.names, gradients[0].copy())  # of the first step
        return Mean(gradients[0].copy())


def test_the_step_behind_an_error_begins_behind_all_buckets(gpu: Gpu | None) -> None:
    """Those that the thread was at work on when the mean of the first one got beyond float32."""
    if gpu is None:
        pytest.skip("the simulation is late as it is told")
    Late.gpu, model = gpu, network(DEVICE)
    Late.noted.clear()
    reducer = GradientReducer(model, Loopback(), Late(), bucket_mib=0.002, overlap=True)
    reducer.loss_scale = 0.5  # by which means are divided
    for step, last in enumerate((3e38, 1.0)):
        model.zero_grad()
        given = [last if p is model[1].bias else 1.0 + step for p in model.parameters()]
        terms = [p.sum() * each for p, each in zip(model.parameters(), given, strict=True)]
        torch.stack(terms).sum().backward()
        if step == 0:
            with pytest.raises(NonFiniteGradient, match=r"'1\.bias'"):
                reducer.reduce()
    reducer.reduce()
    assert len(Late.noted) > 2
    for names, gradient in Late.noted.items():
        expected = 3e38 if "1.bias" in names else 1
        assert (gradient.get() == np.float32(expected)).all(), names
    reducer.close()


def test_a_nan_leaves_gradients_and_a_scaler_skips_the_step(gpu: Gpu | None) -> None:
    model = network(DEVICE)
    reducer = GradientReducer(model, Loopback(), "lowbit", overflow="inf", error_feedback=True)
    scaler = LossScaler(reducer, dynamic=True)
    backward(model, 0, scaler.scale)
    assert scaler.reduce() is not None
    backward(model, 1)
    model[0].weight.grad[3, 3] = np.nan
    assert scaler.reduce() is None and scaler.scale == 2.0**15
    with pytest.raises(NonFiniteGradient, match=r"'0\.weight' on rank 0"):
        reducer.reduce()


def test_a_model_half_on_the_gpu_is_refused(gpu: Gpu | None) -> None:
    model = network(CPU)
    model[1].to(DEVICE)
    says = r"0\.weight is on cpu, 1\.weight on cuda:0: should be on one device"
    with pytest.raises(ValueError, match=says):
        GradientReducer(model, Loopback())
    model = network(CPU)
    reducer = GradientReducer(model, Loopback())
    model.to(DEVICE)
    backward(model, 0)
    with pytest.raises(ValueError, match=r"is torch\.float32 on cuda:0: should be dense .* on cpu"):
        reducer.reduce()


@pytest.mark.parametrize("overlap", [False, True])
def test_sparse_gradients_are_refused_as_on_the_cpu(gpu: Gpu | None, overlap: bool) -> None:
    for device in (CPU, DEVICE):
        model = torch.nn.Embedding(10, 4, sparse=True).to(device)
        reducer = GradientReducer(model, Loopback(), overlap=overlap)
        model(torch.tensor([1, 3, 3]).to(device)).square().sum().backward()
        says = f"'weight' on rank 0 is torch.sparse_coo of torch.float32 on {device}: should be den"
        with pytest.raises(ValueError, match=says):
            reducer.reduce()
        reducer.close()


class GradBucket:
    """What DDP gives its hook: some parameters, last ones first, and one buffer of gradients."""

    def __init__(self, number: int, parameters: list[torch.nn.Parameter], last: bool) -> None:
        self.number, self.of, self.last = number, parameters, last
        self.flat = torch.cat([p.grad.reshape(-1) for p in parameters])

    def index(self) -> int:
        return self.number

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.of

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self.flat, [p.numel() for p in self.of])
        return [part.view(p.shape) for part, p in zip(parts, self.of, strict=True)]

    def is_last(self) -> bool:
        return self.last


def hooked(device: torch.device, dtype: torch.dtype, overlap: bool) -> list[bytes]:
    """Return the bits that a hook of DDP leaves in two buckets of three steps."""
    model, found = network(device, dtype), []
    options = {"wire": "e4m3", "error_feedback": True, "overlap": overlap}
    state, hook = ddp_hook(Loopback(), "lowbit", model=model, **options)
    parameters = list(model.parameters())[::-1]
    for step in range(3):
        model.zero_grad()
        state.loss_scale = (1.0, 4.0, 4.0)[step]
        backward(model, step)
        buckets = [GradBucket(0, parameters[:2], False), GradBucket(1, parameters[2:], True)]
        futures = [hook(state, bucket) for bucket in buckets]
        for future in reversed(futures):  # the GPU is at work on the last one longest
            found.append(values_of(future.wait().clone().float()).tobytes())
    state.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_hook_of_ddp_has_the_bits_of_the_cpu(gpu: Gpu | None, dtype: torch.dtype) -> None:
    expected = hooked(CPU, dtype, False)
    for overlap in (False, True):
        assert hooked(DEVICE, dtype, overlap) == expected, overlap


def tiny_job(name: str, row: str, train: dict[str, Any]) -> Job:
    rest = {"gradient": ROWS[row], "train": SMALL["train"] | train}
    return validate(Job, {"name": "tiny", "model": {"name": name, **TINY[name]}, **rest}, "test")


@pytest.mark.parametrize(("name", "row"), [("lenet", "tile"), ("resnet_cifar", "float32")])
def test_runs_have_the_bits_of_the_cpu_and_go_on_there(
    gpu: Gpu | None, tmp_path: Path, name: str, row: str
) -> None:
    """Two epochs on the CPU; one on the GPU and one on the CPU; the other way round."""
    runs = {"cpu": ("cpu", "cpu"), "down": ("gpu", "cpu"), "up": ("cpu", "gpu")}
    bits, losses = {}, {}
    for case, devices in runs.items():
        (tmp_path / case).mkdir()
        for epochs, device in enumerate(devices, 1):
            job = tiny_job(name, row, {"epochs": epochs, "device": device, "record_gradients": [1]})
            done = resumed(job, tmp_path / case)
        bits[case] = model_bytes(done.files.checkpoint)
        losses[case] = done.record.arrays()["steps"]["loss"]
        recorded = gradients.load(gradients.path_of(done.files.record, 1))
        assert all(np.isfinite(each).all() for each in recorded.layers.values())
    for case in ("down", "up"):
        if gpu is not None:
            assert bits[case] == bits["cpu"]
        # Of a real GPU, whose products are summed in another order: the losses of few steps.
        assert np.allclose(losses[case], losses["cpu"], rtol=0.05)


def resumed(job: Any, directory: Path) -> Any:
    """Run a job on two virtual ranks, from its checkpoint where there is one."""
    return run_job(job, Loopback(virtual_ranks=2), directory, resume=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_trains(gpu: Gpu | None, tmp_path: Path, dtype: str) -> None:
    train = {"device": "gpu", "autocast": dtype, "loss_scaling": "dynamic", "loss_scale": 256.0}
    job = tiny_job("mlp", "float32", {**train, "epochs": 4, "learning_rate": 0.1})
    done = run_job(job, Loopback(), tmp_path)
    losses = done.record.arrays()["steps"]["loss"]
    assert losses[-5:].mean() < 0.95 * losses[:5].mean()
    assert {p.dtype for p in done.model.parameters()} == {torch.float32}


def test_what_is_missing_is_said_in_a_line(
    gpu: Gpu | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(train={"device": "gpu"})
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UserError, match=r"^train.device='gpu': torch \S+ finds no GPU on rank"):
            run_job(job, Loopback(), tmp_path)
    others: list[dict[str, Any]] = [
        {"stages": {"count": 2}},
        {"update": {"name": "localsgd"}},
        {"precision": {"rule": [{"layers": "*", "weights": "e4m3"}]}},
    ]
    for other in others:
        with pytest.raises(ConfigError, match=r"train.device='gpu': does not allow this"):
            small_job(train={"device": "gpu"}, **other)


def test_a_target_that_is_no_class_is_named(gpu: Gpu | None) -> None:
    """Where torch's kernel would end the context."""
    from cpdhpc.lab.train.losses import CrossEntropy, TargetError

    outputs = torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(TargetError, match="target 7: must be a class, 0 to 3"):
        CrossEntropy().build()(outputs, torch.tensor([0, 7, 1]).to(DEVICE))


def test_steps_with_overlap_are_measured(
    gpu: Gpu | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of bench overlap: no time ends before the GPU is done with what it was given."""
    path = tmp_path / "job.toml"
    path.write_text(
        'model = { name = "mlp", hidden = [24] }\n'
        'train = { device = "gpu", batch = 20, bucket_mib = 0.001 }\n'
        'gradient = { aggregator = "lowbit", wire = "e4m3" }\n'
    )
    ends: list[bool] = []
    parser = ArgumentParser()
    bench_overlap.add_arguments(parser)
    arguments = parser.parse_args([str(path), "--repeats", "2", "--warmup", "0"])
    arguments.timeout = None
    with pytest.MonkeyPatch.context() as patch:
        timed = bench_overlap.timing.slowest

        def watching(world: Any, cases: dict[str, Any], *given: Any) -> Any:
            def then(case: Any) -> None:
                case()
                ends.append(gpu is None or not any(s.work for s in gpu.streams.values()))

            return timed(world, {n: partial(then, c) for n, c in cases.items()}, *given)

        patch.setattr(bench_overlap.timing, "slowest", watching)
        bench_overlap.run(arguments, Loopback())
    out = capsys.readouterr().out
    words = " ".join(out.replace("#", "").split())
    assert "identical bits on all ranks bound:" in words and "\n  job " in out
    assert len(ends) == 8 and all(ends)


@contextmanager
def traffic() -> Iterator[list[int]]:
    """Yield a list of the bytes that kernels, CuPy and torch read and write in the block."""
    emulated, simulated, moved = (
        sys.modules[name] for name in ("emulated_torch", "simulated_cupy", "cpdhpc.ops.gpu_runtime")
    )
    found: list[int] = []
    run, assign, operate = moved._run, simulated.ndarray.__setitem__, emulated.operate

    def of(*values: Any) -> int:
        return sum(x.nbytes for x in values if hasattr(x, "nbytes") and hasattr(x, "shape"))

    def counted_run(kernel: Any, blocks: int, args: Any) -> None:
        found.append(of(*(x for x in args if not isinstance(x, np.generic))))
        run(kernel, blocks, args)

    def counted_assign(array: Any, key: Any, value: Any) -> None:
        found.append(array[key].nbytes + of(value))
        assign(array, key, value)

    def counted_operate(function: Any, args: Any, kwargs: Any) -> Any:
        out = operate(function, args, kwargs)
        if any(isinstance(x, emulated.CudaTensor) for x in args):
            views = any(each.alias_info is not None for each in function._schema.returns)
            writes = function._schema.name.endswith("_")
            found.append(of(*args) if writes else 0 if views else of(*args, out))
        return out

    with (
        patch.object(moved, "_run", counted_run),
        patch.object(simulated.ndarray, "__setitem__", counted_assign),
        patch.object(emulated, "operate", counted_operate),
    ):
        yield found


@pytest.mark.parametrize(
    ("name", "options", "most"), [("none", {}, 20.1), ("lowbit", {"wire": "e4m3"}, 18.1)]
)
def test_a_steady_reduce_moves_few_bytes_a_value(
    gpu: Gpu | None, name: str, options: dict[str, Any], most: float
) -> None:
    """Gradients and means lie where they are worked on.

    Of float32 8 bytes to copy, 4 to look, 8 to divide; of e4m3 5 to code, 5 to decode, 8 to divide.
    """
    if gpu is None:
        pytest.skip("bytes are counted on the emulated GPU")
    model = torch.nn.Linear(256, 256).to(DEVICE)
    reducer = GradientReducer(model, Loopback(), name, **options)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 256, device=DEVICE)).sum().backward()
        with traffic() as found:
            reducer.reduce()
    assert sum(found) <= most * reducer.bucket.size
