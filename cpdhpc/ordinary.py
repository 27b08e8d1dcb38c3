"""Reads files whose names others may have replaced by a pipe or a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_ordinary(path: str | Path, flags: int) -> int:
    """Return a descriptor of a file, or of the file that a link leads to: an opener for open.

    Raises OSError if it is a pipe, on which reading would wait, or a device such as /dev/zero.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EPERM, "is a pipe or a device, not an ordinary file", str(path))


def content(path: Path | str) -> bytes:
    """Return the bytes of a file. Raises the OSError of open_ordinary."""
    with open(path, "rb", opener=open_ordinary) as file:
        return file.read()


def text(path: Path | str, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8. Raises open_ordinary's OSError, UnicodeDecodeError."""
    return content(path).decode("utf-8", errors)
