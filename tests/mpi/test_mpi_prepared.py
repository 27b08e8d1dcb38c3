"""Prepared all-reduces, and plain ones that come again, have the bits of the simulation."""

import gc
import importlib
import time
import tracemalloc
from itertools import product

import numpy as np
import pytest
from refusing import refused

from cpdhpc import _cpu
from cpdhpc.collectives import rank_program, recorded
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.recorded import KEPT, Recordings
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import sum_bits
from cpdhpc.ops.cpu import WAITING
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback, Wait, numbered

WIRES = ["raw", "e4m3", "e5m2", "e2m1fn", "bf16", "int8"]
SCALINGS = ["none", "static:0", "aps", "tile"]
N = 2500


def gradients(ranks, n=N, call=0):
    """The same arrays on every process, others in every call."""
    rng = np.random.default_rng((ranks, n, call))
    return list((rng.standard_normal((ranks, n)) * 2.0 ** rng.integers(-9, 3)).astype(np.float32))


def bits(array):
    return array.view(np.uint32).tolist()


def methods(algorithm, ranks):
    """Every wire, scaling and way to accumulate that go together, and with so many ranks."""
    for wire in WIRES:
        for scaling in SCALINGS if wire != "raw" else ["none"]:
            for way in ("requantise", "float32", "kahan", "exact"):
                try:
                    method = Allreduce(wire, algorithm, scaling, way)
                except ValueError:
                    continue
                if not (method.exact and sum_bits(method.fmt, ranks) > 32):
                    yield method


@pytest.fixture(scope="module")
def pairs(world):
    """Nodes of two ranks; of one each where there are two: memory inside, messages between."""
    made = World(timeout_s=world.timeout_s)
    made.nodes = numbered([r // (2 if made.ranks > 2 else 1) for r in range(made.ranks)])
    return made


def recording(world, method, n):
    """What a world has kept of plain calls."""
    return world.cache.get(Recordings, Recordings)[method, n].recording


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_every_run_has_the_bits_of_the_simulation(world, messages, pairs, algorithm, monkeypatch):
    """Of a prepared one, and of plain ones: the first by the engine, then by a kept call list."""
    worlds = world, messages, pairs
    for number, method in enumerate(methods(algorithm, world.ranks)):
        world = worlds[number % 3]
        monkeypatch.setattr(recorded, "FAR_NS", [180, -1][number // 3 % 2])
        x, out = np.empty(N, np.float32), np.empty(N, np.float32)
        with method.prepare(world, [x], [out]) as prepared:
            assert prepared.is_fast
            for call in range(2):
                xs = gradients(world.ranks, call=call)
                x[:] = xs[world.process]
                wanted = simulate(
                    xs, method.wire, algorithm, method.scaling, method.accumulate, nodes=world.nodes
                )
                got = prepared.run()
                assert got.arrays[0] is out and bits(out) == bits(wanted), method
                for _ in range(2):
                    plain = method.run(world, [x])
                    assert bits(plain.arrays[0]) == bits(wanted), method
                    assert plain[1:] == got[1:]
                np.testing.assert_array_equal(x, xs[world.process])
        assert recording(world, method, N) is not None
    assert worlds[0].board is not None or world.processes == 1
    assert len(world.cache.get(Recordings, Recordings)) <= KEPT


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sizes_and_messages(world, messages, algorithm):
    """The call list sends what the engine sends, to the byte;
    chunks without values send nothing."""
    for n in (0, 1, 1025, 1024 * world.ranks + 3):
        xs = gradients(world.ranks, n)
        for wire, way in product(("raw", "e2m1fn"), (world, messages)):
            method = Allreduce(wire, algorithm)
            with method.prepare(way, [xs[world.process]]) as prepared:
                assert prepared.is_fast
                before = way.bytes_sent[0], way.messages_sent[0]
                assert bits(prepared.run().arrays[0]) == bits(simulate(xs, wire, algorithm))
                after = way.bytes_sent[0], way.messages_sent[0]
            simulated = Loopback(world.ranks)
            method.run(simulated, xs)
            assert after[0] - before[0] == simulated.bytes_sent[world.process]
            assert after[1] - before[1] == simulated.messages_sent[world.process]


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_stochastic_rounding_has_the_bits_of_its_iteration(world, messages, pairs, algorithm):
    """Prepared, and plain ones by the kept call list, whose keys are others in each iteration."""
    worlds = (world, messages, pairs)
    for number, accumulate in enumerate((*SCHEDULES[algorithm].accumulates, "exact")):
        way, xs = worlds[number % 3], gradients(world.ranks)
        scaling = "aps" if accumulate == "exact" else ("tile", "static:1")[number % 2]
        options = {"rounding": "stochastic", "seed": 3, "op": "mean"}
        method = Allreduce("e4m3", algorithm, scaling, accumulate, **options)
        with method.prepare(way, [xs[way.process]]) as prepared:
            assert prepared.is_fast
            for iteration in (0, 1, -7, 0, 2**40):
                arguments = "e4m3", algorithm, scaling, accumulate
                wanted = bits(
                    simulate(xs, *arguments, **options, iteration=iteration, nodes=way.nodes)
                )
                assert bits(prepared.run(iteration=iteration).arrays[0]) == wanted
                for _ in range(2):
                    got = method.run(way, [xs[way.process]], iteration=iteration)
                    assert bits(got.arrays[0]) == wanted
            assert recording(way, method, N) is not None
            if world.processes > 1:
                with pytest.raises(ValueError, match="arguments differ"):
                    prepared.run(iteration=world.process)


@pytest.mark.parametrize("followed_bytes", [0, pytest.param(1 << 30, marks=pytest.mark.two_ranks)])
def test_large_plain_calls_between_nodes(world, messages, pairs, monkeypatch, followed_bytes):
    """More pieces than are under way, raw and packed, of arrays that are others in each call.

    Raw ones are copied, or requests follow the arrays.
    """
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 4096))
    monkeypatch.setattr(recorded, "FOLLOWED_BYTES", followed_bytes)
    n = 9 * 1024 * world.ranks + 5 + (followed_bytes > 0)
    for algorithm, wire in product(SCHEDULES, ("raw", "e4m3")):
        way, method = (pairs, messages)[wire == "raw"], Allreduce(wire, algorithm, op="mean")
        sent = []
        for call in range(4):
            xs = gradients(world.ranks, n, call)
            wanted = bits(simulate(xs, wire, algorithm, op="mean", nodes=way.nodes))
            x, out = xs[way.process].copy(), np.empty(n, np.float32)
            before = np.concatenate([way.bytes_sent, way.messages_sent])
            method.run(way, [x], [out] if call % 2 else [x])
            sent.append((np.concatenate([way.bytes_sent, way.messages_sent]) - before).tolist())
            assert bits(out if call % 2 else x) == wanted, method
        assert sent == sent[:1] * 4
        assert recording(way, method, n) is not None


@pytest.mark.two_ranks
def test_messages_move_while_a_list_waits_for_a_word(world):
    """The word is written by who has received the message: MPI must be called meanwhile.

    It fails without that where long messages go in pieces: OMPI_MCA_smsc=^cma,xpmem,knem.
    """
    own, verdict = World(timeout_s=world.timeout_s), True
    shared, payload = own.shared(), np.ones(32 << 20, np.uint8)
    if shared is not None and own.rank < 2:
        word, counter = shared.take(8), np.zeros(1, np.int64)
        word[:] = 0
        notes = own.gather(shared.note(word), "words")
        if own.rank == 1:
            buffer = np.zeros_like(payload)
            own.wait_any([Wait(own.irecv(0, 1, buffer), 1, "waited {:.1f}")])
            shared.payload(notes[0]).view(np.int64)[0] = 1
            verdict = bool(buffer.all())
        else:
            (request,) = own.send_init(0, 1, payload)
            address = own.handle_of(request)
            calls = _cpu.make_list(payload, payload.copy(), ((np.zeros(8, np.uint8),),))
            _cpu.begin_segment(calls, 0)
            _cpu.add_start(calls, address)
            _cpu.add_word(calls, word, 0)
            _cpu.add_test(calls, address, 1)
            _cpu.end_list(calls, 1, False, counter, 0, counter, 0)
            arrays, looks = (payload, payload.copy()), 10_000_000
            found, until = _cpu.run_list(calls, 1, looks, *arrays), time.monotonic() + 60
            while found == WAITING and time.monotonic() < until:
                found = _cpu.resume_list(calls, looks)
            verdict = found == 0
            request.Free()
    elif shared is not None:
        own.gather(None, "words")
    assert own.gather(verdict, "verdict") == [True] * own.processes
    own.free()


def test_known_calls_differ_like_others(world):
    """A call that is run at once meets others, errors and NaN: all ranks raise the same."""
    own, n, me = World(timeout_s=world.timeout_s), 1500, world.process
    xs, last = gradients(world.ranks, n), world.processes - 1
    method, segments = Allreduce("e4m3", "direct", op="mean"), (Segment("w", 0, n),)
    wanted = bits(simulate(xs, "e4m3", "direct", op="mean"))

    def calls(**options):
        known = 0 if own.board is None else len(own.board.known)
        plain = allreduce(own, xs[me], "e4m3", "direct", op="mean", **options)
        reduced = method.run(own, [xs[me]], segments=segments, **options)
        assert bits(plain) == bits(reduced.arrays[0]) == wanted
        assert reduced[1:] == ((), (), "direct")
        return known

    assert [calls() for _ in range(4)][-1] == 3
    calls(iteration=3)
    in_place = xs[me].copy()
    allreduce(own, in_place, "e4m3", "direct", op="mean", out=in_place)
    assert bits(in_place) == wanted
    different = [
        lambda: allreduce(own, xs[me], "e4m3", "direct", op="mean", iteration=me // last),
        lambda: allreduce(own, xs[me], "e4m3", "direct", op=("mean", "sum")[me // last]),
        lambda: method.run(own, [xs[me][me // last :]], segments=segments if me < last else None),
    ]
    for call in different if last else []:
        with pytest.raises(ValueError, match="arguments differ"):
            call()
        calls()
    with refused("allreduce", "x", value="float64"):
        x = xs[me].astype(np.float64 if me == last else np.float32)
        allreduce(own, x, "e4m3", "direct", op="mean")
    calls()
    bad = xs[me].copy()
    bad[7] = np.nan if me == last else 0
    for call, name in (
        (lambda: allreduce(own, bad, "e4m3", "direct", op="mean", out=bad), "x"),
        (lambda: method.run(own, [bad], segments=segments), "w"),
    ):
        before = bits(bad)
        with pytest.raises(NonFiniteGradient) as caught:
            call()
        assert caught.value.segments == (name,) and caught.value.ranks == (last,)
        assert bits(bad) == before
    calls()
    own.free()


@pytest.mark.two_ranks
def test_no_iteration_of_a_call_is_taken_for_another_call(world):
    """All that processes compare of known calls is a number, made of both."""
    last = world.process == world.processes - 1
    x, methods = np.ones(8, np.float32), [Allreduce("raw", name) for name in ("ring", "tree")]
    for ring, tree in ((1, 0), (2, 1), (3, 2), (0, 1 << 62), (0, 1 << 63)):
        if world.processes == 1:
            break
        own, wrong = World(timeout_s=world.timeout_s), None
        for _ in range(3):
            for method in methods:
                method.run(own, [x])
        try:
            methods[last and tree < 9].run(own, [x], iteration=tree if last else ring)
        except ValueError as error:
            wrong = "arguments differ" in str(error)
        assert world.gather(wrong) == [True] * world.processes
        own.free()


@pytest.mark.two_ranks
def test_what_auto_has_chosen_is_run_at_once(world):
    """As other known calls are: with its own name in what is returned, and the same bits."""
    own, xs = World(timeout_s=world.timeout_s), gradients(world.ranks)
    method, x = Allreduce("e4m3", "auto"), xs[world.process]
    for _ in range(3):
        reduced = method.run(own, [x])
        plain = allreduce(own, x, "e4m3", "auto")
        wanted = bits(simulate(xs, "e4m3", reduced.algorithm))
        assert bits(reduced.arrays[0]) == bits(plain) == wanted
    known = {} if own.board is None else own.board.known
    assert (id(method), x.shape, None) in known
    own.free()


@pytest.mark.two_ranks
def test_segments_may_be_lists_on_some_ranks(world):
    """They cannot be hashed, so one rank does not know a call that another knows."""
    method, xs = Allreduce("e4m3", "direct"), gradients(world.ranks)
    wanted = bits(simulate(xs, "e4m3", "direct"))
    segments = [["w", 0, N] if world.process else ("w", 0, N)]
    results = [method.run(world, [xs[world.process]], segments=segments) for _ in range(5)]
    same = [bits(each.arrays[0]) == wanted for each in results]
    assert world.gather(all(same), "verdict") == [True] * world.processes


@pytest.mark.two_ranks
@pytest.mark.parametrize("wire, scaling", [("raw", "none"), ("e4m3", "tile"), ("e4m3", "aps")])
def test_mean_in_place_of_segments(world, wire, scaling):
    segments = [Segment("a", 0, 1000), Segment("b", 1024, N)]
    method = Allreduce(wire, "rhd", scaling, op="mean")
    x = np.empty(N, np.float32)
    with method.prepare(world, [x], [x], segments=segments) as prepared:
        for call in range(3):
            xs = gradients(world.ranks, call=call)
            x[:] = xs[world.process]
            reduced = prepared.run()
            wanted = simulate(xs, wire, "rhd", scaling, op="mean", segments=segments)
            assert reduced.arrays[0] is x and bits(x) == bits(wanted)
            assert len(reduced.sent_shifts) == (2 if scaling == "aps" else 0)


def test_nodes_virtual_ranks_pieces_and_mpi(world, monkeypatch):
    """What is no list of calls, or not one rank a process, goes the engine's way."""
    many = World(virtual_ranks=3, timeout_s=world.timeout_s)
    many.nodes = numbered([r * r % 3 for r in range(many.ranks)])
    xs = gradients(many.ranks)
    mine = [xs[rank] for rank in many.hosted]
    with Allreduce("e4m3", "hier").prepare(many, mine) as prepared:
        assert not prepared.is_fast
        wanted = simulate(xs, "e4m3", "hier", nodes=many.nodes)
        assert bits(prepared.run().arrays[0]) == bits(wanted)
    many.free()
    xs = gradients(world.ranks)
    with Allreduce(algorithm="mpi").prepare(world, [xs[world.process]]) as prepared:
        got = prepared.run().arrays[0]
        assert not prepared.is_fast
        np.testing.assert_array_equal(
            got, Allreduce(algorithm="mpi").run(world, [xs[world.process]])[0][0]
        )
    with Allreduce("e4m3", "auto").prepare(world, [xs[world.process]]) as prepared:
        assert prepared.run().algorithm in SCHEDULES
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    xs = gradients(world.ranks, 6 * 1024 * world.ranks + 5)
    with Allreduce("raw", "tree").prepare(world, [xs[world.process]]) as prepared:
        assert prepared.is_fast
        assert bits(prepared.run().arrays[0]) == bits(simulate(xs, "raw", "tree"))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_what_has_no_compiled_kernels_goes_the_engines_way(world, messages, pairs, algorithm):
    """NVFP4, rounded to nearest and by chance, with virtual ranks too; a NaN is named."""
    many = World(virtual_ranks=2, timeout_s=world.timeout_s)
    segments = [Segment("a", 0, 1024), Segment("b", 1024, N)]
    for way in (world, messages, pairs, many):
        hosted, xs = way.hosted, gradients(way.ranks)
        for rounding in ("nearest", "stochastic"):
            method = Allreduce("nvfp4", algorithm, op="mean", rounding=rounding, seed=3)
            mine, out = [xs[rank].copy() for rank in hosted], np.empty(N, np.float32)
            with method.prepare(way, mine, [out], segments=segments) as prepared:
                assert not prepared.is_fast
                for call, bad in enumerate((False, True, False)):
                    xs = gradients(way.ranks, call=call)
                    if bad:
                        xs[-1][2000] = np.nan
                    for x, rank in zip(mine, hosted, strict=True):
                        x[:] = xs[rank]
                    if bad:
                        with pytest.raises(NonFiniteGradient) as caught:
                            prepared.run(iteration=call)
                        assert caught.value.segments == ("b",)
                        assert caught.value.ranks == (way.ranks - 1,)
                        continue
                    wanted = simulate(
                        xs, "nvfp4", algorithm, op="mean", rounding=rounding, seed=3,
                        iteration=call, nodes=way.nodes,
                    )  # fmt: skip
                    assert prepared.run(iteration=call).arrays[0] is out
                    assert bits(out) == bits(wanted), (method, way.virtual_ranks)
                    for _ in range(3):
                        plain = method.run(way, mine, iteration=call).arrays[0]
                        assert bits(plain) == bits(wanted)
    many.free()


@pytest.mark.parametrize("uneven", [False, True])
def test_hier_between_nodes(world, uneven):
    own = World(timeout_s=world.timeout_s)
    own.nodes = numbered([r * r % 3 if uneven else r // 2 for r in range(own.ranks)])
    for wire in ("raw", "e3m0"):
        xs = gradients(own.ranks, 7000)
        wanted = simulate(xs, wire, "hier", nodes=own.nodes)
        with Allreduce(wire, "hier").prepare(own, [xs[own.rank]]) as prepared:
            assert prepared.is_fast and bits(prepared.run().arrays[0]) == bits(wanted)
        for _ in range(3):
            assert bits(Allreduce(wire, "hier").run(own, [xs[own.rank]]).arrays[0]) == bits(wanted)
    own.nodes = (0,) * own.ranks  # other nodes are other steps: the kept call list must not be used
    got = Allreduce("raw", "hier").run(own, [xs[own.rank]]).arrays[0]
    assert bits(got) == bits(simulate(xs, "raw", "hier"))
    own.free()


@pytest.mark.parametrize("scaling", ["none", "tile", "aps"])
@pytest.mark.parametrize("wire", ["e4m3", "e2m1fn"])
def test_a_nan_on_one_rank_is_named_on_all(world, wire, scaling):
    segments = [Segment("a", 0, 1024), Segment("b", 1024, N)]
    last = world.processes - 1
    for algorithm in SCHEDULES:
        x = np.empty(N, np.float32)
        method = Allreduce(wire, algorithm, scaling)
        with method.prepare(world, [x], [x], segments=segments) as prepared:
            for bad in (False, True, False):
                x[:] = 1
                if bad and world.process == last:
                    x[2000] = np.nan
                before = x.copy()
                if not bad:
                    np.testing.assert_array_equal(
                        prepared.run().arrays[0],
                        simulate([before] * world.processes, wire, algorithm, scaling),
                    )
                    continue
                with pytest.raises(NonFiniteGradient) as caught:
                    prepared.run()
                assert caught.value.segments == ("b",) and caught.value.ranks == (last,)
                assert bits(x) == bits(before)


def test_raw_follows_ieee_without_warnings(world, recwarn):
    sign = 1 if world.process == 0 else -1
    x = np.array([3e38, 3e38, np.inf, np.nan], np.float32) * np.array(
        [1, sign, sign, 1], np.float32
    )
    with Allreduce("raw", "tree").prepare(world, [x]) as prepared:
        got = prepared.run().arrays[0]
    xs = world.gather(x)
    assert bits(got) == bits(simulate(xs, "raw", "tree"))
    assert not recwarn.list and np.isnan(got[3])


def test_bad_arguments_on_one_rank_fail_on_all(world):
    good, first = np.ones(N, np.float32), world.process == 0
    with refused("Allreduce.prepare", "xs", value="float64") as caught:
        Allreduce().prepare(world, [np.ones(N) if first else good])
    assert world.processes == 1 or str(caught.value).startswith("rank 0 | ")
    with refused("Allreduce.prepare", "outs", value=(3,)):
        Allreduce().prepare(world, [good], [np.ones(3, np.float32) if first else good])
    if world.processes > 1:
        with pytest.raises(ValueError, match="arguments differ"):
            Allreduce("raw", "ring" if first else "tree").prepare(world, [good])
        differ = r"calls differ: Allreduce\.prepare on rank 0, allreduce on rank 1"
        with pytest.raises(ValueError, match=differ):
            if first:
                Allreduce().prepare(world, [good])
            else:
                Allreduce().run(world, [good])


def requests():
    """Number of persistent requests in this process."""
    from mpi4py import MPI

    gc.collect()
    return sum(type(each) is MPI.Prequest for each in gc.get_objects())


@pytest.mark.two_ranks
def test_free(world):
    """By itself or with the world; afterwards run is an error, and no request is left."""
    own = World(timeout_s=world.timeout_s, share_memory=False)
    before, x = requests(), np.ones(N, np.float32)
    prepared, left = (Allreduce(wire).prepare(own, [x]) for wire in ("raw", "e4m3"))
    prepared.run()
    assert (requests() > before) == (own.size > 1)
    for _ in range(2):
        prepared.free()
        with pytest.raises(RuntimeError, match=r"Prepared\.run: is freed"):
            prepared.run()
    own.free()
    assert not own.cache.held
    if own.size > 1:
        with pytest.raises(RuntimeError, match="allreduce rhd: is freed"):
            left.run()
    left.free()
    del prepared, left
    assert requests() == before


@pytest.mark.two_ranks
def test_nothing_grows_with_the_number_of_calls(world):
    """Memory of Python and NumPy, and MPI's requests, in 3,000 prepared and 300 plain calls."""
    own, method = World(timeout_s=world.timeout_s), Allreduce("raw", "tree")
    x, out = np.ones(64, np.float32), np.empty(64, np.float32)
    prepared = method.prepare(own, [x], [out])

    def calls(times):
        for _ in range(10 * times):
            prepared.run()
        for _ in range(times):
            method.run(own, [x], [out])

    calls(50)
    before = requests()
    tracemalloc.start()
    calls(50)
    first = tracemalloc.get_traced_memory()[0]
    calls(300)
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert requests() == before
    assert grown < 4000  # an object has 16 bytes or more: one a plain call would be 4,800
    np.testing.assert_array_equal(out, np.full(64, own.size, np.float32))
    own.free()
    assert not own.cache.held


def test_long_messages_go_in_pieces(world, monkeypatch):
    monkeypatch.setattr(importlib.import_module("cpdhpc.world.mpi"), "MESSAGE_BYTES", 1000)
    xs = gradients(world.ranks)
    for algorithm in SCHEDULES:
        with Allreduce("e5m2", algorithm).prepare(world, [xs[world.process]]) as prepared:
            assert bits(prepared.run().arrays[0]) == bits(simulate(xs, "e5m2", algorithm))


def test_a_wrong_iteration_with_mpi_leaves_nobody_waiting(world):
    """MPI_Allreduce blocks, and hears of nothing: the sum is done, then that rank raises."""
    own, last = World(timeout_s=5.0), world.process == world.processes - 1
    x, out = np.full(3, world.process + 1, np.float32), np.zeros(3, np.float32)
    prepared = Allreduce("raw", "mpi").prepare(own, [x], outs=[out])
    start_s = time.perf_counter()
    for everyone in (False, True):
        out[:] = 0
        if everyone or last:
            with refused("Prepared.run", "iteration", "must be an integer", 1.5):
                prepared.run(iteration=1.5)
        else:
            prepared.run(iteration=1)
        assert out.tolist() == 3 * [world.processes * (world.processes + 1) / 2]
    assert time.perf_counter() - start_s < 5.0
    prepared.free()
    own.free()
