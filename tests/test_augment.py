"""Augmentation beside a plain loop over pixels, and the same bits on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from training import model_bytes, prepared, run_job, small_job

from cpdhpc.config import ConfigError
from cpdhpc.lab.train.data import Augment
from cpdhpc.lab.train.samples import InMemory
from cpdhpc.world.ranks import Loopback


def expected(image: np.ndarray, augment: Augment, draw: list[int]) -> np.ndarray:
    """The change of one image [channels, height, width], pixel by pixel."""
    down, right, flipped, at_y, at_x = draw
    _, height, width = image.shape
    changed = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            from_x = width - 1 - x if flipped and augment.flip else x
            row, column = y + down - augment.crop, from_x + right - augment.crop
            first_y, first_x = at_y - augment.cutout // 2, at_x - augment.cutout // 2
            inside = 0 <= y - first_y < augment.cutout and 0 <= x - first_x < augment.cutout
            if 0 <= row < height and 0 <= column < width and not inside:
                changed[:, y, x] = image[:, row, column]
    return changed


@every(
    "augment",
    [Augment(crop=2), Augment(flip=True), Augment(cutout=3), Augment(crop=1, flip=True, cutout=2)],
)
@every("channels", [0, 2])
def test_images_change_as_drawn(augment: Augment, channels: int) -> None:
    rng = np.random.default_rng(0)
    images = 1 + rng.random((40, *[channels] * bool(channels), 5, 4), np.float32)
    samples = augment.of(InMemory(torch.from_numpy(images), torch.arange(40)))
    index = np.array([31, 4, 4, *range(20)])
    x, y = samples.take(index, 7)
    draws = augment.draws(index, 7, 5, 4)
    for at, item in enumerate(index):
        image = images[item].reshape(-1, 5, 4)
        assert np.array_equal(x[at].numpy().reshape(-1, 5, 4), expected(image, augment, draws[at]))
    assert y.tolist() == index.tolist()
    assert not torch.equal(x, samples.take(index, 8)[0])
    assert samples.take(index[:0], 7)[0].shape == x[:0].shape


def test_draws_reach_all_ends_alike() -> None:
    """Each of the 5 values is uniform: six standard deviations of 4,000 draws."""
    draws = Augment(crop=2, flip=True, cutout=1).draws(np.arange(4000), 1, 6, 3)
    for column, ends in zip(draws.T, (5, 5, 2, 6, 3), strict=True):
        counts, p = np.bincount(column, minlength=ends), 1 / ends
        assert len(counts) == ends
        assert (np.abs(counts - 4000 * p) < 6 * (4000 * p * (1 - p)) ** 0.5).all()
    assert abs(np.corrcoef(draws.T) - np.eye(5)).max() < 6 / 4000**0.5


def test_augmented_trainings_have_the_same_bits_at_any_hosting(tmp_path: Path) -> None:
    """A stop between is of no account, as draws depend on seed, epoch and sample alone."""
    changes: dict[str, Any] = {"augment": {"crop": 1, "flip": True, "cutout": 2}}
    found = []
    for name, tables in (("a", changes), ("b", changes), ("plain", {})):
        (tmp_path / name).mkdir()
        training = run_job(small_job(**tables), Loopback(2), tmp_path / name)
        found.append(model_bytes(training.files.checkpoint))
    assert found[0] == found[1] != found[2]


def test_what_are_no_images_is_refused_before_training(tmp_path: Path) -> None:
    job = small_job(data={"name": "synthetic"}, augment={"flip": True})
    with pytest.raises(ConfigError, match=r"augment: inputs float32\[2, 16\]: must be floats"):
        prepared(job, Loopback(2), tmp_path, job.data.load())
