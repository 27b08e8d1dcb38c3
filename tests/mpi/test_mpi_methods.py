"""Compressors on real ranks: the bits, the bytes and the memory of the simulation."""

import numpy as np
import pytest

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import COMPRESSORS, Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

SHAPES = ((40, 70), (9,), (8, 3, 5, 5))
METHODS = [
    *[(name, {}) for name in COMPRESSORS],
    ("powersgd", {"momentum": 0.9}),
    ("lgc", {"dense_steps": 1, "training_steps": 1, "density": 0.05, "exclude": ("kernel",)}),
    (
        "lgc",
        {"exchange": "server", "dense_steps": 0, "training_steps": 2, "density": 0.05}
        | {"plain": ("kernel",)},
    ),
    ("lowbit", {"error_feedback": True}),
    ("lowbit", {"wire": "int4", "error_feedback": True}),
    ("terngrad", {"share": False, "exclude": ("bias",)}),
    ("powersgd", {"wire": "e4m3", "algorithm": "tree"}),
    ("topk", {"within": "bucket", "wire": "e4m3"}),
    ("randomk", {"error_feedback": False, "wire": "e4m3", "scaling": "aps"}),
    ("strom", {"tau": 0.5, "exclude": ("kernel",)}),
    ("adacomp", {"exclude": ("kernel",), "bin_values": 60}),
    ("scalecom", {"rate": 10, "per_chunk": 2, "wire": "e4m3", "algorithm": "tree"}),
    ("oktopk", {"wire": "e4m3", "estimate_every": 2, "rebalance_every": 2}),
]


@pytest.fixture(scope="module", params=[1, 2])
def many(request):
    """Worlds of one and two ranks a process."""
    world = World(virtual_ranks=request.param, timeout_s=600.0)
    yield world
    world.free()


def run(world, method, bucket):
    """Return three means and what the hosted ranks keep, by (layer, name)."""
    state = State(world.hosted, world.ranks)
    means = []
    for iteration in range(3):
        rngs = [np.random.default_rng((iteration, rank)) for rank in world.hosted]
        flats = [bucket.flatten([r.standard_normal(s, np.float32) for s in SHAPES]) for r in rngs]
        context = Context(world, state, seed=3, iteration=iteration)
        means.append(method.aggregate(flats, bucket, context).flat)
    return means, dict(state)


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_real_is_simulated(many, name, options):
    method = COMPRESSORS[name](**options)
    bucket = Bucket(("weight", "bias", "kernel"), SHAPES, method.align)
    simulated = Loopback(many.ranks)
    expected, kept = run(simulated, method, bucket)
    many.bytes_sent[:] = 0
    means, own = run(many, method, bucket)
    hosted = slice(many.hosted.start, many.hosted.stop)
    assert all(map(np.array_equal, means, expected))
    assert own.keys() == kept.keys()
    for key, entry in own.items():
        shared = entry.redistribution is None
        assert np.array_equal(entry.array, kept[key].array[... if shared else hosted]), key
    assert np.array_equal(many.bytes_sent, simulated.bytes_sent[hosted])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_nan_on_the_last_rank_is_named_on_all(many, name):
    method = COMPRESSORS[name]()
    bucket = Bucket(("weight", "bias"), ((40, 70), (9,)), method.align)
    flats = [np.zeros(bucket.size, np.float32) for _ in many.hosted]
    if many.hosts(many.ranks - 1):
        bucket.views(flats[-1])[0][3, 3] = np.nan
    with pytest.raises(NonFiniteGradient) as caught:
        method.aggregate(flats, bucket, Context(many, State(many.hosted, many.ranks)))
    assert caught.value.segments == ("weight",) and caught.value.ranks == (many.ranks - 1,)


@pytest.mark.parametrize("name", ["oktopk", "topk", "qsgd"])
def test_what_the_last_process_alone_refuses_is_told_to_all(many, name):
    method = COMPRESSORS[name]()
    bucket = Bucket(("weight", "bias"), ((40, 70), (9,)), method.align)
    flats = [np.ones(bucket.size, np.float32) for _ in many.hosted]
    if many.process == many.processes - 1:
        flats = [np.ma.masked_array(flat) for flat in flats]
    context = Context(many, State(many.hosted, many.ranks))
    with pytest.raises(TypeError, match=r"MaskedArray: must be numpy.ndarray or cupy.ndarray$"):
        method.aggregate(flats, bucket, context)


ON_GPU = [(name, {"error_feedback": True}) for name in ("topk", "randomk", "lowbit")] + [
    (name, {})
    for name in ("terngrad", "qsgd", "onebit", "powersgd", "gradientflow", "adacomp", "oktopk")
]


@pytest.mark.two_ranks
@pytest.mark.parametrize(("name", "options"), ON_GPU)
def test_real_gpus_are_simulated_ranks(gpu, name, options):
    method, found = COMPRESSORS[name](**options), []
    bucket = Bucket(("weight", "bias"), ((40, 70), (9,)), method.align)
    for world in (gpu.world, Loopback(gpu.world.ranks)):
        flats = [
            np.random.default_rng(rank).standard_normal(bucket.size, np.float32)
            for rank in world.hosted
        ]
        if world is gpu.world:
            flats = [gpu.cupy.asarray(flat) for flat in flats]
        context = Context(world, State(world.hosted, world.ranks))
        found.append(method.aggregate(flats, bucket, context).flat)
    assert np.array_equal(gpu.cupy.asnumpy(found[0]), found[1])


@pytest.mark.parametrize("exchange", ["ring", "server"])
def test_autoencoders_of_unlike_bits_are_told_on_all_ranks(many, exchange):
    if many.processes == 1:
        pytest.skip("one process has one autoencoder")
    method = COMPRESSORS["lgc"](exchange=exchange, dense_steps=0, training_steps=1, density=0.5)
    bucket, state = Bucket(("weight",), ((8, 9),)), State(many.hosted, many.ranks)
    flats = [np.arange(bucket.size, dtype=np.float32) + rank for rank in many.hosted]
    method.aggregate(flats, bucket, Context(many, state))
    if many.process == many.processes - 1:
        for (_, name), entry in state:
            entry.array *= 1 + (name == "decoders") * 1e-3
    last = many.ranks - many.virtual_ranks
    with pytest.raises(ValueError, match=f"autoencoder of rank {last} has other bits than that"):
        method.aggregate(flats, bucket, Context(many, state, iteration=1))


def test_another_epoch_on_one_rank_is_told_to_all(many):
    """Densities differ then: who draws alike finds other lengths, who gathers does not mind."""
    if many.processes == 1:
        pytest.skip("one process has one epoch")
    bucket = Bucket(("weight",), ((40, 70),))
    flats = [np.ones(bucket.size, np.float32) for _ in many.hosted]
    last = many.process == many.processes - 1
    for name in ("randomk", "topk"):
        method = COMPRESSORS[name](warmup=(0.5,))
        context = Context(many, State(many.hosted, many.ranks), epoch=float(last))
        said = ""
        try:
            method.aggregate(flats, bucket, context)
        except ValueError as error:
            said = str(error)
        expected = "x.shape=(1400,) on rank 0, x.shape=(280,)" if name == "randomk" else ""
        assert set(many.gather(expected in said and bool(expected) == bool(said))) == {True}
