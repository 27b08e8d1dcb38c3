"""Cases of a kind on the same ranks, timed in turns: the measurement of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ...config import Raw
from ..study_data import Case, Factors
from .base import Call, Kind, Measure
from .harness import Point, interleave_ranks
from .place import Place


@dataclass(frozen=True)
class Benchmark:
    """What a kind asks of its study, for cases of no study. See base.Asked."""

    measure: Measure = field(default_factory=Measure)
    job: Raw = field(default_factory=dict)


@contextmanager
def opened(
    kind: Kind, place: Place, cases: Sequence[Factors], check: bool = True
) -> Iterator[list[Call]]:
    """Yield the calls of all cases, checked unless check is False. Collective.

    kind: whose repeats are calls; cases: the factors of each, as Kind.used returns them
    Raises what Kind.measure raises, on all ranks.
    """
    world, study, calls = place.world, Benchmark(), kind.measure
    assert not isinstance(calls, type), "its repeats are calls"
    nodes = len(set(world.nodes))
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                calls(study, Case("", each, nodes, world.ranks // nodes), place, check)
            )
            for each in cases
        ]


def measure(
    kind: Kind,
    place: Place,
    cases: Sequence[Factors],
    repeats: int,
    warmup: int,
    check: bool = True,
) -> list[Point]:
    """Check cases, time them in turns, and return a point for each. Collective.

    Arguments and errors are those of opened; warmup: calls before the repeats that count
    """
    with opened(kind, place, cases, check) as made:
        times = interleave_ranks(
            place.world,
            {i: call.run for i, call in enumerate(made)},
            repeats,
            warmup,
            lambda i: made[i].prepare(),
        )
    return [
        Point({**case, **call.chosen}, call.outcomes, times[i])
        for i, (case, call) in enumerate(zip(cases, made, strict=True))
    ]
