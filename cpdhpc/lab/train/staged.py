"""Stages in a training: their reducers, and their replacement of an ordinary step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import fsum

import numpy as np
import torch

from ...collectives import sparse
from ...collectives.checks import NonFiniteGradient
from ...collectives.engine import Program, run
from ...compress.base import Aggregator, Array, Mean
from ...ops.tensors import bytes_of, of_bytes
from ...randomness import random_key
from ...torch.averaging import Averaging, part_seed
from ...torch.reducer import GradientReducer
from .losses import LossFunction
from .pipeline import Done, Stage, StageShare, Work
from .record import WINDOW_PHASES, Layers, Record, observe
from .samples import Samples, shard
from .stages import Placement, Stages
from .step import FORWARD, StepResult, Stopwatch
from .training import Training
from .update import AnyUpdate

SEEDS = 2**63 - 1  # the largest
NO_BYTES = np.empty(0, np.uint8)


class StageReducers(Averaging):
    """The reducers of the stages of this process, instead of one for the whole network.

    Collective. Options as of GradientReducer.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        placement: Placement,
        aggregator: Aggregator,
        *,
        seed: int,
        bucket_mib: float,
    ) -> None:
        super().__init__(placement.world, seed)
        self.aggregator, self.stages, self.placement = aggregator, stages, placement
        every = [pair for stage in stages for pair in stage.blocks.named_parameters()]
        named = [(name, p) for name, p in every if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.layers = {name: list(p.shape) for name, p in named}

        def reducer(index: int) -> GradientReducer:
            return GradientReducer(
                stages[index].blocks,
                placement.group_of(index),
                aggregator,
                seed=part_seed(seed, index) & SEEDS,
                bucket_mib=bucket_mib,
            )

        self.of = self.world.agreed(  # some stages alone may have errors
            lambda: {index: reducer(index) for index in placement.stages}, "stages", Exception
        )

    def __enter__(self) -> StageReducers:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def reduce(self, errors: dict[int, Exception], iteration: int) -> list[Mean]:
        """Set p.grad of the stages here to means over shares; return these. Collective.

        errors: by stage, found before. Raises one of these on all processes, or
        NonFiniteGradient, with p.grad of some stages set and no parameter changed.
        """
        means, found = list[Mean](), list[Exception]()
        for stage, reducer in self.of.items():
            reducer.iteration, reducer.epoch = iteration, self.epoch
            if stage in errors:
                reducer.fail(errors[stage])
            try:
                means.append(reducer.reduce())
            except NonFiniteGradient as error:
                ranks = [self.placement.rank(stage, share) for share in error.ranks]
                found.append(NonFiniteGradient(error.segments, ranks, error.dtype))
            except Exception as error:
                found.insert(0, error)
        # A stage's error causes NaN in the others, which must not hide it.
        worst = next(iter(found), None)
        grave = 0 if worst is None else 1 if isinstance(worst, NonFiniteGradient) else 2
        gravest = self.world.max(np.array([grave], np.int64), "stages")[0]
        if gravest:
            self.world.agree(worst if grave == gravest else None, "stages")
        return means


class _Window:
    """Batches between two refreshes: first the corrections, then those for stages alone."""

    def __init__(self, batches: Sequence[Array], corrections: int, iteration: int) -> None:
        self.first = iteration
        numbered = list(enumerate(batches, iteration))
        self.corrections, self.local = deque(numbered[:corrections]), deque(numbered[corrections:])
        self.refreshed = False
        self.time_ns = dict.fromkeys(WINDOW_PHASES, 0)
        self.done: list[tuple[str, int, int, Done]] = []  # phase, stage, share

    def __bool__(self) -> bool:
        return bool(self.corrections or self.local)

    @property
    def phase(self) -> str:
        """The use of the next batch."""
        return "correction" if self.corrections else "local"

    @property
    def waiting(self) -> deque[tuple[int, Array]]:
        """The batches of this phase, with their iterations."""
        return self.corrections or self.local


class StagedUpdate(AnyUpdate):
    """Trains stages in turn and at the same time, instead of forward, backward and Update.

    Collective. model: the whole network on every process, which trains only the stages it holds
    optimizer: of all parameters; those of other stages have no gradients here
    samples: one input and target of these are used as zeros if reading data fails
    record: that windows are added to; state: empty, as checkpoints are taken between windows
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reducers: StageReducers,
        given: Stages,
        loss: LossFunction,
        samples: Samples,
        record: Record,
    ) -> None:
        super().__init__(optimizer, reducers.placement.world)
        self.reducer, self.given, self.record = reducers, given, record
        self.placement, self.stages = reducers.placement, reducers.stages
        self.like = samples.take(np.zeros(1, np.int64), 0)
        self.means: list[Mean] = []
        self.window = _Window([], 0, 0)
        shapes = [tuple(self.like[0].shape[1:]), *(stage.shape for stage in self.stages)]
        rank = self.placement.rank
        self.parts = {
            rank(stage, share): StageShare(
                self.stages[stage],
                given,
                rank(stage - 1, share) if stage else None,
                None if self.stages[stage].is_last else rank(stage + 1, share),
                shapes[stage],
                loss,
            )
            for stage in self.placement.stages
            for share in self.placement.here
        }

    def batch(self, coming: Array, size: int) -> Array:
        """Return the next global batch. See Update.batch; a window's batches are fixed at once."""
        if not self.window:
            count = min(self.given.refresh_every, -(-coming.size // size))
            batches = [coming[size * i : size * (i + 1)] for i in range(count)]
            first = self.reducer.iteration
            self.window = _Window(batches, self.given.corrections(first, count), first)
        return self.window.waiting[0][1]

    @property
    def at_rest(self) -> bool:
        """Whether no samples' data is kept, as checkpoints do not include it."""
        return not self.window

    @property
    def sent_bytes(self) -> Array:
        """int64[hosted], the bytes that reducers have sent in worlds of their own."""
        sent = np.zeros(self.world.virtual_ranks, np.int64)
        for place, reducer in zip(
            np.split(sent, len(self.reducer.of)), self.reducer.of.values(), strict=True
        ):
            place += reducer.world.bytes_sent + reducer.world.collective_bytes
        return sent

    def train(self, samples: Samples, seed: int) -> StepResult:
        """Train on the next batch. Collective.

        seed: of random changes of samples. Raises on all processes, with the parameters unchanged,
        NonFiniteGradient and errors of the data or the network on any.
        """
        window, phase, watch = self.window, self.window.phase, Stopwatch.start()
        if phase == "local" and not window.refreshed:
            self._refresh(samples, seed)
            window.refreshed = True
        iteration, batch = window.waiting.popleft()
        began_ns = time.perf_counter_ns()
        works, errors = self._works(samples, seed, iteration, batch)
        watch.lap("data")
        steps = self.given.local_steps if phase == "local" else 1
        for inner in range(steps):
            last = inner == steps - 1
            losses = self._gradients(phase, works, errors, last)
            watch.lap("forward_backward")
            self.means = self.reducer.reduce(errors, iteration * self.given.local_steps + inner)
            watch.lap("reduce")
            self.optimizer.step()
            watch.lap("optimizer")
        self.reducer.iteration += 1
        window.time_ns[phase] += time.perf_counter_ns() - began_ns
        if not window:
            self._record(window)
        return StepResult(losses, self.means[0], watch.time_ns)

    def _works(
        self, samples: Samples, seed: int, iteration: int, batch: Array
    ) -> tuple[dict[int, Work], dict[int, Exception]]:
        """Return the work of each hosted rank, and errors of the data by stage."""
        works, errors, place = dict[int, Work](), dict[int, Exception](), self.placement
        ends = {0, place.count - 1} & set(place.stages)
        for share in place.here:
            items = shard(batch, place.shares, share)
            inputs, targets = (x.new_zeros((len(items), *x.shape[1:])) for x in self.like)
            try:
                if ends:
                    inputs, targets = samples.take(items, seed)
            except Exception as error:  # it must be raised on all ranks
                errors[min(ends)] = error
            for stage in place.stages:
                path = (share, stage) if stage else (share,)  # without stages: the same numbers
                works[place.rank(stage, share)] = Work(
                    iteration,
                    items,
                    place.shares,
                    batch.size,
                    inputs if stage == 0 else None,
                    targets if stage == place.count - 1 else None,
                    random_key(self.reducer.seed, FORWARD, iteration, *path)[0],
                )
        return works, errors

    def _gradients(
        self, phase: str, works: dict[int, Work], errors: dict[int, Exception], last: bool
    ) -> list[float]:
        """Leave gradients of the stages here for reduce; return losses by hosted rank."""
        losses, place = [0.0] * self.world.virtual_ranks, self.placement
        for number, share in enumerate(place.here):
            for reducer in self.reducer.of.values():
                reducer.begin(number)
            self.optimizer.zero_grad(set_to_none=True)

            def program(rank: int, share: int = share) -> Program[Done | None]:
                if place.share(rank) != share:
                    return _idle()
                part, work = self.parts[rank], works[rank]
                return part.serial(work, True) if phase == "correction" else part.local(work, last)

            (found,) = self._run(phase, 1, 1, lambda piece: program)
            for at, done in enumerate(found):
                if done is not None:
                    losses[at] = done.loss * place.count
                    if done.error is not None:
                        errors.setdefault(place.stage(self.world.hosted[at]), done.error)
            for reducer in self.reducer.of.values():
                if place.each > 1:
                    reducer.stash(number)
        return losses

    def _run(
        self,
        phase: str,
        pieces: int,
        at_once: int,
        start: Callable[[int], Callable[[int], Program[Done | None]]],
    ) -> list[list[Done | None]]:
        """Run the programs of the hosted ranks; start(piece) returns a function of the rank."""

        def programs(piece: int, _: object) -> list[Program[Done | None]]:
            of = start(piece)
            return [of(rank) for rank in self.world.hosted]

        found = run(self.world, programs, pieces, NO_BYTES, f"stages: {phase}", at_once)
        self.window.done += [
            (phase, self.placement.stage(rank), self.placement.share(rank), done)
            for piece in found
            for rank, done in zip(self.world.hosted, piece, strict=True)
            if done is not None
        ]
        return found

    def _refresh(self, samples: Samples, seed: int) -> None:
        """Compute anew the inputs of stages for all batches that they train alone. Collective.

        Parameters stay, so that the stages work on batches one after the other. Buffers stay too.
        """
        began_ns, window = time.perf_counter_ns(), self.window
        errors = dict[int, Exception]()
        buffers = [b for i in self.placement.stages for b in self.stages[i].blocks.buffers()]
        before = [buffer.clone() for buffer in buffers]

        def start(piece: int) -> Callable[[int], Program[Done | None]]:
            works, failed = self._works(samples, seed, *window.local[piece])
            errors.update(failed)
            return lambda rank: self.parts[rank].serial(works[rank], False)

        if self.placement.count > 1:
            found = self._run("refresh", len(window.local), self.placement.count + 1, start)
            failures = [done.error for piece in found for done in piece if done and done.error]
            self.world.agree(next(iter([*errors.values(), *failures]), None), "stages")
        for buffer, kept in zip(buffers, before, strict=True):
            buffer.copy_(kept)
        window.time_ns["refresh"] += time.perf_counter_ns() - began_ns

    def _record(self, window: _Window) -> None:
        """Add a window to the record: times, work and the violation of each cut. Collective."""
        everyone = self.world.gather((window.time_ns, window.done), "stages")
        count, done = self.placement.count, [each for _, some in everyone for each in some]
        busy_ns = np.zeros((len(WINDOW_PHASES), count, self.placement.shares))
        for phase, stage, share, each in done:
            busy_ns[WINDOW_PHASES.index(phase), stage, share] += each.busy_ns
        violations = np.full(count - 1, np.nan)
        for cut in range(count - 1):
            some = [e for phase, stage, _, e in done if stage == cut + 1 and phase == "local"]
            if values := sum(each.values for each in some):
                violations[cut] = fsum(each.violation for each in some) / values
        time_ns = [max(process[phase] for process, _ in everyone) for phase in WINDOW_PHASES]
        row = {"iteration": window.first, "violation": violations}
        times = {"time_s": np.array(time_ns) / 1e9, "busy_time_s": busy_ns.max(axis=2) / 1e9}
        self.record.add("windows", row | times)

    def observe(self) -> Layers:
        """Return the aggregator's telemetry of each layer. Collective. See record.observe."""
        mine = {
            stage: observe(reducer, mean)
            for (stage, reducer), mean in zip(self.reducer.of.items(), self.means, strict=True)
        }
        by_stage = {
            k: v for process in self.world.gather(mine, "observe") for k, v in process.items()
        }
        return {
            name: np.concatenate([by_stage[stage.index][name] for stage in self.stages])
            for name in by_stage[0]
        }

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Copy the stages and the optimiser's state to all processes. Collective."""
        if self.world.processes > 1:
            with torch.no_grad():
                self._share_tensors()
        yield

    def _share_tensors(self) -> None:
        """Copy the tensors of all stages to all processes. Collective."""
        mine = {index: self._described(index) for index in self.placement.stages}
        told = {k: v for each in self.world.gather(mine, "stages") for k, v in each.items()}
        for stage in self.stages:
            held = stage.index in self.placement.stages
            parameters = list(stage.blocks.parameters())
            tensors = [*parameters, *stage.blocks.buffers()]
            for place, name, dtype, shape in told[stage.index]:
                kept = self.optimizer.state[parameters[place]]
                if not held:
                    kept[name] = torch.empty(shape, dtype=dtype)
                tensors.append(kept[name])
            root = self.placement.rank(stage.index, 0)
            arrays: list[Array | None] = [None] * len(self.world.hosted)
            if self.world.hosts(root):
                arrays[root - self.world.hosted.start] = bytes_of(tensors).numpy()
            found = sparse.broadcast(self.world, arrays, root)
            if not held:
                for x, values in zip(tensors, of_bytes(found, tensors), strict=True):
                    x.copy_(values)

    def _described(self, stage: int) -> list[tuple[int, str, torch.dtype, tuple[int, ...]]]:
        """Return the optimiser's state of a stage: number of the parameter, name, tensor."""
        return [
            (i, name, value.dtype, tuple(value.shape))
            for i, parameter in enumerate(self.stages[stage].blocks.parameters())
            for name, value in self.optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        ]


def _idle() -> Program[Done | None]:
    """The program of a rank whose share has its turn later."""
    yield from ()
    return None


class StagedTraining(Training):
    update: StagedUpdate

    def train_on(self, batch: Array, seed: int) -> StepResult:
        return self.update.train(self.train, seed)

    def observe(self, mean: Mean) -> Layers:
        return self.update.observe()

    def close(self) -> None:
        super().close()
        self.update.placement.free()
