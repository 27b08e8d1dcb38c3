"""Replay of recordings: products are those of torch's layers, sums those of training; the page."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from matplotlib import rc_context
from matplotlib.colors import to_rgba
from studies import no_numbers
from training import ROOT

from cpdhpc import store
from cpdhpc.collectives.allreduce import simulate
from cpdhpc.config import ConfigError, UserError
from cpdhpc.formats import Cast, parse_format
from cpdhpc.lab.cli import main, parser
from cpdhpc.lab.precision.measures import (
    OUTPUTS,
    PRODUCTS,
    Question,
    _Layer,
    _patches,
    error,
    replay,
    rounded,
)
from cpdhpc.lab.report.figures import NO_VALUE, NORMAL, SETTINGS, Map, draw
from cpdhpc.lab.report.other_files import replay_report
from cpdhpc.lab.report.tables import Report
from cpdhpc.torch.precision.recorder import GEOMETRY, Recorder
from cpdhpc.torch.precision.recording import load
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

NN = torch.nn


def record(path: Path, **settings: Any) -> None:
    """Two iterations of four ranks: a convolution, a norm, a linear layer."""
    torch.manual_seed(0)
    convolution = NN.Conv1d(2, 4, 3, padding=1)
    model = NN.Sequential(convolution, NN.GroupNorm(2, 4), NN.Flatten(), NN.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model, Loopback(4))
    with Recorder(model, path, reducer, every=1, count=2, **settings) as recorder:
        for _ in range(2):
            for rank in range(4):
                reducer.begin(rank)
                optimizer.zero_grad()
                model(torch.randn(5, 2, 6)).square().sum().backward()
                reducer.stash(rank)
            mean = reducer.reduce()
            optimizer.step()
            recorder.step(mean)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "r.h5"
    record(path)
    return path


CONVOLUTIONS: list[tuple[type[NN.Module], dict[str, Any], tuple[int, ...]]] = [
    (NN.Conv1d, {"stride": 2, "padding": 2, "padding_mode": "reflect"}, (9,)),
    (NN.Conv2d, {"padding": "same", "dilation": 2, "groups": 2}, (6, 5)),
    (NN.Conv2d, {"stride": (2, 1), "padding": (1, 0), "padding_mode": "circular"}, (6, 5)),
    (NN.Conv2d, {"padding": "valid", "padding_mode": "replicate"}, (4, 4)),
    (NN.Conv3d, {"padding": 1, "padding_mode": "replicate"}, (4, 3, 3)),
    (NN.Linear, {}, ()),
]


@every(("kind", "how", "space"), CONVOLUTIONS)
def test_products_are_those_of_layers(kind: Any, how: dict[str, Any], space: tuple[int, ...]):
    """In float64: what the layer gives without bias, and gradients by autograd."""
    torch.manual_seed(1)
    layer = kind(4, 6, *([3] if space else []), bias=False, **how).double()
    x = torch.randn(2, 4, *space, dtype=torch.float64, requires_grad=True)
    given = layer(x)
    left = torch.randn_like(given)
    _, by_weight = torch.autograd.grad(given, [x, layer.weight], left)
    geometry = {name: getattr(layer, name) for name in GEOMETRY if space}
    held = {"activations": x, "errors": left, "weights": layer.weight}
    of = _Layer({"type": kind.__name__, **geometry}, lambda name: held[name].detach().numpy())
    groups = geometry.get("groups", 1)
    outputs = np.moveaxis(given.detach().numpy()[:, : 6 // groups], 1, -1).reshape(-1, 6 // groups)
    np.testing.assert_allclose(of.entered @ of.weights.T, outputs, rtol=1e-12, atol=1e-12)
    expected = by_weight.numpy()[: 6 // groups].reshape(6 // groups, -1)
    np.testing.assert_allclose(of.left.T @ of.entered, expected, rtol=1e-12, atol=1e-12)
    # Of patches: each is the gradient of what one place sees; together that of x.
    if kind is NN.Conv1d:
        seen = torch.from_numpy(_patches(x.detach().numpy(), of.layer)).requires_grad_()
        (seen @ layer.weight.reshape(6, -1).T).backward(torch.from_numpy(of.left))
        np.testing.assert_allclose(of.left @ of.weights, seen.grad.numpy(), rtol=1e-12)
    for name, product in PRODUCTS.items():
        a, b = product(of)
        assert len(a) <= OUTPUTS >= b.shape[1] and a.shape[1] == b.shape[0], name


def test_answers_are_those_of_the_measures(file: Path):
    recorded = load(file)
    asked = Question(("e4m3", "e5m2"), ("none", "aps"), (1, 2, 4, 8), ("e5m10",))
    answers = replay(recorded, asked)
    groups = {name: {n: v.data for n, v in of.items()} for name, of in answers.groups.items()}
    of, tensor = groups["rounding"], next(t for t in recorded.tensors if t.kind == "errors")
    row = of["tensor"].tolist().index(f"errors {tensor.name}")
    done = rounded(tensor.read(), Cast(parse_format("e5m2")), "aps")
    assert of["relative_error"][row, 0, 1, 1] == error(done.values, tensor.read()).relative
    assert of["underflowed"][row, 0, 1, 1] == done.underflowed / done.nonzero
    counts = groups["exponents"]
    total = counts["count"][row, 0].sum() + counts["zeros"][row, 0] + counts["subnormals"][row, 0]
    assert total == np.prod(tensor.shape)
    # Sums: each layer begins on a tile, as in a bucket of training.
    gradients = [t.read() for t in recorded.tensors if t.kind == "gradients" and not t.iteration]
    tiled = [np.pad(g.reshape(4, -1), ((0, 0), (0, -g[0].size % 1024))) for g in gradients]
    xs = list(np.concatenate(tiled, axis=1))
    found = simulate(xs, "e4m3", "ring", "none")
    expected = error(found, np.sum(xs, 0, np.float64)).relative
    sums = groups["sums"]
    way = sums["way"].tolist().index("ring, requantise")
    assert sums["ranks"].tolist() == [2, 4]
    assert sums["relative_error"][0, 0, 0, way, 1] == pytest.approx(expected, rel=1e-12)
    assert "sums over 8 ranks: gradients of 4 were recorded" in answers.left_out
    assert "sums over 1 rank: nothing is added" in answers.left_out
    products = groups["products"]
    assert products["terms"][:, 0].tolist() == [6, 4, 120, 24, 3, 20]
    assert (
        "forward of 1: a layer of type GroupNorm has no products that are known" in answers.left_out
    )
    ascending, *_, kahan = products["relative_error"][2, 0, 0]  # of 120 terms
    assert 0 < 2 * kahan < ascending


@pytest.mark.usefixtures("without_figures")
def test_the_command_writes_a_page_without_torch_or_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Tables, CSV and HDF5 that report shows again; every figure is drawn."""
    file = tmp_path / "r.h5"
    record(file, layers=("3",), tensors=("gradients", "weights", "activations"))
    for module in ("torch", "mpi4py"):
        monkeypatch.setitem(sys.modules, module, None)
    page, out = tmp_path / "page.html", tmp_path / "out.h5"
    asked = ["--formats", "e4m3", "--scalings", "none", "--accumulates", "e5m10", "--ranks", "4"]
    given = ["precision", "replay", str(file), *asked, "--out", str(out)]
    assert main([*given, "--html", str(page), "--csv", str(tmp_path / "csv")]) == 0
    said = capsys.readouterr().out
    assert "Precision of recorded tensors" in said and "left out" in said
    text = page.read_text()
    for title in ("Where the values are", "Rounding once", "Sums over ranks", "Products of layers"):
        assert text.count(f"<h2>{title}</h2>") == 1
    assert text.count("<img ") == 3 + 1 + 2  # kinds, a map, sums and products
    assert {p.name for p in (tmp_path / "csv").iterdir()} == {
        "exponents.csv", "rounding.csv", "sums.csv", "products.csv"
    }  # fmt: skip
    assert main(["report", str(out), "--quiet"]) == 0
    groups, attributes = store.read(out)
    groups["exponents"]["count"] *= 1000  # as of large tensors
    groups["products"]["terms"] *= 1000
    monkeypatch.setattr(store, "read", lambda path: (groups, attributes))
    assert not no_numbers(replay_report(out).tables)


def test_the_page_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The commands are known, the first one run on two big batches; the script runs."""
    page = (
        (ROOT / "docs" / "reference" / "precision.md")
        .read_text()
        .partition("## What passes through")[2]
    )
    commands = [line.split()[3:] for line in page.splitlines() if line.startswith("    python -m")]
    monkeypatch.chdir(tmp_path)
    for each in commands:
        parser(each).parse_args(each)
    job = ROOT / commands[0][2]
    small = ["--set", "train.epochs=1", "--set", "train.batch=720", "--layers", "10"]
    assert main(["precision", "record", str(job), *commands[0][3:], *small]) == 0
    assert "recording: digits.h5" in capsys.readouterr().out
    assert load(tmp_path / "digits.h5").layers.keys() == {"10"}
    script = page.partition("```python\n")[2].partition("```")[0]
    exec(script, {})
    assert load(tmp_path / "mine.h5").iterations == [0, 2, 4]


def test_what_cannot_be_replayed_is_told_in_a_line(file: Path, tmp_path: Path, capsys: Any):
    for changes, message in (
        ({"formats": ("e9m9",)}, "precision replay: FloatFormat: exp=9"),
        ({"scalings": ("tiles",)}, "--scalings tiles: known are none, aps"),
        ({"formats": ()}, "precision replay: --formats: is empty: give one or more"),
        ({"scalings": ()}, "precision replay: --scalings: is empty: give one or more"),
        ({"accumulates": ()}, "precision replay: --accumulates: is empty: give one or more"),
        ({"ranks": (2, 0)}, "precision replay: --ranks 0: must be 1 or more"),
        ({"ranks": (-1,)}, "precision replay: --ranks -1: must be 1 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            Question(**changes)
    model = NN.Linear(3, 2)
    Recorder(model, tmp_path / "empty.h5", every=1).close()
    with pytest.raises(ConfigError, match=r"empty\.h5: holds no iteration yet"):
        replay(load(tmp_path / "empty.h5"), Question())
    assert main(["precision", "replay", str(file), "--formats", ""]) == 2
    assert "cpdhpc: error: precision replay: --formats" in capsys.readouterr().err
    assert main(["precision", "replay", str(file), "--out", str(file)]) == 2
    assert "not a file of kind 'replay': not replaced" in capsys.readouterr().err
    store.write(tmp_path / "x.h5", {"exponents": {}}, {"kind": "replay"})
    assert main(["report", str(tmp_path / "x.h5")]) == 2
    assert "has no /exponents/tensor" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not a recording"):
        load(tmp_path / "x.h5")


def test_values_that_are_not_finite_and_rows_that_are_missing(tmp_path: Path):
    """NaN is counted and spoils no other tensor; a product needs all samples."""
    model = NN.Sequential(NN.Linear(40, 30), NN.Linear(30, 30))
    with Recorder(model, tmp_path / "r.h5", every=1, count=1, max_mib=0.03, thin=True) as recorder:
        x = torch.randn(60, 40)
        x[3, 2] = float("nan")
        model(x).sum().backward()
        recorder.step()
    recorded = load(tmp_path / "r.h5")
    assert any(each.is_thinned for each in recorded.tensors)
    answers = replay(recorded, Question(("e4m3",), ("none",), accumulates=("e5m10",)))
    of = {name: v.data for name, v in answers.groups["exponents"].items()}
    rows = of["tensor"].tolist()
    assert of["nans"][rows.index("weights 0.weight"), 0] == 0
    assert of["nans"][rows.index("gradients 0.weight"), 0] > 0
    assert np.isfinite(answers.groups["rounding"]["relative_error"].data).any()
    assert "forward of 0: rows of its activations were left out" in answers.left_out
    assert "sums" not in answers.groups


@pytest.fixture(scope="module")
def report(file: Path) -> Report:
    """Of two iterations, called 0 and 10; what the second layer's bias did is all zero."""
    asked = Question(("e4m3", "e2m1fn"), ("none",), (4,), ("e5m10",))
    answers, out = replay(load(file), asked), file.with_name("pictures.h5")
    for group in answers.groups.values():
        if "iteration" in group:
            group["iteration"].data[:] = 0, 10
    rounding = answers.groups["rounding"]
    rounding["underflowed"].data[rounding["tensor"].data.tolist().index("updates 1.bias")] = np.nan
    store.write(out, answers.groups, {"kind": "replay"})
    return replay_report(out)


def test_names_of_formats_are_whole_beside_or_in_their_bars(report: Report):
    """No letter is white on white, and none is cut by a bar."""
    with rc_context(SETTINGS):
        figure = draw(next(each for each in report.charts if each.name == "exponents_gradients"))
        figure.draw_without_rendering()
        axes = figure.axes[0]
        bars = [patch.get_window_extent() for patch in axes.patches]
        dark = [b for b, p in zip(bars, axes.patches, strict=True) if p.get_fc() == DARK]
        inside = dict[str, bool]()
        for text in axes.texts:
            box = text.get_window_extent()
            within = any(b.x0 <= box.x0 and box.x1 <= b.x1 for b in dark if b.overlaps(box))
            inside[text.get_text()] = within
            assert within == (text.get_color() == "white")
            assert within or not any(bar.overlaps(box) for bar in bars)
            assert axes.get_window_extent().x0 <= box.x0 and box.x1 <= axes.get_window_extent().x1
    assert inside == {"e4m3": True, "e2m1fn": False}


DARK = to_rgba(NORMAL)


def test_maps_mark_iterations_and_leave_out_what_has_no_share(report: Report):
    chart = next(each for each in report.charts if each.name == "map_underflowed")
    panel = chart.panels[0]
    assert isinstance(panel, Map) and np.asarray(panel.places).tolist() == [0, 10]
    unknown = {(panel.rows[i], at) for i, at in np.argwhere(np.isnan(panel.values))}
    # the bias of a norm is zero before the first step
    assert unknown == {("weights 1.bias", 0), ("updates 1.bias", 0), ("updates 1.bias", 1)}
    assert any(note.startswith("Grey: not recorded") for note in chart.notes)
    axes = draw(chart).axes[0]
    assert axes.get_xticks().tolist() == [0, 10] and axes.get_facecolor() == to_rgba(NO_VALUE)


@every(
    ("layers", "said"), [(1, "Mean over"), (5, "The 12 of 15 products with the longest sums; m")]
)
def test_products_are_called_the_longest_where_others_are_left_out(
    tmp_path: Path, layers: int, said: str
):
    model = NN.Sequential(*(NN.Linear(4, 4) for _ in range(layers)))
    with Recorder(model, tmp_path / "r.h5", every=1, count=1) as recorder:
        model(torch.randn(3, 4)).sum().backward()
        recorder.step()
    answers = replay(load(tmp_path / "r.h5"), Question(("e4m3",), ("none",), (), ("e5m10",)))
    store.write(tmp_path / "out.h5", answers.groups, {"kind": "replay"})
    chart = replay_report(tmp_path / "out.h5").charts[-1]
    assert chart.name == "products" and chart.notes[0].startswith(said)
    assert len(chart.panels) == min(3 * layers, 12)
