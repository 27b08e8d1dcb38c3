"""Errors that tests ask for by their fields, not by their prose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cpdhpc.errors import Refused


@contextmanager
def refused(function: str, argument: str) -> Iterator[pytest.ExceptionInfo[Refused]]:
    """Pass if the block raises an error about this argument of this function."""
    with pytest.raises(Refused) as caught:
        yield caught
    assert (caught.value.function, caught.value.argument) == (function, argument), caught.value
