"""What is shown of a search of bits: the layers, its trainings, where the bits go."""

from __future__ import annotations

import json
import tomllib
from math import isnan
from pathlib import Path

import numpy as np

from ..formats import wire_format
from ..precision.evidence import RAW, Evidence, Layer, Trial
from . import units
from .figures import GREY, Axis, Chart, Panel, Series, Style, styles
from .tables import Column, Report, Section, tabulate

CAPTION = (
    "Bits: of a value's code. Share: of all bits that travel, whole tiles of 1,024 values. "
    "Exponents: of the gradients that were looked at. Error: of the layer, relative to the whole "
    "mean gradient in float64."
)
TRAININGS = (
    "Bits: that travel, over the number of values. Sent: in a step, by the rank that sends most. "
    "Score: mean over seeds, an accuracy in percent. To float32: with the same seeds."
)


def search_report(path: Path) -> Report:
    """Return the report of a file. Raises StoreError where it is of no search."""
    of = Evidence.read(path)
    asked = tomllib.loads(of.asked)
    search = asked["search"]
    facts = [(key, json.dumps(value)) for key, value in search.items()]
    layers = _layers(of) if of.found else []
    return Report(
        f"Search of bits: {asked['name']}",
        [*facts, ("found", "yes" if of.found else "goes on")],
        [*layers, _trainings(of)],
    )


def width(wire: str) -> int:
    """Return the bits of a value's code."""
    fmt = wire_format(wire)
    return 32 if fmt is None else fmt.bits


def _layers(of: Evidence) -> list[Section]:
    pairs = list(zip(of.layers, of.found, strict=True))
    total = sum(layer.bits(wire) for layer, wire in pairs)

    def error(pair: tuple[Layer, str]) -> str:
        layer, wire = pair
        return units.digits(layer.errors[layer.formats.index(wire)])

    columns = [
        Column[tuple[Layer, str]]("layer", lambda p: p[0].name, numbers=False),
        Column[tuple[Layer, str]]("values", lambda p: f"{p[0].values:,}"),
        Column[tuple[Layer, str]]("exponents", lambda p: f"{p[0].low} .. {p[0].high}"),
        Column[tuple[Layer, str]]("format", lambda p: p[1], numbers=False),
        Column[tuple[Layer, str]]("bits", lambda p: str(width(p[1]))),
        Column[tuple[Layer, str]]("share\n%", lambda p: f"{100 * p[0].bits(p[1]) / total:.1f}"),
        Column[tuple[Layer, str]]("error", error),
    ]
    names = [layer.name for layer in of.layers]
    at = np.arange(len(names), dtype=float)
    style = styles(["found", "share"])
    bits = [float(width(wire)) for _, wire in pairs]
    shares = [100 * layer.bits(wire) / total for layer, wire in pairs]
    least = [float(width(layer.formats[-1])) for layer, _ in pairs]
    rows = Axis("layer", names=names)
    chart = Chart(
        "bits_by_layer",
        "Bits by layer",
        ["Found by the search; the line: eight bits for all layers."],
        "Bits of the gradients of each layer, and which share of all bits it takes.",
        [
            Panel(
                "",
                Axis("bits a value", limits=(0, None)),
                rows,
                [
                    Series("found", style["found"], bits, at, join="none"),
                    Series("fewest of use", Style(GREY, "|"), least, at, join="none"),
                    Series("", Style(GREY, ""), [8.0, 8.0], [-0.5, len(names) - 0.5]),
                ],
            ),
            Panel(
                "",
                Axis("share of all bits / %", limits=(0, None)),
                rows,
                [Series("share", style["share"], shares, at, join="none")],
            ),
        ],
        shared=False,
    )
    table = tabulate("Layers", columns, pairs, CAPTION)
    return [Section("Layers", [_worth(of)], [table], [chart])]


def _worth(of: Evidence) -> str:
    """Return what was found is worth, by seeds that the search has not seen if there are some."""
    float32, *others = [t for t in of.trials if t.seeds == of.trials[-1].seeds]
    found = next((t for t in others if t.formats == of.found), float32)
    uniform = next((t for t in others if len(set(t.formats)) == 1), float32)
    less = 100 * (1 - found.sent_bytes / uniform.sent_bytes)
    seeds = ", ".join(map(str, found.seeds))
    return (
        f"With seeds {seeds}: {found.score - float32.score:+.2f} to float32, {less:.0f} % fewer "
        f"bytes than {uniform.formats[0]} for all layers."
    )


def _trainings(of: Evidence) -> Section:
    values = sum(layer.values for layer in of.layers)

    def bits(trial: Trial) -> float:
        rows = zip(of.layers, trial.formats, strict=True)
        return sum(layer.bits(wire) for layer, wire in rows) / values

    def beside(trial: Trial) -> str:
        base = of.trial((RAW,) * len(of.layers), trial.seeds)
        if base is None or base is trial or isnan(trial.score):
            return units.NONE
        return units.signed(trial.score - base.score)

    columns = [
        Column[Trial]("why", lambda t: t.what, numbers=False),
        Column[Trial]("seeds", lambda t: ", ".join(map(str, t.seeds)), numbers=False),
        Column[Trial]("bits", lambda t: f"{bits(t):.2f}"),
        Column[Trial]("sent", lambda t: f"{t.sent_bytes:,.0f} B"),
        Column[Trial]("score", lambda t: units.with_deviation(np.array(t.scores))),
        Column[Trial]("to float32", beside),
        Column[Trial]("error of\nthe mean", lambda t: units.digits(t.error)),
        Column[Trial]("verdict", lambda t: t.verdict, numbers=False),
    ]
    series = []
    verdicts = list(dict.fromkeys(t.verdict if t.verdict in KNOWN else "fails" for t in of.trials))
    for name, style in styles(verdicts).items():
        some = [
            (i, bits(t))
            for i, t in enumerate(of.trials, 1)
            if (t.verdict if t.verdict in KNOWN else "fails") == name
        ]
        x, y = zip(*some, strict=True)
        series.append(Series(name, style, [float(i) for i in x], y, join="none"))
    chart = Chart(
        "trial_history",
        "Trainings of the search",
        ["The first two: float32, and one format for all layers."],
        "Bits a value of each training, and what was found of it.",
        [Panel("", Axis("training", "whole"), Axis("bits a value", "log2"), series)],
    )
    table = tabulate("Trainings", columns, of.trials, TRAININGS)
    return Section("Trainings", tables=[table], charts=[chart])


KNOWN = "within", "beyond"
