"""Batch norms of chance as integers: results that differ over the whole range, and shifts.

x is -RANGE..RANGE, codes have BITS. "independent": the smallest shift n at which a and b + 1/2,
each rounded to a multiple of 2^-n by itself, give the same on the whole range. Channels that are
constant there need no shift and are left out.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ...config import UserError
from ...torch.quantized import fold, integer_norm
from ...torch.quantized.integers import MOST_BITS, steps
from ..settings import options
from .harness import check_options

Array = npt.NDArray[Any]
MOST_RANGE = 2**24  # so that trying all of it takes seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("--settings RANGE:BITS,...", "of sums and of codes", "36720:4,16384:4,16384:8,4096:2")
    add("--channels N", "of each setting", 200)
    add("--seed N", "that they are drawn by", 0)


def drawn(rng: np.random.Generator, channels: int, most: int, bits: int) -> tuple[Array, Array]:
    """Return a and b of norms whose sums have deviations of 1/50 to 1/3 of the range.

    Scales are of both signs.
    """
    deviation = most * rng.uniform(0.02, 0.33, channels)
    mean = rng.normal(0, 0.5, channels) * deviation
    gamma, beta = rng.normal(0.5, 0.5, channels), rng.normal(0, 0.5, channels)
    return fold(gamma, beta, mean, deviation**2, 1e-5, bits)


def independent(a: float, b: float, most: int, bits: int) -> int:
    """Return the smallest n at which a and b + 1/2, rounded each by itself, are exact."""
    facts = steps(a, b, -most, most, 2**bits - 1)
    slope, start = Fraction(abs(a)), Fraction(b) + Fraction(1, 2)
    reached = list(zip(facts.at_least.tolist(), facts.reached.tolist(), strict=True))
    missed = list(zip(facts.at_most.tolist(), facts.missed.tolist(), strict=True))
    n = 0
    while True:  # ends: a and b are multiples of a power of two
        one = 1 << n
        p, q = round(slope * one), round(start * one)
        if all(p * x + q >= i * one for x, i in reached) and all(
            p * x + q < j * one for x, j in missed
        ):
            return n
        n += 1


def differing(norm: Any, a: Array, b: Array, most: int) -> int:
    """Return how many results on -most..most are not those of a and b, of all channels."""
    x, wrong = np.arange(-most, most + 1), 0
    for part in np.array_split(x, -(-x.size // 2**14)):
        column = np.broadcast_to(part[:, None], (part.size, a.size))
        wanted = np.clip(np.floor(column * a + b + 0.5), 0, 2**norm.bits - 1)  # exact, see fold
        wrong += int((norm(column) != wanted).sum())
    return wrong


def run(arguments: argparse.Namespace) -> None:
    """Print a line for each setting. Raises UserError for options out of range."""
    check_options(arguments, 1, "channels")
    settings = [_setting(text) for text in arguments.settings.split(",")]
    print(f"{'range':>9}{'bits':>5}{'channels':>9}{'differing':>10}{'shift':>12}"
          f"{'independent':>13}{'gain':>12}{'A':>4}{'B':>4}{'A x + B':>9}")  # fmt: skip
    for most, bits in settings:
        rng = np.random.default_rng(arguments.seed)
        a, b = drawn(rng, arguments.channels, most, bits)
        norm = integer_norm(a, b, -most, most, bits)
        wrong = differing(norm, a, b, most)
        alone = np.array([independent(*one, most, bits) for one in zip(a, b, strict=True)])
        some = norm.multiplier != 0
        shift, alone = norm.shift[some], alone[some]
        widths = [int(each[some].max(initial=0)) for each in norm.widths().values()]
        print(f"{most:>9}{bits:>5}{shift.size:>9}{wrong:>10}{_some(shift):>12}{_some(alone):>13}"
              f"{_some(alone - shift):>12}{widths[0]:>4}{widths[1]:>4}{widths[2]:>9}")  # fmt: skip
    print("shift, independent, gain: mean, largest; A, B, A x + B: bits, sign included")


def _some(values: Array) -> str:
    return f"{values.mean():.1f}, {values.max()}" if values.size else "-"


def _setting(text: str) -> tuple[int, int]:
    most, _, bits = text.partition(":")
    if not (most.isdecimal() and bits.isdecimal()) or not (
        1 <= int(most) <= MOST_RANGE and 1 <= int(bits) <= MOST_BITS
    ):
        raise UserError(
            f"--settings {text}: must be RANGE:BITS, 1..{MOST_RANGE} and 1..{MOST_BITS}"
        )
    return int(most), int(bits)
