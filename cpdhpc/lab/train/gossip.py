"""Decentralised training: a rank mixes its model with those of its neighbours in a graph.

The weights of a step are a doubly stochastic matrix: rows and columns add up to 1, including a
rank's weight for itself. So mixing leaves the mean over all ranks unchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, field_validator

from ...collectives import sparse
from ...collectives.rank_program import NO_KEY
from ...compress.base import Array, Mean
from ...config import ConfigError, Share, one_of
from ...formats import TILE
from ...ops.payloads import Packed, packed_wire
from .update import NOTHING, OwnModels, OwnModelsRule

if TYPE_CHECKING:
    import torch

    from ...torch.reducer import GradientReducer


def ring(rank: int, ranks: int) -> set[int]:
    """Return the previous and the next rank."""
    return {(rank - 1) % ranks, (rank + 1) % ranks} - {rank}


def grid(rank: int, ranks: int) -> set[int]:
    """Return the neighbours in a grid that is as square as possible, without wrap-around."""
    columns = ranks // _rows(ranks)
    row, column = divmod(rank, columns)
    near = {(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)}
    rows = range(ranks // columns)
    return {r * columns + c for r, c in near if r in rows and c in range(columns)}


def _rows(ranks: int) -> int:
    return max(rows for rows in range(1, isqrt(ranks) + 1) if ranks % rows == 0)


def exponential(rank: int, ranks: int) -> set[int]:
    """Return the ranks at distances 1, 2, 4, ... in both directions."""
    steps = [1 << k for k in range((ranks - 1).bit_length())]
    return {(rank + sign * step) % ranks for step in steps for sign in (1, -1)} - {rank}


STATIC: dict[str, Callable[[int, int], set[int]]] = {
    "ring": ring,
    "grid": grid,
    "exponential": exponential,
}
ONE_PEER = "one_peer"  # hears one rank per step, in turn 1, 2, 4, ... further on
GRAPHS = (*STATIC, ONE_PEER)


@dataclass(frozen=True)
class Graph:
    """The neighbours of so many ranks; name: one of GRAPHS.

    Raises ValueError if there are too few ranks, or their number makes no grid.
    """

    name: str
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"graph={self.name!r} needs 2 ranks or more: there is {self.ranks}")
        if self.name == "grid" and _rows(self.ranks) < 2:
            raise ValueError(
                f"graph='grid' needs 4 ranks or more, in rows and columns: there are {self.ranks}"
            )

    @property
    def phases(self) -> int:
        """Number of steps after which the graph repeats."""
        return (self.ranks - 1).bit_length() if self.name == ONE_PEER else 1

    def sources(self, rank: int, phase: int = 0) -> Mapping[int, float]:
        """Return the ranks that a rank hears in a phase, in ascending order, and their weights.

        Metropolis weights, 1 / (1 + the larger of both numbers of neighbours); one peer has 1/2.
        Source: Xiao, Boyd: Fast linear iterations for distributed averaging, Systems & Control
        Letters 53, 2004; one peer: Ying et al., arXiv 2110.13363.
        """
        if self.name == ONE_PEER:
            return {(rank + (1 << phase)) % self.ranks: 0.5}
        near = STATIC[self.name]
        heard, degree = sorted(near(rank, self.ranks)), len(near(rank, self.ranks))
        return {j: 1 / (1 + max(degree, len(near(j, self.ranks)))) for j in heard}

    def targets(self, rank: int, phase: int = 0) -> list[int]:
        """Return the ranks that hear a rank in a phase, in ascending order."""
        if self.name == ONE_PEER:
            return [(rank - (1 << phase)) % self.ranks]
        return sorted(STATIC[self.name](rank, self.ranks))


class Gossip(OwnModels):
    """Sends each rank's next parameters to its neighbours, and adds a share of the differences.

    In a step rank i adds sum_j W_ij (v_j - v_i). With wire "raw" v is the vector y itself. Other
    wires send the change of y since the last step of that phase, and v is the sum of the decoded
    changes, with the same bits at both ends: so rounding errors enter the next change and are
    corrected later. As a rank uses its own v_i, and not its y_i, the columns of W add up to 1, and
    the mean over ranks is unchanged.
    Source: Koloskova, Stich, Jaggi: Decentralized stochastic optimization and gossip algorithms
    with compressed communication, ICML 2019, arXiv 1902.00340, with consensus step size 1.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        graph: Graph,
        wire: str,
        momentum: float,
    ) -> None:
        self.graph, self.momentum = graph, np.float32(momentum)
        ranks, phases = reducer.world.hosted, range(graph.phases)
        self._heard = [[graph.sources(rank, phase) for rank in ranks] for phase in phases]
        self._told = [[graph.targets(rank, phase) for rank in ranks] for phase in phases]
        self._slots = 1 + max(len(graph.sources(rank)) for rank in range(graph.ranks))
        self.packed = packed_wire(wire, "update")
        super().__init__(model, optimizer, reducer, 1 if self.packed is None else TILE)

    def _start(self) -> None:
        super()._start()
        if self.packed is None:
            return
        for copies, parameters in zip(self._copies(), self.parameters, strict=True):
            copies[...] = parameters  # all ranks begin with the same

    def _copies(self) -> list[Array]:
        """Return each hosted rank's copies of sent vectors, float32[copies, bucket.size].

        By phase: its own, then one for each source. Absent with wire "raw".
        """
        shape = self.graph.phases * self._slots, self.bucket.size
        return self.state.own("", "copies", shape, "drop")

    def reduce(self) -> Mean:
        """Exchange the vectors that each rank would have without the others. Collective.

        See Update.reduce.
        """
        used = self.reducer.collect()
        pairs = zip(self.reducer.flats, self.parameters, strict=True)
        self._gradients = [self._decayed(*each, used) for each in pairs]
        self._ys = [self._next(x, g, i) for i, (x, g) in enumerate(self._rows())]
        self._gains = self._exchanged(self._ys, self.packed)
        return NOTHING

    def step(self) -> None:
        for i, (x, gradient) in enumerate(self._rows()):
            self._mix(x, gradient, i)
        self._playing = None

    def _rows(self) -> list[tuple[Array, Array]]:
        return list(zip(self.parameters, self._gradients, strict=True))

    @property
    def rate(self) -> np.float32:
        """The learning rate of this step."""
        return np.float32(self.optimizer.param_groups[0]["lr"])

    def _decayed(self, flat: Array, parameters: Array, used: Sequence[int]) -> Array:
        """Return a gradient plus weight decay for layers that any rank used, laid out by bucket."""
        decays = {
            id(p): g["weight_decay"] for g in self.optimizer.param_groups for p in g["params"]
        }
        gradient = self.bucket.flatten(self.reducer.bucket.views(flat))
        layers = zip(self.bucket.views(gradient), self.bucket.views(parameters), strict=True)
        for p, (layer, values), is_used in zip(self.reducer.parameters, layers, used, strict=True):
            if is_used and decays[id(p)]:
                layer += np.float32(decays[id(p)]) * values
        return gradient

    @abstractmethod
    def _next(self, x: Array, gradient: Array, hosted: int) -> Array:
        """Return the vector that a rank sends, float32[bucket.size], new."""

    @abstractmethod
    def _mix(self, x: Array, gradient: Array, hosted: int) -> None:
        """Update parameters x, in place, from the sent vectors and the mixing."""

    def _exchanged(self, ys: list[Array], packed: Packed | None) -> list[Array]:
        """Return the mixing term of each hosted rank. Collective.

        packed: the format of changes since the last step of the phase; None: send whole vectors
        """
        phase = (self.reducer.iteration - 1) % self.graph.phases
        heard, told = self._heard[phase], self._told[phase]
        sent, own = ys, ys
        if packed is not None:
            copies = [each[phase * self._slots :][: self._slots] for each in self._copies()]
            sent = [self._encoded(y - each[0]) for y, each in zip(ys, copies, strict=True)]
            own = [self._added(*each) for each in zip([c[0] for c in copies], sent, strict=True)]
        came = sparse.neighbours(
            self.world,
            [dict.fromkeys(to, payload) for to, payload in zip(told, sent, strict=True)],
            [list(each) for each in heard],
        )
        gains = []
        for i, (each, mine) in enumerate(zip(heard, own, strict=True)):
            gain = np.zeros_like(mine)
            for slot, (source, weight) in enumerate(each.items(), 1):
                theirs = came[i][source]
                if packed is not None:
                    theirs = self._added(copies[i][slot], theirs)
                gain += np.float32(weight) * (theirs - mine)
            gains.append(gain)
        return gains

    def _encoded(self, x: Array) -> Array:
        assert self.packed is not None
        payload = np.empty(self.packed.size_bytes(x.size), np.uint8)
        self.packed.encode(x, None, NO_KEY, 0, payload)
        return payload

    def _added(self, copy: Array, payload: Array) -> Array:
        """Add the decoded payload to a copy, in place; return the copy."""
        assert self.packed is not None
        self.packed.add(payload, None, copy, copy)
        return copy


class DmSgdUpdate(Gossip):
    """m = b m + g, y = x - rate m, x = y + gain, with b the momentum; b = 0 is DSGD."""

    def _next(self, x: Array, gradient: Array, hosted: int) -> Array:
        direction = gradient
        if self.momentum:
            direction = self._own("momentum")[hosted]
            direction *= self.momentum
            direction += gradient
        return x - self.rate * direction

    def _mix(self, x: Array, gradient: Array, hosted: int) -> None:
        np.add(self._ys[hosted], self._gains[hosted], out=x)


class DecentLaMUpdate(Gossip):
    """y = x - rate g, gt = (x - (y + gain)) / rate, m = b m + gt, x = x - rate m.

    Computed as gt = g - gain / rate and x = y + gain - rate b m, with the previous m: so
    differences of nearby vectors are computed only once, between neighbours.

    gt = (x - W x) / rate + W g. At a rate of 0, which a controller may choose, gt = W g, the limit
    if all ranks have the same x. Otherwise there is no limit: x = W x, as rate gt has a limit, but
    m gets nothing from it. Then the gradients travel unchanged, beside the models.
    """

    def reduce(self) -> Mean:
        """Exchange gradients with neighbours too, at a rate of 0. Collective. See Gossip.reduce."""
        nothing = super().reduce()
        if not self.rate:
            gains = self._exchanged(self._gradients, None)
            self._gradients = [g + gain for g, gain in zip(self._gradients, gains, strict=True)]
        return nothing

    def _next(self, x: Array, gradient: Array, hosted: int) -> Array:
        return x - self.rate * gradient

    def _mix(self, x: Array, gradient: Array, hosted: int) -> None:
        m, gain, rate = self._own("momentum")[hosted], self._gains[hosted], self.rate
        m *= self.momentum
        np.add(self._ys[hosted], gain, out=x)
        x -= rate * m
        m += gradient
        if rate:
            m -= gain / rate


def _known_wire(name: str) -> str:
    packed_wire(name, "update")
    return name


class GossipRule(OwnModelsRule):
    """A rule whose ranks hear their neighbours in a graph; its steps are those of plain SGD.

    graph: the neighbours: "ring", "grid", "exponential" (distances 1, 2, 4, ... both ways) or
        "one_peer" (one of those distances per step, one way)
    wire: the format of models on their way, as in cpdhpc.allreduce; all but "raw" keep a copy of
        each neighbour's model
    """

    update: ClassVar[type[Gossip]] = DmSgdUpdate
    needs: ClassVar[Mapping[str, object]] = {
        **OwnModelsRule.needs,
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.0,
        "gradient.aggregator": "none",
    }

    graph: Annotated[str, one_of(GRAPHS)] = "exponential"
    wire: Annotated[str, AfterValidator(_known_wire)] = "raw"

    def check_ranks(self, ranks: int) -> None:
        Graph(self.graph, ranks)

    def build(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer
    ) -> Gossip:
        """Return the rule's update. See UpdateRule.build. Raises ConfigError for too few ranks."""
        try:
            graph = Graph(self.graph, reducer.world.ranks)
        except ValueError as error:  # the same on all ranks
            raise ConfigError(f"update.name={self.name!r}: {error}") from None
        momentum = getattr(self, "momentum", 0.0)  # which DSGD does not have
        return self.update(model, optimizer, reducer, graph, self.wire, momentum)


class DSgd(GossipRule):
    """[update] name = "dsgd": each rank steps by its own gradient, and mixes with its neighbours.

    Its optimiser is sgd with momentum = 0, which is the default with this rule; the rule uses its
    rate and weight decay.
    Source: Lian et al.: Can decentralized algorithms outperform centralized algorithms?, arXiv
    1705.09056, algorithm 1, mixing after the step.
    """

    name: Literal["dsgd"] = "dsgd"


class DmSgd(GossipRule):
    """[update] name = "dmsgd": DSGD whose ranks step by momentum of their own gradients.

    Its optimiser is sgd with momentum = 0, which is the default with this rule: the momentum
    is the rule's.
    momentum: share of the last step that is added
    Source: Yuan et al.: DecentLaM, arXiv 2104.11981, algorithm 1.
    """

    name: Literal["dmsgd"] = "dmsgd"
    momentum: Share = 0.9


class DecentLaM(GossipRule):
    """[update] name = "decentlam": DSGD with momentum of steps that include the mixing.

    So the momentum does not enlarge the bias of ranks whose data differ, as that of "dmsgd" does.
    Its optimiser is sgd with momentum = 0, which is the default with this rule: the momentum
    is the rule's.
    graph: "ring", "grid" or "exponential"; with graphs that change in each step ("one_peer")
        momentum grows without bound (tests/test_decentralised.py)
    momentum: share of the last step that is added
    Source: Yuan et al.: DecentLaM, arXiv 2104.11981, algorithm 2.
    """

    update: ClassVar[type[Gossip]] = DecentLaMUpdate

    name: Literal["decentlam"] = "decentlam"
    momentum: Share = 0.9

    @field_validator("graph")
    @classmethod
    def _stays(cls, graph: str) -> str:
        if graph == ONE_PEER:
            raise ValueError(f"momentum diverges if graphs change: known are {', '.join(STATIC)}")
        return graph
