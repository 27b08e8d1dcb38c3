"""The local work of a method beside a copy, and the speed of link below which it saves time.

The time of an exchange is a rank's local work plus its bytes over the link: nothing overlaps. Codes
and sums of an all-reduce, made while messages travel, are no local work: see bench codec.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ...world.ranks import Ranks
from ..kinds.printing import table
from ..report.figures import Axis, Chart, Panel, Series, styles
from ..train.gradients import Gradients

LINKS_GBPS = np.logspace(-1, 2, 25)  # of the chart: from 0.1 to 100 Gb/s
COPIES = 9
LAYER = (1024, 1024)
SHIFT = 64  # values between the beginnings of two ranks' gradients
ITERATIONS = 4


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of an exchange: processor time outside of collectives, and bytes a rank sends."""

    local_s: float
    sent_bytes: float

    def time_s(self, link_gbps: float) -> float:
        """Return the time of an exchange over a link."""
        return self.local_s + 8 * self.sent_bytes / (1e9 * link_gbps)

    def wins_below_gbps(self, dense: ExchangeCost) -> float:
        """Return the speed of link below which this takes less time; inf: any, 0: none.

        dense: the cost of float32, which has more bytes
        """
        saved, more_s = dense.sent_bytes - self.sent_bytes, self.local_s - dense.local_s
        if saved <= 0:
            return 0.0
        return 8 * saved / more_s / 1e9 if more_s > 0 else inf


def copy_s(world: Ranks, values: int) -> float:
    """Return the processor time of a copy of float32[values] by all processes at once. Collective.

    They share the memory's bandwidth, as in an exchange: the median of the slowest process.
    """
    source, target = np.ones(values, np.float32), np.zeros(values, np.float32)
    found = []
    for _ in range(COPIES):
        world.barrier("bench")
        start_s = time.thread_time()
        np.copyto(target, source)
        found.append(time.thread_time() - start_s)
    return float(np.median(np.max(world.gather(found, "bench"), axis=0)))


def lines(costs: Mapping[str, ExchangeCost], values: int, copied_s: float) -> list[str]:
    """Return a table: local work of methods, the same in copies, the link below which they win.

    values: of a gradient; copied_s: from copy_s
    """
    dense, width = costs.get("none"), max(map(len, costs))
    above = [
        f"# local work of a rank, in nanoseconds a value and in copies of a gradient: a copy by "
        f"all processes at once takes {1e9 * copied_s / values:.3g} ns a value",
        "# wins below: the speed of link below which an exchange takes less time than that of none",
    ]
    forms = {
        "method": f"<{width}",
        "ns/value": "9.3g",
        "copies": "7.2f",
        "wins below Gb/s": "16.3g",
    }
    rows = [
        (
            method,
            1e9 * cost.local_s / values,
            cost.local_s / copied_s,
            "-" if dense is None or method == "none" else cost.wins_below_gbps(dense),
        )
        for method, cost in costs.items()
    ]
    return above + table(forms, rows)


def chart(costs: Mapping[str, ExchangeCost], ranks: int) -> Chart:
    """Return the time of an exchange by the speed of the link, a line for each method."""
    looks = styles(costs)
    series = [
        Series(
            method,
            looks[method],
            LINKS_GBPS,
            [1e3 * cost.time_s(float(gbps)) for gbps in LINKS_GBPS],
            every=(3 * number % 8, 8),
        )
        for number, (method, cost) in enumerate(costs.items())
    ]
    x, y = Axis("speed of a rank's link (Gb/s)", "log"), Axis("time of an exchange (ms)", "log")
    notes = [
        "Local work, and then the bytes of the rank that sends most; nothing overlaps.",
        "Codes that an all-reduce makes while messages travel are not included.",
    ]
    panel = Panel(f"{ranks} ranks", x, y, series)
    return Chart("links", "Exchanges of gradients", notes, "", [panel], scale=(2.2, 2.0))


def normal(values: int, ranks: int) -> Sequence[Gradients]:
    """Return gradients of normal numbers, in layers of 1,024 x 1,024 and one for the rest.

    The gradients of ranks are overlapping parts of one array.
    """
    rng, found = np.random.default_rng(0), []
    for iteration in range(ITERATIONS):
        numbers = rng.standard_normal(values + SHIFT * ranks, np.float32) * np.float32(1e-3)
        of_ranks = np.lib.stride_tricks.as_strided(
            numbers, (ranks, values), (4 * SHIFT, 4), writeable=False
        )
        layers, size = {}, LAYER[0] * LAYER[1]
        for at in range(0, values, size):
            part = of_ranks[:, at : at + size]
            is_whole = part.shape[1] == size
            shape = LAYER if is_whole else (1, part.shape[1])
            strides = (4 * SHIFT, 4 * shape[1], 4)
            view = np.lib.stride_tricks.as_strided(part, (ranks, *shape), strides, writeable=False)
            layers[f"layer{at // size}"] = view
        found.append(Gradients(iteration, ranks, layers, "normal numbers"))
    return found
