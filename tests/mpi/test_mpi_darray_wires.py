"""Packed wires on windows: what arrives is the reference codec's, own cells stay exact."""

from typing import Any

import numpy as np
import pytest
from darray_cases import Case, cells_shown, draw_layout, draw_window, own, shown

from cpdhpc.darray.layout import Box
from cpdhpc.darray.plan import WindowPlan
from cpdhpc.formats import TILE, Cast, parse_format, tiles
from cpdhpc.ops import reference
from cpdhpc.world.mpi import World

WIRES = ["e4m3", "e5m2", "e4m3fn", "e2m1fn", "bf16", "e8m23"]
MODES = [("wrap", "reflect"), ("edge", "symmetric"), ("zero", "wrap")]


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "messages"])
def world(request: pytest.FixtureRequest) -> Any:
    """All ranks; what they send goes through memory that they share, or through MPI."""
    world = World(timeout_s=600, share_memory=request.param)
    yield world
    world.free()


def rounded(values: np.ndarray, wire: str) -> np.ndarray:
    """What a message of float32 decodes to, tile by tile, by the reference."""
    fmt = parse_format(wire)
    words = np.zeros(tiles(values.size) * 128 * fmt.bits, np.uint8)
    shifts, out = np.zeros(tiles(values.size), np.uint8), np.empty_like(values)
    reference.encode_tiles(
        values, Cast(fmt), words, shifts, fit=True, key=(0, 0), offset=0
    )  # by nearest: no random bits
    reference.decode_tiles(words, shifts, fmt, out)
    return out


def draw_case(world: World, number: int) -> Case:
    """Windows of up to some tiles, cells with 40 further values."""
    rng = np.random.default_rng((5, number, world.size))
    shape = tuple(rng.integers(3, 9, 2).tolist())
    layout = draw_layout(rng, shape, world.size)
    windows = tuple(draw_window(rng, shape, owned) for owned in layout.owners)
    return Case((number,), layout, windows, MODES[number % 3], "numpy", "float32", (40,))


def from_others(case: Case, rank: int) -> np.ndarray:
    """Which cells of a rank's window show a cell that another rank owns, and whose: -1 if none."""
    owner = np.full(case.layout.shape, -1)
    for other, box in enumerate(case.layout.owners):
        if not box.empty:
            owner[box.slices((0,) * box.ndim)] = other
    cells = cells_shown(case, rank)
    found = np.where(cells >= 0, owner.ravel()[cells], -1)
    return np.where(found == rank, -1, found)


@pytest.mark.parametrize("wire", WIRES)
def test_what_arrives_is_what_the_reference_codec_gives(world: World, wire: str) -> None:
    """Message by message: the values that travel are told by a raw exchange of their numbers."""
    problems = []
    for number in range(4):
        case = draw_case(world, number)
        window, rank = case.windows[world.rank], world.rank
        data = case.rng(1).standard_normal((*case.layout.shape, 40))
        data = (data * 2.0 ** case.rng(2).integers(-20, 20, data.shape)).astype(np.float32)
        x = own(case, rank, data)
        packed = WindowPlan(world, case.layout, window, case.modes, wire=wire, name="packed")
        want = shown(data, window, case.modes)
        theirs = from_others(case, rank)
        for message in packed.recvs:  # pieces in their order are the message
            whole = [data[p.source.slices((0, 0))] for p in message.pieces]
            flat = rounded(np.concatenate([each.ravel() for each in whole]), wire)
            start = 0
            for piece, values in zip(message.pieces, whole, strict=True):
                part = flat[start : start + values.size].reshape(values.shape)
                start += values.size
                turned = part[tuple(slice(None, None, -1 if s < 0 else 1) for s in piece.steps)]
                want[piece.target.slices(window.start)] = turned
        given = shown(data, window, case.modes)
        for call in range(3):
            got = packed.exchange(x)
            if got.tobytes() != want.tobytes() or (got != given)[theirs < 0].any():
                problems.append(f"{wire} {number} call {call}")
        if wire == "e8m23" and got.tobytes() != given.tobytes():
            problems.append(f"{wire} {number}: float32 itself is not exact")
        packed.free()
    gathered = world.gather(problems)
    assert gathered == [[]] * world.size


def gathered(y: np.ndarray, window: Box, piece: Any) -> np.ndarray:
    """A piece of a window in the shape of its source; what shows one cell is added in order."""
    v = y[piece.target.slices(window.start)]
    v = v[tuple(slice(None, None, -1 if step < 0 else 1) for step in piece.steps)]
    repeats = [
        n if step == 0 else 1 for n, step in zip(piece.target.shape, piece.steps, strict=True)
    ]
    total = None
    for place in np.ndindex(*repeats):
        ends = zip(place, piece.steps, strict=True)
        part = v[tuple(slice(i, i + 1) if step == 0 else slice(None) for i, step in ends)]
        total = part if total is None else total + part
    return total


@pytest.mark.parametrize("wire", WIRES)
def test_sums_are_those_of_what_the_reference_codec_gives(world: World, wire: str) -> None:
    """Own cells first, then message by message in the order of the ranks, in float32."""
    problems, compared = [], 0
    for number in range(4):
        case = draw_case(world, number)
        ys = [case.rng(3, r).standard_normal((*box.shape, 40)).astype(np.float32)
              for r, box in enumerate(case.windows)]  # fmt: skip
        window = case.windows[world.rank]
        with WindowPlan(world, case.layout, window, case.modes) as raw:
            mine = [ys[world.rank] if r == world.rank else 0 * ys[world.rank]
                    for r in range(world.size)]  # fmt: skip
            total = [raw.accumulate(y) for y in mine][world.rank]  # what no message brings
            start = raw.owned.start
        with WindowPlan(world, case.layout, window, case.modes, wire=wire) as packed:
            for message in packed.sends:
                box = case.windows[message.rank]
                values = [gathered(ys[message.rank], box, p) for p in message.pieces]
                flat, at = rounded(np.concatenate([v.ravel() for v in values]), wire), 0
                for piece, v in zip(message.pieces, values, strict=True):
                    total[piece.source.slices(start)] += flat[at : at + v.size].reshape(v.shape)
                    at += v.size
            sums = [packed.accumulate(ys[world.rank]) for _ in range(2)]
            compared += len(packed.sends)
        if any(each.tobytes() != total.tobytes() for each in sums):
            problems.append(f"{wire} {number}")
    assert world.gather(problems) == [[]] * world.size and sum(world.gather(compared)) >= 2


def test_payloads_are_as_small_as_the_format(world: World) -> None:
    """Whole tiles, and a byte for each: what describe says and what the world counts."""
    case = draw_case(world, 0)
    with WindowPlan(world, case.layout, case.windows[world.rank], case.modes, wire="e4m3") as plan:
        before = int(world.bytes_sent[0])
        plan.exchange(np.zeros((*plan.owned.shape, 40), np.float32))
        sent = int(world.bytes_sent[0]) - before
        told = plan.describe(trail=(40,)).ranks[world.rank].sent_bytes
        tiles_sent = [-(-message.cells * 40 // TILE) for message in plan.sends]
    assert world.gather((sent, told, told)) == world.gather((told, sum(tiles_sent) * 1025, sent))
