"""docs/reference/commands.md has every option of every command, as --help shows it."""

from __future__ import annotations

from command_page import PAGE, page


def test_the_page_is_that_of_the_parsers() -> None:
    assert PAGE.read_text() == page(), "python tests/command_page.py writes it anew"
