"""Keys for the counter-based generator behind stochastic rounding."""

from __future__ import annotations

from .methods import check_integer, check_whole

Key = tuple[int, int]

_MASK = (1 << 64) - 1


def check_key(function: str, argument: str, value: object) -> None:
    """Raise TypeError or ValueError unless value has 64 bits, signed or not, as keys require."""
    check_whole(function, argument, value, -(1 << 63), 1 << 64)


def random_key(seed: int, *path: int) -> Key:
    """Return the two 32-bit words of the random stream of (seed, *path).

    path: integers that distinguish streams, such as (iteration, rank, phase); order matters.
    Source: the SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014), chained.
    """
    state = 0
    for part in (seed, *path):
        check_integer("random_key", "seed", part)
        state = (state + (int(part) & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state & 0xFFFFFFFF, state >> 32
