"""From TOML to cases and batches; what is wrong is said in one line, with a suggestion."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every
from studies import SMALL, small_study, study_file
from training import ROOT

from cpdhpc.config import ConfigError, dump_toml, merge
from cpdhpc.lab.kinds import KINDS
from cpdhpc.lab.kinds.base import Measure
from cpdhpc.lab.study.cases import START_S, batches, case_time_s, expand, load_study, shown
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.site import Site, array_script, arrays, minutes
from cpdhpc.lab.study.spec import Constraint, JobBundles, Study

INPUTS = sorted((ROOT / "inputs").glob("study_*.toml"))


def points(directory: Path, *names: str, **changes: Any) -> list[tuple[Any, ...]]:
    """The factors of all cases."""
    cases = expand(small_study(directory, **changes)).cases
    return [tuple(case.all_factors.get(name) for name in names) for case in cases]


def test_a_product_is_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert points(tmp_path, "nodes", "ppn", "ranks", "size_bytes", "algorithm") == [
        (1, 1, 1, 4096, "ring"),
        (1, 1, 1, 4096, "mpi"),
        (1, 2, 2, 4096, "ring"),
        (1, 2, 2, 4096, "mpi"),
    ]


def test_ranks_are_nodes_times_ppn_or_the_reverse(tmp_path: Path) -> None:
    sweep = {"ranks": [1, 6, 7, 8], "ppn": 4, "algorithm": "ring"}
    assert points(tmp_path, "nodes", "ppn", sweep=sweep) == [(1, 1), (2, 3), (2, 4)]
    study = small_study(tmp_path, sweep=sweep)
    reasons = [reason for _, reason in expand(study).impossible]
    assert reasons == ["7 ranks on 2 nodes of 4 are not equally many on each"]
    sweep = {key: value for key, value in SMALL["sweep"].items() if key != "ranks"}
    path = tmp_path / "nodes.toml"
    path.write_text(dump_toml(SMALL | {"sweep": sweep | {"nodes": [1, 3], "ppn": [1, 2]}}))
    shapes = {(case.nodes, case.ppn, case.ranks) for case in expand(load_study(path)).cases}
    assert shapes == {(1, 1, 1), (1, 2, 2), (3, 1, 3), (3, 2, 6)}


def test_zipped_lists_are_one_axis_and_quotes_keep_a_factor_out(tmp_path: Path) -> None:
    changes = {
        "sweep": {"ranks": [2], "algorithm": "direct"},
        "zip": [{"wire": ["raw", "e4m3"], "value_scaling": ["", "aps"]}],
    }
    names = "wire", "value_scaling", "accumulate"
    assert points(tmp_path, *names, **changes) == [("raw", None, None), ("e4m3", "aps", "float32")]


def test_exclusions_and_constraints_leave_cases_out(tmp_path: Path) -> None:
    sweep = {"size_bytes": [4, "1KiB", "1MiB"], "ranks": [1, 2]}
    excluded = {"algorithm": "mpi", "size_bytes": "1MiB"}
    rules = ["not (algorithm == 'ring' and size_bytes >= 2**20)", "ranks == nodes * ppn"]
    rules += ["ranks in [2, 3] or size_bytes > 1000"]
    found = points(
        tmp_path,
        "ranks",
        "size_bytes",
        "algorithm",
        sweep=sweep,
        exclude=[excluded],
        constraints=rules,
    )
    assert found == [
        (1, 1024, "ring"),
        (1, 1024, "mpi"),
        (2, 4, "ring"),
        (2, 4, "mpi"),
        (2, 1024, "ring"),
        (2, 1024, "mpi"),
    ]


def test_the_weak_rule_gives_each_rank_its_share(tmp_path: Path) -> None:
    sweep = {name: value for name, value in SMALL["sweep"].items() if name != "size_bytes"}  # type: ignore[attr-defined]
    path = tmp_path / "weak.toml"
    rule = {"scaling": "weak", "weak": {"size_bytes": "1KiB"}, "sweep": sweep}
    path.write_text(dump_toml(SMALL | rule))
    found = [(case.ranks, case.factors["size_bytes"]) for case in expand(load_study(path)).cases]
    assert found == [(1, 1024), (1, 1024), (2, 2048), (2, 2048)]


def test_what_is_wrong_in_a_job_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("model = { name = 'mlp', hiden = 3 }\n")
    path = tmp_path / "t.toml"
    path.write_text("kind = 'train'\ntrain.job = 'other.toml'\nsweep.'train.batch' = [8]\n")
    says = r"nothing to measure: other\.toml: job: unknown key model\.hiden: did you mean hidden"
    with pytest.raises(ConfigError, match=says):
        expand(load_study(path))


def test_seeds_of_an_inline_job_give_way_to_the_factor(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    text = "kind = 'train'\n[job.train]\nseeds = [0]\nbatch = 8\n[sweep]\nranks = [1]\n"
    path.write_text(text + "seed = [1, 2]\n")
    study = load_study(path)
    assert study.job == {"train": {"batch": 8}}
    assert [case.factors for case in expand(study).cases] == [{"seed": 1}, {"seed": 2}]
    path.write_text(text + "[[zip]]\nseed = [3, 4]\n'train.batch' = [8, 16]\n")
    assert [case.factors["seed"] for case in expand(load_study(path)).cases] == [3, 4]
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"job\.train\.seeds: seeds of a study are its factor"):
        load_study(path)


def test_factors_of_a_job_are_its_keys(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        "[train]\nbatch = 8\nseeds = [4, 5]\n[model]\nname = 'mlp'\n[[compare]]\nname = 'a'\n"
    )
    path = tmp_path / "t.toml"
    path.write_text(
        "kind = 'train'\nconstraints = [\"gradient.wire != 'e5m2'\"]\n[train]\njob = 'job.toml'\n"
        "[sweep]\nseed = [1, 2]\n[[zip]]\ngradient.aggregator = ['none', 'lowbit', 'lowbit']\n"
        "'gradient.wire' = ['', 'e4m3', 'e5m2']\n"
    )
    study = load_study(path)
    assert study.job == {"train": {"batch": 8}, "model": {"name": "mlp"}}
    assert [dict(case.factors) for case in expand(study).cases] == [
        {"gradient.aggregator": "none", "seed": 1},
        {"gradient.aggregator": "lowbit", "gradient.wire": "e4m3", "seed": 1},
        {"gradient.aggregator": "none", "seed": 2},
        {"gradient.aggregator": "lowbit", "gradient.wire": "e4m3", "seed": 2},
    ]


def test_ids_say_what_decides_and_nothing_else(tmp_path: Path) -> None:
    def ids(**changes: Any) -> list[str]:
        return [case.id for case in expand(small_study(tmp_path, **changes)).cases]

    first = ids()
    assert len(set(first)) == 4 and first[0].startswith("1x1-4KiB-ring-raw-")
    turned = dict(reversed(SMALL["sweep"].items()))  # type: ignore[attr-defined]
    path = tmp_path / "turned.toml"
    path.write_text(dump_toml({"sweep": turned} | {k: v for k, v in SMALL.items() if k != "sweep"}))
    again = load_study(path)
    assert {case.id for case in expand(again).cases} == set(first)
    numbers = [[case.id for case in batch.cases] for batch in batches(again, expand(again).cases)]
    study = small_study(tmp_path)
    assert numbers == [[c.id for c in b.cases] for b in batches(study, expand(study).cases)]
    same = ({"name": "other"}, {"run": {"bundle": "nested"}}, {"measure": {"seed": 3}})
    assert all(ids(**change) == first for change in same)
    others = ids(measure={"max_repeats": 7}), ids(sweep={"size_bytes": ["8KiB"]})
    assert not {each for other in others for each in other} & set(first)


def test_two_ways_to_say_the_same_are_one_case(tmp_path: Path) -> None:
    sweep = {
        "algorithm": ["ring"],
        "wire": ["raw", "e4m3"],
        "accumulate": ["", "grow"],
        "value_scaling": ["", "tile"],
    }
    assert len(expand(small_study(tmp_path, sweep=sweep)).cases) == 4


def test_batches_by_bundle(tmp_path: Path) -> None:
    def shapes(**run: Any) -> list[tuple[int, int, int]]:
        study = small_study(tmp_path, run=run)
        found = batches(study, expand(study).cases)
        assert [batch.number for batch in found] == list(range(len(found)))
        each_s = sum(case_time_s(study, case) for batch in found for case in batch.cases)
        assert sum(batch.time_s for batch in found) == pytest.approx(len(found) * START_S + each_s)
        return [(batch.nodes, batch.ppn, len(batch.cases)) for batch in found]

    assert shapes(bundle="case") == [(1, 1, 1), (1, 1, 1), (1, 2, 1), (1, 2, 1)]
    assert shapes(bundle="shape") == [(1, 1, 2), (1, 2, 2)]
    assert shapes(bundle="nested") == [(1, 2, 4)]
    assert shapes(bundle="shape", batch_time_s=START_S + 0.1) == shapes(bundle="case")


def test_a_job_may_take_what_measure_allows(tmp_path: Path) -> None:
    """Calls that are much slower than the estimate end by max_time_s and a visit, not before."""

    def limits(**changes: Any) -> list[tuple[float, float]]:
        study = small_study(tmp_path, **changes)
        return [(each.time_s, each.limit_s) for each in batches(study, expand(study).cases)]

    for (about_s, limit_s), cases in zip(limits(), (2, 2), strict=True):
        assert about_s < START_S + 2 and START_S + cases * 20 < limit_s < START_S + cases * 21
    assert all(limit_s == 50 for _, limit_s in limits(run={"batch_time_s": 50.0}))
    alone = limits(run={"batch_time_s": 1.0})
    assert len(alone) == 4 and all(limit_s > START_S + 20 for _, limit_s in alone)
    for about_s, limit_s in limits(run={"case_time_s": 7.0}):
        assert about_s == limit_s == START_S + 14
    assert all(about_s <= limit_s for about_s, limit_s in limits(measure={"max_time_s": 1e-9}))
    [batch] = batches(study := small_study(tmp_path, sweep={"ranks": 2}), expand(study).cases)
    [array] = arrays([batch], Site())
    assert f"--time={minutes(batch.limit_s, Site())}\n" in array_script(
        array, Site(), study, tmp_path
    )


def test_what_cannot_work_is_impossible_with_a_reason(tmp_path: Path) -> None:
    sweep = {
        "algorithm": ["ring", "mpi"],
        "wire": ["raw", "e4m3", "int8"],
        "accumulate": ["", "kahan"],
        "ranks": [2],
    }
    expansion = expand(small_study(tmp_path, sweep=sweep))
    assert len(expansion.cases) == 4
    assert sorted({reason for _, reason in expansion.impossible}) == [
        "mpi has no wire e4m3, only raw",
        "mpi has no wire int8, only raw",
        "ring: accumulate='kahan': known are exact",
        "ring: accumulate='kahan': known are exact, grow, requantise",
    ]


ERRORS = {
    "kind='alreduce': did you mean allreduce?": {"kind": "alreduce"},
    "unknown key measure.repeats: did you mean min_repeats or max_repeats?": {
        "measure": {"repeats": 3}
    },
    "measure.min_repeats=6 is more than max_repeats=5": {"measure": {"max_repeats": 5}},
    "sweep.algoritm: unknown factor of kind allreduce: did you mean algorithm?": {
        "sweep": {"algoritm": ["ring"]}
    },
    "sweep.algorithm='rign': did you mean ring or biring?": {"sweep": {"algorithm": ["rign"]}},
    "sweep.wire='e9m9': FloatFormat: exp=9": {"sweep": {"wire": ["e9m9"]}},
    "sweep.value_scaling='static:x': known are none, static:K": {
        "sweep": {"value_scaling": ["static:x"]}
    },
    "sweep.algorithm: is empty: a factor needs a value": {"sweep": {"algorithm": []}},
    "sweep.ranks=0: should be 1 or more": {"sweep": {"ranks": [0]}},
    "sweep.ranks='two': should be an integer": {"sweep": {"ranks": ["two"]}},
    "sweep.size_bytes='4kB': 4kB: must be a number, with one of B": {
        "sweep": {"size_bytes": ["4kB"]}
    },
    "sweep.size_bytes='': must be a number, with one of B": {"sweep": {"size_bytes": [""]}},
    "sweep.'': unknown factor of kind allreduce": {"sweep": {"": [1]}},
    "measure.max_time_s=1e+300: should be less than or equal to 1000000000": {
        "measure": {"max_time_s": 1e300}
    },
    "run.batch_time_s=1e+300: should be less": {"run": {"batch_time_s": 1e300}},
    "run.case_time_s=1e+300: should be less": {"run": {"case_time_s": 1e300}},
    "sweep.size_bytes=6: should be a positive multiple of 4 bytes": {"sweep": {"size_bytes": [6]}},
    "sweep: nodes and ranks: give one of them": {"sweep": {"nodes": [1]}},
    "zip 1: lists should be of one length: wire has 1, accumulate has 2": {
        "zip": [{"wire": ["raw"], "accumulate": ["", "float32"]}]
    },
    "sweep: algorithm is given twice": {"zip": [{"algorithm": ["ring"]}]},
    "exclude 1.wires: unknown factor of kind allreduce: did you mean wire?": {
        "exclude": [{"wires": "raw"}]
    },
    "base.algorithm='openmpi': did you mean mpi?": {"base": {"algorithm": "openmpi"}},
    "constraints: rank < 3: unknown factor rank: did you mean ranks?": {
        "constraints": ["rank < 3"]
    },
    "constraints: ranks = 3: compare with ==": {"constraints": ["ranks = 3"]},
    "constraints: ranks <: is no expression: allowed are comparisons, and, or": {
        "constraints": ["ranks <"]
    },
    "constraints: 9**9**9 > 1: is too large to work out: allowed are comparisons": {
        "constraints": ["9**9**9 > 1"]
    },
    "constraints: ranks + 1: is 2: should be true or false": {"constraints": ["ranks + 1"]},
    "constraints: ranks < 'a': ": {"constraints": ["ranks < 'a'"]},
    "constraints: open('x'): allowed are comparisons, and, or": {"constraints": ["open('x')"]},
    "scaling='weak': [weak] is needed": {"scaling": "weak"},
    "scaling='strong': [weak] is needed with scaling='weak', and only there": {
        "weak": {"size_bytes": 4}
    },
    "weak.size_bytes: is in the sweep too": {"scaling": "weak", "weak": {"size_bytes": 4}},
    "weak.wire: should be a factor that grows with the ranks": {
        "scaling": "weak",
        "weak": {"wire": "raw"},
    },
    "kind='allreduce': has no job": {"train": {"job": "x.toml"}},
    "kind='train': needs [train] job": {"kind": "train"},
    "exclude and constraints leave no case": {"constraints": ["ranks > 2"]},
    "nothing to measure: 5 ranks on 2 nodes of 4": {"sweep": {"ranks": [5], "ppn": 4}},
}


@every("says", ERRORS)
def test_what_is_wrong_is_said(says: str, tmp_path: Path) -> None:
    path = study_file(tmp_path, **ERRORS[says])
    with pytest.raises(ConfigError) as caught:
        expand(load_study(path))
    assert says in str(caught.value)
    assert str(path) in str(caught.value) or "nothing to measure: 5 ranks" in says


JOBS = {  # what only the job's own models know: (the study, its impossible cases' reasons)
    "kind = 'train'\n[job.train]\nbatch = 8\n[sweep]\n'gradient.aggregator' = ['lowbit', 'none']\n"
    "'gradient.wire' = ['', 'e4m3', 'zzz']": [
        "job: gradient.wire='zzz': known are eXmY",
        "job: unknown key gradient.wire: known are",
    ],
    "kind = 'train'\n[job.train]\nimage_grid = [1, 2]\n[sweep]\nranks = [1, 2]\nppn = 2\n"
    "'model.name' = ['mlp', 'lennet']\n'train.epochs' = [0, 2]": [
        "job: model.name='lennet': did you mean lenet",
        "job: train.epochs=0: should be greater than or equal to 1",
        "train.image_grid=[1, 2]: 1 ranks are no multiple of its ranks",
    ],
    "kind = 'train'\n[job.data]\nname = 'digits'\n[sweep]\nranks = [1, 2]\nppn = 2\n"
    "'controller.name' = ['schedule', 'noise_scale']": [
        "case: controller.name='noise_scale': 1 rank: noise is measured by differences between"
    ],
    "kind = 'autoencoder'\n[sweep]\nimage = 20\nmaps = 1\nchannels = [1, 2]": [
        "job: data.channels=2: should be 1 or 3"
    ],
}


@every("text", JOBS)
def test_a_plan_asks_the_models_of_the_job(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    found = expand(load_study(path))
    reasons = {reason for _, reason in found.impossible}
    for says in JOBS[text]:
        assert any(reason.startswith(says) for reason in reasons), (says, reasons)
    assert all(any(reason.startswith(says) for says in JOBS[text]) for reason in reasons), reasons
    for case in found.cases:
        assert case.factors.get("gradient.wire") != "zzz"


def test_an_empty_sweep_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    for text, says in {
        "": r"x.toml: sweep: is empty: it needs a list for each factor that varies",
        "[sweep]\nranks = 2": r"x.toml: sweep.size_bytes: is missing \(float32 data of a rank\)",
    }.items():
        path.write_text(f"kind = 'allreduce'\n{text}\n")
        with pytest.raises(ConfigError, match=says):
            load_study(path)
    with pytest.raises(ConfigError, match=r"gone.toml: cannot be read: No such file"):
        load_study(tmp_path / "gone.toml")
    path.write_text("kind = 'train'\n[train]\njob = 'gone.toml'\n[sweep]\nseed = 1\n")
    with pytest.raises(ConfigError, match=r"gone.toml: cannot be read: No such file"):
        load_study(path)
    path.write_text("kind = 'train'\n[job]\ntrain = 3\n[sweep]\nranks = [1, 2]\n")
    with pytest.raises(ConfigError, match="nothing to measure: job: train=3: should be a table"):
        expand(load_study(path))


def test_constraints_know_no_more_than_factors() -> None:
    assert Constraint("gradient.wire == 'e4m3'").holds({"gradient.wire": "e4m3", "ranks": 1})
    for text in ("().__class__", "ranks.__class__", "(lambda: 1)()", "9**9**9 > 1"):
        with pytest.raises(ConfigError, match="constraints: "):
            Constraint(text).holds({"ranks": 1})


@every("path", INPUTS)
def test_examples_freeze_to_themselves(path: Path, tmp_path: Path) -> None:
    study = load_study(path)
    expansion = expand(study)
    assert not expansion.impossible
    folder = Folder(tmp_path / "x")
    folder.prepare(study)
    assert folder.study() == study and folder.study().hash == study.hash
    assert {case.id for case in expand(folder.study()).cases} == {c.id for c in expansion.cases}
    assert max(case.ranks for case in expansion.cases) <= 4
    assert merge({}, study.sweep)


def test_the_page_names_every_key_and_default() -> None:
    page = (ROOT / "docs" / "reference" / "studies.md").read_text()
    for name in Study.model_fields:
        assert f"`{name}`" in page or f"`[{name}]`" in page or f"`[[{name}]]`" in page, name
    for section in (Measure, JobBundles):
        for name, field in section.model_fields.items():
            (row,) = [
                line for line in page.splitlines() if re.match(rf"\| [^|]*`{name}`[^|]* \|", line)
            ]
            whole = isinstance(field.default, float) and field.default.is_integer()
            default = int(field.default) if whole else field.default
            assert default is None or str(default) in row, name
    for kind in ("allreduce", "codec"):
        assert all(f"`{name}`" in page for name in KINDS[kind].factors)


def test_the_id_of_a_case_never_changes(tmp_path: Path) -> None:
    """Files and resumed studies go by it: the readable part, then 8 digits of what decides."""
    first, *_ = expand(small_study(tmp_path)).cases
    assert first.id == "1x1-4KiB-ring-raw-6aa3f402"
    path = tmp_path / "one.toml"
    sweep = {key: value for key, value in SMALL["sweep"].items() if key != "ranks"}
    path.write_text(dump_toml(SMALL | {"sweep": sweep}))
    assert {case.id[:8] for case in expand(load_study(path)).cases} == {"1x2-4KiB"}
    assert [shown(value, "byte") for value in (1, 1023, 1024, 3 << 20)] == [
        *("1B", "1023B", "1KiB", "3MiB")
    ]


def test_no_case_ends_below_its_least_repeats(tmp_path: Path) -> None:
    """Though its calls take longer than max_time_s, and the estimate of its time says so."""
    limits = {"min_repeats": 6, "max_repeats": 60, "max_time_s": 1e-9}
    study = small_study(tmp_path, measure=limits)
    case = expand(study).cases[0]
    for n, done in ((5, False), (6, True)):
        assert study.measure.is_over(n, 1.0, [np.ones(n)]) == done
    six = small_study(tmp_path, measure=limits | {"max_repeats": 6, "max_time_s": 100.0})
    assert case_time_s(study, case) == pytest.approx(case_time_s(six, case), rel=0.1)
