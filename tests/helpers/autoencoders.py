"""The autoencoder again, serially and block by block, written from its formulas."""

import torch

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.lab.autoencoder.job import Geometry, Layer
from cpdhpc.lab.autoencoder.layer import MacroLayer
from cpdhpc.world.ranks import Ranks

LAYER = Layer(field=4, step=2, maps=3, pool=2, pool_step=1, contrast=3, sparsity=0.3)
GEOMETRY = Geometry(LAYER, (12, 10), channels=2)
SMALL = Geometry(LAYER, (6, 7), channels=2)  # 2 x 2 blocks and one pool: not for every rank
BATCH = 3


def images(batch=BATCH, seed=0, of=GEOMETRY):
    generator = torch.Generator().manual_seed(seed)
    shape = *of.image, of.channels, batch
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def window_of(values, i, j, size, step):
    return values[i * step : i * step + size, j * step : j * step + size]


def serial_objective(weight, x, of=GEOMETRY):
    """The objective of all images; weight: [blocks, blocks, maps, inputs]."""
    layer, (high, wide) = of.layer, of.blocks
    again, responses = torch.zeros_like(x), {}
    for i in range(high):
        for j in range(wide):
            rows = weight[i, j] / (weight[i, j] ** 2).sum(1, keepdim=True) ** 0.5
            field = window_of(x, i, j, layer.field, layer.step)
            responses[i, j] = rows @ field.reshape(of.inputs, -1)
            back = (rows.T @ responses[i, j]).reshape(field.shape)
            place = torch.zeros_like(x)
            window_of(place, i, j, layer.field, layer.step)[...] = back
            again = again + place
    pooled = serial_pools(responses, of)
    error = ((of.scale * again - x) ** 2).sum()
    return (error + layer.sparsity * pooled.sum()) / x.shape[-1], pooled


def serial_steps(weight, batches, rate, momentum, of=GEOMETRY):
    """Filters and momentum after steps of gradient descent, each to filters of length 1."""
    moving = torch.zeros_like(weight)
    for x in batches:
        weight = weight.clone().requires_grad_()
        (slope,) = torch.autograd.grad(serial_objective(weight, x, of)[0], weight)
        moving = momentum * moving + slope
        weight = weight.detach() - rate * moving
        weight = weight / (weight**2).sum(-1, keepdim=True) ** 0.5
    return weight, moving


def serial_pools(responses, of):
    layer, (high, wide) = of.layer, of.pools
    rows = []
    for i in range(high):
        for j in range(wide):
            near = [
                responses[i * layer.pool_step + a, j * layer.pool_step + b] ** 2
                for a in range(layer.pool)
                for b in range(layer.pool)
            ]
            rows.append((layer.epsilon + torch.stack(near).sum(0)) ** 0.5)
    return torch.stack(rows).reshape(high, wide, layer.maps, -1)


def serial_contrast(pooled, of=GEOMETRY):
    """Subtractive and divisive normalisation, pool by pool, with indices reflected by hand."""
    size, (high, wide) = of.layer.contrast, of.pools
    half = size // 2
    bell = torch.exp(-(((torch.arange(size).double() - half) / (size / 4)) ** 2) / 2)
    bell = torch.outer(bell, bell) / bell.sum() ** 2

    def reflected(i, n):
        return -1 - i if i < 0 else 2 * n - 1 - i if i >= n else i

    def mean(values):
        rows = [
            sum(
                bell[a, b]
                * values[reflected(i + a - half, high), reflected(j + b - half, wide)].mean(0)
                for a in range(size)
                for b in range(size)
            )
            for i in range(high)
            for j in range(wide)
        ]
        return torch.stack(rows).reshape(high, wide, 1, -1)

    centred = pooled - mean(pooled)
    deviation = mean(centred**2) ** 0.5
    return centred / torch.where(deviation > of.layer.floor, deviation, of.layer.floor)


def make(world: Ranks, procs, *, cells=None, of=GEOMETRY, dtype=torch.float64):
    """A layer whose cells are dealt otherwise than its blocks: in strips along the second axis."""
    cells = cells or Layout.grid(of.image, (1, world.processes))
    return MacroLayer(world, of, cells, procs, seed=5, dtype=dtype)


def part(values, box: Box):
    """The cells of a box, for a tensor of all cells."""
    return values[box.slices((0, 0))].clone()


def whole_weight(of=GEOMETRY):
    from cpdhpc.world.ranks import Loopback

    alone = make(Loopback(), (1, 1), of=of)
    return alone.weight.detach().reshape(*of.blocks, of.layer.maps, of.inputs).clone()
