"""The search of bits: its decisions on made-up errors, and whole on trainings of a second."""

import argparse
import itertools
import math
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allreduce_oracle import expected
from every import every
from studies import no_numbers
from training import small_data

from cpdhpc import store
from cpdhpc.compress import Context, LowBit, NoCompression, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.config import UserError, dump_toml, validate
from cpdhpc.lab.claim import alone
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.precision import add_search
from cpdhpc.lab.commands.report import OF_KIND
from cpdhpc.lab.precision import evidence as evidence_module
from cpdhpc.lab.precision import search as searching
from cpdhpc.lab.precision.evidence import (
    BEYOND,
    KIND,
    NOT_MEASURED,
    RAW,
    WITHIN,
    Evidence,
    SearchPlace,
    SearchTarget,
    Trial,
    _worth,
    asked_of,
    search_report,
    width,
)
from cpdhpc.lab.precision.search import Search, in_products, narrowing, told
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train import progress
from cpdhpc.lab.train.command import Trainer
from cpdhpc.lab.train.gradients import load
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.lab.train.samples import epoch_order
from cpdhpc.lab.train.setup import build_model
from cpdhpc.torch.precision.conversion import convert
from cpdhpc.torch.precision.policy import Policy
from cpdhpc.torch.precision.recorder import Recorder
from cpdhpc.torch.precision.recording import load as load_recording
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

JOB = """
[data]
name = "digits"
[model]
name = "mlp"
hidden = [64]
[train]
epochs = 2
batch = 24
learning_rate = 0.1
seeds = [0, 1]
threads = 1
virtual_ranks = 2
telemetry_every = 1000
"""


def asked(directory: Path, *words: str, job: str = JOB) -> SearchTarget:
    path = directory / "job.toml"
    path.write_text(job)
    parser = argparse.ArgumentParser()
    add_search(parser)
    return asked_of(parser.parse_args([str(path), *words]), [], 1)


def layer(name: str, size: int, *errors: float) -> SearchPlace:
    formats = (RAW, "e5m10", "e4m3", "e3m2", "e3m0", "e2m0")[: len(errors) + 1]
    return SearchPlace(name, (size,), -20, 0, formats, (0.0, *errors))


class Fake(Search):
    """A search whose trainings lose what errors say: nothing is trained or written."""

    def __init__(self, layers: tuple[SearchPlace, ...], budget: float, most: int = 1000) -> None:
        self.asked = SearchTarget([], budget, None, most, 0)
        self.evidence = Evidence("", layers)
        self.budget = budget

    def _trial(self, formats: Any, what: str, seeds: Any = None) -> Trial:
        if known := self.evidence.trial(formats, ()):
            return known
        pairs = zip(self.evidence.places, formats, strict=True)
        lost = sum(each.errors[each.formats.index(wire)] for each, wire in pairs)
        trial = Trial(formats, (), what, (), 0, 0, WITHIN if lost <= self.budget else BEYOND)
        self.evidence = replace(self.evidence, trials=(*self.evidence.trials, trial))
        return trial


LAYERS = (
    layer("a", 5000, 0.0, 0.1, 0.4, 0.9),
    layer("b", 100000, 0.0, 0.05, 0.3, 0.5, 2.0),
    layer("c", 1000, 0.0, 0.01),
)


@every("budget", [0.0, 0.16, 0.5, 1.0, 1.45, 10.0])
def test_no_layer_can_be_narrowed_further(budget: float) -> None:
    """Against all combinations: what is found is within, and none that is narrower is so too."""
    found = Fake(LAYERS, budget)
    levels = found._bisected(narrowing(LAYERS))
    levels = found._narrowed(levels)

    def lost(each: Any) -> float:
        return sum(one.errors[at] for one, at in zip(LAYERS, each, strict=True))

    every = itertools.product(*(range(len(each.formats)) for each in LAYERS))
    able = [each for each in every if lost(each) <= budget]
    assert levels in able
    wider = [e for e in able if e != levels and all(x >= y for x, y in zip(e, levels, strict=True))]
    assert not wider
    tried = [trial.formats for trial in found.evidence.trials]
    assert len(tried) == len(set(tried)) < math.prod(len(each.formats) for each in LAYERS)


def test_nothing_is_saved_where_nothing_can_be_and_trainings_are_counted() -> None:
    found = Fake(LAYERS, 0.0)
    found.budget = -1e-9  # float32 itself is not asked
    assert found._bisected(narrowing(LAYERS)) == (0, 0, 0)
    few = Fake(LAYERS, 1.0, most=4)
    levels = few._bisected(narrowing(LAYERS))
    assert few._narrowed(levels) and len(few.evidence.trials) == 4


def test_steps_save_the_most_bits_for_their_error() -> None:
    steps = narrowing(LAYERS)
    assert steps[0] == (0, 0, 0) and steps[-1] == (4, 5, 2) and len(steps) == 12
    assert steps[1] == (0, 1, 0)  # 100,000 values in 16 bits fewer, without error
    for before, after in itertools.pairwise(steps):
        assert sum(np.subtract(after, before)) == 1


def test_bits_are_those_that_travel_beside_other_layers() -> None:
    """float32 fills up tiles too, where others have few bits: small layers are worth narrowing."""
    bucket, sent = Bucket(("a.w", "a.b", "b.w"), ((200,), (8,), (3000,)), 1024), {}
    rows = [np.ones(bucket.size, np.float32)] * 2
    for wire in (RAW, "e5m10", "e4m3", "e2m0"):
        method, world = LowBit(wire="e5m10", layers={"a": wire, "b": "e3m0"}), Loopback(2)
        before = world.bytes_sent.copy()
        method.aggregate(rows, bucket, Context(world, State(world.hosted, world.ranks)))
        sent[wire] = 8 * float((world.bytes_sent - before).mean())  # 2 (p - 1) / p is 1
    place = SearchPlace("a", (200, 8), 0, 0, (RAW,), (0.0,))
    for wire, bits in sent.items():  # but for a shift a tile, and what tells layers apart
        found = place.bits(wire) - place.bits("e2m0")
        assert bits - sent["e2m0"] == pytest.approx(found, abs=8 * 64)


def test_bits_of_a_mixture_are_what_travels() -> None:
    """Several layers of less than a tile in float32 fill up tiles but for the last one."""
    bucket = Bucket(("a.w", "b.w", "b.b", "c.w"), ((72,), (8,), (8,), (1290,)), 1024)
    world, formats = Loopback(2), (RAW, RAW, "e3m0")
    method = LowBit(wire="e3m0", layers={"a": RAW, "b": RAW}, algorithm="direct")
    rows = [np.ones(bucket.size, np.float32)] * 2
    method.aggregate(rows, bucket, Context(world, State(world.hosted, world.ranks)))
    sizes = {"a": (72,), "b": (8, 8), "c": (1290,)}
    of = Evidence("", tuple(SearchPlace(n, s, 0, 0, (RAW,), (0.0,)) for n, s in sizes.items()))
    counted = of.widths(formats)["wire"] * 1378
    # but for a shift a tile, and what ranks tell each other
    assert counted == pytest.approx(8 * float(world.bytes_sent.mean()), abs=8 * 64)


def test_bits_have_one_measure_in_table_shares_and_history(tmp_path: Path) -> None:
    """float32 everywhere travels as it is, without tiles: 32 bits a value, shares by values."""
    sizes = {"conv": (36, 4), "norm": (4, 4), "fc": (384,), "out": (60, 10)}
    places = tuple(SearchPlace(n, s, 0, 0, (RAW, "e4m3"), (0.0, 0.1)) for n, s in sizes.items())
    float32, narrow = (RAW,) * 4, ("e4m3",) * 4
    rows = [(float32, 6104.0), (narrow, 11355.0), ((*narrow[:3], RAW), 12000.0)]
    trials = tuple(Trial(f, (0,), "x", (50.0,), sent, 0.0, WITHIN) for f, sent in rows)
    asked = dump_toml({"name": "net", "search": {"budget": 1.0}})
    Evidence(asked, places, trials, float32).write(tmp_path / "s.h5")
    report = search_report(tmp_path / "s.h5")
    layers, trainings = report.tables
    at = layers.headings.index("share %")
    assert [row[at] for row in layers.rows] == ["8.0", "1.6", "76.5", "13.9"]
    by_layer, history = report.charts
    (share,) = by_layer.panels[1].series
    np.testing.assert_allclose(share.x, 100 * np.array([40, 8, 384, 70]) / 502, rtol=1e-12)
    (series,) = history.panels[0].series
    # seven tensors, each a tile of 1,024 codes of 8 bits; the last two in float32: 36 bits and 320
    tiles = 8 * 1024
    expected = [32.0, 7 * tiles / 502, (5 * tiles + 32 * 1024 + 320) / 502]
    np.testing.assert_allclose(series.y, expected, rtol=1e-12)
    at = trainings.headings.index("bits wire")
    assert [row[at] for row in trainings.rows] == [f"{each:.2f}" for each in expected]


@every(
    ("limit", "lost", "error", "verdict", "shown"),
    [
        ({"budget": 1.0}, 1.0017, 0.25, BEYOND, ("-1.002", "0.250", "0.25")),
        ({"budget": 1.0}, 0.9999, 0.25, WITHIN, ("-1.00", "0.250", "0.25")),
        ({"gradient_error": 0.05}, 2.0, 0.05001, BEYOND, ("-2.00", "0.05001", "0.05001")),
        ({"gradient_error": 0.05}, 2.0, 0.0502, BEYOND, ("-2.00", "0.0502", "0.0502")),
        ({"gradient_error": 0.05}, 2.0, 0.04999, WITHIN, ("-2.00", "0.0500", "0.05")),
    ],
)
def test_rounded_numbers_do_not_contradict_the_verdict(
    tmp_path: Path, limit: Any, lost: float, error: float, verdict: str, shown: tuple[str, ...]
) -> None:
    places = (layer("a", 5000, 0.1, 0.2),)
    trials = (
        Trial((RAW,), (0,), "float32", (97.25,), 9.0, 0.0, WITHIN),
        Trial(("e4m3",), (0,), "step", (97.25 - lost,), 8.0, error, verdict),
    )
    evidence = Evidence(dump_toml({"name": "net", "search": limit}), places, trials)
    evidence.write(tmp_path / "s.h5")
    table = search_report(tmp_path / "s.h5").tables[-1]
    at = [table.headings.index(name) for name in ("to float32", "error of the mean")]
    assert [table.rows[1][i] for i in at] == [*shown[:2]]
    assert f", error of the mean {shown[2]}: {verdict}" in told(evidence, trials[1])


def test_report_knows_the_files_of_searches() -> None:
    """By a name of its own: the module that has it loads the models of jobs."""
    assert KIND in OF_KIND


def test_nothing_that_sends_more_than_float32_is_called_fewer_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All layers are smaller than a tile, which formats of few bits fill up."""
    job = JOB.replace("[64]", "[4]") + '[gradient]\naggregator = "lowbit"\nalgorithm = "direct"\n'
    of = asked(tmp_path, "--budget", "100", "--trials", "5", "--test-seeds", "0", job=job)
    evidence = searched(tmp_path / "out", of, resume=True)
    base, uniform = evidence.trials[:2]
    found = evidence.trial(evidence.found, (0, 1))
    assert uniform.sent_bytes > base.sent_bytes and found == base
    assert any(t.verdict == WITHIN and t.sent_bytes > base.sent_bytes for t in evidence.trials[2:])
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'out' / searching.FILE}: is not there: a new search\n" in shown
    assert f"{base.sent_bytes:,.0f} B per step sent" in shown
    policy = (tmp_path / "out" / searching.POLICY).read_text()
    assert "nothing sends fewer bytes" in policy
    assert "# [gradient] is to be put in place of the job's own, which rounds\n" in policy
    assert f"{searching.POLICY}: its [gradient] is to be put in place of the job's own" in shown
    adopted = validate(Job, tomllib.loads(job) | {"name": "x"} | tomllib.loads(policy), "adopted")
    assert adopted.gradient == NoCompression(algorithm="direct") and adopted.precision.empty
    written = store.read_attributes(tmp_path / "out" / searching.FILE)
    assert written["ranks"] == written["virtual_ranks"] == 2
    mixed = replace(evidence, found=("e4m3",) * len(evidence.places))
    assert "gradient" not in tomllib.loads(searching.policy(mixed, of))
    plain = asked(tmp_path, "--budget", "1", job=JOB)
    nothing = searching.policy(evidence, plain)
    assert "# nothing is to be added" in nothing and not tomllib.loads(nothing)
    worse = replace(evidence.trials[2], sent_bytes=1.5 * uniform.sent_bytes)
    more = replace(evidence, found=worse.formats, trials=(base, uniform, worse))
    assert "50 % more bytes than e4m3" in _worth(more)
    silent = tuple(replace(each, sent_bytes=0.0) for each in evidence.trials)
    assert "one rank, which sends nothing" in _worth(replace(evidence, trials=silent))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs train on a hundred images."""
    monkeypatch.setattr(Trainer, "data_of", lambda self, job: small_data())


class Killed(BaseException):
    """As if by SIGKILL: nobody catches it."""


def searched(directory: Path, of: SearchTarget, resume: bool = False) -> Evidence:
    search = Search(of, directory, Trainer(World(), Caught(), quiet=True), resume)
    search.run()
    return Evidence.read(directory / searching.FILE)


def test_a_killed_search_goes_on_to_the_same_evidence_without_a_training_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of, trained = asked(tmp_path, "--budget", "4", "--trials", "7"), list[str]()
    whole = Trainer.train

    def train(self: Trainer, jobs: list[Job], directory: Path, resume: bool) -> list[Path]:
        if len(trained) == 4:
            trained.append("killed")
            raise Killed
        trained.append(jobs[0].id)
        return whole(self, jobs, directory, resume)

    words = ["--budget", "4", "--trials", "7", "--out", str(tmp_path / "a")]
    words = ["precision", "search", str(tmp_path / "job.toml"), *words]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "uniform e4m3" in shown and "fewer bytes than e4m3" in shown
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # as mpirun has it, for a file too
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (False, True):
        monkeypatch.setattr(progress, "on_terminal", lambda terminal=terminal: terminal)
        assert main([*words, "--resume"]) == 0
        shown = capsys.readouterr().out
        assert "fewer bytes than e4m3" in shown and ("\x1b[" in shown) == terminal
        assert "float32 and the formats proposed: taken from " in shown and " took " not in shown
    assert len(search_report(tmp_path / "a" / searching.FILE).charts) == 2
    undisturbed = Evidence.read(tmp_path / "a" / searching.FILE)
    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(Killed):
        searched(tmp_path / "b", of)
    with pytest.raises(ValueError, match=r"search\.h5: is there already: --resume goes on"):
        searched(tmp_path / "b", of)
    with (
        alone(tmp_path / "b" / ".search.lock", "search", print),
        pytest.raises(UserError, match="another run of search is at work"),
    ):
        searched(tmp_path / "b", of, resume=True)
    again = searched(tmp_path / "b", of, resume=True)
    assert repr(replace(again, provenance={})) == repr(replace(undisturbed, provenance={}))
    assert len(trained) == len(set(trained)) + 1  # float32's seeds, seen once and once unseen
    policy = (tmp_path / "a" / searching.POLICY).read_text()
    assert policy == (tmp_path / "b" / searching.POLICY).read_text()
    rules = tomllib.loads(policy)["precision"]["rule"]
    names = [each.name for each in again.places]
    assert [(rule["layers"], rule["wire"]) for rule in rules] == list(
        zip(names, again.found, strict=True)
    )
    with pytest.raises(ValueError, match=r"is a search with another search\.budget"):
        searched(tmp_path / "b", asked(tmp_path, "--budget", "3", "--trials", "7"), resume=True)
    check_verdicts(tmp_path / "a", again)


def check_verdicts(directory: Path, evidence: Evidence) -> None:
    """By the records, read by themselves."""
    base = evidence.trial((RAW,) * len(evidence.places), (0, 1))
    assert base is not None and base.score > 20
    for trial in evidence.trials:
        if trial.seeds == base.seeds:
            assert (trial.verdict == WITHIN) == (trial.score >= base.score - 4)
    found = evidence.trial(evidence.found, (0, 1))
    uniform = evidence.trial(("e4m3",) * len(evidence.places), (0, 1))
    assert found is not None and uniform is not None and found.verdict == WITHIN
    assert found.sent_bytes < min(uniform.sent_bytes, base.sent_bytes)
    records = {
        str(attributes["name"]): groups
        for path in (directory / searching.RUNS).glob("*-s1.h5")
        for groups, attributes in [store.read(path)]
    }
    last = 100 * records["job-float32"]["epochs"]["test_accuracy"][-1]
    assert base.scores[1] == last
    assert evidence.trial(evidence.found, (2,)) is not None


def mean_error(evidence: Evidence, files: list[Path]) -> float:
    """Of the mean gradient, by the specification: layers of one format are summed together."""
    modules = [each.name for each in evidence.places]
    squares = []
    for path in files:
        recorded, lost, norm = load(path).layers, 0.0, 0.0
        for wire in set(evidence.found):
            names = [n for n in recorded if evidence.found[modules.index(n.split(".")[0])] == wire]
            part = Bucket(tuple(names), tuple(recorded[n].shape[1:] for n in names), 1024)
            xs = [part.flatten([recorded[name][rank] for name in names]) for rank in range(2)]
            total = expected(xs, wire, "ring", "tile", "requantise", segments=part.segments)
            exact = np.mean(xs, axis=0, dtype=np.float64)
            lost += float(np.sum((total / np.float32(2) - exact) ** 2))
            norm += float(np.sum(exact**2))
        squares.append(lost / norm)
    return math.sqrt(np.mean(squares))


def check_error(directory: Path, names: str, evidence: Evidence, found: Trial) -> None:
    """Of one of the runs it is the very number, but for the order of sums in float64."""
    files = sorted((directory / searching.RUNS).glob(names))
    stems = {path.name.partition(".gradients")[0] for path in files}
    errors = [mean_error(evidence, [p for p in files if p.name.startswith(f"{s}.")]) for s in stems]
    assert min(abs(error / found.error - 1) for error in errors) < 1e-9


def test_a_budget_of_the_gradients_error_is_kept(tmp_path: Path) -> None:
    """Measured anew by the specification on the gradients that the run has recorded."""
    of = asked(tmp_path, "--gradient-error", "0.05", "--trials", "4", "--test-seeds", "0")
    evidence = searched(tmp_path / "out", of)
    found = evidence.trial(evidence.found, (0, 1))
    assert found is not None and 0.005 < found.error <= 0.05
    check_error(tmp_path / "out", "*gradients*.h5", evidence, found)
    assert any(trial.verdict == BEYOND for trial in evidence.trials)


def by_definition(x: Any, exp: int, man: int) -> Any:
    """To nearest, ties to even, after the largest power of two with which all of x fits."""
    bias = 2 ** (exp - 1) - 1
    scale = 2.0 ** math.floor(math.log2((2 - 2.0**-man) * 2.0**bias / np.abs(x).max()))
    with np.errstate(divide="ignore"):
        exponents = np.maximum(np.floor(np.log2(np.abs(x * scale))), 1 - bias)
    spacing = 2.0 ** (exponents - man)
    return np.round(x * scale / spacing) * spacing / scale


def test_errors_of_operands_are_those_of_their_products(tmp_path: Path) -> None:
    """Against IEEE 754's definition and products in float64, of a layer that is seen whole."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(14, 10)
    with Recorder(layer, tmp_path / "r.h5", every=1, count=1, layers=("*",)) as recorder:
        layer(torch.randn(12, 14) ** 3).square().sum().backward()
        recorder.step()
    recorded = load_recording(tmp_path / "r.h5")
    of = {tensor.kind: tensor.read().astype(np.float64) for tensor in recorded.tensors
          if not tensor.name.endswith("bias")}  # fmt: skip
    names = {"weights": "w", "activations": "x", "errors": "e"}

    def products(w: Any, x: Any, e: Any) -> dict[str, Any]:
        return {"wx": x @ w.T, "we": e @ w, "ex": e.T @ x}

    exact = products(*(of[kind] for kind in names))
    found = {place.tensor: place for place in in_products(recorded, "")}
    assert [*found] == [*names, "weight_gradients", "accumulators"]
    for kind, letter in names.items():
        place = found[kind]
        assert place.sizes == (of[kind].size,) and place.formats[0] == RAW
        assert list(place.errors) == sorted(place.errors)
        widths = [width(name) for name in place.formats]
        assert widths == sorted(set(widths), reverse=True)
        checked = 0
        for name, error in zip(place.formats, place.errors, strict=True):
            parts = re.fullmatch(r"e(\d)m([1-9]\d*)", name)
            if parts is None:  # float32, bf16, and those whose top is another
                continue
            rounded = by_definition(of[kind], int(parts[1]), int(parts[2]))
            there = products(*(rounded if each == kind else of[each] for each in names))
            lost = [np.linalg.norm(there[p] - exact[p]) / np.linalg.norm(exact[p])
                     for p in exact if letter in p]  # fmt: skip
            assert error == pytest.approx(math.hypot(*lost) / math.sqrt(2), rel=1e-9), name
            checked += 1
        assert checked


ARITHMETIC = JOB.replace("virtual_ranks = 2", "").replace("64]", "12]").replace("[0, 1]", "[0]")


def test_a_search_over_arithmetic_keeps_the_error_of_the_gradient(tmp_path: Path) -> None:
    """Measured anew by plain torch, at the weights and on the batches that were recorded."""
    words = ["--over", "arithmetic", "--gradient-error", "0.03", "--trials", "9"]
    of, out = asked(tmp_path, *words, job=ARITHMETIC), tmp_path / "out"
    evidence = searched(out, of)
    found = evidence.trial(evidence.found, (0,))
    assert found is not None and 0 < found.error <= 0.03 and len(evidence.trials) == 9
    assert any(trial.verdict == BEYOND for trial in evidence.trials)
    section = tomllib.loads((out / searching.POLICY).read_text())["precision"]
    policy = validate(Policy, section, "found")
    for seed in (0, 1):  # the search's, and the unseen one
        float32 = evidence.trial((RAW,) * len(evidence.places), (seed,))
        tested = evidence.trial(evidence.found, (seed,))
        assert float32 is not None and float32.error == 0 and float32.verdict == WITHIN
        # float32 sums of two programs: n * 2^-24 of at most 784 terms
        expected = error_of(policy, of, out, seed)
        assert tested is not None and tested.error == pytest.approx(expected, abs=1e-4)
        assert tested.verdict == (WITHIN if tested.error <= 0.03 else BEYOND)
    report = search_report(out / searching.FILE)
    assert "accumulators of" in report.sections[0].notes[0]
    assert not no_numbers(report.tables)


def error_of(policy: Policy, of: SearchTarget, out: Path, seed: int) -> float:
    """Of the mean gradient, by plain torch at what the run in float32 of a seed has recorded."""
    squares = []
    recorded = load_recording(out / searching.RUNS / f"job-float32-s{seed}.recording.h5")
    data = small_data()
    for i in recorded.iterations:
        whole = {t.name: torch.from_numpy(t.read()) for t in recorded.tensors
                 if t.iteration == i and t.kind == "weights"}  # fmt: skip
        epoch, inside = divmod(i, 5)  # batches of 24 of 100 samples
        batch = epoch_order(100, seed, epoch)[24 * inside :][:24]
        gradients = []
        for rules in (Policy(), policy):
            model = build_model(of.jobs[0], data)
            model.load_state_dict(whole)
            convert(model, rules)
            given = torch.from_numpy(data.train_x[batch]), torch.from_numpy(data.train_y[batch])
            torch.nn.functional.cross_entropy(model(given[0]), given[1]).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        lost = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
        squares.append(float(lost) ** 2)
    return math.sqrt(np.mean(squares))


def test_an_error_of_unseen_seeds_on_the_wire_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = asked(tmp_path, "--gradient-error", "0.05", "--trials", "6", job=JOB)
    evidence = searched(tmp_path / "out", of)
    unseen = [trial for trial in evidence.trials if trial.seeds == (2,)]
    assert len(unseen) >= 2
    for trial in unseen:
        assert trial.verdict == (WITHIN if trial.error <= 0.05 else BEYOND)
    float32 = evidence.trial((RAW,) * len(evidence.places), (2,))
    assert float32 is not None and float32.error <= 2.0**-23  # one sum and one division
    assert evidence.tested is not None and evidence.tested.seeds == (2,)
    check_error(tmp_path / "out", "job-*-s2.gradients*.h5", evidence, evidence.tested)
    path = tmp_path / "old.h5"
    with monkeypatch.context() as earlier:
        earlier.setattr(evidence_module, "SCHEMA", 1)
        evidence.write(path)
    with pytest.raises(UserError, match="is a search of another version: begin anew"):
        Evidence.read(path)


def test_record_layers_limit_what_is_searched_for_not_what_is_measured(tmp_path: Path) -> None:
    words = ["--over", "arithmetic", "--gradient-error", "0.03", "--trials", "3"]
    job = ARITHMETIC + "[record]\nlayers = ['1']\n"
    evidence = searched(tmp_path / "out", asked(tmp_path, *words, "--test-seeds", "0", job=job))
    assert {place.name for place in evidence.places} == {"1"} and evidence.trials[0].error == 0


@every(("arithmetic", "by_error"), [(False, False), (True, True)])
def test_what_is_not_measured_is_not_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arithmetic: bool, by_error: bool
) -> None:
    """float32 fails with the unseen seed, so that nothing can be compared with it."""
    whole = Trainer.train

    def train(self: Trainer, jobs: list[Job], directory: Path, resume: bool) -> list[Path]:
        if jobs[0].id == "job-float32-s2":
            raise Diverged("not finite")
        return whole(self, jobs, directory, resume)

    monkeypatch.setattr(Trainer, "train", train)
    words = ["--gradient-error" if by_error else "--budget", "0.5", "--trials", "6"]
    words += ["--over", "arithmetic" if arithmetic else "wire"]
    evidence = searched(tmp_path / "out", asked(tmp_path, *words))
    unseen = [trial.verdict for trial in evidence.trials if trial.seeds == (2,)]
    assert unseen[0] == "not finite" and {*unseen[1:]} == {NOT_MEASURED}
    assert evidence.outcome == "no: not measured with unseen seeds 2"
    report = search_report(tmp_path / "out" / searching.FILE)
    assert ("found", evidence.outcome) in report.facts


def test_a_limit_below_the_error_of_float32_is_an_error(tmp_path: Path) -> None:
    of = asked(tmp_path, "--gradient-error", "1e-12", "--trials", "6")
    with pytest.raises(UserError, match=r"float32 itself is beyond: error of the mean \d"):
        searched(tmp_path / "out", of)


@every(
    ("unseen", "says"),
    [
        (WITHIN, "yes: within with unseen seeds 1"),
        (BEYOND, "no: beyond with unseen seeds 1"),
        (NOT_MEASURED, "no: not measured with unseen seeds 1"),
        ("", "yes: within with seeds 0 of the search, no unseen ones were tried"),
    ],
)
def test_unseen_seeds_decide_what_is_found(tmp_path: Path, unseen: str, says: str) -> None:
    places, trials = (layer("a", 5000, 0.1),), []
    for seed, verdict in ((0, WITHIN), (1, unseen)):
        if verdict:
            trials += [Trial((RAW,), (seed,), "x", (97.0,), 9.0, 0.0, WITHIN)]
            trials += [Trial(("e5m10",), (seed,), "x", (95.16,), 8.0, 0.1, verdict)]
    text = dump_toml({"name": "net", "search": {"budget": 1.0, "seeds": [0]}})
    evidence = Evidence(text, places, tuple(trials), ("e5m10",))
    assert evidence.outcome == says and replace(evidence, found=()).outcome == "goes on"
    evidence.write(tmp_path / "s.h5")
    assert ("found", says) in search_report(tmp_path / "s.h5").facts


NO_SEEDS = JOB.replace("seeds = [0, 1]\n", "")
ROWS = JOB + "[[compare]]\nname = 'x'\n[[compare]]\nname = 'y'\n"
DYNAMIC = "loss_scaling = 'dynamic'"
RULED = JOB + "[[precision.rule]]\nlayers='*'\nweights='e4m3'\nupdate='bf16'\n"
ONE_RANK = JOB.replace("virtual_ranks = 2", "")


@every(
    ("words", "job", "says"),
    [
        ("", JOB, "--budget POINTS or --gradient-error SHARE: give one of them"),
        ("--budget 1 --gradient-error 0.1", JOB, "give one of them"),
        ("--budget 0", JOB, "--budget 0: must be above 0"),
        ("--budget -1", JOB, "--budget -1: must be above 0"),
        ("--gradient-error nan", JOB, "--gradient-error nan: must be above 0"),
        ("--budget 1 --trials 5", JOB, "--trials 5: must be 6 or more: 2 are of float32 and uni"),
        ("--budget 1 --trials 2 --test-seeds 0", JOB, "search: --trials 2: must be 3 or more: 2 a"),
        ("--budget 1 --trials 2 --test-seeds -1", JOB, "--test-seeds -1: must be 0 or more"),
        ("--budget 1 --over both", RULED, "precision: a search takes no rule of weights if"),
        (
            "--gradient-error 1 --over both",
            JOB + "loss_scaling='dynamic'",
            "takes a constant batch",
        ),
        (
            "--gradient-error 1 --over both",
            JOB + "[record]\nthin = true\n",
            "record.thin: a search takes false if --gradient-error goes over arithmetic",
        ),
        ("--budget 1", NO_SEEDS, "train.seeds: is missing"),
        ("--budget 1", ROWS, "compare: has rows x, y: a search takes one"),
        ("--budget 1", ONE_RANK, "one rank sends no gradient, nothing can be saved"),
        ("--budget 1", JOB + "[gradient]\naggregator='topk'\n", "takes none or lowbit"),
        ("--budget 1", JOB + "[metric]\nname='loss'\n", "metric.name: a search takes accuracy"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    tmp_path: Path, words: str, job: str, says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        asked(tmp_path, *words.split(), job=job)
