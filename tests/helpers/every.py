"""Cases too small to be tests of their own: one test runs them all and tells all that fail."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from reprlib import Repr
from typing import Any

import pytest

SHORT = Repr()
SHORT.maxstring = SHORT.maxother = 200
SHORT.maxdict = SHORT.maxlist = SHORT.maxtuple = 9


def every(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[..., Callable[..., None]]:
    """Run a test with each row in turn, with names as for pytest.mark.parametrize.

    Each has a directory of its own where the test takes tmp_path, and sees neither what another
    has printed nor what it has patched. An error has its row as a note; several are a group.
    """
    keys = names.split(", ") if isinstance(names, str) else list(names)
    alone = names == keys[0]  # a value is the row
    values = [dict(zip(keys, (row,) if alone else row, strict=True)) for row in rows]
    assert values, f"{names}: no rows"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for number, row in enumerate(values):
                try:
                    in_turn(test, number, row, fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {SHORT.repr(row)}")
                    failed.append(error)
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(values)} rows", failed)

        taken = inspect.signature(test)
        assert {*keys} <= {*taken.parameters}, f"{test.__name__}: takes no {names}"
        left = [each for name, each in taken.parameters.items() if name not in keys]
        run.__signature__ = taken.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def in_turn(
    test: Callable[..., None], number: int, row: dict[str, Any], fixtures: dict[str, Any]
) -> None:
    """Run a test with a row, apart from the rows before."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] /= str(number)
        own["tmp_path"].mkdir()
    if "capsys" in own:
        own["capsys"].readouterr()
    if "monkeypatch" not in own:
        test(**own, **row)
        return
    with own["monkeypatch"].context() as patch:
        test(**own | {"monkeypatch": patch}, **row)
