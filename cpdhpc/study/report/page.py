"""Reports as one HTML page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from .chart import Chart, image
from .table import Report


def page(reports: Sequence[Report]) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cpdhpc.study.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = ", ".join(report.title for report in reports)
    return environment.get_template("page.html").render(
        title=title, reports=reports, svg=svg, unique=unique
    )


def svg(chart: Chart) -> str:
    """Return a figure as the address of an image."""
    return f"data:image/svg+xml;base64,{b64encode(image(chart, 'svg')).decode()}"


def unique(number: int, title: str) -> str:
    """Return a name that links of the page can go to."""
    return f"r{number}-" + "".join(c if c.isalnum() else "-" for c in title.lower())
