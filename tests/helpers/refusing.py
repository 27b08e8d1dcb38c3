"""Errors that tests ask for by their fields, not by their prose."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cpdhpc.errors import Refused

ANY = object()


@contextmanager
def refused(
    function: str, argument: str, allowed: str = "", value: object = ANY
) -> Iterator[pytest.ExceptionInfo[Refused]]:
    """Pass if the block raises an error about this argument of this function.

    allowed: a part of the text of the allowed values; value: the wrong value
    """
    with pytest.raises(Refused) as caught:
        yield caught
    error = caught.value
    assert (error.function, error.argument) == (function, argument), error
    assert allowed in error.allowed and (value is ANY or error.value == value), error
