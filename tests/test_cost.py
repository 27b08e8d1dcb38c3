"""Predicted times against formulas worked out by hand, the fit, and what "auto" chooses."""

import itertools
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from every import every
from refusing import refused

from cpdhpc.collectives import predict as model
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.method import DEFAULT, UNITS, Machine, as_machine, read_machine
from cpdhpc.collectives.predict import choose, fastest, predict
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.config import ConfigError, UserError, dump_toml
from cpdhpc.formats import TILE
from cpdhpc.lab.bench import machine as bench
from cpdhpc.lab.bench.machine import Sample, Turns, fit, judged, undisturbed
from cpdhpc.lab.kinds.timing import line, nonnegative
from cpdhpc.world.ranks import Loopback

MACHINE = Machine(
    alpha_s=3e-6,
    beta_s=2e-10,
    host_s=0.0,
    near_s=0.0,
    own_cache_bytes=0.0,
    memory_s=0.0,
    cache_bytes=0.0,
    gamma_s=7e-11,
    copy_s=0.0,
    encode_s=5e-11,
    decode_s=3e-11,
    decode_add_s=4e-11,
    hop_s=9e-11,
    step_s=1e-5,
    call_s=2e-4,
)
# A prediction is a sum of fewer than 10,000 terms, each rounded to 2**-53 of the total.
ROUNDING = 10_000 * 2.0**-53


def nodes(ranks: int) -> tuple[int, ...]:
    """Return the nodes of ranks that have one each."""
    return tuple(range(ranks))


def predicted_s(name: str, wire: str, ranks: int, n: int, machine: Machine = MACHINE) -> float:
    way = None if name == "direct" else "requantise"
    return predict(machine, Allreduce(wire, name, accumulate=way), nodes(ranks), n).time_s


def before_s(ranks: int) -> float:
    """Of the call, and of comparing its arguments."""
    return MACHINE.call_s + MACHINE.alpha_s * int(np.ceil(np.log2(ranks)))


@every("ranks", [2, 3, 5, 8, 16, 33])
@every("tiles", [1, 6])
def test_schedules_of_equal_chunks_take_what_their_formulas_say(ranks: int, tiles: int) -> None:
    """In each round a message of n / p values, what is done to it, and the step itself."""
    m, n = MACHINE, ranks * tiles * TILE
    raw_bytes, packed_bytes = 4 * tiles * TILE, tiles * (TILE + 1)
    rounds = 2 * (ranks - 1)
    steps_s, add_s = rounds * (m.step_s + m.alpha_s), (ranks - 1) * m.gamma_s * raw_bytes
    raw_s = before_s(ranks) + steps_s + rounds * m.beta_s * raw_bytes + add_s
    for name in ("ring", "direct"):
        assert predicted_s(name, "raw", ranks, n) == pytest.approx(raw_s, rel=ROUNDING)
    packed_s = before_s(ranks) + steps_s + rounds * m.beta_s * packed_bytes
    hops_s = (m.encode_s + (ranks - 1) * m.hop_s + ranks * m.decode_s) * raw_bytes
    assert predicted_s("ring", "e4m3", ranks, n) == pytest.approx(packed_s + hops_s, rel=ROUNDING)


@every("levels", [1, 2, 3, 5])
def test_the_tree_takes_what_its_formula_says(levels: int) -> None:
    """Up and down once a level, two additions on each but the lowest; n is one piece.

    Two, as the program adds what came when the next has come or the sum is needed. With no time
    for steps: theirs overlap with messages, and depend on the rank.
    """
    m, n = replace(MACHINE, step_s=0.0), 5 * TILE
    level_s = 2 * (m.alpha_s + m.beta_s * 4 * n)
    expected_s = before_s(2**levels) + levels * level_s + (2 * levels - 1) * m.gamma_s * 4 * n
    assert predicted_s("tree", "raw", 2**levels, n, m) == pytest.approx(expected_s, rel=ROUNDING)


@every("ranks", [2, 5, 16])
def test_gather_takes_what_its_formula_says(ranks: int) -> None:
    m, n = MACHINE, 7 * TILE
    round_s = m.step_s + m.alpha_s + (m.beta_s + m.gamma_s) * 4 * n
    expected_s = before_s(ranks) + (ranks - 1) * round_s
    assert predicted_s("gather", "raw", ranks, n) == pytest.approx(expected_s, rel=ROUNDING)


@every("ranks", [2, 3, 5, 12])
def test_in_a_node_what_lies_in_the_arrays_is_copied_for_the_others(ranks: int) -> None:
    """The ring: the first chunk sent, the own result, and all results that come; all else stays."""
    n = ranks * 3 * TILE
    m = replace(MACHINE, copy_s=4e-11, near_s=6e-11, own_cache_bytes=8.0 * n)
    chunk_bytes, steps_s = 4 * n // ranks, 2 * (ranks - 1) * MACHINE.step_s
    each_s = m.gamma_s + 2 * m.near_s  # of a chunk that is added, and one that comes back
    work_s = (m.copy_s * (ranks + 1) + each_s * (ranks - 1)) * chunk_bytes
    expected_s = m.call_s + steps_s + work_s
    found_s = predict(m, Allreduce("raw"), (0,) * ranks, n).time_s
    assert found_s == pytest.approx(expected_s, rel=ROUNDING)
    for held, share in ((9 * n, 1.0), (2 * n, 0.25), (0, 0.0)):  # of both arrays, in caches
        held_s = predict(replace(m, own_cache_bytes=float(held)), Allreduce("raw"), (0,) * ranks, n)
        near_s = 2 * m.near_s * (ranks - 1) * chunk_bytes
        assert held_s.time_s == pytest.approx(expected_s - (1 - share) * near_s, rel=ROUNDING)


@every("name", ["ring", "rhd"])
@every("wire", ["raw", "e4m3"])
@every("ranks", [2, 3, 5])
def test_each_value_comes_from_memory_once_and_goes_there_once(
    ranks: int, wire: str, name: str
) -> None:
    """Beside the times in the cache; the part that caches hold is left out."""
    machine, n = replace(MACHINE, copy_s=4e-11, memory_s=1e-10), ranks * 64 * TILE
    method, near = Allreduce(wire, name), (0,) * ranks
    expected_s = 1e-10 * (4 * n + 4 * n)
    in_cache_s = predict(replace(machine, memory_s=0.0), method, near, n).time_s
    assert in_cache_s > 0
    found_s = predict(machine, method, near, n).time_s
    assert found_s == pytest.approx(in_cache_s + expected_s, rel=ROUNDING)
    for held, left in ((2 * n, 0.75), (8 * n, 0.0), (9 * n, 0.0)):
        cached = replace(machine, cache_bytes=float(held))
        found_s = predict(cached, method, near, n).time_s
        assert found_s == pytest.approx(in_cache_s + left * expected_s, rel=ROUNDING)


@every("wire", ["raw", "e4m3", "ternary", "int8"])
@every("name", SCHEDULES)
def test_the_bytes_are_those_that_leave_the_ranks(name: str, wire: str) -> None:
    world = Loopback(6)
    Allreduce(wire, name).run(world, [np.zeros(5000, np.float32)] * 6)
    found = predict(MACHINE, Allreduce(wire, name), world.nodes, 5000)
    assert found.wire_bytes == round(world.bytes_sent.mean())
    assert found.simulated == 6


@pytest.mark.parametrize("wire", ["raw", "e4m3", "ternary"])
@pytest.mark.parametrize("name", ["ring", "rhd", "direct", "hier", "gather"])
def test_one_rank_stands_for_all(monkeypatch: pytest.MonkeyPatch, name: str, wire: str) -> None:
    machine, method = replace(MACHINE, host_s=4e-11, copy_s=3e-11), Allreduce(wire, name)
    if name in ("ring", "rhd"):  # sums in rank order read x early or late
        machine = replace(machine, memory_s=1e-10)
    shapes = [nodes(8), (0,) * 8, *[(0, 0, 0, 0, 1, 1, 1, 1)] * (name == "hier")]
    # one piece and several; the same chunks on all ranks
    for n, where in itertools.product((8 * TILE, 6 << 20), shapes):
        monkeypatch.setattr(model, "ALL_RANKS", 8)
        everyone = predict(machine, method, where, n)
        monkeypatch.setattr(model, "ALL_RANKS", 1)
        one = predict(machine, method, where, n)
        assert (everyone.simulated, one.simulated) == (8, 1)
        assert one.time_s == pytest.approx(everyone.time_s, rel=ROUNDING)
        assert one.wire_bytes == everyone.wire_bytes


def test_trees_are_simulated_by_all_ranks() -> None:
    for name in ("tree", "dbtree"):
        assert predict(MACHINE, Allreduce("raw", name), nodes(20), TILE).simulated == 20


@every("name", SCHEDULES)
def test_pieces_that_are_not_simulated_are_estimated(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No bound: the estimate is for many pieces, and within a quarter here."""
    monkeypatch.setattr(model, "WINDOWS", 1000)
    whole_s = predicted_s(name, "e4m3", 4, 40 << 20)
    monkeypatch.setattr(model, "WINDOWS", 4)
    assert predicted_s(name, "e4m3", 4, 40 << 20) == pytest.approx(whole_s, rel=0.25)


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_of_anything_takes_no_less_time(name: str) -> None:
    machine = replace(MACHINE, host_s=4e-11, copy_s=3e-11)
    for wire in ("raw", "e4m3"):
        by_size = [predicted_s(name, wire, 5, n, machine) for n in (1, TILE, 50 * TILE, 1 << 20)]
        assert by_size == sorted(by_size) and by_size[0] < by_size[-1]
        by_ranks = [predicted_s(name, wire, p, 1 << 16, machine) for p in (1, 2, 4, 16)]
        assert by_ranks == sorted(by_ranks) and by_ranks[0] < by_ranks[-1]
        for field in fields(Machine):
            if field.name == "cache_bytes":
                continue
            slower = replace(machine, **{field.name: 3 * getattr(machine, field.name)})
            assert predicted_s(name, wire, 6, 1 << 16, slower) >= predicted_s(
                name, wire, 6, 1 << 16, machine
            )


def test_a_thousand_ranks() -> None:
    """Trees have logarithmic, the ring has linear depth."""
    found = {name: predicted_s(name, "e4m3", 1024, 1 << 12) for name in ("ring", "tree", "rhd")}
    assert found["ring"] > 2046 * (MACHINE.alpha_s + MACHINE.step_s)
    assert found["tree"] < found["ring"] / 20 and found["rhd"] < found["ring"] / 20


def test_aps_costs_another_agreement_and_a_pass() -> None:
    tile, aps = (
        predict(replace(MACHINE, copy_s=1e-11, beta_s=0.0), Allreduce("e4m3", "ring", s), (0, 1), n)
        for s, n in (("tile", 4096), ("aps", 4096))
    )
    assert aps.time_s - tile.time_s == pytest.approx(MACHINE.alpha_s + 1e-11 * 4 * 4096, rel=1e-6)


def test_a_line_and_least_squares_are_recovered() -> None:
    sizes = [8 << i for i in range(18)]
    found = line(sizes, [3e-6 + 2e-10 * size for size in sizes])
    assert found == pytest.approx((3e-6, 2e-10), rel=1e-9)
    assert line([8, 16, 32], [1e-6, 1e-6, 0.9e-6])[1] == 0.0
    a = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert nonnegative(a, a @ [2.0, 0.5]).tolist() == pytest.approx([2.0, 0.5])
    assert nonnegative(a, np.array([2.0, 1.0, 0.0])).tolist() == pytest.approx([1.0, 0.0])
    assert nonnegative(a, -np.ones(3)).tolist() == [0.0, 0.0]


def samples_of(
    machine: Machine, methods: list[Allreduce], places: list[tuple[int, ...]], sizes: list[int]
) -> list[Sample]:
    """What a machine would take, for each of these all-reduces."""
    return [
        Sample(method, where, n, predict(machine, method, where, n).time_s)
        for method, where, n in itertools.product(methods, places, sizes)
    ]


def test_the_fit_recovers_a_machine() -> None:
    truth = replace(MACHINE, host_s=1.5e-10, step_s=2.5e-5, call_s=8e-5)
    methods = [Allreduce(w, a) for w, a in (("raw", "gather"), ("e4m3", "tree"), ("raw", "ring"))]
    samples = samples_of(truth, methods, [nodes(2), nodes(4)], [2, 1 << 16])
    start = replace(truth, host_s=0.0, step_s=0.0, call_s=0.0)
    found = fit(start, samples, ["call_s", "step_s", "host_s"])
    assert asdict(found) == pytest.approx(asdict(truth), rel=1e-6)


def test_the_fit_recovers_the_memory_of_a_node() -> None:
    truth = replace(MACHINE, copy_s=4e-11, memory_s=2e-10, cache_bytes=1e5, call_s=8e-6)
    methods = [Allreduce("raw", "tree"), Allreduce("e4m3"), Allreduce("raw")]
    samples = samples_of(truth, methods, [(0, 0)], [1 << 10, 1 << 14, 1 << 16, 1 << 18])
    start = replace(truth, memory_s=1e-10, cache_bytes=5e4, call_s=1e-5, step_s=5e-6)
    found = fit(start, samples, ["call_s", "step_s", "memory_s", "cache_bytes"], rounds=20)
    assert asdict(found) == pytest.approx(asdict(truth), rel=1e-3)


def test_what_no_sample_depends_on_stays_as_it_was() -> None:
    """Caches that hold all: how much larger they are cannot be seen."""
    truth = replace(MACHINE, near_s=6e-11, own_cache_bytes=1e9, call_s=8e-6)
    samples = samples_of(truth, [Allreduce("raw")], [(0, 0)], [1 << 10, 1 << 16])
    start = replace(truth, near_s=1e-11, call_s=1e-5)
    found = fit(start, samples, ["call_s", "near_s", "own_cache_bytes"])
    assert asdict(found) == pytest.approx(asdict(truth), rel=1e-6)


def test_the_fit_of_times_too_short_stays_at_zero() -> None:
    method = Allreduce("raw", "ring")
    samples = [Sample(method, nodes(2), n, 1e-9) for n in (2, 4096)]
    found = fit(MACHINE, samples, ["call_s", "step_s", "host_s"])
    assert (found.call_s, found.step_s, found.host_s) == (0.0, 0.0, 0.0)


def test_calls_that_others_disturb_are_left_out() -> None:
    """A call of 4 % of its time off the core counts, one of more does not, unless all are such."""
    times = np.array([[5.0, 0.2], [4.0, 0.17], [7.0, 0.0], [6.0, 0.0], [8.0, -0.1], [9.0, 9.0]])
    assert undisturbed(times) == 5.75  # the quartile of 5, 6, 7, 8
    assert undisturbed(times[[1, 5]]) == 5.25  # of 4 and 9


def test_calls_count_while_cores_are_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance is looked at before each turn, till it is right, and behind it."""
    world, calls = Loopback(1), {"a": lambda: None, "b": lambda: None}
    trips = iter([100, 300, 300, 100, 100, 100, 100])
    monkeypatch.setattr(bench, "LOOK_S", 0.0)
    monkeypatch.setattr(bench, "round_trip_ns", lambda world: next(trips))
    (found,) = Turns(world, far=False, repeats=2, warmup=0).measure([calls])
    assert list(found) == ["a", "b"] and min(found.values()) >= 0
    assert not [*trips]  # a turn that does not count, a look in vain, two turns that count
    monkeypatch.setattr(bench, "round_trip_ns", lambda world: 300)
    with pytest.raises(UserError, match="moved too often"):
        Turns(world, far=False, repeats=2, warmup=0).measure([calls])


def test_predictions_are_judged_by_those_within_a_fifth() -> None:
    """Gather is predicted to be fastest, and takes three times as long."""
    machine, factors = replace(MACHINE, call_s=0.0), {"ring": 0.9, "tree": 1.0, "gather": 3.0}
    times_s = {name: predicted_s(name, "raw", 2, 1024, machine) for name in factors}
    assert fastest(times_s) == "gather"
    took_s = {name: factor * times_s[name] for name, factor in factors.items()}
    samples = [Sample(Allreduce("raw", name), nodes(2), 1024, took_s[name]) for name in factors]
    said = judged(machine, samples)
    assert "2 of 3 predictions within 20 %" in said and "0.33 to 1.11 times it" in said
    worst = took_s["gather"] / min(took_s.values())
    assert worst > 1.1 and f"in 0 of 1 cases, {worst:.2f} in all" in said
    assert judged(MACHINE, [Sample(Allreduce("raw"), nodes(2), 2, 1.0)]) == "no sizes to judge by"


def test_what_is_predicted_alike_is_the_first_of_the_schedules() -> None:
    assert fastest({"tree": 1.0, "ring": 1.04}) == "ring"
    assert fastest({"tree": 1.0, "ring": 1.06, "gather": 0.99}) == "tree"
    assert fastest({"gather": 1.0}) == "gather"
    near = choose(Allreduce("e4m3", "auto", machine=MACHINE), (0, 0), 1 << 20)
    assert near.algorithm == "ring"  # whose steps are those of rhd there


def test_auto_chooses_by_size_and_shows_it() -> None:
    for machine in (None, MACHINE):
        auto = Allreduce("e4m3", "auto", machine=machine)
        assert choose(auto, nodes(16), 2).algorithm in ("rhd", "tree")  # of logarithmic depth
        assert choose(auto, nodes(16), 1 << 23).algorithm in ("ring", "rhd", "dbtree")
    tree = replace(MACHINE, step_s=1.0, beta_s=0.0)  # the fewest steps on the longest path
    assert choose(Allreduce("raw", "auto", machine=tree), nodes(2), 2).algorithm == "gather"
    world = Loopback(4)
    xs = list(np.random.default_rng(0).standard_normal((4, 3000)).astype(np.float32))
    reduced = Allreduce("e4m3", "auto", machine=MACHINE).run(world, xs)
    assert reduced.algorithm in SCHEDULES
    same = simulate(xs, "e4m3", reduced.algorithm)
    np.testing.assert_array_equal(reduced.arrays[0], same)
    np.testing.assert_array_equal(simulate(xs, "e4m3", "auto", machine=MACHINE), same)
    assert Allreduce("raw", "ring").run(world, xs).algorithm == "ring"


def test_auto_keeps_to_the_way_of_accumulating() -> None:
    for way in ("float32", "kahan"):
        chosen = choose(Allreduce("e4m3", "auto", accumulate=way), nodes(3), 5000)
        assert way in SCHEDULES[chosen.algorithm].accumulates and chosen.accumulate == way
    with refused("allreduce", "accumulate", "did you mean kahan"):
        Allreduce("e4m3", "auto", accumulate="kahn")


def test_auto_refuses_what_others_refuse() -> None:
    for xs, argument in (([np.zeros(3)], "x"), ([[1.0]], "x"), ([], "xs")):
        with refused("allreduce", argument):
            Allreduce("raw", "auto").run(Loopback(1), xs)
    for name in ("mpi", "auto"):
        with refused("predict", "algorithm", "known are ring", name):
            predicted_s(name, "raw", 2, 8)
    with refused("allreduce", "machine", value=3):
        allreduce(Loopback(1), np.zeros(3, np.float32), algorithm="auto", machine=3)  # type: ignore[arg-type]


def test_a_machine_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(dump_toml({"machine": asdict(MACHINE), "units": UNITS, "fit": {"ranks": 2}}))
    assert as_machine(path) == as_machine(str(path)) == MACHINE
    assert read_machine(path).fit == {"ranks": 2}
    assert as_machine(None) is DEFAULT and set(UNITS) == {field.name for field in fields(Machine)}
    assert Allreduce("raw", "auto", machine=path) == Allreduce("raw", "auto", machine=MACHINE)
    bad = asdict(MACHINE) | {"alpha_s": -1.0}
    for raw, key in [
        ({"machine": bad}, "machine.alpha_s"),
        ({"machine": {**bad, "gama_s": 1.0}}, "machine.gama_s"),
        ({}, "machine"),
    ]:
        path.write_text(dump_toml(raw))
        with pytest.raises(ConfigError) as caught:
            as_machine(path)
        assert caught.value.key == key
    with pytest.raises(ConfigError, match="cannot be read"):
        as_machine(tmp_path / "none.toml")
