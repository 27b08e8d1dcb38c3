"""docs/tutorials/first_study.md: its files are read, its compressor trains."""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import language
import numpy as np
import pytest
import test_compress
import test_gpu_methods
import test_reducer
import test_throughput
import test_train
from job_page import keys_table
from training import ROOT

from cpdhpc.compress import COMPRESSORS, Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.lab.cli import main
from cpdhpc.lab.train.job import load
from cpdhpc.world.ranks import Loopback

PAGE = (ROOT / "docs" / "tutorials" / "first_study.md").read_text()


def blocks(language: str) -> list[str]:
    """The page's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("job.toml", "mine.toml", "scaling.toml")
    for name, text in zip(names, blocks("toml"), strict=True):
        (tmp_path / name).write_text(text)
    jobs = load(tmp_path / "job.toml")
    assert len(jobs) == 9 and {job.name for job in jobs} == {"float32", "e4m3", "e3m0"}
    site = ["--site", str(tmp_path / "mine.toml")]
    assert main(["study", "plan", str(tmp_path / "scaling.toml"), *site]) == 0
    shown = capsys.readouterr().out
    assert "18 cases" in shown and "`study run`" not in shown
    assert main(["study", "plan", str(tmp_path / "scaling.toml")]) == 0
    shown = capsys.readouterr().out
    assert "9 of 18 cases need several nodes" in shown and "9 of the 18 cases" in PAGE
    assert main(["scripts", *site, "--out", str(tmp_path / "scripts")]) == 0
    assert "--partition=debug" in (tmp_path / "scripts" / "train.sbatch").read_text()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's compressor, in a file outside of the package, with a row of COMPRESSORS."""
    (tmp_path / "mine.py").write_text(blocks("python")[-1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another page's test
    module = import_module("mine")
    monkeypatch.setitem(COMPRESSORS, "mine", module.Mine)
    yield module
    del sys.modules["mine"]


def test_the_compressor_loses_nothing(mine: Any) -> None:
    """What was sent and what is kept is what the gradients were, exactly, on three ranks."""
    (made,) = re.findall(r"GradientReducer\(model, world, (Mine\(.*?\))\)", PAGE)
    assert eval(made, vars(mine)) == mine.Mine("mine", 0.2)
    bucket, state = Bucket(("a", "b"), ((20, 5), (7,))), State(range(3), 3)
    rng = np.random.default_rng(0)
    gradients = [rng.integers(-8, 9, bucket.size).astype(np.float32) for _ in range(3)]
    context = Context(Loopback(3), state)
    mean = mine.Mine(density=0.5).aggregate(gradients, bucket, context).flat
    kept = [state.own(name, "residual", (stop - start,)) for name, start, stop in bucket.segments]
    total = np.concatenate([np.sum(of_layer, axis=0) for of_layer in kept])
    assert 0 < np.count_nonzero(mean) < bucket.size
    # a mean of three is rounded once, so its triple is off by half a unit in the last place
    assert np.abs(3 * mean + total - np.sum(gradients, axis=0)).max() <= 24 * 2.0**-23


def of_compressors() -> Iterator[tuple[str, dict[str, Any]]]:
    """Our tests of all rows of COMPRESSORS, and what they are given but for the row."""
    near = test_compress.NEAR_THE_LARGEST
    yield from (("what_is_not_finite_is_named", {"value": each}) for each in (np.nan, np.inf))
    finite = "finite_values_give_a_finite_mean_or_are_refused"
    yield from ((finite, {"case": case, "kept": True}) for case in near)
    yield "the_configuration_is_frozen_and_reads_back", {}
    yield "no_mean_is_looked_at_twice", {}
    yield "calls_counted_once_give_the_bytes_at_any_number_of_ranks", {}
    yield "rows_that_are_left_out_are_counted", {}
    yield "means_and_memories_have_the_bits_of_the_cpu", {"options": {}, "ranks": 3}
    yield "nan_on_the_gpu_is_named_and_ranks_of_a_process_must_agree", {"options": {}}
    yield "other_arrays_are_refused", {}
    yield "a_plain_loop_adopts_the_reducer", {}
    yield from (("odd_parameters_and_buffers", {"overlap": each}) for each in (False, True))


@pytest.mark.parametrize(("test", "given"), [*of_compressors()])
def test_the_compressor_passes_our_own_tests(
    mine: Any, test: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = test_compress, test_gpu_methods, test_reducer, test_throughput, test_train
    (found,) = (vars(each)[f"test_{test}"] for each in modules if f"test_{test}" in vars(each))
    whole = inspect.unwrap(found)
    takes = inspect.signature(whole).parameters
    row = {"aggregator" if "aggregator" in takes else "name": "mine"}
    whole(**row, **given, **({"monkeypatch": monkeypatch} if "monkeypatch" in takes else {}))


def test_the_page_of_keys_has_those_of_the_compressor(mine: Any) -> None:
    *_, row = keys_table(mine.Mine, ["aggregator"])
    assert row.endswith("| share of the values that are drawn |")


def test_pages_that_are_named_are_there() -> None:
    for page in language.pages():
        for name in re.findall(r"`(docs/[\w./]+\.(?:md|png))`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
        for name in re.findall(r"\]\(([\w./]+\.(?:png|svg))\)", page.read_text()):
            assert (page.parent / name).exists(), f"{page.name}: {name}"
