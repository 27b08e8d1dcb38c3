"""Reference pages of all public names, and links to pages and names, for Sphinx.

Pages are written to docs/api when Sphinx starts, one for each name of `__all__`, so no name can be
forgotten. In all pages `docs/NAME.md` becomes a link to that page, and a public name a link to its
own page.
"""

from __future__ import annotations

import inspect
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

FOLDER = Path(__file__).parent / "api"
PACKAGES = {  # package -> title of its section
    "cpdhpc": "cpdhpc: ranks, collectives, number formats",
    "cpdhpc.formats": "cpdhpc.formats: what a format is",
    "cpdhpc.compress": "cpdhpc.compress: compressors of gradients",
    "cpdhpc.darray": "cpdhpc.darray: distributed arrays",
    "cpdhpc.torch": "cpdhpc.torch: reducer, hooks, optimisers",
    "cpdhpc.torch.controllers": "cpdhpc.torch.controllers: learning rate and batch",
    "cpdhpc.torch.precision": "cpdhpc.torch.precision: rounded arithmetic",
    "cpdhpc.torch.quantized": "cpdhpc.torch.quantized: networks of integers",
    "cpdhpc.torch.split_images": "cpdhpc.torch.split_images: images split over ranks",
    "cpdhpc.torch.autograd": "cpdhpc.torch.autograd: windows with gradients",
    "cpdhpc.torch.backend": "cpdhpc.torch.backend: torch.distributed over MPI",
}

ONLY = {"cpdhpc.torch.autograd": ["accumulate", "exchange", "join"]}  # the others are internal
MORE = {
    "cpdhpc.torch.backend": """It is used by its name. `cpdhpc.torch.set_wires` lets its sums travel
in few bits; `docs/reference/torch_backend.md` describes it.

```python
import cpdhpc.torch
import torch

torch.distributed.init_process_group("cpdhpc", init_method="mpi://")
```"""
}
EXAMPLES = dict(
    re.findall(
        r"^(cpdhpc[\w.]+)\n-+\n\n(.*?)(?=\n^cpdhpc[\w.]+\n-|\Z)",
        (Path(__file__).parent / "examples.rst").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


def public(package: str) -> dict[str, Any]:
    """Return the public names of a package and their values, without its modules."""
    module = import_module(package)
    names = getattr(module, "__all__", None)
    names = ONLY.get(package, names)
    if names is None:  # what the module defines itself
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == package
        ]
    values = {name: getattr(module, name) for name in sorted(names, key=str.lower)}
    return {name: value for name, value in values.items() if not inspect.ismodule(value)}


def directive(value: Any) -> str:
    """Return the directive of autodoc that shows a value."""
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if inspect.isroutine(value) else "autodata"


def page(package: str, name: str, value: Any) -> str:
    """Return the page of a public name."""
    lines = [name, "=" * len(name), "", f".. py:currentmodule:: {package}", ""]
    kind = directive(value)
    lines.append(f".. {kind}:: {package}.{name}")
    if kind in ("autoclass", "autoexception"):
        lines.append("   :members:")
    if kind == "autodata":
        lines += ["   :no-value:", "", "   A table or constant; its names: "]
        lines[-1] += ", ".join(f"``{each}``" for each in value) if hasattr(value, "keys") else ""
        lines[-1] = lines[-1].removesuffix("; its names: ")
    example = EXAMPLES.get(f"{package}.{name}") or EXAMPLES.get(f"cpdhpc.{name}")
    if example and value is not getattr(import_module("cpdhpc"), name, value):
        example = EXAMPLES.get(f"{package}.{name}")  # another thing of that name
    if example:
        lines += ["", ".. rubric:: Example", "", example]
    return "\n".join([*lines, ""])


def signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, shown: str | None, returns: str
) -> tuple[str, str] | None:
    """Return the signature of a table of a job file: keys and defaults, without their limits."""
    fields = getattr(value, "model_fields", None)
    if not inspect.isclass(value) or not fields:
        return None
    keys = [
        key if field.is_required() else f"{key}={field.default!r}" for key, field in fields.items()
    ]
    return f"(*, {', '.join(keys)})", returns


def summary(value: Any) -> str:
    """Return the first sentence of a docstring, as Markdown."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return "Table or constant."
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    first = re.split(r"(?<=\.) ", text)[0]
    return first.replace("|", r"\|").replace("*", r"\*").replace("[", r"\[").replace("<", "&lt;")


def about(package: str) -> str:
    """Return the first paragraph of a package's docstring, as Markdown."""
    text = " ".join((import_module(package).__doc__ or "").split("\n\n")[0].split())
    return text.replace("<", "&lt;").replace("*", r"\*")


def of_package(package: str, title: str) -> str:
    """Return the page that lists a package's public names."""
    lines = [f"# {title}", "", about(package), ""]
    names = public(package)
    if package in MORE:
        lines += [MORE[package], ""]
    if names:
        lines += ["| name | what it is |", "|---|---|"]
        lines += [
            f"| [`{name}`]({package}.{name}.rst) | {summary(value)} |"
            for name, value in names.items()
        ]
        lines += ["", "```{toctree}", ":hidden:", "", *(f"{package}.{name}" for name in names)]
        lines += ["```", ""]
    return "\n".join(lines)


def index() -> str:
    """Return the page that lists the packages."""
    lines = ["# Python: all public names", ""]
    lines += ["Each name has its page: signature, shapes, units, errors and, if one helps, an"]
    lines += ["example.", "", "| package | what is in it |", "|---|---|"]
    lines += [f"| [`{package}`]({package}.md) | {about(package)} |" for package in PACKAGES]
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", *PACKAGES, "```", ""])


def write_pages(app: Sphinx) -> None:
    """Write the pages anew; those that have not changed keep their time."""
    pages = {
        f"{package}.{name}.rst": page(package, name, value)
        for package in PACKAGES
        for name, value in public(package).items()
    }
    pages |= {f"{package}.md": of_package(package, title) for package, title in PACKAGES.items()}
    pages["index.md"] = index()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.iterdir():
        if path.name not in pages:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in pages.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


OUTSIDE = {"README.md": "index", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changes"}


def targets() -> dict[str, str]:
    """Return the page of each public name: dotted, and bare if it is one class's alone."""
    found: dict[str, str] = {}
    bare: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name in public(package):
            found[f"{package}.{name}"] = f"api/{package}.{name}"
            if name != name.lower() and name != name.upper():
                bare.setdefault(name, []).append(f"api/{package}.{name}")
    return {name: pages[0] for name, pages in bare.items() if len(set(pages)) == 1} | found


class Links(SphinxTransform):
    """Makes links of names of pages and of public names that stand in backticks."""

    default_priority = 220
    names: dict[str, str] | None = None

    def apply(self, **options: object) -> None:
        if Links.names is None:
            Links.names = targets()
        for literal in [*self.document.findall(nodes.literal)]:
            if isinstance(literal.parent, nodes.reference | addnodes.pending_xref | nodes.title):
                continue
            text = literal.astext()
            found = re.fullmatch(r"docs/([\w./]+)\.md", text)
            target = found[1] if found else OUTSIDE.get(text)
            explicit = target is None
            target = target or Links.names.get(text.partition("(")[0])
            if target is None or target == self.env.docname:
                continue
            link = addnodes.pending_xref(
                "", refdomain="std", reftype="doc", reftarget=f"/{target}", refexplicit=explicit
            )
            link["refdoc"] = self.env.docname
            link["refwarn"] = True
            shown = literal.deepcopy() if explicit else nodes.inline("", text)
            link.append(shown)
            literal.replace_self(link)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages first; make links while pages are read."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-signature", signature)
    app.add_transform(Links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
