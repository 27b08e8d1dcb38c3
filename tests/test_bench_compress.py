"""bench compress: figures beside sums by hand, the profile, the command line, files."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpdhpc import store
from cpdhpc.collectives import sparse
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.sparse import allgather
from cpdhpc.compress import COMPRESSORS, Context, Dgc, Mean, NoCompression, TopK
from cpdhpc.compress.bucket import Bucket
from cpdhpc.lab.bench.compress import (
    PACKAGE,
    PHASES,
    CallClock,
    Profile,
    method_of,
    of_digits,
    phase_of,
    replay,
)
from cpdhpc.lab.cli import main
from cpdhpc.lab.train import gradients
from cpdhpc.lab.train.gradients import Gradients
from cpdhpc.torch import GradientReducer
from cpdhpc.world.ranks import Loopback

SHAPES = {"weight": (30, 20), "kernel": (4, 5, 5)}
SIZE = 700


def made(ranks: int, iterations: int = 3) -> list[Gradients]:
    rng = np.random.default_rng(0)
    return [
        Gradients(
            time,
            ranks,
            {n: rng.standard_normal((ranks, *s)).astype(np.float32) for n, s in SHAPES.items()},
            "made",
        )
        for time in range(iterations)
    ]


def rows(each: Gradients, ranks: int) -> list[Any]:
    return [np.concatenate([v[r].ravel() for v in each.layers.values()]) for r in range(ranks)]


def test_figures_are_those_of_sums_by_hand() -> None:
    """The largest 50 and 10 of each layer of three ranks out of four, and what waits."""
    recorded, ranks = made(4), 3
    done = replay(Loopback(ranks), TopK(density=0.1), recorded)
    waiting = np.zeros((ranks, SIZE), np.float32)
    errors, cosines, nonzero, means, exacts = [], [], [], [], []
    for each in recorded:
        sent = np.zeros((ranks, SIZE))
        for rank, gradient in enumerate(rows(each, ranks)):
            waiting[rank] += gradient
            for part in (slice(0, 600), slice(600, 700)):
                order = np.argsort(-np.abs(waiting[rank][part]))
                kept = order[: len(order) // 10] + part.start
                sent[rank, kept], waiting[rank, kept] = waiting[rank, kept], 0
        mean, exact = sent.mean(0), np.mean(rows(each, ranks), axis=0, dtype=np.float64)
        errors.append(np.linalg.norm(mean - exact) / np.linalg.norm(exact))
        cosines.append(mean @ exact / np.linalg.norm(mean) / np.linalg.norm(exact))
        nonzero.append(np.count_nonzero(mean) / SIZE)
        means.append(mean)
        exacts.append(exact)
    total = np.linalg.norm(np.sum(means, 0) - np.sum(exacts, 0)) / np.linalg.norm(np.sum(exacts, 0))
    found = done.error, done.cosine, done.nonzero_share, done.sum_error
    expected = np.median(errors), np.median(cosines), np.mean(nonzero), total
    # float32 sums of three terms and a division: 4 roundings of 2**-24, in norms of like size
    assert found == pytest.approx(expected, rel=4 * 2**-23)
    assert done.sent_share == pytest.approx(0.1)
    # Two others get 70 values of 4 bytes, and indices of at most 700 bits: a bitmap of them.
    assert 2 * 70 * 4 < done.sent_bytes.min() <= done.sent_bytes.max() < 2 * (70 * 4 + 88 + 100)
    assert done.travel_s > 0 and done.local_s > 0
    assert done.time_s > 0 and sum(done.shares.values()) == pytest.approx(1)
    exact_one = replay(Loopback(4), COMPRESSORS["none"](), recorded)
    assert exact_one.error < 4 * 2**-23 and np.isnan(exact_one.sent_share)
    assert exact_one.sent_bytes.sum() == 2 * 3 * SIZE * 4  # a ring's


def test_collectives_are_timed_from_a_barrier_and_all_else_by_processor_time() -> None:
    """Neither the wait at the barrier nor sleep is in the one or the other."""
    waits_s, slept_s, worked_s = [], 0.03, 0.02

    class Late(Loopback):
        def barrier(self, what: str = "barrier") -> None:
            start_s = time.perf_counter()
            time.sleep(slept_s)
            waits_s.append(time.perf_counter() - start_s)

    def call() -> str:
        end_s = time.thread_time() + worked_s
        while time.thread_time() < end_s:
            pass
        time.sleep(slept_s)
        allgather(world, [np.ones(3), np.ones(5)])  # whose own agreement is within
        Allreduce("raw").run(world, [np.ones(3, np.float32)] * 2)
        world.max(np.zeros(1, np.int64))
        with pytest.raises(TypeError, match="must be a list"):
            sparse.allgather(world, None)  # type: ignore[arg-type]
        return "done"

    world = Late(2)
    clock, plain = CallClock(world), (sparse.allgather, Allreduce.run, set(vars(world)))
    with clock.watching():
        assert sparse.allgather is allgather is not plain[0]
        result, spent = clock.run(call)
        again = clock.run(lambda: None)[1]
    assert (sparse.allgather, Allreduce.run, set(vars(world))) == plain
    assert result == "done" and len(waits_s) == 4
    assert spent.local_s >= worked_s and spent.travel_s > 0
    assert spent.local_s + spent.travel_s + slept_s + sum(waits_s) <= spent.time_s
    assert again.travel_s == 0 and again.time_s < slept_s


def test_a_part_is_never_more_than_the_whole() -> None:
    """Of every method: its times are of the same calls."""
    recorded = made(4, 2)
    for name, kind in COMPRESSORS.items():
        done = replay(Loopback(4), kind(), recorded)
        assert 0 < done.travel_s <= done.time_s, name
        # Two clocks, of processor time and of time, read one after the other: 1 us apart or so.
        assert done.local_s <= done.time_s + 1e-4, name


@dataclass(frozen=True)
class SlowAtFirst(NoCompression):
    """A method that sets up something in its first two iterations."""

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        FIRST.append(context.state.shared("weight", "first", lambda: np.ones(1)).item())
        context.state.shared("weight", "first", lambda: np.ones(1))[:] = 0
        if len(FIRST) <= 2:
            time.sleep(SET_UP_S)
            context.world.max(np.zeros(1, np.int64), "set-up")
        return super().aggregate(gradients, bucket, context)


FIRST: list[float] = []
SET_UP_S = 0.5


def test_what_is_set_up_once_is_in_no_figure() -> None:
    """It happens in iterations before, whose memory is not the one of those that are timed."""
    FIRST.clear()
    done = replay(Loopback(2), SlowAtFirst(), made(2, 2))
    assert done.time_s < SET_UP_S and FIRST == [1, 0, 1, 0, 0]


SOURCE = """
def _select_some(then):
    work(0.02)
    return then()
def other():
    work(0.01)
    try:
        encode_all()
    except KeyError:
        work(0.01)
def encode_all():
    work(0.03)
    raise KeyError
"""


def test_the_profile_gives_time_to_the_innermost_phase() -> None:
    """At least what each works, and no more than all of it; an error on the way loses no place."""

    def work(duration_s: float) -> None:
        end_s = time.thread_time() + duration_s
        while time.thread_time() < end_s:
            pass

    space: dict[str, Any] = {"work": work}
    exec(compile(SOURCE, str(PACKAGE / "compress" / "any.py"), "exec"), space)
    profile, start_s = Profile(), time.thread_time()
    with profile.running():
        space["_select_some"](space["other"])
        work(0.01)
    whole_s = time.thread_time() - start_s
    assert sys.getprofile() is None
    least = {"select": 0.04, "encode": 0.03, "travel": 0, "decode": 0, "rest": 0.01}
    assert list(least) == list(PHASES)
    assert all(profile.time_s[phase] >= least_s for phase, least_s in least.items())
    assert profile.time_s["travel"] == profile.time_s["decode"] == 0
    assert sum(profile.time_s.values()) <= whole_s
    assert phase_of(str(PACKAGE / "collectives" / "engine.py"), "run") == "travel"
    assert phase_of(str(PACKAGE / "ops" / "cpu.py"), "decode_add_tiles") == "decode"
    assert phase_of(str(PACKAGE / "compress" / "adacomp.py"), "_leaders") == "select"
    assert phase_of(str(PACKAGE / "config.py"), "encode") is None


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """Files of two iterations of four ranks."""
    model, paths = torch.nn.Linear(20, 30), []
    reducer = GradientReducer(model, Loopback(4))
    for iteration in range(2):
        for rank in range(4):
            generator = torch.Generator().manual_seed(10 * iteration + rank)
            model.zero_grad()
            model(torch.randn(3, 20, generator=generator)).square().sum().backward()
            reducer.stash(rank)
        reducer.reduce()
        paths.append(tmp_path / f"g-{iteration}.h5")
        gradients.save(reducer, paths[-1], iteration, "mine")
    return list(map(str, paths))


@pytest.mark.usefixtures("without_figures")
def test_the_command_prints_writes_and_draws(
    tmp_path: Path, recorded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, methods = tmp_path / "new" / "out", ["none", "topk:density=0.5", "lowbit:wire=e3m0"]
    given = ["--gradients", *recorded[::-1], "--methods", *methods, "--out", str(out)]
    assert main(["bench", "compress", *given]) == 0
    text = capsys.readouterr().out
    assert "mine, 630 values in 2 layers, 2 iterations from 0" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == 2 * methods
    row = next(line for line in text.splitlines() if line.startswith("  none"))  # 4 ranks
    time_ms, value_ns = map(float, row.split()[9:11])
    # Three digits are printed of each: errors up to half of 1 % and of 1 %.
    assert value_ns == pytest.approx(time_ms * 1e6 / (630 * 4), rel=0.0101)
    groups, notes = store.read(out / "compress.h5")
    points = groups["points"]
    assert notes["benchmark"] == "compress" and notes["gradients"] == "mine"
    assert points["method"].tolist() == [m for m in methods for _ in range(2)]
    assert points["ranks"].tolist() == 3 * [2, 4]
    assert np.isnan(points["sent_bytes"][0]).tolist() == [False, False, True, True]
    assert points["sent_share"][3] == pytest.approx((300 + 30) / 630)  # the bias is dense
    assert points["phase_share"].sum(axis=1) == pytest.approx(np.ones(6))
    assert main(["report", str(out), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    rows = [
        line.split() for line in shown.splitlines() if line.split()[:1] in [[m] for m in methods]
    ]
    assert [row[:2] for row in rows] == [[m, str(r)] for m in methods for r in (2, 4)]
    assert [row[5] for row in rows][:2] == ["1.00", "1.00"], "cosines of what none sends"
    assert "topk:density=0.5" in (tmp_path / "page.html").read_text()
    assert (out / "compress.png").read_text().startswith("png: <Figure size")


def test_recommended_settings_by_one_word(
    recorded: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert method_of("dgc") == Dgc() and method_of("dgc", "recommended") == Dgc(momentum=0.7)
    for text in ("dgc:momentum=0.3", "powersgd:momentum=0.9", "topk", "none"):
        assert method_of(text, "recommended") == method_of(text)  # below it, nothing waits, none
    given = ["--methods", "none", "randomk", "topk", "--ranks", "2", "--settings", "recommended"]
    out = tmp_path / "out"
    assert main(["bench", "compress", "--gradients", *recorded, *given, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "# randomk: holds values back: train with momentum up to 0, see" in shown
    assert "# topk: holds values back: train with momentum up to 0.5, see" in shown
    assert "# none" not in shown
    assert store.read(out / "compress.h5")[1]["settings"] == "recommended"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--methods", "topkk"], "--methods topkk: did you mean topk"),
        (["--methods", "none,topk:wire=e3m0,density=.1,qsdg"], "--methods qsdg: did you mean qsgd"),
        (["--methods", "topk:density=2"], "--methods topk:density=2: density=2: should be less"),
        (["--methods", "topk:densty=1"], "unknown key densty: did you mean density"),
        (["--ranks", "2,8"], "--ranks 8: the gradients are those of 4 ranks"),
        (["--ranks", "x"], "--ranks x: must be numbers"),
        (["--gradients", "nothing.h5"], "nothing.h5: there is no such file"),
        (["--methods", 'terngrad:exclude=["w"]'], "no layer is called 'w'"),
    ],
)
def test_what_is_wrong_is_one_line(
    recorded: list[str], given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [] if "--gradients" in given else ["--gradients", *recorded]
    assert main(["bench", "compress", *files, *given]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_gradients_of_digits_are_of_every_rank() -> None:
    found = of_digits(2)
    assert {each.ranks for each in found} == {2} and len({each.iteration for each in found}) == 4
    layers = found[-1].layers
    assert sum(values[0].size for values in layers.values()) == 31_050
    assert all(np.isfinite(v).all() for v in layers.values())
    last = list(layers.values())[-1]
    assert np.abs(last).min(axis=1).max() > 0 and len(np.unique(last[:, 0])) == 2
