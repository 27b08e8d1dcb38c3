"""Files of benchmarks: every sample, with the factors of its point, as netCDF readers see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import store
from ..comm import Ranks
from ..config import UserError
from ..provenance import attributes
from ..store import Variable
from .harness import Times
from .options import together

SCHEMA = 1
FACTORS = {  # name of a column -> (long name, unit)
    "algorithm": ("algorithm of the all-reduce", "1"),
    "chosen": ("algorithm that ran", "1"),
    "wire": ("what travels: float32 as it is, or a format", "1"),
    "scaling": ("scaling of values before they are encoded", "1"),
    "accumulate": ("how partial sums are kept", "1"),
    "operation": ("operation of the codec", "1"),
    "format": ("format of the codec", "1"),
    "threads": ("threads that share an operation; memcpy takes one", "1"),
    "size_bytes": ("float32 data of a rank", "byte"),
    "wire_bytes": ("left the rank that sent most in a call; nan: unknown to us", "byte"),
    "error": ("relative error of the sum in the Euclidean norm", "1"),
    "setting": ("name of a plan", "1"),
    "shape": ("cells of the domain along each axis", "1"),
    "procs": ("ranks along each axis", "1"),
    "halo": ("cells around the box of a rank, below:above where they differ", "1"),
    "boundary": ("what lies beyond the domain", "1"),
    "dtype": ("dtype of the cells", "1"),
    "trail": ("further axes, not split", "1"),
    "transfer": ("exchange, or accumulation of halos", "1"),
    "way": ("by which code cells travel", "1"),
    "sent_bytes": ("cells that leave the rank that sends most in a call", "byte"),
    "calls": ("calls of a sample, whose mean is its time", "1"),
    "predicted_s": ("predicted time of a call; nan: none", "s"),
}
Column = Sequence[str] | Sequence[int] | Sequence[float]


def write_samples(
    path: Path | None,
    world: Ranks,
    name: str,
    columns: Mapping[str, Column],
    times: Sequence[Times],
    warmup: int,
) -> None:
    """Write the samples of a benchmark from process 0, if there is a path. Collective.

    columns: the factors of every point; times: of each point, float64[repeats, processes]
    xarray.open_dataset(path, group="samples", engine="h5netcdf") reads them.
    Raises UserError on all processes where the file cannot be written.
    """
    if path is None:
        return
    notes = {"schema": SCHEMA, "benchmark": name, **attributes(world)}

    def write() -> None:
        if world.rank == 0:
            _write(path, columns, times, warmup, notes)

    together(world, write)


def _write(
    path: Path,
    columns: Mapping[str, Column],
    times: Sequence[Times],
    warmup: int,
    notes: store.Attributes,
) -> None:
    try:
        store.write(path, {"samples": _group(columns, times, warmup)}, notes)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error}") from None


def _group(
    columns: Mapping[str, Column], times: Sequence[Times], warmup: int
) -> dict[str, Variable]:
    by_rank = np.stack(times)
    points, repeats, processes = by_rank.shape
    flags = (np.arange(repeats) < warmup).astype(np.uint8)
    return {
        "point": Variable(("point",), np.arange(points), "a case at a size"),
        "repeat": Variable(("repeat",), np.arange(repeats), "repeat, warm-ups first"),
        "process": Variable(("process",), np.arange(processes), "MPI process"),
        "is_warmup": Variable(("repeat",), flags, "1: a warm-up, in no figure that is shown"),
        "time_s": Variable(
            ("point", "repeat"), by_rank.max(axis=2), "time of the slowest process", "s"
        ),
        "process_time_s": Variable(
            ("point", "repeat", "process"), by_rank, "time of each process from the barrier", "s"
        ),
        **{
            column: Variable(("point",), np.array(values), *FACTORS[column])
            for column, values in columns.items()
        },
    }
