"""Files that all processes write and read together, whole or not at all, with one checksum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from .. import store
from ..config import UserError
from .ranks import Ranks

Offsets = Mapping[str, int | None]


def save(
    world: Ranks,
    path: Path,
    rooms: Mapping[str, store.Room],
    attributes: store.Attributes,
    fill: Callable[[Path, Offsets], None],
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> str:
    """Write a file of datasets that takes path's place; return its checksum. Collective.

    rooms, attributes, chunks, compression: as store.create; of process 0
    fill: writes the values to a file that has room for them at these offsets; collective, and what
        it raises it raises on all processes alike
    Raises UserError on all processes alike where the file cannot be written.
    """
    error: Exception | None = None
    checksum = ""
    try:
        with store.replacing(path) if world.process == 0 else nullcontext(path) as temporary:
            arguments = temporary, rooms, attributes, chunks, compression
            offsets = world.on_first(lambda: store.create(*arguments), "save")
            temporary = world.gather(temporary, "save")[0]
            fill(temporary, offsets)
            digests = _digests(world, temporary, "save")
            checksum = world.on_first(lambda: store.seal(temporary, digests), "save")
    except OSError as found:
        error = UserError(f"{path}: cannot be written: {found.strerror or found}")
    except UserError as found:
        error = found
    world.agree(error, "save")
    return checksum


def check(world: Ranks, path: Path) -> str:
    """Return a file's checksum, "" where it has none, as files of others. Collective.

    Each process reads a part of the file. Raises StoreError on all processes alike where the file
    is missing or damaged.
    """

    def look() -> bool:
        with path.open("rb") as file:
            return store.has_checksum(path, file)

    def compare() -> str:
        with path.open("rb") as file:
            return store.check(path, file, digests)

    try:
        if not world.on_first(look, "check"):
            return ""
        digests = _digests(world, path, "check")
        return world.on_first(compare, "check")
    except FileNotFoundError:
        raise store.StoreError(f"{path}: there is no such file") from None
    except OSError as error:
        raise store.StoreError(f"{path}: cannot be read: {error.strerror or error}") from None


def _digests(world: Ranks, path: Path, what: str) -> list[bytes]:
    """Return the digests of all blocks, of which each process finds a part. Collective."""
    mine: list[bytes] = []
    error: OSError | None = None
    try:
        with path.open("rb") as file:
            mine = store.block_digests(file, world.process, world.processes)
    except OSError as found:
        error = found
    world.agree(error, what)
    return [digest for part in world.gather(mine, what) for digest in part]
