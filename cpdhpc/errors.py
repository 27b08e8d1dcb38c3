"""Errors that a user can fix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

Error = TypeVar("Error", bound=Exception)


class UserError(ValueError):
    """An error that the user can fix; the message is one line, and no traceback is shown.

    key: the argument, option or dotted key of a file that is wrong, "" if it is not one
    """

    def __init__(self, message: str = "", *, key: str = "") -> None:
        self.key = key
        super().__init__(message)


class ConfigError(UserError):
    """A configuration that cannot be used."""


class Refused(Exception):
    """An error about one value. The message is "function: argument=value: allowed".

    function: the function or class that was called
    argument: its argument's name
    value: the wrong value; of an array the property that is wrong, such as its dtype
    allowed: the allowed values, for example "must be an int, 1 or more"
    shown: the text for a value whose repr is too long, such as an array's
    state: the text between argument and allowed, for example " has dtype int64"; default "=value"
    """

    def __init__(
        self,
        function: str,
        argument: str,
        value: object,
        allowed: str,
        shown: str | None = None,
        state: str | None = None,
    ) -> None:
        self.function = function
        self.argument = argument
        self.value = value
        self.allowed = allowed
        self.shown = repr(value) if shown is None else shown
        self.state = f"={self.shown}" if state is None else state
        super().__init__(f"{function}: {argument}{self.state}: {allowed}")

    @classmethod
    def of(cls, what: str, value: object, allowed: str, state: str) -> Self:
        """Return the error of what, "function: argument"."""
        function, _, argument = what.partition(": ")
        return cls(function, argument, value, allowed, state=state)

    def __reduce__(self) -> tuple[type[Refused], tuple[object, ...], dict[str, object]]:
        """Return how to make it anew, for example in another process."""
        fields = (
            self.function, self.argument, self.value, self.allowed, self.shown, self.state
        )  # fmt: skip
        return type(self), fields, {**vars(self), "args": self.args}


class ArgumentError(Refused, ValueError):
    """A value that an argument must not have."""


class ArgumentTypeError(Refused, TypeError):
    """A value whose type an argument must not have."""


def reworded(error: Error, words: str) -> Error:
    """Return an error like this one, with its fields, but another message.

    Raises TypeError if its class is not constructed from a message.
    """
    other = copy.copy(error)
    other.args = (words,)
    return other if str(other) == words else type(error)(words)  # OSError shows its number


@contextmanager
def told(where: str) -> Iterator[None]:
    """Raise an error of the block as ConfigError, in one line that begins with where."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{where}: {type(error).__name__}: {text}") from error
