"""Windows of CUDA tensors, their gradients, and images split over ranks that have GPUs.

Arithmetic is exact where bits are compared: sums may be in another order on a GPU.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpus import card
from torch import nn
from training import small_data, small_job

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.ops.tensors import CPU, values_of
from cpdhpc.torch.autograd import accumulate, exchange
from cpdhpc.torch.split_images import ImageGrid, partition
from cpdhpc.world.mpi import World

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.gpu
TIMEOUT_S = 600.0
BOUNDARIES = [("reflect", "edge"), ("zero", "wrap")]
DTYPES = ["bfloat16", "float16", "float32", "float64", "int64", "complex64"]


@pytest.fixture(params=[False, True], ids=["staged", "direct"])
def given(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """A world of its own, whose ranks have a GPU each."""
    torch.set_num_threads(1)
    with card(request.param, world.process):
        made = World(timeout_s=TIMEOUT_S, gpu_direct=request.param)
        yield made
        made.free()


def integers(seed: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Small integers: their sums are exact in every dtype."""
    found = np.random.default_rng(seed).integers(-3, 4, shape)
    return torch.from_numpy(found).to(getattr(torch, dtype))


def bits(tensor: torch.Tensor) -> bytes:
    """All bytes of a tensor, in the order of its elements."""
    plain = tensor.detach().contiguous()
    return values_of(plain.view(torch.uint8) if plain.ndim else plain).tobytes()


def plan_of(world: World, boundary: Any, wire: str = "raw") -> WindowPlan:
    """Rows with halos beyond both neighbours and the domain; the last rank may own nothing."""
    layout = Layout.grid((2 * world.size - 1, 5), (world.size, 1))
    (top, left), (bottom, right) = layout.owner(world.rank)
    return WindowPlan(world, layout, Box((top - 2, left - 1), (bottom + 3, right + 2)), boundary,
                      wire=wire)  # fmt: skip


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_tensors_have_the_bits_of_the_cpu(given: World, boundary: Any) -> None:
    verdict = []
    for wire, dtypes in (("raw", DTYPES), ("e4m3", ["float32"])):
        with plan_of(given, boundary, wire) as plan:
            for dtype in dtypes:
                x = integers((given.rank,), (*plan.owned.shape, 2, 3), dtype)
                y = integers((given.rank, 1), (*plan.window.shape, 2, 3), dtype)
                for function, one in ((plan.exchange, x), (plan.accumulate, y)):
                    want = bits(function(one))
                    turned = one.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
                    here = [function(each.to(DEVICE)) for each in (one, turned)]
                    verdict += [each.device == DEVICE and bits(each) == want for each in here]
    assert given.gather(verdict) == [[True] * len(verdict)] * given.size


def test_gradients_have_the_bits_of_the_cpu(given: World) -> None:
    """Of first and second order, as each operation is the other's backward."""
    found = {}
    with plan_of(given, ("reflect", "zero")) as plan:
        for device in (CPU, DEVICE):
            x = integers((given.rank,), (*plan.owned.shape, 3), "float64").to(device)
            x.requires_grad_()
            y = exchange(x, plan)
            weight = integers((given.rank, 1), tuple(y.shape), "float64").to(device)
            (slope,) = torch.autograd.grad((y * y * weight).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((slope * slope).sum() + accumulate(y, plan).sum(), x)
            found[device.type] = [bits(each) for each in (y, slope, second)]
    assert given.gather(found["cuda"] == found["cpu"]) == [True] * given.size


def layers() -> nn.Sequential:
    """Layers that fetch windows, with integers for weights and averages of 4 cells."""
    made = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(2, 2, 3, stride=2, padding=1),
        nn.MaxPool2d(2, padding=1),
        nn.Flatten(1),
        nn.Linear(18, 3),
    ).double()
    for i, parameter in enumerate(made.parameters()):
        parameter.data = integers((i,), tuple(parameter.shape), "float64")
    return made


def test_split_layers_are_the_serial_ones_bit_for_bit(given: World) -> None:
    serial, images = layers(), integers((9,), (2, 1, 8, 8), "float64")
    want = serial(images)
    want.sum().backward()
    grid = ImageGrid(given, (given.size, 1))
    model = deepcopy(serial).to(DEVICE)
    model.zero_grad()
    net = partition(model, (1, 8, 8), grid)
    assert given.gather(all(b.device == DEVICE for b in net.buffers())) == [True] * given.size
    found = net(grid.cut(images.to(DEVICE)))
    found.sum().backward()
    gradients = [sum(given.gather(values_of(p.grad))) / given.size for p in net.parameters()]
    verdict = [bits(found) == bits(want)]
    pairs = zip(gradients, serial.parameters(), strict=True)
    verdict += [np.array_equal(mine, p.grad.numpy()) for mine, p in pairs]
    assert given.gather(verdict) == [[True] * len(verdict)] * given.size


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_layers_launch_and_copy_for_borders_alone(world: World, direct: bool) -> None:
    """One launch packs, one unpacks, a copy down and up; layers that need no cells have none.

    Norms have one exchange each way too. Outputs and gradients are those of the CPU.
    """
    torch.set_num_threads(1)
    moved = {"move_boxes": 2}, {} if direct else {"down": 1, "up": 1}
    costs = {"3 x 3": moved, "1 x 1": ({}, {}), "norm": moved}
    with card(direct, world.process) as gpu:
        given = World(timeout_s=TIMEOUT_S, gpu_direct=direct)
        grid, verdict = ImageGrid(given, (given.size, 1)), []
        torch.manual_seed(1)
        serial = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        images = torch.randn(2, 2, 4 * given.size, 6)
        found: dict[str, list[torch.Tensor]] = {}
        for device in (CPU, DEVICE):
            net = partition(deepcopy(serial).to(device), tuple(images.shape[1:]), grid)
            x = grid.cut(images.to(device)).clone().requires_grad_()
            for name, layer in zip(costs, net, strict=True):
                for _ in range(2 if gpu else 0):  # the first call makes channels
                    counted = []
                    z = x.detach().requires_grad_()
                    for step in ("forward", "backward"):
                        gpu.launched.clear()
                        gpu.copied.clear()
                        if step == "forward":
                            y = layer(z)
                        else:
                            y.backward(torch.ones_like(y))
                        counted.append((dict(gpu.launched), dict(gpu.copied)))
                if gpu and device is DEVICE and given.size > 1:
                    verdict.append(counted == [costs[name]] * 2)
            net.zero_grad()
            y = net(x)
            y.square().mul(0.5).sum().backward()
            found[device.type] = [y.detach(), x.grad, *(p.grad for p in net.parameters())]
        for mine, want in zip(found["cuda"], found["cpu"], strict=True):
            far = np.abs(values_of(mine) - want.numpy()).max()
            verdict.append(far <= 1e-4 * max(1.0, float(want.abs().max())))
        assert given.gather(verdict) == [[True] * len(verdict)] * given.size
        given.free()


def test_a_job_with_split_images_learns_as_on_the_cpu(given: World, tmp_path: Path) -> None:
    """Float32 curves differ by rounding alone: 5 steps, 2**-24 amplified 1e3 times."""
    directory = Path(given.gather(str(tmp_path))[0])
    curves = []
    for device in ("cpu", "gpu"):
        model = {"name": "lenet", "channels": [2, 3], "hidden": 8}
        train = {"image_grid": [given.size, 1], "learning_rate": 0.05, "epochs": 1}
        train["oversubscribe_gpus"] = True  # of a machine that has one
        job = small_job(model=model, train=train | {"device": device}, name=device)
        training = prepare(job, given, small_data(), Files.of(directory, job))
        run(training, Caught(), Display(False, 1))
        curves.append(training.record.arrays()["steps"]["loss"])
        training.close()
    far = float(np.abs(curves[0] - curves[1]).max())
    assert given.gather(far <= 1e-4) == [True] * given.size, far
