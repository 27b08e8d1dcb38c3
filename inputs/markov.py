"""Sequences of a random Markov chain, each state to be predicted from earlier ones."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def datasets(
    states: int = 64, time: int = 32, train: int = 3840, test: int = 256, seed: int = 0
) -> tuple[TensorDataset, TensorDataset]:
    """Return samples (states, those that follow them), int64[time] each.

    The chances of a state's successors are the softmax of normal numbers of deviation 2.
    """
    drawn = torch.Generator().manual_seed(seed)
    chances = torch.softmax(2 * torch.randn(states, states, generator=drawn), 1)
    rows = torch.randint(states, (train + test, time + 1), generator=drawn)
    for place in range(time):
        rows[:, place + 1] = torch.multinomial(chances[rows[:, place]], 1, generator=drawn)[:, 0]
    first, second = (TensorDataset(part[:, :-1], part[:, 1:]) for part in rows.split([train, test]))
    first.classes = second.classes = states
    return first, second
