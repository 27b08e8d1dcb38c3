"""A case: one point of a study, with an id that says all that decides its measurement."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from ..config import UNITS
from .kind import SHAPE, Factors, Value
from .spec import Study

SLUG = 60  # characters of an id that are there to be read
NOT_MEASURED = ("seed", "interleave")  # of [measure]: they order cases


@dataclass(frozen=True)
class Case:
    """A point. factors: those of its kind that it uses; the shape is beside them."""

    id: str
    factors: Factors = field(hash=False)
    nodes: int
    ppn: int

    @property
    def ranks(self) -> int:
        """Number of MPI processes."""
        return self.nodes * self.ppn

    @property
    def all_factors(self) -> dict[str, Value]:
        """The factors with nodes, ppn and ranks."""
        return {"nodes": self.nodes, "ppn": self.ppn, "ranks": self.ranks, **self.factors}


def make_case(study: Study, factors: Factors, nodes: int, ppn: int) -> Case:
    """Return the case of these factors, as Kind.used returns them."""
    measure = study.measure.model_dump(mode="json", exclude=set(NOT_MEASURED))
    decides = {
        "kind": study.kind,
        "factors": dict(factors),
        "nodes": nodes,
        "ppn": ppn,
        "measure": measure,
        "job": study.job,
    }
    text = json.dumps(decides, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = [
        shown(value, known.units if (known := study.of_kind.factors.get(name)) else "1")
        for name, value in factors.items()
    ]
    slug = re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join([f"{nodes}x{ppn}", *words]))
    return Case(f"{slug[:SLUG].strip('-')}-{digest}", dict(factors), nodes, ppn)


def shown(value: Value, units: str = "1") -> str:
    """Return a value as people write it: bytes in the largest unit that divides them."""
    if units == "byte" and isinstance(value, int) and value > 0:
        unit = next(name for name, size in reversed(UNITS.items()) if value % size == 0 and name)
        return f"{value // UNITS[unit]}{unit}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def sort_key(case: Case) -> tuple[int, int, str]:
    """Return what cases are put in order by: small shapes first."""
    return case.ranks, case.nodes, case.id


__all__ = ["SHAPE", "Case", "make_case", "shown", "sort_key"]
