"""The fewest bits in which the gradients of each layer can travel, by trainings.

A job of one row is trained in float32, with every seed. From gradients recorded there each layer
gets its formats, those with the least error for their bits, and all layers an order of steps:
first the one that saves the most bits for its error. Trainings tell how many of these steps the
budget allows (bisection), and then layer by layer whether one more is possible, until none is.
Every training is one more row of search.h5, which report shows; policy.toml has what was found.
Seeds that the search has not seen tell what it is worth. --resume goes on after a kill.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import store
from ..compress import Aggregator, LowBit, NoCompression
from ..compress.lowbit import LayerWire
from ..config import ConfigError, UserError, difference, dump_toml, override, read_toml
from ..provenance import attributes
from ..train import gradients
from ..train.command import Trainer
from ..train.fitting import samples_of
from ..train.job import MAY_DIFFER, Job, load
from ..train.loop import Diverged
from ..train.progress import Files
from ..train.update import ByAllreduce
from .evidence import FILE, RAW, Evidence, Layer, Trial
from .proposals import mean_error, modules_of, proposed

UNIFORM = "e4m3"  # what the result is compared with
POLICY, RUNS = "policy.toml", "runs"
COUNTS = "search.trials", "search.test_seeds"  # may be others where a search goes on
WITHIN, BEYOND = "within", "beyond"
BISECTION, STEP, TESTED = "bisection", "one step more", "unseen seeds"
RECORDED = (0.02, 0.15, 0.5, 0.98)  # of the iterations of a run: when gradients are looked at
Levels = tuple[int, ...]  # of each layer: which of its formats


@dataclass(frozen=True)
class Asked:
    """What is searched for.

    jobs: one for each seed; budget: points that the accuracy may be below that of float32
    gradient_error: that the mean gradient may have, relative to the float64 one; one of the two
    most: trainings at most, those of reference apart; unseen: seeds to test with
    """

    jobs: list[Job]
    budget: float | None
    gradient_error: float | None
    most: int
    unseen: int

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the search."""
        return tuple(job.seed for job in self.jobs)

    @property
    def further(self) -> tuple[int, ...]:
        """Seeds that the search does not see."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.unseen))

    @property
    def method(self) -> LowBit:
        """How gradients travel, but for the format."""
        given = self.jobs[0].gradient
        if isinstance(given, LowBit):
            return replace(given, layers={})
        assert isinstance(given, NoCompression), "check has seen it"
        return LowBit(algorithm=given.algorithm, machine=given.machine)

    def toml(self) -> str:
        """Return all of it as TOML text."""
        search = {
            "budget": self.budget,
            "gradient_error": self.gradient_error,
            "trials": self.most,
            "test_seeds": self.unseen,
            "seeds": list(self.seeds),
        }
        return dump_toml(self.jobs[0].plain() | {"search": search})


def asked_of(arguments: argparse.Namespace, settings: Sequence[str], processes: int) -> Asked:
    """Return what is asked for. Raises ConfigError for what cannot be searched."""
    of = arguments
    if (of.budget is None) == (of.gradient_error is None):
        raise ConfigError("search: --budget POINTS or --gradient-error SHARE: give one of them")
    for name, value in (("--budget", of.budget), ("--gradient-error", of.gradient_error)):
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"search: {name} {value:g}: must be above 0")
    if of.trials < 1 or of.test_seeds < 0:
        raise ConfigError(
            f"search: --trials {of.trials}, --test-seeds {of.test_seeds}: must be 1 or more, and 0 "
            "or more"
        )
    jobs, train = load(of.file, settings), override(read_toml(of.file), settings).get("train", {})
    if len({job.name for job in jobs}) > 1:
        names = ", ".join(dict.fromkeys(job.name for job in jobs))
        raise ConfigError(f"{of.file}: compare: has rows {names}: a search takes one")
    if not {"seed", "seeds"} & train.keys():
        raise ConfigError(f"{of.file}: train.seeds: is missing: a search needs to know them")
    job = jobs[0]
    wrong = {
        "gradient.aggregator": (type(job.gradient) in (LowBit, NoCompression), "none or lowbit"),
        "update.name": (isinstance(job.update, ByAllreduce), "allreduce"),
        "stages.count": (job.stages.count == 1, "1"),
        "metric.name": (of.budget is None or job.metric.label == "accuracy", "accuracy: --budget "
            "counts its points; other metrics take --gradient-error"),
        "gradient.algorithm": (getattr(job.gradient, "algorithm", "") != "mpi", "one that rounds"),
    }  # fmt: skip
    for key, (fits, allowed) in wrong.items():
        if not fits:
            raise ConfigError(f"{of.file}: {key}: a search takes {allowed}")
    if processes * job.train.virtual_ranks == 1:
        raise ConfigError(
            f"{of.file}: one rank sends no gradient, nothing can be saved: mpirun or "
            "train.virtual_ranks=2 or more"
        )
    return Asked(jobs, of.budget, of.gradient_error, of.trials, of.test_seeds)


class Search:
    """A search at work. All processes decide alike, on numbers of process 0, which writes."""

    def __init__(self, asked: Asked, directory: Path, trainer: Trainer, resume: bool) -> None:
        self.asked, self.directory, self.trainer = asked, directory, trainer
        self.world, self.resume = trainer.world, resume
        self.evidence = Evidence(asked.toml(), provenance=attributes(trainer.world))

    def run(self) -> None:
        """Search to the end. Collective. Raises UserError or Interrupted on all alike."""
        self._begin()
        layers = self.evidence.layers
        float32, uniform = (RAW,) * len(layers), (UNIFORM,) * len(layers)
        if math.isnan(self._trial(float32, "float32").score):
            raise UserError(f"search: float32 fails: {self.evidence.trials[0].verdict}")
        self._trial(uniform, f"uniform {UNIFORM}")
        steps = narrowing(layers)
        if len(steps) == 1:
            raise UserError("search: nothing can be saved: float32 has the fewest bits everywhere")
        found = formats_of(layers, self._narrowed(self._bisected(steps)))
        if self.asked.further:
            for formats in dict.fromkeys((float32, uniform, found)):
                self._trial(formats, TESTED, self.asked.further)
        self._keep(replace(self.evidence, found=found))
        text = policy(self.evidence, self.asked)
        self.world.on_first(lambda: store.put(self.directory / POLICY, text), "search")

    def _begin(self) -> None:
        """Take over the evidence in the directory; else train in float32, and propose formats."""
        path = self.directory / FILE

        def read() -> Evidence | None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                return None
            if not self.resume:
                raise ConfigError(
                    f"{path}: is there already: --resume goes on with it, --out DIR writes to "
                    "another directory"
                )
            there = Evidence.read(path)
            if key := difference(there.asked, self.evidence.asked, (*MAY_DIFFER, *COUNTS)):
                raise ConfigError(f"{path}: is a search with another {key}: --out DIR for this one")
            return replace(there, asked=self.evidence.asked)

        there = self.world.on_first(read, "search")
        if there is not None:
            self.evidence = replace(there, provenance=self.evidence.provenance)
            return
        files = self._train(self._jobs((), self.asked.seeds))
        self.evidence = replace(self.evidence, layers=self._proposed(files))

    def _keep(self, evidence: Evidence) -> None:
        """Go on with some evidence, written. Collective."""
        self.evidence = evidence
        self.world.on_first(lambda: evidence.write(self.directory / FILE), "search")

    def _jobs(self, formats: tuple[str, ...], seeds: Sequence[int]) -> list[Job]:
        """Return the jobs of a trial; formats: by layer, () for float32. Collective."""
        base, plain = self.asked.jobs[0], not set(formats) - {RAW}
        code = hashlib.sha256(" ".join(formats).encode()).hexdigest()[:10]
        looked = plain or self.asked.gradient_error is not None
        recorded = self._iterations() if looked else ()
        jobs = []
        for seed in seeds:
            here = recorded if seed == self.asked.seeds[0] else ()
            train = base.train.model_copy(update={"seeds": (seed,), "record_gradients": here})
            name = f"{base.name}-{'float32' if plain else code}"
            update = {"name": name, "gradient": self._method(formats), "train": train}
            jobs.append(base.model_copy(update=update))
        return jobs

    def _iterations(self) -> tuple[int, ...]:
        """Return when gradients are recorded. Collective."""
        job = self.asked.jobs[0]
        samples = len(samples_of(self.trainer.data_of(job))[0])
        steps = job.train.epochs * -(-samples // job.train.batch)
        return tuple(sorted({min(int(share * steps), steps - 1) for share in RECORDED}))

    def _method(self, formats: tuple[str, ...]) -> Aggregator:
        """Return how gradients travel in a trial."""
        method = self.asked.method
        if not set(formats) - {RAW}:
            return NoCompression(algorithm=method.algorithm, machine=method.machine)
        if len(set(formats)) == 1:
            return replace(method, wire=formats[0])
        rows = zip(self.evidence.layers, formats, strict=True)
        return replace(method, layers={layer.name: LayerWire(wire) for layer, wire in rows})

    def _train(self, jobs: list[Job]) -> list[Path]:
        """Train, and return the files of the first run's gradients. Collective."""
        records = self.trainer.train(jobs, self.directory / RUNS, resume=True)
        paths = [gradients.path_of(records[0], i) for i in jobs[0].train.record_gradients]

        def tidied() -> list[Path]:
            for path in (self.directory / RUNS).glob("*.checkpoint*.h5"):
                path.unlink()  # records alone say what is complete
            return [path for path in paths if path.exists()]

        return self.world.on_first(tidied, "search")

    def _proposed(self, files: list[Path]) -> tuple[Layer, ...]:
        """Return the layers with their formats, by the gradients of float32. Collective."""
        world = self.world

        def of_process() -> dict[int, Layer]:
            recorded = [gradients.load(path) for path in files]
            modules = list(modules_of(recorded[0].layers).items())
            mine = range(world.process, len(modules), world.processes)
            return {i: proposed(*modules[i], self.asked.method, recorded) for i in mine}

        parts = world.gather_from(of_process, "search: formats of layers")
        known = {i: layer for part in parts for i, layer in part.items()}
        return tuple(known[i] for i in range(len(known)))

    def _trial(
        self, formats: tuple[str, ...], what: str, seeds: tuple[int, ...] | None = None
    ) -> Trial:
        """Return what a training gives; one that was done already is not done again. Collective."""
        seeds = seeds or self.asked.seeds
        if known := self.evidence.trial(formats, seeds):
            return known
        jobs = self._jobs(formats, seeds)
        try:
            files = self._train(jobs)
            trial = self.world.on_first(lambda: self._judged(jobs, formats, what, files), "search")
        except Diverged as error:
            nothing = (math.nan,) * len(seeds)
            trial = Trial(formats, seeds, what, nothing, math.nan, math.nan, str(error))
        self._keep(replace(self.evidence, trials=(*self.evidence.trials, trial)))
        if self.world.process == 0:
            print(f"[{len(self.evidence.trials)}] {told(self.evidence, trial)}", flush=True)
        return trial

    def _judged(
        self, jobs: list[Job], formats: tuple[str, ...], what: str, files: list[Path]
    ) -> Trial:
        """Return a trial whose runs are complete, with its verdict."""
        column, scores, sent = f"test_{jobs[0].metric.label}", [], []
        factor = 100 if jobs[0].metric.label == "accuracy" else 1
        for job in jobs:
            groups, _ = store.read(Files.of(self.directory / RUNS, job).record)
            scores.append(factor * float(groups["epochs"][column][-1]))
            sent.append(float(groups["steps"]["wire_bytes"].max(axis=1).mean()))
        error = mean_error(jobs[0].gradient, files) if files else math.nan
        trial = Trial(
            formats, tuple(job.seed for job in jobs), what, tuple(scores), max(sent), error, WITHIN
        )
        limit, float32 = self.asked.gradient_error, (RAW,) * len(formats)
        if limit is not None:
            return trial if not error > limit else replace(trial, verdict=BEYOND)
        base = self.evidence.trial(float32, trial.seeds) or trial
        assert self.asked.budget is not None, "one of the two is given"
        is_within = trial.score >= base.score - self.asked.budget
        return trial if is_within else replace(trial, verdict=BEYOND)

    def _passes(self, levels: Levels, what: str) -> bool:
        return self._trial(formats_of(self.evidence.layers, levels), what).verdict == WITHIN

    @property
    def _may_go_on(self) -> bool:
        """Whether there may be another training."""
        return sum(t.what in (BISECTION, STEP) for t in self.evidence.trials) < self.asked.most

    def _bisected(self, steps: list[Levels]) -> Levels:
        """Return the last of some steps that is within the budget; the first one is float32."""
        low, high = 0, len(steps)
        while high - low > 1 and self._may_go_on:
            middle = (low + high) // 2
            low, high = (middle, high) if self._passes(steps[middle], BISECTION) else (low, middle)
        return steps[low]

    def _narrowed(self, levels: Levels) -> Levels:
        """Return levels of which none can be one more within the budget."""
        layers, closed = self.evidence.layers, set[int]()
        while self._may_go_on:
            able = [i for i, at in enumerate(levels) if at + 1 < len(layers[i].formats)]
            able = [i for i in able if i not in closed]
            if not able:
                break
            best = max(able, key=lambda i: saved(layers[i], levels[i]))
            tried = stepped(levels, best)
            if self._passes(tried, STEP):
                levels = tried
            else:
                closed.add(best)
        return levels


def saved(layer: Layer, level: int) -> int:
    """Return the bits that a layer's next format saves."""
    return layer.bits(layer.formats[level]) - layer.bits(layer.formats[level + 1])


def stepped(levels: Levels, layer: int) -> Levels:
    """Return levels with the next format of a layer."""
    return (*levels[:layer], levels[layer] + 1, *levels[layer + 1 :])


def formats_of(layers: Sequence[Layer], levels: Levels) -> tuple[str, ...]:
    """Return the format of each layer."""
    return tuple(layer.formats[at] for layer, at in zip(layers, levels, strict=True))


def narrowing(layers: Sequence[Layer]) -> list[Levels]:
    """Return steps from the most bits to the fewest, each that saves the most bits for its error.

    The squares of the layers' errors add up to that of the whole gradient.
    """
    levels = (0,) * len(layers)
    steps = [levels]
    while able := [i for i, at in enumerate(levels) if at + 1 < len(layers[i].formats)]:

        def worth(i: int, levels: Levels = levels) -> float:
            before, after = layers[i].errors[levels[i] : levels[i] + 2]
            return saved(layers[i], levels[i]) / max(after**2 - before**2, 1e-300)

        levels = stepped(levels, max(able, key=worth))
        steps.append(levels)
    return steps


def told(evidence: Evidence, trial: Trial) -> str:
    """Return a line about a trial."""
    width = sum(x.bits(w) for x, w in zip(evidence.layers, trial.formats, strict=True))
    bits = f"{width / sum(layer.values for layer in evidence.layers):.2f} bits a value"
    score = "" if math.isnan(trial.score) else f", score {trial.score:.2f}"
    error = "" if math.isnan(trial.error) else f", error of the mean {trial.error:.2g}"
    return f"{trial.what}: {bits}{score}{error}: {trial.verdict}"


def policy(evidence: Evidence, asked: Asked) -> str:
    """Return what was found as TOML, rules of [precision], with what it is worth as comments."""
    limit = (
        f"{asked.budget:g} points"
        if asked.budget is not None
        else f"error {asked.gradient_error:g}"
    )
    lines = [f"# cpdhpc precision search: budget {limit}; {len(evidence.trials)} trainings"]
    for seeds in filter(None, (asked.seeds, asked.further)):
        for formats in dict.fromkeys(((RAW,) * len(evidence.layers), evidence.found)):
            trial = evidence.trial(formats, seeds)
            if trial is not None:
                numbers = ", ".join(map(str, seeds))
                lines.append(f"# seeds {numbers}: {told(evidence, trial)}")
    rows = zip(evidence.layers, evidence.found, strict=True)
    rules = [{"layers": layer.name, "wire": wire} for layer, wire in rows]
    return "\n".join(lines) + "\n" + dump_toml({"precision": {"rule": rules}})
