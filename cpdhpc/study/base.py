"""What speed-ups are relative to: the base point of every point, and the ideal that they miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .case import Case
from .kind import Value
from .spec import Study
from .sweep import SAME, base_factors

SHAPE = ("nodes", "ppn", "ranks")


@dataclass(frozen=True)
class Base:
    """How base points are found.

    named: factors that pick them; free: those in which a point may differ from its base
    work: the factor that says how large the problem is
    """

    named: Mapping[str, Value]
    free: frozenset[str]
    work: str

    @classmethod
    def of(cls, study: Study) -> Base:
        """Return the rule of a study."""
        work = study.of_kind.work
        same = study.base.get("ranks") == SAME
        named = base_factors(study)
        free = {"throughput": {work}, "weak": {*SHAPE, *study.weak}, "strong": {*SHAPE}}
        varies = set() if same else free[study.scaling]
        shape = SHAPE if set(named) & set(SHAPE) else ()
        return cls(named, frozenset({*varies, *named, *shape}), work)

    def points(self, cases: Sequence[Case]) -> npt.NDArray[np.int64]:
        """Return the index of each case's base among cases, -1 where there is none.

        It agrees with the case in all factors that are not free, has what is named, and is the
        smallest such: fewest ranks, then least work.
        """
        tables: dict[tuple[str, ...], dict[tuple[Value, ...], int]] = {}
        for index in sorted(range(len(cases)), key=lambda i: self._size(cases[i])):
            factors = cases[index].all_factors
            if any(factors.get(name) != value for name, value in self.named.items()):
                continue
            names = tuple(sorted(factors.keys() - self.free))
            values = tuple(factors[name] for name in names)
            tables.setdefault(names, {}).setdefault(values, index)
        return np.array([self._find(tables, case) for case in cases], np.int64)

    def _find(
        self, tables: Mapping[tuple[str, ...], Mapping[tuple[Value, ...], int]], case: Case
    ) -> int:
        """Return a case's base; one that a study names need not use all factors of the case."""
        factors = case.all_factors
        own = {name for name in factors if name not in self.free}
        for names, table in sorted(tables.items(), key=lambda item: -len(item[0])):
            if not own.issuperset(names) or not (self.named or own == set(names)):
                continue
            index = table.get(tuple(factors[name] for name in names))
            if index is not None:
                return index
        return -1

    def _size(self, case: Case) -> tuple[int, float]:
        return case.ranks, float(case.factors.get(self.work, 0))

    def work_ratio(self, cases: Sequence[Case], base: npt.NDArray[np.int64]) -> list[float]:
        """Return each case's work over that of its base, 1 where the problem is the same."""
        works = [float(case.factors.get(self.work, 1)) for case in cases]
        return [
            work / works[index] if index >= 0 else float("nan")
            for work, index in zip(works, base, strict=True)
        ]

    def __str__(self) -> str:
        free = ", ".join(sorted(self.free - set(self.named)))
        named = " and ".join(f"{name} = {value}" for name, value in self.named.items())
        alike = f"alike but in {free}" if free else "alike in all else"
        where = f" that have {named} and are {alike}" if named else f" that are {alike}"
        return f"of the points{where}, that of fewest ranks, then of least {self.work}"
