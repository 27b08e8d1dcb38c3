"""Gradients through exchanges over ranks: checked by differences, doubly, and where graphs differ.

A function of all ranks' tensors is differentiated on every rank: rank r's loss is its part of the
sum, and the gradient of the whole sum reaches each rank by the transposes.
"""

import pytest

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import Constant

torch = pytest.importorskip("torch")

from cpdhpc.torch.autograd import accumulate, exchange, join  # noqa: E402

SHAPE = (5, 4)
STEP = 1e-6  # of central differences of polynomials of degree 3, float64
# Their error is STEP**2 / 6 of a third derivative plus rounding, 2**-53 / STEP of the sum's parts:
# 1e-10 times sums of some hundred terms below 10.
CLOSE = {"rel": 1e-6, "abs": 1e-5}


def plan_of(world, boundary):
    """Uneven strips along the first axis, windows two cells wider; the last rank has no cells."""
    owners = max(1, world.size - 1)
    whole = Layout.grid(SHAPE, (owners, 1)).owners
    boxes = [*whole, Box((0, 0), (0, 0))][: world.size]
    layout = Layout.boxes(SHAPE, boxes)
    start, stop = layout.owner(world.rank)
    window = Box((start[0] - 2, -1), (stop[0] + 1, SHAPE[1] + 2))
    return WindowPlan(world, layout, window, boundary, name="strips")


def tensor(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def summed(world, value):
    return sum(world.gather(value.item()))


def check_gradient(world, function, x, gradient):
    """Compare with central differences of the sum over ranks, along random directions.

    As torch.autograd.gradcheck in its fast mode, which knows of one rank only.
    """
    for seed in range(3):
        along = tensor(x.shape, 1000 * seed + world.rank).detach()
        up, down = (
            summed(world, function((x.detach() + sign * STEP * along).requires_grad_()))
            for sign in (1, -1)
        )
        assert summed(world, (gradient * along).sum()) == pytest.approx(
            (up - down) / (2 * STEP), **CLOSE
        )


@pytest.mark.parametrize("boundary", ["zero", "wrap", "edge", Constant(2.5), ("reflect", "zero")])
@pytest.mark.parametrize("operation", ["exchange", "accumulate"])
def test_gradients_and_their_gradients(world, operation, boundary):
    plan = plan_of(world, boundary)
    apply, box, other = {
        "exchange": (exchange, plan.owned, plan.window),
        "accumulate": (accumulate, plan.window, plan.owned),
    }[operation]
    x, w = tensor(box.shape, world.rank), tensor(other.shape, 50 + world.rank).detach()
    v = tensor(box.shape, 90 + world.rank).detach()

    def value(x):
        return (w * apply(x, plan) ** 3).sum()

    def slope(x):
        (gradient,) = torch.autograd.grad(value(x), x, create_graph=True)
        return (v * gradient).sum()

    check_gradient(world, value, x, *torch.autograd.grad(value(x), x))
    check_gradient(world, slope, x, *torch.autograd.grad(slope(x), x))


def test_gradient_of_stride_zero_is_read_and_not_written(world):
    plan = plan_of(world, "wrap")
    x = tensor((*plan.owned.shape, 3), world.rank)
    exchange(x, plan).sum().backward()  # autograd gives ones with strides of 0
    ones = torch.ones((*plan.window.shape, 3), dtype=torch.float64)
    assert torch.equal(x.grad, plan.accumulate(ones))
    given = torch.ones(1, dtype=torch.float64).expand(ones.shape)
    (again,) = torch.autograd.grad(exchange(x, plan), x, given)
    assert torch.equal(again, x.grad) and bool((given == 1).all())


def test_both_are_the_plans(world):
    plan = plan_of(world, Constant(7))
    x, y = tensor(plan.owned.shape, 1), tensor(plan.window.shape, 2)
    assert torch.equal(exchange(x, plan), plan.exchange(x.detach()))
    assert torch.equal(accumulate(y, plan), plan.accumulate(y.detach()))
    with torch.no_grad():
        assert not exchange(x, plan).requires_grad


def test_join_lets_a_rank_ignore_what_it_exchanged(world):
    plan = plan_of(world, "zero")
    x = tensor(plan.owned.shape, world.rank)
    y = exchange(x, plan)
    last = world.rank == world.size - 1
    loss = tensor((1,), 3).sum() if last else (y**2).sum()
    joined = join(loss, y) if last else loss
    assert torch.equal(joined, loss)
    joined.backward()
    seen = torch.zeros_like(y) if last else 2 * y.detach()
    assert torch.equal(x.grad, plan.accumulate(seen))


def test_join_takes_whatever_the_tensors_hold():
    loss, unfit = tensor((1,), 0).sum(), tensor((3,), 1)
    joined = join(loss, unfit / 0, unfit.detach())
    assert torch.equal(joined, loss)
    unused = tensor((2,), 2)
    (gradient,) = torch.autograd.grad(join(loss, unused), unused, create_graph=True)
    assert torch.equal(gradient, torch.zeros(2, dtype=torch.float64))
