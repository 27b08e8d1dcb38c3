"""What an all-reduce refuses, and that nothing of the caller is written when it does."""

import pickle
import sys
import warnings
from itertools import product

import numpy as np
import pytest
from every import every
from refusing import refused

from cpdhpc import ops
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.world.ranks import Loopback

SEGMENTS = [Segment("a", 0, 2000), Segment("b", 2048, 3000)]
SCALINGS = ["none", "static:0", "aps", "tile"]


def ones(ranks=3, n=3000):
    return [np.ones(n, np.float32) for _ in range(ranks)]


def assert_refused(xs, wire, algorithm, scaling, overflow="saturate", world=None):
    """Run in place into NonFiniteGradient; check that inputs are as before; return the error."""
    kept = [x.copy() for x in xs]
    method = Allreduce(wire, algorithm, scaling, overflow=overflow)
    world = world or Loopback(len(xs))
    with pytest.raises(NonFiniteGradient) as caught:
        method.run(world, xs, xs[:1], segments=SEGMENTS)
    for x, before in zip(xs, kept, strict=True):
        np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))
    with pytest.raises(NonFiniteGradient):
        method.run(Loopback(len(xs)), xs, segments=SEGMENTS)
    return caught.value


@every("wire", ["e4m3", "e5m2", "e3m0", "e4m3fn", "e2m1fn", "bf16"])
@every("algorithm", SCHEDULES)
def test_a_packed_wire_names_tensor_and_rank(algorithm, wire):
    for scaling, value in product(SCALINGS, (np.nan, -np.inf)):
        xs = ones()
        xs[1][2500] = value
        world = Loopback(3)
        error = assert_refused(xs, wire, algorithm, scaling, world=world)
        assert error.segments == ("b",) and error.ranks == (1,), (scaling, value)
        assert "'b'" in str(error) and "rank 1" in str(error)
        if scaling == "aps" or (wire == "e2m1fn" and scaling != "tile"):
            assert world.messages_sent.sum() == 0, scaling  # seen before data moves


@every("scaling", SCALINGS)
def test_infinities_that_cancel_are_seen(scaling):
    xs = ones()
    xs[0][0], xs[2][0], xs[2][2100] = np.inf, -np.inf, np.nan
    for wire in ("e3m0", "e2m1fn", "e4m3"):
        for algorithm in SCHEDULES:
            error = assert_refused(xs, wire, algorithm, scaling)
            assert error.segments == ("a", "b") and error.ranks == (0, 2)


@every("algorithm", SCHEDULES)
def test_a_sum_that_overflows_has_no_rank(algorithm):
    xs = ones()
    for x in xs:
        x[2100] = 2.5e38
    for wire, scaling, overflow in [("e5m2", "tile", "saturate"), ("bf16", "none", "inf")]:
        error = assert_refused(xs, wire, algorithm, scaling, overflow)
        assert error.segments == ("b",) and error.ranks == ()
        assert "sum" in str(error)


@every("algorithm", SCHEDULES)
def test_raw_follows_ieee(algorithm):
    xs = ones()
    xs[1][5], xs[0][6], xs[0][7], xs[2][7] = np.nan, np.inf, np.inf, -np.inf
    got = simulate(xs, algorithm=algorithm)
    assert np.isnan(got[5]) and got[6] == np.inf and np.isnan(got[7]) and got[8] == 3


def test_the_error_can_be_pickled_and_shortens_long_lists():
    error = pickle.loads(pickle.dumps(NonFiniteGradient(["w"], range(100))))
    assert error.segments == ("w",) and error.ranks == tuple(range(100))
    assert "and 92 more" in str(error)


@every(
    "bad, kind, value, allowed",
    [
        (np.ones(9), TypeError, "float64", "must be float32"),
        (np.ones(9, np.int32), TypeError, "int32", "must be float32"),
        (np.ones(9, ">f4"), TypeError, ">f4", "must be float32"),
        ([1.0] * 9, TypeError, "list", "must be a NumPy, CuPy or torch array"),
        (np.ones(18, np.float32)[::2], TypeError, (8,), "C-contiguous"),
        (np.ones((3, 3), np.float32).T[:, :2], TypeError, (4, 12), "C-contiguous"),
        (np.ones(8, np.float32), ValueError, (8,), "must be the same"),
        (np.ma.ones(9, np.float32), TypeError, "numpy.MaskedArray", "x.filled(0)"),
        (np.matrix(np.ones(9, np.float32)), TypeError, "numpy.matrix", "np.asarray(x)"),
    ],
)
def test_bad_arrays(bad, kind, value, allowed):
    world = Loopback(2)
    with refused("allreduce", "x of rank 1", allowed, value) as caught:
        allreduce(world, [np.ones(9, np.float32), bad])
    assert isinstance(caught.value, kind) and world.messages_sent.sum() == 0


@every(
    "options, allowed",  # the first option is wrong
    [
        ({"wire": "e9m9"}, "exp=9"),
        ({"wire": "tenary"}, "did you mean ternary"),
        ({"wire": "x"}, "also raw, int2"),
        ({"wire": 8}, "must be 'raw', a format"),
        ({"seed": "a"}, "must be an integer"),
        ({"seed": 1 << 64}, "must be below 18446744073709551616"),
        ({"iteration": -(1 << 63) - 1}, "must be -9223372036854775808 or more"),
        ({"iteration": 1.5}, "must be an integer"),
        ({"scaling": "static:1_0"}, "static:K needs an integer K"),
        ({"scaling": 3}, "known are none, static:K"),
        ({"scaling": "layer"}, "aps, block16, block32, none, static:K, tile"),
        ({"scaling": "static"}, "did you mean static:K"),
        ({"scaling": "tile:3"}, "did you mean tile"),
        ({"scaling": "static:128", "wire": "e4m3"}, "-120..127"),
        ({"scaling": "static:-121", "wire": "e4m3"}, "-120..127"),
        ({"scaling": "static:3", "wire": "mxfp4"}, "wire='mxfp4' is scaled by block32"),
        ({"rounding": "upwards", "wire": "e4m3"}, "stochastic"),
        ({"random_bits": 9, "wire": "e4m3"}, "e4m3 allows"),
        ({"random_bits": 5}, "wire='raw' with rounding='nearest'"),
        ({"random_bits": -1, "rounding": "stochastic"}, "0..31 with 'stochastic'"),
        ({"random_bits": 32, "rounding": "stochastic"}, "0..31 with 'stochastic'"),
        ({"random_bits": "1"}, "must be an integer"),
        ({"nodes": 5}, "must be a list of numbers or names"),
        ({"nodes": [[], [], []]}, "must be a list of numbers or names"),
        ({"nodes": [0]}, "must be 3, one per rank"),
        ({"algorithm": None}, "must be a string"),
        ({"algorithm": "rings"}, "did you mean ring"),
        (
            {"algorithm": "x"},
            "auto, biring, dbtree, direct, gather, hier, mpi, rhd, ring, torus, tree, usual",
        ),
        (
            {"algorithm": "x", "wire": "e4m3"},  # of which MPI knows nothing
            "auto, biring, dbtree, direct, gather, hier, rhd, ring, torus, tree, usual",
        ),
        ({"algorithm": "mpi"}, "MPI_Allreduce"),
        ({"algorithm": "mpi", "wire": "e4m3"}, "must be 'raw'"),
        ({"algorithm": "auto", "wire": "e4m3", "accumulate": "exact"}, "bench fit does not"),
        ({"accumulate": "kahan", "algorithm": "ring"}, "requantise"),
        ({"accumulate": "kahan", "wire": "e4m3", "algorithm": "tree"}, "requantise"),
        ({"accumulate": "float32", "wire": "e4m3", "algorithm": "ring"}, "grow, requantise"),
        ({"accumulate": "exact", "algorithm": "direct"}, "float32, kahan"),
        ({"accumulate": "exact", "wire": "e5m2", "scaling": "none"}, "must be 32 or fewer"),
        ({"overflow": "inf", "wire": "e4m3", "accumulate": "exact"}, "only saturate"),
        ({"overflow": "wrap", "wire": "e4m3"}, "saturate"),
        ({"op": "max"}, "mean, sum"),
        ({"headroom": "2"}, "n, none, sqrt"),
        ({"machine": 3, "algorithm": "auto"}, "must be a Machine, a path or None"),
        ({"out": np.zeros(3000)}, "must be float32"),
        ({"out": np.zeros(2999, np.float32)}, "must be (3000,)"),
        ({"out": np.broadcast_to(np.float32(1), 3000)}, "C-contiguous"),
        ({"out": np.frombuffer(bytes(12000), np.float32)}, "must be writeable"),
        ({"segments": 3}, "must be Segments"),
        ({"segments": [("a", 0, 3000.0)]}, "start and stop must be integers"),
    ],
)
def test_bad_arguments(options, allowed):
    argument = next(iter(options))
    function = "simulate" if argument == "nodes" else "allreduce"
    with refused(function, argument, allowed):
        simulate(ones(), **options)


@every(
    "wire, segments, argument, value",
    [
        ("e4m3", [("a", 0, 100), ("b", 100, 3000)], "segment", "b"),
        ("e4m3", [("a", 0, 3001)], "segment", "a"),
        ("e4m3", [("a", 0, 1000)], "segments", 1024),
        ("e4m3", [("a", 1024, 3000)], "segment", "a"),
        ("e4m3", [("a", 0, 2000), ("b", 1024, 3000)], "segment", "b"),
        ("e4m3", [("a", 0, 3000), ("b", 0, 0)], "segment", "b"),
        ("e4m3", [("a", 0, -1)], "segment", "a"),
        ("raw", [("a", 0, 100), ("b", 99, 3000)], "segment", "b"),
    ],
)
def test_bad_segments(wire, segments, argument, value):
    with refused("allreduce", argument, value=value):
        simulate(ones(), wire, segments=segments)
    assert (simulate(ones(), segments=[("a", 0, 100), ("b", 100, 3000)]) == 3).all()


def test_subclasses_whose_memory_is_what_they_mean_are_taken(tmp_path):
    plain = np.ones(9, np.float32)
    plain.tofile(tmp_path / "x")
    for x in (np.memmap(tmp_path / "x", np.float32), plain.view(np.recarray)):
        assert allreduce(Loopback(2), [x, plain]).tolist() == [2.0] * 9


def test_number_of_arrays_and_ranks():
    for x in (ones(1), ones(1)[0]):
        with refused("allreduce", "x", "1 arrays for 2 hosted ranks"):
            allreduce(Loopback(2), x)
    with refused("simulate", "xs", "must have one array", 0):
        simulate([])
    for wrong in (None, 3, np.ones((2, 2), np.float32)):
        with refused("simulate", "xs", "must be a list", type(wrong).__name__):
            simulate(wrong)


@pytest.mark.parametrize("name", ["run", "prepare"])
def test_methods_take_what_allreduce_takes_for_a_world(name):
    MPI = pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))
    call = getattr(Allreduce("e4m3"), name)
    for wrong in (None, 3, MPI.COMM_NULL):
        with refused(f"Allreduce.{name}", "world", value=type(wrong).__name__):
            call(wrong, ones(1))
    assert call(MPI.COMM_SELF, ones(1)) is not None


@every(
    "xs, outs, argument, value, allowed",
    [
        (None, None, "xs", "NoneType", "must be a list"),
        ([], None, "xs", 0, "0 arrays for 1 hosted ranks"),
        ([np.ones(9)], None, "xs", "float64", "must be float32"),
        (ones(1), 3, "outs", "int", "must be a list of arrays"),
        (ones(1), [3], "outs", "int", "must be a NumPy"),
        (ones(1), [], "outs", 0, "must be 1"),
    ],
)
def test_prepare_names_its_own_arguments(xs, outs, argument, value, allowed):
    with refused("Allreduce.prepare", argument, allowed, value) as caught:
        Allreduce("e4m3").prepare(Loopback(), xs, outs)
    assert str(caught.value).startswith(f"Allreduce.prepare: {argument}")


@every(
    "wire, wrong, allowed",
    [
        ("e4m3", {"shifts": "a"}, "must be two lists of integers"),
        ("e4m3", {"shifts": [[0]]}, "must be two lists of integers"),
        ("e4m3", {"shifts": [None, None]}, "must be two lists of 1 integers, one per segment"),
        ("e4m3", {"shifts": [[0], [0, 0]]}, "must be two lists of 1 integers, one per segment"),
        ("e4m3", {"shifts": [[0], [128]]}, "must be from -120 to 127"),
        ("e4m3", {"shifts": [[-121], [0]]}, "must be from -120 to 127"),
        ("raw", {"shifts": ([0], [0])}, "must be None: wire 'raw' is not scaled"),
        ("e4m3", {"error": "x"}, "must be an Exception or None"),
        ("e4m3", {"every": "no"}, "must be True or False"),
    ],
)
def test_what_run_alone_takes(wire, wrong, allowed):
    with refused("allreduce", *wrong, allowed):
        Allreduce(wire, scaling="aps").run(Loopback(), ones(1), **wrong)
    with refused("allreduce", "shifts: K", "must be an integer", 0.5):
        Allreduce("e4m3", scaling="aps").run(Loopback(), ones(1), shifts=[[0.5], [0]])
    for k in (-120, 127):
        Allreduce("e4m3", scaling="aps").run(
            Loopback(), [np.zeros(9, np.float32)], shifts=[[k]] * 2
        )


def test_agree_raises_what_it_is_given():
    world = Loopback()
    world.agree(None)
    with pytest.raises(KeyError, match="here"):
        world.agree(KeyError("here"))

    class Local(Exception):
        """Cannot be pickled, as it has no name in a module."""

    with pytest.raises(RuntimeError, match="Local: here"):
        world.agree(Local("here"))


def test_abort_without_mpi_ends_the_process(capsys):
    with pytest.raises(SystemExit):
        Loopback().abort("why")
    assert capsys.readouterr().err == "rank 0 | why\n"


def test_a_machine_without_cupy_sums_where_a_format_has_no_nan(monkeypatch):
    """All ranks look for NaN first, on arrays of NumPy."""
    monkeypatch.setitem(sys.modules, "cpdhpc.ops.gpu_runtime", None)
    monkeypatch.delattr(ops, "gpu_runtime", raising=False)
    got = allreduce(Loopback(), np.ones(9, np.float32), wire="e2m1fn", scaling="none")
    assert got.tolist() == [1.0] * 9


@every(
    "algorithm, ranks, error",
    [("ring", 24, r"0\.09"), ("ring", 200, r"0\.4[0-9]"), ("biring", 96, r"0\.14")],
)
def test_an_error_that_grows_with_ranks_is_said(algorithm, ranks, error):
    xs = [np.ones(1, np.float32)] * ranks
    options = {"wire": "e4m3", "algorithm": algorithm}
    with pytest.warns(
        UserWarning, match=rf"{ranks} ranks in e4m3, .* is expected to .* of {error}"
    ):
        simulate(xs, accumulate="requantise", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(xs[:50], **options)
        simulate(xs[:16], accumulate="requantise", **options)
        simulate(xs, wire="e4m3")
