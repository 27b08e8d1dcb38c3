"""What a world keeps of calls that come again, without MPI: real ranks are in test_mpi_prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.collectives import known
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.known import KEPT, Entry, Known, Recordings, know, know_as, run_known
from cpdhpc.collectives.method import Method, Reduced, Segment
from cpdhpc.ops.call_list import OVERLAPS, STRANGE, UNLIKE
from cpdhpc.world.ranks import Loopback

NODES = (0, 0)
TOLD: tuple[Any, ...] = ((1,), (2,), "ring")
NONFINITE = 1  # what is neither well nor one of the three


class Stub:
    """A recording that notes its calls and gives what a test says, the last one again and again."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.calls, self.freed = list(codes or (0,)), list[tuple[Any, ...]](), False
        self.adapted = 0

    def free(self) -> None:
        self.freed = True

    def adapt(self, *_: object) -> None:
        self.adapted += 1

    def run_agreed(self, number: int, x: Any, total: Any, iteration: int) -> int:
        self.calls.append((number, x is total, iteration))
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        if code != OVERLAPS:
            total[...] = 2 * x
        return code


class World(Loopback):
    """Of two ranks with a board, as ranks that share memory have."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = NODES
        self.board: Any = SimpleNamespace(has_failed=False)
        self.account = self.lent_by = None

    @property
    def recordings(self) -> Recordings:
        return self.cache.get(Recordings, Recordings)


def with_recording(*codes: int) -> tuple[World, Stub]:
    """A world that knows a call as "key"."""
    world, stub = World(), Stub(*codes)
    entry = Entry(NODES, 2, stub, digest=world.recordings.next_digest())  # type: ignore[arg-type]
    whole = (Segment("x", 0, 5),)
    world.recordings.keep("key", Known(entry, stub, None, whole, TOLD))  # type: ignore[arg-type]
    return world, stub


def test_those_used_last_are_kept_and_others_are_freed() -> None:
    recordings, method = Recordings(), Method("raw")
    entries = [recordings.entry(method, n, NODES) for n in range(KEPT)]
    for entry in entries:
        entry.recording = Stub()  # type: ignore[assignment]
    assert recordings.entry(method, 0, NODES) is entries[0], "now the one used last"
    recordings.entry(method, KEPT, NODES)
    assert [e.recording.freed for e in entries] == [False, True] + [False] * (KEPT - 2)  # type: ignore[union-attr]
    assert len(recordings) == KEPT and (method, 1) not in recordings
    other = (0, 1)
    assert recordings.entry(method, 0, other) is not entries[0]
    assert entries[0].recording.freed and recordings[method, 0].nodes is other  # type: ignore[union-attr]
    assert recordings[method, 0].calls == 0


def test_digests_are_numbers_of_their_own_and_alike_everywhere() -> None:
    """Odd, of 62 bits; no iteration of the first 40 of one is one of another."""
    here, there = Recordings(), Recordings()
    digests = [here.next_digest() for _ in range(40)]
    assert digests == [there.next_digest() for _ in range(40)]
    numbers = set[int]()
    for digest in digests:
        world, stub = with_recording()
        world.recordings.known["key"].entry.digest = digest
        for iteration in range(40):
            assert run_known(world, "key", iteration, [np.ones(5, np.float32)], None) is not None
        numbers |= {number for number, *_ in stub.calls}
        assert stub.calls[0][0] == digest and [c[2] for c in stub.calls] == [*range(40)]
    assert len(numbers) == 40 * 40
    assert all(number % 2 and 0 < number < 2**62 for number in numbers)
    assert max(numbers) > 2**61, "all bits are used"


def test_as_many_calls_are_known() -> None:
    world, _ = with_recording()
    kept = world.recordings.known["key"]
    for number in range(KEPT - 1):
        world.recordings.keep(number, kept)
    assert len(world.recordings.known) == KEPT and "key" in world.recordings.known
    world.recordings.keep("one more", kept)
    assert [*world.recordings.known] == ["one more"]
    know_as(world, "alike", "one more")
    know_as(world, "nothing", "unknown")
    assert world.recordings.known == {"one more": kept, "alike": kept}


CHANGES: dict[str, Any] = {
    "failed": lambda world, stub: setattr(world.board, "has_failed", True),
    "counted": lambda world, stub: setattr(world, "account", object()),
    "lent": lambda world, stub: setattr(world, "lent_by", object()),
    "freed": lambda world, stub: stub.free(),
    "nodes": lambda world, stub: setattr(world, "nodes", (0, 1)),
}


@every("name", CHANGES)
def test_what_cannot_be_run_at_once_is_not(name: str) -> None:
    world, stub = with_recording()
    xs = [np.ones(5, np.float32)]
    for key, iteration in (
        ("other", 0),
        (["no hash"], 0),
        ("key", True),
        ("key", 2**62),
        ("key", -1),
    ):
        assert run_known(world, key, iteration, xs, None) is None  # type: ignore[arg-type]
    assert run_known(world, "key", 2**62 - 1, xs, None) is not None
    stub.calls.clear()
    CHANGES[name](world, stub)
    assert run_known(world, "key", 0, xs, None) is None and not stub.calls


def test_results_go_where_they_should() -> None:
    x, out = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    world, stub = with_recording()
    got = run_known(world, "key", 0, [x], None)
    assert got is not None and got[1:] == TOLD and (got.arrays[0] == 2 * x).all()
    got = run_known(world, "key", 0, [x], [out])
    assert got is not None and got.arrays[0] is out and (out == 2 * x).all()
    world, stub = with_recording(OVERLAPS, 0)
    inside = x.copy()
    got = run_known(world, "key", 7, [inside], [inside])
    assert got is not None and got.arrays[0] is inside and got[1:] == TOLD
    assert (inside == 2 * x).all(), "from the array that the second run filled"
    assert [call[1:] for call in stub.calls] == [(True, 7), (False, 7)]
    assert stub.calls[0][0] == stub.calls[1][0]


@every("code", [UNLIKE, STRANGE, NONFINITE])
def test_what_others_do_or_hold_ends_a_guess(code: int) -> None:
    """A wrong guess is the last one; what others know nothing of may be known to them later."""
    world, _ = with_recording(code)
    x = np.full(5, np.nan, np.float32)
    if code == NONFINITE:
        with pytest.raises(NonFiniteGradient):
            run_known(world, "key", 0, [x], None)
    else:
        assert run_known(world, "key", 0, [x], None) is None
    assert world.board.has_failed == (code == UNLIKE)


def test_a_call_is_known_where_it_is_a_recording_and_nothing_else() -> None:
    reduced, keeps = Reduced((np.ones(5, np.float32),), *TOLD), object()
    found = {}
    for name, method, recorded, board in (
        ("plain", Method("raw"), True, True),
        ("tiles", Method("e4m3", scaling="tile"), True, True),
        ("shared shifts", Method("e4m3", scaling="aps"), True, True),
        ("hidden NaN", Method("e2m1fn", scaling="none"), True, True),
        ("not recorded", Method("raw"), False, True),
        ("no board", Method("raw"), True, False),
    ):
        world = World()
        world.board = world.board if board else None
        know(world, "k", keeps, method, 5, (), reduced)
        assert not world.recordings.known, "nothing is made for it"
        entry = world.recordings.entry(method, 5, NODES)
        entry.recording = Stub() if recorded else None  # type: ignore[assignment]
        know(world, "k", keeps, method, 5, (), reduced)
        know(world, ["no hash"], keeps, method, 5, (), reduced)  # type: ignore[arg-type]
        found[name] = [*world.recordings.known] == ["k"]
        for told in world.recordings.known.values():
            assert told.entry is entry and told.recording is entry.recording
            assert told.keeps is keeps and told.told == TOLD
            assert told.segments == (Segment("x", 0, 5),)
    assert [name for name, is_known in found.items() if is_known] == ["plain", "tiles"]


def test_the_second_call_is_recorded_and_later_ones_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def recording(*given: Any, **how: Any) -> Stub:
        made.append((given, how))
        return Stub()

    monkeypatch.setattr(known, "Recording", recording)
    x, world = np.ones(5, np.float32), World()
    for scaling, adapts in (("tile", 0), ("aps", 2)):
        method = Method("e4m3", scaling=scaling)
        found: list[Any] = [known.recording_of(world, method, x, (), None) for _ in range(4)]  # type: ignore[arg-type]
        assert found[0] is None and found[1] is found[2] is found[3] is not None
        assert found[1].adapted == adapts
        given, how = made.pop()
        assert not made and given[:2] == (world, method) and how == {"moves": True}
        assert [a.shape for a in given[2:4]] == [(5,)] * 2 and given[2] is not given[3]
    digests = [entry.digest for entry in world.recordings.values()]
    assert len(set(digests)) == 2 and all(digests)
    world.virtual_ranks = 2
    assert known.recording_of(world, method, x, (), None) is None  # type: ignore[arg-type]
    world.virtual_ranks = 1
    assert known.recording_of(world, method, x.tolist(), (), None) is None  # type: ignore[arg-type]


def test_plain_arrays_are_one_and_none_or_one() -> None:
    x, own = np.ones(2), np.ones(2).view(type("Own", (np.ndarray,), {}))
    for xs, outs in (([x], None), ((x,), [x]), ([x], (x,))):
        assert known.are_plain(xs, outs)
    for xs, outs in (
        *((x, None), ([], None), ([x, x], None), ([own], None), ([[1.0]], None)),
        *(([x], x), ([x], []), ([x], [x, x]), ([x], [own])),
    ):
        assert not known.are_plain(xs, outs)
