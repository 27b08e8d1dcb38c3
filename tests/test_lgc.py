"""LGC: its three phases by hand, what waits, what the autoencoder has learned, its bytes."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from every import every

from cpdhpc.compress import Context, Lgc, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.payload import encode_sparse
from cpdhpc.torch import GradientReducer
from cpdhpc.world.ranks import Loopback

RANKS = 3
BUCKET = Bucket(
    ("first", "bias", "w", "none", "v", "last"),
    ((4, 10), (7,), (40, 50), (3, 0), (30, 20), (10, 30)),
)
CHOSEN = {"w": 200, "v": 60, "last": 30}  # a tenth
OPTIONS: dict[str, Any] = {"density": 0.1, "exclude": ("first",), "plain": ("last",)}


def gradients(time: int, base: Any) -> list[Any]:
    rng = np.random.default_rng((7, time))
    return [
        (base + 0.2 * rng.standard_normal(BUCKET.size)).astype(np.float32) for _ in range(RANKS)
    ]


def memory(state: State) -> Any:
    """The residuals of each rank, float64[ranks, values]."""
    kept = np.zeros((RANKS, BUCKET.size))
    for name, start, stop in BUCKET.segments:
        if name in CHOSEN:
            kept[:, start:stop] = state.own(name, "residual", (stop - start,))
    return kept


def step(method: Lgc, time: int, state: State, base: Any) -> tuple[Any, Any, Any, int]:
    """Do an iteration; return the mean, what the ranks had to send, and what a rank sent."""
    flats, world = gradients(time, base), Loopback(RANKS)
    waiting = np.array(flats, np.float64) + memory(state)
    context = Context(world, state, seed=5, iteration=time)
    return method.aggregate(flats, BUCKET, context), waiting, flats, int(world.bytes_sent.sum())


def places(waiting: Any) -> dict[str, Any]:
    """Where the largest values of each coded layer are."""
    return {
        name: start + np.sort(np.argsort(-np.abs(waiting[start:stop]))[: CHOSEN[name]])
        for name, start, stop in BUCKET.segments
        if name in CHOSEN
    }


@pytest.mark.parametrize("exchange", ["ring", "server"])
def test_phases_send_what_they_say_and_keep_the_rest(exchange: Any) -> None:
    method = Lgc(exchange=exchange, dense_steps=1, training_steps=4, **OPTIONS)
    base = np.random.default_rng(1).standard_normal(BUCKET.size)
    state, sent_bytes = State(range(RANKS), RANKS), []
    for time in range(8):
        found, waiting, flats, size_bytes = step(method, time, state, base)
        sent_bytes.append(size_bytes)
        exact = waiting.mean(axis=0) if time else np.mean(flats, axis=0, dtype=np.float64)
        # Additions of three float32 below 16 and a memory's: four roundings of 2**-21
        whole = {"first", "bias"} if time else set(BUCKET.names)
        for name, start, stop in BUCKET.segments:
            if name in whole:
                assert np.abs(found.flat - exact)[start:stop].max(initial=0) <= 2**-19
        if not time:
            assert not any(entry.array.any() for _, entry in state)
            continue
        at = places(waiting[time % RANKS])
        unsent = np.isin(np.arange(BUCKET.size), np.concatenate([*at.values()]), invert=True)
        for name in CHOSEN:
            if time < 5 or name == "last":
                assert np.abs(found.flat - exact)[at[name]].max() <= 2**-19
        spans = [np.arange(a, b) for name, a, b in BUCKET.segments if name in CHOSEN]
        coded = np.isin(np.arange(BUCKET.size), np.concatenate(spans))
        assert not found.flat[coded & unsent].any() and found.flat[~unsent].all()
        kept = memory(state)
        assert np.abs(kept - waiting)[:, coded & unsent].max() <= 2**-20  # one addition
        assert not kept[:, ~unsent].any()
    # Of the last iteration: the leader's places, in a tree; float32 layers and plain values, in a
    # ring; a scale from each to each. 260 values are 272 with zeros behind, so codes have 68.
    indices = np.flatnonzero(~unsent[coded]).astype(np.uint32)
    leaders = encode_sparse(indices, np.zeros(290, np.float32), 2900).size - 4 * 290
    others, ring, all_to_all = 2 * leaders, 2 * 2 * 4, 3 * 2
    others += ring * 47
    assert sent_bytes[-4] == others + all_to_all * 4 * 290
    others += ring * 30 + all_to_all * 8
    if exchange == "ring":
        assert sent_bytes[-1] == others + ring * 68
    else:  # one code; 13 innovations of each rank: 8 bytes, 4 a value, and their places
        innovations = sent_bytes[-1] - others - 2 * 4 * 68
        assert all_to_all * (8 + 13 * 4) < innovations <= all_to_all * (8 + 13 * 6)


@pytest.mark.parametrize("exchange", ["ring", "server"])
def test_the_autoencoder_learns_goes_on_from_its_state_and_stays(exchange: Any) -> None:
    """A trained one beats nothing, whose error is 1, and one that never learned.

    Layers are outer products, as gradients of one sample are.
    """
    rng, base = np.random.default_rng(2), np.ones(BUCKET.size, np.float32)
    for view in BUCKET.views(base):
        if view.ndim > 1:
            view *= rng.standard_normal((len(view), 1)) ** 3 * np.abs(
                rng.standard_normal(view.shape[1])
            )
    errors, threads = [], torch.get_num_threads()
    for training in (25, 0):
        method = Lgc(
            exchange=exchange, dense_steps=1, training_steps=training, learning_rate=3e-3, **OPTIONS
        )
        state, lost, given = State(range(RANKS), RANKS), 0.0, 0.0
        for time in range(training + 7):
            if time == training + 3:
                before = {key: entry.array.copy() for key, entry in state}
                again = state.copy()
            found, waiting, *_ = step(method, time, state, base)
            if time > training:
                at = places(waiting[time % RANKS])
                both = np.concatenate([at["w"], at["v"]])
                lost += np.square((found.flat - waiting.mean(axis=0))[both]).sum()
                given += np.square(waiting.mean(axis=0)[both]).sum()
        errors.append(lost / given)
        torch.set_num_threads(2)
        for time in range(training + 3, training + 7):
            resumed, *_ = step(method, time, again, base)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(threads)
        assert np.array_equal(resumed.flat, found.flat)
        frozen = [key for key, entry in state if entry.redistribution is None]
        assert len(frozen) == 2
        assert all(np.array_equal(dict(state)[key].array, before[key]) for key in frozen)
    assert errors[0] < 0.5 < 0.9 < errors[1]


def test_telemetry_has_the_error_before_learning_from_it() -> None:
    base = np.random.default_rng(3).standard_normal(BUCKET.size)
    method = Lgc(dense_steps=0, training_steps=1, **OPTIONS)
    state = State(range(RANKS), RANKS)
    found, *_ = step(method, 0, state, base)
    error = found.layers["decoding_error"]
    assert np.array_equal(np.isnan(error), [True, True, False, True, False, True])
    assert np.all(np.abs(error[[2, 4]] - 1) < 0.3)  # a new one tells next to nothing
    shares = [1, 1, 0.1, 1, 0.1, 0.1]
    assert np.allclose(found.layers["sent_share"], shares, rtol=1e-12)
    found, *_ = step(method, 1, state, base)
    assert "decoding_error" not in found.layers


def test_decoders_are_taken_in_turn_by_more_ranks() -> None:
    """State of two ranks, gone on with by three: the third has the first one's decoder."""
    base = np.random.default_rng(4).standard_normal(BUCKET.size)
    method = Lgc(exchange="server", dense_steps=0, training_steps=2, **OPTIONS)
    state = State(range(RANKS), RANKS)
    step(method, 0, state, base)
    for key, entry in list(state):
        if key[1] == "decoders":
            entry.array = entry.array[:2]
    step(method, 1, state, base)
    found, *_ = step(method, 2, state, base)
    assert np.isfinite(found.flat).all()


@every("exchange", ["ring", "server"])
@every("count", [1, 15, 16, 17, 40])
def test_few_values_have_codes_too(exchange: Literal["ring", "server"], count: int) -> None:
    method = Lgc(exchange=exchange, dense_steps=0, training_steps=1, density=1.0)
    bucket, state = Bucket(("weight",), ((1, count),)), State(range(2), 2)
    for iteration in range(3):
        flats = [np.arange(1, count + 1, dtype=np.float32)] * 2
        mean = method.aggregate(flats, bucket, Context(Loopback(2), state, iteration=iteration))
        assert mean.flat.shape == (count,) and np.isfinite(mean.flat).all()


@pytest.mark.parametrize("exchange", ["ring", "server"])
def test_many_values_are_selected_by_kernels(exchange: Literal["ring", "server"]) -> None:
    """Above 8,192 values another way is taken than in the tests above."""
    method = Lgc(exchange=exchange, dense_steps=0, training_steps=1, density=1.0)
    bucket = Bucket(("weight",), ((100, 90),))
    flats = [
        np.random.default_rng(rank).standard_normal(9000).astype(np.float32) for rank in (0, 1)
    ]
    state = State(range(2), 2)
    for iteration in range(2):
        mean = method.aggregate(flats, bucket, Context(Loopback(2), state, iteration=iteration))
        assert np.isfinite(mean.flat).all()


@pytest.mark.parametrize("exchange", ["ring", "server"])
@pytest.mark.parametrize("unused", [("v", "last"), ("w", "v", "last")])
def test_a_layer_without_gradient_on_all_ranks_gets_none(
    exchange: Any, unused: tuple[str, ...]
) -> None:
    """Codes of zeros are decoded to noise; a layer that one rank has a gradient for gets its."""
    method = Lgc(exchange=exchange, dense_steps=1, training_steps=2, **OPTIONS)
    base, state = np.random.default_rng(6).standard_normal(BUCKET.size), State(range(RANKS), RANKS)
    for time in range(6):
        flats = gradients(time, base)
        for rank, flat in enumerate(flats):
            for name, start, stop in BUCKET.segments:
                if name in unused or (name == "w" and rank != 1):
                    flat[start:stop] = 0
        context = Context(Loopback(RANKS), state, seed=5, iteration=time)
        mean = method.aggregate(flats, BUCKET, context).flat
        for name, start, stop in BUCKET.segments:
            if name in CHOSEN:
                assert mean[start:stop].any() == (name not in unused)


@pytest.mark.parametrize("exchange", ["ring", "server"])
def test_a_layer_that_no_rank_uses_keeps_no_gradient(exchange: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(30, 20), "unused": torch.nn.Linear(25, 30)})
    options: dict[str, Any] = {"dense_steps": 1, "training_steps": 1, "density": 0.05}
    with GradientReducer(model, Loopback(2), "lgc", exchange=exchange, **options) as reducer:
        for _ in range(4):
            for hosted in range(2):
                model.zero_grad()
                model["a"](torch.randn(8, 30)).square().mean().backward()
                reducer.stash(hosted)
            reducer.reduce()
            assert model["unused"].weight.grad is None and model["unused"].bias.grad is None
            assert model["a"].weight.grad.any()
