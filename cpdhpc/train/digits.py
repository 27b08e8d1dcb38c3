"""The handwritten digits that come with scikit-learn: 1,797 images of 8 x 8 pixels."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..config import Section
from .data import Dataset, split_order


class Digits(Section):
    """[data] name = "digits". Source: Alpaydin, Kaynak: Optical recognition of digits, UCI 1998."""

    name: Literal["digits"] = "digits"
    test_share: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    split_seed: Annotated[int, Field(ge=0)] = 0

    def load(self) -> Dataset:
        """Return the images, split by split_seed into training and test samples."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = (images.reshape(-1, 8, 8) / 16).astype(np.float32)  # pixels are 0..16
        y = labels.astype(np.int64)
        train, test = split_order(len(y), self.test_share, self.split_seed)
        return Dataset(x[train], y[train], x[test], y[test], classes=10)
