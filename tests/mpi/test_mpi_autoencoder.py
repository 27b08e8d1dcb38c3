"""The autoencoder split over ranks against the serial one: loss, outputs and all gradients."""

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))

import autoencoders as serial  # noqa: E402

from cpdhpc.config import UserError  # noqa: E402
from cpdhpc.darray.layout import Layout  # noqa: E402
from cpdhpc.lab.autoencoder import blocks, passes, probe  # noqa: E402
from cpdhpc.lab.autoencoder import job as geometry  # noqa: E402
from cpdhpc.lab.autoencoder.command import shown  # noqa: E402
from cpdhpc.lab.autoencoder.descent import Descent  # noqa: E402
from cpdhpc.lab.autoencoder.job import Autoencoder, procs_of  # noqa: E402
from cpdhpc.lab.autoencoder.training import Stack, resume, save  # noqa: E402
from cpdhpc.lab.bench.layer import layer_costs  # noqa: E402
from cpdhpc.world import files  # noqa: E402
from cpdhpc.world.ranks import Loopback  # noqa: E402

torch.set_num_threads(1)  # ranks share cores here
# Sums here have up to 60 terms of size 10, added in another order: 60 * 2**-53 * 10 < 1e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
RATE, MOMENTUM = 0.01, 0.9


def grids(n):
    return [(p, n // p) for p in range(1, n + 1) if n % p == 0]


def cases(world, of):
    """Layers whose cells are dealt in strips, in a grid, or all to the last rank."""
    strips, grid = (
        Layout.grid(of.image, procs)
        for procs in (grids(world.processes)[0], grids(world.processes)[-1])
    )
    for cells in (strips, grid, Layout.at(of.image, world.processes - 1, world.processes)):
        for procs in grids(world.processes):
            yield serial.make(world, procs, cells=cells, of=of)


GEOMETRIES = pytest.mark.parametrize("of", [serial.GEOMETRY, serial.SMALL], ids=["large", "small"])


@GEOMETRIES
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("bytes_", [1, 2**21], ids=["blocks", "parts"])
def test_objective_and_step_equal_the_serial_ones(world, of, compiled, bytes_, monkeypatch):
    """Two steps from the same filters: the first one's gradient is the momentum."""
    monkeypatch.setattr(passes, "compiled", lambda like: compiled)
    monkeypatch.setattr(blocks, "CPU_BYTES", bytes_)
    x, weight = serial.images(of=of), serial.whole_weight(of)
    loss, pooled = serial.serial_objective(weight, x, of)
    want = serial.serial_steps(weight, [x, x / 2], RATE, MOMENTUM, of)
    for layer in cases(world, of):
        own = serial.part(x, layer.cells.owner(world.process))
        iterations = Descent(layer, serial.BATCH)
        terms, got = iterations.objective(own)
        assert sum(world.gather(terms.loss.item())) == pytest.approx(loss.item(), rel=1e-12)
        pools = serial.part(pooled, layer.pools.owner(world.process))
        torch.testing.assert_close(got, pools, **CLOSE)
        again = iterations.step(own, RATE, MOMENTUM)
        for one, other in zip(again, terms, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
        iterations.step(own / 2, RATE, MOMENTUM)
        blocks_ = layer.blocks.owner(world.process)
        for values, wanted in zip((layer.weight, layer.momentum), want, strict=True):
            torch.testing.assert_close(values, serial.part(wanted, blocks_).flatten(0, 1), **CLOSE)


@GEOMETRIES
def test_normalised_outputs_and_gradients_equal_the_serial_ones(world, of):
    x, weight = serial.images(seed=1, of=of).requires_grad_(), serial.whole_weight(of)
    want = serial.serial_contrast(serial.serial_objective(weight, x, of)[1], of)
    probe = torch.cos(torch.arange(want.numel(), dtype=torch.float64)).reshape(want.shape)
    (of_x,) = torch.autograd.grad((want * probe).sum(), x)
    for layer in cases(world, of):
        own = serial.part(x.detach(), layer.cells.owner(world.process)).requires_grad_()
        got, pools = layer(own), layer.pools.owner(world.process)
        torch.testing.assert_close(got.detach(), serial.part(want.detach(), pools), **CLOSE)
        (got * serial.part(probe, pools)).sum().backward()
        cells = serial.part(of_x, layer.cells.owner(world.process))
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
    weights = [layer.over_blocks(layer.weight).gather(0) for layer in stack.layers]
    return steps, weights


def test_training_is_that_of_one_rank(world):
    """Both layers: all losses, and the weights at the end."""
    steps, weights = curve(world, job())
    of_one = job(cell_procs=[1, 1], block_procs=[1, 1])
    alone, same = world.gather(curve(Loopback(), of_one) if world.process == 0 else None)[0]
    for one, other in zip(steps, alone, strict=True):
        assert one[:2] == other[:2]
        assert one[2:6] == pytest.approx(other[2:6], rel=1e-12)
    assert steps[5].error < steps[0].error and steps[11].error < steps[6].error
    if world.process == 0:
        for one, other in zip(weights, same, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)  # rows of length 1


def test_bytes_are_those_that_bench_layer_counts(world):
    of = job(dtype="float32")
    stack = Stack(of, world, of.data.load())
    step, layer = stack.step(stack.batch()), stack.layers[0]
    procs = procs_of(None, world.processes, "block_procs")
    counted = layer_costs(layer.geometry, procs, of.train.batch)
    assert step.sent_bytes == max(cost.sent_bytes for cost in counted)
    assert layer.weight.numel() == counted[world.process].parameters


def trained(of, world, iterations):
    stack = Stack(of, world, of.data.load())
    return stack, [stack.step(stack.batch()) for _ in range(iterations)]


def shared_path(world, tmp_path):
    return Path(world.gather(str(tmp_path))[0]) / "x.checkpoint.h5"


def test_checkpoints_are_taken_over_by_other_ranks(world, tmp_path):
    """By one rank from all, and by all in another grid, with momentum, to the last bit."""
    of, path = job(cell_procs=[world.processes, 1]), shared_path(world, tmp_path)
    stack, _ = trained(of, world, 8)
    save(path, stack)
    alone = Stack(job(), Loopback(), of.data.load())
    assert resume(path, alone) and (alone.layer, alone.iteration) == (1, 2)
    other = job(cell_procs=[1, world.processes], block_procs=[1, world.processes])
    again = Stack(other, world, of.data.load())
    assert resume(path, again)
    same = [
        np.array_equal(one, array[layout.owner(world.process).slices((0, 0))])
        for (one, layout), array in zip(state(again), whole_state(alone), strict=True)
    ]
    assert world.gather(same) == [[True] * 4] * world.processes
    one, two = stack.step(stack.batch()), again.step(again.batch())
    assert one[:2] == two[:2] and one[2:6] == pytest.approx(two[2:6], rel=1e-12)
    world.barrier()  # before files go


def state(stack):
    """Weights and momentum of both layers, on this rank, each with its layout."""
    found = []
    for layer in stack.layers:
        for values in (layer.weight, layer.momentum):
            array = layer.over_blocks(values)
            found.append((array.local, array.layout))
    return found


def whole_state(alone):
    return [local for local, _ in state(alone)]


def test_interrupted_checkpoints_leave_the_old_one(world, tmp_path, monkeypatch):
    """One rank cannot write: an error on all of them, and the file is that of before."""
    of, path = job(), shared_path(world, tmp_path)
    stack, _ = trained(of, world, 2)
    save(path, stack)
    world.barrier()
    before, real = path.read_bytes(), files.write_box

    def full(*arguments):
        problem = real(*arguments)
        return OSError("no space left") if world.process == world.processes - 1 else problem

    stack.step(stack.batch())
    monkeypatch.setattr("cpdhpc.world.files.write_box", full)
    with pytest.raises(UserError, match="no space left"):
        save(path, stack)
    monkeypatch.undo()
    unchanged = path.read_bytes() == before, list(path.parent.iterdir()) == [path]
    assert world.gather(unchanged) == [(True, True)] * world.processes
    save(path, stack)
    assert world.gather(path.read_bytes() != before) == [True] * world.processes
    world.barrier()


def test_pictures_show_few_blocks_of_many(world):
    of = geometry.Geometry(geometry.Layer(field=2, maps=70), (24, 13), 1)
    layer = serial.make(world, grids(world.processes)[-1], of=of)
    weight = layer.over_blocks(layer.weight).gather()
    rows, columns = np.linspace(0, 22, 10).round().astype(int), [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]
    found = shown(layer)
    same = np.array_equal(found, weight[rows][:, columns, :64])
    assert world.gather(same) == [True] * world.processes


def test_probing_finds_the_same_on_any_ranks(world, monkeypatch):
    """Accuracies and neurons, stimuli, errors; in float64, as training above."""
    monkeypatch.setattr(probe, "STEPS", 4)
    here = []
    pixels, labels, white = probe.read(None, None)
    for ranks, procs in ((world, {}), (Loopback(), {"cell_procs": [1, 1], "block_procs": [1, 1]})):
        stack, _ = trained(job(**procs), ranks, 8)
        labelled = probe.prepared(stack.images, pixels[:60], labels[:60], white)
        answers = probe.responses(stack, labelled.images)
        start = stack.layers[-1].pools.owner(ranks.process).start
        best = probe.selectivity(ranks, answers[-1].numpy(), start, labelled)
        neurons = [best[concept].neuron for concept in (0, 1)]
        found = probe.stimuli(stack, 1, neurons, [1, -1])
        here.append((best, found, probe.errors(stack, labelled.images)))
    (best, found, errors), (same, other, those) = here
    assert list(best) == list(range(10))
    verdicts = [
        all(best[c].neuron == same[c].neuron for c in best),
        all(abs(best[c].judged - same[c].judged) < 1e-12 for c in best),
        # A step moves by half of a gradient at most, which noise of 2**-53 turns by its curvature,
        # below 1e2 on images of length 14: 4 steps make 1e8 of it at the very most.
        np.allclose(found[0], other[0], rtol=0, atol=1e-8),
        np.allclose(found[1], other[1], rtol=1e-8),
        np.allclose(errors, those, rtol=1e-12),
        found[1][0] > 0,
    ]
    assert world.gather(verdicts) == [[True] * 6] * world.processes
