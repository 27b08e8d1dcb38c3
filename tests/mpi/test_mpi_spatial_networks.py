"""Layers and whole networks of any shape on parts of images, beside the same ones, serial."""

from collections.abc import Callable
from copy import deepcopy
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from networks import ResNet20, UNet
from torch import nn

from cpdhpc.torch.split_images import ImageGrid, partition
from cpdhpc.world.mpi import World

torch.set_num_threads(1)


def grids(world: World) -> list[tuple[int, int]]:
    """All ways to split images over all ranks, and over halves of them."""
    sizes = [n for n in range(1, world.size + 1) if world.size % n == 0 and 2 * n >= world.size]
    return [(r, n // r) for n in sizes for r in range(1, n + 1) if n % r == 0]


def run(
    net: nn.Module, x: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor], times: int
) -> list[torch.Tensor]:
    """Output, gradient of the whole images and of the parameters, for a loss that tells all."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(11)  # of dropout
    y = net(cut(x))
    shape = y.shape[:2] + x.shape[2:]
    split = getattr(net, "split_shape", None)
    whole = y.shape if split is None else (*shape[:2], *split)
    n = int(np.prod(whole))
    slope = torch.cos(torch.arange(n)).reshape(whole).to(y.dtype)
    loss = (y * (slope if split is None else times * cut(slope))).sum()
    loss.backward()
    found = [y.detach(), x.grad, *(p.grad for p in net.parameters())]
    return [torch.zeros(()) if each is None else each for each in found]


def check(world: World, procs: tuple[int, int], model: nn.Module, x: torch.Tensor) -> list[bool]:
    """Whether a network on parts gives what it gives on whole images, to rounding.

    Both are float64 and do the same operations in another order. What rounding does to them is
    measured: float32 against float64, serial, has roundoff 2**29 times as large, and goes through
    the same operations. 64 times the largest of that, for another order of sums, and 16 roundings
    of the largest value, for what float32 happens to have exactly, is the bound.
    """
    grid = ImageGrid(world, procs)
    net = partition(deepcopy(model), tuple(x.shape[1:]), grid)
    serial = run(deepcopy(model), x, lambda whole: whole, 1)
    rough = run(deepcopy(model).float(), x.float(), lambda whole: whole, 1)
    mine = run(net, x, grid.cut, grid.sharing)
    mine[1:] = [torch.as_tensor(sum(world.gather(g.numpy()))) / world.size for g in mine[1:]]
    y = serial[0] if net.split_shape is None else grid.cut(serial[0])
    far = [float((a - b).abs().max()) if a.numel() else 0.0
           for a, b in zip(mine, [y, *serial[1:]], strict=True)]  # fmt: skip
    bounds = [
        64 * 2.0**-29 * float((a - b).abs().max()) + 16 * 2.0**-53 * float(b.abs().max())
        for a, b in zip(rough, serial, strict=True)
    ]
    largest = max(bounds[2:], default=0.0)  # of all parameters: some have no gradient at all
    bounds[2:] = [largest] * len(bounds[2:])
    grid.free()
    same = list(net.state_dict()) == list(model.state_dict())
    return [same, *(a <= b for a, b in zip(far, bounds, strict=True))]


def together(world: World, what: Any, verdicts: list[bool]) -> None:
    """Fail on all processes alike where a verdict is false on one of them."""
    everyone = world.gather(verdicts)
    assert all(all(each) for each in everyone), (what, everyone)


CONV = {"padding": 1}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
    "transposed, dilated, groups": lambda: nn.ConvTranspose2d(4, 4, (2, 3), (1, 3), 0, (0, 2), 2,
                                                             dilation=(3, 1)),
    "transposed, gaps": lambda: nn.ConvTranspose2d(4, 2, 1, 3, 0, 2, bias=False),
    "transposed, outputs of no input": lambda: nn.Sequential(
        nn.AvgPool2d((11, 9)), nn.ConvTranspose2d(4, 2, 1, 5, 0, 4)
    ),
    "nearest": lambda: nn.Upsample(scale_factor=(1.7, 0.6)),
    "nearest to a size": lambda: nn.Upsample((17, 3), mode="nearest-exact"),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda: nn.UpsamplingBilinear2d(size=(5, 21)),
    "bicubic": lambda: nn.Upsample(scale_factor=(2.5, 1.3), mode="bicubic"),
    "bicubic, corners": lambda: nn.Upsample((1, 30), mode="bicubic", align_corners=True),
    "shuffle": lambda: nn.PixelShuffle(2),
    "unshuffle": lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.PixelUnshuffle(2)),
    "zeros": lambda: nn.ZeroPad2d((3, -2, -1, 4)),
    "constant": lambda: nn.ConstantPad2d((1, 2, 0, 3), 2.5),
    "reflection": lambda: nn.ReflectionPad2d((4, 0, 3, 2)),
    "replication": lambda: nn.ReplicationPad2d((0, 9, 7, 1)),
    "circular": lambda: nn.CircularPad2d((9, 2, 1, 11)),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: nn.LayerNorm([4, 11, 9]),
    "layer norm, each channel": lambda: nn.LayerNorm([11, 9], elementwise_affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout of maps": lambda: nn.Dropout2d(0.4),
    "after a gather": lambda: nn.Sequential(
        nn.PReLU(4), nn.Flatten(), nn.Linear(396, 5), nn.BatchNorm1d(5), nn.Dropout(0.3)
    ),
    "over channels": lambda: nn.Sequential(nn.LocalResponseNorm(3), nn.GLU(1), nn.Softmax(-3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_the_serial_ones_give(world: World, name: str) -> None:
    """Between two convolutions, on images of odd sizes."""
    torch.manual_seed(0)
    before, layer = nn.Conv2d(3, 4, 3, **CONV), LAYERS[name]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    model = nn.Sequential(before, layer).double()
    x = torch.randn(2, 3, 11, 9, dtype=torch.float64)
    for procs in grids(world):
        together(world, procs, check(world, procs, model, x))


class Skip(nn.Sequential):
    """Layers whose output is joined to their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x), x], 1)


def pool() -> nn.Module:
    """Leaves two rows of nine, and two columns of twelve: fewer than ranks."""
    return nn.MaxPool2d(7, 7, 3)


FEW_CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    # network of 4 channels, rows and columns of its images
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), pool()), (9, 12)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), pool()), (9, 12)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm([4, 9, 12]), pool()), (9, 12)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm2d(4), pool()), (9, 12)),
    "running statistics": (lambda: nn.Sequential(nn.BatchNorm2d(4).eval(), pool()), (9, 12)),
    "crop": (lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.ZeroPad2d((-5, -5, -4, -3))), (9, 12)),
    "before and after": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(4), pool(), nn.GroupNorm(2, 4), nn.Tanh(), nn.LayerNorm([2, 2]),
            nn.Conv2d(4, 3, 2), nn.Upsample((9, 7)), nn.InstanceNorm2d(3),
        ),
        (9, 12),
    ),
    "skip connections": (
        lambda: nn.Sequential(
            Skip(nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)), nn.GroupNorm(3, 6), pool(),
            Skip(nn.LayerNorm([6, 2, 2]), nn.PReLU(6)), nn.Conv2d(12, 2, 1),
        ),
        (9, 12),
    ),
    "few rows": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 2)), (2, 9)),
    "one row": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(4), nn.ReplicationPad2d(1), nn.LayerNorm([3, 4]), nn.MaxPool2d(2)
        ),
        (1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_CELLS)
def test_ranks_without_cells_take_part(world: World, name: str) -> None:
    """Of one image, contiguous: only such parts have strides that fit several orders of memory."""
    torch.manual_seed(0)
    make, size = FEW_CELLS[name]
    model = nn.Sequential(nn.Tanh(), make()).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 4, *size, dtype=torch.float64)
    for procs in grids(world):
        together(world, procs, check(world, procs, model, x))


def test_convolutions_in_channels_last(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(6, 4, (3, 1), 1, (1, 0)).double().to(memory_format=torch.channels_last)
    x = torch.randn(1, 6, 9, 8, dtype=torch.float64)
    for procs in grids(world):
        together(world, procs, check(world, procs, model, x))


def test_norms_take_gradients_in_any_order_of_memory(world: World) -> None:
    """One rank's gradient comes in an order in which torch's kernel would mix up channels.

    Sums of n products, of factors up to s and the root of n, differ by up to 2 n**2.5 s 2**-53 if
    they are added in another order. The gradient is that sum times rate and a value, up to the root
    of n, over n. Twice that is for the rounding of the operations that follow.
    """
    torch.manual_seed(0)
    size = (2 * world.size, 3)
    grid = ImageGrid(world, (world.size, 1))
    whole = torch.randn(1, 4, *size, dtype=torch.float64)
    n, rate = whole[:, 0].numel(), float((whole[0].var((1, 2)) ** -0.5).max())
    slope = torch.randint(-9, 10, whole.shape).double()
    x, own = grid.cut(whole).clone().requires_grad_(), grid.cut(slope)
    net = partition(nn.InstanceNorm2d(4).double(), (4, *size), grid)
    (expected,) = torch.autograd.grad(net(x), x, own.contiguous())
    far = []
    for order in permutations(range(4)):
        given = own.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
        (found,) = torch.autograd.grad(net(x), x, given if world.rank == 0 else own)
        far.append(float((found - expected).abs().max()))
    grid.free()
    together(world, far, [each <= 4 * n**2 * 9 * rate * 2.0**-53 for each in far])


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_networks_with_a_forward_of_their_own(world: World, name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = ResNet20(2) if name == "resnet" else UNet(2)
    x = torch.randn(3, 3, *((15, 13) if name == "resnet" else (16, 12)), dtype=torch.float64)
    for procs in grids(world):
        together(world, procs, check(world, procs, model.double(), x))


def test_copies_of_networks_work(world: World) -> None:
    grid = ImageGrid(world, (world.size, 1))
    net = deepcopy(partition(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)), (9, 5), grid))
    y = net(grid.cut(torch.ones(1, 1, 9, 5)))
    together(world, "shape", [tuple(y.shape[2:]) == grid.owned((7, 3)).shape])


WRONG: dict[str, tuple[Callable[[ImageGrid, bool], Any], str]] = {
    "grid": (lambda grid, last: ImageGrid(grid.world, (99, 1) if last else grid.procs), "procs=99"),
    "grid kind": (
        lambda grid, last: ImageGrid(grid.world, None if last else grid.procs), "procs=None"
    ),
    "model": (lambda grid, last: partition(3 if last else nn.Conv2d(1, 1, 3), (8, 8), grid),
              "model=3"),
    "size": (lambda grid, last: partition(nn.Conv2d(1, 1, 3), (8,) if last else (8, 8), grid),
             r"shape=\(8,\)"),
    "layer": (
        lambda grid, last: partition(nn.Conv2d(1, 1, 5 if last else 3), (8, 8), grid), "differ"
    ),
    "input": (
        lambda grid, last: partition(
            nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten()), (8, 8), grid
        )(torch.ones(1, 1, 1 if last else grid.owned((8, 8)).shape[0], 8)),
        r"layer 0 \(Conv2d\): input has shape \(1, 1, 1, 8\)",
    ),
    "generator": (
        lambda grid, last: partition(
            nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Dropout()), (8, 8), grid
        )(grid.cut(torch.manual_seed(int(last)) and torch.ones(1, 1, 8, 8))),
        "random state differs",
    ),
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", WRONG)
def test_what_the_last_rank_alone_does_wrong_is_every_ranks_error(world: World, name: str) -> None:
    call, words = WRONG[name]
    grid, said = ImageGrid(world, (world.size, 1)), ("", "")
    try:
        call(grid, world.rank == world.size - 1)
    except (TypeError, ValueError) as error:
        said = type(error).__name__, str(error)
    everyone = world.gather(said)
    assert everyone == [everyone[0]] * world.size
    with pytest.raises(ValueError, match=words):
        raise ValueError(everyone[0][1])
