"""What one rank alone gets wrong: all ranks raise the same error, at once, and go on together."""

import re
from itertools import pairwise

import numpy as np
import pytest

from cpdhpc.collectives import sparse
from cpdhpc.collectives.allreduce import Allreduce, allreduce
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.world.mpi import World

X = np.ones(3000, np.float32)
MASKED, MATRIX = np.ma.masked_greater(X, 2), np.matrix(X)
NO_ARRAYS = (3, None, "x", [1.0], object(), np.ones(3000), np.ones((2, 2), np.float32).T, MASKED)
NO_NAMES = (3, [], "no such", np.ones(2))
NO_INTEGERS = ("a", None, 1.5, True, [])
NO_SEGMENTS = (3, "ab", [("a",)], [("a", "b", "c")], [("a", 0.0, 3000.0)], [("a", 0, 1)], [7])
NO_RANKS = (3, None, "01", [0, 99], [0, 0], [], [0.5], [-1], [None])


def options(call, good, bad):
    """Cases of a call with good arguments, but for one: name -> (call, arguments, its value)."""
    return {
        f"{call.__name__} {name}={value!s:.20}": (call, good, name, value)
        for name, values in bad.items()
        for value in values
    }


def run(world, xs=(X,), outs=None, **given):
    Allreduce("e4m3", "auto").run(world, list(xs) if isinstance(xs, tuple) else xs, outs, **given)


def prepare(world, xs=(X,), outs=None, **given):
    xs = list(xs) if isinstance(xs, tuple) else xs
    Allreduce("e4m3", "ring").prepare(world, xs, outs, **given).free()


def run_prepared(world, iteration=0):
    with Allreduce("e4m3", rounding="stochastic").prepare(world, [X]) as prepared:
        prepared.run(iteration=iteration)


def worlds(world, **given):
    World(world.plain_mpi()[1], **given).free()


def part(world, processes=(0,)):
    found = world.part(processes)
    if found is not None:
        found.free()


def write_box(world, path, offset=0, shape=(4,), start=(0,), size=0, box=None):
    box = np.zeros(size, np.uint8) if box is None else box
    world.write_box(path, offset, shape, start, box)


CASES = {
    **options(
        allreduce,
        {"x": X, "wire": "e4m3"},
        {
            "x": NO_ARRAYS,
            "wire": (*NO_NAMES, "e9"),
            "algorithm": (*NO_NAMES, None, "mpi"),
            "scaling": (*NO_NAMES, "static:999", "static:1_0", "static: 1"),
            "accumulate": NO_NAMES,
            "op": (*NO_NAMES, None),
            "out": (3, "x", [X], np.ones(3000), X[1:], MASKED, MATRIX),
            "rounding": (*NO_NAMES, None),
            "overflow": NO_NAMES,
            "headroom": (*NO_NAMES, None),
            "seed": (*NO_INTEGERS, 1 << 64),
            "iteration": NO_INTEGERS,
            "random_bits": (*NO_INTEGERS, -1, 99),
            "segments": NO_SEGMENTS,
            "machine": (3, [], "no such file"),
        },
    ),
    **options(allreduce, {"x": X}, {"wire": NO_NAMES, "rounding": (3, []), "seed": ("a",)}),
    **options(
        run,
        {},
        {
            "xs": (3, None, [], [3], [X, X], [X[1:]]),
            "outs": (3, [], [3], [X, X]),
            "iteration": (*NO_INTEGERS, 1 << 64, -(1 << 63) - 1),
            "segments": NO_SEGMENTS,
            "every": ("no", None, 1),
            "error": ("x", 3, ValueError),
            "shifts": ("a", 3, [0], [[0], [0], [0]], [[0.5], [0]], [["a"], [0]], [[0], [999]]),
        },
    ),
    **options(prepare, {}, {"xs": (3, [], [3]), "outs": (3, [], [3]), "segments": NO_SEGMENTS}),
    **options(run_prepared, {}, {"iteration": (*NO_INTEGERS, 5)}),
    **options(sparse.allgather, {"arrays": [X]}, {"arrays": (3, [], [3], [X, X], [X[None]])}),
    **options(sparse.allgather, {"arrays": [X]}, {"arrays": ([MASKED],)}),
    **options(sparse.sum, {"arrays": [X]}, {"arrays": (3, [], [3], [X[1:]], [X.astype("f8")])}),
    **options(sparse.neighbours, {"sends": [{}]}, {"sends": (3, [], [3], [{99: X}], [{"a": X}])}),
    **options(
        sparse.broadcast,
        {"arrays": None, "root_rank": 0},
        {"arrays": (3, [], [3]), "root_rank": ("a", None, 99, 0.0, [])},
    ),
    **options(part, {}, {"processes": NO_RANKS}),
    **options(
        worlds,
        {"timeout_s": 20.0},
        {
            "virtual_ranks": (*NO_INTEGERS, 0, 2, 1 << 20),
            "timeout_s": ("a", 0, True, None),
            "share_memory": ("no", None, 1),
            "gpu_direct": ("no", None, 1),
        },
    ),
    **options(World.split, {"group": 0}, {"group": (*NO_INTEGERS, -1)}),
    **options(World.gather, {"value": 1}, {"value": (lambda: 1, (i for i in []))}),
    **options(
        write_box,
        {"path": None},
        {
            "path": (3,),
            "offset": ("a", -1),
            "shape": ((), 3),
            "start": ((9,), "a", None, (0, 0)),
            "box": (3, np.zeros((2, 2))),
        },
    ),
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CASES)
def test_what_the_last_rank_gets_wrong_all_refuse_alike(world, name, tmp_path_factory):
    call, good, argument, value = CASES[name]
    given = dict(good)
    if call is sparse.broadcast:
        given["arrays"] = [X if world.process == 0 else None]
    if call is write_box:
        given["path"] = "/dev/null"
    if world.process == world.processes - 1:
        given[argument] = value
    with pytest.raises((TypeError, ValueError)) as caught:
        call(world, **given)
    told = world.gather(str(caught.value), "told")
    assert len(set(told)) == 1 and "\n" not in told[0]
    assert re.search(rf"(rank|process) {world.processes - 1}\b|by process", told[0])
    assert all(word not in told[0] for word in ("has no attribute", "unhashable", "operand"))


@pytest.mark.mpi(min_size=2)
def test_an_error_that_all_ranks_have_names_none(world):
    for given, said in (
        ({"x": np.ones(9)}, "allreduce: x has dtype float64: must be float32"),
        ({"wire": 3}, "allreduce: wire=3: must be 'raw', a format or its name"),
        ({"out": 3}, "allreduce: out is int: must be a NumPy, CuPy or torch array"),
    ):
        with pytest.raises(TypeError) as caught:
            allreduce(world, **{"x": X, **given})
        assert str(caught.value) == said


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "messages"])
def own(world, request):
    """Worlds whose ranks share memory, and do not."""
    own = World(timeout_s=600, share_memory=request.param)
    yield own
    own.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("iteration", NO_INTEGERS)
@pytest.mark.parametrize("scaling, algorithm", [("tile", "ring"), ("aps", "tree"), ("none", "rhd")])
def test_an_iteration_that_does_not_count_is_looked_at(own, iteration, scaling, algorithm):
    """The sum is done all the same, so that nothing is left; behind it all raise the error."""
    with Allreduce("e4m3", algorithm, scaling).prepare(own, [X]) as prepared:
        for wrong in [own.rank == own.size - 1, True]:
            with pytest.raises(TypeError) as caught:
                prepared.run(iteration=iteration if wrong else 0)
            told = own.gather(str(caught.value), "told")
            assert len(set(told)) == 1
            said = rf"rank \d+ \| Prepared\.run: iteration={iteration!r}: must be an integer"
            assert re.fullmatch(said.replace("[]", r"\[\]"), told[0])
            assert own.postponed is None
        for good in (-1, np.int8(3), 1 << 200):
            assert (prepared.run(iteration=good).arrays[0] == own.ranks).all()


@pytest.mark.mpi(min_size=2)
def test_nan_comes_before_an_iteration_that_does_not_count(own):
    """All ranks raise the same; no error of this call is raised by the next one."""
    bad = np.full(3000, np.nan, np.float32)
    with Allreduce("e4m3").prepare(own, [bad]) as prepared:
        with pytest.raises(NonFiniteGradient):
            prepared.run(iteration=0 if own.rank else "a")
        bad[:] = 1
        assert (prepared.run().arrays[0] == own.ranks).all()


@pytest.mark.mpi(min_size=2)
def test_what_all_have_freed_all_refuse(own):
    prepared = Allreduce("raw").prepare(own, [X])
    prepared.free()
    with pytest.raises(RuntimeError, match=r"^rank 0 \| Prepared\.run: is freed$"):
        prepared.run()


@pytest.mark.mpi(min_size=2)
def test_different_calls_name_both(world):
    last = world.process == world.processes - 1
    calls = {
        "sum": lambda: sparse.sum(world, [X]),
        "allreduce": lambda: allreduce(world, X),
        "broadcast": lambda: sparse.broadcast(world, [None if world.process else X], 0),
        "neighbours": lambda: sparse.neighbours(world, [{}]),
    }
    for one, other in pairwise([*calls, "sum"]):
        with pytest.raises(ValueError) as caught:
            calls[other if last else one]()
        rank = world.processes - 1
        assert str(caught.value) == f"{one}: calls differ: {one} on rank 0, {other} on rank {rank}"


@pytest.mark.mpi(min_size=2)
def test_the_first_argument_that_differs_is_named_with_both_values(world):
    last = world.process == world.processes - 1
    rank = world.processes - 1
    for options, words in (
        ({"wire": "e4m3" if last else "raw"}, f"wire='raw' on rank 0, wire='e4m3' on rank {rank}"),
        ({"seed": int(last)}, f"seed=0 on rank 0, seed=1 on rank {rank}"),
        ({"x": X[1:] if last else X}, f"x.shape=(3000,) on rank 0, x.shape=(2999,) on rank {rank}"),
    ):
        with pytest.raises(ValueError) as caught:
            allreduce(world, **{"x": X, **options})
        assert str(caught.value) == f"allreduce: arguments differ: {words}"
    many = [(f"tensor{i}", 1024 * i, 1024 * i + 1024) for i in range(50)]
    x = np.ones(50 << 10, np.float32)
    with pytest.raises(ValueError) as caught:
        allreduce(world, x, segments=[*many[:49], ("odd" if last else "even", *many[49][1:])])
    told = str(caught.value)
    assert "'odd'" in told and "'even'" in told and len(told) < 400


@pytest.mark.mpi(min_size=2)
def test_what_a_call_cannot_tell_the_others_it_refuses_itself(world):
    """Not to be called by one rank alone; an error that nobody catches then ends the job."""
    for call, bad in (
        (world.max, (3, [1], np.ones(2), None)),
        (world.broadcast, (3, [1.0], np.ones((2, 2)).T)),
    ):
        for value in bad:
            with pytest.raises((TypeError, ValueError), match=f"^{call.__name__}: "):
                call(value)
