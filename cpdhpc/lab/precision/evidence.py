"""The task of a search of bits, and its results: in HDF5, and in the report."""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import store
from ...compress import LowBit, NoCompression
from ...config import ConfigError, dump_toml, read_toml
from ...formats import packed_bytes, wire_format
from ...store import Variable
from ...torch.controllers import BySchedule
from ...torch.precision.policy import PRODUCTS
from ..report import units
from ..report.figures import GREY, Axis, Chart, Panel, Series, Style, styles
from ..report.tables import Column, Report, Section, tabulate
from ..report.units import count
from ..settings import override
from ..study_data import grouped
from ..train.job import Job, load
from ..train.update import ByAllreduce

KIND, FILE = "precision search", "search.h5"
SCHEMA = 2  # of files; 1: unseen seeds were not measured, or with another seed's recordings
RAW = "raw"  # float32


WITHIN, BEYOND, NOT_MEASURED = "within", "beyond", "not measured"
WIRE, SUMS = "wire", "accumulators"
OPERANDS = "weights", "activations", "errors"
OVER = "wire", "arithmetic", "both"  # the subject of a search


def width(name: str) -> int:
    fmt = wire_format(name)
    return 32 if fmt is None else fmt.bits


@dataclass(frozen=True)
class SearchPlace:
    """A tensor of a layer, or its sums, and the formats that it may have.

    name: of the layer; tensor: WIRE: its gradients as they travel; SUMS: partial sums of its three
        products; otherwise a key of a policy
    sizes: values: of its parameters; of a batch; SUMS: of all that are summed
    low, high: exponents between which its values are
    formats, errors: from float32 to the fewest bits, so from no error to the largest. WIRE: part of
        the error of the whole gradient, relative to that; otherwise error of the layer's products
    """

    name: str
    sizes: tuple[int, ...]
    low: int
    high: int
    formats: tuple[str, ...]
    errors: tuple[float, ...]
    tensor: str = WIRE

    @property
    def label(self) -> str:
        return self.name if self.tensor == WIRE else f"{self.name} {self.tensor}"

    @property
    def values(self) -> int:
        return sum(self.sizes)

    def bits(self, name: str) -> int:
        """Return the bits of its values in a format; WIRE: of whole tiles as they travel."""
        if self.tensor != WIRE:
            return self.values * width(name)
        whole = [8 * packed_bytes(n, width(name)) for n in self.sizes]
        last = 32 * self.sizes[-1] if name == RAW else whole[-1]  # at least, as nothing follows
        return sum(whole[:-1]) + last


@dataclass(frozen=True)
class Trial:
    """A training with some format for each place, all seeds together.

    formats: by place; seeds: of its runs; scores: of the test samples, by seed, NaN: none
    sent_bytes: in a step, by the rank that sends most; error: of the mean gradient, NaN: unknown
    what: its purpose; verdict: WITHIN the budget, BEYOND it, NOT_MEASURED, or the failure
    """

    formats: tuple[str, ...]
    seeds: tuple[int, ...]
    what: str
    scores: tuple[float, ...]
    sent_bytes: float
    error: float
    verdict: str

    @property
    def score(self) -> float:
        return math.fsum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class Evidence:
    """A search, as in its file; asked: the job and the target of the search, TOML.

    found: the format of each place, () while the search continues
    """

    asked: str
    places: tuple[SearchPlace, ...] = ()
    trials: tuple[Trial, ...] = ()
    found: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def trial(self, formats: Sequence[str], seeds: Sequence[int]) -> Trial | None:
        """Return the training with these formats and seeds, None if there was none."""
        wanted = tuple(formats), tuple(seeds)
        return next((t for t in self.trials if (t.formats, t.seeds) == wanted), None)

    @property
    def tested(self) -> Trial | None:
        """The training that shows the value of the result, with unseen seeds if there are some."""
        return next((t for t in reversed(self.trials) if self.found == t.formats), None)

    @property
    def outcome(self) -> str:
        """Whether the result keeps the budget: unseen seeds decide, if there are any."""
        tested = self.tested
        if tested is None:
            return "goes on"
        seen = tomllib.loads(self.asked).get("search", {}).get("seeds")
        numbers = ", ".join(map(str, tested.seeds))
        of = f"seeds {numbers} of the search, no unseen ones were tried"
        of = of if list(tested.seeds) == seen else f"unseen seeds {numbers}"
        return f"{'yes' if tested.verdict == WITHIN else 'no'}: {tested.verdict} with {of}"

    def agrees(self, trial: Trial, key: str) -> Callable[[float], bool]:
        """Return a function that tests whether a number agrees with the verdict of a trial.

        key: "budget": of points to float32; "gradient_error"; any agrees if it is not the limit
        """
        limit = tomllib.loads(self.asked).get("search", {}).get(key)
        if limit is None or trial.verdict not in (WITHIN, BEYOND):
            return lambda _: True
        sign = -1 if key == "budget" else 1  # points below, error above
        return lambda shown: (sign * shown <= limit) == (trial.verdict == WITHIN)

    def bits(self, formats: Sequence[str]) -> list[int]:
        """Return the bits of all values of each place, for those on the wire as they travel."""
        found = [place.bits(name) for place, name in zip(self.places, formats, strict=True)]
        wires = [i for i, place in enumerate(self.places) if place.tensor == WIRE]
        plain = [i for i in wires if formats[i] == RAW]
        for i in plain[:-1]:
            last = self.places[i].sizes[-1]  # others in float32 follow it, after a whole tile
            found[i] += 8 * packed_bytes(last, 32) - 32 * last
        for i in wires if plain == wires else ():
            found[i] = 32 * self.places[i].values  # without lowbit tiles are not padded
        return found

    def widths(self, formats: Sequence[str]) -> dict[str, float]:
        """Return the bits of a value in these formats, by tensor: means over its places."""
        pairs, found = list(zip(self.places, self.bits(formats), strict=True)), {}
        for tensor in dict.fromkeys(place.tensor for place in self.places):
            some = [(place.values, bits) for place, bits in pairs if place.tensor == tensor]
            found[tensor] = sum(bits for _, bits in some) / sum(values for values, _ in some)
        return found

    def write(self, path: Path) -> None:
        attributes: dict[str, Any] = {"kind": KIND, "schema": SCHEMA, "asked": self.asked}
        attributes["found"] = "\n".join(self.found)
        store.write(path, self._groups(), self.provenance | attributes)

    def _groups(self) -> dict[str, dict[str, Variable]]:
        places = self.places
        formats = list(dict.fromkeys(name for place in places for name in place.formats))
        errors = np.full((len(places), len(formats)), np.nan)
        for row, place in zip(errors, places, strict=True):
            row[[formats.index(name) for name in place.formats]] = place.errors
        of = [i for i, place in enumerate(places) for _ in place.sizes]
        sizes = [size for place in places for size in place.sizes]
        error = "wire: part of the whole gradient's error; else error of the layer's products"
        at, of_parameter = ("place",), ("parameter",)
        number = Variable(at, np.arange(len(places)), "tensor of a layer")
        return {
            "places": {
                "place": number,
                "format": _texts(("format",), formats, "format"),
                "layer": _texts(at, (x.name for x in places), "module"),
                "tensor": _texts(at, (x.tensor for x in places), "wire, or what is rounded"),
                "exponent_low": Variable(at, [x.low for x in places], "least exponent"),
                "exponent_high": Variable(at, [x.high for x in places], "largest exponent"),
                "error": Variable(("place", "format"), errors, error),
            },
            "parameters": {
                "parameter": Variable(of_parameter, np.arange(len(sizes)), "parameter tensor"),
                "place": Variable(of_parameter, np.array(of, int), "place that it belongs to"),
                "values": Variable(of_parameter, np.array(sizes, int), "number of values"),
            },
            "trials": self._of_trials(number),
        }

    def _of_trials(self, place: Variable) -> dict[str, Variable]:
        trials = self.trials
        runs = max((len(t.seeds) for t in trials), default=0)
        scores = np.full((len(trials), runs), np.nan)
        seeds = np.full((len(trials), runs), -1, np.int64)
        for i, t in enumerate(trials):
            scores[i, : len(t.seeds)], seeds[i, : len(t.seeds)] = t.scores, t.seeds
        tried = np.array([t.formats for t in trials], str).reshape(-1, len(self.places))
        by, by_run = ("trial",), ("trial", "run")
        sent = "payload of a step, of the rank that sends most"
        return {
            "trial": Variable(by, np.arange(len(trials)), "training"),
            "place": place,
            "run": Variable(("run",), np.arange(runs), "run of a training"),
            "format": Variable(("trial", "place"), tried, "format of the place"),
            "seed": Variable(by_run, seeds, "seed, -1: there is no such run"),
            "score": Variable(by_run, scores, "score of the test samples"),
            "sent_bytes": Variable(by, [t.sent_bytes for t in trials], sent, "byte"),
            "error": Variable(by, [t.error for t in trials], "error of the mean gradient"),
            "what": _texts(by, (t.what for t in trials), "why"),
            "verdict": _texts(by, (t.verdict for t in trials), "verdict"),
        }

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Return the data of a file made by write. Raises StoreError for any other file."""
        groups, attributes = store.read(path)
        if attributes.get("kind") != KIND:
            raise store.StoreError(f"{path}: is not a search of precision")
        by_error = "gradient_error" in tomllib.loads(attributes["asked"]).get("search", {})
        if "places" not in groups or (by_error and attributes.get("schema") != SCHEMA):
            raise store.StoreError(f"{path}: is a search of another version: begin anew")
        of, parameters, trials = groups["places"], groups["parameters"], groups["trials"]
        places, ranges = [], (of["exponent_low"].tolist(), of["exponent_high"].tolist())
        names = zip(of["layer"].tolist(), of["tensor"].tolist(), *ranges, strict=True)
        for i, (name, tensor, low, high) in enumerate(names):
            (known,) = np.nonzero(~np.isnan(of["error"][i]))
            order = known[np.argsort(of["error"][i][known], kind="stable")]
            sizes = parameters["values"][parameters["place"] == i]
            formats, errors = of["format"][order].tolist(), of["error"][i][order].tolist()
            of_place = low, high, tuple(formats), tuple(errors), tensor
            places.append(SearchPlace(name, tuple(sizes.tolist()), *of_place))
        rows = [
            Trial(
                tuple(trials["format"][i].tolist()),
                tuple(seeds[seeds >= 0].tolist()),
                str(trials["what"][i]),
                tuple(trials["score"][i][seeds >= 0].tolist()),
                float(trials["sent_bytes"][i]),
                float(trials["error"][i]),
                str(trials["verdict"][i]),
            )
            for i, seeds in enumerate(trials["seed"])
        ]
        found = tuple(attributes["found"].split("\n")) if attributes["found"] else ()
        return cls(attributes["asked"], tuple(places), tuple(rows), found)


def _texts(dims: tuple[str, ...], values: Iterable[str], long_name: str) -> Variable:
    return Variable(dims, np.array([*values], str), long_name)  # also if there are none


BEFORE, UNSEEN = 2, 3  # trainings: float32 and uniform; these and the result, with unseen seeds


@dataclass(frozen=True)
class SearchTarget:
    """The target of a search.

    jobs: one for each seed
    budget: points that the accuracy may be below that of float32
    gradient_error: that the mean gradient may have, relative to the float64 one; one of the two
    most: largest number of trainings; unseen: seeds to test with; over: of OVER
    """

    jobs: list[Job]
    budget: float | None
    gradient_error: float | None
    most: int
    unseen: int
    over: str = "wire"

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(job.seed for job in self.jobs)

    @property
    def wire(self) -> bool:
        return self.over != "arithmetic"

    @property
    def arithmetic(self) -> bool:
        return self.over != "wire"

    @property
    def reserved(self) -> int:
        """The trainings after the search: float32, uniform and the result, with unseen seeds."""
        return UNSEEN if self.unseen else 0

    @property
    def cost(self) -> str:
        seeds = len(self.seeds)
        runs = (self.most - self.reserved) * seeds + self.reserved * self.unseen
        epochs = count(self.jobs[0].train.epochs, "epoch")
        told = f"{self.most} trainings of {count(seeds, 'seed')}"
        if self.unseen:
            others = "another" if self.unseen == 1 else f"{self.unseen} others"
            told += f", of {others} the last {self.reserved},"
        return f"{told} at most: {runs} runs of {epochs}"

    @property
    def further(self) -> tuple[int, ...]:
        """Seeds that are not used in the search."""
        return tuple(range(max(self.seeds) + 1, max(self.seeds) + 1 + self.unseen))

    @property
    def method(self) -> LowBit:
        """The aggregator of gradients, before the choice of formats."""
        given = self.jobs[0].gradient
        if isinstance(given, LowBit):
            return replace(given, layers={})
        assert isinstance(given, NoCompression), "checked before"
        return LowBit(algorithm=given.algorithm, machine=given.machine)

    def toml(self) -> str:
        search = {
            "budget": self.budget,
            "gradient_error": self.gradient_error,
            "over": self.over,
            "trials": self.most,
            "test_seeds": self.unseen,
            "seeds": list(self.seeds),
        }
        return dump_toml(self.jobs[0].plain() | {"search": search})


def asked_of(
    arguments: argparse.Namespace, settings: Sequence[str], processes: int
) -> SearchTarget:
    """Return the target. Raises ConfigError for one that cannot be searched."""
    of = arguments
    _check_options(of)
    jobs, train = load(of.file, settings), override(read_toml(of.file), settings).get("train", {})
    if len({job.name for job in jobs}) > 1:
        names = ", ".join(dict.fromkeys(job.name for job in jobs))
        raise ConfigError(f"{of.file}: compare: has rows {names}: a search takes one")
    if not {"seed", "seeds"} & train.keys():
        raise ConfigError(f"{of.file}: train.seeds: is missing: a search needs to know them")
    asked = SearchTarget(jobs, of.budget, of.gradient_error, of.trials, of.test_seeds, of.over)
    for key, (fits, allowed) in _needs(asked, jobs[0]).items():
        if not fits:
            raise ConfigError(f"{of.file}: {key}: a search takes {allowed}")
    if asked.wire and processes * jobs[0].train.virtual_ranks == 1:
        raise ConfigError(
            f"{of.file}: one rank sends no gradient, nothing can be saved: mpirun or "
            "train.virtual_ranks=2 or more, or --over arithmetic"
        )
    return asked


def _check_options(of: argparse.Namespace) -> None:
    """Raise ConfigError for options of no search."""
    if (of.budget is None) == (of.gradient_error is None):
        raise ConfigError("search: --budget POINTS or --gradient-error SHARE: give one of them")
    for name, value in (("--budget", of.budget), ("--gradient-error", of.gradient_error)):
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"search: {name} {value:g}: must be above 0, and finite")
    least = BEFORE + 1 + (UNSEEN if of.test_seeds else 0)
    if of.test_seeds < 0:
        raise ConfigError(f"search: --test-seeds {of.test_seeds}: must be 0 or more")
    if of.trials < least:
        with_unseen = f", {UNSEEN} of unseen seeds (--test-seeds 0: none)" if of.test_seeds else ""
        raise ConfigError(
            f"search: --trials {of.trials}: must be {least} or more: {BEFORE} are of float32 and "
            f"uniform formats{with_unseen}"
        )


def _needs(asked: SearchTarget, job: Job) -> dict[str, tuple[bool, str]]:
    """Return by key of a job whether it has a value that suits a search, and which do."""
    ruled = {key for rule in job.precision.rules for key in rule.said().keys() & PRODUCTS}
    constant = isinstance(job.controller, BySchedule) and job.train.loss_scaling == "static"
    of_gradients = asked.arithmetic and asked.gradient_error is not None
    return {
        "gradient.aggregator": (
            not asked.wire or type(job.gradient) in (LowBit, NoCompression), "none or lowbit"),
        "update.name": (isinstance(job.update, ByAllreduce), "allreduce"),
        "stages.count": (job.stages.count == 1, "1"),
        "metric.name": (asked.budget is None or job.metric.label == "accuracy",
            "accuracy: --budget counts its points; other metrics take --gradient-error"),
        "gradient.algorithm": (
            not asked.wire or getattr(job.gradient, "algorithm", "") != "mpi", "one that rounds"),
        "precision": (not asked.arithmetic or not ruled, f"no rule of {', '.join(sorted(ruled))} "
            "if it goes over arithmetic: it finds them"),
        "record.thin": (not of_gradients or not job.record.thin,
            "false if --gradient-error goes over arithmetic: it needs whole weights"),
        "controller": (not of_gradients or constant, "a constant "
            "batch and loss scale if --gradient-error goes over arithmetic"),
    }  # fmt: skip


CAPTION = (
    "Wire: gradients on their way. Bits: of a value's code. Share: of all bits, of a batch; on the "
    "wire whole tiles of 1,024 values, unless all of it is float32. Exponents: of the recorded "
    "values. Error: wire: of the layer, relative to the whole mean gradient in float64; others: "
    "of the layer's products."
)
TRAININGS = (
    "Bits: over the number of values, by tensor. Sent: in a step, by the rank that sends most. "
    "Score: mean over seeds, an accuracy in percent. To float32: with the same seeds. Error of the "
    "mean: of the first of the seeds."
)


def search_report(path: Path) -> Report:
    """Return the report of a file. Raises StoreError if it is not a search."""
    of = Evidence.read(path)
    asked = tomllib.loads(of.asked)
    search = asked["search"]
    facts = [(key, json.dumps(value)) for key, value in search.items()]
    layers = _layers(of) if of.found else []
    return Report(
        f"Search of bits: {asked['name']}",
        [*facts, ("found", of.outcome)],
        [*layers, _trainings(of)],
    )


class FoundFormat(NamedTuple):
    """The format of a place in the result, and its share of all bits in %."""

    place: SearchPlace
    name: str
    share: float

    @property
    def error(self) -> str:
        return units.digits(self.place.errors[self.place.formats.index(self.name)])

    @property
    def exponents(self) -> str:
        low, high = self.place.low, self.place.high
        return units.Cell(f"{low} .. {high}", low=low, high=high)


def _layers(of: Evidence) -> list[Section]:
    whole = of.bits(of.found)
    shares = [100 * bits / sum(whole) for bits in whole]
    rows = [FoundFormat(*row) for row in zip(of.places, of.found, shares, strict=True)]
    columns = [
        Column[FoundFormat]("layer", lambda r: r.place.name, numbers=False),
        Column[FoundFormat]("tensor", lambda r: r.place.tensor, numbers=False),
        Column[FoundFormat]("values", lambda r: units.fixed(r.place.values)),
        Column[FoundFormat]("exponents", lambda r: r.exponents),
        Column[FoundFormat]("format", lambda r: r.name, numbers=False),
        Column[FoundFormat]("bits", lambda r: str(width(r.name))),
        Column[FoundFormat]("share\n%", lambda r: units.fixed(r.share, 1)),
        Column[FoundFormat]("error", lambda r: r.error),
    ]
    table = tabulate("Layers", columns, rows, CAPTION)
    return [Section("Layers", [_worth(of)], [table], [_bits_by_layer(rows)])]


def _bits_by_layer(rows: Sequence[FoundFormat]) -> Chart:
    at, style = np.arange(len(rows), dtype=float), styles(["found", "share"])
    names = Axis("layer", names=[row.place.label for row in rows])
    least = [float(width(row.place.formats[-1])) for row in rows]
    bits = [float(width(row.name)) for row in rows]
    found = [
        Series("found", style["found"], bits, at, join="none"),
        Series("fewest of use", Style(GREY, "|"), least, at, join="none"),
        Series("", Style(GREY, ""), [8.0, 8.0], [-0.5, len(rows) - 0.5]),
    ]
    shares = Series("share", style["share"], [row.share for row in rows], at, join="none")
    return Chart(
        "bits_by_layer",
        "Bits by layer",
        ["Found by the search; the line: eight bits."],
        "Bits of each layer's tensors, and which share of all bits they take.",
        [
            Panel("", Axis("bits a value", limits=(0, None)), names, found),
            Panel("", Axis("share of all bits / %", limits=(0, None)), names, [shares]),
        ],
        shared=False,
    )


def _worth(of: Evidence) -> str:
    """Return the value of the result, with unseen seeds if there are some."""
    found = of.tested
    assert found is not None, "a search that has ended"
    float32, *others = [t for t in of.trials if t.seeds == found.seeds]
    alike = next((t.formats for t in of.trials if t.what.startswith("uniform")), float32.formats)
    uniform = next((t for t in others if t.formats == alike), float32)
    seeds = ", ".join(map(str, found.seeds))
    less = []
    widths = zip(of.widths(found.formats).items(), of.widths(alike).values(), strict=True)
    for (tensor, bits), before in widths:
        if tensor == WIRE and not uniform.sent_bytes:
            less.append("one rank, which sends nothing")
        elif tensor == WIRE:
            share = 1 - found.sent_bytes / uniform.sent_bytes
            way = "fewer" if share >= 0 else "more"
            of_all = f"{way} bytes than {_named(of, alike)} for all layers"
            less.append(f"{100 * abs(share):.0f} % {of_all}")
        else:
            less.append(f"{tensor} of {bits:.2f} bits ({before:g})")
    return f"With seeds {seeds}: {found.score - float32.score:+.2f} to float32, {', '.join(less)}."


def _named(of: Evidence, formats: Sequence[str]) -> str:
    """Return the format of gradients on their way."""
    return next(f for p, f in zip(of.places, formats, strict=True) if p.tensor == WIRE)


def _trainings(of: Evidence) -> Section:
    def beside(trial: Trial) -> str:
        base = of.trial((RAW,) * len(of.places), trial.seeds)
        if base is None or base is trial or isnan(trial.score):
            return units.NONE
        return units.signed(trial.score - base.score, of.agrees(trial, "budget"))

    def error(trial: Trial) -> str:
        agrees = of.agrees(trial, "gradient_error")
        text = units.agreeing(lambda n: units.digits(trial.error, n), agrees, 3)
        return units.Cell(text, value=trial.error)

    columns = [
        Column[Trial]("why", lambda t: t.what, numbers=False),
        Column[Trial]("seeds", lambda t: ", ".join(map(str, t.seeds)), numbers=False),
        *(
            Column[Trial](
                f"bits\n{tensor}".replace("_", "\n"),
                lambda t, tensor=tensor: units.fixed(of.widths(t.formats)[tensor], 2),  # type: ignore[misc]
            )
            for tensor in dict.fromkeys(place.tensor for place in of.places)
        ),
        Column[Trial]("sent", lambda t: units.bytes_of(t.sent_bytes)),
        Column[Trial]("score", lambda t: units.with_deviation(np.array(t.scores))),
        Column[Trial]("to float32", beside),
        Column[Trial]("error of\nthe mean", error),
        Column[Trial]("verdict", lambda t: t.verdict, numbers=False),
    ]
    table = tabulate("Trainings", columns, of.trials, TRAININGS)
    return Section("Trainings", tables=[table], charts=[_trial_history(of)])


def _trial_history(of: Evidence) -> Chart:
    values = sum(place.values for place in of.places)
    by = grouped(
        enumerate(of.trials, 1),
        lambda row: row[1].verdict if row[1].verdict in KNOWN else "fails",
    )
    series = [
        Series(
            name,
            style,
            [float(i) for i, _ in by[name]],
            [sum(of.bits(trial.formats)) / values for _, trial in by[name]],
            join="none",
        )
        for name, style in styles(by).items()
    ]
    return Chart(
        "trial_history",
        "Trainings of the search",
        ["The first two: float32, and one format for all layers."],
        "Bits per value of each training, and the result.",
        [Panel("", Axis("training", "whole"), Axis("bits a value", "log2"), series)],
    )


KNOWN = WITHIN, BEYOND, NOT_MEASURED
