"""Images of ten classes that are harder than those of which they are made, as four IDX files.

    python inputs/distorted.py FROM TO --seed 1

FROM has MNIST's four files. Each image is turned, stretched, sheared and shifted by chance, and
gets strokes cut out of two others, a gradient of brightness and noise.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np

from cpdhpc.lab.train.data import find, read_idx

SIDE = 28


def warped(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return float64[n, 28, 28]: each image by an affine map of its own, linearly interpolated."""
    n = len(images)
    angle, shear = rng.uniform(-0.4, 0.4, n), rng.uniform(-0.3, 0.3, n)
    wide, high = np.exp(rng.uniform(-0.2, 0.3, (2, n)))
    shift = rng.uniform(-2, 2, (2, n, 1, 1))
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    stretched = np.array([[wide, wide * shear], [np.zeros(n), high]])
    maps = np.einsum("abn,bcn->acn", turned, stretched)[..., None, None]
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    at = [maps[i, 0] * y + maps[i, 1] * x + shift[i] + (SIDE - 1) / 2 + 1 for i in range(2)]
    at = [np.clip(each, 0, SIDE + 0.999) for each in at]  # of images with a border of zeros
    low = [each.astype(np.int64) for each in at]
    part = [each - floor for each, floor in zip(at, low, strict=True)]
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    rows, out = np.arange(n)[:, None, None], np.zeros((n, SIDE, SIDE))
    for down in (0, 1):
        for right in (0, 1):
            weight = np.abs(1 - down - part[0]) * np.abs(1 - right - part[1])
            out += weight * padded[rows, low[0] + down, low[1] + right]
    return out


def distorted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return uint8[n, 28, 28]. images: of the same shape and type."""
    n, size = len(images), 6
    out = warped(images / 255, rng)
    for _ in range(2):  # strokes of other images, somewhere
        others = images[rng.permutation(n)] / 255
        from_y, from_x, to_y, to_x = rng.integers(0, SIDE - size, (4, n, 1, 1))
        y, x = np.mgrid[:size, :size]
        rows = np.arange(n)[:, None, None]
        patch = others[rows, from_y + y, from_x + x]
        out[rows, to_y + y, to_x + x] = np.maximum(out[rows, to_y + y, to_x + x], patch)
    tilt = rng.uniform(-0.3, 0.3, (2, n, 1, 1)) * (np.mgrid[:SIDE, :SIDE] / SIDE)[:, None]
    out = rng.uniform(0.5, 1.0, (n, 1, 1)) * out + tilt.sum(0) + rng.normal(0, 0.1, out.shape)
    return (255 * np.clip(out, 0, 1)).round().astype(np.uint8)


def write(path: Path, values: np.ndarray) -> None:
    """Write uint8[...] as an IDX file, gzip-compressed."""
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(head + values.tobytes(), 1, mtime=0))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("to", type=Path, metavar="TO")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=12000)
    parser.add_argument("--test", type=int, default=5000)
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(given.seed)
    for part, count in (("train", given.train), ("t10k", given.test)):
        images, labels = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        x, y = read_idx(find(given.source, images), 3), read_idx(find(given.source, labels), 1)
        order = rng.permutation(len(x))[:count]
        write(given.to / f"{images}.gz", distorted(x[order], rng))
        write(given.to / f"{labels}.gz", y[order])


if __name__ == "__main__":
    main()
