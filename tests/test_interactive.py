"""Figures for a browser have what those of matplotlib have: panels, series, values, marks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every
from synthetic_study import write_study

from cpdhpc.lab.report.figures import (
    JOINS,
    MARKERS,
    Axis,
    Chart,
    Map,
    Panel,
    Range,
    Series,
    Style,
    legend_of,
)
from cpdhpc.lab.report.fits import Score, Trained, finding
from cpdhpc.lab.report.interactive import item
from cpdhpc.lab.study.report import study_report
from cpdhpc.lab.study_data.study_file import load_study_file

LINE = Style("#0b3c6f", "o")


def models(of: Any, kind: str) -> Iterator[dict[str, Any]]:
    """The attributes of all models of a kind, in order."""
    if isinstance(of, dict):
        if of.get("type") == "object" and of.get("name") == kind and "attributes" in of:
            yield of["attributes"]
        of = list(of.values())
    for each in of if isinstance(of, list) else []:
        yield from models(each, kind)


def columns(source: dict[str, Any]) -> dict[str, Any]:
    return dict(source["data"]["entries"])


def one(*series: Series, x: Axis = Axis("x"), y: Axis = Axis("y"), **options: Any) -> Any:  # noqa: B008
    return item(Chart("chart", "title", [], "", [Panel("", x, y, series, **options)]))


@every("kind", ["allreduce", "train"])
def test_each_figure_of_a_study_has_its_panels_series_and_values(tmp_path: Path, kind: str) -> None:
    small: dict[str, Any] = {"sizes": (2**12, 2**20)} if kind == "allreduce" else {"ranks": (1, 4)}
    for chart in study_report(
        load_study_file(write_study(tmp_path / "s.h5", kind, **small))
    ).charts:
        found = item(chart)
        json.dumps(found, allow_nan=False)
        panels = [panel for row in chart.shown for panel in row]
        series = [each for panel in panels for each in panel.series]
        labels = [label["label"]["value"] for label in models(found, "LegendItem")]
        assert labels == legend_of(panels)
        assert len([*models(found, "Figure")]) == len(panels) + bool(labels)
        told = [columns(source) for source in models(found, "ColumnDataSource")]
        lines = [each for each in told if "x" in each][: len(series)]
        for each, data in zip(series, lines, strict=True):
            assert data["x"] == pytest.approx(list(each.x), rel=1e-5)
            assert data["y"] == pytest.approx(list(each.y), rel=1e-5, nan_ok=True)
            assert len(data["at"]) == len(data["value"]) == len(each.x)
        for panel, data in zip((p for p in panels if isinstance(p, Map)), told, strict=False):
            assert len(data["percent"]) == panel.values.size


TEXTS: dict[str, tuple[Axis, Series, list[str], list[str]]] = {
    "moved aside on an axis of ranks": (
        Axis("ranks", "log2", ticks=[3, 6]),
        Series("s", LINE, [3 * 1.0443, 6 * 1.0443], [1.0, 2.0], aside=1.0443),
        ["3", "6"],
        ["1", "2"],
    ),
    "sizes, with intervals of which one is unknown": (
        Axis("size", "size", ticks=[4096]),
        Series("s", LINE, [4096, 2**20], [1.0, 2.0], [0.5, np.nan], [1.5, np.nan]),
        ["4 KiB", "1 MiB"],
        ["1.00 (0.500 \u2013 1.50)", "2.00"],
    ),
    "names, and a reference beyond them": (
        Axis("", names=["a", "b"]),
        Series("s", LINE, [-0.6, 0, 1, 1.6], [1, 1, 1, 1]),
        ["", "a", "b", ""],
        ["1"] * 4,
    ),
    "intervals along x": (
        Axis("x"),
        Series("s", LINE, [2.0], [1.0], x_low=[1.0], x_high=[3.0]),
        ["2.00 (1.00 \u2013 3.00)"],
        ["1"],
    ),
}


@every("name", TEXTS)
def test_values_are_told_as_people_read_them(name: str) -> None:
    axis, series, at, value = TEXTS[name]
    (data, _) = map(columns, models(one(series, x=axis), "ColumnDataSource"))
    assert (data["at"], data["value"]) == (at, value)


def test_all_markers_and_joins_are_drawn() -> None:
    markers = (*MARKERS, "x", "+", "1", "2", "|")
    found = [one(Series("s", Style("#000000", marker), [1], [1])) for marker in markers]
    marks = [next(models(each, "Scatter")) for each in found]
    drawn = {json.dumps([each.get("marker"), each.get("angle")]) for each in marks}
    assert len(drawn) == len(markers)
    glyphs = {"line": "Line", "guide": "Line", "fit": "Line", "steps": "Step", "none": ""}
    assert glyphs.keys() == JOINS.keys()
    for join, glyph in glyphs.items():
        found = one(Series("s", LINE, [1, 2], [1, 2], join=join))  # type: ignore[arg-type]
        assert {n for n in ("Line", "Step") if [*models(found, n)]} == ({glyph} - {""})


def test_markers_now_and_then_and_values_of_all_points() -> None:
    found = one(Series("s", LINE, range(9), range(9), every=(1, 4)))
    assert [each["indices"] for each in models(found, "IndexFilter")] == [[1, 5]]
    (hover,) = models(found, "HoverTool")
    (line, *_) = (e for e in models(found, "GlyphRenderer") if e["glyph"]["name"] == "Line")
    assert [each["id"] for each in hover["renderers"]] == [
        each["id"] for each in renderers(found) if each["attributes"] == line
    ]


def renderers(of: Any) -> Iterator[Any]:
    if isinstance(of, dict):
        if of.get("name") == "GlyphRenderer" and "attributes" in of:
            yield of
        of = list(of.values())
    for each in of if isinstance(of, list) else []:
        yield from renderers(each)


def test_ends_marks_ranges_and_the_axis_above() -> None:
    x = Axis("exponent", "whole", (-10, 10))
    ranges = [Range("e4m3", -9, -6, 9)]
    found = one(Series("s", LINE, [0], [50]), x=x, ranges=ranges, top=("bits", 2.0, (4, 8)))
    ends = [(each.get("start", 0), each.get("end", 1)) for each in models(found, "Range1d")]
    assert ends[:2] == [(-10, 10), (0, pytest.approx(50 * (1.06 + 1.2 * 0.17)))]
    drawn = [each["glyph"]["name"] for each in models(found, "GlyphRenderer")]
    assert drawn.count("HBar") == 2 and drawn.count("Text") == 1
    marks = [dict(each["major_label_overrides"]["entries"]) for each in models(found, "LinearAxis")
             if "major_label_overrides" in each]  # fmt: skip
    assert [{k: v["attributes"]["text"] for k, v in each.items()} for each in marks] == [
        {2.0: "4", 4.0: "8"}
    ]


PERCENT, LOSS = Score("accuracy", "%", False, "nat"), Score("loss", "", True, "nat")
FINDINGS = {  # scores and bytes of float32, a and b: the sentence
    "both near, b sends less": (
        PERCENT,
        {"float32": ([94.0, 94.0], 100), "a": ([93.5, 93.5], 25), "b": ([93.1, 93.1], 12.5)},
        "of 2 methods b needs the fewest bytes, 12.5 % of float32's, to be within 1 point of "
        "float32's test accuracy of 94.00 ± 0.00 %: it reaches 93.10 ± 0.00 %.",
    ),
    "none near": (
        PERCENT,
        {"float32": ([94.0], 100), "a": ([92.5], 25), "b": ([90.0], 12.5)},
        "none of 2 methods is within 1 point of float32's test accuracy of 94.00 %; a is nearest, "
        "at 92.50 %.",
    ),
    "less is better": (
        LOSS,
        {"float32": ([1.0], 100), "a": ([1.005], 50), "b": ([1.1], 25)},
        "of 2 methods a needs the fewest bytes, 50.0 % of float32's, to be within 0.01 of "
        "float32's test loss of 1: it reaches 1.005.",
    ),
    "no float32": (
        PERCENT,
        {"a": ([92.0], 25), "b": ([93.0], 12.5)},
        "the best test accuracy is 93.00 %, of b, among 2 trainings.",
    ),
    "one without a score": (PERCENT, {"a": ([np.nan], 25)}, ""),
}


@every("name", FINDINGS)
def test_the_sentence_of_trainings(name: str) -> None:
    measure, given, sentence = FINDINGS[name]
    none = np.empty(0)
    trained = [
        Trained("", key, LINE, np.array(scores), sent, 1.0, none, none, none, none)
        for key, (scores, sent) in given.items()
    ]
    assert finding(trained, ["float32"], measure) == sentence
