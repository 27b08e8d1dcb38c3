"""Real runs of the collectives beside the all-reduce: the bits and bytes of the simulation."""

import hashlib
from math import prod

import numpy as np
import pytest
from refusing import refused

import cpdhpc
from cpdhpc.collectives import rank_program
from cpdhpc.collectives.blocks import SHARES
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.collective import Collective
from cpdhpc.methods import COLLECTIVES
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

NAMES = list(COLLECTIVES)
WAYS = [(name, each) for name in NAMES for each in COLLECTIVES[name]]
WIRES = [
    ("raw", None), ("e4m3", "tile"), ("e2m1fn", "aps"), ("int8", None), ("e5m2", "none"),
    ("nvfp4", None),
]  # fmt: skip
PER_RANK = "reduce_scatter", "all_to_all", "scatter"
ONE_RANK = "reduce", "gather"


def arguments(name, ranks, uneven, root):
    """x of each rank, and counts: the same on every process."""
    rng = np.random.default_rng((ranks, uneven))
    if name == "all_to_all":
        counts = rng.integers(0, 700, (ranks, ranks)) if uneven else np.full((ranks, ranks), 300)
        counts[0, -1] *= not uneven
        rows, counts = counts.sum(1).tolist(), counts.tolist() if uneven else None
    elif name in ("broadcast", "reduce"):
        rows, counts = [1700] * ranks, None
    else:
        counts = [500 * (i % 2) + 30 * i + (i == ranks - 1) * 9 for i in range(ranks)]
        whole = sum(counts)
        gathers = name in ("all_gather", "gather")
        rows = (counts if uneven else [600] * ranks) if gathers else [whole] * ranks
        counts = counts if uneven else None
    xs = [(rng.standard_normal((n, 2)) * 2.0 ** (i - 3)).astype(np.float32)
          for i, n in enumerate(rows)]  # fmt: skip
    if name == "scatter":
        xs = [x if rank == root else None for rank, x in enumerate(xs)]
    return xs, counts


def simulated(name, world, xs, counts, wire, algorithm, **options):
    """What each rank gets, and sends, in a simulation."""
    ranks, virtual = world.ranks, Loopback(world.ranks, nodes=world.nodes)
    if counts is not None:
        options["counts"] = counts[0] if name == "all_to_all" and ranks == 1 else counts
    x = xs if ranks > 1 else xs[0]
    found = getattr(cpdhpc, name)(virtual, x, wire, algorithm, **options)
    if name not in PER_RANK or ranks == 1:
        found = [found] * ranks
    if name in ONE_RANK:
        found = [x if rank == options["root"] else None for rank, x in enumerate(found)]
    return found, virtual.bytes_sent.tolist()


def digest(array):
    return array is not None and (array.shape, hashlib.sha256(array.tobytes()).hexdigest())


def assert_right(world, got, rights):
    """A wrong one is told to all, so that no rank goes on alone."""
    found = world.gather([digest(each) for each in got], "digests")
    flat = [each for process in found for each in process]
    assert flat == [digest(each) for each in rights]


@pytest.mark.parametrize("name, algorithm", WAYS)
def test_real_is_simulated(world, name, algorithm):
    """Called three times, so that calls are recorded and known, then prepared and run twice."""
    for uneven, (wire, scaling) in [(u, w) for u in (False, True) for w in WIRES]:
        root = (world.ranks - 1) if SHARES[name].rooted else 0
        options = {"scaling": scaling, "rounding": "stochastic", "seed": 3, "iteration": 2}
        options |= {"overflow": "saturate"} if wire == "e5m2" else {}
        options |= {"root": root} if SHARES[name].rooted else {}
        xs, counts = arguments(name, world.ranks, uneven, root)
        rights, sent = simulated(name, world, xs, counts, wire, algorithm, **options)
        mine = counts[world.rank] if name == "all_to_all" and counts else counts
        own = {} if counts is None else {"counts": mine}
        for _ in range(3):
            before = world.bytes_sent.copy()
            got = getattr(cpdhpc, name)(world, xs[world.rank], wire, algorithm, **own, **options)
            assert_right(world, [got], rights)
            bytes_sent = world.gather(int((world.bytes_sent - before)[0]))
            assert bytes_sent == sent
        iteration = options.pop("iteration")
        method = Collective(wire=wire, algorithm=algorithm, collective=name, **options)
        with method.prepare(world, [xs[world.rank]], **own) as prepared:
            for _ in range(2):
                assert_right(world, prepared.run(iteration=iteration), rights)
            assert prepared.is_fast == (wire != "nvfp4")


@pytest.mark.parametrize("name", NAMES)
def test_usual_and_mpi(world, name):
    """Of some sizes and dtypes, that go by call lists, by MPI, and by the engine."""
    root = {"root": world.ranks - 1} if SHARES[name].rooted else {}
    rows_of = {"float32": 2, "uint8": 5, "int16": 40, "float64": 9000, "complex64": 3}
    for dtype, rows in rows_of.items():
        each = 1 if name in ("broadcast", "reduce") else world.ranks
        xs = [np.arange(rows * each * 3).reshape(-1, 3).astype(dtype) + r
              for r in range(world.ranks)]  # fmt: skip
        if name == "scatter":
            xs = [x if rank == root["root"] else None for rank, x in enumerate(xs)]
        algorithm = COLLECTIVES[name][0]
        rights, _ = simulated(name, world, xs, None, "raw", algorithm, **root)
        for algorithm in ("usual", "mpi"):
            for _ in range(3):
                got = getattr(cpdhpc, name)(world, xs[world.rank], "raw", algorithm, **root)
                assert_right(world, [got], rights)
            method = Collective(algorithm=algorithm, collective=name, **root)
            with method.prepare(world, [xs[world.rank]]) as prepared:
                assert_right(world, prepared.run(), rights)


@pytest.mark.parametrize("name", NAMES)
def test_virtual_ranks_are_real_ranks(world, name):
    each = 3
    with_virtual = World(virtual_ranks=each)
    ranks, root = with_virtual.ranks, 1
    options = {"root": root} if SHARES[name].rooted else {}
    for uneven, wire in ((False, "raw"), (True, "raw"), (True, "e4m3")):
        xs, counts = arguments(name, ranks, uneven, root)
        algorithm = COLLECTIVES[name][-1]
        rights, _ = simulated(name, with_virtual, xs, counts, wire, algorithm, **options)
        hosted = slice(with_virtual.rank, with_virtual.rank + each)
        own = {} if counts is None else {
            "counts": counts[hosted] if name == "all_to_all" else counts
        }  # fmt: skip
        got = getattr(cpdhpc, name)(with_virtual, xs[hosted], wire, algorithm, **own, **options)
        if name in PER_RANK:
            assert_right(with_virtual, got, rights)
        elif name in ONE_RANK:
            own = [rights[root] if p == root // each else None for p in range(world.processes)]
            assert_right(with_virtual, [got], own)
        else:
            assert_right(with_virtual, [got], rights[: world.processes])
    with_virtual.free()


def test_pieces(world, monkeypatch):
    """More than are under way at a time, by the engine and by call lists."""
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    rng = np.random.default_rng(world.ranks)
    xs = [rng.standard_normal(world.ranks * 30_000).astype(np.float32) for _ in range(world.ranks)]
    for name, algorithm in WAYS:
        if name == "scatter":
            continue
        for wire in ("raw", "e4m3"):
            rights, _ = simulated(name, world, xs, None, wire, algorithm, **(
                {"root": 0} if SHARES[name].rooted else {}))  # fmt: skip
            for _ in range(3):
                got = getattr(cpdhpc, name)(world, xs[world.rank], wire, algorithm)
                assert_right(world, [got], rights)


@pytest.mark.parametrize("algorithm", ["usual", "mpi"])
def test_means_and_empty_blocks_of_known_calls(world, algorithm):
    """The third call is known by its arguments; some ranks have nothing to read, or to write."""
    rows, ranks = world.ranks - 1, range(world.ranks)  # fewer rows than ranks
    xs = [np.full((rows, 3), rank + 1, np.float32) for rank in ranks]
    mean = np.float32(sum(ranks) + world.ranks) / np.float32(world.ranks)
    blocks = [np.full((int(rank < rows), 3), mean) for rank in ranks]
    for _ in range(4):
        block = cpdhpc.reduce_scatter(world, xs[world.rank], algorithm=algorithm, op="mean")
        assert_right(world, [block], blocks)
        for n in (3, 1 << 13):
            whole = np.full(n, world.rank + 1, np.float32)
            got = cpdhpc.reduce(world, whole, algorithm=algorithm, op="mean", root=0)
            assert_right(world, [got], [np.full(n, mean), *[None] * (world.ranks - 1)])


@pytest.mark.parametrize("name", ["scatter", "all_gather", "gather", "broadcast"])
def test_known_calls_keep_dtype_and_shape(world, name):
    """Arrays of as many bytes take turns; ranks without x know neither their dtype nor shape."""
    cpdhpc.allreduce(world, np.ones(4, np.float32))
    own, rows, found = World(timeout_s=60.0), 4 * world.ranks, []
    kinds = [("i4", ()), ("f4", ()), ("i2", (2,)), ("f4", (0,)), ("i2", (0, 3))]
    for i in np.random.default_rng(3).integers(0, len(kinds), 60):
        dtype, row = kinds[i]
        whole = (np.arange(rows * prod(row)) + i).astype(dtype).reshape(rows, *row)
        share, part = np.array_split(whole, world.ranks)[world.rank], world.rank == 0
        x, want = {
            "scatter": (whole if part else None, share),
            "all_gather": (share, whole),
            "gather": (share, whole if part else None),
            "broadcast": (whole if part else np.zeros_like(whole), whole),
        }[name]
        got = getattr(cpdhpc, name)(own, x)
        if want is None:
            found.append(got is None)
        else:
            found.append((got.dtype, got.tolist()) == (want.dtype, want.tolist()))
    wrongs = [i for i, right in enumerate(found) if not right]
    assert not any(world.gather(wrongs))


def test_known_calls_compare_dtypes(world):
    """Two calls that both ranks know, and that differ in the dtype alone."""
    own = World(timeout_s=60.0)
    for dtype in ("i4", "f4", "i4", "f4"):
        cpdhpc.all_gather(own, np.ones(6, dtype))
    if world.ranks > 1:
        with pytest.raises(ValueError, match=r"arguments differ: x\.dtype"):
            cpdhpc.all_gather(own, np.ones(6, "f4" if world.rank == 0 else "i4"))


def test_a_broadcast_reads_the_root_alone(world):
    """What others have in their array is no NaN of the sum, whatever is searched for."""
    root = world.ranks - 1
    x = np.full(9, 1.0 if world.rank == root else np.nan, np.float32)
    for _ in range(3):
        got = cpdhpc.broadcast(world, x, "e2m1fn", scaling="none", root=root)
        assert_right(world, [got], [np.ones(9, np.float32)] * world.ranks)


def test_structured_values_are_scattered_as_they_are(world):
    dtype = np.dtype([("index", "<i4"), ("value", "<f4")])
    table = np.zeros(2 * world.ranks, dtype)
    table["index"] = np.arange(len(table))
    got = cpdhpc.scatter(world, table if world.rank == 0 else None)
    assert got.dtype == dtype and got["index"].tolist() == [2 * world.rank, 2 * world.rank + 1]


def test_in_place(world):
    x = np.full(3000, world.rank, np.float32)
    for _ in range(3):
        x[:] = world.rank
        assert cpdhpc.broadcast(world, x, out=x, root=world.ranks - 1) is x
        assert (x == world.ranks - 1).all()
        x[:] = world.rank + 0.3
        cpdhpc.broadcast(world, x, "e5m2", out=x)
        assert (x == np.float32(0.3125)).all()
    whole = np.zeros((world.ranks, 40), np.float32)
    for _ in range(3):
        whole[world.rank] = world.rank
        cpdhpc.all_gather(world, whole[world.rank], out=whole.reshape(-1))
        assert (whole == np.arange(world.ranks)[:, None]).all()


WRONG = [
    ("all_gather", lambda x: (x[:-1],), {}, ValueError, "x.shape"),
    ("all_gather", lambda x: (x.astype(np.int32),), {}, ValueError, "x.dtype"),
    ("all_gather", lambda x: (x, "e4m3"), {}, ValueError, "wire"),
    ("all_gather", lambda x: (x, "e9m9"), {}, ValueError, "rank 1 | all_gather: wire"),
    ("all_gather", lambda x: ([1.0],), {}, TypeError, "rank 1 | all_gather: x is list"),
    ("reduce_scatter", lambda x: (x,), {"op": "mean"}, ValueError, "op="),
    ("reduce_scatter", lambda x: (x[:3],), {}, ValueError, "x.shape"),
    ("broadcast", lambda x: (x,), {"root": 1}, ValueError, "root=0 on rank 0, root=1 on rank 1"),
    ("broadcast", lambda x: (x,), {"out": np.empty(3, np.float32)}, ValueError, "out is float32"),
    ("reduce", lambda x: (x.astype(float),), {}, ValueError, "x.dtype"),
    ("gather", lambda x: (x,), {"counts": [8]}, ValueError, "counts"),
    ("all_to_all", lambda x: (x[:-2],), {}, ValueError, "x.shape|rows"),
    ("scatter", lambda x: (x,), {}, ValueError, "must be None: is not the root"),
]  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name, change, options, kind, words", WRONG)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    world, name, change, options, kind, words, known
):
    """Before a message is sent; known: where the others take the call for one that they know."""
    if world.ranks == 1:
        pytest.skip("one rank agrees with itself")
    x = np.ones(8 * world.ranks, np.float32)
    own = None if name == "scatter" and world.rank else x
    function = getattr(cpdhpc, name)
    for _ in range(3 * known):
        function(world, own)
    before = world.messages_sent.copy()
    given, more = ((own,), {}) if world.rank != 1 else (change(x), options)
    with pytest.raises(kind) as caught:
        function(world, *given, **more)
    assert any(each in str(caught.value) for each in words.split("|")), caught.value
    assert np.array_equal(world.messages_sent, before)
    found = function(world, own)
    assert_right(world, [np.zeros(1)], [np.zeros(1)] * world.ranks)
    assert found is None or found.size


@pytest.mark.parametrize("wrong", [[], np.zeros(3, np.int64)])
def test_wrong_recv_counts_of_one_rank_are_an_error_on_all(world, wrong):
    """Before the counts are compared; an array is a list of counts, too."""
    if world.ranks in (1, len(wrong)):
        pytest.skip("needs another number of ranks than counts")
    counts = [1] * world.ranks
    options = {"recv_counts": wrong} if world.rank == 1 else {}
    with refused("all_to_all", "recv_counts", "one per rank"):
        cpdhpc.all_to_all(world, np.ones(world.ranks, np.float32), counts=counts, **options)
    right = {"recv_counts": np.array(counts)}
    assert cpdhpc.all_to_all(world, np.ones(world.ranks, np.float32), counts=counts, **right).all()


def test_different_collectives_are_an_error(world):
    if world.ranks == 1:
        pytest.skip("one rank agrees with itself")
    x = np.ones(4 * world.ranks, np.float32)
    for _ in range(3):
        cpdhpc.all_gather(world, x)
        cpdhpc.reduce_scatter(world, x)
        cpdhpc.allreduce(world, x)
    for one, other in (("all_gather", "reduce_scatter"), ("allreduce", "all_gather")):
        with pytest.raises(ValueError, match=f"calls differ: {one} on rank 0, {other} on rank 1"):
            getattr(cpdhpc, other if world.rank == 1 else one)(world, x)
    assert cpdhpc.all_gather(world, x).size == x.size * world.ranks


def test_counts_that_do_not_match(world):
    if world.ranks == 1:
        pytest.skip("one rank agrees with itself")
    ranks = world.ranks
    x = np.ones(2 * ranks, np.float32)
    expects = [2] * ranks
    if world.rank == 1:
        expects[0] = 1
    with pytest.raises(ValueError, match=r"counts\[1\]=2 on rank 0, recv_counts\[0\]=1 on rank 1"):
        cpdhpc.all_to_all(world, x, counts=[2] * ranks, recv_counts=expects)
    sizes = [5] * ranks
    if world.rank == 1:
        sizes[0] = 4
    with pytest.raises(ValueError, match="arguments differ: counts="):
        cpdhpc.all_gather(world, np.ones(5, np.float32), counts=sizes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wire", ["e4m3", "int8"])
def test_nan_on_one_rank(world, name, wire):
    last = world.ranks - 1
    root = {"root": last} if SHARES[name].rooted else {}
    x = np.ones(700 * world.ranks, np.float32)
    own = None if name == "scatter" and world.rank != last else x
    function = getattr(cpdhpc, name)
    for _ in range(3):
        function(world, own, wire, **root)
    prepared = Collective(wire=wire, collective=name, **root).prepare(world, [own])
    if world.rank == last:
        x[5] = np.nan
    for call in (lambda: function(world, own, wire, **root), prepared.run):
        with pytest.raises(NonFiniteGradient) as caught:
            call()
        assert caught.value.ranks == (last,) and caught.value.call == name
    x[:] = 1
    found = prepared.run()
    assert all(each is None or np.isfinite(each).all() for each in found)
    prepared.free()


def test_many_sizes_keep_little(world):
    """Calls that are forgotten and come again, in another order than they were known in."""
    x = np.arange(400 * world.ranks, dtype=np.float32)
    for n in (*range(1, 90), *range(80, 0, -7)):
        for _ in range(1 + n % 3):
            got = cpdhpc.all_gather(world, x[:n])
            assert np.array_equal(got, np.tile(x[:n], world.ranks))
