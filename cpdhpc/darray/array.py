"""Distributed arrays: each rank's part, changes of layout, HDF5 files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

import numpy as np

from .. import store
from ..errors import ArgumentError, ArgumentTypeError, UserError
from ..whole_files import as_path
from ..world import files
from ..world.mpi import as_world
from ..world.ranks import Ranks
from .copies import Array, array_backend, wrong_shape
from .layout import Box, Layout, check_layout
from .plan import WindowPlan


def redistribute(world: Any, x: Array, layout_from: Layout, layout_to: Layout) -> Array:
    """Return this rank's box in another layout of the same domain. Collective.

    world: as in WindowPlan; x: the array on this rank's box of layout_from
    For many arrays make WindowPlan(world, layout_from, layout_to.owner(rank)) once instead.
    Raises ValueError on all ranks if the layouts' domains differ; other errors as WindowPlan.
    """
    ranks = as_world(world, "redistribute")

    def described() -> tuple[str, str]:
        check_layout("redistribute", "layout_from", layout_from, ranks.size)
        check_layout("redistribute", "layout_to", layout_to)
        kind = _check_part("redistribute: x", x, layout_from, ranks.rank)
        if layout_from.shape != layout_to.shape or layout_to.ranks != ranks.size:
            allowed = f"must have {layout_from.shape} over {ranks.size}"
            state = f" has shape {layout_to.shape} over {layout_to.ranks} ranks"
            raise ArgumentError("redistribute", "layout_to", layout_to.shape, allowed, state=state)
        return layout_to.digest[:12], kind

    digests, kinds = zip(*ranks.gather_from(described, "redistribute"), strict=True)
    _check_alike("redistribute: layout_to", digests)
    _check_alike("redistribute: x", kinds)
    with WindowPlan(ranks, layout_from, layout_to.owner(ranks.rank), name="redistribute") as plan:
        return plan.exchange(x)


def _root(what: str, root: int | None, world: Ranks) -> int | None:
    """Return root. Raises TypeError or ValueError unless it is None or a rank."""
    if root is not None and (not isinstance(root, int) or isinstance(root, bool)):
        raise ArgumentTypeError(what, "root", root, "must be a rank or None")
    if root is not None and not 0 <= root < world.size:
        raise ArgumentError(what, "root", root, f"ranks are 0..{world.size - 1}")
    return root


def _check_part(what: str, x: Array, layout: Layout, rank: int) -> str:
    """Return the dtype and further axes of x, the array on a rank's box, as text.

    Raises TypeError or ValueError if x is not an array or does not have the shape of the box.
    """
    dtype = array_backend(what, x).dtype(x)
    owned = layout.owner(rank).shape
    if tuple(x.shape[: len(owned)]) != owned:
        raise wrong_shape(what, x, f"must begin with {owned}, the shape of rank {rank}'s box")
    return f"{dtype}, further axes {tuple(x.shape[len(owned) :])}"


def _given(what: str, array: Array, layout: Layout, root: int | None, rank: int) -> tuple[Any, str]:
    """Return the leading axes of from_global's array, and the text that ranks must agree on.

    Raises TypeError or ValueError if it is not an array, or on a rank that must have the whole
    array, if its shape does not begin with the layout's.
    """
    gives = root is None or rank == root
    if array is None and not gives:
        raise ArgumentTypeError(what, "array", None, _wanted(layout, root), state=" is None")
    backend = array_backend(f"{what}: array", array)
    if root is not None:  # it travels
        backend.check(f"{what}: array", array)
    shape, ends = tuple(array.shape), len(layout.shape)
    if gives and shape[:ends] != layout.shape:
        raise wrong_shape(f"{what}: array", array, f"must begin with {layout.shape}")
    return shape[:ends], f"{backend.dtype(array)}, further axes {shape[ends:]}"


def _wanted(layout: Layout, root: int | None) -> str:
    return (
        f"root={root}: others must give an empty array of the root's dtype, of shape "
        f"{(0,) * len(layout.shape)} and the root's further axes"
    )


def _check_alike(what: str, values: Sequence[object]) -> None:
    """Raise ValueError unless values, by rank, are the same."""
    if any(value != values[0] for value in values):
        raise ValueError(f"{what} differs between ranks: {list(values)}")


@dataclass(frozen=True)
class DistArray:
    """A distributed array: this rank's part, and the layout of all parts.

    local: the array on layout.owner(world.rank), followed by any further axes; of any kind that
        WindowPlan.exchange takes
    Raises TypeError or ValueError if local does not have the shape of the box. Ranks that are
    waiting for this one raise the same error.
    """

    world: Ranks
    layout: Layout
    local: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "world", as_world(self.world, "DistArray"))
        try:
            self._check()
        except (TypeError, ValueError) as error:
            raise self.world.refuse(error)[0] from None

    def _check(self) -> None:
        check_layout("DistArray", "layout", self.layout, self.world.size)
        _check_part("DistArray: local", self.local, self.layout, self.world.rank)

    @classmethod
    def from_global(cls, world: Any, layout: Layout, array: Array, root: int | None = None) -> Self:
        """Return a distributed array made from a whole one. Collective.

        root: the rank that has the whole array; None if every rank has it
        array: of the domain's shape, followed by any further axes. With a root, the other ranks
            pass an empty array of the same kind, dtype and further axes, for example (0, 0, 3)
        Raises TypeError or ValueError on all ranks if the shape of one is wrong.
        """
        what = "DistArray.from_global"
        ranks = as_world(world, what)

        def alike() -> tuple[int | None, str, Any, str]:
            check_layout(what, "layout", layout, ranks.size)
            given = _given(what, array, layout, _root(what, root, ranks), ranks.rank)
            return root, layout.digest[:12], *given

        roots, layouts, begins, kinds = zip(*ranks.gather_from(alike, what), strict=True)
        _check_alike(f"{what}: root", roots)
        _check_alike(f"{what}: layout", layouts)
        origin = (0,) * len(layout.shape)
        if root is None:
            part = array[layout.owner(ranks.rank).slices(origin)]
            local = array_backend(f"{what}: array", array).empty(array, tuple(part.shape))
            local[...] = part  # a copy: the array may be changed and freed
            return cls(ranks, layout, local)
        for rank, begin in enumerate(begins):
            if rank != root and begin != origin:
                raise ValueError(
                    f"{what}: array of rank {rank} begins with {begin}: {_wanted(layout, root)}"
                )
        _check_alike(f"{what}: array", kinds)
        everything = Layout.at(layout.shape, root, ranks.size)
        return cls(ranks, layout, redistribute(ranks, array, everything, layout))

    def gather(self, root: int | None = None) -> Array | None:
        """Return the whole array: on all ranks, or on rank root and None elsewhere. Collective.

        Raises TypeError or ValueError on all ranks if there is no rank root.
        """
        world, what = self.world, "DistArray.gather"

        def described() -> tuple[int | None, str]:
            kind = _check_part(f"{what}: local", self.local, self.layout, world.rank)
            return _root(what, root, world), kind

        roots, kinds = zip(*world.gather_from(described, "gather"), strict=True)
        _check_alike(f"{what}: root", roots)
        _check_alike(f"{what}: local", kinds)
        here = root in (None, world.rank)
        none = (0,) * len(self.layout.shape)
        window = self.layout.domain if here else Box(none, none)
        with WindowPlan(world, self.layout, window, name="gather") as plan:
            whole = plan.exchange(self.local)
        return whole if here else None

    def window(self, plan: WindowPlan) -> Array:
        """Return the array on this rank's window of a plan over the same layout. Collective."""
        if not isinstance(plan, WindowPlan) or plan.layout != self.layout:
            why = "has another layout" if isinstance(plan, WindowPlan) else "is not a WindowPlan"
            error = ValueError(f"DistArray.window: plan {getattr(plan, 'name', plan)!r} {why}")
            raise self.world.refuse(error)[0]
        return plan.exchange(self.local)

    def redistribute(self, layout: Layout) -> DistArray:
        """Return the same array in another layout. Collective."""
        local = redistribute(self.world, self.local, self.layout, layout)
        return DistArray(self.world, layout, local)

    def save(
        self,
        path: Path | str,
        name: str = "data",
        *,
        chunks: tuple[int, ...] | None = None,
        compression: str | None = None,
    ) -> None:
        """Write the array as one dataset of an HDF5 file; see save_all. Collective.

        Raises TypeError on all ranks if NumPy has no such dtype (bfloat16, for example).
        """

        def checked() -> tuple[Path, Array]:
            place = as_path("DistArray.save", path)
            return place, _on_host("DistArray.save: local", self.local)

        wrong = TypeError, ValueError, RuntimeError
        place, host = self.world.agreed(checked, "save", wrong)
        save_all(self.world, place, {name: (self.layout, host)}, {}, chunks, compression)

    @classmethod
    def load(cls, world: Any, path: Path | str, layout: Layout, name: str = "data") -> Self:
        """Return a dataset of an HDF5 file as a NumPy array in any layout. Collective.

        Raises UserError on all ranks if it is missing, damaged or does not fit.
        """
        ranks = as_world(world, "DistArray.load")
        place = ranks.gather_from(lambda: as_path("DistArray.load", path), "load")[ranks.rank]
        with files.opened(ranks, place) as (file, _):
            return cls(ranks, layout, read_all(ranks, file, {name: layout})[name])


def _on_host(what: str, x: Array) -> Array:
    """Return x as a NumPy array. Raises TypeError if its dtype is not one of NumPy's own."""
    backend = array_backend(what, x)
    try:
        host = backend.host(x)
    except TypeError:
        host = None
    if host is None or host.dtype.isbuiltin == ADDED:
        allowed = "must be one of NumPy's own, as HDF5 stores only these: float32 holds the values "
        allowed, dtype = f"{allowed}of shorter formats exactly", backend.dtype(x)
        raise ArgumentTypeError.of(what, dtype, allowed, f": dtype={dtype}")
    return host


ADDED = 2  # np.dtype.isbuiltin of another package's dtype, which HDF5 stores as raw bytes

Parts = Mapping[str, tuple[Layout, Array]]


def save_all(
    world: Ranks,
    path: Path,
    arrays: Parts,
    attributes: store.Attributes,
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> None:
    """Write distributed arrays as datasets of one HDF5 file, which replaces path. Collective.

    arrays: maps a name, for example "group/data", to a layout and the array on this rank's box,
        followed by any further axes; the same names in the same order on all ranks
    attributes: of the file; process 0's are written
    chunks, compression: see h5py.Group.create_dataset. With either, ranks write one after the
        other. Otherwise all write at once: process 0 creates datasets with room for everything,
        and each rank writes its boxes there by MPI-IO; all ranks must see the directory
    Any HDF5 program can read the file, and DistArray.load on any number of ranks in any layout.
    Until the new file is complete, path keeps its old content, even after a crash.
    Raises UserError on all ranks if the file cannot be written; ValueError if an array
    does not fit, or arguments differ between ranks.
    """
    rooms = _check(world, arrays, (chunks, compression, str(path)))

    def fill(temporary: Path, offsets: files.Offsets) -> None:
        for name, (layout, local) in arrays.items():
            _fill(world, temporary, name, offsets[name], layout, local)

    files.save(world, path, rooms, attributes, fill, chunks, compression)


def _described(
    world: Ranks, name: str, part: tuple[Layout, Array], how: tuple[object, ...]
) -> tuple[Any, ...]:
    """Return the values that ranks must agree on, and whether each array fits its box."""
    layout, local = part
    ndim = len(layout.shape)
    fits = layout.ranks == world.size and local.shape[:ndim] == layout.owner(world.rank).shape
    return name, fits, local.shape[ndim:], str(local.dtype), how, layout.digest


def _check(world: Ranks, arrays: Parts, how: tuple[object, ...]) -> dict[str, store.Room]:
    """Return the datasets, the same on all ranks; raise the first rank's error on all."""

    def described() -> list[tuple[Any, ...]]:
        return [_described(world, name, part, how) for name, part in arrays.items()]

    everyone = world.gather_from(described, "save")
    for rank, theirs in enumerate(everyone):
        if [each[0] for each in theirs] != [each[0] for each in everyone[0]]:
            raise ValueError(f"save: ranks 0 and {rank} have arrays of different names")
        for each, first in zip(theirs, everyone[0], strict=True):
            if not each[1]:
                raise ValueError(
                    f"save: {each[0]}: the array of rank {rank} does not have the shape of its box"
                )
            if each != first:
                raise ValueError(
                    f"save: {each[0]}: rank 0 has further axes {first[2]} of {first[3]} and "
                    f"chunks, compression, path {first[4]}; rank {rank} has {each[2]} of {each[3]} "
                    f"and {each[4]}, or another layout"
                )
    return {name: _room(layout, local) for name, (layout, local) in arrays.items()}


def _room(layout: Layout, local: Array) -> store.Room:
    note = {"layout": np.array(layout.owners, np.int64), "ranks": layout.ranks}
    return store.Room(layout.shape + local.shape[len(layout.shape) :], local.dtype, note)


def _fill(
    world: Ranks, path: Path, name: str, offset: int | None, layout: Layout, local: Array
) -> None:
    """Write all ranks' boxes of a dataset. Collective."""
    box, trail = layout.owner(world.rank), local.shape[len(layout.shape) :]
    if offset is not None:
        start = box.start + (0,) * len(trail)
        local = np.ascontiguousarray(local)
        world.write_box(path, offset, layout.shape + trail, start, local)
    elif 0 not in trail:
        _in_turns(world, path, name, box.slices((0,) * box.ndim), local)


def _in_turns(world: Ranks, path: Path, name: str, place: tuple[slice, ...], local: Array) -> None:
    """Write the boxes one rank after the other: only HDF5 knows the places of chunks."""

    def write(rank: int) -> None:
        if rank == world.rank and local.size:
            store.write_box(path, name, place, local)

    for rank in range(world.size):
        world.agreed(partial(write, rank), f"save: rank {rank} writes", (OSError, UserError))


def read_all(world: Ranks, file: BufferedReader, layouts: Mapping[str, Layout]) -> dict[str, Array]:
    """Return this rank's boxes of the datasets of a file that files.opened checked. Collective.

    Raises UserError as DistArray.load does.
    """

    def read() -> dict[str, Array]:
        _, rooms = store.contents(file)
        return {name: _read(world, file, name, rooms, layout) for name, layout in layouts.items()}

    return world.agreed(read, "load", Exception)  # a wrong argument may raise any error


def _read(
    world: Ranks, file: BufferedReader, name: str, rooms: Mapping[str, store.Room], layout: Layout
) -> Array:
    """Return this rank's box of a dataset. Raises UserError if it does not fit."""
    check_layout("load", "layout", layout)
    if name not in rooms:
        known = ", ".join(rooms) or "none at all"
        raise UserError(f"load: {file.name}: has no dataset {name!r}, only {known}")
    shape = rooms[name].shape
    if shape[: len(layout.shape)] != layout.shape or layout.ranks != world.size:
        raise UserError(
            f"load: {file.name}: dataset {name!r} has shape {shape}: the layout has "
            f"{layout.shape} over {layout.ranks} ranks, this world has {world.size}"
        )
    box = layout.owner(world.rank)
    return store.read_box(file, name, box.slices((0,) * box.ndim))
