"""The fewest bits of each layer, for gradients on the wire and for its arithmetic, by trainings.

A job of one row is trained in float32, with every seed. Tensors recorded there determine the
formats of each place (a layer's gradients on the wire, its operands, its sums): those with the
least error for their bits. They also determine an order of steps over all places: first the step
that saves the most bits for its error. Trainings find how many of these steps the budget allows
(bisection), and then, place by place, whether one more is possible, until none is. Every training
is one more row of search.h5, which report shows; policy.toml has the result. Seeds that were not
used in the search show its value. --resume continues after a kill.
"""

from __future__ import annotations

import hashlib
import math
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np

from ... import store
from ...collectives.checks import NonFiniteGradient
from ...compress import Aggregator, Context, LowBit, NoCompression, State
from ...compress.base import Array
from ...compress.bucket import Bucket
from ...compress.lowbit import LayerWire
from ...config import ConfigError, Raw, UserError, difference, dump_toml, validate
from ...formats import TILE, parse_format
from ...torch.precision import recording
from ...torch.precision.policy import Policy
from ...torch.precision.recording import Recorded
from ...torch.precision.tensors import TensorFormat
from ...world.ranks import Loopback
from ..provenance import attributes
from ..report.units import agreeing
from ..study_data import grouped
from ..train import gradients
from ..train.checkpoint import Files, claimed
from ..train.command import Trainer
from ..train.gradients import Gradients, load
from ..train.imports import ImportedAggregator
from ..train.job import MAY_DIFFER, Job
from ..train.loop import gradient_of
from ..train.losses import Diverged
from ..train.setup import prepare, samples_of
from .evidence import (
    BEYOND,
    FILE,
    NOT_MEASURED,
    OPERANDS,
    RAW,
    SUMS,
    WIRE,
    WITHIN,
    Evidence,
    SearchPlace,
    SearchTarget,
    Trial,
    width,
)
from .measures import LOWEST, Missing, error, exponents, operands, product_error, tensor_of

UNIFORM = "e4m3"  # the baseline for the result
UNIFORM_SUMS = "e6m9"  # of the baseline: Wang et al., arXiv 1812.08011, without their chunks
POLICY, RUNS = "policy.toml", "runs"
COUNTS = "search.trials", "search.test_seeds"  # may differ when a search is resumed

IN_PLACE = "to be put in place of the job's own, which rounds"
BISECTION, STEP, TESTED = "bisection", "one step more", "unseen seeds"
RECORDED = (0.02, 0.15, 0.5, 0.98)  # of the iterations of a run: when tensors are recorded
PRODUCTS_OF_A_LAYER = "forward", "input_gradient", "weight_gradient"
LayerTask = tuple[
    str, Callable[[], list[SearchPlace]]
]  # of a layer: a function that returns its places
Levels = tuple[int, ...]  # for each place the index of its format


class Search:
    """A running search. All processes decide identically, by numbers of process 0, which writes."""

    def __init__(
        self, asked: SearchTarget, directory: Path, trainer: Trainer, resume: bool
    ) -> None:
        self.asked, self.directory, self.trainer = asked, directory, trainer
        self.world, self.resume = trainer.world, resume
        ranks = trainer.world_of(asked.jobs[0])  # virtual ones included
        self.evidence = Evidence(asked.toml(), provenance=attributes(ranks))

    def run(self) -> None:
        """Search to the end. Collective. Raises UserError or Interrupted on all processes."""
        files = {"search": [self.directory / FILE]}
        with claimed(self.world, self.directory, files, self.resume):
            self._run()

    def _run(self) -> None:
        self._say(f"search: {self.asked.cost}")
        began = time.perf_counter()
        self._begin()
        places = self.evidence.places
        float32, known = (RAW,) * len(places), bool(self.evidence.trials)
        uniform = tuple(UNIFORM_SUMS if each.tensor == SUMS else UNIFORM for each in places)
        base = self._trial(float32, "float32")
        if math.isnan(base.score):
            raise UserError(f"search: float32 fails: {base.verdict}")
        if base.verdict != WITHIN:
            raise UserError(
                f"search: float32 itself is {base.verdict}: error of the mean {base.error:.3g}, "
                f"--gradient-error {self.asked.gradient_error}"
            )
        took_s = time.perf_counter() - began
        of_before = f"float32 and the formats proposed: taken from {self.directory / FILE}"
        self._say(of_before if known else f"float32 took {took_s:.0f} s, formats proposed")
        self._trial(uniform, f"uniform {UNIFORM}")
        steps = narrowing(places)
        if len(steps) == 1:
            raise UserError("search: nothing can be saved: float32 has the fewest bits everywhere")
        found = self._fewest(formats_of(places, self._narrowed(self._bisected(steps))))
        if self.asked.further:
            for formats in dict.fromkeys((float32, uniform, found)):
                self._trial(formats, TESTED, self.asked.further)
        self._keep(replace(self.evidence, found=found))
        text = policy(self.evidence, self.asked)
        self.world.on_first(lambda: store.put(self.directory / POLICY, text), "search")
        if "gradient" in tomllib.loads(text):
            self._say(f"{self.directory / POLICY}: its [gradient] is {IN_PLACE}")

    def _say(self, line: str) -> None:
        if self.world.process == 0:
            print(line, flush=True)

    def _begin(self) -> None:
        """Load the evidence in the directory; otherwise train in float32, and propose formats."""
        path = self.directory / FILE

        def read() -> Evidence | None:
            if not path.exists():
                return None
            there = Evidence.read(path)
            if key := difference(there.asked, self.evidence.asked, (*MAY_DIFFER, *COUNTS)):
                raise ConfigError(f"{path}: is a search with another {key}: --out DIR for this one")
            return replace(there, asked=self.evidence.asked)

        there = self.world.on_first(read, "search")
        if there is not None:
            self.evidence = replace(there, provenance=self.evidence.provenance)
            return
        if self.resume:
            self._say(f"{path}: is not there: a new search")
        jobs = self._jobs((), self.asked.seeds)
        places = self._proposed(jobs[0], self._train(jobs))
        self.evidence = replace(self.evidence, places=places)

    def _keep(self, evidence: Evidence) -> None:
        """Continue with some evidence, and write it. Collective."""
        self.evidence = evidence
        self.world.on_first(lambda: evidence.write(self.directory / FILE), "search")

    def _jobs(self, formats: tuple[str, ...], seeds: Sequence[int]) -> list[Job]:
        """Return the jobs of a trial; formats: by place, () for float32. Collective."""
        base, plain = self.asked.jobs[0], not set(formats) - {RAW}
        code = hashlib.sha256(" ".join(formats).encode()).hexdigest()[:10]
        searched, measured = seeds[0] in self.asked.seeds, self.asked.gradient_error is not None
        by_run = measured and not self.asked.arithmetic
        looked = self._iterations() if by_run or (plain and (searched or measured)) else ()
        rules = validate(
            Policy, {"rule": rules_of(self.evidence.places, formats, wires=False)}, "search"
        )
        common = {
            "name": f"{base.name}-{'float32' if plain else code}",
            "gradient": self._method(formats),
            "precision": base.precision.model_copy(
                update={"rule": (*base.precision.rule, *rules.rule)}
            ),
        }
        jobs = []
        for seed in seeds:
            here = looked if seed == seeds[0] else ()
            train = base.train.model_copy(update={"seeds": (seed,), "record_gradients": here})
            whole = here if plain and self.asked.arithmetic else ()
            kept: Raw = {"every": 0, "iterations": whole, "file": ""}
            kept["tensors"] = OPERANDS if searched else ("weights",)
            if measured:  # the gradient of a layer depends on the weights of all
                kept["layers"] = ("*",)
            record = base.record.model_copy(update=kept)
            jobs.append(base.model_copy(update={**common, "train": train, "record": record}))
        return jobs

    def _iterations(self) -> tuple[int, ...]:
        """Return the iterations in which gradients are recorded. Collective."""
        job = self.asked.jobs[0]
        samples = len(samples_of(self.trainer.data_of(job))[0])
        steps = job.train.epochs * -(-samples // job.train.batch)
        return tuple(sorted({min(int(share * steps), steps - 1) for share in RECORDED}))

    def _method(self, formats: tuple[str, ...]) -> Aggregator | ImportedAggregator:
        """Return the aggregator of gradients in a trial."""
        if not self.asked.wire:
            return self.asked.jobs[0].gradient
        method, rows = self.asked.method, zip(self.evidence.places, formats, strict=False)
        wires = {place.name: wire for place, wire in rows if place.tensor == WIRE}
        if not {*wires.values()} - {RAW}:
            return NoCompression(algorithm=method.algorithm, machine=method.machine)
        if len({*wires.values()}) == 1:
            return replace(method, wire=next(iter(wires.values())))
        return replace(method, layers={name: LayerWire(wire) for name, wire in wires.items()})

    def _train(self, jobs: list[Job]) -> list[Path]:
        """Train, and return the files of the first run's gradients. Collective."""
        records = self.trainer.train(jobs, self.directory / RUNS, resume=True)
        paths = [gradients.path_of(records[0], i) for i in jobs[0].train.record_gradients]

        def tidied() -> list[Path]:
            for path in (self.directory / RUNS).glob("*.checkpoint*.h5"):
                path.unlink()  # only records show what is complete
            return [path for path in paths if path.exists()]

        return self.world.on_first(tidied, "search")

    def _proposed(self, job: Job, files: list[Path]) -> tuple[SearchPlace, ...]:
        """Return the places with their formats, from the recordings of float32. Collective."""
        world, asked = self.world, self.asked
        path = Files.of(self.directory / RUNS, job).recording(job)

        def of_process() -> list[tuple[int, list[SearchPlace], str]]:
            recorded, tasks = [gradients.load(each) for each in files], list[LayerTask]()

            def of_wire(name: str, names: list[str]) -> list[SearchPlace]:
                return [proposed(name, names, asked.method, recorded)]

            if asked.wire:
                for name, names in modules_of(recorded[0].layers).items():
                    tasks.append((name, partial(of_wire, name, names)))
            if asked.arithmetic:
                tensors, wanted = recording.load(path), asked.jobs[0].record.layers
                names = [n for n in tensors.layers if any(fnmatchcase(n, w) for w in wanted)]
                tasks += [(name, partial(in_products, tensors, name)) for name in names]
            found = []
            for i in range(world.process, len(tasks), world.processes):
                name, places = tasks[i]
                try:
                    found.append((i, places(), ""))
                except Missing as why:
                    found.append((i, [], f"{name}: {why}"))
            return found

        parts = world.gather_from(of_process, "search: formats of places")
        known = sorted((each for part in parts for each in part), key=lambda each: each[0])
        for left in filter(None, (why for _, _, why in known)):
            self._say(f"left in float32: {left}")
        places = tuple(place for _, some, _ in known for place in some)
        if asked.arithmetic and all(place.tensor == WIRE for place in places):
            raise UserError("search: no layer with products was recorded: --over wire searches on")
        return places

    def _trial(
        self, formats: tuple[str, ...], what: str, seeds: tuple[int, ...] | None = None
    ) -> Trial:
        """Return the result of a training; earlier ones are not repeated. Collective."""
        seeds = seeds or self.asked.seeds
        if known := self.evidence.trial(formats, seeds):
            return known
        jobs = self._jobs(formats, seeds)
        try:
            files = self._train(jobs)
            error = self._error(jobs, formats, files)
            judged = partial(self._judged, jobs, formats, what, error)
            trial = self.world.on_first(judged, "search")
        except Diverged as error:
            nothing = (math.nan,) * len(seeds)
            trial = Trial(formats, seeds, what, nothing, math.nan, math.nan, str(error))
        self._keep(replace(self.evidence, trials=(*self.evidence.trials, trial)))
        self._say(f"[{len(self.evidence.trials)}] {told(self.evidence, trial)}")
        return trial

    def _error(self, jobs: list[Job], formats: tuple[str, ...], files: list[Path]) -> float:
        """Return the error of the mean gradient of a trial, NaN: not measured. Collective.

        For its first seed. Over wires: of gradients that the run has recorded. Over arithmetic: of
        gradients at the weights and with the batches that float32 recorded with the same seed. So
        float32's own error is 0, except for the sum over ranks.
        """
        job = jobs[0]
        if not self.asked.arithmetic:
            return self.world.on_first(
                lambda: mean_error(job.aggregator(), files) if files else math.nan, "search"
            )
        float32 = self.evidence.trial((RAW,) * len(formats), [each.seed for each in jobs])
        fails = float32 is not None and math.isnan(float32.score)
        if fails or self.asked.gradient_error is None:
            return math.nan
        base = self._jobs((), (job.seed,))[0]
        before = Files.of(self.directory / RUNS, base)
        tensors, squares = recording.load(before.recording(base)), []
        training = prepare(job, self.trainer.world_of(job), self.trainer.data_of(job), before)
        with training.reducer, training.workers:
            for i in tensors.iterations:
                weights = {t.name: t.read() for t in tensors.tensors
                           if t.iteration == i and t.kind == "weights"}  # fmt: skip
                exact = gradients.load(gradients.path_of(before.record, i))
                try:
                    found = gradient_of(training, weights, i)
                except NonFiniteGradient:  # on all processes
                    squares.append(math.inf)
                    break
                square = norm = 0.0
                for name, each in exact.layers.items():
                    mean = each.mean(0, np.float64) / exact.loss_scale
                    square += float(np.sum(np.square(found[name] - mean)))
                    norm += float(np.sum(np.square(mean)))
                squares.append(square / (norm or 1.0))
        training.close()
        return math.sqrt(math.fsum(squares) / len(squares))

    def _judged(self, jobs: list[Job], formats: tuple[str, ...], what: str, error: float) -> Trial:
        """Return a trial whose runs are complete, with its verdict."""
        column, scores, sent = f"test_{jobs[0].metric.label}", [], []
        factor = 100 if jobs[0].metric.percent else 1
        for job in jobs:
            groups, _ = store.read(Files.of(self.directory / RUNS, job).record)
            scores.append(factor * float(groups["epochs"][column][-1]))
            sent.append(float(groups["steps"]["wire_bytes"].max(axis=1).mean()))
        trial = Trial(
            formats, tuple(job.seed for job in jobs), what, tuple(scores), max(sent), error, WITHIN
        )
        spent, limit = error, self.asked.gradient_error
        if limit is None:
            assert self.asked.budget is not None, "one of the two is set"
            base = self.evidence.trial((RAW,) * len(formats), trial.seeds) or trial
            spent, limit = base.score - self.asked.budget, trial.score
        if math.isnan(spent) or math.isnan(limit):
            return replace(trial, verdict=NOT_MEASURED)
        return trial if spent <= limit else replace(trial, verdict=BEYOND)

    def _passes(self, levels: Levels, what: str) -> bool:
        return self._trial(formats_of(self.evidence.places, levels), what).verdict == WITHIN

    @property
    def _may_go_on(self) -> bool:
        """Whether another training is allowed."""
        done = sum(trial.what != TESTED for trial in self.evidence.trials)
        return done + self.asked.reserved < self.asked.most

    def _bisected(self, steps: list[Levels]) -> Levels:
        """Return the last of some steps that is within the budget; the first one is float32."""
        low, high = 0, len(steps)
        while high - low > 1 and self._may_go_on:
            middle = (low + high) // 2
            low, high = (middle, high) if self._passes(steps[middle], BISECTION) else (low, middle)
        return steps[low]

    def _narrowed(self, levels: Levels) -> Levels:
        """Return levels of which none can be one higher within the budget."""
        places, closed = self.evidence.places, set[int]()
        while self._may_go_on:
            able = [i for i, at in enumerate(levels) if at + 1 < len(places[i].formats)]
            able = [i for i in able if i not in closed]
            if not able:
                break
            best = max(able, key=lambda i: saved(places[i], levels[i]))
            tried = stepped(levels, best)
            if self._passes(tried, STEP):
                levels = tried
            else:
                closed.add(best)
        return levels

    def _fewest(self, formats: tuple[str, ...]) -> tuple[str, ...]:
        """Return these formats, or others within the budget that send fewer bytes.

        Layers smaller than a tile may send more in a mixture than with float32 for all.
        """
        places = self.evidence.places
        if not self.asked.wire:
            return formats

        def bits(trial: Trial) -> float:
            rows = zip(places, trial.formats, strict=True)
            return 8 * trial.sent_bytes + sum(p.bits(f) for p, f in rows if p.tensor != WIRE)

        first = self.evidence.trial(formats, self.asked.seeds)
        known = [t for t in (first, *self.evidence.trials) if t and t.seeds == self.asked.seeds]
        most = next(t.sent_bytes for t in known if not set(t.formats) - {RAW})
        able = [t for t in known if t.verdict == WITHIN and t.sent_bytes <= most]
        offered = [
            t for t in able if all(f in p.formats for p, f in zip(places, t.formats, strict=True))
        ]
        return min(offered, key=bits).formats


def saved(place: SearchPlace, level: int) -> int:
    """Return the bits that a place's next format saves."""
    return place.bits(place.formats[level]) - place.bits(place.formats[level + 1])


def stepped(levels: Levels, place: int) -> Levels:
    return (*levels[:place], levels[place] + 1, *levels[place + 1 :])


def formats_of(places: Sequence[SearchPlace], levels: Levels) -> tuple[str, ...]:
    return tuple(place.formats[at] for place, at in zip(places, levels, strict=True))


def rules_of(places: Sequence[SearchPlace], formats: Sequence[str], wires: bool) -> list[Raw]:
    """Return the rules of [precision] for rounded tensors; wires: and for the wires."""
    rules: dict[str, Raw] = {}
    for place, name in zip(places, formats, strict=False):
        rule = rules.setdefault(place.name, {"layers": place.name or "*"})
        if place.tensor == WIRE:
            rule |= {WIRE: name} if wires else {}
        elif name != RAW and place.tensor == SUMS:
            rule |= dict.fromkeys(PRODUCTS_OF_A_LAYER, {"accumulate": name} | SATURATED)
        elif name != RAW:
            rule[place.tensor] = {"format": name, "scaling": SCALED}
    return [rule for rule in rules.values() if len(rule) > 1]


def narrowing(places: Sequence[SearchPlace]) -> list[Levels]:
    """Return steps from the most bits to the fewest; each saves the most bits for its error.

    The squares of the places' errors are added, as if they were independent.
    """
    levels = (0,) * len(places)
    steps = [levels]
    while able := [i for i, at in enumerate(levels) if at + 1 < len(places[i].formats)]:

        def worth(i: int, levels: Levels = levels) -> float:
            before, after = places[i].errors[levels[i] : levels[i] + 2]
            return saved(places[i], levels[i]) / max(after**2 - before**2, 1e-300)

        levels = stepped(levels, max(able, key=worth))
        steps.append(levels)
    return steps


def told(evidence: Evidence, trial: Trial) -> str:
    widths = evidence.widths(trial.formats)
    bits = ", ".join(f"{tensor} {width:.2f}" for tensor, width in widths.items())
    score = "" if math.isnan(trial.score) else f", score {trial.score:.2f}"
    wrong = agreeing(lambda n: f"{trial.error:.{n}g}", evidence.agrees(trial, "gradient_error"), 2)
    error = "" if math.isnan(trial.error) else f", error of the mean {wrong}"
    sent = "" if math.isnan(trial.sent_bytes) else f", {trial.sent_bytes:,.0f} B per step sent"
    return f"{trial.what}: {bits} bits per value{sent}{score}{error}: {trial.verdict}"


def policy(evidence: Evidence, asked: SearchTarget) -> str:
    """Return the result as TOML, with its value as comments.

    Rules of [precision]; if float32 sends the fewest bytes, a [gradient] that sends it.
    """
    limit = f"{asked.budget:g} points" if asked.budget else f"error {asked.gradient_error:g}"
    lines = [
        f"# cpdhpc precision search: budget {limit}; {len(evidence.trials)} trainings",
        f"# found: {evidence.outcome}",
    ]
    for seeds in filter(None, (asked.seeds, asked.further)):
        for formats in dict.fromkeys(((RAW,) * len(evidence.places), evidence.found)):
            trial = evidence.trial(formats, seeds)
            if trial is not None:
                numbers = ", ".join(map(str, seeds))
                lines.append(f"# seeds {numbers}: {told(evidence, trial)}")
    tables: Raw = {}
    pairs = zip(evidence.places, evidence.found, strict=True)
    narrows = any(place.tensor == WIRE and name != RAW for place, name in pairs)
    if plain := asked.wire and not narrows:
        lines.append("# gradients: nothing sends fewer bytes than float32")
        if isinstance(asked.jobs[0].gradient, LowBit):
            lines.append(f"# [gradient] is {IN_PLACE}")
            given = asked.jobs[0].plain()["gradient"]
            as_they_are = {key: given[key] for key in ("algorithm", "machine")}
            tables["gradient"] = {"aggregator": "none", **as_they_are}
    rules = rules_of(evidence.places, evidence.found, wires=not plain)
    if rules:
        tables["precision"] = {"rule": rules}
    elif not tables:
        lines.append("# nothing is to be added: float32 everywhere, as the job has it")
    return "\n".join(lines) + "\n" + dump_toml(tables)


BITS = (16, 12, 10, 8, 7, 6, 5, 4, 3)
FORMATS = (  # bf16, and of each width all formats with 2 to 5 exponent bits
    "bf16",
    *(f"e{e}m{bits - 1 - e}" for bits in BITS for e in range(2, min(5, bits - 1) + 1)),
)


ACCUMULATORS = (  # wider ranges too: sums are not scaled
    "bf16",
    *(f"e{e}m{bits - 1 - e}" for bits in (24, 20, 16, 14, 12, 10, 9, 8) for e in range(4, 8)),
)
SCALED = "aps"  # operands have a power of two each, so that only their spread matters
SATURATED = {"overflow": "saturate"}  # sums
USED = {  # by products, with the names of replay
    "weights": ("forward", "input gradient"),
    "activations": ("forward", "weight gradient"),
    "errors": ("input gradient", "weight gradient"),
}


def modules_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters of each module, by its name; one of the model itself stands alone."""
    return grouped(names, lambda name: name.rpartition(".")[0] or name)


def proposed(
    name: str, parameters: Sequence[str], method: LowBit, recorded: Sequence[Gradients]
) -> SearchPlace:
    """Return a layer's gradients with float32 and the useful formats.

    These have fewer bits than float32, including whole tiles; none has fewer bits than another and
    no larger error; and at least some of the gradient is nonzero after rounding.
    """
    shapes = [recorded[0].layers[each].shape[1:] for each in parameters]
    bucket = Bucket(tuple(parameters), tuple(shapes), TILE)
    rows = [
        [bucket.flatten([each.layers[p][rank] for p in parameters]) for rank in range(each.ranks)]
        for each in recorded
    ]
    norms = [sum(float(np.sum(np.square(v.mean(0, np.float64)))) for v in each.layers.values())
             for each in recorded]  # fmt: skip
    owns = [float(np.sum(np.square(np.mean(row, axis=0, dtype=np.float64)))) for row in rows]
    own = math.sqrt(math.fsum(o / (n or 1.0) for o, n in zip(owns, norms, strict=True)) / len(rows))
    sizes = tuple(int(np.prod(shape)) for shape in shapes)
    plain = SearchPlace(name, sizes, *span([row for each in rows for row in each]), (RAW,), (0.0,))

    def lost(wire: str) -> float:
        if plain.bits(wire) >= plain.bits(RAW):  # few values, whose tiles are mostly empty
            return math.inf
        try:
            squares = [
                squared_error(replace(method, wire=wire), bucket, row) / (norm or 1.0)
                for row, norm in zip(rows, norms, strict=True)
            ]
        except (ValueError, NonFiniteGradient):  # not allowed by the options, or overflow
            return math.inf
        return math.sqrt(math.fsum(squares) / len(squares))

    return laddered(plain, FORMATS, lost, own or 1.0)  # own: the error if all becomes zero


def laddered(
    plain: SearchPlace, names: Iterable[str], lost: Callable[[str], float], most: float
) -> SearchPlace:
    """Return a place with float32 and those formats of which none has fewer bits and less error.

    lost: error of a format; most: its upper limit
    """
    ladder: list[tuple[str, float]] = []  # from the fewest bits on
    for name in sorted(names, key=lambda name: parse_format(name).bits):
        found = lost(name)
        if not found < (ladder[-1][1] if ladder else most):  # NaN: it overflows
            continue
        if ladder and width(ladder[-1][0]) == width(name):
            ladder.pop()
        ladder.append((name, found))
    formats, errors = zip(*[(RAW, 0.0), *reversed(ladder)], strict=True)
    return replace(plain, formats=formats, errors=errors)


def span(arrays: Iterable[Array]) -> tuple[int, int]:
    """Return the least and the largest exponent of values; for only zeros 0 and 0."""
    (there,) = np.nonzero(np.sum([exponents(each).counts for each in arrays], axis=0))
    return (int(there[0]) + LOWEST, int(there[-1]) + LOWEST) if there.size else (0, 0)


def in_products(recorded: Recorded, name: str) -> list[SearchPlace]:
    """Return a layer's operands, weight gradients and sums with float32 and the useful formats.

    Errors are those of its three products against float64, root mean squares over the products that
    use a tensor and over iterations; for weight gradients that of rounding.
    Raises replay.Missing if a tensor was not recorded whole, or its products are unknown.
    """
    layer = recorded.layers[name]
    tensors = {i: {kind: tensor_of(recorded, i, name, kind) for kind in OPERANDS}
               for i in recorded.iterations}  # fmt: skip
    whole = {i: operands(layer, each.__getitem__) for i, each in tensors.items()}
    exact = {(i, product): a.astype(np.float64) @ b.astype(np.float64)
             for i, each in whole.items() for product, (a, b) in each.items()}  # fmt: skip
    gradients = [exact[i, "weight gradient"].astype(np.float32) for i in whole]
    sizes = {kind: values.size for kind, values in next(iter(tensors.values())).items()}

    def of_operand(kind: str, fmt: str) -> float:
        how, found = scaled(fmt), []
        for i, each in tensors.items():
            some = operands(layer, {**each, kind: how.round(each[kind])}.__getitem__)
            for product in USED[kind]:
                a, b = (each.astype(np.float64) for each in some[product])
                found.append(error(a @ b, exact[i, product]).relative)
        return _mean_square(found)

    def of_gradients(fmt: str) -> float:
        return _mean_square([error(scaled(fmt).round(g), g).relative for g in gradients])

    def of_sums(fmt: str) -> float:
        how = {"accumulate": fmt} | SATURATED
        return _mean_square([product_error(a, b, **how).relative
                             for each in whole.values() for a, b in each.values()])  # fmt: skip

    def plain(kind: str, size: int, arrays: Sequence[Array]) -> SearchPlace:
        return SearchPlace(name, (size,), *span(arrays), (RAW,), (0.0,), kind)

    found = []
    for kind, size in sizes.items():
        here = plain(kind, size, [each[kind] for each in tensors.values()])
        found.append(laddered(here, FORMATS, partial(of_operand, kind), 1.0))
    weights = plain("weight_gradients", sizes["weights"], gradients)
    sums = plain(SUMS, sum(sizes.values()), [x.astype(np.float32) for x in exact.values()])
    return [*found, laddered(weights, FORMATS, of_gradients, 1.0),
            laddered(sums, ACCUMULATORS, of_sums, 1.0)]  # fmt: skip


def scaled(fmt: str) -> TensorFormat:
    """Return the rounding of a tensor to a format of the result."""
    return TensorFormat(format=fmt, scaling=SCALED)


def _mean_square(found: Sequence[float]) -> float:
    return math.sqrt(math.fsum(each * each for each in found) / len(found))


def squared_error(method: Aggregator, bucket: Bucket, rows: list[Array]) -> float:
    """Return ||mean - exact||**2 of gradients of all ranks, float32[bucket.size], in float64."""
    world = Loopback(len(rows))
    found = method.aggregate(rows, bucket, Context(world, State(world.hosted, world.ranks)))
    exact = np.mean(rows, axis=0, dtype=np.float64)
    return float(np.sum(np.square(found.flat - exact)))


def mean_error(method: Aggregator, files: Sequence[Path]) -> float:
    """Return the error of recorded mean gradients relative to float64 ones, over all layers."""
    squares = []
    for path in files:
        each = load(path)
        shapes = tuple(values.shape[1:] for values in each.layers.values())
        bucket = Bucket(tuple(each.layers), shapes, TILE)
        rows = [bucket.flatten([v[r] for v in each.layers.values()]) for r in range(each.ranks)]
        norm = float(np.sum(np.square(np.mean(rows, axis=0, dtype=np.float64))))
        squares.append(squared_error(method, bucket, rows) / (norm or 1.0))
    return math.sqrt(math.fsum(squares) / len(squares))
