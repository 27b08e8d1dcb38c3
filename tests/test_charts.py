"""Figures of large studies: nothing overlaps, axes say what they are, all is told apart in grey."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from every import every
from synthetic_study import write_study

from cpdhpc.lab.report import units as text
from cpdhpc.lab.report.figures import (
    BOUND,
    COLOURS,
    MARKERS,
    SETTINGS,
    Axis,
    Chart,
    Map,
    Panel,
    Series,
    draw,
    spread,
    styles,
)
from cpdhpc.lab.report.trainings import layer_charts
from cpdhpc.lab.study.report import study_report
from cpdhpc.lab.study_data.study_file import load_study_file

STUDIES: dict[str, dict[str, Any]] = {
    "strong": {"sizes": (2**12, 2**18, 2**24)},
    "weak": {"scaling": "weak", "sizes": (2**20,)},
    "training": {"kind": "train"},
}
CHARTS = [  # a grid of panels with a legend of many lines; no lines; a map
    ("strong", "time_by_size_2x4"),
    ("training", "accuracy_by_bits"),
    ("training", "underflow_4_ranks"),
]


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Chart]]:
    """All figures of three studies by name: 90 and 40 all-reduces, 81 trainings."""
    found = {}
    for name, options in STUDIES.items():
        path = write_study(tmp_path_factory.mktemp(name) / f"{name}.h5", **options)
        report = study_report(load_study_file(path))
        found[name] = {chart.name: chart for chart in report.charts}
    return found


@pytest.mark.parametrize(("study", "name"), CHARTS)
def test_nothing_overlaps(charts: dict[str, dict[str, Chart]], study: str, name: str) -> None:
    from matplotlib import rc_context

    chart = charts[study][name]
    with rc_context(SETTINGS):
        figure = draw(chart)
        figure.draw_without_rendering()
    axes = figure.axes
    boxes = [each.get_tightbbox() for each in axes]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    boxes += [each.get_window_extent() for each in figure.texts]
    for one, other in combinations(boxes, 2):
        assert overlap(one, other) < 2, "points, as rounding may give"
    width, height = figure.get_size_inches() * figure.dpi
    assert all(b.x0 > -1 and b.y0 > -1 and b.x1 < width + 1 and b.y1 < height + 1 for b in boxes)
    for each in axes:
        labels = [t for t in each.get_xticklabels() if t.get_text() and t.get_visible()]
        ends = sorted((t.get_window_extent().x0, t.get_window_extent().x1) for t in labels)
        assert all(before[1] < after[0] for before, after in pairwise(ends))


def overlap(one: Any, other: Any) -> float:
    """The smaller side of what two boxes have in common."""
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(min(wide, high))


def test_axes_have_units_and_series_are_told_apart(charts: dict[str, dict[str, Chart]]) -> None:
    units = ("/ %", "/ µs", "/ ms", "/ s", "/ (GB/s)", "/ kB", "/ nat")
    without = ("speed-up", "ranks", "epoch", "iteration", "", "float32 data of a rank")
    for chart in (chart for found in charts.values() for chart in found.values()):
        assert chart.title and chart.caption
        for panel in chart.panels:
            for axis in (panel.x, panel.y):
                assert axis.label.endswith(units) or axis.label in without, axis.label
            if isinstance(panel, Map):
                assert chart.colours.endswith("/ %")
                continue
            named = {(s.style.marker, str(s.style.dash)) for s in panel.series if s.label}
            assert len(named) == len({s.label for s in panel.series if s.label})


def test_bounds_bars_and_ideals_are_drawn(charts: dict[str, dict[str, Chart]]) -> None:
    for chart in (charts["strong"]["time_by_size_2x4"], charts["weak"]["time"]):
        for panel in chart.panels:
            assert isinstance(panel, Panel)
            (bound,) = [series for series in panel.series if series.label == "bound"]
            measured = [s for s in panel.series if s.style.marker]
            assert measured and all(np.isfinite(s.low).all() for s in measured if s.low)
            own = [s for s in measured if "mpi" not in s.label]
            assert all(min(s.y) > min(bound.y) for s in own)
    for panel in charts["training"]["speedup"].panels:
        (ideal,) = [series for series in panel.series if series.label == "ideal"]
        assert list(ideal.x) == [1, 2, 4] and list(ideal.y) == pytest.approx([1, 2, 4])


def test_lines_only_where_values_between_are_meant(charts: dict[str, dict[str, Chart]]) -> None:
    """Sizes have values between, numbers of ranks have none, trainings even less."""
    joins = {"speedup": {"guide"}, "time_by_size_2x4": {"line"}, "accuracy_by_time": {"none"}}
    for name, expected in joins.items():
        chart = charts["strong"].get(name) or charts["training"][name]
        series = [s for panel in chart.panels for s in panel.series if s.style.marker]
        assert {s.join for s in series} == expected


def test_a_style_is_the_same_in_all_figures_of_a_study(charts: dict[str, dict[str, Chart]]) -> None:
    for found in charts.values():
        seen: dict[str, set[Any]] = {}
        for chart in found.values():
            for panel in chart.panels:
                for s in filter(lambda s: s.label, panel.series):
                    seen.setdefault(s.label, set()).add((s.style.color, s.style.marker))
        assert all(len(each) == 1 for each in seen.values())


def test_neighbouring_colours_differ_in_grey() -> None:
    grey = [sum(w * int(c[i : i + 2], 16) for w, i in LUMA) for c in COLOURS]
    assert min(abs(a - b) for a, b in pairwise(grey)) > 30
    many = styles(map(str, range(33))).values()
    assert len({(style.marker, str(style.dash)) for style in many}) == 33
    assert len(set(MARKERS)) == len(MARKERS)


LUMA = ((0.299, 1), (0.587, 3), (0.114, 5))


def test_a_shared_axis_holds_the_values_of_all_panels() -> None:
    panels = [
        Panel("", Axis("x"), spread("y", [1, 3]), [Series("", BOUND, [0, 1], [1, y])])
        for y in (1, 3)
    ]
    figure = draw(Chart("a", "a", [], "", panels))
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert low == 0 and high >= 3


@every("ends", [(80, 176), (80, 320), (0.3, 40), (7, 9e4)])
def test_a_logarithmic_axis_has_two_marks_or_more(ends: tuple[float, float]) -> None:
    panel = Panel("", Axis("x", "log"), Axis("y"), [Series("", BOUND, ends, [1, 2])])
    axes = draw(Chart("a", "a", [], "", [panel])).axes[0]
    low, high = axes.get_xlim()
    assert sum(low <= mark <= high for mark in axes.get_xticks()) >= 2


def test_of_many_panels_whole_rows_are_drawn() -> None:
    """75 panels in rows of three: the first row, the last and two between; the note says so."""
    panels = [
        Panel(str(i), Axis("x"), Axis("y"), [Series("s", BOUND, [0, 1], [1, 2])]) for i in range(75)
    ]
    chart = Chart("a", "a", ["Note."], "", panels)
    figure = draw(chart)
    titles = [int(axes.get_title()) for axes in figure.axes]
    assert titles == [n for row in (0, 8, 16, 24) for n in range(3 * row, 3 * row + 3)]
    assert figure.texts[1].get_text() == "Note. 12 of 75 panels, evenly spread."
    assert chart.points == 0, "of series with markers only"


def test_words_along_an_axis_have_room() -> None:
    names = [f"a name that is long {i}" for i in range(6)]
    places = [float(i) for i in range(6)]
    panel = Panel(
        "", Axis("x", names=names), Axis("y", names=names), [Series("s", BOUND, places, places)]
    )
    figure = draw(Chart("a", "a title that goes on and on " * 9, [], "", [panel]))
    figure.draw_without_rendering()
    (axes,), (title,), (legend,) = figure.axes, figure.texts, figure.legends
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first is above"
    boxes = [axes.get_tightbbox(), title.get_window_extent(), legend.get_window_extent()]
    assert all(overlap(one, other) < 2 for one, other in combinations(boxes, 2))
    assert title.get_window_extent().x1 <= figure.get_figwidth() * figure.dpi


def test_ticks_of_many_sizes_have_room() -> None:
    sizes = [float(2**i) for i in range(6, 31)]
    axis = Axis("size", "size", ticks=sizes)
    panel = Panel("", axis, Axis("y"), [Series("", BOUND, sizes, sizes)])
    figure = draw(Chart("a", "a", [], "", [panel] * 3))
    figure.draw_without_rendering()
    labels = figure.axes[0].get_xticklabels()
    assert 5 <= len(labels) <= 8 and labels[0].get_text() == "64\nB"
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_quantities_as_text() -> None:
    shown = [text.digits(v) for v in (0.0, 9.999, 1234.0, 0.01234, 1e-5, -0.5, float("nan"))]
    assert shown == ["0", "10.0", "1,230", "0.0123", "1.00e-05", "-0.500", "-"]
    assert [text.time(v) for v in (1.2, 0.9999, 999.6e-6, 3e-9)] == [
        "1.20 s",
        "1.00 s",
        "1.00 ms",
        "3.00 ns",
    ]
    assert [text.size(v) for v in (100, 1024, 1536, 1000, 3 << 20)] == [
        "100 B",
        "1 KiB",
        "1.5 KiB",
        "1,000 B",
        "3 MiB",
    ]
    assert text.signed(-0.001) == "+0.00"


@every(("share", "grey"), [(np.nan, True), (0.0, False)])
def test_grey_of_a_map_is_explained_where_there_is_some(share: float, grey: bool) -> None:
    panel = Map("", Axis("iteration"), Axis(""), [0, 5, 9], ["a"], np.array([[50.0, share, 0.0]]))
    (chart,) = layer_charts("t", "underflow", [("", panel)])
    assert ("Grey: not known." in chart.notes) == grey
    assert draw(chart).axes[0].get_xticks().tolist() == [0, 5, 9]
