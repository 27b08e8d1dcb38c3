"""The autoencoder split over ranks against the serial one: loss, outputs and all gradients."""

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))

import autoencoders as serial  # noqa: E402

from cpdhpc.bench.layer import layer_costs  # noqa: E402
from cpdhpc.comm import Loopback  # noqa: E402
from cpdhpc.darray import Layout  # noqa: E402
from cpdhpc.train.autoencoder.files import resume, save  # noqa: E402
from cpdhpc.train.autoencoder.job import Autoencoder, procs_of  # noqa: E402
from cpdhpc.train.autoencoder.training import Stack  # noqa: E402
from cpdhpc.train.autoencoder.whole import collect  # noqa: E402

pytestmark = pytest.mark.mpi
torch.set_num_threads(1)  # ranks share cores here
# Sums here have up to 60 terms of size 10, added in another order: 60 * 2**-53 * 10 < 1e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def grids(n):
    return [(p, n // p) for p in range(1, n + 1) if n % p == 0]


def cases(world, of):
    """Layers whose cells are dealt in strips, in a grid, or all to the last rank."""
    strips, grid = (
        Layout.grid(of.image, procs) for procs in (grids(world.size)[0], grids(world.size)[-1])
    )
    for cells in (strips, grid, Layout.at(of.image, world.size - 1, world.size)):
        for procs in grids(world.size):
            yield serial.make(world, procs, cells=cells, of=of)


GEOMETRIES = pytest.mark.parametrize("of", [serial.GEOMETRY, serial.SMALL], ids=["large", "small"])


@GEOMETRIES
def test_objective_and_gradients_equal_the_serial_ones(world, of):
    x, weight = serial.images(of=of).requires_grad_(), serial.whole_weight(of).requires_grad_()
    loss, pooled = serial.serial_objective(weight, x, of)
    of_weight, of_x = torch.autograd.grad(loss, (weight, x))
    for layer in cases(world, of):
        own = serial.part(x.detach(), layer.cells.owner(world.rank)).requires_grad_()
        terms, got = layer.objective(own)
        terms.loss.backward()
        assert sum(world.gather(terms.loss.item())) == pytest.approx(loss.item(), rel=1e-12)
        pools = serial.part(pooled.detach(), layer.pools.owner(world.rank))
        torch.testing.assert_close(got.detach(), pools, **CLOSE)
        check_gradients(world, layer, own, of_weight, of_x)


@GEOMETRIES
def test_normalised_outputs_and_gradients_equal_the_serial_ones(world, of):
    x = serial.images(seed=1, of=of).requires_grad_()
    weight = serial.whole_weight(of).requires_grad_()
    want = serial.serial_contrast(serial.serial_objective(weight, x, of)[1], of)
    probe = torch.cos(torch.arange(want.numel(), dtype=torch.float64)).reshape(want.shape)
    of_weight, of_x = torch.autograd.grad((want * probe).sum(), (weight, x))
    for layer in cases(world, of):
        own = serial.part(x.detach(), layer.cells.owner(world.rank)).requires_grad_()
        got, pools = layer(own), layer.pools.owner(world.rank)
        torch.testing.assert_close(got.detach(), serial.part(want.detach(), pools), **CLOSE)
        (got * serial.part(probe, pools)).sum().backward()
        check_gradients(world, layer, own, of_weight, of_x)


def check_gradients(world, layer, own, of_weight, of_x):
    block = serial.part(of_weight, layer.blocks.owner(world.rank)).flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, block, **CLOSE)
    cells = serial.part(of_x, layer.cells.owner(world.rank))
    torch.testing.assert_close(own.grad, cells, **CLOSE)


def job(**train):
    layers = [
        {"field": 4, "step": 2, "maps": 3, "pool": 2, "contrast": 3, "sparsity": 0.3},
        {"field": 2, "maps": 2, "pool": 2, "contrast": 3},
    ]
    data = {"name": "digits", "tile": 2, "size": 14}
    train = {"iterations": 6, "batch": 4, "learning_rate": 0.01, "dtype": "float64", **train}
    return Autoencoder.model_validate({"name": "x", "data": data, "layer": layers, "train": train})


def curve(world, of):
    stack, steps = Stack(of, world, of.data.load()), []
    while not stack.done:
        steps.append(stack.step(stack.batch()))
    weights = [collect(world, layer, layer.weight) for layer in stack.layers]
    return steps, weights


def test_training_is_that_of_one_rank(world):
    """Both layers: all losses, and the weights at the end."""
    steps, weights = curve(world, job())
    alone, same = curve(Loopback(), job(cell_procs=[1, 1], block_procs=[1, 1]))
    for one, other in zip(steps, alone, strict=True):
        assert one[:2] == other[:2]
        assert one[2:6] == pytest.approx(other[2:6], rel=1e-12)
    assert steps[5].error < steps[0].error and steps[11].error < steps[6].error
    if world.rank == 0:
        for one, other in zip(weights, same, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)  # rows of length 1


def test_bytes_are_those_that_bench_layer_counts(world):
    of = job(dtype="float32")
    stack = Stack(of, world, of.data.load())
    step, layer = stack.step(stack.batch()), stack.layers[0]
    procs = procs_of(None, world.size, "block_procs")
    counted = layer_costs(layer.geometry, procs, of.train.batch)
    assert step.sent_bytes == max(cost.sent_bytes for cost in counted)
    assert layer.weight.numel() == counted[world.rank].parameters


def test_checkpoints_are_taken_over_by_other_ranks(world, tmp_path_factory):
    path = world.gather(str(tmp_path_factory.mktemp("run")))[0]
    of, path = job(), Path(path) / "x.checkpoint.h5"
    stack = Stack(of, world, of.data.load())
    for _ in range(8):
        stack.step(stack.batch())
    save(path, stack)
    alone = Stack(job(cell_procs=None), Loopback(), of.data.load())
    world.barrier()
    assert resume(path, alone) and (alone.layer, alone.iteration) == (1, 2)
    again = Stack(of, world, of.data.load())
    assert resume(path, again)
    assert torch.equal(again.layers[1].weight, stack.layers[1].weight)
    whole = collect(world, stack.layers[0], stack.layers[0].weight)
    if world.rank == 0:
        mine = alone.layers[0].weight.detach().numpy().reshape(whole.shape)
        np.testing.assert_array_equal(mine, whole)
    one, other = stack.step(stack.batch()), again.step(again.batch())
    assert one[:6] == other[:6]
    world.barrier()  # before files go
