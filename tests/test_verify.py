"""verify: what is right passes, and faults that are planted are found, named, and survived."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpus import card
from simulated_cupy import simulated
from test_faults import ROOT, needs_mpirun
from training import environment, ran

from cpdhpc import store
from cpdhpc.config import UserError
from cpdhpc.lab.commands.report import compare_files, report
from cpdhpc.lab.verify import exact, speed
from cpdhpc.lab.verify.base import CheckPlace, CheckResult, Ratio
from cpdhpc.lab.verify.pages import verify_report
from cpdhpc.lab.verify.results import FAILED, NOT_RUN, RIGHT, WRONG, CheckRow, Results, joined, read
from cpdhpc.lab.verify.run import CHECKS, planned
from cpdhpc.lab.verify.watch import Outcome
from cpdhpc.ops import composed, cpu, reference
from cpdhpc.world.mpi import World

HELPERS = ROOT / "tests" / "helpers"


def verify(
    out: Path, fault: str, rank: str, checks: str, *further: str, ranks: int = 2
) -> tuple[int, str, Results]:
    """Run it with a fault planted; return the exit status, what was printed, and the file."""
    local = str(ROOT / "slurm" / "mpirun-local")
    given = ["--quick", "--out", str(out), *further]
    done = ran(
        [local, str(ranks), sys.executable, str(HELPERS / "verifying.py"), fault, rank, checks]
        + given,
        env=environment() | {"PYTHONPATH": f"{ROOT}:{HELPERS}"},
    )
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr, read(out)


def statuses(results: Results) -> dict[str, str]:
    return {row.name: row.status for row in results.rows}


@needs_mpirun
def test_what_is_right_passes_on_two_ranks(tmp_path: Path) -> None:
    page = tmp_path / "v.html"
    checks = "machine,ranks,GPUs,links,passes,other collectives,windows,small beside MPI"
    more = ("--html", str(page))
    status, shown, results = verify(tmp_path / "v.h5", "none", "all", checks, *more)
    assert status == 0 and "RIGHT: 8 checks" in shown, shown
    assert set(statuses(results).values()) == {RIGHT} and results.right
    assert results.facts["rank 1"] and results.ratios[0].beside == "mpi"
    assert results.arrays["links: times_s"].shape == (1, 7)
    text = page.read_text()
    assert results.verdict in text and text.count("<img") == 3


FOUND = {  # a fault on rank 1 -> the check that must notice it, and what it must say of which rank
    "wrong code": ("formats of 8 bits", WRONG, "rank 1: encode "),
    "wrong count": ("tiles", WRONG, "rank 1: e4m3, nearest, saturate"),
    "wrong schedule": ("all-reduces", FAILED, "rank 1: allreduce ring: ScheduleError"),
    "wrong result": ("all-reduces", WRONG, "first call"),
    "error": ("windows", FAILED, "rank 1: ZeroDivisionError: planted"),
}


@needs_mpirun
@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found_and_the_rest_goes_on(tmp_path: Path, fault: str) -> None:
    check, status, said = FOUND[fault]
    code, shown, results = verify(tmp_path / "v.h5", fault, "1", f"{check},passes")
    found = {row.name.removesuffix(" on the CPU"): row for row in results.rows}
    assert code == 1 and "WRONG: 1 of 2 checks" in shown, shown
    assert found[check].status == status and found["passes"].status == RIGHT
    assert any(said in line for line in found[check].said), found[check].said
    assert "and is excluded" not in shown


HANGS = {  # a fault on a rank -> what is said of the rank, and that it is not there any more
    ("sleeps", "1"): ("rank 1: did not end within", False),
    ("sleeps", "0"): ("rank 0: did not end within", False),
    ("blocked", "1"): ("rank 1: hangs, and is excluded", True),
    ("blocked", "0"): ("rank 0: hangs, and is excluded", True),
}


@needs_mpirun
@pytest.mark.parametrize(("fault", "rank"), HANGS, ids=map(" ".join, HANGS))
def test_a_rank_that_hangs_is_named_and_the_rest_goes_on(
    tmp_path: Path, fault: str, rank: str
) -> None:
    said, gone = HANGS[fault, rank]
    checks = "passes,windows,other collectives,links"
    code, shown, results = verify(tmp_path / "v.h5", fault, rank, checks, "--limit", "40")
    found = {row.name: row for row in results.rows}
    assert code == 1 and "WRONG: 1 of " in shown, shown
    assert said in found["windows on the CPU"].said[0]
    assert found["other collectives on the CPU"].status == RIGHT, shown
    assert found["links on the CPU"].status == (NOT_RUN if gone else RIGHT), shown
    assert gone == ("is excluded" in shown)


def test_one_rank_goes_on_however_late_it_is(tmp_path: Path) -> None:
    """C holds it for longer than others would wait for it."""
    more = ("--limit", "2")
    code, shown, results = verify(tmp_path / "v.h5", "held", "0", "windows,GPUs", *more, ranks=1)
    assert code == 1 and statuses(results) == {"windows on the CPU": FAILED, "GPUs": RIGHT}, shown


@needs_mpirun
def test_ranks_that_all_hang_end_the_job(tmp_path: Path) -> None:
    more = ("--limit", "4")
    code, shown, results = verify(tmp_path / "v.h5", "blocked", "all", "passes,windows", *more)
    assert code != 0 and "WRONG: all ranks hang in windows on the CPU" in shown, shown
    assert statuses(results) == {"passes on the CPU": RIGHT} and results.ended


@needs_mpirun
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_is_named_and_what_was_found_is_there(tmp_path: Path, rank: str) -> None:
    code, shown, results = verify(tmp_path / "v.h5", "dies", rank, "passes,windows,selection")
    assert code != 0 and f"rank {rank} died in windows on the CPU" in shown, shown
    assert statuses(results) == {"passes on the CPU": RIGHT} and not results.right
    assert f"rank {rank} died in windows on the CPU" in results.verdict


@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_training_compares_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    _, shown, results = verify(tmp_path / "v.h5", "none", "all", "training", ranks=ranks)
    steps = {1: 4, 2: 4, 3: 1}[ranks]  # means of three round, and one step is exact
    assert results.rows[0].status == RIGHT, shown
    assert results.rows[0].counted == 2 * steps * ranks * exact.INPUTS * exact.OUTPUTS


@needs_mpirun
@pytest.mark.parametrize("rank", ["1", "all"])
def test_a_torch_that_cannot_be_imported_is_said(tmp_path: Path, rank: str) -> None:
    checks = "machine,passes,training,beside gloo"
    code, shown, results = verify(tmp_path / "v.h5", "broken torch", rank, checks)
    assert code == 0 and "RIGHT: 2 checks, " in shown, shown
    assert [row.status for row in results.rows] == [RIGHT, RIGHT, NOT_RUN, NOT_RUN]
    assert {row.said for row in results.rows[2:]} == {("torch cannot be imported: planted",)}


@needs_mpirun
def test_a_disk_that_is_full_is_said_and_the_checks_go_on(tmp_path: Path) -> None:
    out, page = tmp_path / "v.h5", tmp_path / "v.html"
    some().write(out, "")  # an older file, which stays
    more = ("--html", str(page))
    code, shown, results = verify(out, "full disk", "all", "passes,windows,selection", *more)
    assert code == 1 and "\nRIGHT: 3 checks" in shown, shown
    for path in (out, page):
        assert f"{path}: cannot be written: No space left on device" in shown
    assert results.rows == some().rows and not page.exists()


@needs_mpirun
def test_a_gpu_that_fails_is_left_alone_and_the_rest_goes_on(tmp_path: Path) -> None:
    checks = "GPUs,passes,sums of integers,selection"
    more = ("--device", "gpu", "--oversubscribe-gpus")
    code, shown, results = verify(tmp_path / "v.h5", "failing gpu", "1", checks, *more)
    found = {row.name: row for row in results.rows}
    assert code == 1, shown
    assert found["passes on the GPU"].status == RIGHT
    failed = found["sums of integers on the GPU"]
    assert failed.status == FAILED and "rank 1: Error: CUDA error 700" in failed.said[0]
    left = found["selection on the GPU"]
    assert left.status == NOT_RUN and "GPU failed in sums of integers" in left.said[0]
    assert found["selection on the CPU"].status == RIGHT


def test_without_a_gpu_that_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    checks = "GPUs,passes,training"
    more = ("--device", "gpu")
    code, shown, results = verify(tmp_path / "v.h5", "no gpu", "all", checks, *more, ranks=1)
    found = {row.name: row for row in results.rows}
    assert code == 1 and found["GPUs"].status == WRONG, shown
    assert found["passes on the GPU"].status == NOT_RUN
    assert found["passes on the CPU"].status == RIGHT == found["training on the CPU"].status


KERNELS = ("formats of 8 bits", "wider formats", "tiles", "sums of integers", "passes", "selection",
           "products", "optimisers", "codes on the host", "NVFP4")  # fmt: skip


def place(device: str = "cpu") -> Any:
    return CheckPlace(None, True, device, device, False)  # type: ignore[arg-type]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], set[str]]:
    """Return what counts the operations of a module that the checks of kernels call."""

    def count(ops: Any) -> set[str]:
        names, found = [n for n in dir(reference) if callable(getattr(ops, n, None))], set[str]()

        def counting(name: str) -> Any:
            before = getattr(ops, name)

            def call(*args: Any, **more: Any) -> Any:
                found.add(name)
                return before(*args, **more)

            return call

        for name in names:
            if getattr(getattr(ops, name), "__module__", "") == ops.__name__:
                monkeypatch.setattr(ops, name, counting(name))
        for name in KERNELS:
            assert not CHECKS[name].run(place()).wrong
        return found

    return count


def test_every_operation_of_the_specification_is_checked(called: Callable[[Any], set[str]]) -> None:
    own = reference.__name__, composed.__name__
    found = {n: getattr(reference, n) for n in dir(reference) if hasattr(cpu, n) and n[0] != "_"}
    functions = {name: getattr(each, "func", each) for name, each in found.items()}
    kernels = {n for n, each in functions.items() if getattr(each, "__module__", "") in own}
    assert {"encode_tiles", "take"} < kernels
    assert kernels - called(cpu) == set()


CHANGED = {  # an operation -> what becomes of its result, and the check that must notice
    "encode": (lambda codes: codes ^ np.uint32(1), "formats of 8 bits"),
    "decode": (lambda x: np.nextafter(x, np.float32(9)), "formats of 8 bits"),
    "pack": (lambda words: words ^ np.uint8(1), "wider formats"),
    "amax_tiles": (lambda bits: bits + np.uint32(1), "wider formats"),
    "decode_tiles": (lambda lost: lost + 1, "tiles"),
    "decode_integers_tiles": (lambda lost: lost + 1, "sums of integers"),
    "chunk_leaders": (lambda places: places + 1, "passes"),
    "select_magnitude": (lambda places: places[::-1].copy(), "selection"),
    "matmul": (lambda x: -x, "products"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_result_of_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, check = CHANGED[name]
    before = getattr(cpu, name)
    monkeypatch.setattr(cpu, name, lambda *given, **more: change(before(*given, **more)))
    assert CHECKS[check].run(place()).wrong


def test_a_changed_result_of_a_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated():
        gpu = import_module("cpdhpc.ops.gpu")
        found = CHECKS["passes"].run(place("gpu"))
        assert found.counted and not found.wrong
        before = gpu.accumulate
        monkeypatch.setattr(gpu, "accumulate", lambda *a, **more: before(*a, **more) ^ 1)
        assert CHECKS["passes"].run(place("gpu")).wrong


@pytest.mark.gpu
def test_a_training_on_the_gpu_has_numpys_bits() -> None:
    with card():
        world = World()
        found = CHECKS["training"].run(CheckPlace(world, True, "gpu", "gpu", False))
        world.free()
    assert found.counted and not found.wrong and not found.not_run


def test_what_is_expected_of_a_gpu_depends_on_it_and_the_format() -> None:
    with simulated():  # of an H100, whose compute capability is 9.0
        assert speed.expected("gpu", "e4m3") is speed.MEASURED["90", "e4m3"]
        assert speed.expected("gpu", "bf16") is speed.CODEC["gpu"]
    for rows in speed.MEASURED.values():
        assert rows.keys() == speed.CODEC["gpu"].keys()


def test_all_codes_of_8_bits_are_there() -> None:
    formats = list(exact.small_formats())
    assert len(formats) == len(set(formats)) and max(each.bits for each in formats) == 8
    named = {each.name for each in formats}
    assert {"e4m3", "e5m2", "e4m3fn", "e2m1fn", "e3m0", "e2m3fn", "e3m2fn"} <= named


def test_what_ranks_say_becomes_one_row() -> None:
    right, wrong = Outcome(CheckResult(3)), Outcome(CheckResult(3, ["a"]))
    waited = Outcome(None, "did not end within 9 s, at x.py:1", left=True, waited=True)
    error = Outcome(None, "ValueError: no, at y.py:2", left=True)
    assert joined({0: right, 1: right}, []) == (RIGHT, ())
    assert joined({0: right, 1: wrong}, []) == (WRONG, ("rank 1: a",))
    status, said = joined({0: waited, 1: error}, [])
    assert status == FAILED and said[0].startswith("rank 1: ValueError")  # the cause comes first
    assert joined({0: waited}, [1])[1][0] == "rank 1: hangs, and is excluded"
    none = Outcome(CheckResult(not_run="no torch"))
    assert joined({0: none, 1: right}, []) == (NOT_RUN, ("no torch",))
    nothing = Outcome(CheckResult())
    assert joined({0: nothing, 1: nothing}, []) == (NOT_RUN, ("nothing was compared",))
    assert joined({0: Outcome(CheckResult(facts={"GPU": "none"}))}, []) == (RIGHT, ())


def some(value: float = 2.0) -> Results:
    results = Results("Verification on 2 ranks", 3, {"hosts": "a a"})
    results.add(
        CheckRow("one", "speed", "what", "cpu", RIGHT, 7, 0.1), CheckResult(facts={"GPU": "none"})
    )
    ratio = Ratio("copy", "memcpy", "cpu", 64, [1.0, 1.5], [value], 0.5, float("inf"), "do that")
    results.add(CheckRow("two", "speed", "what", "gpu", NOT_RUN, 0, 0.0, ("no GPU",)), None)
    results.ratios.append(ratio)
    results.arrays = {f"links: {name}": np.array(values) for name, values in {
        "pairs": [[0, 1], [0, 2], [1, 2]], "bytes": [8, 64], "times_s": [[1e-6, 2e-6]] * 3,
    }.items()}  # fmt: skip
    return results


def test_the_verdict_is_one_line() -> None:
    results = some()
    assert results.verdict == (
        "RIGHT: 1 check, 7 comparisons, 1 not run, 0 of 1 speed outside what is expected"
    )
    assert "1 of 1 speed outside" in some(0.1).verdict and some(0.1).right
    results.add(
        CheckRow("three", "exactness", "what", "cpu", WRONG, 3, 0.1, ("rank 1: bits",)), None
    )
    assert results.verdict.startswith("WRONG: 1 of 2 checks: three: rank 1: bits")
    results.ended = "rank 1 died in four"
    assert results.verdict.startswith("WRONG: rank 1 died in four; 3 of 3 checks done")


def test_files_hold_what_was_found(tmp_path: Path) -> None:
    path, results = tmp_path / "v.h5", some()
    results.rows[0] = replace(results.rows[0], said=("a", "b"))
    results.write(path, "")
    again = read(path)
    assert again.rows == results.rows and again.facts == results.facts
    assert again.verdict == results.verdict and again.right
    assert again.ratios == [r._replace(times_s=[*r.times_s]) for r in results.ratios]
    assert (again.arrays["links: pairs"] == results.arrays["links: pairs"]).all()
    store.write(path, {}, {"kind": "run"})
    with pytest.raises(store.StoreError, match="is no file of verify"):
        read(path)


@pytest.mark.usefixtures("without_figures")
def test_report_shows_files_and_two_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    some().write(a, "")
    some(0.1).write(b, "")
    assert report([a]) == 0
    shown = capsys.readouterr().out
    assert "copy, 64 B" in shown and "0.5 or more" in shown and "no GPU" in shown
    assert compare_files(a, b) == 0
    shown = capsys.readouterr().out
    assert "Verification of a and b" in shown and "1.60" in shown and "0.0800" in shown
    with pytest.raises(UserError, match="--tolerance"):
        compare_files(a, b, tolerance=0.1)


def test_figures_can_be_drawn() -> None:
    from cpdhpc.lab.report.figures import image

    charts = verify_report(some(0.1)).charts
    assert [chart.name for chart in charts] == [
        *("checks", "speeds_beside_memcpy", "links_by_size", "links_rates")
    ]
    assert all(image(chart, "png").startswith(b"\x89PNG") for chart in charts)


def test_the_table_has_a_row_for_each_device() -> None:
    names = [name for name, *_ in planned(CHECKS, "gpu")]
    assert len(names) == len(set(names)) and "tiles on the GPU" in names
    assert not any("GPU" in name for name, _, device in planned(CHECKS, "cpu") if device != "cpu")
    assert [each for each in CHECKS.values() if not each.what] == []
