"""Sums and other reductions over ranks, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from ...ops.moves import ADDED

Fold = Callable[..., torch.Tensor]
Op: Any = ReduceOp.RedOpType  # torch's type stubs lack some of them

NARROW = (torch.float16, torch.bfloat16)  # reduced in float32, as are those of 8 bits or less
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no arithmetic of them: NumPy's
FOLDS: dict[Any, Fold] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PREMUL_SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
UFUNCS: dict[Fold, np.ufunc] = {
    torch.add: np.add,
    torch.mul: np.multiply,
    torch.minimum: np.minimum,
    torch.maximum: np.maximum,
    torch.bitwise_and: np.bitwise_and,
    torch.bitwise_or: np.bitwise_or,
    torch.bitwise_xor: np.bitwise_xor,
}
OF_BITS = (Op.BAND, Op.BOR, Op.BXOR)
OF_ORDER = (Op.MIN, Op.MAX)
SCALED = (Op.AVG, Op.PREMUL_SUM)


class Reduction:
    """A reduction of one dtype over a number of ranks.

    kind: number of the compiled addition, of which finish makes the result; None if there is none
    Values narrower than float32 are reduced in float32 and rounded once, at the end.
    Raises TypeError if the dtype has no such reduction.
    """

    def __init__(self, op: Any, dtype: torch.dtype, ranks: int) -> None:
        self.op, self.ranks, self.name = op, ranks, str(op.name)
        self._mean = op == Op.AVG
        kind = "MIN and MAX" if op in OF_ORDER else op.name
        exact = not (dtype.is_floating_point or dtype.is_complex)
        if (op in OF_BITS and not exact) or (op in OF_ORDER and dtype.is_complex):
            raise TypeError(f"{kind} of {dtype}: must be another reduction, or another dtype")
        if op in SCALED and (dtype == torch.bool or (op == Op.PREMUL_SUM and exact)):
            raise TypeError(f"{kind} of {dtype}: must be a sum, or another dtype")
        self._fold = FOLDS[op]
        if dtype == torch.bool and self._fold in (torch.add, torch.mul):
            self._fold = torch.logical_or if self._fold is torch.add else torch.logical_and
        self._narrow = dtype in NARROW or (dtype.is_floating_point and dtype.itemsize == 1)
        self._ufunc = UFUNCS[self._fold] if dtype in UNSIGNED else None
        adds = self._fold is torch.add and not self._narrow
        divides = self._mean and dtype in UNSIGNED  # torch does not
        self.kind = ADDED.get(str(dtype)[6:]) if adds and not divides else None

    def fold(self, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce operands, in their order, into out, which may be one of them.

        Other operands are not changed.
        """
        if self._ufunc is not None:
            whole = np.asarray(reduce(self._ufunc, [each.numpy() for each in operands]))
            out.numpy()[...] = whole // self.ranks if self._mean else whole
            return
        fold = self._fold
        if self._narrow:
            total = operands[0].float()
            for each in operands[1:]:
                fold(total, each.float(), out=total)
            out.copy_(self._scaled(total))
            return
        if len(operands) == 1:
            if operands[0] is not out:
                out.copy_(operands[0])
        else:
            total, *others, last = operands
            place = out.data_ptr()
            if others and place in [each.data_ptr() for each in operands[2:]]:
                into = torch.empty_like(out)
            else:
                into = out
            for each in others:
                total = fold(total, each, out=into)
            fold(total, last, out=out)
        if self._mean:
            self._scaled(out)

    def finish(self, total: torch.Tensor) -> None:
        """Make the result of a sum, in place."""
        if self._mean:
            self._scaled(total)

    def _scaled(self, total: torch.Tensor) -> torch.Tensor:
        """Return a sum, divided in place if a mean is wanted."""
        if self._mean:
            parts = torch.view_as_real(total) if total.is_complex() else total
            parts.div_(self.ranks, rounding_mode=None if parts.is_floating_point() else "trunc")
        return total


@lru_cache(256)
def reduction_of(op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    """Return a reduction; op: of ReduceOp.RedOpType."""
    return Reduction(op, dtype, ranks)


def premultiplied(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's operand: its tensor, for PREMUL_SUM times the factor."""
    return tensor * op.__getstate__()[1] if op == ReduceOp.PREMUL_SUM else tensor
