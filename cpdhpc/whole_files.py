"""Files that replace others completely or not at all, in folders that others may write to, too."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import ordinary
from .errors import ConfigError, UserError

ABANDONED_S = 86_400.0  # age of a temporary file without a known process, after which it is removed
NAME_BYTES = 150  # of a target's name in that of its temporary file; the system allows 255 in all
ENDING = re.compile(r"(?P<place>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{16}\.tmp")


NOT_OWN = "is a link, has a second name, or is not an ordinary file"


class StoreError(UserError):
    """A file that is missing, damaged, not what it should be, or cannot be written."""


def as_path(what: str, path: object) -> Path:
    """Return a path. Raises TypeError, in the name of what, for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{what}: path={path!r}: must be a path")
    return Path(path)


def open_own(path: str | Path, flags: int) -> int:
    """Return a descriptor of the file of exactly that name: an opener for files that we write.

    Raises OSError if it is a link, a pipe or another device, or has a second name: in a folder
    that others may write to, these could lead us to any file of ours. Directories may be links.
    """
    more = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: do not wait for pipes
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | more, 0o666)
    except OSError as error:  # a link, or a pipe without a reader: the same as fstat finds
        reason = NOT_OWN if error.errno in (errno.ELOOP, errno.ENXIO) else error.strerror
        raise OSError(error.errno, reason, str(path)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.EPERM, NOT_OWN, str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre mounted without flock, as one
PAUSE_S = 0.05  # between two looks whether a lock is free


@contextmanager
def once_for_all(path: Path, most_s: float) -> Iterator[tuple[bool, Callable[[], None]]]:
    """Hold a file's lock for a while; yield whether its work is to be done, and what notes that.

    For work that several processes need and one should do: the others wait, and find it done. The
    lock ends with its process. Who has waited for most_s, or finds no locks or no folder to write
    to, does the work without. Nobody is to rely on it: it saves time only.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        yield True, lambda: None
        return
    try:
        end_s = time.monotonic() + most_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NO_LOCKS or time.monotonic() > end_s:
                    break
                if not isinstance(error, BlockingIOError):
                    raise
            time.sleep(PAUSE_S)
        yield not os.fstat(descriptor).st_size, lambda: os.truncate(descriptor, 1)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path | str) -> Iterator[io.BufferedRandom]:
    """Yield an empty temporary file that replaces path at the end, unless an error occurs.

    At any moment, even after a kill or a crash, path holds the old content or the new one. A link
    of that name is itself replaced; its target stays. Each writer has a file of its own, with an
    unpredictable name. Temporary files for path that killed writers left are removed.
    Raises StoreError for an OSError, such as a full disk; the temporary file is then removed.
    """
    path = Path(path)
    _remove_abandoned(path)
    name = f"{_beginning(path)}{_place()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    temporary = path.with_name(name)
    try:
        with open(temporary, "x+b", opener=open_own) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                _check_ours(temporary, file.fileno())
                temporary.replace(path)
                _sync(path.parent)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from None


def _check_ours(temporary: Path, descriptor: int) -> None:
    """Raise OSError if the name leads to something else by now: others may write there, too."""
    if not os.path.samestat(os.lstat(temporary), os.fstat(descriptor)):
        raise OSError(errno.ESTALE, "another program has replaced its temporary file")


def put(path: Path | str, content: str | bytes | memoryview) -> None:
    """Write a file, text in UTF-8, that replaces path. Raises StoreError as replacing."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


SEAL = "sha256"  # the key of a JSON object's digest
HEAD = "# SHA-256 of what follows: "  # the first line of a text with one


def sealed_json(values: Mapping[str, Any]) -> str:
    """Return an object as JSON with a digest of its content, which reveals a flipped bit."""
    written = json.loads(json.dumps(values))  # keys become strings as in the file, in their order
    return json.dumps({**written, SEAL: _json_digest(written)}, indent=1) + "\n"


def unsealed_json(text: str) -> dict[str, Any]:
    """Return the object in a text of sealed_json, or one without a digest, from older versions.

    Raises ValueError if it is not an object, or does not match its digest.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("is no JSON object")
    if SEAL in values and values.pop(SEAL) != _json_digest(values):
        raise ValueError("is damaged, or was changed by another program")
    return values


def _json_digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sealed(text: str) -> str:
    """Return a text whose comments begin with #, such as TOML, after a line with its digest."""
    return f"{_head(text.encode()).decode()}\n{text}"


def check_sealed(path: Path | str) -> None:
    """Raise StoreError if a file has a first line of sealed that does not match its content."""
    try:
        content = ordinary.content(path)
    except OSError:  # its reader reports the reason
        return
    head, _, rest = content.partition(b"\n")
    if head.startswith(HEAD.encode()) and head != _head(rest):
        raise StoreError(
            f"{path}: is damaged, or was changed by hand: remove its first line if it is right"
        )


def _head(content: bytes) -> bytes:
    return f"{HEAD}{hashlib.sha256(content).hexdigest()}".encode()


def _read(path: Path | str) -> str:
    """Return the text of an ordinary file, or of a pipe of the shell, such as <(...)."""
    of_shell = str(path).startswith(("/dev/", "/proc/"))
    opener = None if of_shell else ordinary.open_ordinary
    with open(path, encoding="utf-8-sig", opener=opener) as file:
        return file.read()


DEEPEST = 100  # functions that walk through tables call themselves; Python allows 1,000 calls
TOO_DEEP = f"has values in more than {DEEPEST} nested tables or lists"


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises ConfigError if the file is missing, unreadable, not TOML, or nested deeper than DEEPEST.
    """
    try:
        tables = tomllib.loads(_read(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        what = (
            "is an HDF5 file, not TOML" if b"\x89HDF" in error.object else f"is not TOML: {error}"
        )
        raise ConfigError(f"{path}: {what}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}{_line(path, str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        inner = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
        level = [x for x in inner if isinstance(x, dict | list)]
        if not level:
            return tables
    raise ConfigError(f"{path}: {TOO_DEEP}")


def _line(path: Path | str, text: str) -> str:
    """Return the line of a file that an error names by number, for example of a repeated key."""
    match = re.search(r"at line (\d+)", text)
    lines = _read(path).splitlines()
    number = int(match[1]) if match else len(lines)
    return f": {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""


FILES = {  # key that no other kind of file has at its top -> the kind of file
    "kind": "a study, for the command study",
    "layer": "a job of the command autoencoder",
    "model": "a job of the command train",
    "machine": "a machine's speeds, of bench fit",
    **dict.fromkeys(
        ("launcher", "partition", "cores_per_node", "modules"), "the profile of a site, for --site"
    ),
}


def read_file_of(path: Path | str, key: str) -> dict[str, Any]:
    """Return the tables of a TOML file, of FILES' kind for key or of no recognised kind.

    Raises ConfigError if it is another of these kinds, or as read_toml.
    """
    raw = read_toml(path)
    other = next((each for each in FILES if each in raw and FILES[each] != FILES[key]), None)
    if other is not None and key not in raw:
        raise ConfigError(f"{path}: is {FILES[other]}: must be {FILES[key]}")
    return raw


def put_figure(path: Path, figure: Any, dpi: int) -> None:
    """Write a figure of matplotlib, in the format of path's suffix. Raises StoreError as put."""
    image = io.BytesIO()
    figure.savefig(image, dpi=dpi, format=path.suffix[1:] or "png")
    put(path, image.getbuffer())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beginning(path: Path) -> str:
    """Return the common prefix of a target's temporary files."""
    name = os.fsencode(path.name)
    short = path.name if len(name) <= NAME_BYTES else hashlib.sha256(name).hexdigest()
    return f".{short}."


def _place() -> str:
    """Return a digest of the scope of process numbers: a kernel since its boot, a namespace.

    If the system does not report it, one that no other has.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = bytes(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return secrets.token_hex(4)
    return hashlib.sha256(kernel + space).hexdigest()[:8]


def _remove_abandoned(path: Path) -> None:
    """Remove our own temporary files for path whose process is gone; of other nodes, old ones."""
    beginning = _beginning(path)
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if not entry.name.startswith(beginning):
                continue
            writer = ENDING.fullmatch(entry.name[len(beginning) :])
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if writer and ours and _is_abandoned(writer, time.time() - status.st_mtime):
                    Path(entry.path).unlink()


def _is_abandoned(writer: re.Match[str], age_s: float) -> bool:
    if writer["place"] != _place():
        return age_s > ABANDONED_S
    try:
        os.kill(int(writer["process"]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it runs, under another user: its number was reused
        pass
    return age_s > ABANDONED_S
