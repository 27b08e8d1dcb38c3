"""Exchanges of halos in a job: ours and MPI's, checked before they are timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..bench.halo_cases import Setting, open_cases
from ..darray.layout import balanced_grid
from ..darray.show import spec_of
from ..study.cases import Case
from ..study.spec import Study
from .repeats import Call, Calls, Place


class _Halo(Calls):
    """A case of the kind "halo"."""

    @contextmanager
    def call(self, place: Place, check: bool) -> Iterator[Call]:
        """Make an exchange ready; see Calls.call."""
        of, world = self.case.factors, place.world
        setting = _setting(self.case, world.processes)
        with setting.plan(world) as plan:
            ways = [str(of["transfer"])], [str(of["way"])]
            with open_cases(world, setting, plan, *ways, check=check) as cases:
                call = Call(cases[0].run)
                if check:
                    spec = setting.spec
                    described = plan.describe(spec.dtype, spec.trail)
                    call.outcomes |= {
                        "payload_bytes": max(world.gather(setting.sent_bytes(plan))),
                        "wire_bytes": max(each.sent_bytes for each in described.ranks),
                        "error": 0.0,
                    }
                yield call


def start(study: Study, case: Case, directory: Path) -> _Halo:
    """Return a case of the kind "halo", about to be measured."""
    return _Halo(case, study.measure, directory)


def _setting(case: Case, ranks: int) -> Setting:
    of = case.factors
    grids = {"rows": [ranks, 1], "columns": [1, ranks], "grid": balanced_grid(ranks, 2)}
    split = str(of["split"])
    widths = {"rows": (1, 0), "columns": (0, 1), "grid": (1, 1)}[split]
    raw: dict[str, Any] = {
        "shape": [of["rows"], of["columns"]],
        "procs": grids[split],
        "halo": [int(of["halo"]) * n for n in widths],
        "boundary": of["boundary"],
        "dtype": of["dtype"],
        "trail": [of["values"]] if int(of["values"]) > 1 else [],
        "wire": of["wire"],
    }
    return Setting("halo", spec_of(raw, f"case {case.id}"))
