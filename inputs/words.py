"""Words of Python's own documentation, each to be told by those before it: train_text.toml."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import TensorDataset


def datasets(
    context: int = 4, words: int = 2000, stride: int = 6, test_share: float = 0.1
) -> tuple[TensorDataset, TensorDataset]:
    """Return samples (context words, the next one), int64, for training and of the last pages.

    words: that have numbers of their own, the most frequent ones; all others are 0
    stride: words from one sample to the next
    """
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    found = re.findall(r"[a-z]+|[^\sa-z]", text)  # and each other character that is no space
    often = Counter(found).most_common(words - 1)
    numbers = {word: number for number, (word, _) in enumerate(often, 1)}
    tokens = torch.tensor([numbers.get(word, 0) for word in found])
    rows = tokens.unfold(0, context + 1, stride)
    start = len(rows) - round(len(rows) * test_share)
    train, test = (
        TensorDataset(part[:, :-1], part[:, -1]) for part in (rows[:start], rows[start:])
    )
    train.classes = test.classes = words
    return train, test


def model(context: int = 4, words: int = 2000, width: int = 32, hidden: int = 128) -> nn.Module:
    """Return a network of two layers over a vector of each word, as Bengio et al. 2003 have it."""
    return nn.Sequential(
        nn.Embedding(words, width),
        nn.Flatten(),
        nn.Linear(context * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, words),
    )
