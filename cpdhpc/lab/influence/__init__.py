"""Training samples that lowered or raised a loss: TracIn, from the weights that a run kept.

Source: Pruthi et al., Estimating training data influence by tracing gradient descent, NeurIPS 2020,
arXiv 2002.08484.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ... import store
from ...compress.base import Array
from ...config import ConfigError
from ..train.samples import Samples

SHOWN = 10  # test samples that are listed and drawn
MOST_OWN = 20  # training samples with the largest self-influence
RAISED, LOWERED = "#D55E00", "#0072B2"


class ScoreFile:
    """A file of scores, read in parts; with numbers and classes of samples as text.

    rooms: its datasets
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attributes, self.rooms = store.contents(path)
        self.epochs = self.column("epoch")

    def column(self, name: str) -> Array:
        """Return a dataset of one axis; of length 0 if it does not exist."""
        if name not in self.rooms:
            return np.zeros(0)
        return store.read_box(self.path, name, (slice(None),))

    @property
    def listed(self) -> range:
        """The rows of test samples that are shown."""
        return range(min(len(self.column("test")), SHOWN))

    def extremes(self, row: int, top: int) -> tuple[Array, Array, Array]:
        """Return a test sample's scores, and the columns of its proponents and opponents.

        The strongest first, at most top of each, of equal ones the first.
        """
        scores = store.read_box(self.path, "scores", (slice(row, row + 1),))[0]
        order = np.argsort(-scores, kind="stable")
        up, down = order[:top], np.argsort(scores, kind="stable")[:top]
        return scores, up[scores[up] > 0], down[scores[down] < 0]

    def own(self, most: int) -> Array:
        """Return the columns of the training samples with the largest self-influence."""
        return np.argsort(-self.column("self_influence"), kind="stable")[:most]

    def name(self, axis: str, at: int) -> str:
        """Return the number of a sample, with its class in brackets if it has one."""
        target = self.column(f"{axis}_target")
        return f"{self.column(axis)[at]}" + (f" ({target[at]})" if len(target) else "")


def tables(path: Path, top: int) -> list[str]:
    """Return the printed lines about a file of scores."""
    found, lines = ScoreFile(path), list[str]()
    for row in found.listed:
        scores, up, down = found.extremes(row, top)
        loss = found.column("test_loss")[row]
        lines.append(f"test sample {found.name('test', row)}, loss {loss:.4g}")
        for what, columns in (("proponents", up), ("opponents ", down)):
            each = [f"{found.name('train', i)} {scores[i]:+.3g}" for i in columns]
            lines.append(f"  {what}  {', '.join(each) or 'none'}")
    if (more := len(found.column("test")) - len(found.listed)) > 0:
        lines.append(f"and {more} test samples more in the file")
    if "self_influence" in found.rooms:
        own = found.column("self_influence")
        each = [f"{found.name('train', i)} {own[i]:.3g}" for i in found.own(2 * top)]
        lines.append(f"largest self-influence: {', '.join(each)}")
    if lines and "train_target" in found.rooms:
        lines.append("numbers of samples, in brackets their classes")
    return lines


def check_images(samples: Samples) -> None:
    """Raise ConfigError unless samples are images, grey or of three colours."""
    shape = tuple(samples.take(np.zeros(1, np.int64), 0)[0].shape[1:])
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))):
        raise ConfigError(f"--png: samples of shape {shape} are not images")


def draw(path: Path, scores: Path, train: Samples, test: Samples, top: int) -> None:
    """Draw test images with their proponents and opponents, and the largest self-influences.

    Raises StoreError if the picture cannot be written.
    """
    from matplotlib.figure import Figure

    found = ScoreFile(scores)
    rows: list[list[tuple[Samples, str, int, str, str]]] = []
    for row in found.listed:
        values, up, down = found.extremes(row, top)
        line = [(test, "test", row, "black", f"test {found.name('test', row)}")]
        for columns, color in ((up, LOWERED), (down, RAISED)):
            line += [
                (train, "train", i, color, f"{found.name('train', i)}\n{values[i]:+.2g}")
                for i in columns
            ]
            line += [(train, "", 0, "", "")] * (top - len(columns))
        rows.append(line)
    width = 2 * top + 1
    if "self_influence" in found.rooms:
        values = found.column("self_influence")
        own = [
            (train, "train", i, "black", f"{found.name('train', i)}\n{values[i]:.2g}")
            for i in found.own(MOST_OWN)
        ]
        rows += [own[i : i + width] for i in range(0, len(own), width)]
    height = 1.35 * len(rows) + 0.6  # inches
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(0.01, 0.2 / height, 0.99, 1 - 0.75 / height, wspace=0.12, hspace=0.45)
    grid = figure.subplots(len(rows), width, squeeze=False)
    for axes, line in zip(grid, rows, strict=True):
        for axis, cell in zip(axes, line, strict=False):
            _image(axis, found, *cell)
        for axis in axes[len(line) :]:
            axis.set_axis_off()
    parts = [f"{top} proponents (blue), {top} opponents (orange)"] if found.listed else []
    parts += ["last rows: largest self-influence"] if "self_influence" in found.rooms else []
    figure.suptitle(
        f"{found.attributes['run']}: {'; '.join(parts)}\nsample (class), below it the score",
        fontsize=9,
        y=1 - 0.1 / height,
    )
    store.put_figure(path, figure, 100)


def _image(
    axis: Any, found: ScoreFile, samples: Samples, of: str, at: int, color: str, title: str
) -> None:
    """Draw a sample in a frame; nothing if there is none."""
    if not of:
        axis.set_axis_off()
        return
    image = samples.take(found.column(of)[at : at + 1], 0)[0][0].numpy()
    image = image.squeeze(0) if image.ndim == 3 and image.shape[0] == 1 else image
    image = image.transpose(1, 2, 0) if image.ndim == 3 else image
    low, high = float(image.min()), float(image.max())
    axis.imshow((image - low) / max(high - low, 1e-30), cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=7, pad=2, color=color)
    for spine in axis.spines.values():
        spine.set(color=color, linewidth=1.5)
