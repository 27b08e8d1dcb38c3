"""Lines that benchmarks print: comments, tables, the machine."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from ...world.mpi import library_version
from ...world.ranks import Ranks
from ..provenance import cpu_clone, hosts, processor


def comments(lines: Iterable[str]) -> list[str]:
    """Return texts as comments above a table, in lines of at most 98 characters; "" is left out."""
    return [
        f"# {'  ' * (number > 0)}{part}"
        for text in lines
        for number, part in enumerate(textwrap.wrap(text, 94, break_on_hyphens=False))
    ]


def table(forms: Mapping[str, str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table: its headings as comments, then the rows.

    forms: heading -> format of the numbers below, as "9.3g"; those with "<" are to the left. A
        heading may have two lines. A column is as wide as its format, or as its heading
    rows: of numbers, and of texts, which have no format; NaN is shown as "-"
    """
    heads = [f"\n{each}".rsplit("\n", 2)[-2:] for each in forms]
    sides = []
    for (over, head), form in zip(heads, forms.values(), strict=True):
        side, width = "<" * form.startswith("<"), form.lstrip("<").partition(".")[0]
        sides.append(f"{side or '>'}{max(len(over), len(head), int(width))}")

    def line(begin: str, cells: Iterable[str]) -> str:
        padded = (f"{cell:{side}}" for cell, side in zip(cells, sides, strict=True))
        return " ".join([begin, *padded]).rstrip()

    def text(cell: object, form: str) -> str:
        if isinstance(cell, str):
            return cell
        return "-" if cell != cell else f"{cell:{form.lstrip('<')}}".strip()

    above = [line("#", each) for each in zip(*heads, strict=True) if any(each)]
    below = (map(text, row, forms.values()) for row in rows)
    return [*above, *(line(" ", row) for row in below)]


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def show(
    world: Ranks, above: Iterable[str], forms: Mapping[str, str], rows: Iterable[Sequence[object]]
) -> None:
    """Print comments and a table on process 0, each row as soon as it is measured. Collective."""
    say(world, [*comments(above), *table(forms, [])])
    for row in rows:
        say(world, table(forms, [row])[-1:])


def say(world: Ranks, lines: Iterable[str]) -> None:
    """Print lines on process 0."""
    if world.process == 0:
        print("\n".join(lines), flush=True)


def machine_line(world: Ranks) -> str:
    """Return processor, cores, ranks, MPI library, kernels in a line. Collective."""
    names = hosts(world)
    library = library_version() if world.has_mpi else "no MPI"
    ranks = f"{world.ranks} rank{'s' * (world.ranks > 1)} on {len(set(names))} host(s)"
    return f"{processor()}, {os.cpu_count()} cores, {ranks}, {library}, kernels {cpu_clone()}"
