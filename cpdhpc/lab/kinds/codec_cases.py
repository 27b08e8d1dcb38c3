"""The operations of the codec and of sparse methods, as they are timed; checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...compress.payload import decode_sparse, encode_sparse
from ...formats import (
    MICROSCALING,
    SHARED,
    TILE,
    Cast,
    Format,
    Microscaling,
    packed_bytes,
    parse_format,
    shift_count,
    tiles,
)
from ...methods import CODEC_OPERATIONS, MEMCPY
from ...ops import backend_of, cpu, reference, to_host
from ...partition import split
from ...world.ranks import Ranks
from ..study_data import Outcomes
from .timing import on_device, whole

Array = Any  # NumPy's, or CuPy's
CHECKED = 5000  # values that are compared with the specification


def format_of(name: str) -> Format:
    """Return the format of a name, also of Microscaling. Raises ValueError for an unknown one."""
    return MICROSCALING.get(name) or parse_format(name)


def scalings_of(fmt: Format) -> dict[str, int]:
    """Return the scalings of SHARED that a format can have."""
    return {"block32": SHARED["block32"]} if isinstance(fmt, Microscaling) else SHARED


def check_against_reference(x: Array, cast: Cast) -> None:
    """Raise ArithmeticError unless the first tiles are identical to the specification's.

    x: NumPy's, or CuPy's for the operations on GPUs
    """
    for scaling, shared in scalings_of(cast.fmt).items():
        results = []
        for ops, head in ((backend_of(x), x[:CHECKED]), (reference, to_host(x[:CHECKED]))):
            words = zeros(head, packed_bytes(head.size, cast.fmt.bits))
            shifts = zeros(head, shift_count(head.size, shared))
            hop, hop_shifts = np.zeros_like(words), np.zeros_like(shifts)
            ops.encode_tiles(head, cast, words, shifts, fit=True)
            ops.decode_add_encode_tiles(words, shifts, cast, head, hop, hop_shifts, fit=True)
            results.append(np.concatenate([*map(to_host, (words, shifts, hop, hop_shifts))]))
        if not np.array_equal(results[0], results[1]):
            name = cast.fmt.name
            raise ArithmeticError(f"bench codec: {name}, {scaling}: differs from ops.reference")


def zeros(like: Array, size: int) -> Array:
    """Return zeros, uint8[size], on the device of an array."""
    return np.zeros_like(like, shape=(size,), dtype=np.uint8)


class RankValues:
    """A rank's share of size values for all ranks, n normal numbers on a device."""

    def __init__(self, world: Ranks, size: int, device: str) -> None:
        start, stop = split(size, world.processes, world.process)
        self.world, self.n, self._device = world, stop - start, device

    def _first(self, count: int) -> NDArray[np.float32]:
        return np.random.default_rng(self.world.process).standard_normal(count, np.float32)

    @property
    def on_host(self) -> NDArray[np.float32]:
        """All of them, in host memory."""
        return self._first(self.n)

    @property
    def head(self) -> Array:
        """Those that are compared with the specification."""
        return on_device(self._first(min(self.n, CHECKED)), self._device)

    def copies(self) -> dict[str, Callable[[], object]]:
        """Return memcpy of them, by its name."""
        x = on_device(self.on_host, self._device)
        out = np.zeros_like(x)
        return {MEMCPY: whole(lambda: np.copyto(out, x), x)}

    def coded(self, cast: Cast) -> dict[str, Callable[[], object]]:
        """Return operations on them."""
        return operations(on_device(self.on_host, self._device), cast)

    def sparse(self, density: float) -> dict[str, Callable[[], object]]:
        """Return sparse_operations on them."""
        return sparse_operations(self.on_host, density)

    def outcomes(self, cast: Cast, operation: str) -> Outcomes:
        """Return the bytes of their codes, and the error over all ranks' values. Collective.

        With the rounding and scaling of the operation; decode and hop have those of plain encode.
        """
        shared = SHARED.get(operation.rpartition(" ")[2])  # how many share a shift that is chosen
        rounding = Cast(cast.fmt, "stochastic") if operation == "stochastic" else cast
        x, words = self.on_host, np.zeros(packed_bytes(self.n, cast.fmt.bits), np.uint8)
        shifts, out = np.full(shift_count(x.size, shared or TILE), 127, np.uint8), np.empty_like(x)
        cpu.encode_tiles(x, rounding, words, shifts, fit=shared is not None)
        cpu.decode_tiles(words, shifts, cast.fmt, out)
        wrong = float(np.sum((out.astype(np.float64) - x) ** 2))
        norm = float(np.sum(x.astype(np.float64) ** 2))
        sums = np.sum(self.world.gather((wrong, norm)), axis=0)
        wire_bytes = words.size + (shifts.size if shared else 0)
        return {"wire_bytes": wire_bytes, "error": float(np.sqrt(sums[0] / sums[1]))}


def operations(x: Array, cast: Cast) -> dict[str, Callable[[], object]]:
    """Return CODEC_OPERATIONS on x, as the all-reduce uses them, and memcpy, by name.

    decode_add adds to its accumulator.
    """
    out, total, hop_words = (
        np.zeros_like(x),
        np.zeros_like(x),
        zeros(x, packed_bytes(x.size, cast.fmt.bits)),
    )
    found: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(out, x)}
    if not isinstance(cast.fmt, Microscaling):
        found |= _fixed(x, cast, hop_words, out, total)
    for scaling, shared in scalings_of(cast.fmt).items():
        found |= _fitted(scaling, shared, x, cast, hop_words, total)
    return {name: whole(found[name], x) for name in (MEMCPY, *CODEC_OPERATIONS) if name in found}


def _fixed(
    x: Array, cast: Cast, hop_words: Array, out: Array, total: Array
) -> dict[str, Callable[[], object]]:
    """Return the operations with fixed shifts."""
    fmt, ops = cast.fmt, backend_of(x)
    words, shifts = zeros(x, packed_bytes(x.size, fmt.bits)), zeros(x, tiles(x.size))
    shifts[...] = 127
    fixed = shifts.copy()
    stochastic = Cast(fmt, "stochastic")
    ops.encode_tiles(x, cast, words, shifts)
    return {
        "encode": lambda: ops.encode_tiles(x, cast, words, fixed),
        "stochastic": lambda: ops.encode_tiles(x, stochastic, hop_words, fixed),
        "decode": lambda: ops.decode_tiles(words, shifts, fmt, out),
        "decode_add": lambda: ops.decode_add_tiles(words, shifts, fmt, total, total),
        "hop": lambda: ops.decode_add_encode_tiles(words, shifts, cast, x, hop_words, fixed),
    }


def _fitted(
    scaling: str, shared: int, x: Array, cast: Cast, hop_words: Array, total: Array
) -> dict[str, Callable[[], object]]:
    """Return the operations that choose shifts; shared: values with a common one."""
    words, shifts = np.zeros_like(hop_words), zeros(x, shift_count(x.size, shared))
    hop_shifts, ops = np.zeros_like(shifts), backend_of(x)
    ops.encode_tiles(x, cast, words, shifts, fit=True)
    return {
        f"encode {scaling}": lambda: ops.encode_tiles(x, cast, words, shifts, fit=True),
        f"decode_add {scaling}": lambda: ops.decode_add_tiles(
            words, shifts, cast.fmt, total, total
        ),
        f"hop {scaling}": lambda: ops.decode_add_encode_tiles(
            words, shifts, cast, x, hop_words, hop_shifts, fit=True
        ),
    }


def sparse_operations(x: NDArray[np.float32], density: float) -> dict[str, Callable[[], object]]:
    """Return SPARSE_OPERATIONS on the largest values, a share of x, by name.

    Raises ArithmeticError if other values are selected than by the specification.
    """
    n, k, head = x.size, max(1, round(density * x.size)), x[:CHECKED]
    few = max(1, round(density * head.size))
    if not np.array_equal(cpu.select_magnitude(head, few), reference.select_magnitude(head, few)):
        raise ArithmeticError("bench codec: select_magnitude: differs from ops.reference")
    indices = cpu.select_magnitude(x, k)
    values = cpu.gather(x, indices)
    threshold, total = float(np.abs(values).min()), np.zeros_like(x)
    payload = encode_sparse(indices, values, n)
    return {
        "one pass": lambda: cpu.amax_tiles(x),  # reads each value once, as any selection does
        "kth_magnitude": lambda: cpu.kth_magnitude(x, k),
        "select_magnitude": lambda: cpu.select_magnitude(x, k),
        "select_above": lambda: cpu.select_above(x, threshold),
        "gather": lambda: cpu.gather(x, indices),
        "scatter_add": lambda: cpu.scatter_add(total, indices, values),
        "clear": lambda: cpu.clear(total, indices),
        "encode_sparse": lambda: encode_sparse(indices, values, n),
        "decode_sparse": lambda: decode_sparse(payload, n),
    }
