"""What is shown of a search of bits: layers and their tensors, trainings, where the bits go."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import numpy as np

from ..report import units
from ..report.figures import GREY, Axis, Chart, Panel, Series, Style, styles
from ..report.tables import Column, Report, Section, tabulate
from .evidence import BEYOND, NOT_MEASURED, RAW, WIRE, WITHIN, Evidence, Place, Trial, width

CAPTION = (
    "Wire: gradients that travel. Bits: of a value's code. Share: of all bits, of a batch; of what "
    "travels whole tiles of 1,024 values, unless all of it is float32. Exponents: of what was "
    "looked at. Error: wire: of the layer, relative to the whole mean gradient in float64; others: "
    "of the layer's products."
)
TRAININGS = (
    "Bits: over the number of values, by tensor. Sent: in a step, by the rank that sends most. "
    "Score: mean over seeds, an accuracy in percent. To float32: with the same seeds. Error of the "
    "mean: of the first of the seeds."
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
        [*facts, ("found", of.outcome)],
        [*layers, _trainings(of)],
    )


def _layers(of: Evidence) -> list[Section]:
    whole = of.bits(of.found)
    shares = [100 * bits / sum(whole) for bits in whole]
    rows = list(zip(of.places, of.found, shares, strict=True))

    def error(row: tuple[Place, str, float]) -> str:
        place, name, _ = row
        return units.digits(place.errors[place.formats.index(name)])

    def exponents(row: tuple[Place, str, float]) -> str:
        low, high = row[0].low, row[0].high
        return units.Cell(f"{low} .. {high}", low=low, high=high)

    columns = [
        Column[tuple[Place, str, float]]("layer", lambda r: r[0].name, numbers=False),
        Column[tuple[Place, str, float]]("tensor", lambda r: r[0].tensor, numbers=False),
        Column[tuple[Place, str, float]]("values", lambda r: units.fixed(r[0].values)),
        Column[tuple[Place, str, float]]("exponents", exponents),
        Column[tuple[Place, str, float]]("format", lambda r: r[1], numbers=False),
        Column[tuple[Place, str, float]]("bits", lambda r: str(width(r[1]))),
        Column[tuple[Place, str, float]]("share\n%", lambda r: units.fixed(r[2], 1)),
        Column[tuple[Place, str, float]]("error", error),
    ]
    names = [place.label for place in of.places]
    at = np.arange(len(names), dtype=float)
    style = styles(["found", "share"])
    bits = [float(width(name)) for name in of.found]
    least = [float(width(place.formats[-1])) for place in of.places]
    layers = Axis("layer", names=names)
    chart = Chart(
        "bits_by_layer",
        "Bits by layer",
        ["Found by the search; the line: eight bits."],
        "Bits of each layer's tensors, and which share of all bits they take.",
        [
            Panel(
                "",
                Axis("bits a value", limits=(0, None)),
                layers,
                [
                    Series("found", style["found"], bits, at, join="none"),
                    Series("fewest of use", Style(GREY, "|"), least, at, join="none"),
                    Series("", Style(GREY, ""), [8.0, 8.0], [-0.5, len(names) - 0.5]),
                ],
            ),
            Panel(
                "",
                Axis("share of all bits / %", limits=(0, None)),
                layers,
                [Series("share", style["share"], shares, at, join="none")],
            ),
        ],
        shared=False,
    )
    table = tabulate("Layers", columns, rows, CAPTION)
    return [Section("Layers", [_worth(of)], [table], [chart])]


def _worth(of: Evidence) -> str:
    """Return what was found is worth, by seeds that the search has not seen if there are some."""
    found = of.tested
    assert found is not None, "a search that has ended"
    float32, *others = [t for t in of.trials if t.seeds == found.seeds]
    alike = next((t.formats for t in of.trials if t.what.startswith("uniform")), float32.formats)
    uniform = next((t for t in others if t.formats == alike), float32)
    seeds = ", ".join(map(str, found.seeds))
    less = []
    widths = zip(of.widths(found.formats).items(), of.widths(alike).values(), strict=True)
    for (tensor, bits), before in widths:
        if tensor == WIRE and not uniform.sent_bytes:
            less.append("one rank, which sends nothing")
        elif tensor == WIRE:
            share = 1 - found.sent_bytes / uniform.sent_bytes
            way = "fewer" if share >= 0 else "more"
            of_all = f"{way} bytes than {_named(of, alike)} for all layers"
            less.append(f"{100 * abs(share):.0f} % {of_all}")
        else:
            less.append(f"{tensor} of {bits:.2f} bits ({before:g})")
    return f"With seeds {seeds}: {found.score - float32.score:+.2f} to float32, {', '.join(less)}."


def _named(of: Evidence, formats: Sequence[str]) -> str:
    """Return the format of what travels."""
    return next(f for p, f in zip(of.places, formats, strict=True) if p.tensor == WIRE)


def _trainings(of: Evidence) -> Section:
    values = sum(place.values for place in of.places)

    def bits(trial: Trial) -> float:
        return sum(of.bits(trial.formats)) / values

    def beside(trial: Trial) -> str:
        base = of.trial((RAW,) * len(of.places), trial.seeds)
        if base is None or base is trial or isnan(trial.score):
            return units.NONE
        return units.signed(trial.score - base.score, of.agrees(trial, "budget"))

    def error(trial: Trial) -> str:
        agrees = of.agrees(trial, "gradient_error")
        text = units.agreeing(lambda n: units.digits(trial.error, n), agrees, 3)
        return units.Cell(text, value=trial.error)

    columns = [
        Column[Trial]("why", lambda t: t.what, numbers=False),
        Column[Trial]("seeds", lambda t: ", ".join(map(str, t.seeds)), numbers=False),
        *(
            Column[Trial](
                f"bits\n{tensor}".replace("_", "\n"),
                lambda t, tensor=tensor: units.fixed(of.widths(t.formats)[tensor], 2),  # type: ignore[misc]
            )
            for tensor in dict.fromkeys(place.tensor for place in of.places)
        ),
        Column[Trial]("sent", lambda t: units.bytes_of(t.sent_bytes)),
        Column[Trial]("score", lambda t: units.with_deviation(np.array(t.scores))),
        Column[Trial]("to float32", beside),
        Column[Trial]("error of\nthe mean", error),
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


KNOWN = WITHIN, BEYOND, NOT_MEASURED
