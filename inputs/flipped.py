"""Data with some wrong labels: what claim_tracin.toml trains on, and which labels are wrong."""

from __future__ import annotations

import sys
import tomllib
from typing import Any

import numpy as np
import torch
import xarray
from torch.utils.data import TensorDataset

from cpdhpc.config import validate
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.setup import samples_of


def flip(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """Return int64[n], labels of which a share has become any of the other classes."""
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(labels))[: round(share * len(labels))]
    flipped = labels.copy()
    flipped[wrong] = (labels[wrong] + rng.integers(1, classes, len(wrong))) % classes
    return flipped


def datasets(of: dict[str, Any], share: float = 0.1, seed: int = 0) -> tuple[Any, Any]:
    """Return training samples with wrong labels, and test samples as they are.

    of: a [data] table
    """
    data = validate(Job, {"name": "flipped", "data": of}, "data.of").data.load()
    train, test = (each.take(np.arange(len(each)), 0) for each in samples_of(data))
    labels = torch.from_numpy(flip(train[1].numpy(), data.classes, share, seed))
    wrong = TensorDataset(train[0], labels)
    wrong.classes, wrong.is_wrong = data.classes, (labels != train[1]).numpy()
    return wrong, TensorDataset(*test)


def found(path: str) -> tuple[list[float], list[float]]:
    """Return the shares of wrong labels among the 10 % and 20 % that come first, of all wrong ones.

    By self-influence; by the loss after the last epoch. path: of a file of influence --self
    """
    with xarray.open_dataset(path, engine="h5netcdf") as scores:
        data = tomllib.loads(scores.attrs["toml"])["data"]
        wrong = datasets(data["of"], data["share"], data["seed"])[0].is_wrong[scores.train.values]
        ranks = [np.argsort(-scores[name].values) for name in ("self_influence", "train_loss")]
    cuts = [round(share * len(wrong)) for share in (0.1, 0.2)]
    one, other = ([wrong[rank[:cut]].sum() / wrong.sum() for cut in cuts] for rank in ranks)
    return one, other


if __name__ == "__main__":
    for path in sys.argv[1:]:
        (own10, own20), (loss10, loss20) = found(path)
        print(
            f"{path}: wrong labels in the first 10 %, 20 %: by self-influence {own10:.1%}, "
            f"{own20:.1%}; by loss {loss10:.1%}, {loss20:.1%}"
        )
