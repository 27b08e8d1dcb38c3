"""All checks of the table, one after the other, even if some fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ...store import StoreError
from ...world.mpi import World
from ...world.ranks import Ranks
from ..provenance import attributes
from . import base, exact, speed, there
from .results import NOT_RUN, RIGHT, CheckRow, Results, joined, read_writer
from .watch import GRACE_S, Guard, Watch

# Speeds come before exactness, whose many casts of a GPU are not all compiled apart.
CHECKS: base.Checks = there.CHECKS | speed.CHECKS | exact.CHECKS | speed.OTHERS


class VerifyOptions(NamedTuple):
    """The user's options; device: "cpu", or "gpu" for the CPU and the GPU.

    limit_s: for each check in place of its own, or None; grace_s: see watch.GRACE_S
    """

    out: Path
    device: str = "cpu"
    quick: bool = False
    oversubscribe: bool = False
    limit_s: float | None = None
    grace_s: float = GRACE_S


def planned(checks: base.Checks, device: str) -> Iterator[tuple[str, base.Check, str]]:
    """Yield the name, the row and the device of all checks, in order."""
    for name, check in checks.items():
        for each in check.devices:
            if each == "cpu" or each == device:
                several = f"{name} on the {base.DEVICES[each]}"
                yield name if check.devices == ("cpu",) else several, check, each


def verify(
    world: World,
    asked: VerifyOptions,
    say: Callable[[str], None],
    finish: Callable[[Results], None],
    checks: base.Checks = CHECKS,
) -> tuple[int, bool]:
    """Carry out all checks and write the file after each; return the exit status. Collective.

    The status is 1 if anything is wrong, or if the file cannot be written. Also returns whether MPI
    can end as usual: it cannot if ranks or messages are abandoned.

    say: prints a line; finish: writes further files of the results, on the first rank that is left
    """
    import_module("h5py")  # now: a rank that writes once another died has less than a second for it
    plan = list(planned(checks, asked.device))
    results = Results(_title(world), len(plan), dict(attributes(world)))
    results.attributes |= {"device": asked.device, "quick": int(asked.quick)}
    results.attributes["writer"] = world.process
    watch = Watch(world, asked.grace_s)

    def save(why: str) -> None:
        """Write and print the results before the job ends; called by the guard's thread."""
        under_way = plan[len(results.rows)][0] if len(results.rows) < len(plan) else "the end"
        results.keep()
        results.write(asked.out, f"{why} in {under_way}")
        if results.unwritten:
            say(results.unwritten)
        say(results.verdict)
        finished()

    def finished() -> bool:
        """Write further files of the results; return whether they could be written."""
        try:
            finish(results)
        except StoreError as error:
            say(str(error))
            return False
        return True

    def overtaken() -> bool:
        """Return whether another process has continued without this one, and written the file."""
        return read_writer(asked.out) not in (-1, world.process)

    with Guard(world, watch, save, overtaken).watching():
        _carry_out(watch, plan, asked, results, say)
        status = None
        if watch.first:
            results.write(asked.out, "")
            whole = finished() and not results.unwritten
            say(results.unwritten or f"wrote {asked.out}")
            say(results.verdict)
            status = 0 if results.right and whole else 1
        return watch.part(status, limit_s=300.0), not watch.dirty


def _title(world: Ranks) -> str:
    return f"Verification on {world.ranks} rank{'s' * (world.ranks > 1)}"


def _carry_out(
    watch: Watch,
    plan: list[tuple[str, base.Check, str]],
    asked: VerifyOptions,
    results: Results,
    say: Callable[[str], None],
) -> None:
    place = base.CheckPlace(watch.world(), asked.quick, "cpu", asked.device, asked.oversubscribe)
    trouble = ""  # of the GPU, which is not used after it
    for name, check, device in plan:
        if watch.first:
            results.write(asked.out, f"no message came any more in {name}")
        limit_s = (base.QUICK_LIMIT_S if asked.quick else base.LIMIT_S) + base.GPU_LIMIT_S * (
            device == "gpu"
        )
        limit_s = asked.limit_s or limit_s
        run: Callable[[], base.CheckResult] = partial(check.run, place)
        if device == "gpu" and trouble:
            run = partial(base.CheckResult, not_run=trouble)
        place.device = device
        place.world.timeout_s = limit_s
        if device == "gpu" and not trouble:
            from ...ops.gpu_runtime import wait_at_most

            wait_at_most(limit_s)
        before = set(watch.alive)
        outcomes = watch.meet(watch.carry_out(run, limit_s))
        status, said = joined(outcomes, sorted(before - set(outcomes)))
        founds = [each.found for each in outcomes.values() if each.found is not None]
        time_s = max(each.time_s for each in outcomes.values())
        counted = sum(found.counted for found in founds)
        row = CheckRow(name, check.section, check.what, device, status, counted, time_s, said)
        results.add(row, founds[0] if founds else None)
        if watch.first:
            say(_line(row))
        if name == "GPUs" and status != RIGHT:
            trouble = f"there is no GPU to use: {said[0]}"
        if any(each.on_gpu for each in outcomes.values()):
            trouble = f"the GPU failed in {name}"
        if any(each.left for each in outcomes.values()) or len(outcomes) < len(before):
            watch.dirty = True
            watch.keep(place.world)
            world = watch.world()
            world.shares_gpus = place.world.shares_gpus
            place.world = world


def _line(row: CheckRow) -> str:
    shown = f"  {row.status:>7}  {row.name}"
    if row.status == NOT_RUN:
        return f"{shown}: {'; '.join(row.said)}"
    counted = f": {row.counted:,}" if row.counted else ""
    return "\n".join(
        [f"{shown}{counted} in {row.time_s:.1f} s", *(f"{'':11}{line}" for line in row.said)]
    )
