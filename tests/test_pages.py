"""What docs has for the site: pictures of diagrams, docstrings as Sphinx reads them, language."""

import importlib.util
import re
from dataclasses import replace
from types import ModuleType

import language
import pytest
from every import every
from training import ROOT


def of_docs(name: str) -> ModuleType:
    """A module of docs, which is no package."""
    spec = importlib.util.spec_from_file_location(f"of_docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_diagram_has_its_picture_and_no_picture_is_left_over() -> None:
    pictures = of_docs("pictures")
    drawn = {path.name for path in pictures.FOLDER.glob("*.svg")}
    assert drawn == pictures.blocks().keys(), "python docs/pictures.py draws what is missing"
    assert len(drawn) >= 12
    assert pictures.picture_of("a --> b") != pictures.picture_of("a --> c")


ENTRY = ["size: of it", "    and more", "Returns both.", "Raises ValueError for a size of", "0."]


@every(
    "lines, wanted",
    [
        (["One sentence."], ["One sentence."]),
        (["2**k of x_ or |y|."], [r"2\*\*k of x\_ or \|y\|."]),
        (["See `docs/a_.md`."], ["See ``docs/a_.md``."]),
        (ENTRY[:2], ["", ":size: of it", "    and more"]),
        (["unknown: no field"], ["unknown: no field"]),
        (["size, shape: of both"], ["", ":size, shape: of both"]),
        (ENTRY[2:3], ["", ":Returns: both."]),
        (ENTRY[3:], ["", ":Raises: ValueError for a size of", "    0."]),
        (["size: of it", "A text."], ["", ":size: of it", "", "A text."]),
        (["size: of it", "and more."], ["", ":size: of it", "    and more."]),
        (["Text:", "", "    f(*x)"], ["Text:", "", ".. code-block:: python", "", "    f(*x)"]),
        ([">>> f(*x)", "2"], [">>> f(*x)", "2"]),
    ],
)
def test_docstrings_become_fields(lines: list[str], wanted: list[str]) -> None:
    assert of_docs("docstrings").converted(lines, {"size", "shape"}) == [*wanted, ""]


def test_language_is_within_its_limits() -> None:
    assert language.main() == 0


def test_prose_has_no_code_and_goes_on_after_it() -> None:
    page = "One `where`.\n\n    where\n    where\n\n[Two](where.md).\n\n```sh\nwhere\n```\nFour."
    assert "where" not in language.prose(page)
    assert re.findall(r"\w+", language.prose(page)) == ["One", "Two", "Four"]


@every("kind", [language.PAGES, language.DOCSTRINGS])
def test_a_count_above_its_limit_fails(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = language.HABITS["where"]
    monkeypatch.setitem(language.HABITS, "where", replace(first, **{kind: 0.0}))
    monkeypatch.setattr(language, "texts", lambda _: iter([(ROOT / "x.md", "Here, where it is.")]))
    assert language.main() == 1
    assert "too many" in capsys.readouterr().out


@every(
    "text, hits",
    [
        ("What it is.", 1),
        ("What is it?", 0),
        ("It is. Who comes is late.", 1),
        ("It knows what it is.", 0),
        ("A heading\n\nWhatever it is.", 1),
        ("Type\n\n    What\n\nand read. What it is.", 1),
    ],
)
def test_sentences_that_open_with_what_are_counted(text: str, hits: int) -> None:
    pattern = language.HABITS["opening what, who"].pattern
    assert len(re.findall(pattern, language.prose(text))) == hits
