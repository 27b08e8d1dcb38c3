"""Calls of plain tensors on a node that the program waits for: one compiled call does it all.

Each function returns the turns of a call, as the programs of its general form have them, or None
if it is not of the usual kind. Ranks may differ in this: the memory of the node holds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .board import VALUES_BYTES
from .channel import Channel, Portions
from .programs import TURNS_BYTES, Tensor, folded, part_bytes, turns
from .reductions import Op, reduction_of

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Quick(NamedTuple):
    """The arguments of Link.exchange; call: its text; number: of its turns."""

    call: str
    number: int
    each: int
    gives: Portions = ()
    takes: Portions = ()
    own: Portions = ()
    kind: int = 0
    fold: Portions = ()
    note: bytes = b""


@lru_cache(4096)
def worded(call: str, dtype: torch.dtype, shape: torch.Size) -> str:
    """Return the text of a call with a tensor of a dtype and shape."""
    return f"{call}{str(dtype)[6:]}{list(shape)}"


def described(tensor: Tensor, call: str = "") -> str:
    """Return the text of a call with a tensor."""
    return worded(call, tensor.dtype, tensor.shape)


def listed(tensors: Sequence[Tensor], call: str = "") -> str:
    """Return the text of a call with tensors."""
    if len(tensors) == 1:
        return described(tensors[0], call)
    return call + ", ".join(map(described, tensors))


def is_plain(x: Any) -> bool:
    """Whether something is a tensor whose memory, which it still has, has its values in order."""
    return (
        type(x) in PLAIN
        and x.is_cpu
        and x.layout is torch.strided
        and x.is_contiguous()
        and x.data_ptr() != 0
        and not (x.is_neg() or x.is_conj())
    )


def are_apart(start: int, size: int, its: int, its_size: int) -> bool:
    """Whether two parts of memory share no byte."""
    return start + size <= its or its + its_size <= start


@lru_cache(1024)
def addition_of(op: Any, dtype: torch.dtype, ranks: int) -> int | None:
    """Return the number of the compiled addition; None if there is none."""
    try:
        return reduction_of(op, dtype, ranks).kind if op == Op.SUM else None
    except TypeError:
        return None


def all_reduce(channel: Channel, tensors: Any, opts: Any) -> Quick | None:
    """Sum a tensor in place."""
    if type(tensors) is not list or len(tensors) != 1 or not is_plain(tensors[0]):
        return None
    (x,) = tensors
    size, kind = x.nbytes, addition_of(opts.reduceOp.op, x.dtype, channel.size)
    if kind is None or (channel.size > 2 and not folded(size, channel.size, VALUES_BYTES)):
        return None
    mine = (0, 0, x.data_ptr(), size)
    call = described(x, "all_reduce SUM ")
    return Quick(call, turns(size, VALUES_BYTES), VALUES_BYTES, mine, kind=kind, fold=mine + mine)


def broadcast(channel: Channel, tensors: Any, opts: Any) -> Quick | None:
    """Send the root's tensor to all."""
    root = opts.rootRank
    if type(tensors) is not list or len(tensors) != 1 or not is_plain(tensors[0]):
        return None
    if not 0 <= root < channel.size:
        return None
    (x,) = tensors
    size, mine = x.nbytes, (root, 0, x.data_ptr(), x.nbytes)
    call, count = described(x, f"broadcast from rank {root} "), turns(size, VALUES_BYTES)
    if channel.rank == root:
        return Quick(call, count, VALUES_BYTES, mine)
    return Quick(call, count, VALUES_BYTES, (), mine)


def all_gather(channel: Channel, output: Any, input: Any, _: Any) -> Quick | None:
    """Send each rank's tensor to all, concatenated."""
    if not (is_plain(output) and is_plain(input) and output.dtype == input.dtype):
        return None
    size, whole, rank = input.nbytes, output.nbytes, channel.rank
    x, out = input.data_ptr(), output.data_ptr()
    place = out + rank * size
    own: Portions = ()
    if size * channel.size != whole or size > TURNS_BYTES:
        return None
    if x != place:
        if not are_apart(x, size, out, whole):
            return None
        own = (0, 0, x, size, 0, 0, place, size)
    takes = tuple([n for r in channel.others for n in (r, 0, out + r * size, size)])
    call = described(output, described(input, "all_gather_into_tensor ") + " to ")
    count = turns(size, VALUES_BYTES)
    return Quick(call, count, VALUES_BYTES, (0, 0, x, size), takes, own)


def reduce_scatter(channel: Channel, output: Any, input: Any, opts: Any) -> Quick | None:
    """Sum a tensor; each rank gets its equal share."""
    if not (is_plain(output) and is_plain(input) and output.dtype == input.dtype):
        return None
    size, rank, ranks = output.nbytes, channel.rank, channel.size
    kind = addition_of(opts.reduceOp.op, input.dtype, ranks)
    x, out = input.data_ptr(), output.data_ptr()
    own = x + rank * size
    if kind is None or size * ranks != input.nbytes:
        return None
    if out != own and not are_apart(x, input.nbytes, out, size):
        return None
    room = part_bytes(ranks, size)
    gives = tuple([n for r in channel.others for n in (0, r * room, x + r * size, size)])
    fold = (0, rank * room, own, size, 0, 0, out, size)
    call = described(input, "reduce_scatter_tensor SUM ")
    return Quick(call, turns(size, room), room, gives, kind=kind, fold=fold)


def all_to_all(
    channel: Channel, output: Any, input: Any, to: Any, given: Any, _: Any
) -> Quick | None:
    """Send each rank an equal number of rows."""
    if to or given or not (is_plain(output) and is_plain(input) and output.dtype == input.dtype):
        return None
    whole, rank, ranks = input.nbytes, channel.rank, channel.size
    size, x, out = whole // ranks, input.data_ptr(), output.data_ptr()
    for each in (input, output):
        if each.nbytes != whole or not each.dim() or each.shape[0] % ranks:
            return None
    if size > TURNS_BYTES or not are_apart(x, whole, out, whole):
        return None
    room = part_bytes(ranks)
    gives = tuple([n for r in channel.others for n in (0, r * room, x + r * size, size)])
    takes = tuple([n for r in channel.others for n in (r, rank * room, out + r * size, size)])
    own = (0, 0, x + rank * size, size, 0, 0, out + rank * size, size)
    call, note = f"all_to_all_single {str(input.dtype)[6:]}", told(size, ranks)
    return Quick(call, turns(size, room), room, gives, takes, own, note=note)


@lru_cache(1024)
def told(size: int, ranks: int) -> bytes:
    """Return the note of a rank whose parts are of one size; see programs.all_to_all."""
    return torch.full((2 * ranks,), size, dtype=torch.int64, device="cpu").numpy().tobytes()
