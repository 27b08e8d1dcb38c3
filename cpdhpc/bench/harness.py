"""Timing of several functions against each other: interleaved, warmed up, every sample kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..comm import Ranks

Name = TypeVar("Name")
Times = NDArray[np.float64]
Before = Callable[[Name], object]


def interleave(
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    before: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call, float64[warmup + repeats] per case, the cases taking turns.

    before: called before each call, with the case's name, and not timed
    Taking turns spreads a drift of the machine's speed over all cases alike.
    """
    samples = {name: np.empty(warmup + repeats) for name in cases}
    for repeat in range(warmup + repeats):
        for name, run in cases.items():
            before(name)
            start = time.perf_counter()
            run()
            samples[name][repeat] = time.perf_counter() - start
    return samples


def interleave_ranks(
    world: Ranks,
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    prepare: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call on each process, float64[warmup + repeats, processes].

    Collective. All processes meet at a barrier before each call, after prepare.
    """

    def before(name: Name) -> None:
        prepare(name)
        world.barrier("bench")

    own = interleave(cases, repeats, warmup, before)
    everyone = world.gather(list(own.values()), "bench")
    return {name: np.stack([each[i] for each in everyone], axis=1) for i, name in enumerate(own)}
