"""What a method keeps from one iteration to the next, as checkpoints save and hand it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..ops import backend_of, placed
from ..partition import split

Array = npt.NDArray[Any]
Key = tuple[str, str]  # layer, name
Redistribution = Literal["sum", "copy", "drop"]
ON_CPU = np.empty(0)  # an array that lies there


@dataclass
class Entry:
    """An array that a method keeps.

    array: of own entries [hosted ranks, *shape], of shared ones as it was made
    redistribution: what becomes of an own entry at another number of ranks; None: it is shared
    """

    array: Array
    redistribution: Redistribution | None


class State:
    """Arrays by layer and name, of each hosted rank or shared by all ranks; changed in place.

    hosted: the ranks of this process; ranks: how many there are in all
    Layers are names of parameters; "" is for what belongs to the whole model. A method gets its
    arrays anew in each iteration, so that those of a checkpoint take their place.
    """

    def __init__(self, hosted: range, ranks: int) -> None:
        self.hosted, self.ranks = hosted, ranks
        self._entries: dict[Key, Entry] = {}

    def own(
        self,
        layer: str,
        name: str,
        shape: Sequence[int],
        redistribution: Redistribution = "sum",
        dtype: npt.DTypeLike = np.float32,
        like: Array = ON_CPU,
    ) -> list[Array]:
        """Return dtype[shape] of each hosted rank, zeros at first.

        like: an array, NumPy's or CuPy's, that lies where these are to be; they are moved there
        redistribution: at another number of ranks "sum" keeps the sum over ranks, as residuals
            need it, each rank getting that of a part of the values; "copy" gives rank r what r
            modulo the former number had; "drop" begins with zeros
        Raises ValueError where the entry is another by shape, dtype or redistribution, or has a
        "/" in its name.
        """
        if redistribution not in get_args(Redistribution):
            known = ", ".join(get_args(Redistribution))
            raise ValueError(f"State.own: redistribution={redistribution!r}: known are {known}")
        wanted = (len(self.hosted), *shape), np.dtype(dtype), redistribution
        entry = self._entry(layer, name, lambda: Entry(np.zeros(*wanted[:2]), redistribution), like)
        found = entry.array.shape, entry.array.dtype, entry.redistribution
        if found != wanted:
            raise ValueError(
                f"State.own: {name!r} of layer {layer!r} has shape, dtype and "
                f"redistribution {found}: asked for {wanted}"
            )
        return list(entry.array)

    def give(self, layer: str, name: str, rows: Sequence[Array]) -> None:
        """Make arrays those of an entry that own made: rows of its dtype and shape, no more used.

        The lone one of a process is not copied.
        """
        entry = self._entries[layer, name]
        entry.array = rows[0][None] if len(rows) == 1 else np.stack(rows)

    def shared(
        self, layer: str, name: str, make: Callable[[], Array], like: Array = ON_CPU
    ) -> Array:
        """Return an array that all ranks hold alike; make returns the first one, alike everywhere.

        It has one dimension at least. like: as for own

        Raises ValueError where ranks have an entry each of this name, or it has a "/" in it.
        """
        entry = self._entry(layer, name, lambda: Entry(np.atleast_1d(make()), None), like)
        if entry.redistribution is not None:
            raise ValueError(f"State.shared: {name!r} of layer {layer!r}: each rank has its own")
        return entry.array

    def _entry(self, layer: str, name: str, make: Callable[[], Entry], like: Array) -> Entry:
        if "/" in name:
            raise ValueError(f"State: name={name!r}: has a '/' in it")
        if (layer, name) not in self._entries:
            self._entries[layer, name] = make()
        entry = self._entries[layer, name]
        entry.array = placed(entry.array, like)
        return entry

    def __iter__(self) -> Iterator[tuple[Key, Entry]]:
        """Yield all entries, in one order on all processes."""
        return iter(sorted(self._entries.items()))

    def copy(self) -> State:
        """Return another state with copies of all arrays."""
        other = State(self.hosted, self.ranks)
        for key, entry in self:
            other.put(key, Entry(entry.array.copy(), entry.redistribution))
        return other

    def scale(self, factor: float) -> None:
        """Multiply what adds up over ranks as gradients do, whose unit is another from now on."""
        for _, entry in self:
            if entry.redistribution == "sum":
                number = entry.array.dtype.type(factor)
                backend_of(entry.array).multiply(entry.array, number, entry.array)

    def put(self, key: Key, entry: Entry) -> None:
        """Set an entry, as a checkpoint does."""
        self._entries[key] = entry


def redistributed(rows: Array, redistribution: Redistribution, hosted: range, ranks: int) -> Array:
    """Return what the hosted ranks of a run of so many ranks get of an own entry.

    rows: [former ranks, *shape]; returns [hosted ranks, *shape] of the same dtype
    A sum is formed in float64, or int64, and rounded once.
    """
    former = len(rows)
    if former == ranks:
        return rows[hosted.start : hosted.stop].copy()
    if redistribution == "copy":
        return rows[[rank % former for rank in hosted]]
    given = np.zeros((len(hosted), *rows.shape[1:]), rows.dtype)
    if redistribution == "sum":
        wide = np.float64 if rows.dtype.kind == "f" else np.int64
        total = rows.reshape(former, -1).sum(axis=0, dtype=wide).astype(rows.dtype)
        for row, rank in zip(given.reshape(len(hosted), -1), hosted, strict=True):
            part = slice(*split(total.size, ranks, rank))
            row[part] = total[part]
    return given
