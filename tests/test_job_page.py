"""docs/reference/jobs.md says of job files what the models say that read them."""

from typing import Annotated

import pytest
from job_page import FOLDER, entries, keys_table, pages, train_page
from pydantic import Field

from cpdhpc.config import Section
from cpdhpc.torch.precision.tensors import UpdateFormat


def test_the_pages_are_what_the_models_say() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("jobs*.md")}
    assert found == pages(), "python tests/job_page.py writes them anew"


def test_a_table_says_all_that_it_takes() -> None:
    """Its own keys, be they called as another table's, and those that it has from one above."""
    _, _, after = train_page().partition("`precision.rule`: UpdateFormat\n")
    found = after.partition("\n##")[0]
    assert all(f"`{name}`" in found for name in UpdateFormat.model_fields)
    assert all(f"| `{name}` | boolean |" in found for name in ("master", "kahan"))


def test_entries_of_a_docstring() -> None:
    text = """What it is.

    one, two: of both; three: goes on
        here, as file: is no key
    This is no entry; four: neither is said before a line of its own
    five: last
    Source: nobody.
    """
    both = "of both"
    names = ("one", "two", "three", "five", "six")
    found = entries(text, names)
    assert found.pop("three") == "goes on here, as file: is no key"
    assert found == {"one": both, "two": both, "five": "last"}


def test_a_key_that_nobody_explains_is_an_error() -> None:
    class Explained(Section):
        """[table]: of one key.

        size: of it
        """

        size: Annotated[int, Field(ge=1)] = 3

    class Forgotten(Explained):
        """[table]: of two."""

        shape: str

    *_, row = keys_table(Explained)
    assert row == "| `size` | integer | `3` | >= 1 | of it |"
    with pytest.raises(ValueError, match="Forgotten: no line of its docstring begins with shape:"):
        list(keys_table(Forgotten))
