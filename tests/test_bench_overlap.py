"""bench overlap: its bound by hand, the figures of rows, weights that differ, wrong jobs."""

from pathlib import Path

import pytest

from cpdhpc.lab.bench import overlap
from cpdhpc.lab.bench.overlap import bound_s
from cpdhpc.lab.cli import main
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Ranks

JOB = """
[model]
name = "mlp"
hidden = [24, 16]
[data]
name = "digits"
[train]
batch = 20
bucket_mib = 0.001
[[compare]]
name = "float"
[[compare]]
name = "e4m3"
gradient = { aggregator = "lowbit", wire = "e4m3", rounding = "stochastic" }
"""


@pytest.mark.parametrize(
    ("ready_s", "shares", "compute_s", "reduce_s", "expected"),
    [
        ([3.0, 5.0], [1.0], 6.0, 4.0, 8.0),  # from 3 to 7, then the optimizer's 1
        ([3.0, 5.0], [1.0], 6.0, 1.0, 6.0),  # hidden by what is left of backward
        ([3.0, 5.0, 5.0], [0.5, 0.5], 5.5, 8.0, 11.5),  # 3 to 7, 7 to 11
        ([3.0, 5.0, 5.0], [0.25, 0.75], 5.5, 4.0, 8.5),  # 3 to 4, idle, 5 to 8
    ],
)
def test_the_bound_is_that_of_buckets_one_after_the_other(
    ready_s: list[float], shares: list[float], compute_s: float, reduce_s: float, expected: float
) -> None:
    assert bound_s(ready_s, shares, compute_s, reduce_s) == expected


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_each_row_has_its_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is shorter than its parts, and no file is written."""
    assert main(["bench", "overlap", str(job), "--repeats", "3", "--warmup", "1"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[0] != "#"}
    assert set(rows) == {"float", "e4m3"} and "2,130 parameters in 4 buckets" in out
    for cells in rows.values():
        compute, reduce, _, overlapped, _, _, bound, *ratios = map(float, cells)
        for ratio, to in zip(ratios[1:], (bound, max(compute, reduce)), strict=True):
            # Both are as printed, times to 0.05 ms and ratios to 0.005.
            assert abs(ratio * to - overlapped) <= 0.005 * to + 0.05 * (1 + ratio) + 1e-9
    assert [path.name for path in job.parent.iterdir()] == ["job.toml"]


def test_the_timeout_is_that_of_the_steps(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    check = overlap._check

    def noted(world: Ranks, *trainings: Training) -> None:
        found.extend(each.world.timeout_s for each in trainings)
        check(world, *trainings)

    monkeypatch.setattr(overlap, "_check", noted)
    options = ["--repeats", "1", "--rows", "float", "--timeout", "77"]
    assert main(["bench", "overlap", str(job), *options]) == 0 and found == [77.0, 77.0]


def test_rows_are_chosen(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", str(job), "--repeats", "1", "--rows", "e4m3"]) == 0
    assert "\n  float" not in capsys.readouterr().out


def test_weights_that_differ_are_an_error(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(training: Training) -> None:
        right(training)
        if training.job.train.overlap:
            next(training.model.parameters()).data[0, 0] += 1e-6

    right = overlap._step
    monkeypatch.setattr(overlap, "_step", step)
    with pytest.raises(SystemExit):
        main(["bench", "overlap", str(job)])
    assert "float-s0: weights differ with overlap and without" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rows e4m4", "--rows e4m4: did you mean e4m3?"),
        ("--rows ,", "--rows ,: names no row"),
        ("--repeats 0", "--repeats 0: must be 1 or more"),
        ("--set train.virtual_ranks=2", "float-s0: train.virtual_ranks=2"),
        ("--set stages.count=2", "float-s0: stages.count=2"),
        ("--set update.name=localsgd", "float-s0: update"),
        ("--set adversarial.epsilon=0.1", "float-s0: adversarial.epsilon=0.1"),
    ],
)
def test_what_cannot_overlap_is_refused_in_a_line(
    job: Path, options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "overlap", str(job), *options.split()]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
