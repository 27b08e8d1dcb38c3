"""Rows of one test fail as tests of their own would."""

import os
from pathlib import Path

import pytest
from every import every


def test_all_rows_run_and_all_that_fail_are_told(tmp_path: Path) -> None:
    seen = []

    @every("y", [0, 1])
    @every("x, text", [(1, "a"), (2, "b"), (3, "c")])
    def test(x: int, text: str, y: int, tmp_path: Path) -> None:
        seen.append((x, text, y))
        (tmp_path / "new").touch(exist_ok=False)
        assert x < 2 or y

    with pytest.raises(BaseExceptionGroup, match="2 of 3 rows") as caught:
        test(tmp_path=tmp_path)
    assert seen == [(x, text, y) for y in (0, 1) for x, text in ((1, "a"), (2, "b"), (3, "c"))]
    notes = [error.__notes__ for error in caught.value.exceptions]
    assert notes == [["with {'text': 'b', 'x': 2}"], ["with {'text': 'c', 'x': 3}"]]
    assert caught.value.__notes__ == ["with {'y': 0}"]


def test_what_should_raise_and_does_not_fails() -> None:
    @every("x", [1, 0])
    def test(x: int) -> None:
        with pytest.raises(ZeroDivisionError):
            _ = 1 / x

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test()


@every("name", ["EVERY_A", "EVERY_B"])
def test_rows_are_apart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not {"EVERY_A", "EVERY_B"} & {*os.environ} and not list(tmp_path.iterdir())
    monkeypatch.setenv(name, "1")
    (tmp_path / name).touch()
    print(name)
    assert capsys.readouterr().out == f"{name}\n"
    print("left")


def test_no_rows_and_other_names_are_mistakes() -> None:
    with pytest.raises(AssertionError, match="no rows"):
        every("x", [])
    with pytest.raises(AssertionError, match="takes no y"):
        every("y", [1])(lambda x: None)
