"""Docstrings of cpdhpc as reStructuredText, for Sphinx.

A docstring has a sentence, then lines `name: words`, whose further lines are indented, and lines
`Returns ...`, `Raises ...` and `Source: ...`, whose further lines are not. They become lists of
fields; all other text stays as it is.
"""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ENTRY = re.compile(r"(\w+(?:(?:, \.\.\. |, | and )\w+)*): (.*)")
OPENING = re.compile(r"(Returns|Raises|Source:?)\b[:,]? *(.*)")
MARKED = re.compile(r"([\\*|]|_(?!\w))")


def escaped(text: str) -> str:
    """Return plain text so that reStructuredText shows it as it is; `code` becomes literal."""
    pieces = re.split(r"`+([^`]+)`+", text)
    plain = [MARKED.sub(r"\\\1", piece) for piece in pieces[::2]]
    code = [f"``{piece}``" for piece in pieces[1::2]] + [""]
    return "".join(a + b for a, b in zip(plain, code, strict=True))


def known_names(value: Any) -> set[str]:
    """Return the names that entries of a docstring may explain: parameters and attributes."""
    names = set(getattr(value, "__annotations__", ()))
    for each in getattr(value, "__mro__", ()):
        names |= set(vars(each)) | set(getattr(each, "__annotations__", ()))
    with suppress(TypeError, ValueError):  # of some classes Python knows no signature
        names |= set(inspect.signature(value).parameters)
    return names


def converted(lines: list[str], names: set[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText."""
    out: list[str] = []
    before = ""  # the last line of the docstring
    in_field = in_entry = in_code = in_doctest = False
    for line in lines:
        indented = line.startswith("    ")
        entry, opening = ENTRY.fullmatch(line), OPENING.fullmatch(line)
        new_sentence = line[:1].isupper() and (in_entry or before.endswith("."))
        if in_doctest or line.startswith(">>>"):
            in_doctest = bool(line)
            out.append(line)
        elif not line:
            out.append("")
            in_field = in_entry = False
        elif indented and (in_code or not before):  # a paragraph of code
            out += [] if in_code else [".. code-block:: python", ""]
            in_code = True
            out.append(line)
            before = line
            continue
        elif entry and not set(re.findall(r"\w+", entry[1])) - names - {"and"}:
            out += [] if in_field else [""]
            out.append(f":{entry[1]}: {escaped(entry[2])}")
            in_field = in_entry = True
        elif opening and (in_entry or not before or before.endswith((".", ":"))):
            out += [] if in_field else [""]
            out.append(f":{opening[1].removesuffix(':')}: {escaped(opening[2])}")
            in_field, in_entry = True, False
        elif in_field and not new_sentence:
            out.append("    " + escaped(line.strip()))
        else:
            out += [""] if in_field else []
            in_field = in_entry = False
            out.append(escaped(line.strip()))
        in_code = in_code and not line
        before = line
    return [*out, ""]


def convert(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring; called by autodoc."""
    lines[:] = converted(lines, known_names(value))


def setup(app: Sphinx) -> dict[str, bool]:
    """Let autodoc convert docstrings."""
    app.connect("autodoc-process-docstring", convert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
