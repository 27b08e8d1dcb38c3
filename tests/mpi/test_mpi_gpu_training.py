"""Training on GPUs over real messages: a process each, staged and direct, with the CPU's bits.

On the emulated GPU whole runs have them, as the model's own arithmetic is torch's on the CPU; on
real ones the averaging alone, of gradients that depend on no sum.
"""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from gpus import card
from test_gpu_training import WAYS, network, steps
from torch import distributed
from training import finish, model_bytes

from cpdhpc.config import UserError, validate
from cpdhpc.lab.autoencoder import passes, probe
from cpdhpc.lab.autoencoder.job import Autoencoder
from cpdhpc.lab.autoencoder.training import Stack, resume, save
from cpdhpc.lab.bench.allreduce import parse_baselines
from cpdhpc.lab.kinds.allreduce_cases import BASELINES, CaseArrays, group_of, missing
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.data import Digits
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.setup import prepare
from cpdhpc.ops.tensors import CPU
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.gpu_messages import use_gpu
from cpdhpc.world.mpi import World

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.gpu
TIMEOUT_S = 600.0


@pytest.fixture(params=[False, True], ids=["staged", "direct"])
def direct(request):
    return request.param


@pytest.fixture
def gpu(direct, world):
    with card(direct, world.process) as found:
        yield found


def digits(train):
    """Half an epoch of a small network is enough to see a bit."""
    row = {"aggregator": "lowbit", "wire": "e4m3", "scaling": "aps", "algorithm": "direct"}
    fixed = {"epochs": 1, "batch": 256, "threads": 1, "bucket_mib": 0.01, "timeout_s": TIMEOUT_S}
    fixed["oversubscribe_gpus"] = True  # of a machine that has one
    job = {"name": "digits", "model": {"name": "mlp", "hidden": [16]}, "gradient": row}
    return validate(Job, job | {"train": fixed | train}, "test")


@pytest.mark.parametrize("overlap", [False, True])
def test_digits_have_the_bits_of_the_cpu(gpu, world, direct, tmp_path_factory, overlap):
    directory = world.gather(tmp_path_factory.mktemp("run"))[0]
    found, data = {}, Digits().load()
    for device in ("cpu", "gpu"):
        given = World(timeout_s=TIMEOUT_S, gpu_direct=direct)
        wanted = "required" if direct and device == "gpu" else "auto"
        job = digits({"device": device, "overlap": overlap, "gpu_direct": wanted})
        (directory / device).mkdir(exist_ok=True)
        training = prepare(job, given, data, Files.of(directory / device, job))
        finish(training)
        training.close()
        given.free()
        columns = training.record.arrays()["steps"]
        sent = columns["wire_bytes"][2:].tolist()  # in the first two steps things are made
        found[device] = model_bytes(training.files.checkpoint), columns["loss"].tobytes(), sent
    if gpu is not None:
        assert found["gpu"] == found["cpu"]


@pytest.mark.parametrize(("name", "options"), WAYS[:2], ids=["none", "lowbit"])
def test_means_have_the_bits_of_the_cpu(gpu, direct, name, options):
    """With overlap, whose thread has a stream of its own, under which MPI's messages go on."""
    world = World(timeout_s=TIMEOUT_S, gpu_direct=direct)
    use_gpu(world, oversubscribe=True)  # of a machine that has one
    expected, _ = steps(CPU, name, options, torch.float32, world=world)
    found, _ = steps(DEVICE, name, options, torch.float32, world=world, overlap=True)
    world.free()
    assert found == expected


@pytest.mark.two_ranks
@pytest.mark.parametrize("direct", [False], ids=["staged"], indirect=True)  # says the same of both
def test_what_differs_between_ranks_is_said_on_all(gpu, world, direct):
    if gpu is None:
        pytest.skip("checks what the stand-in of a GPU is asked: needs -p emulated_gpu")
    device = DEVICE if world.process else CPU
    with pytest.raises(ValueError, match=r"device='cpu' on rank 0, device='cuda' on rank 1"):
        GradientReducer(network(device), world)
    if not world.process:
        model = network(DEVICE)
        model[1].to(CPU)
    with pytest.raises(ValueError, match=r"0\.weight is on cuda:0, 1\.weight on cpu: should be on"):
        GradientReducer(network(DEVICE) if world.process else model, world)
    gpu.first = 0  # so that both processes see the same one
    with pytest.raises(UserError, match=r"model: processes 0, 1 of a node share a GPU \(cuda:0, c"):
        GradientReducer(network(DEVICE), world)
    job, data = digits({"device": "gpu", "oversubscribe_gpus": False}), Digits().load()
    with pytest.raises(UserError, match=r"processes 0, 1 would share GPUs of their node"):
        prepare(job, world, data, None)
    job = digits({"device": "gpu", "gpu_direct": "required", "oversubscribe_gpus": True})
    with pytest.raises(UserError, match=r"train.gpu_direct='required': GPU-aware MPI: no \(sim"):
        prepare(job, world, data, None)


def stacked(world, device):
    """Two layers of the autoencoder on digits."""
    layers = [{"field": 4, "step": 2, "maps": 3, "pool": 2, "contrast": 3}, {"field": 2, "maps": 2}]
    data = {"name": "digits", "tile": 2, "size": 14}
    train = {"iterations": 2, "batch": 4, "threads": 1, "learning_rate": 0.01, "device": device}
    train["oversubscribe_gpus"] = True
    raw = {"name": "a", "data": data, "layer": layers, "train": train}
    job = validate(Autoencoder, raw, "test")
    return Stack(job, world, job.data.load())


def test_the_autoencoder_has_the_bits_of_the_cpu(gpu, direct, tmp_path_factory, monkeypatch):
    """If torch does the work on both."""
    monkeypatch.setattr(passes, "compiled", lambda like: False)
    world = World(timeout_s=TIMEOUT_S, gpu_direct=direct)
    directory = world.gather(tmp_path_factory.mktemp("stack"))[0]
    found = {}
    for device in ("cpu", "gpu"):
        stack, steps = stacked(world, device), []
        while not stack.done:
            steps.append(stack.step(stack.batch())[:6])
        save(directory / f"{device}.h5", stack)
        again = stacked(world, "cpu")
        assert resume(directory / f"{device}.h5", again) and again.done
        image, answers = probe.stimuli(stack, 1, [(0, 0, 1)], [1])
        told = [each.numpy() for each in probe.responses(stack, image)]
        weights = [each.weight.detach().numpy() for each in again.layers]
        found[device] = steps, *(each.tobytes() for each in (image, answers, *told, *weights))
    wrong = gpu is not None and found["gpu"] != found["cpu"]
    devices = {each.weight.device for each in stack.layers}
    everyone = world.gather((wrong, devices))
    world.free()
    assert everyone == [(False, {DEVICE})] * len(everyone)


@contextmanager
def nccl(world):
    """NCCL; under emulation gloo in its place, which sums what streams have come to."""
    if "emulated_torch" not in sys.modules:
        yield
        return
    start, reduce = distributed.init_process_group, distributed.all_reduce

    def all_reduce(tensor):
        values = tensor.cpu()
        reduce(values)
        tensor.copy_(values)

    def init_process_group(backend, device_id, **given):
        assert backend == "nccl" and device_id == DEVICE
        start("gloo", **given)

    with (
        patch.object(distributed, "init_process_group", init_process_group),
        patch.object(distributed, "all_reduce", all_reduce),
        patch.object(distributed, "is_nccl_available", lambda: True),
    ):
        yield


@pytest.mark.two_ranks
@pytest.mark.parametrize("direct", [False], ids=["staged"], indirect=True)  # NCCL knows no MPI
def test_nccl_sums_arrays_where_they_are(gpu, world, direct):
    with nccl(world):
        use_gpu(world, oversubscribe=True)
        if gpu is None and (reason := missing(world, "nccl")):
            pytest.skip(reason)
        found, why = parse_baselines(world, ["nccl", "nccl-bf16", "nccl-fp16"], "gpu")
        with group_of(world, found):
            arrays = CaseArrays(world, 2048, "gpu")
            cases = [BASELINES[name](world, arrays) for name in found[2:]]
            for case in cases:
                case.check(world)
    errors = [case.error for case in cases]
    verdict = (
        [name for name in found if name != "memcpy"],
        errors[0],
        0 < errors[2] < errors[1] < 2**-8,
        why,
    )
    expected = ["mpi", "nccl", "nccl-bf16", "nccl-fp16"], 0.0, True, {}
    assert world.gather(verdict) == [expected] * world.processes
