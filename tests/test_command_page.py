"""docs/reference/commands.md and the examples in help: both are what the command line takes."""

import shutil
from pathlib import Path

import pytest
from command_page import PAGE, commands, example_lines, page, parser_of, words_of
from every import every
from training import ROOT

from cpdhpc.lab.cli import main
from cpdhpc.lab.commands import COMMANDS, EITHER, MPIRUN, SECTIONS, Command, Group
from cpdhpc.lab.commands.parsing import START, parser

QUICK = (  # their examples are run, in this order
    "precision presets",
    "precision show",
    "darray show",
    "study plan",
    "study render",
    "study freeze",
    "scripts",
    "completion",
    "bench layer",
    "bench batchnorm",
)


def row_of(words: list[str]) -> Command:
    row = COMMANDS[words[0]]
    if isinstance(row, Group):
        found = row.actions[words[1]] if len(words) > 1 else row.default
        assert found is not None
        return found
    return row


def test_the_page_is_that_of_the_parsers() -> None:
    assert PAGE.read_text() == page(), "python tests/command_page.py writes it anew"


@every("command", list(commands()))
def test_help_has_two_examples_which_the_parser_takes(command: list[str]) -> None:
    row, of = row_of(command), parser_of(command)
    examples = example_lines(of)
    assert len(set(examples)) == 2
    under_mpirun = [example.startswith("mpirun ") for example in examples]
    assert under_mpirun == [row.on_ranks == MPIRUN, row.on_ranks in (MPIRUN, EITHER)]
    for example in examples:
        assert f"    {example}\n" in of.format_help()
        words = words_of(example)
        assert words[: len(command)] == command
        assert parser(words).parse_args(words).run is row
        for word in words:
            if word.startswith(("inputs/", "slurm/")):
                assert (ROOT / word).is_file(), word


@every("name", ["", *(name for name, row in COMMANDS.items() if isinstance(row, Group))])
def test_lists_of_commands_have_sections_and_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = COMMANDS.get(name)
    if isinstance(row, Group) and row.default:
        return
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    rows = row.actions if isinstance(row, Group) else COMMANDS
    for each in rows:
        assert shown.count(f"\n  {each} ") == 1
    for title in SECTIONS if row is None else ("actions",):
        assert f"\n{title}:\n" in shown
    for example in START if row is None else example_lines(parser_of([name])):
        assert f"    {example}\n" in shown
        parser(words_of(example)).parse_args(words_of(example))


@every("name", QUICK)
def test_quick_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("inputs", "slurm"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    for example in example_lines(parser_of(name.split())):
        shutil.rmtree("jobs", ignore_errors=True)
        assert main(words_of(example)) == 0, example
        assert capsys.readouterr().out.strip()
