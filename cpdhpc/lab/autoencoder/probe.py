"""The concepts and images that single neurons of a trained stack respond to, as in Le et al.

A neuron is a pooled and normalised response. Source: Le et al., Building high-level features using
large scale unsupervised learning, ICML 2012, sections 4 and 5; halves of the images, one to choose
the neuron and one to test it, are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...darray.array import DistArray
from ...ops.tensors import listed, values_of
from ...world.ranks import Ranks
from ..train.data import read_digits
from ..train.samples import DataError
from .descent import Descent
from .job import Images
from .training import Stack

Array = npt.NDArray[Any]
Tensor = torch.Tensor
STEPS = 100  # of gradient ascent
FIRST_STEP, LAST_STEP = 0.5, 0.02  # shares of the new direction in a stimulus


@dataclass(frozen=True)
class Labelled:
    """Images [height, width, channels, n], prepared for layers, and int64[n] labels."""

    images: Array
    labels: Array

    @property
    def halves(self) -> tuple[Array, Array]:
        """Indices of the images that choose a neuron, and of those that test it, alternating."""
        order = np.argsort(self.labels, kind="stable")  # so both have as many of each concept
        return np.sort(order[::2]), np.sort(order[1::2])


def read(images: Path | None, labels: Path | None) -> tuple[Array, Array, int]:
    """Return images [n, height, width(, channels)], int64[n] labels, and the value of white.

    images: a .npy file, labels then another one; or an HDF5 file with datasets images and labels;
        None: the digits of scikit-learn
    Raises DataError, naming the file, if they cannot be used.
    """
    if images is None:
        return *read_digits(), 16
    try:
        if images.suffix == ".npy":
            if labels is None:
                raise DataError(f"{images}: needs --labels, a .npy file")
            found = [np.load(path, allow_pickle=False) for path in (images, labels)]
        else:
            from ...store import read_box

            found = [read_box(images, name, ()) for name in ("images", "labels")]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{images}: cannot be read: {error}") from None
    pixels, concepts = found
    if pixels.ndim not in (3, 4) or concepts.shape != pixels.shape[:1] or len(pixels) < 4:
        raise DataError(
            f"{images}: images of {pixels.shape}, labels of {concepts.shape}: must be "
            "[n, height, width] or [n, height, width, channels], and [n]; 4 or more"
        )
    if (pixels.dtype != np.uint8 and pixels.dtype.kind != "f") or concepts.dtype.kind not in "iub":
        raise DataError(f"{images}: images of {pixels.dtype}, labels of {concepts.dtype}: must be "
                        "uint8 or floats in 0..1, and integers")  # fmt: skip
    return pixels, concepts.astype(np.int64), 255 if pixels.dtype == np.uint8 else 1


def prepared(of: Images, pixels: Array, labels: Array, white: int) -> Labelled:
    """Return labelled images prepared for a stack: their middle, or copies side by side.

    If an image is smaller than the squares of training, its copies fill one.
    Raises DataError if the channels differ from those of training.
    """
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.shape[3] != of.channels:
        raise DataError(f"images have {pixels.shape[3]} channels, those of training {of.channels}")
    copies = [ceil(a / b) for a, b in zip(of.shape, pixels.shape[1:], strict=False)]
    like = Images(of.source.model_copy(update={"size": 0, "tile": 1}), list(pixels), white)
    like.shape = of.shape
    squares = []
    for each in pixels:
        canvas = np.tile(each, (*copies, 1))
        top, left = ((a - b) // 2 for a, b in zip(canvas.shape, of.shape, strict=False))
        squares.append(like.prepared(canvas, top, left))
    return Labelled(np.stack(squares, axis=3).astype(np.float32), labels)


def batches(stack: Stack, images: Array) -> Iterator[Tensor]:
    """Yield this rank's cells of images, a training batch at a time."""
    n = stack.job.train.batch
    for start in range(0, images.shape[3], n):
        yield stack.own(images[..., start : start + n])


def responses(stack: Stack, images: Array) -> list[Tensor]:
    """Return the responses of all layers' neurons, [owned pools, maps, images] each. Collective.

    Always on the CPU, for layers on any device.
    """
    parts: list[list[Tensor]] = [[] for _ in stack.layers]
    for x in batches(stack, images):
        for number, layer in enumerate(stack.layers):
            with torch.no_grad():
                x = layer(x)
            parts[number].append(torch.from_numpy(values_of(x)))
    return [torch.cat(each, dim=3) for each in parts]


def errors(stack: Stack, images: Array) -> list[float]:
    """Return the reconstruction's error of each layer, of its input's energy. Collective."""
    totals = np.zeros((len(stack.layers), 2))
    for x in batches(stack, images):
        for number, layer in enumerate(stack.layers):
            terms, pooled = Descent(layer, x.shape[-1]).objective(x)
            x = layer.normalised(pooled)
            totals[number] += x.shape[-1] * np.array(
                listed(torch.stack([terms.error, terms.energy]))
            )
    error, energy = sum(stack.world.gather(totals, "held-out error")).T
    return list((error / energy).tolist())


class Best(NamedTuple):
    """The neuron that detects a concept best: its place, and its accuracy on both halves.

    neuron: (row, column, map) in the layer; sign: 1 if the concept is above the threshold, else -1
    """

    chosen: float
    neuron: tuple[int, int, int]
    sign: int
    threshold: float
    judged: float


def accuracies(values: Array, is_concept: Array) -> tuple[Array, Array, Array]:
    """Return, for each neuron, the best accuracy at a threshold, its sign, and the threshold.

    values: [neurons, images]; the accuracy is the mean of that on the concept's images and on the
    others, so a guess has 0.5
    """
    order = np.argsort(values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    weight = np.where(is_concept, -0.5 / is_concept.sum(), 0.5 / (~is_concept).sum())
    # Above a threshold after the first k: 0.5 plus the contributions of the first k.
    gained = np.cumsum(weight[order], axis=1)[:, :-1]
    tied = ranked[:, 1:] == ranked[:, :-1]
    above, below = np.where(tied, -1, gained), np.where(tied, -1, -gained)
    sign = np.where(above.max(axis=1) >= below.max(axis=1), 1, -1)
    best = np.where(sign[:, None] > 0, above, below)
    k = best.argmax(axis=1)
    rows = np.arange(len(values))
    threshold = (ranked[rows, k] + ranked[rows, k + 1]) / 2
    return 0.5 + np.maximum(best[rows, k], 0), sign, threshold


def selectivity(
    world: Ranks, values: Array, start: tuple[int, ...], labelled: Labelled
) -> dict[int, Best]:
    """Return the best neuron for each concept, the same on all ranks. Collective.

    values: this rank's responses [rows, columns, maps, images], maybe none; start: its first place
    """
    choose, judge = labelled.halves
    flat = values.reshape(-1, values.shape[-1])
    found = {}
    for concept in np.unique(labelled.labels).tolist():
        is_concept = labelled.labels == concept
        candidates = []
        if len(flat):
            accuracy, sign, threshold = accuracies(flat[:, choose], is_concept[choose])
            i = int(np.argmax(np.round(accuracy, 12)))
            said = int(sign[i]) * (flat[i, judge] - threshold[i]) > 0
            right, wrong = is_concept[judge], ~is_concept[judge]
            judged = (said[right].mean() + (~said[wrong]).mean()) / 2
            row, column, number = np.unravel_index(i, values.shape[:3])
            place = int(row) + start[0], int(column) + start[1], int(number)
            candidates.append(
                Best(float(accuracy[i]), place, int(sign[i]), float(threshold[i]), float(judged))
            )
        everyone = [each for part in world.gather(candidates, "selectivity") for each in part]
        found[concept] = min(everyone, key=lambda each: (-round(each.chosen, 12), each.neuron))
    return found


def stimuli(
    stack: Stack, layer: int, neurons: list[tuple[int, int, int]], signs: list[int]
) -> tuple[Array, Array]:
    """Return the images that excite neurons most, and the responses to them. Collective.

    Of mean 0 and mean square 1, like images prepared by contrast and whiten; by gradient ascent
    within that norm (conditional gradients: each step moves towards the point of the ball in the
    direction of the gradient), from noise that is the same for any number of ranks.
    signs: -1 to excite least
    Returns float[height, width, channels, neurons] and float[neurons] on all ranks.
    """
    world, top = stack.world, stack.layers[layer]
    shape = (*stack.images.shape, stack.images.channels, len(neurons))
    noise = np.random.Generator(np.random.Philox(stack.job.train.seed)).standard_normal(shape)
    x = _normalised(world, stack.own(noise))
    pools = top.pools.owner(world.rank)
    answers = np.zeros(len(neurons))
    for step in range(STEPS + 1):
        x.requires_grad_()
        y = x
        for each in stack.layers[: layer + 1]:
            y = each(y)
        loss = (y * 0).sum()  # every rank has the graph, even without the neuron
        mine = np.zeros(len(neurons))
        for b, (neuron, sign) in enumerate(zip(neurons, signs, strict=True)):
            i, j = neuron[0] - pools.start[0], neuron[1] - pools.start[1]
            if 0 <= i < pools.shape[0] and 0 <= j < pools.shape[1]:
                loss = loss + sign * y[i, j, neuron[2], b]
                mine[b] = listed(y[i, j, neuron[2], b])[0]
        answers = sum(world.gather(mine, "responses"))
        if step == STEPS:
            break
        (slope,) = torch.autograd.grad(loss, x)
        share = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** (step / (STEPS - 1))
        x = _normalised(world, (1 - share) * x.detach() + share * _normalised(world, slope))
    whole = DistArray(world, stack.cells, values_of(x)).gather()
    assert whole is not None, "all ranks gather"
    return whole, np.asarray(answers)


def _normalised(world: Ranks, x: Tensor) -> Tensor:
    """Return images of mean 0 and mean square 1 over all ranks' cells; zeros stay. Collective."""

    def mean(values: Tensor) -> Tensor:
        mine = (values_of(values.double().sum((0, 1, 2))), values[..., 0].numel())
        sums, cells = zip(*world.gather(mine, "norm"), strict=True)
        return torch.from_numpy(sum(sums) / sum(cells)).to(x)

    centred = x - mean(x)
    return centred / mean(centred**2).sqrt().clamp(min=1e-30)
