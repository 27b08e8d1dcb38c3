"""Timing of several functions against each other: interleaved, warmed up, every sample kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Samples = dict[str, NDArray[np.float64]]


def interleave(cases: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> Samples:
    """Return the seconds of each call, float64[repeats] per case, the cases taking turns.

    Taking turns spreads a drift of the machine's speed over all cases alike.
    """
    samples = {name: np.empty(repeats) for name in cases}
    for repeat in range(-warmup, repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            elapsed_s = time.perf_counter() - start
            if repeat >= 0:
                samples[name][repeat] = elapsed_s
    return samples
