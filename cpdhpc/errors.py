"""Errors that a user can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something that the user can mend; the message is one line, and no traceback is shown."""


class ConfigError(UserError):
    """A configuration that cannot be used."""


@contextmanager
def told(where: str) -> Iterator[None]:
    """Raise ConfigError, one line that begins with where, for what the block raises."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{where}: {type(error).__name__}: {said}") from error
