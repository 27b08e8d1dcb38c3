"""Timelines of several ranks: one file, clocks that agree, what each kind of call writes."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from training import write_idx, write_job

from cpdhpc import World, allreduce
from cpdhpc._cpu import set_timeline
from cpdhpc.darray import DistArray, Layout, WindowPlan, receptive
from cpdhpc.lab.cli import main
from cpdhpc.world import timeline
from cpdhpc.world.timeline import traced

Event = dict[str, Any]


@pytest.fixture
def world() -> World:
    return World()


def events_of(world: World, path: Path) -> list[Event]:
    """The complete events of a file, on all processes."""
    text = world.on_first(lambda: json.loads(path.read_text()))
    assert text["otherData"] == {"events left out": 0}
    return [each for each in text["traceEvents"] if each["ph"] == "X"]


def check_nesting(events: list[Event]) -> None:
    """Events of a thread lie within one another or apart, as viewers need them."""
    threads: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for each in events:
        threads[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for spans in threads.values():
        assert spans == sorted(spans, key=lambda span: span[0]), "in the order of beginnings"
        open_ones: list[float] = []
        for begin, end in spans:
            while open_ones and open_ones[-1] <= begin + 2e-3:  # digits of the file
                open_ones.pop()
            assert not open_ones or end <= open_ones[-1] + 2e-3
            open_ones.append(end)


def reduce_often(world: World, n: int, calls: int) -> None:
    x, out = np.ones(n, np.float32), np.empty(n, np.float32)
    for _ in range(calls):
        allreduce(world, x, wire="e4m3", algorithm="ring", out=out)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_an_allreduce(world: World, folder: Path, name: str) -> None:
    path = folder / name
    with traced(world, path):
        reduce_often(world, 1 << 14, 5)
    if name.endswith(".gz"):
        text = gzip.decompress(world.on_first(path.read_bytes))
        assert json.loads(text)["traceEvents"]
        return
    events = events_of(world, path)
    check_nesting(events)
    kinds = Counter((each["pid"], each["name"]) for each in events)
    for process in range(world.processes):
        assert kinds[process, "encode"] >= 5
        if world.processes > 1:
            assert kinds[process, "wait"] >= 1 and kinds[process, "send"] >= 5
    assert {each["cat"] for each in events} <= set(timeline.KINDS)
    assert all(each["dur"] >= 0 and each["ts"] >= 0 for each in events)


def test_a_halo(world: World, folder: Path) -> None:
    path = folder / "h.json"
    layout = Layout.grid((8 * world.size, 6), (world.size, 1))
    image = DistArray.from_global(world, layout, np.zeros(layout.shape, np.float32))
    window = receptive(layout.owner(world.rank), size=3, pad=1)
    plan = WindowPlan(world, layout, window, "reflect", name="filter")
    with traced(world, path):
        for _ in range(4):
            plan.exchange(image.local)
    events = events_of(world, path)
    check_nesting(events)
    kinds = Counter((each["pid"], each["name"]) for each in events)
    for process in range(world.processes):
        assert kinds[process, "copy"] >= 4
        assert world.processes == 1 or kinds[process, "send"] >= 4


def test_clocks_agree_however_far_apart(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 is 5 s ahead, and goes 1 % too fast: its events are where process 0's are."""
    path = folder / "c.json"
    start = time.monotonic_ns()

    def wrong(now: int) -> int:
        return now if world.process != 1 else now + 5 * 10**9 + (now - start) // 100

    original = timeline._in_ns

    def rows_of(rows: Any, *ends: Any) -> Any:
        found = original(rows, *ends)
        for at in (2, 3):
            found[:, at] = [wrong(int(each)) for each in found[:, at]]
        return found

    monkeypatch.setattr(timeline, "_in_ns", rows_of)
    clock = SimpleNamespace(monotonic_ns=lambda: wrong(time.monotonic_ns()))
    monkeypatch.setattr(timeline, "time", clock)
    with traced(world, path):
        for _ in range(3):
            world.barrier()
            time.sleep(0.05)
    events = events_of(world, path)
    if world.processes == 1:
        return
    ends: dict[int, list[float]] = defaultdict(list)
    for each in events:
        if each["name"] == "wait":
            ends[each["pid"]].append(each["ts"] + each["dur"])
    assert len(ends[0]) == len(ends[1])
    # A barrier ends within the time that a core may be someone else's, not 5 s later.
    assert max(abs(a - b) for a, b in zip(ends[0], ends[1], strict=True)) < 1e6


def test_what_there_is_no_room_for_is_counted(world: World, folder: Path) -> None:
    path = folder / "few.json"
    with traced(world, path, rows=3):
        reduce_often(world, 1 << 12, 6)
    text = world.on_first(lambda: json.loads(path.read_text()))
    assert text["otherData"]["events left out"] > 0
    of_all = [each for each in text["traceEvents"] if each["ph"] == "X"]
    assert len(of_all) == 3 * world.processes


def test_nothing_is_written_without_a_file_or_after_an_error(world: World, folder: Path) -> None:
    with traced(world, None):
        assert timeline.began() == 0
        reduce_often(world, 64, 2)
    path = folder / "no.json"
    with pytest.raises(ZeroDivisionError), traced(world, path):
        assert timeline.began() > 0
        raise ZeroDivisionError
    assert timeline.began() == 0 and not path.exists()
    assert set_timeline(None)[0] == 0


def test_a_place_that_cannot_be_written_is_an_error_of_all(world: World, folder: Path) -> None:
    path = folder / "not there" / "t.json"
    with pytest.raises(Exception, match="not there"), traced(world, path):
        pass


def test_a_job(world: World, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its phases follow one another on each rank, and what reduces lies inside reduce."""
    images, path, out = folder / "images", folder / "job.json", str(folder / "out")
    if world.process == 0:
        images.mkdir()
        write_idx(images)
        write_job(folder, "good", images)
    world.barrier()
    job = str(folder / "good.toml")
    assert main(["train", job, "--out", out, "--trace", str(path)]) == 0
    assert world.process or f"trace: {path}" in capsys.readouterr().out
    events = events_of(world, path)
    check_nesting(events)
    for process in range(world.processes):
        own = [each for each in events if each["pid"] == process]
        phases = [each for each in own if each["name"] in timeline.PHASES]
        steps = [each["name"] for each in phases if each["name"] != "reduce"]
        once = ["data", "forward_backward", "optimizer"]
        assert steps == once * (len(steps) // 3) and steps
        ends = [each["ts"] + each["dur"] for each in phases]
        assert all(b["ts"] >= a - 2e-3 for a, b in zip(ends, phases[1:], strict=False))
    wrong = folder / "not there" / "x.json"
    assert main(["train", job, "--out", out, "--resume", "--trace", str(wrong)]) == 2
    assert world.process or "is no directory that can be written to" in capsys.readouterr().err
