"""The fewest bits in which gradients can travel at each batch: the question of the APS paper.

Source of the question: Han, Demmel, You: Auto-precision scaling, arXiv 1911.08907.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

from ...formats import wire_format
from ..study_data.study_file import StudyFile
from . import units
from .figures import Axis, Chart, Panel, Series, styles
from .points import SeedGroup, but_for_gradient, decided, label, varying
from .score import Score
from .tables import Column, Section, tabulate

BATCH, WIRE, AGGREGATOR = "train.batch", "gradient.wire", "gradient.aggregator"
SCALING, ACCUMULATE, ALGORITHM = "gradient.scaling", "gradient.accumulate", "gradient.algorithm"
FREE = (BATCH, WIRE, AGGREGATOR, "train.virtual_ranks")  # ranks of their own may go with batches
APART = 0.04  # of the places of neighbouring lines on the logarithmic axis


@dataclass(frozen=True)
class Needed:
    """The fewest bits of a line at a batch; NaN: not even the most are enough.

    wire: the best format of so many bits; difference: of its score to float32's
    """

    bits: float
    wire: str
    difference: float


def bits_by_batch(file: StudyFile, groups: Sequence[SeedGroup], measure: Score) -> list[Section]:
    """Return the bits that batches need; nothing without float32, three widths and two batches.

    Enough is a number of bits where its best format, and that of every larger number that was
    measured, is at most the study's train.tolerance points below float32 at the same batch.
    """
    tolerance = float(file.toml.get("train", {}).get("tolerance", 1.0))
    float32 = {
        but_for_gradient(g.factors): g for g in groups if g.factors.get(AGGREGATOR) == "none"
    }
    given = [g for g in groups if g.factors.get(WIRE) and BATCH in g.factors]
    sent = [g for g in given if but_for_gradient(g.factors) in float32]
    batches = sorted({int(g.factors[BATCH]) for g in sent})
    if measure.unit != "%" or len(batches) < 2 or len({_width(g) for g in sent}) < 3:
        return []
    of = [g.factors for g in sent]
    names = [
        n for n in varying(of, ("ranks", "nodes", "ppn", *FREE)) if not decided(n, [BATCH], of)
    ]
    if ALGORITHM in names and decided(ALGORITHM, [ACCUMULATE], of):
        names.remove(ALGORITHM)
    lines: dict[str, dict[int, list[tuple[SeedGroup, float]]]] = {}
    for group in sent:
        below = group.mean("accuracy") - float32[but_for_gradient(group.factors)].mean("accuracy")
        unscaled = {SCALING: "unscaled"} if group.factors.get(SCALING) == "none" else {}
        line = lines.setdefault(label({**group.factors, **unscaled}, names), {})
        line.setdefault(int(group.factors[BATCH]), []).append((group, below))
    found = {
        name: {batch: needed(each, tolerance) for batch, each in line.items()}
        for name, line in lines.items()
    }
    base = {int(group.factors[BATCH]): group.mean("accuracy") for group in float32.values()}
    return [_section(found, batches, base, tolerance)]


def _width(group: SeedGroup) -> int:
    fmt = wire_format(str(group.factors[WIRE]))
    return 32 if fmt is None else fmt.bits


def needed(of: Sequence[tuple[SeedGroup, float]], tolerance: float) -> Needed:
    """Return the fewest bits of which all formats' best are within the tolerance, from there on.

    of: groups of one line and batch, with the points that each is above float32
    """
    best: dict[int, tuple[float, str]] = {}
    for group, difference in of:
        known = best.get(_width(group), (-float("inf"), ""))
        best[_width(group)] = max(known, (difference, str(group.factors[WIRE])))
    found = Needed(nan, "", nan)
    for width in sorted(best, reverse=True):
        difference, wire = best[width]
        if not difference >= -tolerance:  # NaN is no accuracy
            break
        found = Needed(width, wire, difference)
    return found


def _section(
    found: dict[str, dict[int, Needed]],
    batches: Sequence[int],
    base: dict[int, float],
    tolerance: float,
) -> Section:
    def cell(name: str, batch: int) -> str:
        one = found[name].get(batch)
        if one is None:
            return units.NONE
        if not one.wire:
            return units.Cell("more", value=nan)
        return units.Cell(f"{one.bits:g} ({one.wire}, {one.difference:+.1f})", value=one.bits)

    columns = [Column[str]("gradients", lambda name: name, numbers=False)]
    for batch in batches:
        heading = f"batch {batch}\nfloat32 {base[batch]:.1f} %"
        columns.append(Column(heading, lambda name, batch=batch: cell(name, batch)))  # type: ignore[misc]
    told = (
        "Fewest bits of which the best format, and that of all larger numbers measured, is at most "
        f"{tolerance:g} points below float32 at the same batch; means over seeds. In brackets: "
        "that format, and its points to float32. more: the most bits measured are not enough."
    )
    most = max(one.bits for line in found.values() for one in line.values() if one.wire)
    series = []
    for number, (name, style) in enumerate(styles(found).items()):
        line = sorted(found[name].items())
        series.append(
            Series(
                name,
                style,
                [batch * (1 + APART * (number - (len(found) - 1) / 2)) for batch, _ in line],
                [one.bits for _, one in line],
            )
        )
        beyond = [x for x, (_, one) in zip(series[-1].x, line, strict=True) if not one.wire]
        if beyond:
            top = [most + 1.5] * len(beyond)
            series.append(Series("", replace(style, marker="+"), beyond, top, join="none"))
    axes = Axis("batch", "log2", ticks=batches), Axis("bits needed", limits=(0, most + 3))
    chart = Chart(
        "bits_by_batch",
        "Bits that gradients need, by batch",
        [
            f"At most {tolerance:g} point{'s' * (tolerance != 1)} below float32 at the same batch. "
            "+ at the top: more bits. No mark: not measured."
        ],
        told,
        [Panel("", *axes, series)],
        scale=(1.6, 1.1),
    )
    return Section("Bits by batch", tables=[tabulate("Bits by batch", columns, found, told)],
                   charts=[chart])  # fmt: skip
