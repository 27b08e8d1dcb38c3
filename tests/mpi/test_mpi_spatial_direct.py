"""Split layers where the parts lie: bits, what they copy and send, and gradients of gradients."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from verdicts import together

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import Constant
from cpdhpc.errors import UserError
from cpdhpc.lab.bench import split as bench
from cpdhpc.torch.split_images import ImageGrid, partition
from cpdhpc.world.mpi import World

torch.set_num_threads(1)
SIZE = 24  # pixels: parts of 4 ranks have 6 rows, more than any halo
CLOSE = 1e-12  # sums of at most 3000 terms in float64 in another order, as in test_mpi_spatial


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Small integers in float64: all sums of their products are exact."""
    found = np.random.default_rng(seed).integers(-9, 10, shape)
    return torch.from_numpy(found.astype(np.float64))


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def grids(world: World) -> list[tuple[int, int]]:
    return [(r, world.size // r) for r in range(1, world.size + 1) if world.size % r == 0]


BOUNDARIES = ["zero", "wrap", "reflect", "symmetric", "edge", Constant(2), ("edge", "zero")]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_plans_of_halos_bring_what_windows_show(world: World, boundary: Any, kind: str) -> None:
    """And add what windows add, for windows beyond neighbours; in three calls, two at a time."""
    verdicts = []
    for procs in grids(world):
        layout = Layout.grid((9, 7), procs)
        (top, left), (bottom, right) = layout.owner(world.rank)
        box = Box((top - 2, left - 1), (bottom + 1, right + 3))
        plans = [WindowPlan(world, layout, box, boundary, halo_only=each) for each in (False, True)]
        windows, halos = plans
        x = integers(world.rank, *windows.owned.shape, 3).numpy()
        for call in range(3):
            shown = windows.exchange(x)
            cells = [shown[part.slices(box.start)].reshape(-1, 3) for part in halos.parts]
            want = np.concatenate(cells)
            given = x if kind == "numpy" else torch.from_numpy(x)
            handles = [halos.begin(given), halos.begin(given)]
            verdicts += [np.array_equal(each.finish(), want) for each in handles]
            y = integers(call, *want.shape).numpy()
            window, start = np.zeros_like(shown), 0
            for part in halos.parts:
                values = y[start : start + part.size]
                window[part.slices(box.start)] = values.reshape(*part.shape, 3)
                start += part.size
            sums = deepcopy(given)
            halos.accumulate(y if kind == "numpy" else torch.from_numpy(y), sums)
            verdicts.append(np.array_equal(sums, x + windows.accumulate(window)))
        for plan in plans:
            plan.free()
    together(world, *verdicts)


def test_plans_of_halos_refuse_what_they_cannot_do(world: World) -> None:
    layout = Layout.grid((9, 7), (world.size, 1))
    (top, _), (bottom, _) = layout.owner(world.rank)
    plan = WindowPlan(world, layout, Box((top - 1, 0), (bottom + 1, 7)), halo_only=True)
    y = np.ones(plan.shape)
    plan.accumulate(y, np.zeros(plan.owned.shape))
    for wrong, call in (
        (TypeError, lambda: plan.accumulate(y)),
        (ValueError, lambda: plan.accumulate(np.ones(3), np.zeros(plan.owned.shape))),
        (ValueError, plan.verify),
    ):
        with pytest.raises(wrong, match=r"of halos only|cells around"):
            call()


OPTIONS: list[dict[str, Any]] = [
    {"padding": 1},
    {"padding": 2, "kernel_size": 5, "bias": False},
    {"padding": "same", "dilation": 2, "groups": 2},
    {"padding": 1, "stride": 2},
    {"padding": (1, 0), "kernel_size": (3, 1), "stride": (1, 2), "padding_mode": "circular"},
    {"padding": 2, "dilation": 2, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_convolutions_with_halos_are_the_serial_ones_bit_for_bit(
    world: World, options: dict[str, Any]
) -> None:
    """Outputs, gradients of input and parameters: all arithmetic is exact."""
    layer = nn.Conv2d(2, 4, **{"kernel_size": 3, **options}).double()
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = integers(i, *parameter.shape)
    whole = integers(5, 2, 2, SIZE, SIZE).requires_grad_()
    y = layer(whole)
    slope = integers(6, *y.shape)
    y.backward(slope)
    want = [gradient(p).clone() for p in layer.parameters()]
    for procs in grids(world):
        grid = ImageGrid(world, procs)
        layer.zero_grad()
        net = partition(layer, (2, SIZE, SIZE), grid)
        assert net.padding is not None
        x = grid.cut(whole.detach()).clone().requires_grad_()
        out = net(x)
        out.backward(grid.cut(slope))
        sums = [sum(world.gather(gradient(p).numpy())) for p in layer.parameters()]
        together(
            world,
            torch.equal(out, grid.cut(y)),
            torch.equal(gradient(x), grid.cut(gradient(whole))),
            *(np.array_equal(a, b) for a, b in zip(sums, want, strict=True)),
        )


class Large(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the functions that return tensors of as many elements, but for views and empty ones."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.found = elements, list[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        name = function._schema.name.removeprefix("aten::")
        if not function.is_view and "empty" not in name and name != "detach":
            large = any(each.numel() >= self.elements for each in made)
            self.found += [name] if large else []
        return result


@contextmanager
def messages(world: World) -> Iterator[list[int]]:
    """Count the messages of all ranks in the block."""
    before, found = int(world.messages_sent.sum()), list[int]()
    yield found
    found += world.gather(int(world.messages_sent.sum()) - before)


# layer -> large functions of forward and backward, and messages to a neighbour or to each rank
COSTS: dict[str, tuple[nn.Module, list[str], list[str], str]] = {
    "3 x 3": (
        nn.Conv2d(4, 4, 3, padding=1),
        ["convolution"],
        ["convolution_backward"],
        "neighbours",
    ),
    "1 x 1": (nn.Conv2d(4, 4, 1), ["convolution"], ["convolution_backward"], "none"),
    "1 x 1, stride": (
        nn.Conv2d(4, 16, 1, 2), ["convolution"], ["convolution_backward"], "none"
    ),
    "batch norm": (
        nn.BatchNorm2d(4),
        ["native_batch_norm"],
        ["addcmul", "addcmul_"],
        "everyone",
    ),
    "group norm": (
        nn.GroupNorm(2, 4),
        ["native_batch_norm"],
        ["addcmul", "addcmul_"],
        "everyone",
    ),
    "pooling": (
        nn.MaxPool2d(2), [], ["max_pool2d_with_indices_backward"], "none"
    ),
    "transposed": (
        nn.ConvTranspose2d(4, 4, 2, 2), ["convolution"], ["convolution_backward"], "none"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_layers_copy_no_map_and_send_what_they_must(world: World, name: str) -> None:
    """Nothing of a map's size is written but by the kernels that plain torch needs too."""
    layer, forward, backward, whom = COSTS[name]
    grid = ImageGrid(world, (world.size, 1))
    model = nn.Sequential(nn.Conv2d(4, 4, 1), layer)  # a norm alone is not split
    split = list(partition(model, (4, SIZE, SIZE), grid).children())[1]
    x = torch.randn(2, 4, SIZE // world.size, SIZE).requires_grad_()
    near = (world.rank > 0) + (world.rank < world.size - 1)
    sent = {"none": 0, "neighbours": near, "everyone": world.size - 1}[whom]
    for _ in range(2):
        x.grad = None
        with messages(world) as found, Large(x.numel()) as large:
            y = split(x)
        assert (found[world.rank], large.found) == (sent, forward)
        slope = torch.randn_like(y)
        with messages(world) as found, Large(x.numel()) as large:
            torch.autograd.backward(y, slope, inputs=[x, *layer.parameters()])
        assert (found[world.rank], large.found) == (sent, backward)


def test_gradients_may_be_differentiated_again(world: World) -> None:
    """The gradient of a penalty on the images' gradient is that of the serial network."""
    torch.manual_seed(3)
    twice = nn.Conv2d(4, 4, 3, padding=1)  # the input of whose second use depends on its weights
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), twice, nn.Tanh(), twice,
        nn.Conv2d(4, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Tanh(), nn.Conv2d(2, 2, 1),
    ).double()  # fmt: skip
    whole, slope = integers(1, 2, 2, 12, 10) / 9, integers(2, 2, 2, 12, 10) / 9

    def penalised(net: nn.Module, x: torch.Tensor, slope: torch.Tensor) -> list[torch.Tensor]:
        net.zero_grad()
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad((net(x) * slope).sum(), x, create_graph=True)
        found.square().sum().backward()  # type: ignore[no-untyped-call]
        return [gradient(x), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]

    of_x, *want = penalised(model, whole, slope)
    largest = max(float(each.abs().max()) for each in want)
    for procs in grids(world):
        grid = ImageGrid(world, procs)
        net = partition(model, (2, 12, 10), grid)
        mine, *found = penalised(net, grid.cut(whole), grid.cut(slope))
        far = [np.abs(sum(world.gather(a.numpy())) - b.numpy()).max()
               for a, b in zip(found, want, strict=True)]  # fmt: skip
        near = (mine - grid.cut(of_x)).abs().max() <= CLOSE * of_x.abs().max()
        together(world, bool(near), max(far) <= CLOSE * largest)


def test_autocast_gives_its_dtype_and_gradients_of_float32(world: World) -> None:
    """Within 2**-6 of the largest output: a value has four roundings to bfloat16 of 2**-9 each."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
    grid = ImageGrid(world, (world.size, 1))
    net, whole = partition(model, (2, SIZE, SIZE), grid), torch.randn(2, 2, SIZE, SIZE)
    want = grid.cut(model(whole))
    with torch.autocast("cpu", torch.bfloat16):
        y = net(grid.cut(whole))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(gradient(p).dtype == torch.float32 for p in net.parameters())
    assert (y.float() - want).abs().max() <= 2.0**-6 * want.abs().max()
    precise = partition(model[:1].double(), (2, SIZE, SIZE), grid)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert precise(grid.cut(whole.double())).dtype == torch.float64


@pytest.mark.parametrize("affine", [False, True])
def test_group_norms_take_a_batch_without_samples(world: World, affine: bool) -> None:
    """As torch's own, unlike batch norms: no values, and gradients of 0."""
    norm = nn.GroupNorm(2, 4, affine=affine)
    net = partition(nn.Sequential(norm), (4, SIZE, SIZE), ImageGrid(world, (world.size, 1)))
    x = torch.zeros(0, 4, SIZE // world.size, SIZE, requires_grad=True)
    y = net(x)
    y.sum().backward()
    parts = [gradient(x), *(gradient(p) for p in net.parameters())]
    together(world, y.shape == x.shape, all(not part.any() for part in parts))


def test_the_benchmark_has_a_line_for_each_network(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, size = argparse.ArgumentParser(), 8 * world.size
    bench.add_arguments(parser)
    options = ["--sizes", str(size), "--width", "2", "--repeats", "1", "--warmup", "0"]
    bench.run(parser.parse_args(options), world)
    lines = capsys.readouterr().out.splitlines()
    found = [line.split()[0] for line in lines if f"{size} x {size}" in line]
    assert found == (list(bench.NETWORKS) if world.rank == 0 else [])
    for wrong, words in (("--grid", "9x9: must be ROWSx"), ("--sizes", "6: parts must have")):
        with pytest.raises(UserError, match=f"{wrong} {words}"):
            bench.run(parser.parse_args([wrong, words.partition(":")[0]]), world)
