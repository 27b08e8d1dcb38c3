"""A lock on a file, which the system lets go of when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .folder import FolderError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre mounted without flock, as one


@contextmanager
def alone(path: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a file's lock for a while; the file stays.

    what: the command that takes it. Where the file system has no locks this is said.
    Raises FolderError where another process holds it, or the file cannot be written.
    """
    try:
        file = path.open("a")
    except OSError as error:
        raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(
                f"{path}: another {what} is at work here: try again when it has ended"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise FolderError(f"{path}: cannot be locked: {error.strerror}") from None
            say(f"{path}: this file system has no locks: do not start {what} twice at a time")
        yield
