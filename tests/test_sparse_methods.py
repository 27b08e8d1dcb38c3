"""Sparse methods: what they choose, that nothing is lost, what they refuse, the bytes they send."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from training import small_job

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import (
    COMPRESSORS,
    AdaComp,
    Aggregator,
    Context,
    Dgc,
    OkTopk,
    RandomK,
    ScaleCom,
    State,
    Strom,
    TopK,
)
from cpdhpc.compress.bucket import BYTES, MIB, Bucket, split_bucket
from cpdhpc.compress.randomk import marks_of
from cpdhpc.config import ConfigError, validate
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.optimizers import Sgd
from cpdhpc.ops import cpu
from cpdhpc.torch import GradientReducer
from cpdhpc.world.ranks import Loopback

BUCKET = Bucket(("weight", "bias", "kernel", "none"), ((24, 60), (7,), (6, 3, 5, 5), (3, 0)))
CODED = {"weight": slice(0, 1440), "kernel": slice(1447, 1897)}


class Runs:
    """A method on so many ranks, call after call."""

    def __init__(self, method: Aggregator, ranks: int, bucket: Bucket = BUCKET) -> None:
        self.method, self.bucket, self.world = method, bucket, Loopback(ranks)
        self.state, self.iteration, self.loss_scale = State(self.world.hosted, ranks), 0, 1.0

    def __call__(self, flats: list[Any], epoch: float = 0.0) -> Any:
        """Return the mean of gradients, each bucket by itself."""
        mean = np.empty(self.bucket.size, np.float32)
        for part in split_bucket(self.bucket, 1000 * BYTES / MIB):
            own = [flat[part.start : part.stop] for flat in flats]
            here = self.iteration, epoch, self.loss_scale
            context = Context(self.world, self.state, 5, *here)
            mean[part.start : part.stop] = self.method.aggregate(own, part.bucket, context).flat
        self.iteration += 1
        return mean

    def kept(self, name: str = "residual") -> Any:
        """What ranks keep, float32[ranks, values]; 0 where nothing is kept."""
        rows = np.zeros((self.world.ranks, self.bucket.size), np.float32)
        for layer, start, stop in self.bucket.segments:
            if entry := dict(self.state).get((layer, name)):
                rows[:, start:stop] = entry.array
        return rows


def normal(ranks: int, bucket: Bucket = BUCKET, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(bucket.size).astype(np.float32) for _ in range(ranks)]


CONSERVING = [
    TopK(),
    TopK(density=0.3, within="bucket", wire="e3m0", warmup=(1.0, 0.5)),
    RandomK(density=0.2),
    RandomK(wire="fp16"),  # of integers up to 2048 nothing is rounded
    Strom(tau=4.0),
    ScaleCom(rate=4, per_chunk=2, beta=1.0),
    OkTopk(density=0.1, estimate_every=2, rebalance_every=3),
]


@every("ranks", [1, 2, 7])
@every("method", CONSERVING)
def test_nothing_is_lost(method: Aggregator, ranks: int) -> None:
    """Sent + kept = gradients + kept before, exactly: integers, of any layers.

    A mean of integers is off by 2**-24 of it, so its product with ranks is nearest to their sum.
    """
    rng = np.random.default_rng(ranks)
    shapes = [tuple(rng.integers(0, 12, rng.integers(0, 4)).tolist()) for _ in range(6)]
    runs = Runs(method, ranks, Bucket(tuple("abcdef"), tuple(shapes)))
    before = runs.kept().sum(0)
    for time in range(4):
        flats = [rng.integers(-8, 9, runs.bucket.size).astype(np.float32) for _ in range(ranks)]
        sent = np.rint(runs(flats, epoch=time * 0.7) * ranks)
        after = runs.kept().sum(0)
        assert np.array_equal(sent + after, np.sum(flats, axis=0) + before)
        before = after


@every(
    "method",
    [TopK(density=0.2), RandomK(density=0.2), ScaleCom(rate=5, beta=1.0), OkTopk(density=0.2)],
)
def test_of_one_rank_no_bit_is_lost(method: Aggregator) -> None:
    """A value is sent or kept as it is: subnormal ones, zeros and the largest ones, too."""
    flat = np.random.default_rng(0).integers(0, 2**32, BUCKET.size, dtype=np.uint32).view("f4")
    flat[~np.isfinite(flat)] = 2**-149
    runs = Runs(method, 1)
    mean, kept = runs([flat]), runs.kept()[0]
    assert np.array_equal(np.where(mean == 0, kept, mean), flat)
    for each in CODED.values():
        assert not (mean * kept)[each].any()


def by_hand(values: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:count])


def test_topk_sends_the_largest_of_gradient_and_memory() -> None:
    runs, memory = Runs(TopK(density=0.1), 3), np.zeros((3, BUCKET.size), np.float32)
    for time in range(3):
        flats = [np.round(4 * flat) for flat in normal(3, seed=time)]  # ties
        memory += np.stack(flats)
        sent = np.zeros(BUCKET.size, np.float32)
        for row in memory:
            for part in CODED.values():
                index = by_hand(row[part].tolist(), round(0.1 * row[part].size))
                sent[part][index] += row[part][index]
                row[part][index] = 0
        mean = runs(flats)
        for part in CODED.values():
            assert np.array_equal(mean[part], sent[part] / np.float32(3))
            assert np.array_equal(runs.kept()[:, part], memory[:, part])
        memory[:, 1440:1447] = 0
        assert np.array_equal(mean[1440:1447], np.sum(flats, 0)[1440:1447] / np.float32(3))


def test_density_by_epoch_and_within_a_bucket() -> None:
    flats = normal(1)
    for epoch, share in ((0.0, 0.5), (0.99, 0.5), (1.0, 0.2), (2.0, 0.01), (9.5, 0.01)):
        for kind in (TopK, Dgc, RandomK):
            method = kind(density=0.01, warmup=(0.5, 0.2), exclude=("kernel",))
            context = Context(Loopback(1), State(range(1), 1), epoch=epoch)
            mean = method.aggregate(flats, BUCKET, context)
            assert np.count_nonzero(mean.flat[CODED["weight"]]) == round(share * 1440)
            assert mean.layers["sent_share"].tolist() == [round(share * 1440) / 1440, 1, 1, 1]
            assert np.array_equal(mean.flat[1440:], flats[0][1440:])
    flats[0][CODED["kernel"]] *= 1000
    context = Context(Loopback(1), State(range(1), 1))
    mean = TopK(density=0.1, within="bucket").aggregate(flats, BUCKET, context)
    assert mean.layers["sent_share"].tolist() == [0, 1, 189 / 450, 1]


def test_dgc_is_momentum_correction_with_masking() -> None:
    """Against the recursion in float64, in values that float32 holds exactly."""
    method, ranks = Dgc(momentum=0.5, density=0.1, warmup=()), 4
    runs, u, v = Runs(method, ranks), np.zeros((ranks, BUCKET.size)), np.zeros((ranks, BUCKET.size))
    whole = np.zeros(BUCKET.size)
    for time in range(5):
        flats = [np.round(8 * flat) for flat in normal(ranks, seed=time)]
        u = 0.5 * u + np.stack(flats)
        v += u
        sent = np.zeros((ranks, BUCKET.size))
        for part in CODED.values():
            for row in range(ranks):
                index = by_hand(v[row, part].tolist(), round(0.1 * v[row, part].size))
                sent[row, part][index] = v[row, part][index]
                v[row, part][index] = u[row, part][index] = 0
        whole = 0.5 * whole + np.mean(flats, axis=0)
        mean = runs(flats)
        for part in CODED.values():
            assert np.array_equal(mean[part], sent.mean(axis=0)[part])
            assert np.array_equal(runs.kept()[:, part], v[:, part])
            assert np.array_equal(runs.kept("momentum")[:, part], u[:, part])
        assert np.array_equal(mean[1440:1447], whole[1440:1447])
    with pytest.raises(AssertionError):  # the test can tell
        assert np.array_equal(Runs(replace(method, masking=False), ranks)(flats), mean)


def test_dgc_of_all_values_is_momentum_as_torch_has_it() -> None:
    """Without masking and with nothing kept back; weights are multiples of 2**-5 throughout."""
    method = Dgc(momentum=0.5, density=1.0, warmup=(), masking=False)
    runs, theirs = Runs(method, 2), torch.nn.Parameter(torch.zeros(BUCKET.size))
    optimizer, ours = torch.optim.SGD([theirs], lr=0.25, momentum=0.5), np.zeros(BUCKET.size)
    for time in range(4):
        flats = [np.round(2 * flat) for flat in normal(2, seed=time)]
        ours -= 0.25 * runs(flats)
        theirs.grad = torch.from_numpy(np.mean(flats, axis=0))
        optimizer.step()
    assert np.array_equal(ours, theirs.detach().numpy())


def test_dgc_clips_the_gradient_of_a_rank_by_layer() -> None:
    flats = normal(4)
    method = Dgc(density=1.0, warmup=(), clip_norm=6.0)
    mean = Runs(method, 4)(flats)
    for part in (*CODED.values(), slice(1440, 1447)):
        lengths = [np.linalg.norm(flat[part].astype(np.float64)) for flat in flats]
        expected = np.mean(
            [flat[part] * min(1, 3.0 / n) for flat, n in zip(flats, lengths, strict=True)], axis=0
        )
        # four terms below 2: each rounded twice, their sum and its fourth 4 times, 2**-23 each
        assert np.abs(mean[part] - expected).max() <= 12 * 2.0**-23


def test_strom_sends_tau_and_keeps_what_is_beyond() -> None:
    flats, tau = normal(3), np.float32(0.7)
    runs = Runs(Strom(tau=0.7), 3)
    mean, kept = runs(flats), runs.kept()
    for part in CODED.values():
        x = np.stack(flats)[:, part]
        signs = np.where(np.abs(x) > tau, np.sign(x), np.float32(0))
        assert np.array_equal(np.rint(mean[part] * 3 / tau), signs.sum(axis=0))
        assert np.array_equal(kept[:, part], x - signs * tau)


def test_randomk_draws_alike_and_without_bias() -> None:
    """10,000 draws of 3 of 20: each with the same chance, and the mean is the gradient."""
    draws, n, k = 10_000, 20, 3
    found = np.zeros(n)
    for time in range(draws):
        found[cpu.unpack_bitmap(marks_of((time, 7), k, n))] += 1
    p = k / n
    assert np.abs(found - draws * p).max() <= 5 * math.sqrt(draws * p * (1 - p))
    for n in (1, 2, 5, 8):
        for k in range(n + 1):
            index = cpu.unpack_bitmap(marks_of((n, k), k, n))
            assert index.size == k and (np.diff(index) > 0).all() and np.isin(index, range(n)).all()
    names = tuple(map(str, range(400)))
    bucket = Bucket(names, ((2, 5),) * 400)
    flats = [np.tile(np.arange(1, 11, dtype=np.float32), 400)] * 2
    runs = Runs(RandomK(density=0.2, error_feedback=False), 2, bucket)
    means = np.stack([runs(flats).reshape(400, 10) for _ in range(3)]).reshape(-1, 10)
    assert not dict(runs.state) and np.count_nonzero(means) == 1200 * 2
    # a value comes with chance 0.2 as 5 times itself: a deviation of 2 times itself
    bound = 4 * 2 * np.arange(1, 11) / math.sqrt(1200)
    assert (np.abs(means.mean(axis=0) - np.arange(1, 11)) <= bound).all()
    assert not np.array_equal(means[:400] != 0, means[400:800] != 0)


def test_without_error_feedback_small_values_never_come() -> None:
    flats, lost = normal(4), []
    for feedback in (True, False):
        runs = Runs(TopK(density=0.1, error_feedback=feedback), 4)
        total = np.sum([runs(flats) for _ in range(30)], axis=0, dtype=np.float64)
        lost.append(np.linalg.norm(total / 30 - np.mean(flats, axis=0, dtype=np.float64)))
    assert 2 * lost[0] < lost[1]


SHARED = {
    TopK(): False,
    Dgc(warmup=(), density=0.01): False,
    RandomK(density=0.01): True,
}  # indices of ranks


@every("method", SHARED)
def test_the_union_of_what_ranks_choose_grows_unless_it_is_shared(method: Aggregator) -> None:
    bucket = Bucket(("x",), ((100, 100),))
    union = [np.count_nonzero(Runs(method, p, bucket)(normal(p, bucket))) for p in (1, 2, 8, 32)]
    if SHARED[method]:
        assert union == [100] * 4
    else:  # 32 ranks choose 1 % by chance: 1 - 0.99**32 = 27.5 % of 10,000, deviation 45
        assert union[0] == 100 and union == sorted(union) and 2500 < union[3] < 3000


TIMES_SMALLER = {  # than float32, per rank and receiver, everything counted
    TopK(): 78,  # 32 bits of a value and 8.7 of an index, of 1 %
    TopK(wire="bf16"): 125,
    Dgc(warmup=()): 700,  # 0.1 %, 12 bits of an index
    RandomK(density=0.1): 9.3,  # chunks of a ring are whole tiles, so not all alike
    RandomK(density=0.1, wire="e4m3"): 35,
    Strom(tau=3.0): 900,  # 0.27 %: 2 bits of a sign, 11 of an index
}


@every("method", TIMES_SMALLER)
def test_bytes_that_travel(method: Aggregator) -> None:
    bucket, ranks = Bucket(("w", "v"), ((256, 512), (512, 128))), 8
    world = Loopback(ranks)
    context = Context(world, State(world.hosted, ranks), 5)
    method.aggregate(normal(ranks, bucket), bucket, context)
    copies = 2 * 7 / 8 if isinstance(method, RandomK) else 7  # a ring, and to all others
    assert BYTES * bucket.size * copies / world.bytes_sent.max() >= TIMES_SMALLER[method]


def memories(runs: Runs) -> list[bytes]:
    """What is kept of the bucket that is the last to travel."""
    return [runs.kept(name)[:, CODED["weight"]].tobytes() for name in ("residual", "momentum")]


@every("name", ["topk", "randomk", "dgc", "strom", "adacomp", "scalecom", "oktopk"])
@every("case", ["nan", "memory overflows", "sum overflows"])
def test_what_is_not_finite_is_told_and_nothing_is_kept(name: str, case: str) -> None:
    runs = Runs(COMPRESSORS[name](), 2)
    huge, flats = np.float32(3e38), [np.ones(BUCKET.size, np.float32) for _ in range(2)]
    if case == "memory overflows":
        flats[1][CODED["weight"]] = huge  # what is not sent waits
        runs(flats)
    elif case == "sum overflows":
        for flat in flats:
            flat[CODED["weight"]] = huge
    else:
        flats[1][3] = np.nan
    before = memories(runs)
    if (name, case) in (("strom", "sum overflows"), ("adacomp", "memory overflows")):
        return  # of tau alone; all that is as large is sent
    with pytest.raises(NonFiniteGradient) as caught:
        runs(flats)
    assert caught.value.segments == ("weight",)
    assert caught.value.ranks == (() if case == "sum overflows" else (1,))
    assert memories(runs) == before


MOMENTUM = [{"aggregator": "dgc"}, {"aggregator": "powersgd", "momentum": 0.5}]


@every("gradient", MOMENTUM)
def test_methods_with_momentum_go_with_an_optimizer_without(gradient: dict[str, Any]) -> None:
    """Which it is where the job names none; a copy of what is filled in is the same job."""
    for given in ({}, {"momentum": 0.0}, {"weight_decay": 0.1}, {"name": "sgd"}):
        job = small_job(gradient=gradient, optimizer=given)
        assert isinstance(job.optimizer, Sgd) and job.optimizer.momentum == 0
        assert validate(Job, job.plain(), "again") == job
    says = r"optimizer: has momentum, .*: write momentum = 0.0 below \[optimizer\], or leave"
    for given in ({"momentum": 0.5}, {"name": "adam"}, {"nesterov": True}):
        with pytest.raises(ConfigError, match=says):
            small_job(gradient=gradient, optimizer=given)
    assert small_job(gradient={"aggregator": "powersgd"}).optimizer == Sgd(momentum=0.9)


@every("name", ["topk", "randomk", "dgc", "strom"])
def test_excluded_layers_are_those_of_the_model(name: str) -> None:
    with pytest.raises(ValueError, match=r"\.exclude: no layer is called 'weigt': did you mean w"):
        GradientReducer(torch.nn.Linear(3, 2), Loopback(), name, exclude=("weigt",))


@every(
    "method",
    [Dgc(clip_norm=20.0, density=0.1), Strom(tau=0.5), TopK(), AdaComp(), ScaleCom(), OkTopk()],
)
def test_scaled_losses_give_scaled_means(method: Aggregator) -> None:
    """Exactly, as scales are powers of two: options in the unit of gradients follow the scale."""
    plain, scaled, former = Runs(method, 3), Runs(method, 3), 1.0
    for time, scale in enumerate((1.0, 1024.0, 64.0, 64.0)):
        flats = normal(3, seed=time)
        scaled.state.scale(scale / former)
        scaled.loss_scale = former = scale
        assert np.array_equal(scaled([scale * flat for flat in flats]), scale * plain(flats))


def test_an_optimizer_with_momentum_is_refused_while_the_reducer_lives() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    reducer = GradientReducer(model, Loopback(), "dgc")
    optimizers = [
        torch.optim.SGD(model.parameters(), 0.1, 0.9),
        torch.optim.Adam(model.parameters()),
    ]
    for each in optimizers:
        with pytest.raises(ValueError, match=r"step: has momentum, and so have the means of Dgc"):
            each.step()
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.optim.Adam(other.parameters()).step()
    del reducer
    for each in optimizers:
        each.step()
