"""Pages of reports in a browser: figures that answer to the mouse, and ask for nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from every import every
from synthetic_study import write_study
from training import ROWS, run_job, small_job

from cpdhpc.lab.commands.report import Outputs, compare_files, page, report
from cpdhpc.lab.report.figures import Axis, Chart, Map, Panel, Range, Series, Style
from cpdhpc.lab.report.tables import Report, Section
from cpdhpc.world.ranks import Loopback

NAMES = [
    "</script><img src=x onerror=hit()>",
    "\"quoted\" & 'so'",
    "µ ± Ω → ß",
    "$$x^2$$ @y{0} {{ 1 }}",
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if browser.find() is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)}; see tests/install_browser")
    with browser.page(tmp_path_factory.mktemp("profile")) as found:
        yield found


def chart_of(series: list[Series]) -> Chart:
    return Chart(
        "chart",
        "A <b>title</b>",
        ["A note."],
        "A caption.",
        [Panel("panel", Axis("x"), Axis("time / s"), series)],
    )


def page_of(path: Path, *charts: Chart, title: str = "title") -> Path:
    path.write_text(page([Report(title, [], [Section("Section", charts=charts)])]))
    return path


def straight(*names: str, count: int = 5) -> list[Series]:
    """A rising line for each name, with intervals, from (0, its number) on."""
    x = np.arange(float(count))
    return [
        Series(name, Style("#0b3c6f", "o"), x, i + x, i + x - 0.25, i + x + 0.25)
        for i, name in enumerate(names)
    ]


# The elements of all trees; the figures; the plots of panels, in order; where a point is; texts.
SCRIPT = """
function* all(root) {
  for (const each of root.querySelectorAll("*")) {
    yield each;
    if (each.shadowRoot) yield* all(each.shadowRoot);
  }
}
function* views(view) {
  if (view.model.type === "Figure") yield view;
  else for (const each of view.child_views ?? []) yield* views(each);
}
const figures = () => [...Bokeh.index].filter((view) => view.model.type === "Column");
const plots = () => figures().flatMap((figure) => [...views(figure.child_views[0])]);
function place(x, y, plot = 0) {
  const view = plots()[plot], { left, top } = view.canvas_view.el.getBoundingClientRect();
  return [left + view.frame.x_scale.compute(x), top + view.frame.y_scale.compute(y)];
}
const text = () => [...all(document.body)].filter(
  (e) => !e.children.length && !["STYLE", "SCRIPT"].includes(e.tagName)
).map((e) => e.textContent);
"""


def open_drawn(shown: browser.Page, path: Path) -> None:
    """Show a page with all its sections open, so high that all figures are drawn."""
    shown.requests.clear()
    shown.problems.clear()
    shown.open(path)
    shown.value("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    high = shown.value("document.documentElement.scrollHeight")
    shown.resize(1200, high)
    shown.wait("[...document.querySelectorAll('figure')].every((f) => f.className === 'drawn')")
    shown.value(SCRIPT)
    shown.wait("figures().length === document.querySelectorAll('figure').length")
    shown.wait("plots().every((each) => each.has_finished())")


def quiet(shown: browser.Page, path: Path) -> bool:
    """Whether the console is empty, and only the page itself was asked for."""
    assert not shown.problems
    outside = [each for each in shown.requests if not each.startswith("data:")]
    assert outside == [path.resolve().as_uri()]
    return True


def studies(tmp_path: Path) -> Path:
    path = write_study(tmp_path / "strong.h5", ranks=(2, 4), sizes=(2**12, 2**20))
    report([path], Outputs(tmp_path / "page.html", quiet=True))
    return tmp_path / "page.html"


def trainings(tmp_path: Path) -> Path:
    for name in ("float32", "aps"):
        run_job(small_job(name=name, gradient=ROWS[name]), Loopback(2), tmp_path)
    report([tmp_path], Outputs(tmp_path / "page.html", quiet=True))
    return tmp_path / "page.html"


def comparison(tmp_path: Path) -> Path:
    small: dict[str, Any] = {"ranks": (2,), "sizes": (2**12, 2**20)}
    before = write_study(tmp_path / "a.h5", **small)
    after = write_study(tmp_path / "b.h5", factor={0: 2.0}, **small)
    compare_files(after, before, Outputs(tmp_path / "page.html", quiet=True))
    return tmp_path / "page.html"


def maps(tmp_path: Path) -> Path:
    values = np.array([[0.0, np.nan, 100.0], [10.0, 20.0, 30.0]])
    heat = Map("e4m3", Axis("iteration"), Axis(""), [0, 5, 20], NAMES[:2], values)
    ranges = [Range("e4m3", -9.0, -6.0, 9.0), Range("e2m1", -1.0, 0.0, 2.0)]
    histogram = Panel("weights", Axis("exponent", "whole", (-10, 10)), Axis("values / %"),
                      straight("iteration 1"), ranges=ranges)  # fmt: skip
    charts = [Chart("map", "Map", [], "", [heat, heat], colours="share / %"),
              Chart("exponents", "Exponents", [], "", [histogram], shared=False)]  # fmt: skip
    return page_of(tmp_path / "page.html", *charts)


@every("make", [studies, trainings, comparison, maps])
def test_all_figures_are_drawn_without_a_request(
    shown: browser.Page, tmp_path: Path, make: Any
) -> None:
    path = make(tmp_path)
    open_drawn(shown, path)
    assert shown.value("plots().length") >= shown.value("figures().length") > 0
    assert shown.value(
        "[...document.querySelectorAll('figure > img')].every((e) => !e.offsetHeight)"
    )
    assert quiet(shown, path)


def test_the_mouse_on_a_point_shows_its_values(shown: browser.Page, tmp_path: Path) -> None:
    path = page_of(tmp_path / "page.html", chart_of(straight("one", "two")))
    open_drawn(shown, path)
    shown.mouse("mouseMoved", *shown.value("place(3, 4)"))
    shown.wait("text().includes('4.00 (3.75 \u2013 4.25)')")
    told = shown.value("text()")
    assert {"two", "x: ", "3", "time / s: "} <= set(told)
    assert quiet(shown, path)


def test_a_click_on_the_legend_hides_a_series_in_all_panels(
    shown: browser.Page, tmp_path: Path
) -> None:
    panel = chart_of(straight("one", "two")).panels[0]
    path = page_of(tmp_path / "page.html", Chart("chart", "title", [], "", [panel, panel]))
    open_drawn(shown, path)
    visible = """plots().slice(0, 2).map((p) => p.model.renderers.filter((r) => r.visible)
        .map((r) => r.name))"""
    assert shown.value(visible) == [["one"] * 3 + ["two"] * 3] * 2
    x, y = shown.value(
        """(() => { const at = [...all(document.body)].find((e) => e.textContent === "one" &&
        !e.children.length).getBoundingClientRect(); return [at.x + 3, at.y + 3]; })()"""
    )
    shown.click(x, y)
    shown.wait(
        f"JSON.stringify({visible}) === '{json.dumps([['two'] * 3] * 2, separators=(',', ':'))}'"
    )
    shown.click(x, y)
    shown.wait(f"({visible})[1].length === 6")
    assert quiet(shown, path)


def test_dragging_zooms_all_panels_of_common_axes(shown: browser.Page, tmp_path: Path) -> None:
    panel = chart_of(straight("one")).panels[0]
    path = page_of(tmp_path / "page.html", Chart("chart", "title", [], "", [panel, panel]))
    open_drawn(shown, path)
    shown.drag(*shown.value("place(1, 0.5)"), *shown.value("place(3, 3.5)"))
    ends = "plots().slice(0, 2).flatMap(({ frame: { x_range: r } }) => [r.start, r.end])"
    shown.wait(f"({ends})[0] > 0.5")
    assert shown.value(ends) == pytest.approx([1, 3, 1, 3], abs=0.05)
    assert quiet(shown, path)


def test_names_are_shown_as_they_are(shown: browser.Page, tmp_path: Path) -> None:
    """In the legend, under the mouse, as marks of axes and in titles; none makes an element."""
    places = np.arange(4.0)
    named = [Series(name, Style("#0b3c6f", "o"), [i], [i]) for i, name in enumerate(NAMES)]
    panel = Panel(NAMES[0], Axis(NAMES[1], names=NAMES), Axis(NAMES[2], limits=(-1, 4)), named)
    chart = Chart("chart", NAMES[0], [NAMES[3]], NAMES[1], [panel])
    path = page_of(tmp_path / "page.html", chart, title=NAMES[0])
    open_drawn(shown, path)
    assert set(NAMES) <= set(shown.value("text()"))
    for i, name in zip(places, NAMES, strict=True):
        shown.mouse("mouseMoved", *shown.value(f"place({i}, {i})"))
        shown.wait(f"text().filter((each) => each === {json.dumps(name)}).length > 2")
    assert shown.value("[...all(document.body)].every((e) => e.tagName !== 'IMG' || e.alt)")
    assert quiet(shown, path)


def test_5000_points_are_small_and_answer(shown: browser.Page, tmp_path: Path) -> None:
    names = [str(i) for i in range(10)]
    series = straight(*names, count=500)
    path = page_of(tmp_path / "page.html", chart_of(series))
    bare = page_of(tmp_path / "bare.html", chart_of(straight("0")))
    assert path.stat().st_size - bare.stat().st_size < 200_000
    open_drawn(shown, path)
    shown.mouse("mouseMoved", *shown.value("place(250, 259)"))
    shown.wait("text().includes('259 (259 \u2013 259)')")
    assert quiet(shown, path)


@every("without", ["scripts", "screen"])
def test_pictures_are_there_without_scripts_and_in_print(
    shown: browser.Page, tmp_path: Path, without: str
) -> None:
    path = page_of(tmp_path / "page.html", chart_of(straight("one")))
    if without == "scripts":
        shown.call("Emulation.setScriptExecutionDisabled", value=True)
        shown.open(path)
    else:
        open_drawn(shown, path)
        shown.call("Emulation.setEmulatedMedia", media="print")
    try:
        image, live = shown.value(
            "['img', '.live'].map((s) => document.querySelector(`figure ${s}`).offsetHeight)"
        )
        assert image > 100 and live == 0
        assert shown.value("document.querySelector('figure img').naturalWidth") > 100
    finally:
        shown.call("Emulation.setScriptExecutionDisabled", value=False)
        shown.call("Emulation.setEmulatedMedia", media="")
