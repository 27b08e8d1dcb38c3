"""Timelines of several ranks: one file, clocks that agree, what each kind of call writes."""

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
    """The complete events of a file, on all processes, once the file is what viewers need."""
    raw = world.on_first(path.read_bytes)
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    whole = json.loads(text, parse_constant=no_number, object_pairs_hook=each_key_once)
    assert whole.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    assert whole["otherData"] == {"events left out": 0}
    return checked(whole["traceEvents"])


def no_number(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


NUMBER = (int, float)
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of a phase: needed ones, others
    "M": ({"ph": str, "name": str, "pid": int, "args": dict}, {}),
    "X": (
        {"ph": str, "name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "dur": NUMBER},
        {"args": dict},
    ),
}


def checked(events: list[Event]) -> list[Event]:
    """Return the complete events; check fields, types, names of processes, order and nesting.

    Source: Trace Event Format, Google, 2016: sections on complete and metadata events. Viewers drop
    complete events of a thread that overlap and do not nest. Times are whole nanoseconds here.
    """
    named, last = set[int](), dict[tuple[int, int], int]()
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    found = []
    for each in events:
        needed, others = FIELDS[each["ph"]]
        assert needed.keys() <= each.keys() <= needed.keys() | others.keys(), each
        for key, value in each.items():
            assert isinstance(value, (needed | others)[key]) and not isinstance(value, bool), each
        if each["ph"] == "M":
            assert each["name"] == "process_name" and each["args"].keys() == {"name"}
            assert isinstance(each["args"]["name"], str) and each["pid"] not in named
            named.add(each["pid"])
            continue
        assert each["pid"] in named, "a process has a name before its events"
        assert each["name"] == each["cat"] and each["name"] in timeline.KINDS
        thread = each["pid"], each["tid"]
        begin_ns, took_ns = (round(each[key] * 1000) for key in ("ts", "dur"))
        assert abs(each["ts"] * 1000 - begin_ns) < 1e-3 > abs(each["dur"] * 1000 - took_ns)
        assert begin_ns >= last.get(thread, 0) and took_ns >= 0, "in the order of beginnings"
        last[thread] = begin_ns
        ends = open_until[thread]
        while ends and ends[-1] <= begin_ns:
            ends.pop()
        assert not ends or begin_ns + took_ns <= ends[-1], "within one another, or apart"
        ends.append(begin_ns + took_ns)
        found.append(each)
    return found


def reduce_often(world: World, n: int, calls: int) -> None:
    x, out = np.ones(n, np.float32), np.empty(n, np.float32)
    for _ in range(calls):
        allreduce(world, x, wire="e4m3", algorithm="ring", out=out)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_an_allreduce(world: World, folder: Path, name: str) -> None:
    path = folder / name
    with traced(world, path):
        reduce_often(world, 1 << 14, 5)
    events = events_of(world, path)
    kinds = Counter((each["pid"], each["name"]) for each in events)
    for process in range(world.processes):
        assert kinds[process, "encode"] >= 5
        if world.processes > 1:
            assert kinds[process, "wait"] >= 1 and kinds[process, "send"] >= 5


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
