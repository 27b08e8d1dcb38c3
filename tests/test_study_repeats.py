"""Which processes measure a case, and when it has been measured often enough."""

from pathlib import Path

import numpy as np
from studies import small_study

from cpdhpc.lab.study.batch import TimedCalls, members
from cpdhpc.lab.study.cases import expand


def test_members_are_the_first_of_the_first_nodes():
    def of(nodes, shape):
        class Shape:
            nodes, ppn = shape

        return members(nodes, Shape)

    assert of((0, 0, 1, 1), (1, 1)) == [0]
    assert of((0, 0, 1, 1), (2, 1)) == [0, 2]
    assert of((0, 1, 0, 1), (1, 2)) == [0, 2]
    assert of((0, 0, 1, 1, 2, 2), (2, 2)) == [0, 1, 2, 3]


def test_a_case_ends_when_it_is_known_well_enough_or_has_had_its_share(tmp_path: Path) -> None:
    limits = {"min_repeats": 20, "max_repeats": 40, "max_time_s": 5.0}
    study = small_study(tmp_path, measure=limits)
    case = expand(study).cases[0]
    steady, wild = np.ones(60), np.geomspace(1, 1000, 60)
    for times_s, repeats, spent_s, done in (
        (steady, 19, 0.0, False),  # fewer than the least
        (steady, 20, 0.0, True),
        (wild, 39, 0.0, False),
        (wild, 40, 0.0, True),  # the most
        (wild, 19, 5.0, False),
        (wild, 20, 4.9, False),
        (wild, 20, 5.0, True),  # the time is over
    ):
        measuring = TimedCalls(study, case, tmp_path, None)  # type: ignore[arg-type]
        measuring.times_s = np.stack([times_s[: repeats + 2]] * 3, axis=1)
        measuring.is_warmup = (np.arange(repeats + 2) < 2).astype(np.uint8)
        assert len(measuring.counted) == repeats
        counted = measuring.counted
        is_over = study.measure.is_over(len(counted), spent_s, [counted])
        assert is_over == done, (repeats, spent_s)
