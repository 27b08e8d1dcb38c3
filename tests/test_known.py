"""What a world keeps of calls that come again, without MPI: real ranks are in test_mpi_prepared."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc._cpu import end_list, make_board, make_list, run_agreed
from cpdhpc.collectives import recorded
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Method, Op, Reduced, Segment
from cpdhpc.collectives.recorded import KEPT, Known, Recordings, keep, know, know_as, run_known
from cpdhpc.ops.cpu import LOOKS, OVERLAPS, STRANGE, UNLIKE
from cpdhpc.world.mpi import World as MpiWorld
from cpdhpc.world.ranks import Loopback

NODES = (0, 0)
TOLD: tuple[Any, ...] = ((1,), (2,), "ring")
KEY = "call", (5,), None
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

    def run_agreed(self, number: int, xs: Any, totals: Any, iteration: int) -> int:
        x, total = xs[0], totals[0]
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
        self.board: Any = SimpleNamespace(has_failed=False, known={})
        self.account = self.lent_by = None

    @property
    def recordings(self) -> Recordings:
        return self.cache.get(Recordings, Recordings)


def with_recording(*codes: int) -> tuple[World, Stub]:
    """A world that knows a call, with five values and no segments, as "call"."""
    world, stub = World(), Stub(*codes)
    digest = world.recordings.next_digest()
    whole = (Segment("x", 0, 5),)
    keep(world.board.known, KEY, Known(NODES, stub, digest, None, whole, TOLD))  # type: ignore[arg-type]
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
    numbers, x = set[int](), [np.ones(5, np.float32)]
    for digest in digests:
        world, stub = with_recording()
        world.board.known[KEY].digest = digest
        for iteration in range(40):
            assert run_known(world, "call", None, iteration, x, None) is not None
        numbers |= {number for number, *_ in stub.calls}
        assert stub.calls[0][0] == digest and [c[2] for c in stub.calls] == [*range(40)]
    assert len(numbers) == 40 * 40
    assert all(number % 2 and 0 < number < 2**62 for number in numbers)
    assert max(numbers) > 2**61, "all bits are used"


def test_as_many_calls_are_known() -> None:
    world, _ = with_recording()
    calls = world.board.known
    kept = calls[KEY]
    for number in range(KEPT - 1):
        keep(calls, number, kept)
    assert len(calls) == KEPT and KEY in calls
    keep(calls, KEY, kept)
    assert [*calls] == [KEY]
    know_as(world, "alike", "call", np.ones(5))
    know_as(world, "nothing", "unknown", np.ones(5))
    know_as(world, "nothing", "call", np.ones(4))
    assert calls == {KEY: kept, ("alike", (5,), None): kept}


CHANGES: dict[str, Any] = {
    "failed": lambda world, stub: setattr(world.board, "has_failed", True),
    "apart": lambda world, stub: setattr(world, "board", None),
    "counted": lambda world, stub: setattr(world, "account", object()),
    "lent": lambda world, stub: setattr(world, "lent_by", object()),
    "freed": lambda world, stub: stub.free(),
    "nodes": lambda world, stub: setattr(world, "nodes", (0, 1)),
}


@every("name", CHANGES)
def test_what_cannot_be_run_at_once_is_not(name: str) -> None:
    world, stub = with_recording()
    x = np.ones(5, np.float32)
    for what, segments, iteration, xs in (
        ("other", None, 0, [x]),
        (["no hash"], None, 0, [x]),
        ("call", [Segment("x", 0, 5)], 0, [x]),
        ("call", [["no hash"]], 0, [x]),
        ("call", None, True, [x]),
        ("call", None, 2**62, [x]),
        ("call", None, -1, [x]),
        ("call", None, 0, [x[:4]]),
        ("call", None, 0, []),
        ("call", None, 0, None),
        ("call", None, 0, [None]),
    ):
        assert run_known(world, what, segments, iteration, xs, None) is None and not stub.calls  # type: ignore[arg-type]
    assert run_known(world, "call", None, 2**62 - 1, [x], None) is not None
    stub.calls.clear()
    CHANGES[name](world, stub)
    assert run_known(world, "call", None, 0, [x], None) is None and not stub.calls


def test_results_go_where_they_should() -> None:
    x, out = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    world, stub = with_recording()
    got = run_known(world, "call", None, 0, [x], None)
    assert type(got) is Reduced and got[1:] == TOLD and (got.arrays[0] == 2 * x).all()
    got = run_known(world, "call", None, 0, [x], [out])
    assert type(got) is Reduced and got.arrays[0] is out and (out == 2 * x).all()
    world, stub = with_recording(OVERLAPS, 0)
    inside = x.copy()
    got = run_known(world, "call", None, 7, [inside], [inside])
    assert type(got) is Reduced and got.arrays[0] is inside and got[1:] == TOLD
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
            run_known(world, "call", None, 0, [x], None)
    else:
        assert run_known(world, "call", None, 0, [x], None) is None
    assert world.board.has_failed == (code == UNLIKE)


def test_a_call_is_known_where_it_is_a_recording_and_nothing_else() -> None:
    x, keeps = np.ones(5, np.float32), object()
    reduced = Reduced((x,), *TOLD)
    found = {}
    for name, method, is_recorded, board in (
        ("plain", Method("raw"), True, True),
        ("tiles", Method("e4m3", scaling="tile"), True, True),
        ("shared shifts", Method("e4m3", scaling="aps"), True, True),
        ("hidden NaN", Method("e2m1fn", scaling="none"), True, True),
        ("not recorded", Method("raw"), False, True),
        ("no board", Method("raw"), True, False),
    ):
        world = World()
        calls = world.board.known
        world.board = world.board if board else None
        know(world, "k", keeps, method, x, None, (), reduced)
        assert not calls, "nothing is made for it"
        entry = world.recordings.entry(method, 5, NODES)
        entry.recording = Stub() if is_recorded else None  # type: ignore[assignment]
        segments = [Segment("x", 0, 5)]
        know(world, "k", keeps, method, x, None, (), reduced)
        know(world, "k", keeps, method, x, segments, tuple(segments), reduced)
        know(world, "k", keeps, method, x, iter(segments), tuple(segments), reduced)
        know(world, ["no hash"], keeps, method, x, None, (), reduced)  # type: ignore[arg-type]
        found[name] = [*calls] == [("k", (5,), None), ("k", (5,), tuple(segments))]
        for told in calls.values():
            assert told.recording is entry.recording and told.digest == entry.digest
            assert told.keeps is keeps and told.outcome == TOLD
            assert told.segments == (Segment("x", 0, 5),)
    assert [name for name, is_known in found.items() if is_known] == ["plain", "tiles"]


def test_the_second_call_is_recorded_and_later_ones_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def recording(*given: Any, **how: Any) -> Stub:
        made.append((given, how))
        return Stub()

    monkeypatch.setattr(recorded, "RecordedCall", recording)
    x, world = np.ones(5, np.float32), World()
    for scaling, adapts in (("tile", 0), ("aps", 2)):
        method = Method("e4m3", "ring", scaling=scaling)
        found: list[Any] = [recorded.recording_of(world, method, x, (), None) for _ in range(4)]  # type: ignore[arg-type]
        assert found[0] is None and found[1] is found[2] is found[3] is not None
        assert found[1].adapted == adapts
        given, how = made.pop()
        assert not made and given[:2] == (world, method) and how == {"moves": True, "blocks": None}
        assert [a.shape for a in given[2:4]] == [(5,)] * 2 and given[2] is not given[3]
    digests = [entry.digest for entry in world.recordings.values()]
    assert len(set(digests)) == 2 and all(digests)
    world.virtual_ranks = 2
    assert recorded.recording_of(world, method, x, (), None) is None  # type: ignore[arg-type]
    world.virtual_ranks = 1
    assert recorded.recording_of(world, method, x.tolist(), (), None) is None  # type: ignore[arg-type]


def test_plain_arrays_are_one_and_none_or_one() -> None:
    x, own = np.ones(2), np.ones(2).view(type("Own", (np.ndarray,), {}))
    for xs, outs in (([x], None), ((x,), [x]), ([x], (x,))):
        assert recorded.are_plain(xs, outs)
    for xs, outs in (
        *((x, None), ([], None), ([x, x], None), ([own], None), ([[1.0]], None)),
        *(([x], x), ([x], []), ([x], [x, x]), ([x], [own])),
    ):
        assert not recorded.are_plain(xs, outs)


def test_a_compiled_run_takes_lists_of_one_plain_array() -> None:
    """Of anything else it says so, and the others are told nothing: its number is not written."""
    x, board = np.arange(6, dtype=np.float32), np.zeros(128, np.uint8)
    word, counters = np.zeros(8, np.uint8), np.zeros(2, np.int64)
    calls, out = make_list(x.copy(), x.copy(), ((word,),)), np.empty_like(x)
    end_list(calls, 1, False, counters[:1], 0, counters[1:], 0)

    def found(xs: Any, outs: Any) -> int:
        return run_agreed(met, 7, calls, 1, LOOKS, xs, outs)

    met, square = make_board((board,)), x.reshape(2, 3)
    for xs, outs in (([x], [out]), ((x,), (out,)), ([square], [out.reshape(2, 3)])):
        told = board.copy()
        assert found(xs, outs) == 0 and (board != told).any()
    assert found([x], [x]) == OVERLAPS
    own, frozen = x.view(type("Own", (np.ndarray,), {})), out.copy()
    frozen.flags.writeable = False
    far = np.zeros(12, np.float32)[::2]
    told = board.copy()
    for wrong in (x, square, [], [x, x], [[x]], None, iter([x]), [own], [far], [x[:5]], [None]):
        assert found(wrong, [out]) == found([x], wrong) == STRANGE
    for wrong in (x.astype(np.float64), x.astype(np.int32), x.astype(">f4"), square):
        assert found([wrong], [out]) == STRANGE
    assert found([x], [frozen]) == STRANGE and (board == told).all()


@every("wire, op", [("raw", "sum"), ("e4m3", "mean"), ("e4m3", "sum")])
def test_a_process_alone_runs_calls_that_come_again_at_once(wire: str, op: Op) -> None:
    """With the bits of the simulation, in place too, and with the errors of a first call."""
    world = MpiWorld()
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    wanted = simulate([x], wire, "ring", op=op).tobytes()
    method = Allreduce(wire, "ring", op=op)
    for _ in range(4):
        assert method.run(world, [x]).arrays[0].tobytes() == wanted
        again = x.copy()
        assert allreduce(world, again, wire, "ring", op=op, out=again).tobytes() == wanted
    assert {key[0] for key in world.board.known} >= {id(method)}
    bad = x.copy()
    bad[7] = np.nan
    if wire != "raw":
        with pytest.raises(NonFiniteGradient):
            method.run(world, [bad])
    with pytest.raises(TypeError, match="float64"):
        allreduce(world, x.astype(np.float64), wire, "ring", op=op)
    assert method.run(world, [x]).arrays[0].tobytes() == wanted
    world.free()
