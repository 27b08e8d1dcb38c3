"""The autoencoder split over ranks against the serial one: loss, outputs and all gradients."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))

import autoencoders as serial  # noqa: E402

from cpdhpc.darray import Layout  # noqa: E402

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
