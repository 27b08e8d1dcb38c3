"""The collectives beside the all-reduce with GPU arrays: the bits of the CPU, whatever is late."""

import numpy as np
import pytest
from gpus import late

import cpdhpc
from cpdhpc.collectives.blocks import SHARES
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.collective import Collective
from cpdhpc.lab.kinds import KINDS, collective_cases
from cpdhpc.lab.kinds.allreduce import PAIRS, STREAM
from cpdhpc.methods import COLLECTIVES
from cpdhpc.world.ranks import Loopback

WAYS = [(name, each) for name, row in COLLECTIVES.items() for each in row]
PER_RANK = "reduce_scatter", "all_to_all", "scatter"


def arguments(name, ranks):
    """x of each rank, of blocks that begin at odd places, and counts; the same everywhere."""
    rng = np.random.default_rng(ranks)
    counts = [(i % 2) * 1031 + 7 * i + 3 for i in range(ranks)]
    rows = counts if name in ("all_gather", "gather") else [sum(counts)] * ranks
    if name == "all_to_all":
        rows, counts = [sum(counts)] * ranks, [counts] * ranks
    xs = [rng.standard_normal(n).astype(np.float32) for n in rows]
    if name == "scatter":
        xs[1:] = [None] * (ranks - 1)
    return xs, None if name in ("broadcast", "reduce") else counts


def produced(gpu, x):
    """An array that is still being produced; None for None."""
    if x is None or x.dtype != np.float32:
        return x if x is None else gpu.cupy.asarray(x)
    return late(gpu, x)


def equal(gpu, got, right):
    if got is None or right is None:
        return got is right
    return got.dtype == right.dtype and np.array_equal(gpu.cupy.asnumpy(got), right)


@pytest.mark.parametrize("name, algorithm", WAYS)
def test_bits_are_those_of_the_cpu(gpu, name, algorithm):
    world = gpu.world
    ranks, rank = world.ranks, world.rank
    xs, counts = arguments(name, ranks)
    alone = ranks == 1
    for wire, dtype in (("raw", "float32"), ("e4m3", "float32"), ("raw", "int16")):
        if dtype == "int16" and SHARES[name].sums:
            continue  # CuPy adds them by itself: nothing of ours
        given = [x if x is None else (10 * x).astype(dtype) for x in xs]
        options = {} if counts is None else {
            "counts": counts[0] if name == "all_to_all" and alone else counts
        }  # fmt: skip
        virtual = Loopback(ranks, nodes=world.nodes)
        right = getattr(cpdhpc, name)(
            virtual, given[0] if alone else given, wire, algorithm, **options
        )
        if name in PER_RANK and not alone:
            right = right[rank]
        if SHARES[name].rooted and not SHARES[name].same and name != "scatter" and rank:
            right = None
        own = {} if counts is None else {
            "counts": counts[rank] if name == "all_to_all" else counts
        }  # fmt: skip
        out = None
        if name == "scatter":
            out = gpu.cupy.zeros(counts[rank], dtype)
        x = produced(gpu, given[rank])
        got = getattr(cpdhpc, name)(world, x, wire, algorithm, out=out, **own)
        assert equal(gpu, got, right), (wire, dtype)
        method = Collective(wire=wire, algorithm=algorithm, collective=name)
        x = produced(gpu, given[rank])
        outs = None if out is None else [out]
        with method.prepare(world, [x], outs, **own) as prepared:
            assert not prepared.is_fast
            for _ in range(2):
                (got,) = prepared.run()
                assert equal(gpu, got, right), (wire, dtype)


@pytest.mark.two_ranks
def test_errors(gpu):
    world = gpu.world
    x = gpu.cupy.zeros(8 * world.ranks, np.float32)
    with pytest.raises(ValueError, match="algorithm='mpi': must be on the CPU"):
        cpdhpc.all_gather(world, x, algorithm="mpi")
    x[3:4] = np.nan
    with pytest.raises(NonFiniteGradient):
        cpdhpc.reduce_scatter(world, x, "e4m3")
    if world.ranks > 1:
        host = np.zeros(8 * world.ranks, np.float32)
        with pytest.raises(ValueError, match="x on GPU"):
            cpdhpc.all_gather(world, x if world.rank else host)
        with pytest.raises(TypeError, match=r"out: must be passed: x of the root is on a GPU"):
            cpdhpc.scatter(world, None if world.rank else gpu.cupy.zeros(8, np.float32))


@pytest.mark.parametrize("name", [*COLLECTIVES, *PAIRS])
def test_mpis_own_take_gpu_arrays_in_a_study(gpu, name):
    """As they are where MPI takes GPU memory, else by way of the host; each result is checked."""
    kind, ranks = KINDS["allreduce"], gpu.world.ranks
    given = {"value_scaling": "", "accumulate": "", "device": "gpu", "wire": "raw"}
    factors = kind.used({**given, "size_bytes": 40_000, "collective": name, "algorithm": "mpi"})
    assert factors["device"] == "gpu"
    if kind.fits({}, factors, ranks) is not None:
        pytest.skip("pairs need an even number of ranks")
    data = collective_cases.given(name, 10_000, gpu.world, True) if name in COLLECTIVES else None
    if data is None:
        case = collective_cases.pair_case(gpu.world, 10_000, "gpu", 8 * (name == STREAM))
    else:
        method = Collective(algorithm="mpi", collective=name)
        case = collective_cases.collective_case(gpu.world, method, data, "gpu")
    case.check(gpu.world)
    assert case.error == 0
    assert gpu.cupy.asnumpy(case.out) is not case.out, "the result is on the GPU"
