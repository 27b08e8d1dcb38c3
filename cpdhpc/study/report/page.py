"""A report as one HTML page that needs no other file."""

from __future__ import annotations

from base64 import b64encode

from .figure import image
from .runs import Group, Run
from .table import CAPTION, COLUMNS, rows


def page(runs: list[Run], groups: list[Group]) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cpdhpc.study", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        columns=COLUMNS,
        rows=rows(groups),
        caption=CAPTION,
        figure=b64encode(image(groups, "png")).decode(),
        runs=runs,
        provenance=provenance(runs[0]),
        jobs=[(group.name, group.runs[0].attributes["toml"]) for group in groups],
    )


def provenance(run: Run) -> dict[str, str]:
    """Return what a run's file says of where it was made, without what the page shows elsewhere."""
    shown = ("kind", "schema", "name", "seed", "toml", "status", "parameters")
    return {
        key.replace("_", " "): str(value)
        for key, value in run.attributes.items()
        if key not in shown and value != ""
    }
