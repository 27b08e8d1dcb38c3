"""The halo benchmark on real ranks: results checked, faults found; messages that are lent."""

import time
from argparse import ArgumentParser
from dataclasses import replace

import numpy as np
import pytest

from cpdhpc.darray.layout import Box, Layout
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.lab.bench import halo
from cpdhpc.lab.bench.halo import ALL_WAYS, OPERATIONS
from cpdhpc.lab.bench.stencil import BLOCKING, OVERLAPPED, WITH_PROGRESS, Stencil, check
from cpdhpc.lab.darray_show import spec_of
from cpdhpc.lab.kinds.halo import HALO
from cpdhpc.lab.kinds.halo_cases import COPIED, OURS, WAYS, Setting, open_cases
from cpdhpc.lab.kinds.place import JobRanks
from cpdhpc.lab.study_data import Case
from cpdhpc.ops import moves

LATE_S = 120.0
SPECS = {
    "rows": {"shape": [13, 6], "halo": [2, 0], "boundary": "none", "trail": [3]},
    "wrap": {"shape": [13, 6], "halo": 2, "boundary": "wrap", "dtype": "float16"},
    "filled": {"shape": [9, 4], "halo": [[1, 0], 2], "boundary": "constant:3", "dtype": "int8"},
    "mirrored": {"shape": [9, 4], "halo": [3, 0], "boundary": "reflect", "dtype": "complex64"},
    "packed": {"shape": [40, 60], "halo": [2, 0], "boundary": "zero", "wire": "e3m0"},
}


def setting(name, ranks):
    return Setting(name, spec_of({"procs": [ranks, 1], **SPECS[name]}, name))


@pytest.mark.parametrize("name", SPECS)
def test_all_ways_give_what_is_wanted(world, name):
    case = setting(name, world.size)
    with case.plan(world) as plan, open_cases(world, case, plan, OPERATIONS, ALL_WAYS) as cases:
        ways = {each.way for each in cases}
        for each in cases:  # again, over what programs and persistent requests left
            each.check(world)
    mirrored = name == "mirrored"
    assert ways == set(ALL_WAYS) - (set(WAYS) if mirrored else set())
    assert len(cases) == 2 * len(ways)


@pytest.mark.two_ranks
def test_all_ways_give_what_is_wanted_on_gpus(gpu):
    """MPI's own where it takes their memory; a wrong cell is noticed there, too."""
    world, verdict = gpu.world, []
    for name in SPECS:
        case = setting(name, world.size)
        with case.plan(world) as plan:
            given = world, case, plan, OPERATIONS, ALL_WAYS
            with open_cases(*given, device="gpu") as cases:
                ways = set(ALL_WAYS) if gpu.direct and name != "mirrored" else {OURS, COPIED}
                verdict.append({each.way for each in cases} == ways)
                verdict.append(all(isinstance(each.out, gpu.cupy.ndarray) for each in cases))
                for each in cases:
                    each.check(world)
                cases[0].expected[...] += world.rank == 0
                with pytest.raises(ArithmeticError, match=r"values are wrong, the first on rank 0"):
                    cases[0].check(world)
    assert world.gather(verdict) == [[True] * len(verdict)] * world.size


def test_a_wrong_cell_on_one_rank_is_an_error_on_all(world):
    case = setting("rows", world.size)
    with case.plan(world) as plan, open_cases(world, case, plan, ["exchange"], [OURS]) as cases:

        def run():
            cases[0].run()
            if world.rank == world.size - 1:
                cases[0].out[0, 0, 0] += 1

        last = world.size - 1
        with pytest.raises(ArithmeticError, match=f"1 values are wrong, the first on rank {last}"):
            replace(cases[0], run=run).check(world)


def test_the_benchmark_runs(world, capsys):
    parser = ArgumentParser()
    halo.add_arguments(parser)
    words = "--operations exchange,accumulate --repeats 2 --warmup 1 --calls 2"
    shape = f"--shape {4 * world.size},5 --halo 1,0"
    halo.run(parser.parse_args([*words.split(), *shape.split()]), world)
    halo.run(parser.parse_args([*words.split(), *shape.split(), "--overlap", "--link", "1"]), world)
    out = world.gather(capsys.readouterr().out)[0]
    lines = [line for line in out.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 2 * len(ALL_WAYS) + 6
    assert "results equal in every bit" in out and WITH_PROGRESS in out


def test_overlap_that_reads_the_halo_too_early_is_noticed(world):
    case = setting("rows", world.size)
    with case.plan(world) as plan:
        window = np.empty((*plan.window.shape, 3), np.float32)
        stencil = Stencil(plan, case, window, 1)
        own = plan.inside(window)

        def right():
            plan.exchange(own, window)
            stencil.compute(stencil.whole)

        def early():
            handle = plan.begin(own, window)
            stencil.compute(stencil.whole)
            handle.finish()

        cases = dict.fromkeys((BLOCKING, OVERLAPPED, WITH_PROGRESS), right)
        check(world, plan, window, stencil, cases)
        with pytest.raises(ArithmeticError, match="differ, or hold NaN"):
            check(world, plan, window, stencil, cases | {OVERLAPPED: early})


def lent_plan(world, halo_cells=90):
    """A plan with messages of more than 64 KiB that lie together: of 300 float64 a row."""
    layout = Layout.grid((100 * world.size, 300), (world.size, 1))
    start, stop = layout.owner(world.rank).start[0], layout.owner(world.rank).stop[0]
    window = Box((start - halo_cells, 0), (stop + halo_cells, 300))
    return WindowPlan(world, layout, window, "edge", name="lent")


def numbers(plan, rows, call):
    """What the cells of some rows hold in a call."""
    cells = np.clip(np.arange(rows.start, rows.stop), 0, plan.layout.shape[0] - 1)
    return cells[:, None] * 1000.0 + np.arange(300) + call


@pytest.mark.parametrize("form", ["blocking", "strided", "begun", "by slices"])
def test_messages_that_are_lent_arrive_whatever_the_receiver_does(world, form):
    with lent_plan(world) as plan:
        odd = world.rank % 2 == 1
        for call in range(5):
            x = numbers(plan, range(plan.owned.start[0], plan.owned.stop[0]), call)
            wanted = numbers(plan, range(plan.window.start[0], plan.window.stop[0]), call)
            if form == "strided" and odd:  # shown in a part of a larger array
                y = plan.exchange(x, np.zeros((wanted.shape[0], 600))[:, ::2])
            elif form == "begun" and odd:
                handle = plan.begin(x)
                while not handle.progress():
                    pass
                y = handle.finish()
                assert handle.progress()
            else:
                if form == "by slices" and odd:  # as arrays on a GPU are received
                    plan.last.clear()
                    for channel in plan.channels.values():
                        channel.compiled = False
                y = plan.exchange(x)
            same = np.array_equal(y, wanted)
            x[:] = -1  # may be changed at once
            assert all(world.gather(same)), (form, call)
        if world.shared() is not None and world.shared().lends:
            (channel,) = plan.channels.values()
            programs = channel.programs.values()
            lent = any((program._rows["op"] == moves.LEND).any() for program in programs)
            assert all(world.gather(lent or odd))


def error_of(world, **changes):
    """The error that a study of halos records."""
    given = {name: each.default for name, each in HALO.factors.items() if name != "device"}
    given |= {"rows": 40 * world.size, "columns": 50, "values": 3, "halo": 4, "boundary": "wrap"}
    case = Case("case", HALO.used(given | changes), 1, world.size)
    with HALO.measure(None, case, JobRanks(world), True) as call:
        call.run()
        return call.outcomes["error"]


@pytest.mark.two_ranks
@pytest.mark.parametrize("transfer", ["exchange", "accumulate"])
def test_studies_record_the_error_of_what_travels(world, transfer):
    """Of 48 lines of a window, or summed up in 40, 8 travel; the others are exact.

    A value's error is at most 2 ** -(m + 1) of it, and with normal data the root of its mean
    square is 0.424 of that (found with NumPy's frexp and rint). Of 2 * 1,200 values that travel,
    it differs by some per cent.
    """
    assert error_of(world, transfer=transfer) == 0  # raw
    for wire, bits in ("e4m3", 3), ("e5m10", 10):
        most = 2.0 ** -(bits + 1) * (8 / 48) ** 0.5
        found = error_of(world, transfer=transfer, wire=wire)
        assert found == pytest.approx(0.424 * most, rel=0.1)
        assert len(set(world.gather(found))) == 1


@pytest.mark.two_ranks
def test_a_sender_does_not_wait_for_a_late_reader(world, folder):
    """The last rank reads once the others have sent, or tells after LATE_S that they have not."""
    layout = Layout.grid((100 * world.size, 300), (world.size, 1))
    mine, last = layout.owner(world.rank), world.size - 1
    window = layout.domain if world.rank == last else mine
    with WindowPlan(world, layout, window) as plan:
        for call in range(2):
            x = numbers(plan, range(mine.start[0], mine.stop[0]), call)
            end_s = time.monotonic() + LATE_S
            names = {f"{call}-{rank}" for rank in range(world.size) if rank != last}
            while world.rank == last and not names <= {path.name for path in folder.iterdir()}:
                if time.monotonic() > end_s:
                    break
                time.sleep(0.01)
            all_sent = time.monotonic() < end_s
            y = plan.exchange(x)
            (folder / f"{call}-{world.rank}").touch()
            x[:] = -1
            right = np.array_equal(y, numbers(plan, range(window.start[0], window.stop[0]), call))
            assert set(world.gather((right, all_sent))) == {(True, True)}
