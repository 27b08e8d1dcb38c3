"""Networks on parts of images beside the serial ones: right for any number of processes."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training import run_job, small_job
from verdicts import together

from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.torch.split_images import partition
from cpdhpc.torch.split_images.windowed import ImageGrid
from cpdhpc.world.mpi import World

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = 8  # random layers a grid
DIVISORS = 144  # a multiple of every number of cells that an average of 4 x 4 at most can have
CLOSE = 1e-12
# Nets are compared relative to the largest gradient of all. Sums over ranks add up the same terms
# in another order: of at most n = 3000 terms in float64, whose error is below n 2**-53 = 3.4e-13
# of their sizes' sum; terms of one sign or few of large size are what these nets have.


def grids(world: World) -> list[tuple[int, int]]:
    """All ways to split images over all ranks or over groups of them."""
    numbers = range(1, world.size + 1)
    return [(r, c) for r in numbers for c in numbers if world.size % (r * c) == 0]


def few_grids(world: World) -> list[tuple[int, int]]:
    """Those with one group or two, in which there are not more columns than rows."""
    return [(r, c) for r, c in grids(world) if r >= c and 2 * r * c >= world.size]


def sums(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in order."""
    return torch.as_tensor(sum(world.gather(tensor.numpy())))


def integers(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Small integers in float64: all sums of their products are exact."""
    return torch.from_numpy(rng.integers(-9, 10, shape).astype(np.float64))


def random_conv(rng: np.random.Generator) -> nn.Module:
    """Kernels of up to 5 x 5, dilated up to 2: they reach beyond parts of few pixels."""
    size, dilation, stride = (rng.integers(1, top, 2).tolist() for top in (6, 3, 4))
    mode = str(rng.choice(["zeros", "reflect", "replicate", "circular"]))
    padding: Any = rng.integers(0, 4, 2).tolist()
    if stride == [1, 1] and rng.random() < 0.5:
        padding = "same"
    groups = int(rng.choice([1, 2]))
    layer = nn.Conv2d(
        2, 4, size, stride, padding, dilation, groups, bool(rng.random() < 0.5), mode
    ).double()
    for parameter in layer.parameters():
        parameter.data = integers(rng, *parameter.shape)
    return layer


def random_max(rng: np.random.Generator) -> nn.Module:
    size = rng.integers(1, 5, 2)
    padding = [int(rng.integers(0, k // 2 + 1)) for k in size]
    stride, dilation = (rng.integers(1, top, 2).tolist() for top in (4, 3))
    ceil = bool(rng.random() < 0.5)
    return nn.MaxPool2d(size.tolist(), stride, padding, dilation, ceil_mode=ceil)


def random_average(rng: np.random.Generator) -> nn.Module:
    size = rng.integers(1, 5, 2)
    padding = [int(rng.integers(0, k // 2 + 1)) for k in size]
    stride = rng.integers(1, 4, 2).tolist()
    ceil, counted = (bool(rng.random() < 0.5) for _ in range(2))
    divisor = 3 if rng.random() < 0.2 else None
    return nn.AvgPool2d(size.tolist(), stride, padding, ceil, counted, divisor)


LAYERS = {"conv": random_conv, "max": random_max, "average": random_average}


def serial_case(kind: str, case: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor] | None:
    """A random layer, images and what they become; None where the layer leaves nothing of them."""
    rng = np.random.default_rng([case, list(LAYERS).index(kind)])
    layer, shape = LAYERS[kind](rng), rng.integers(4, 14, 2).tolist()
    x = integers(rng, 2, 2, *shape).requires_grad_()
    try:
        return layer, x, layer(x)
    except RuntimeError:  # the kernel is larger than the image
        return None


@pytest.mark.parametrize("kind", LAYERS)
def test_random_layers_are_the_serial_ones_bit_for_bit(world: World, kind: str) -> None:
    """Outputs, and gradients of inputs and parameters: all arithmetic is exact, see integers."""
    done, empty = 0, 0
    for procs in grids(world):
        grid = ImageGrid(world, procs)
        for case in range(CASES):
            serial = serial_case(kind, case)
            if serial is None:
                continue
            layer, x, y = serial
            rng = np.random.default_rng(case)
            slope = integers(rng, *y.shape) * DIVISORS
            (y * slope).sum().backward()
            expected = [p.grad.clone() for p in layer.parameters()]
            layer.zero_grad()
            net = partition(nn.Sequential(layer), tuple(x.shape[2:]), grid)
            part = grid.cut(x.detach()).clone().requires_grad_()
            out = net(part)
            (out * grid.cut(slope)).sum().backward()
            gradients = [sums(world, p.grad) for p in layer.parameters()]
            together(
                world,
                torch.equal(out, grid.cut(y)),
                torch.equal(part.grad, grid.cut(x.grad)),
                all(
                    torch.equal(g, e * grid.groups)
                    for g, e in zip(gradients, expected, strict=True)
                ),
            )
            done, empty = done + 1, empty + (out.numel() == 0)
        grid.free()
    assert done >= CASES // 2 * len(grids(world))
    if world.size > 3:  # some ranks had nothing to compute
        assert sum(world.gather(empty)) > 0


def plain_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 13)),
        nn.Conv2d(1, 4, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, dilation=2, padding=2, padding_mode="reflect"),
        nn.Tanh(),
        nn.AvgPool2d(3, 2, 1),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def normed_net() -> nn.Sequential:
    """Nested, with a layer that comes twice, and no bias before the norms, as is usual."""
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Unflatten(1, (1, 13)),
        nn.Sequential(nn.Conv2d(1, 4, 3, 2, bias=False), nn.BatchNorm2d(4), relu),
        nn.Sequential(nn.Conv2d(4, 6, 5, padding="same", bias=False), nn.BatchNorm2d(6), relu),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.BatchNorm2d(6, affine=False, momentum=None),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


NETS = {"plain": plain_net, "normed": normed_net}
SHAPE = (13, 11)


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(samples)
    return torch.from_numpy(rng.standard_normal((samples, *SHAPE))), torch.arange(samples) % 3


def network(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    return NETS[name]().double()


def mean_gradients(world: World, net: nn.Module) -> list[torch.Tensor]:
    return [sums(world, p.grad) / world.size for p in net.parameters()]


def share_of(grid: ImageGrid, samples: int) -> slice:
    each = -(-samples // grid.groups)
    return slice(grid.index * each, min(samples, (grid.index + 1) * each))


def group_loss(grid: ImageGrid, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of this group's samples, whose mean over groups is that of all."""
    mine = share_of(grid, len(y))
    loss = nn.functional.cross_entropy(net(grid.cut(x[mine])), y[mine], reduction="sum")
    return loss * grid.groups / len(y)


@pytest.mark.parametrize("samples", [12, 1])
@pytest.mark.parametrize("name", NETS)
def test_nets_have_the_serial_loss_and_gradients(world: World, name: str, samples: int) -> None:
    """With one sample all groups but the first have none, and take part in batch norm all the same.

    So does the gradient of the images.
    """
    x, y = batch_of(samples)
    for procs in grids(world):
        grid, serial = ImageGrid(world, procs), network(name)
        net = partition(deepcopy(serial), SHAPE, grid)
        whole, part = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss = nn.functional.cross_entropy(serial(whole), y)
        loss.backward()
        own = group_loss(grid, net, part, y)
        own.backward()
        mean_loss = float(sums(world, own.detach())) / world.size
        pairs = zip(serial.parameters(), mean_gradients(world, net), strict=True)
        worst = max(float((p.grad - g).abs().max()) for p, g in pairs)
        largest = max(float(p.grad.abs().max()) for p in serial.parameters())
        slopes = (sums(world, part.grad) / world.size - whole.grad).abs().max()
        buffers = zip(serial.buffers(), net.buffers(), strict=False)
        together(
            world,
            abs(mean_loss - loss.item()) < CLOSE * loss.item(),
            worst < CLOSE * largest,
            slopes < CLOSE * whole.grad.abs().max(),
            all(torch.allclose(a.double(), b.double(), CLOSE, 0) for a, b in buffers),
            list(serial.state_dict()) == list(net.state_dict()),
        )
        serial.eval()
        net.eval()
        far = (net(grid.cut(x)) - serial(x)).abs().max()
        together(world, far < CLOSE * serial(x).abs().max())
        grid.free()


@pytest.mark.parametrize("name", NETS)
def test_curves_are_the_serial_ones(world: World, name: str) -> None:
    """Eight steps with momentum in float64; steps this small do not amplify what rounding does."""
    x, y = batch_of(12)
    for procs in few_grids(world):
        grid, serial = ImageGrid(world, procs), network(name)
        net = partition(deepcopy(serial), SHAPE, grid)
        curves: list[list[float]] = [[], []]
        optimizers = [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (serial, net)]
        for _ in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(serial(x), y)
            loss.backward()
            own = group_loss(grid, net, x, y)
            own.backward()
            for parameter, mean in zip(net.parameters(), mean_gradients(world, net), strict=True):
                parameter.grad = mean
            for optimizer in optimizers:
                optimizer.step()
            curves[0].append(loss.item())
            curves[1].append(float(sums(world, own.detach())) / world.size)
        together(world, curves[0][-1] < curves[0][0], np.allclose(curves[0], curves[1], CLOSE, 0))
        grid.free()


def exact_net(rng: np.random.Generator) -> nn.Sequential:
    """Its last layers have weights and divisors of their own on each rank: quarters and 1, 2, 4."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AvgPool2d(2, 1, 1, count_include_pad=False),
        nn.Flatten(),
    )
    for parameter in net.parameters():
        parameter.data = integers(rng, *parameter.shape).float()
    return net


@pytest.mark.parametrize("wire", ["float32", "e4m3"])
def test_the_reducer_sums_the_parts_of_replicated_weights(world: World, wire: str) -> None:
    """Gradients of integers below 2**24 (of 64ths): float32 has them exactly, e4m3 their rounding.

    In float32 the mean over ranks is the serial gradient to the last bit where the number of
    ranks is a power of two; else within the roundings of ranks additions and one division. In
    e4m3 every addition of the direct algorithm rounds the contributions only: 2**-4 relative to
    the tile's largest, each way. All ranks get the same bits.
    """
    for procs in few_grids(world):
        rng = np.random.default_rng(3)
        grid, serial = ImageGrid(world, procs), exact_net(rng)
        x = integers(rng, 2 * grid.groups, 2, 7, 6).float()
        slope = integers(rng, 2 * grid.groups, 4 * 7 * 7).float()
        (serial(x) * slope).sum().backward()
        net = partition(deepcopy(serial), (7, 6), grid)
        options = {} if wire == "float32" else {"wire": wire, "algorithm": "direct"}
        reducer = GradientReducer(net, world, "none" if wire == "float32" else "lowbit", **options)
        mine = slice(2 * grid.index, 2 * grid.index + 2)
        (net(grid.cut(x[mine])) * slope[mine]).sum().mul(grid.groups).backward()
        contributed = [world.gather(p.grad.abs().max().item()) for p in net.parameters()]
        reducer.reduce()
        verdicts = []
        for one, mine_, largest in zip(
            serial.parameters(), net.parameters(), contributed, strict=True
        ):
            unit = 2.0**-4 if wire == "e4m3" else 2.0**-24
            bound = 2 * (world.size + 1) * unit * max(largest)
            exact = wire == "float32" and world.size & (world.size - 1) == 0
            far = float((one.grad - mine_.grad).abs().max())
            verdicts.append(far == 0 if exact else far <= bound)
        bits = [p.grad.numpy().tobytes() for p in net.parameters()]
        verdicts.append(len(set(map(tuple, world.gather(bits)))) == 1)
        together(world, *verdicts)
        grid.free()


@pytest.mark.parametrize("aggregator", ["none", "lowbit"])
def test_jobs_with_split_images_learn_as_those_with_whole_ones(
    world: World, folder: Path, aggregator: str
) -> None:
    """Float32 curves differ by rounding alone: 2 epochs of 5 steps, 2**-24 amplified 1e3 times.

    Samples are not dealt evenly: 24 a batch and 4 in the last one.
    """
    gradient = {"aggregator": aggregator, "algorithm": "direct"}
    curves = []
    for number, procs in enumerate([(1, 1), *few_grids(world)[:2]]):
        model = {"name": "lenet", "channels": [2, 3], "hidden": 8}
        train = {"image_grid": list(procs), "learning_rate": 0.05}
        job = small_job(model=model, train=train, gradient=gradient, name=f"j{number}")
        training = run_job(job, world, folder)
        weights = b"".join(t.numpy().tobytes() for t in training.model.state_dict().values())
        together(world, len(set(world.gather(weights))) == 1)
        curves.append(training.record.arrays()["steps"]["loss"])
        training.close()
    far = max(np.abs(curve - curves[0]).max() for curve in curves)
    together(world, far <= (1e-4 if aggregator == "none" else 0.1))


def test_batch_norm_without_enough_values_is_an_error_on_all_ranks(world: World) -> None:
    grid = ImageGrid(world, (world.size, 1))
    net = partition(nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)), (2, 2), grid)
    said = ""
    try:
        net(grid.cut(torch.ones(1, 1, 2, 2)))
    except ValueError as error:
        said = str(error)
    together(world, "layer 1 (BatchNorm2d)" in said and "more than one value" in said)


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_are_an_error_on_all_ranks(world: World) -> None:
    grid = ImageGrid(world, (world.size, 1))
    size = 5 if world.rank == world.size - 1 else 3
    said = ["", ""]
    layers: list[nn.Module] = [nn.Conv2d(1, 2, size), nn.MaxPool2d(2)]
    for number, last in enumerate((nn.ReLU(), nn.Fold(2, 2) if size == 5 else nn.ReLU())):
        try:
            partition(nn.Sequential(*layers, last), (9, 9), grid)
        except (TypeError, ValueError) as error:
            said[number] = str(error)
    together(
        world,
        f"rank {world.size - 1} has 0: Conv2d(1, 2, kernel_size=(5, 5)" in said[0],
        "layer 2, Fold(" in said[1],
    )


def test_worlds_split_into_groups_with_their_settings(world: World) -> None:
    part = world.split(world.rank % 2)
    ranks = part.gather(world.rank)
    together(
        world,
        ranks == list(range(world.rank % 2, world.size, 2)),
        part.timeout_s == world.timeout_s,
    )
    part.free()
    said = ""
    try:
        world.split(-1 if world.rank == 0 else 0)
    except ValueError as error:
        said = str(error)
    together(world, said.endswith("World.split: group=-1: must be 0 or more"))
