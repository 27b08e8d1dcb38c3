"""Decentralised rules against the papers' equations in float64; graphs; wires; bad input."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from every import every
from training import prepared, small_job

from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.config import ConfigError
from cpdhpc.lab.train.gossip import GRAPHS, STATIC, Graph
from cpdhpc.lab.train.job import UPDATES
from cpdhpc.lab.train.update import OwnModels, Update
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

Array = npt.NDArray[Any]
EPS = float(np.finfo(np.float32).eps)


def matrix(graph: Graph, phase: int = 0) -> Array:
    """The weights of a phase, float64[ranks, ranks]; a row is what a rank hears."""
    weights = np.zeros((graph.ranks, graph.ranks))
    for rank in range(graph.ranks):
        for source, weight in graph.sources(rank, phase).items():
            weights[rank, source] = weight
    return weights + np.diag(1 - weights.sum(axis=1))


@every("name", GRAPHS)
def test_weights_are_doubly_stochastic(name: str) -> None:
    for ranks in (r for r in range(2, 20) if name != "grid" or r in (4, 6, 8, 9, 12, 15, 16)):
        graph, reached = Graph(name, ranks), np.eye(ranks)
        for phase in range(graph.phases):
            weights = matrix(graph, phase)
            assert np.allclose(weights.sum(axis=0), 1, atol=1e-12)
            assert (np.diag(weights) > 0).all()
            for rank in range(ranks):
                hears = np.flatnonzero(weights[:, rank]).tolist()
                assert graph.targets(rank, phase) == [r for r in hears if r != rank]
            assert name not in STATIC or np.array_equal(weights, weights.T)
            reached = weights @ reached
        # Connected: all else than the mean dies out. One peer is done after a round, exactly.
        rest = np.linalg.norm(reached - 1 / ranks, 2)
        assert rest < 1 if name in STATIC or ranks & (ranks - 1) else rest < 1e-12


def test_gaps_of_eight_ranks() -> None:
    """(1 + 2 cos(pi / 4)) / 3, and 1/3, as every rank of the exponential graph hears 5 others."""
    for name, second in (("ring", (1 + 2**0.5) / 3), ("exponential", 1 / 3)):
        values = np.sort(np.abs(np.linalg.eigvalsh(matrix(Graph(name, 8)))))
        assert np.isclose(values[-2], second)


def test_momentum_of_decentlam_grows_where_the_graph_changes() -> None:
    """The reason for which one_peer is refused: without gradients, apart from the mean."""

    def growth(graph: Graph, momentum: float) -> float:
        eye, whole = np.eye(graph.ranks), np.eye(2 * graph.ranks)
        apart = np.kron(np.eye(2), eye - 1 / graph.ranks)
        for phase in range(graph.phases):
            pull = eye - matrix(graph, phase)  # m = b m + pull x; x = x - m
            step = np.block([[eye - pull, -momentum * eye], [pull, momentum * eye]])
            whole = step @ whole
        return float(np.abs(np.linalg.eigvals(apart @ whole @ apart)).max())

    assert growth(Graph("one_peer", 8), 0.9) > 1.3
    assert all(growth(Graph(name, 8), 0.9) < 0.97 for name in STATIC)


class Vector(torch.nn.Module):
    def __init__(self, start: Array) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.from_numpy(start.astype(np.float32)))


class Trial:
    """A rule on virtual ranks, which are given their gradients."""

    def __init__(self, ranks: int, start: Array, decay: float = 0.0, **keys: Any) -> None:
        rule = UPDATES[keys["name"]].model_validate(keys)
        self.model, self.world = Vector(start), Loopback(ranks)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.0, weight_decay=decay)
        reducer = GradientReducer(self.model, self.world)
        self.update: Update = rule.build(self.model, self.sgd, reducer)

    @property
    def xs(self) -> Array:
        """The parameters of each rank."""
        assert isinstance(self.update, OwnModels)
        return np.array([x[: self.model.w.numel()] for x in self.update.parameters])

    def step(self, rate: float, gradient: Callable[[int, Array], Array]) -> None:
        self.sgd.param_groups[0]["lr"] = rate
        for rank in range(self.world.ranks):
            self.update.begin(rank)
            x = self.model.w.detach().numpy()
            self.model.w.grad = torch.from_numpy(gradient(rank, x).astype(np.float32))
            self.update.keep(rank)
        self.update.reduce()
        self.update.step()


def published(name: str, weights: Array, b: float, xs: Array, ms: Array, g: Array, rate: float):  # type: ignore[no-untyped-def]
    """One step of all ranks as the papers write it; arrays [ranks, n] in float64."""
    if name == "decentlam":
        gt = (xs - weights @ (xs - rate * g)) / rate
        ms = b * ms + gt
        return xs - rate * ms, ms
    ms = (b if name == "dmsgd" else 0.0) * ms + g
    return weights @ (xs - rate * ms), ms


@pytest.mark.parametrize("name", ["dsgd", "dmsgd", "decentlam"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_steps_are_the_papers(name: str, graph: str) -> None:
    """With a rate that warms up and falls, weight decay, and gradients by chance."""
    if (name, graph) == ("decentlam", "one_peer"):
        pytest.skip("refused")
    ranks, n, decay = 6, 5, 0.01
    rng = np.random.default_rng(1)
    start = rng.standard_normal(n).astype(np.float32)
    trial = Trial(ranks, start, decay, name=name, graph=graph)
    shape, b = Graph(graph, ranks), 0.9
    xs, ms = np.tile(start.astype(np.float64), (ranks, 1)), np.zeros((ranks, n))
    rates = [0.05, 0.1, 0.2, 0.2, 0.02, 0.02, 0.2, 0.1]
    for iteration, rate in enumerate(rates):
        g = rng.standard_normal((ranks, n))
        trial.step(rate, lambda rank, x, g=g: g[rank])  # type: ignore[misc]
        weights = matrix(shape, iteration % shape.phases)
        xs, ms = published(name, weights, b, xs, ms, g + decay * xs, rate)
        # A step rounds some 10 times, relative to the largest value; errors of steps before are
        # handed on with momentum, at most 1 / (1 - b) times, and by 10 where the rate grows so.
        bound = 100 * len(rates) * EPS * max(np.abs(xs).max(), rate * np.abs(ms).max())
        assert np.abs(trial.xs - xs).max() < bound
    assert np.abs(xs - xs.mean(axis=0)).max() > 0.01  # there was something to mix


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_decentlam_at_a_rate_of_zero(wire: str) -> None:
    """m = b m + W g, x = W x, in float32 for gradients whatever the wire."""
    weights, b = matrix(Graph("ring", 4)), 0.5
    trial = Trial(4, np.zeros(3), name="decentlam", graph="ring", wire=wire, momentum=b)
    gradients = np.random.default_rng(2).standard_normal((5, 4, 3))

    def momentum() -> Array:
        assert isinstance(trial.update, OwnModels)
        return np.array([m[:3] for m in trial.update._own("momentum")])

    def step(number: int, rate: float) -> None:
        trial.step(rate, lambda rank, x: gradients[number][rank])

    step(0, 0.0)
    step(1, 0.0)
    assert not trial.xs.any()
    expected = b * weights @ gradients[0] + weights @ gradients[1]
    # Gradients and weights are rounded to float32, products and sums some 10 times.
    assert np.allclose(momentum(), expected, rtol=0, atol=20 * EPS * np.abs(gradients).max())
    step(2, 0.125)
    before, m = trial.xs, momentum()
    step(3, 0.0)
    close = 1e-6 if wire == "raw" else 0.1 * np.abs(before).max()  # e4m3 rounds by 1/16
    assert np.allclose(trial.xs, weights @ before, rtol=0, atol=close)
    expected = b * m + weights @ gradients[3]
    largest = np.abs(m).max() + np.abs(gradients).max()
    assert np.allclose(momentum(), expected, rtol=0, atol=20 * EPS * largest)
    if wire == "raw":
        sent = trial.world.bytes_sent.tolist()
        vectors = 4 * 2 + 3 * 2  # 4 steps to 2 neighbours; gradients in 3 of them; nothing else
        assert sent == [vectors * trial.xs[0].nbytes] * 4


def test_momentum_at_a_rate_of_zero_is_the_limit_of_small_rates() -> None:
    found = []
    for rate in (0.0, 2.0**-40):
        trial = Trial(6, np.zeros(3), name="decentlam", graph="grid")
        rng = np.random.default_rng(3)
        trial.step(rate, lambda rank, x, rng=rng: rng.standard_normal(3))  # type: ignore[misc]
        assert isinstance(trial.update, OwnModels)
        found.append(np.array(trial.update._own("momentum")))
    assert np.abs(found[0]).max() > 0.1
    assert np.allclose(*found, rtol=0, atol=10 * EPS)  # a power of two scales exactly


@pytest.mark.parametrize(
    "graph, b, steps",
    [("ring", 0.8, 80), pytest.param("exponential", 0.9, 120, marks=pytest.mark.slow)],
)
def test_limiting_bias(graph: str, b: float, steps: int) -> None:
    """Ranks with least squares of their own: where full gradients end, apart from the optimum.

    Fixed points solve linear equations: x = W (x - rate g(x)) of DSGD and DecentLaM, whose momentum
    sees no more once x is there; of DmSGD m = g / (1 - b), so with the rate that much larger.
    Biases grow with the rate, squared, hence 1 / (1 - b)**2, as the rate goes to zero.
    """
    ranks, n, rate = 8, 4, 5e-4
    rng = np.random.default_rng(0)
    a = rng.standard_normal((ranks, 2 * n, n))
    hessians = np.einsum("rki,rkj->rij", a, a) / (2 * n)
    optima = 30 * rng.standard_normal((ranks, n))
    best = np.linalg.solve(hessians.sum(0), np.einsum("rij,rj->i", hessians, optima))
    weights = matrix(Graph(graph, ranks))

    def limit(rate: float) -> Array:
        """Of all ranks, apart from the optimum: (I - W (I - rate H)) d = -rate W g(optimum)."""
        diagonal = np.zeros((ranks, n, ranks, n))
        for rank in range(ranks):
            diagonal[rank, :, rank] = hessians[rank]
        hessian = diagonal.reshape(ranks * n, -1)
        mix = np.kron(weights, np.eye(n))
        at_best = np.einsum("rij,rj->ri", hessians, best - optima).reshape(-1)
        system = np.eye(ranks * n) - mix @ (np.eye(ranks * n) - rate * hessian)
        return np.linalg.solve(system, -rate * (mix @ at_best)).reshape(ranks, n)

    ratio = (limit(rate / (1 - b)) ** 2).sum() / (limit(rate) ** 2).sum()
    assert ratio == pytest.approx(1 / (1 - b) ** 2, rel=0.1)
    found = {}
    for name in ("dsgd", "dmsgd", "decentlam"):
        wanted = limit(rate / (1 - b) if name == "dmsgd" else rate)
        keys = {} if name == "dsgd" else {"momentum": b}
        # From where the mean ends, as only the mean is slow; what sets ranks apart comes by itself.
        trial = Trial(ranks, best + wanted.mean(axis=0), name=name, graph=graph, **keys)
        for _ in range(steps):
            trial.step(rate, lambda rank, x: hessians[rank] @ (x - optima[rank]))
        found[name] = ((trial.xs - best) ** 2).sum()
        # x is rounded in each step, by EPS / 2 of it; mixing and momentum hand that on, at most
        # 1 / (1 - rho) = 5 and 1 / (1 - b) = 10 times. While ranks came apart the mean was pushed;
        # at rate times steps = 0.06 times the curvature that is still there, below 1/100.
        rounding = 50 * EPS / 2 * np.abs(trial.xs).max()
        assert np.abs(trial.xs - best - wanted).max() < rounding + 0.01 * np.abs(wanted).max()
    assert found["decentlam"] == pytest.approx(found["dsgd"], rel=0.02)
    assert found["dmsgd"] / found["dsgd"] == pytest.approx(1 / (1 - b) ** 2, rel=0.1)


@pytest.mark.parametrize(
    "wire, name, graph, b",
    [
        ("e4m3", "dsgd", "one_peer", 0.0),
        ("mxfp4", "decentlam", "exponential", 0.5),
        ("int8", "decentlam", "grid", 0.5),
    ],
)
def test_packed_wires_keep_the_mean_and_agree_in_the_end(
    wire: str, name: str, graph: str, b: float
) -> None:
    """Errors are made up for: ranks come much closer than the spacing of the wire's numbers."""
    ranks, n, rate = 4, 2000, 0.1
    rng = np.random.default_rng(3)
    start = rng.standard_normal(n).astype(np.float32)
    keys = {"momentum": b} if b else {}
    trial = Trial(ranks, start, name=name, graph=graph, wire=wire, **keys)
    mean, momentum, distances = start.astype(np.float64), np.zeros(n), []
    for iteration in range(70):
        g = rng.standard_normal((ranks, n)) * (iteration < 10)
        trial.step(rate, lambda rank, x, g=g: g[rank])  # type: ignore[misc]
        momentum = b * momentum + g.mean(axis=0)
        mean = mean - rate * momentum
        distances.append(np.abs(trial.xs - trial.xs.mean(axis=0)).max())
        # The mean moves as if there were one model, but for roundings: 16 of them a step.
        bound = 16 * (iteration + 1) * EPS * np.abs(trial.xs).max() / (1 - b)
        assert np.abs(trial.xs.mean(axis=0, dtype=np.float64) - mean).max() < bound
    assert max(distances[:10]) > 0.05
    assert distances[-1] < 1e-5


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"update": {"name": "decentlam"}}, 1, "graph='exponential' needs 2 ranks or more: there is 1"),
    (
        {"update": {"name": "dsgd", "graph": "grid"}},
        5,
        "needs 4 ranks or more, in rows and columns",
    ),
    ({"update": {"name": "decentlam", "graph": "one_peer"}}, 4, "diverges if graphs change"),
    ({"update": {"name": "dsgd", "graph": "rng"}}, 4, "graph='rng': did you mean ring"),
    ({"update": {"name": "dsgd", "wire": "e4m"}}, 4, "update.wire"),
    (
        {"update": {"name": "dmsgd"}, "optimizer": {"momentum": 0.9}},
        4,
        "momentum=0.9: must be 0.0 with update.name='dmsgd': write momentum = 0.0 below "
        "[optimizer], or leave optimizer.momentum out",
    ),
    ({"update": {"name": "dsgd"}, "optimizer": {"name": "adam"}}, 4, "'adam': must be 'sgd'"),
    ({"update": {"name": "dsgd"}, "gradient": {"aggregator": "lowbit"}}, 4, "must be 'none'"),
    ({"update": {"name": "localsgd", "period": 0}}, 4, "update.period=0: should be greater"),
    ({"update": {"name": "diloco"}, "gradient": {"aggregator": "dgc"}}, 4, "must be False"),
    ({"update": {"name": "diloco"}, "train": {"loss_scale": 2.0}}, 4, "must not be given"),
    (
        {"update": {"name": "localsgd"}, "train": {"overlap": True}},
        1,
        "train.overlap=True: must be",
    ),
]


@every("name", ["dsgd", "dmsgd", "decentlam"])
def test_a_job_file_of_a_rule_alone_is_enough(name: str) -> None:
    for given in ({}, {"name": "sgd", "weight_decay": 0.1}):
        job = small_job(update={"name": name}, optimizer=given)
        assert (job.optimizer.name, job.optimizer.momentum) == ("sgd", 0.0)  # type: ignore[attr-defined]
    assert small_job(update={"name": "diloco"}).optimizer.momentum == 0.9  # type: ignore[attr-defined]


@every("changes, ranks, words", WRONG)
def test_what_does_not_go_together(
    changes: dict[str, Any], ranks: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as found:
        job = small_job(**changes)
        prepared(job, Loopback(ranks), tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["decentlam", "diloco"])
def test_nan_on_one_rank_stops_all_with_their_models_as_they_were(name: str) -> None:
    trial = Trial(3, np.ones(4), name=name)
    trial.step(0.1, lambda rank, x: np.full(4, rank))
    before = trial.xs.copy()
    with pytest.raises(NonFiniteGradient) as found:
        trial.step(0.1, lambda rank, x: np.full(4, np.nan if rank == 2 else 1.0))
    assert (found.value.segments, found.value.ranks) == (("w",), (2,))
    assert trial.xs.tobytes() == before.tobytes()
