"""Halo benchmark, pictures of plans and the kind "halo", as far as one process can see."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from every import every

from cpdhpc.config import ConfigError, UserError, among
from cpdhpc.darray.layout import Box, Layout, balanced_grid
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.darray.windows import MODES
from cpdhpc.lab.bench.halo import ALL_WAYS, USUAL, settings_of, usual
from cpdhpc.lab.cli import main
from cpdhpc.lab.darray_show import CUT, colours_of, parts_of, spec_of
from cpdhpc.lab.kinds import KINDS
from cpdhpc.lab.kinds import halo as halo_kind
from cpdhpc.lab.kinds.flags import names
from cpdhpc.lab.kinds.halo_cases import ACCUMULATE, EXCHANGE, WAYS, HaloCase, given_and_expected
from cpdhpc.world.ranks import Loopback

PADS = {"zero": "constant", "wrap": "wrap", "reflect": "reflect", "edge": "edge"}


@every(("mode", "dtype"), list(product(PADS, ("float32", "int8"))))
def test_what_is_wanted_is_what_numpy_pads(mode: str, dtype: str) -> None:
    raw = {"shape": [5, 4], "halo": [7, [0, 2]], "boundary": [mode, "wrap"], "trail": [3]}
    spec = spec_of(raw | {"dtype": dtype}, "x")
    windows = spec.geometry()
    plan = WindowPlan(Loopback(), windows.layout, windows.boxes[0], spec.modes)
    x, expected = given_and_expected(EXCHANGE, plan, spec)
    padded = np.pad(x, ((7, 7), (0, 0), (0, 0)), PADS[mode])  # type: ignore[call-overload]
    np.testing.assert_array_equal(expected, np.pad(padded, ((0, 0), (0, 2), (0, 0)), "wrap"))
    y, total = given_and_expected(ACCUMULATE, plan, spec_of(raw | {"dtype": "int64"}, "x"))
    # <E x, y> = <x, E^T y>, E x without what is filled
    inner = (expected.astype(np.int64) * y).sum()
    assert inner == (x.astype(np.int64) * total).sum()
    np.testing.assert_array_equal(plan.exchange(x), expected)


def test_a_wrong_result_is_noticed() -> None:
    out, wanted = np.zeros(5), np.arange(5.0)

    def case(wrong: float) -> HaloCase:
        def run() -> None:
            out[:] = wanted
            out[3] += wrong

        return HaloCase("exchange", "alltoallw", run, lambda: None, out, wanted)

    case(0).check(Loopback())
    with pytest.raises(ArithmeticError, match="exchange by alltoallw: 1 values are wrong"):
        case(1).check(Loopback())


@every("ranks", [1, 2, 6])
@every("name", USUAL)
def test_usual_settings_fit_any_number_of_ranks(name: str, ranks: int) -> None:
    windows = usual(name, ranks, {}).spec.geometry()
    assert windows.layout.ranks == ranks
    assert {box.shape for box in windows.layout.owners} == {USUAL[name].block}


def test_grids_are_balanced() -> None:
    grids = {1: [1, 1], 2: [1, 2], 6: [2, 3], 12: [3, 4], 7: [1, 7]}
    assert {n: balanced_grid(n, 2) for n in grids} == grids
    assert balanced_grid(24, 3) == [2, 3, 4]


def test_options_that_do_not_fit_are_named() -> None:
    from argparse import ArgumentParser

    from cpdhpc.lab.bench import halo as bench

    parser = ArgumentParser()
    bench.add_arguments(parser)
    wrong = {
        "--shape 8,8 --procs 3,1": "--procs: is for 3 ranks, here are 2",
        "--shape 8,x": "--shape 8,x: must be integers",
        "--shape 8,8 --boundary mirror": "boundary='mirror': known are constant:VALUE, edge",
        "--shape 8,8 --wire e4m3 --dtype float64": "takes dtype float32, not float64",
    }
    for words, message in wrong.items():
        with pytest.raises(UserError, match=message):
            settings_of(parser.parse_args(words.split()), 2)
    (given,) = settings_of(parser.parse_args(["--shape", "8,6", "--halo", "1:2,0"]), 2)
    assert [str(box) for box in given.spec.geometry().boxes] == ["[0:6, 0:6]", "[3:8, 0:6]"]
    with pytest.raises(UserError, match=r"^pigeon: known are alltoallw, cpdhpc"):
        names(among(ALL_WAYS), ";")("cpdhpc;pigeon")


@every("cells", [1, 3, 10, 1000])
def test_parts_of_a_box_are_small_and_together_the_box(cells: int) -> None:
    box = Box((-1, 2, 0), (3, 7, 6))
    count = np.zeros(box.shape, int)
    for part in box.parts(cells):
        assert 0 < part.size <= cells
        count[part.slices(box.start)] += 1
    assert (count == 1).all()
    assert not list(Box((0, 3), (4, 3)).parts(5))


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["darray", "show", *words.split()]) == 0
    return capsys.readouterr().out


def test_show_prints_the_table_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("--shape 12,16 --procs 2,3 --halo 1", capsys)
    assert "22 messages of 352 bytes in all; at most 5 neighbours and 76 bytes per rank" in out
    assert "rank 1: owns [0:6, 6:11], window [-1:7, 5:12]" in out
    assert "interior: the cells of one box of the window, halo too, that waits for no" in out
    out = shown("--shape 12 --procs 3 --halo 0:2 --rank 1 --trail 3,96", capsys)
    assert "window [4:10]" in out and "float32 x 288" in out
    out = shown("--shape 9,9 --procs 3,3 --rank 0 --halo 4 --boundary none,wrap", capsys)
    assert "window [0:7, -4:7]" in out


def test_show_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "plan.png"
    words = "--shape 4,4 --procs 2,2 --halo 1:0,3 --boundary constant:2,reflect"
    assert "picture: " in shown(f"{words} --png {png}", capsys)
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) > 300
    from matplotlib.image import imread

    colours = (imread(png) * 255).astype(np.uint8).view(np.uint32)
    assert len(np.unique(colours)) > 20  # something is drawn


@every(
    ("words", "message"),
    [
        ("--halo 1", "needs --shape"),
        ("--shape 4,4,4 --png x.png", "draws plans of 2 axes, this one has 3"),
        ("--shape 4,4 --rank 1", "--rank 1: must be 0..0"),
        ("--shape 4,4 --halo 1,2,3", "needs a number, 0 or more, or one or two for each axis"),
        ("--shape 4,4 --png nowhere/x.png", "nowhere is no directory"),
        ("--shape 900,900 --procs 300,300", "--procs 300,300: 90000 ranks: at most 4096 are"),
    ],
)
def test_show_says_what_does_not_go(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["darray", "show", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_pictures_show_each_cell_of_a_window_once_and_neighbours_apart() -> None:
    spec = spec_of({"shape": [9, 9], "procs": [3, 3], "halo": [4, 11], "boundary": "reflect"}, "x")
    windows = spec.geometry()
    for rank, window in enumerate(windows.boxes):
        count = np.zeros(window.shape, int)
        for part in parts_of(windows, rank):
            count[part.box.slices(window.start)] += 1
            assert part.beyond != windows.layout.domain.contains(part.box)
        assert (count == 1).all()
    colours = np.array(colours_of(windows.layout.owners)).reshape(3, 3)
    assert len(np.unique(colours)) == 8
    assert len(set(colours_of(Layout.grid((12, 16), (2, 3)).owners))) == 6
    for step in (slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1)):
        assert (colours[step[0]] != colours[step[1]]).all()
        assert (colours[:, step[0]] != colours[:, step[1]]).all()


def test_names_of_the_kind_are_those_of_the_benchmark() -> None:
    assert (*halo_kind.OURS, *halo_kind.BY_MPI) == ALL_WAYS
    assert tuple(WAYS) == halo_kind.BY_MPI
    parse = KINDS["halo"].factors["boundary"].parse
    assert [parse(mode) for mode in (CUT, *MODES)] == [halo_kind.CUT, *MODES]
    assert all(np.dtype(name).itemsize == size for name, size in halo_kind.BYTES.items())


def test_what_cannot_be_measured_is_refused() -> None:
    kind = KINDS["halo"]
    given = {name: factor.default for name, factor in kind.factors.items()} | {"rows": 4}
    assert kind.used(given) == {name: given[name] for name in given if name != "device"}
    wrong = {
        "alltoallw has no wire e4m3": {"way": "alltoallw", "wire": "e4m3"},
        "packed cannot show cells as edge": {"way": "packed", "boundary": "edge"},
        "takes float32, not int8": {"wire": "e4m3", "dtype": "int8"},
        "cannot be checked": {"wire": "e4m3", "boundary": "edge", "transfer": "accumulate"},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            kind.used(given | changes)
    assert kind.fits({}, kind.used(given), 5) == "4 rows are fewer than 5 ranks"
    with pytest.raises(ConfigError):
        kind.factors["wire"].parse("int8")
