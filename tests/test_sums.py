"""Errors and bytes of sums over many ranks, and what is chosen and said by them."""

import re

import numpy as np
import pytest
from every import every

from cpdhpc.collectives.allreduce import Allreduce, simulate
from cpdhpc.collectives.predict import MOST_SUMMED, choose, stagnation
from cpdhpc.collectives.schedules import SCHEDULES, NodeLayout, RoundedSums
from cpdhpc.formats import TILE
from cpdhpc.world.ranks import Loopback, numbered

LIMIT = 0.06  # of the error of the usual sum in e4m3
DATA = {"noise": (0, 1), "direction and noise": (1, 3), "direction": (1, 0)}


def contributions(ranks, common, noise):
    rng = np.random.default_rng(ranks)
    shared = common * rng.standard_normal(TILE)
    return [(shared + noise * rng.standard_normal(TILE)).astype(np.float32) for _ in range(ranks)]


def error(xs, *arguments, **options):
    exact = np.sum(xs, 0, np.float64)
    found = simulate(xs, *arguments, **options).astype(np.float64)
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def assert_small(ranks, nodes=None):
    for name, of in DATA.items():
        xs = contributions(ranks, *of)
        assert error(xs, "e4m3", nodes=nodes) < LIMIT, (ranks, nodes, name)


def test_the_usual_error_stays_below_its_limit():
    for ranks in (*range(2, 14), 24, 33, 48, 100, 128):
        assert_small(ranks)


@every("count, size", [(2, 2), (3, 4), (7, 3), (16, 4), (12, 8), (64, 2)])
def test_the_same_on_nodes(count, size):
    nodes = np.arange(count * size) // size
    assert Allreduce("e4m3").usual(numbered(nodes.tolist())) == "hier"
    assert_small(nodes.size, nodes.tolist())


def test_the_same_on_uneven_nodes():
    for ranks, count in ((9, 4), (50, 7), (90, 20), (150, 25)):
        assert_small(ranks, np.random.default_rng(ranks).integers(0, count, ranks).tolist())


@pytest.mark.slow
def test_the_same_of_a_thousand_ranks():
    for ranks in (512, 1000, 1021, 1024):
        assert_small(ranks)
    for count, size in ((128, 8), (256, 4), (16, 64)):
        assert_small(count * size, [rank // size for rank in range(count * size)])


def sent_bytes(algorithm, accumulate, wire, nodes):
    """Bytes that rank 0 sends of a tile for each chunk, by its steps."""
    layout, method = NodeLayout(nodes), Allreduce(wire, algorithm, accumulate=accumulate)
    payloads = method.plan(nodes, np.empty(0, np.float32), (), ((), ()), 0).wire
    return sum(
        payloads.size_bytes(TILE, terms)
        for step in SCHEDULES[algorithm].steps(0, layout)
        for terms in step.send_terms
    )


@every("wire, most", [("e4m3", 1.06), ("e3m2fn", 1.07), ("e2m1fn", 1.11), ("e1m1fn", 1.14)])
def test_sums_that_grow_take_few_bytes_more(wire, most):
    """1.15 is asked for, of 1,024 ranks."""
    for ranks in (2, 8, 48, 100, 256, 1000, 1024):
        for algorithm in ("torus", "rhd"):
            nodes = (0,) * ranks
            grow, requantise = (
                sent_bytes(algorithm, way, wire, nodes) for way in ("grow", "requantise")
            )
            assert requantise <= grow <= most * requantise, (algorithm, ranks)
    nodes = tuple(rank // 8 for rank in range(1024))
    assert sent_bytes("hier", "grow", wire, nodes) <= 1.05 * sent_bytes(
        "hier", "float32", wire, nodes
    )


@every("wire, once", [("e4m3", 0.0267), ("e3m2fn", 0.053), ("e2m1fn", 0.153), ("e1m1fn", 0.58)])
def test_sums_that_grow_are_near_one_rounding(wire, once):
    """At most 1.4 times it if ranks agree somewhat, and 2.1 times it if all is noise."""
    for name, times in (("direction and noise", 1.4), ("noise", 2.1)):
        xs = contributions(128, *DATA[name])
        for algorithm in ("torus", "rhd"):
            assert error(xs, wire, algorithm, accumulate="grow") < times * once, (algorithm, name)


@every(
    "wire, algorithm, ranks, size",
    [
        ("e4m3", "ring", 24, 0),
        ("e4m3", "ring", 96, 0),
        ("e2m1fn", "biring", 96, 0),
        ("e3m2fn", "torus", 250, 0),
        ("e3m2fn", "gather", 40, 0),
        ("posit8", "ring", 64, 0),
        ("e2m1fn", "hier", 96, 4),
        ("e4m3", "biring:grow", 128, 0),
        ("e4m3", "ring:grow", 400, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:allreduce:UserWarning")
def test_what_is_expected_is_near_what_comes(wire, algorithm, ranks, size):
    """Of the data for which more is expected, as the line says."""
    algorithm, _, accumulate = algorithm.partition(":")
    nodes = tuple(rank // size for rank in range(ranks)) if size else (0,) * ranks
    method = Allreduce(wire, algorithm, accumulate=accumulate or "requantise")
    assert stagnation(method, (0,) * 4) is None
    said = stagnation(method, nodes)
    if algorithm == "hier":
        assert said is None  # sums inside nodes and between them are short
        return
    assert said is not None
    found = re.search(r", of (.*), is expected .* of ([\d.]+), one rounding ([\d.]+): ", said)
    kind, whole, once = found[1], float(found[2]), float(found[3])
    data = {"a common direction and noise": "direction and noise", "noise alone": "noise"}[kind]
    came = error(contributions(ranks, *DATA[data]), wire, algorithm, None, method.accumulate)
    assert came / 1.25 < whole < 1.25 * came and whole > 2.9 * once


def test_sums_of_more_ranks_than_are_formed():
    most, more = (RoundedSums((2, n)).at_most(MOST_SUMMED) for n in (MOST_SUMMED // 2, 10**9))
    assert most == more == RoundedSums((2, MOST_SUMMED // 2))
    assert RoundedSums((4, 1000), held=8).at_most(MOST_SUMMED).chains == (4, 128)


def test_auto_leaves_out_sums_that_stagnate():
    """A ring that rounds may be fastest: then it is another one, if there is another."""
    one_node, some = (0,) * 256, (0,) * 4
    options = {"algorithm": "auto", "accumulate": "requantise"}
    taken = choose(Allreduce("e4m3", **options), one_node, 1 << 24)
    assert taken.algorithm in ("rhd", "tree", "dbtree") and stagnation(taken, one_node) is None
    grown = choose(Allreduce("e4m3", algorithm="auto", accumulate="grow"), (0,) * 1024, 1 << 20)
    assert grown.algorithm in ("torus", "rhd", "hier")
    assert choose(Allreduce("e4m3", **options), some, 1 << 24).algorithm == "ring"
    assert choose(Allreduce("e4m3", algorithm="auto"), one_node, 1 << 24).accumulating != "kahan"
    kahan = choose(Allreduce("e4m3", algorithm="auto", accumulate="kahan"), one_node, 1 << 12)
    assert kahan.algorithm in ("direct", "hier", "gather")


def test_what_was_chosen_is_kept():
    world = Loopback(3)
    xs = contributions(3, 1, 1)
    Allreduce("e4m3", "ring").run(world, xs)
    assert world.chosen == set()
    Allreduce("e4m3").run(world, xs)
    Allreduce("raw").run(world, xs)
    assert world.chosen == {"rhd", "ring"}
