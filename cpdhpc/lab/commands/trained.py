"""autoencoder probe and influence: questions that are answered by trained models."""

from __future__ import annotations

import argparse
from inspect import getdoc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import store
from ...compress.base import Array
from ...config import ConfigError
from ...ops import set_kernel_threads
from ...store import Variable
from ...world.ranks import Ranks
from .. import influence
from ..settings import add_settings, options
from ..train.progress import Display

SHOWN = 5  # images beside each optimal stimulus
MOST_STIMULI = 16  # of a layer in the picture


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = getdoc(run_probe)
    add = options(parser)
    add("file FILE.toml", "the job that was trained", Path)
    add("--out DIR", "folder of the training (default: results/NAME)", Path)
    add_settings(parser, "the values that training was given; may be repeated")
    add(
        "--images FILE",
        "HDF5 file with datasets images and labels, or .npy (default: scikit-learn's digits)",
        Path,
    )
    add("--labels FILE.npy", "labels of images in a .npy file", Path)
    add("--features FILE.h5", "write the responses of all layers to the images", Path)
    add("--png FILE.png", "draw stimuli, images and accuracies", Path)


class ProbeResult(NamedTuple):
    """The best neurons for each concept by layer, and the errors by layer."""

    layers: list[dict[int, Any]]
    random: list[dict[int, Any]]
    pixels: dict[int, Any]
    errors: list[float] | None


def run_probe(arguments: argparse.Namespace, world: Ranks) -> int:
    """Find what neurons of a trained autoencoder respond to.

    Reads the checkpoint of a training in DIR, on any number of ranks. For each concept, a label of
    images, it finds in each layer the neuron whose response separates the concept best from the
    rest by a threshold. The neuron is chosen on one half of the images and judged on the other.
    Accuracy is the mean of that on the concept and that on the rest, so a guess has 50 %. The table
    also has the best neuron of the same layers with random filters, the best single pixel, and the
    error of reconstructions of images that training did not see (data.held_out). The picture has
    the images that excite neurons most, by gradient ascent and among the images of --images.
    """
    from ..autoencoder import probe
    from ..autoencoder.job import load
    from ..autoencoder.training import Stack, resume, set_process
    from ..train.checkpoint import Files

    png = arguments.png

    def checked() -> Any:
        job = load(arguments.file, arguments.set)
        pixels = probe.read(arguments.images, arguments.labels)
        return job, job.data.load(), pixels

    job, images, pixels = world.agreed(checked, "probe")
    directory = arguments.out or Path("results") / job.name
    set_process(world, job.train)
    stack, untrained = Stack(job, world, images), Stack(job, world, images)
    checkpoint = Files.called(directory, job.name).checkpoint
    if not resume(checkpoint, stack):
        raise ConfigError(f"{checkpoint}: is missing: train first, or use --out DIR")
    labelled = world.agreed(lambda: probe.prepared(images, *pixels), "probe")
    answers = probe.responses(stack, labelled.images)
    found = _probed(world, (stack, answers), untrained, labelled)
    if world.rank == 0:
        print(table(found))
    result = directory / f"{job.name}.probe.h5"
    world.on_first(lambda: _write(result, found, job.toml()), "probe")
    if arguments.features is not None:
        export(world, arguments.features, stack, answers, labelled.labels)
    if png is not None:
        _draw(world, png, stack, found, labelled, answers)
    if world.rank == 0:
        print(f"record: {result}")
    return 0


def _probed(world: Ranks, trained: tuple[Any, Any], untrained: Any, labelled: Any) -> ProbeResult:
    """What neurons, those of random filters, and pixels respond to.

    trained: the trained layers, and their responses to the labelled images
    """
    from ...ops.tensors import values_of
    from ..autoencoder import probe

    stack, answers = trained

    def by_layer(responses: Any) -> list[Any]:
        starts = (layer.pools.owner(world.rank).start for layer in stack.layers)
        return [
            probe.selectivity(world, y.numpy(), start, labelled)
            for y, start in zip(responses, starts, strict=True)
        ]

    pixels, first = values_of(stack.own(labelled.images)), stack.cells.owner(world.rank).start
    return ProbeResult(
        by_layer(answers),
        by_layer(probe.responses(untrained, labelled.images)),
        probe.selectivity(world, pixels, first, labelled),
        _held_out(stack) if stack.job.data.held_out else None,
    )


def _held_out(stack: Any) -> list[float]:
    """Return the error of each layer on squares of images that training did not see. Collective."""
    from ..autoencoder import probe

    images = stack.world.agreed(lambda: stack.job.data.load(held_out=True), "probe")
    squares = [images.batch(stack.job.train.batch, stack.job.train.seed, i) for i in range(4)]
    return probe.errors(stack, np.concatenate(squares, axis=3))


def table(found: ProbeResult) -> str:
    """Return the accuracies in percent, a line for each concept, and their means."""
    names = [f"layer {i}" for i in range(len(found.layers))]
    heads = ["concept", "pixel", *(f"{name}{kind}" for name in names for kind in ("", " random"))]
    lines = [" ".join(f"{head:>14}" for head in heads)]
    columns = [found.pixels]
    for trained, random in zip(found.layers, found.random, strict=True):
        columns += [trained, random]
    for concept in found.pixels:
        values = [100 * column[concept].judged for column in columns]
        lines.append(" ".join([f"{concept:>14}", *(f"{value:>14.1f}" for value in values)]))
    means = [100 * np.mean([each.judged for each in column.values()]) for column in columns]
    lines.append(" ".join([f"{'mean':>14}", *(f"{value:>14.1f}" for value in means)]))
    lines.append("accuracy of the best neuron in %, judged on images that did not choose it; "
                 "a guess: 50")  # fmt: skip
    for number, error in enumerate(found.errors or ()):
        lines.append(f"layer {number}: error of held-out images {error:.4f} of the energy")
    return "\n".join(lines)


def _write(path: Path, found: ProbeResult, toml: str) -> None:
    """Write the figures."""
    concepts = list(found.pixels)

    def judged(layers: list[dict[int, Any]]) -> Array:
        return np.array([[each[concept].judged for concept in concepts] for each in layers])

    axes, meaning = ("layer", "concept"), "accuracy of the best neuron, judged on other images"
    variables = {
        "layer": Variable(("layer",), np.arange(len(found.layers)), "layer"),
        "concept": Variable(("concept",), np.array(concepts), "label"),
        "accuracy": Variable(axes, judged(found.layers), meaning),
        "random": Variable(axes, judged(found.random), meaning + "; with random filters"),
        "pixel": Variable(("concept",), judged([found.pixels])[0], meaning + "; of single pixels"),
    }
    if found.errors is not None:
        error = "error of held-out images, of the energy"
        variables["held_out_error"] = Variable(("layer",), np.array(found.errors), error)
    store.write(path, {"selectivity": variables}, {"kind": "autoencoder probe", "toml": toml})


def export(world: Ranks, path: Path, stack: Any, answers: list[Any], labels: Array) -> None:
    """Write layerN/features [rows, columns, maps, images] and labels; each rank writes its pools.

    Collective. Raises UserError on all ranks.
    """
    from ...darray.array import save_all
    from ...darray.layout import Layout

    arrays = {
        f"layer{number}/features": (layer.pools, np.ascontiguousarray(y.numpy()))
        for number, (layer, y) in enumerate(zip(stack.layers, answers, strict=True))
    }
    first = Layout.at(labels.shape, 0, world.size)
    arrays["labels"] = first, labels if world.rank == 0 else labels[:0]
    attributes = {"kind": "autoencoder features", "toml": stack.job.toml()}
    save_all(world, path, arrays, attributes)


def _draw(
    world: Ranks, path: Path, stack: Any, found: ProbeResult, labelled: Any, answers: list[Any]
) -> None:
    """Draw stimuli, the images that excite most, and accuracies. Collective."""
    from ..autoencoder import probe

    best = found.layers[-1]
    neurons, signs = [each.neuron for each in best.values()], [each.sign for each in best.values()]
    optimal, _ = probe.stimuli(stack, len(stack.layers) - 1, neurons, signs)
    layers = []
    for number, layer in enumerate(stack.layers):
        rows, columns = layer.geometry.pools
        maps = np.linspace(0, layer.geometry.layer.maps - 1, MOST_STIMULI).round().astype(int)
        middle = [(rows // 2, columns // 2, int(i)) for i in dict.fromkeys(maps.tolist())]
        layers.append(probe.stimuli(stack, number, middle, [1] * len(middle))[0])
    top = _most_exciting(world, stack.layers[-1].pools, answers[-1].numpy(), best)
    world.on_first(lambda: draw(path, found, optimal, labelled.images, top, layers), "picture")


def _most_exciting(
    world: Ranks, pools: Any, values: Array, best: dict[int, Any]
) -> dict[int, list[int]]:
    """Return the images to which the best neurons respond most, by concept. Collective."""
    (top, left), (bottom, right) = pools.owner(world.rank)
    mine = {}
    for concept, each in best.items():
        i, j, k = each.neuron
        if top <= i < bottom and left <= j < right:
            order = np.argsort(-each.sign * values[i - top, j - left, k], kind="stable")
            mine[concept] = order[:SHOWN].tolist()
    return {concept: order for part in world.gather(mine) for concept, order in part.items()}


def draw(
    path: Path,
    found: ProbeResult,
    optimal: Array,
    images: Array,
    top: dict[int, list[int]],
    layers: list[Array],
) -> None:
    """Write the picture. Raises StoreError if it cannot be written."""
    from matplotlib.figure import Figure

    from ..autoencoder.command import grey, tiled

    concepts = list(found.pixels)
    figure = Figure(figsize=(14, 8), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, squeeze=False, width_ratios=(1.2, 1, 1))[0]
    axes = left.subplots(len(concepts), SHOWN + 1, squeeze=False)
    for row, concept in enumerate(concepts):
        shown = [optimal[..., row], *(images[..., i] for i in top[concept])]
        for column in range(SHOWN + 1):
            axis = axes[row][column]
            axis.set_axis_off()
            if column < len(shown):
                axis.imshow(grey(shown[column]), cmap="gray", vmin=0, vmax=1)
        axes[row][0].set_title(str(concept), loc="left", fontsize=8, pad=1)
    left.suptitle("best neuron for each concept, last layer:\noptimal stimulus, and images with "
                  "most response", fontsize=10)  # fmt: skip
    grids = middle.subplots(len(layers), 1, squeeze=False)[:, 0]
    for number, (axis, values) in enumerate(zip(grids, layers, strict=True)):
        axis.imshow(tiled(np.moveaxis(values, 3, 0)), cmap="gray", vmin=0, vmax=1)
        axis.set_axis_off()
        axis.set_title(f"layer {number}: optimal stimuli of its middle neurons", fontsize=9)
    bars = right.subplots()
    series = {"single pixels": [found.pixels]}
    for number in range(len(found.layers)):
        series[f"layer {number}, random"] = [found.random[number]]
        series[f"layer {number}, trained"] = [found.layers[number]]
    judged = [[100 * each.judged for each in one[0].values()] for one in series.values()]
    bars.barh(list(series), [float(np.mean(each)) for each in judged], color="0.8")
    for y, each in enumerate(judged):
        bars.plot(each, [y] * len(each), "o", color="#0072B2", markersize=4)
    bars.axvline(50, color="black", linewidth=1)
    bars.set(xlim=(45, 100), xlabel="accuracy of the best neuron in % (50: guess)")
    bars.set_title("bars: mean over concepts; points: concepts", fontsize=9)
    store.put_figure(path, figure, 100)


def add_influence(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = getdoc(run_influence)
    add = options(parser)
    add("run_of RUN", "record of a run, or a directory with one", Path)
    add("--test A:B,...", "numbers of test samples, for example 0:100 or 3,7,90:99", "")
    add("--train A:B,...", "numbers of training samples (default: all)", ":")
    add("--self", "find the influence of training samples on themselves", dest="own")
    add(
        "--layers NAME",
        "layers of the gradients: last (default), the linear layer that runs last; all; or names",
        ["last"],
        nargs="+",
    )
    add(
        "--projection N",
        "compare N random sums of gradients, unbiased (default 0: whole gradients)",
        0,
    )
    add("--seed N", "seed of the projection", 0)
    add("--epochs N,...", "kept epochs to use (default: all)", "")
    add_settings(parser, "present place of the data of the run", "data.KEY")
    add("--memory MIB", "memory of a rank for gradients and scores", 1024)
    add("--out FILE.h5", "file of the scores (default: RUN's name with .influence.h5)", Path)
    add("--png FILE.png", "draw test images with their proponents and opponents", Path)
    add("--top N", "number of proponents and opponents to show", 5)


def run_influence(arguments: argparse.Namespace, world: Ranks) -> int:
    """Find the training samples that lowered or raised the loss of test samples, by TracIn.

    RUN is a run of `cpdhpc train` that kept its weights (train.keep_every). The score of a training
    sample for a test sample is the sum over kept epochs of the learning rate times the inner
    product of their gradients (arXiv 2002.08484). A training sample with a score above 0 is a
    proponent of the test sample, below 0 an opponent. --self computes how much each training sample
    lowered its own loss; mislabelled samples tend to come first. The ranks of mpirun share the
    samples; the bits do not depend on the number of ranks or on --memory.
    """
    from ..influence.scores import KIND, Scores, planned
    from ..train.setup import agreed, own_threads

    plan = agreed(world, lambda: planned(arguments))
    set_kernel_threads(own_threads(world, plan.job.train.threads))
    wanted = plan.wanted
    scores = agreed(world, lambda: Scores(world, plan.run, plan.gradients, plan.projection, wanted))
    out = arguments.out or plan.record.with_suffix(f".{KIND}.h5")
    world.on_first(lambda: store.check_target(out, KIND), "output")
    display = Display(world.process == 0, 1)
    if out.exists():
        display.line(f"{out}: exists: its scores will be replaced")
    if plan.status != "complete":
        display.line(
            f"{plan.record}: this run has not ended: its status is {plan.status!r}; the scores use "
            "the weights that it has kept so far"
        )
    epochs = ", ".join(str(kept.epoch) for _, kept in plan.run.kept)
    display.line(
        f"{plan.job.id}: weights after epoch {epochs}; {len(wanted.test)} test samples, "
        f"{len(wanted.train)} training samples on {world.processes} processes; gradients of "
        f"{plan.gradients.values:,} values; passes over them: {len(scores.blocks)}"
    )
    display.start("influence", scores.samples, 0)
    attributes = {
        "run": plan.job.id,
        "run_status": plan.status,
        "layers": " ".join(arguments.layers),
        "projection": arguments.projection,
        "projection_seed": arguments.seed,
        "toml": plan.job.toml(),
    }
    try:
        scores.save(out, attributes, display)
    finally:
        display.bar.stop()

    def show() -> None:
        for line in influence.tables(out, arguments.top):
            display.line(line)
        if arguments.png is not None:
            influence.draw(arguments.png, out, plan.run.train, plan.run.test, arguments.top)
        display.line(f"scores: {out}")

    world.on_first(show, "show")
    return 0
